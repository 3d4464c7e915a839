// Streams, clocks and the virtual time they take.
//
// A stream runs everything in the order it was issued. Kernels run when they are issued. Non-blocking
// copies between the device and pinned memory wait in their stream's queue until somebody needs them:
// a later operation of that stream, an operation of a stream that waits for it, or the host. A missing
// wait therefore computes on memory that has not arrived, as it would on an unlucky accelerator. With a
// copy engine they are under way from the start, and whoever needs them waits for the rest.
#include "state.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace sim {
namespace {

// State is never destroyed: tensors may outlive this library's static objects at exit.
auto& process_lock = *new std::recursive_mutex;
auto& graveyard = *new std::vector<c10::Storage>;
auto& streams = *new std::array<Stream, kSlots>;
auto& host = *new Clock;
int lock_depth = 0;
int64_t queued_items = 0;

}  // namespace

Lock::Lock() {
  process_lock.lock();
  ++lock_depth;
}
Lock::~Lock() {
  std::vector<c10::Storage> dead;
  if (--lock_depth == 0) dead.swap(graveyard);
  process_lock.unlock();
}
void bury(c10::Storage storage) { graveyard.push_back(std::move(storage)); }

void Clock::advance(int slot, Epoch epoch) {
  if (slot >= static_cast<int>(seen_.size())) seen_.resize(slot + 1, 0);
  seen_[slot] = std::max(seen_[slot], epoch);
}
void Clock::join(const Clock& other) {
  if (other.seen_.size() > seen_.size()) seen_.resize(other.seen_.size(), 0);
  for (size_t i = 0; i < other.seen_.size(); ++i) seen_[i] = std::max(seen_[i], other.seen_[i]);
}

const std::string* intern(const std::string& text) {
  static auto& names = *new std::unordered_set<std::string>;
  Lock lock;
  return &*names.insert(text).first;
}

// --- names --------------------------------------------------------------------------------------
// Low slots are the ones in use, so that clocks stay short.

int slot_of(const c10::Stream& stream) {
  return static_cast<int>(stream.id()) * kDevices + std::max<int>(stream.device_index(), 0);
}
int device_of(int slot) { return slot % kDevices; }
std::string stream_name(int slot) {
  auto device = " of sim:" + std::to_string(device_of(slot));
  return slot < kDevices ? "default stream" + device : "stream " + std::to_string(slot / kDevices) + device;
}
Stream& stream(int slot) { return streams[slot]; }
Clock& host_clock() { return host; }

// --- queues -------------------------------------------------------------------------------------

Access issue(int slot, const std::string* what) {
  auto& knows = streams[slot].knows;
  knows.join(host);
  knows.advance(slot, knows.of(slot) + 1);
  return {slot, knows.of(slot), what};
}
Access begin(int slot, const std::string* what) {
  run_until(slot, streams[slot].knows.of(slot));
  return issue(slot, what);
}

static void push(int slot, Work work) {
  streams[slot].queue.push_back(std::move(work));
  ++queued_items;
}
static void move_bytes(PendingCopy& copy) {
  if (copy.ran) return;
  if (copy.number != 0) wait_until_moved(copy.number);
  else std::memcpy(copy.to, copy.from, copy.bytes);
  copy.ran = true;
}
static void finish(PendingCopy& copy) {
  if (copy.checked && checksum(copy.from, copy.bytes) != copy.checksum) {
    Race race;
    race.kind = "source overwritten";
    race.first = *copy.access.what;
    race.first_stream = stream_name(copy.access.slot);
    race.second = "a write by the host";
    race.second_stream = "host";
    race.address = reinterpret_cast<uintptr_t>(copy.to);
    race.bytes = static_cast<int64_t>(copy.bytes);
    race.label = label_at(race.address, copy.bytes);
    report(std::move(race), device_of(copy.access.slot));
  }
  move_bytes(copy);
  bury(std::move(copy.host));
}

void run_until(int slot, Epoch epoch) {
  auto& queue = streams[slot].queue;
  while (!queue.empty() && queue.front().epoch <= epoch) {
    Work work = std::move(queue.front());
    queue.pop_front();
    --queued_items;
    if (work.copy) finish(*work.copy);
    else run_until(work.wait_slot, work.wait_epoch);
  }
}
void run_all(int index) {
  for (int slot = index; slot < kSlots; slot += kDevices) run_until(slot, streams[slot].knows.of(slot));
}
bool anything_queued(int slot) { return !streams[slot].queue.empty(); }

static bool overlaps(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return x < y + b_bytes && y < x + a_bytes;
}
static std::optional<Epoch> last_touching(int slot, const void* memory, size_t bytes) {
  std::optional<Epoch> last;
  for (const auto& work : streams[slot].queue)
    if (work.copy && (overlaps(work.copy->to, work.copy->bytes, memory, bytes) ||
                      overlaps(work.copy->from, work.copy->bytes, memory, bytes)))
      last = work.epoch;
  return last;
}
static bool anybody_touches(const void* memory, size_t bytes) {
  if (queued_items == 0) return false;
  for (int slot = 0; slot < kSlots; ++slot)
    if (last_touching(slot, memory, bytes)) return true;
  return false;
}
void run_overlapping(const void* memory, size_t bytes) {
  if (queued_items == 0) return;
  for (int slot = 0; slot < kSlots; ++slot)
    if (auto last = last_touching(slot, memory, bytes)) run_until(slot, *last);
}

void enqueue(PendingCopy copy) {
  int slot = copy.access.slot;
  auto& lead = leader_of(device_of(slot));
  bool shared = anybody_touches(copy.to, copy.bytes);
  // The engine has read the source long before anybody finishes the copy: a later write to it is no fault.
  if (lead.poison && lead.order != CopyOrder::kEngine) {
    copy.checksum = checksum(copy.from, copy.bytes);
    copy.checked = true;
  }
  if (lead.order == CopyOrder::kEager) {
    run_until(slot, copy.access.epoch);
    move_bytes(copy);
    if (!copy.checked) return bury(std::move(copy.host));
  } else if (lead.order == CopyOrder::kEngine) {
    // Whatever it has to wait for was issued before it, and the engine keeps that order.
    copy.number = start_moving(copy.to, copy.from, copy.bytes);
  } else if (lead.poison && !shared) {
    // What was there is gone as soon as the copy may run: whoever reads it early reads NaN, not old
    // weights that happen to be right. Memory that a queued copy still reads is left alone.
    std::memset(copy.to, 0xFF, copy.bytes);
  }
  Work work;
  work.epoch = copy.access.epoch;
  work.copy = std::move(copy);
  push(slot, std::move(work));
}

// --- waits --------------------------------------------------------------------------------------

EventState record_event(int slot) {
  streams[slot].knows.join(host);
  return {slot, streams[slot].knows.of(slot), streams[slot].knows, streams[slot].free_at};
}
void stream_waits(int slot, const EventState& event) {
  auto& waiter = streams[slot];
  waiter.knows.join(event.knows);
  waiter.free_at = std::max(waiter.free_at, event.at);
  if (event.slot == slot || !anything_queued(event.slot)) return;
  Work work;
  work.epoch = issue(slot, nullptr).epoch;
  work.wait_slot = event.slot;
  work.wait_epoch = event.epoch;
  push(slot, std::move(work));
}
void host_waits(const EventState& event) {
  run_until(event.slot, event.epoch);
  host.join(event.knows);
  auto& lead = leader_of(device_of(event.slot));
  lead.host_time = std::max(lead.host_time, event.at);
}
void host_waits_for(int slot) { host_waits(record_event(slot)); }
// A lazy copy must not keep a polling caller waiting for ever: each question lets one queued item run.
bool is_over(const EventState& event) {
  const auto& queue = streams[event.slot].queue;
  while (!queue.empty() && queue.front().copy && queue.front().copy->number != 0) {
    if (queue.front().epoch > event.epoch) break;
    if (!has_moved(queue.front().copy->number)) return false;
    run_until(event.slot, queue.front().epoch);
  }
  bool over = queue.empty() || queue.front().epoch > event.epoch;
  if (over) host.join(event.knows);
  else run_until(event.slot, queue.front().epoch);
  return over;
}

// --- virtual time -------------------------------------------------------------------------------

void spend_on_link(int slot, int64_t bytes, bool to_device) {
  auto& lead = leader_of(device_of(slot));
  auto& link = to_device ? device(device_of(slot)).h2d_free_at : device(device_of(slot)).d2h_free_at;
  double transfer = lead.bytes_per_second > 0 ? static_cast<double>(bytes) / lead.bytes_per_second : 0;
  double start = std::max({streams[slot].free_at, lead.host_time, link});
  link = streams[slot].free_at = start + lead.latency + transfer;
}
double now_of(int leader) {
  double now = device(leader).host_time;
  for (int slot = 0; slot < kSlots; ++slot)
    if (device(device_of(slot)).leader == leader) now = std::max(now, streams[slot].free_at);
  return now;
}

}  // namespace sim
