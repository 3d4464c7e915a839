// What Python sees, and what torch asks an accelerator for.
#include "random.h"
#include "state.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {

void register_host_kernels();
void register_autocast();

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return active_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return active_devices() > 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(active_devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  at::Device getDeviceFromPtr(void*) const override {
    return at::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
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
  for (const auto& race : found)
    list.append(py::make_tuple(race.kind, race.first, race.first_stream, race.second, race.second_stream,
                               race.label, race.where, race.address, race.bytes));
  return list;
}

// Puts a fault in place; the exception type is kept alive for as long as the fault may raise it.
void set_fault(int leader, const std::string& point, int64_t after, bool persistent, PyObject* error) {
  static const std::map<std::string, FaultPoint> points{
      {"copy", kCopyFault}, {"allocation", kAllocationFault}, {"pin", kPinFault}};
  auto which = points.at(point);
  Py_XINCREF(error);  // Never given back: an exception type lives as long as its module anyway.
  Lock lock;
  device(leader).faults[which] = {after, persistent, error};
}

void set_order(int leader, const std::string& order, PyObject* chooser) {
  Py_XINCREF(chooser);
  PyObject* old = nullptr;
  {
    Lock lock;
    auto& d = device(leader);
    d.order = order == "eager" ? CopyOrder::kEager : order == "drawn" ? CopyOrder::kDrawn : CopyOrder::kLazy;
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
  for (auto& fault : lead.faults) fault = Fault();
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
  for (int index = 0; index < kDevices; ++index)
    if (device(index).leader == leader) device(index).capacity = settings.capacity < 0 ? kUnlimited : settings.capacity;
}
PyObject* or_null(const py::object& object) { return object.is_none() ? nullptr : object.ptr(); }

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  register_host_kernels();
  register_autocast();
  m.def("open", &open_devices);
  m.def("close", [](int leader) {
    set_order(leader, "lazy", nullptr);
    close_devices(leader);
  });
  m.def("configure", [](int leader, int64_t capacity, int64_t pinned_capacity, bool poison, double speed, double latency) {
    configure(leader, {capacity, pinned_capacity, poison, speed, latency});
  });
  m.def("stats", &stats);
  m.def("reset", &reset);
  m.def("races", &races);
  m.def("clear_races", [](int leader) {
    Lock lock;
    device(leader).races.clear();
  });
  m.def("set_fault", [](int leader, const std::string& point, int64_t after, bool persistent, const py::object& error) {
    set_fault(leader, point, after, persistent, or_null(error));
  });
  m.def("set_order", [](int leader, const std::string& order, const py::object& chooser) {
    set_order(leader, order, or_null(chooser));
  });
  m.def("current_device", &current_device);
  m.def("active_devices", &active_devices);
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("label", [](uintptr_t memory, int64_t bytes, std::string name) {
    Lock lock;
    set_label(reinterpret_cast<void*>(memory), static_cast<size_t>(bytes), std::move(name));
  });
  m.def("clear_labels", [] {
    Lock lock;
    clear_labels();
  });
}
