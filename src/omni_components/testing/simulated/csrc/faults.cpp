// Faults on demand, and all that calls back into Python. None of it may hold the lock while it does.
#include "state.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

constexpr const char* kMessages[kFaultPoints] = {
    "simulated accelerator: injected copy failure",
    "simulated accelerator out of memory: injected allocation failure",
    "simulated accelerator: injected pin failure",
    "simulated accelerator: injected step failure",
};
PyObject* locator = nullptr;

bool due(Fault& fault) {
  if (fault.after < 0) return false;
  if (fault.after > 0) {
    --fault.after;
    return false;
  }
  if (!fault.persistent) fault.after = -1;
  ++fault.hits;
  return true;
}

// As torch carries a Python exception through C++ code that does not hold the GIL.
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}
[[noreturn]] void raise(PyObject* type, const char* message) {
  pybind11::gil_scoped_acquire gil;
  PyErr_SetString(type, message);
  throw_python_error();
}

std::vector<int> unfinished_streams(int leader) {
  std::vector<int> found;
  for (int slot = 0; slot < kSlots; ++slot)
    if (device(device_of(slot)).leader == leader && anything_queued(slot)) found.push_back(slot);
  return found;
}
long ask(PyObject* chooser, size_t count) {
  PyObject* answer = PyObject_CallFunction(chooser, "n", static_cast<Py_ssize_t>(count));
  long choice = answer ? PyLong_AsLong(answer) : -1;
  Py_XDECREF(answer);
  if (PyErr_Occurred()) throw_python_error();
  return choice;
}
bool is_drawn() {
  Lock lock;
  return leader_of(current_device()).order == CopyOrder::kDrawn;
}
// The chooser, held for us, and the streams it may choose from; null if there is nothing to choose.
PyObject* take_chooser(std::vector<int>& queued) {
  Lock lock;
  int leader = device(current_device()).leader;
  queued = unfinished_streams(leader);
  PyObject* chooser = queued.empty() ? nullptr : device(leader).chooser;
  Py_XINCREF(chooser);
  return chooser;
}

std::string caller() {
  pybind11::gil_scoped_acquire gil;
  PyObject* answer = PyObject_CallNoArgs(locator);
  const char* text = answer ? PyUnicode_AsUTF8(answer) : nullptr;
  std::string where = text ? text : "";
  Py_XDECREF(answer);
  if (PyErr_Occurred()) throw_python_error();
  return where;
}

}  // namespace

static void fail_here(FaultPoint point, int index) {
  PyObject* error = nullptr;
  {
    Lock lock;
    auto& fault = leader_of(index).faults[point];
    if (!device(index).active || !due(fault)) return;
    error = fault.error;
  }
  if (error) raise(error, kMessages[point]);
  if (point == kAllocationFault) C10_THROW_ERROR(OutOfMemoryError, kMessages[point]);
  TORCH_CHECK(false, kMessages[point]);
}
void maybe_fail(FaultPoint point, int index) {
  fail_here(kStepFault, index);
  if (point != kStepFault) fail_here(point, index);
}

void consider_running() {
  if (!is_drawn()) return;
  std::vector<int> queued;
  long choice = 0;
  {
    pybind11::gil_scoped_acquire gil;  // before the lock, as everywhere
    auto chooser = pybind11::reinterpret_steal<pybind11::object>(take_chooser(queued));
    if (!chooser) return;
    choice = ask(chooser.ptr(), queued.size());
  }
  Lock lock;
  if (choice < 1 || choice > static_cast<long>(queued.size())) return;  // none runs now
  int slot = queued[choice - 1];
  if (anything_queued(slot)) run_until(slot, stream(slot).queue.front().epoch);
}

void set_locator(PyObject* callable) { locator = callable; }

void locate_races(int index) {
  auto unlocated = [&](auto visit) {
    Lock lock;
    auto& races = leader_of(index).races;
    for (auto race = races.rbegin(); race != races.rend() && !race->located; ++race) visit(*race);
  };
  bool any = false;
  unlocated([&](Race&) { any = true; });
  if (!any || !locator) return;
  auto where = caller();
  unlocated([&](Race& race) {
    race.located = true;
    if (race.second_stream != "host") race.where = where;
  });
}

}  // namespace sim
