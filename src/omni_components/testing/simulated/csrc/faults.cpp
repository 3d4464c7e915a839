// Faults on demand, and the one place that calls back into Python: it must not hold the lock.
#include "state.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

struct Point {
  const char* name;
  const char* message;
};
constexpr Point kPoints[kFaultPoints] = {
    {"copy", "simulated accelerator: injected copy failure"},
    {"allocation", "simulated accelerator out of memory: injected allocation failure"},
    {"pin", "simulated accelerator: injected pin failure"},
};

bool due(Fault& fault) {
  if (fault.after < 0) return false;
  if (fault.after > 0) {
    --fault.after;
    return false;
  }
  if (!fault.persistent) fault.after = -1;
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
  pybind11::gil_scoped_acquire gil;
  PyObject* answer = PyObject_CallFunction(chooser, "n", static_cast<Py_ssize_t>(count));
  long choice = answer ? PyLong_AsLong(answer) : -1;
  Py_XDECREF(answer);
  if (PyErr_Occurred()) throw_python_error();
  return choice;
}

}  // namespace

void maybe_fail(FaultPoint point, int index) {
  PyObject* error = nullptr;
  {
    Lock lock;
    auto& fault = leader_of(index).faults[point];
    if (!device(index).active || !due(fault)) return;
    error = fault.error;
  }
  if (error) raise(error, kPoints[point].message);
  if (point == kAllocationFault) C10_THROW_ERROR(OutOfMemoryError, kPoints[point].message);
  TORCH_CHECK(false, kPoints[point].message);
}

void consider_running() {
  std::vector<int> queued;
  PyObject* chooser = nullptr;
  {
    Lock lock;
    int leader = device(current_device()).leader;
    if (device(leader).order != CopyOrder::kDrawn) return;
    chooser = device(leader).chooser;
    queued = unfinished_streams(leader);
  }
  if (queued.empty()) return;
  long choice = ask(chooser, queued.size());
  Lock lock;
  if (choice < 1 || choice > static_cast<long>(queued.size())) return;  // none runs now
  int slot = queued[choice - 1];
  if (anything_queued(slot)) run_until(slot, stream(slot).queue.front().epoch);
}

}  // namespace sim
