// What Python sees, and what torch asks an accelerator for.
#include "random.h"
#include "tensors.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {

void register_host_kernels();
void register_autocast();

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;

  bool isBuilt() const override { return true; }
  // Only while a SimulatedAccelerator is open: elsewhere this is a machine without an accelerator.
  bool isAvailable() const override { return active_devices() > 0; }
  bool hasPrimaryContext(Index) const override { return active_devices() > 0; }
  Index deviceCount() const override { return static_cast<Index>(active_devices()); }
  Index getCurrentDevice() const override { return static_cast<Index>(current_device()); }
  const at::Generator& getDefaultGenerator(Index index) const override { return default_generator(index); }
  at::Generator getNewGenerator(Index index) const override { return new_generator(index); }
  at::Device getDeviceFromPtr(void*) const override {
    return at::Device(c10::DeviceType::PrivateUse1, static_cast<Index>(current_device()));
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// Copied under the lock, handed to Python after it: building Python objects may let another thread run.
std::pair<Counters, int64_t> read_counters(int index) {
  Lock lock;
  settle();
  return {device(index).n, leader_of(index).n.pinned};
}
py::dict stats(int index) {
  auto [n, pinned] = read_counters(index);
  py::dict d;
  d["allocated"] = n.allocated;
  d["peak"] = n.peak;
  d["allocations"] = n.allocations;
  d["h2d_bytes"] = n.h2d_bytes;
  d["h2d_copies"] = n.h2d_copies;
  d["d2h_bytes"] = n.d2h_bytes;
  d["d2h_copies"] = n.d2h_copies;
  d["pinned"] = pinned;
  d["syncs"] = n.syncs;
  d["host_waits"] = n.host_waits;
  d["flushes"] = n.flushes;
  return d;
}

py::list races(int index) {
  std::vector<Race> found;
  {
    Lock lock;
    found = leader_of(index).races;
  }
  py::list list;
  for (const auto& race : found) {
    py::dict d;
    d["kind"] = race.kind;
    d["first"] = race.first;
    d["first_stream"] = race.first_stream;
    d["second"] = race.second;
    d["second_stream"] = race.second_stream;
    d["label"] = race.label;
    d["where"] = race.where;
    d["address"] = race.address;
    d["bytes"] = race.bytes;
    list.append(d);
  }
  return list;
}

FaultPoint point_named(const std::string& name) {
  static const std::map<std::string, FaultPoint> points{
      {"copy", kCopyFault}, {"allocation", kAllocationFault}, {"pin", kPinFault}, {"step", kStepFault}};
  return points.at(name);
}
// Puts a fault in place; the exception type is kept alive for as long as the fault may raise it.
void set_fault(int leader, const std::string& point, int64_t after, bool persistent, PyObject* error) {
  auto which = point_named(point);
  Py_XINCREF(error);  // Never given back: an exception type lives as long as its module anyway.
  Lock lock;
  device(leader).faults[which] = {after, persistent, error};
}
int64_t fault_hits(int leader, const std::string& point) {
  Lock lock;
  return device(leader).faults[point_named(point)].hits;
}

void set_order(int leader, const std::string& order, PyObject* chooser) {
  Py_XINCREF(chooser);
  PyObject* old = nullptr;
  {
    Lock lock;
    auto& d = device(leader);
    for (int index = 0; index < kDevices; ++index)  // what waits under the old order comes first
      if (order == "engine" && device(index).leader == leader) run_all(index);
    d.order = order == "eager" ? CopyOrder::kEager
        : order == "drawn"     ? CopyOrder::kDrawn
        : order == "engine"    ? CopyOrder::kEngine
                               : CopyOrder::kLazy;
    old = std::exchange(d.chooser, chooser);
  }
  Py_XDECREF(old);
}

void reset(int leader) {
  Lock lock;
  for (int index = 0; index < kDevices; ++index) {
    auto& d = device(index);
    if (!d.active || d.leader != leader) continue;
    Counters fresh;
    fresh.allocated = fresh.peak = d.n.allocated;
    fresh.pinned = d.n.pinned;
    d.n = fresh;
  }
  auto& lead = device(leader);
  lead.races.clear();
  lead.epoch_time = now_of(leader);
  for (auto& fault : lead.faults) fault = Fault();
}
double seconds(int leader) {
  Lock lock;
  return now_of(leader) - device(leader).epoch_time;
}
// Occupies the current stream, as a kernel would.
void spend(int index, double amount) {
  Lock lock;
  auto& s = stream(current_slot(index));
  s.free_at = std::max(s.free_at, leader_of(index).host_time) + amount;
}
void drain(int leader) {
  Lock lock;
  for (int index = 0; index < kDevices; ++index)
    if (device(index).leader == leader) run_all(index);
}

struct Settings {
  int64_t capacity, pinned_capacity;
  bool poison;
  double bytes_per_second, latency;
};
void configure(int leader, const Settings& settings) {
  Lock lock;
  auto& lead = device(leader);
  lead.pinned_capacity = settings.pinned_capacity < 0 ? kUnlimited : settings.pinned_capacity;
  lead.poison = settings.poison;
  lead.bytes_per_second = settings.bytes_per_second;
  lead.latency = settings.latency;
  auto capacity = settings.capacity < 0 ? kUnlimited : settings.capacity;
  for (int index = 0; index < kDevices; ++index)
    if (device(index).leader == leader) device(index).capacity = capacity;
}
PyObject* or_null(const py::object& object) { return object.is_none() ? nullptr : object.ptr(); }

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  register_host_kernels();
  register_autocast();
  py::class_<Settings>(m, "Settings")
      .def(py::init<int64_t, int64_t, bool, double, double>(), py::kw_only(), py::arg("capacity"),
           py::arg("pinned_capacity"), py::arg("poison"), py::arg("bytes_per_second"), py::arg("latency"));
  m.def("open", &open_devices);
  m.def("configure", &configure);
  m.def("drain", &drain);
  m.def("close", [](int leader) {
    set_order(leader, "lazy", nullptr);
    close_devices(leader);
  });
  m.def("stats", &stats);
  m.def("seconds", &seconds);
  m.def("spend", &spend);
  m.def("reset", &reset);
  m.def("races", &races);
  m.def("clear_races", [](int leader) {
    Lock lock;
    device(leader).races.clear();
  });
  m.def("set_locator", [](const py::object& callable) { set_locator(callable.inc_ref().ptr()); });
  m.def("set_fault", [](int leader, const std::string& point, int64_t after, bool persistent,
                        const py::object& error) {
    set_fault(leader, point, after, persistent, or_null(error));
  });
  m.def("fault_hits", &fault_hits);
  m.def("set_order", [](int leader, const std::string& order, const py::object& chooser) {
    set_order(leader, order, or_null(chooser));
  });
  m.def("current_device", &current_device);
  m.def("active_devices", &active_devices);
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("revoke", &sim::revoke);
  m.def("restore", &sim::restore);
  m.def("poisons", [](int index) {
    Lock lock;
    return leader_of(index).poison;
  });
  m.def("label", [](uintptr_t memory, int64_t bytes, std::string name) {
    Lock lock;
    set_label(reinterpret_cast<void*>(memory), static_cast<size_t>(bytes), std::move(name));
  });
}
