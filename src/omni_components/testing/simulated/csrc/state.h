// What the files of the simulated accelerator share: the lock, the devices, streams and clocks, and the
// functions each file offers the others. Everything here is guarded by one process-wide lock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

struct _object;
using PyObject = _object;

namespace sim {

constexpr int kDevices = 4;
constexpr int kSideStreams = 32;  // per device, handed out in turn, as CUDA's pool is
constexpr int kSlots = kDevices * (1 + kSideStreams);
constexpr int64_t kUnlimited = INT64_MAX;

// --- the lock -----------------------------------------------------------------------------------

// Holds the process-wide lock. Nothing may take Python's GIL while it is held: a tensor freed by Python
// takes this lock with the GIL held. Objects whose destruction may need the GIL go through `bury`.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};
void bury(c10::Storage storage);  // destroyed once the outermost Lock is gone

// --- clocks -------------------------------------------------------------------------------------

// Operations of one stream are numbered by epochs; a clock says, per stream, which of them are known to
// be over. Access X happens before an operation iff the operation's clock has reached X's epoch.
using Epoch = int64_t;

class Clock {
 public:
  Epoch of(int slot) const { return slot < static_cast<int>(seen_.size()) ? seen_[slot] : 0; }
  void advance(int slot, Epoch epoch);
  void join(const Clock& other);

 private:
  std::vector<Epoch> seen_;
};

struct Access {
  int slot = -1;
  Epoch epoch = 0;
  const std::string* what = nullptr;  // interned, see `intern`
};
const std::string* intern(const std::string& text);

// --- devices ------------------------------------------------------------------------------------

struct Counters {
  int64_t allocated = 0, peak = 0, allocations = 0;
  int64_t h2d_bytes = 0, h2d_copies = 0, d2h_bytes = 0, d2h_copies = 0;
  int64_t pinned = 0, syncs = 0, host_waits = 0, flushes = 0;
};

struct Fault {
  int64_t after = -1;  // how many more succeed; negative: never fails
  bool persistent = false;
  PyObject* error = nullptr;  // an exception type, or null for the fault's usual error
  int64_t hits = 0;
};
enum FaultPoint { kCopyFault, kAllocationFault, kPinFault, kStepFault, kFaultPoints };

struct Race {
  std::string kind, first, first_stream, second, second_stream, label, where;
  uintptr_t address = 0;
  int64_t bytes = 0;
  bool located = false;
};

enum class CopyOrder { kLazy, kEager, kDrawn, kEngine };

// One device. Several devices of one SimulatedAccelerator share their leader's pinned memory, faults,
// races and settings.
struct Device {
  int leader = 0;
  bool active = false;
  int64_t generation = 0;  // memory of an earlier accelerator does not count in a later one
  Counters n;
  int64_t capacity = kUnlimited, pinned_capacity = kUnlimited;
  std::multimap<size_t, void*> cache;  // freed blocks by size
  int64_t cached = 0;
  // of leaders only
  bool poison = false;
  CopyOrder order = CopyOrder::kLazy;
  PyObject* chooser = nullptr;
  Fault faults[kFaultPoints];
  std::vector<Race> races;
  double bytes_per_second = 0, latency = 0;  // of the link; 0 bytes per second: takes no time
  double h2d_free_at = 0, d2h_free_at = 0;   // when each direction's copy engine is free
  double host_time = 0;
  double epoch_time = 0;  // `seconds` counts from here
};
Device& device(int index);
Device& leader_of(int index);
int open_devices(int count);  // returns the first index
void close_devices(int first);
int active_devices();

// Throws if a fault is due here; every point counts as a step too. Call it without the lock.
void maybe_fail(FaultPoint point, int device_index);
// Asks Python where the races found just now were issued. Call it without the lock.
void locate_races(int device_index);
void set_locator(PyObject* locator);
double now_of(int leader);  // virtual seconds until everything issued so far is done

// --- streams ------------------------------------------------------------------------------------

struct PendingCopy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  bool ran = false;
  uint64_t number = 0;   // of the move that the copy engine makes of it; 0: the engine has no part in it
  bool checked = false;  // `checksum` of the source was taken when the copy was issued
  uint64_t checksum = 0;
  Access access;
  c10::Storage host;  // Keep the host side alive: the copy still reads or writes it.
};
struct Work {  // either a copy or a wait for another stream
  Epoch epoch = 0;
  std::optional<PendingCopy> copy;
  int wait_slot = -1;
  Epoch wait_epoch = 0;
};
struct Stream {
  Clock knows;
  std::deque<Work> queue;
  double free_at = 0;  // virtual time
};
struct EventState {
  int slot = -1;
  Epoch epoch = 0;
  Clock knows;
  double at = 0;
};

int slot_of(const c10::Stream& stream);
int device_of(int slot);
std::string stream_name(int slot);
int current_device();
int current_slot(int device_index);
void restart_stream_pool(int device_index);  // so that stream names are the same in every run
Stream& stream(int slot);
Clock& host_clock();

// Begins an operation that runs at once: whatever its stream has queued runs first.
Access begin(int slot, const std::string* what);
// Numbers an operation without running the queue.
Access issue(int slot, const std::string* what);
void enqueue(PendingCopy copy);
void run_until(int slot, Epoch epoch);
void run_all(int device_index);
void run_overlapping(const void* memory, size_t bytes);
bool anything_queued(int slot);
void consider_running();  // asks the chooser, if any, whether a late copy runs now; not under the lock

EventState record_event(int slot);
void stream_waits(int slot, const EventState& event);
void host_waits(const EventState& event);
void host_waits_for(int slot);
bool is_over(const EventState& event);  // asking lets time pass

// Virtual time: a copy over the link occupies its stream and the link's direction.
void spend_on_link(int slot, int64_t bytes, bool to_device);

// --- the copy engine ----------------------------------------------------------------------------

// Moves bytes in the background, in the order of these calls; returns the move's number, from 1.
uint64_t start_moving(void* to, const void* from, size_t bytes);
bool has_moved(uint64_t number);
void wait_until_moved(uint64_t number);

// --- hazards ------------------------------------------------------------------------------------

void touch(const void* memory, size_t bytes, const Access& by, bool write);
void check_free(const void* memory, size_t bytes, int owner, const std::vector<int>& recorded);
void check_unregister(const void* memory, size_t bytes, int device_index);
void forget(const void* memory, size_t bytes);
void set_label(const void* memory, size_t bytes, std::string name);
std::string label_at(uintptr_t address, size_t bytes);
void report(Race race, int device_index);
uint64_t checksum(const void* memory, size_t bytes);

// --- memory -------------------------------------------------------------------------------------

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
c10::DataPtr allocate_on(size_t bytes, int device_index);
c10::DataPtr adopt(const c10::Storage& host, int device_index);  // host memory becomes device memory
// Gives a storage new memory of `bytes` bytes and keeps what fits of the old contents.
void resize_storage(c10::StorageImpl* storage, size_t bytes);
bool is_pinned(const void* memory, size_t bytes = 1);
void host_register(uintptr_t memory, int64_t bytes);
void host_unregister(uintptr_t memory);
void record_stream(const void* memory, const c10::Stream& stream);
void empty_cache(int device_index);
std::string mib(int64_t bytes);
void settle();  // frees what waited for a recorded stream that is done by now

}  // namespace sim
