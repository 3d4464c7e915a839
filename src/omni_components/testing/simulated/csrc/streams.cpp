// Streams, events and the virtual time they take.
//
// A stream runs everything in the order it was issued. Kernels run when they are issued. Non-blocking
// copies between the device and pinned memory wait in their stream's queue until somebody needs them:
// a later operation of that stream, an operation of a stream that waits for it, or the host. A missing
// wait therefore computes on memory that has not arrived, as it would on an unlucky accelerator.
#include "state.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace sim {
namespace {

std::recursive_mutex process_lock;
int lock_depth = 0;
std::vector<c10::Storage> graveyard;

Stream streams[kSlots];
Clock host;
int next_side_stream[kDevices] = {};

thread_local int device_now = 0;
thread_local c10::StreamId stream_now[kDevices] = {};

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
  static std::unordered_set<std::string> names;
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
int current_device() { return device_now; }
int current_slot(int index) { return static_cast<int>(stream_now[index]) * kDevices + index; }
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

static void move_bytes(PendingCopy& copy) {
  if (copy.ran) return;
  std::memcpy(copy.to, copy.from, copy.bytes);
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
void run_overlapping(const void* memory, size_t bytes) {
  for (int slot = 0; slot < kSlots; ++slot)
    if (auto last = last_touching(slot, memory, bytes)) run_until(slot, *last);
}

void enqueue(PendingCopy copy) {
  int slot = copy.access.slot;
  auto& lead = leader_of(device_of(slot));
  bool shared = false;
  for (int other = 0; other < kSlots && !shared; ++other)
    shared = last_touching(other, copy.to, copy.bytes).has_value();
  if (lead.poison) {
    copy.checksum = checksum(copy.from, copy.bytes);
    copy.checked = true;
  }
  if (lead.order == CopyOrder::kEager) {
    run_until(slot, copy.access.epoch);
    move_bytes(copy);
    if (!copy.checked) return bury(std::move(copy.host));
  } else if (lead.poison && !shared) {
    // What was there is gone as soon as the copy may run: whoever reads it early reads NaN, not old
    // weights that happen to be right. Memory that a queued copy still reads is left alone.
    std::memset(copy.to, 0xFF, copy.bytes);
  }
  Work work;
  work.epoch = copy.access.epoch;
  work.copy = std::move(copy);
  streams[slot].queue.push_back(std::move(work));
}

// --- waits --------------------------------------------------------------------------------------

static void record_event(EventState& event, int slot) {
  streams[slot].knows.join(host);
  event = {slot, streams[slot].knows.of(slot), streams[slot].knows, streams[slot].free_at};
}
static void stream_waits(int slot, const EventState& event) {
  auto& waiter = streams[slot];
  waiter.knows.join(event.knows);
  waiter.free_at = std::max(waiter.free_at, event.at);
  if (event.slot == slot || !anything_queued(event.slot)) return;
  Work work;
  work.epoch = issue(slot, nullptr).epoch;
  work.wait_slot = event.slot;
  work.wait_epoch = event.epoch;
  waiter.queue.push_back(std::move(work));
}
static void host_waits(const EventState& event) {
  run_until(event.slot, event.epoch);
  host.join(event.knows);
  auto& lead = leader_of(device_of(event.slot));
  lead.host_time = std::max(lead.host_time, event.at);
}
void host_waits_for(int slot) {
  EventState now;
  record_event(now, slot);
  host_waits(now);
}
static bool over(const EventState& event) {
  const auto& queue = streams[event.slot].queue;
  return queue.empty() || queue.front().epoch > event.epoch;
}
// Asking lets time pass: a lazy copy must not keep a polling caller waiting for ever.
static bool query(const EventState& event) {
  if (over(event)) {
    host.join(event.knows);
    return true;
  }
  run_until(event.slot, streams[event.slot].queue.front().epoch);
  return false;
}

void spend_on_link(int slot, int64_t bytes, bool to_device) {
  auto& lead = leader_of(device_of(slot));
  auto& link = to_device ? device(device_of(slot)).h2d_free_at : device(device_of(slot)).d2h_free_at;
  double transfer = lead.bytes_per_second > 0 ? static_cast<double>(bytes) / lead.bytes_per_second : 0;
  double start = std::max({streams[slot].free_at, lead.host_time, link});
  link = streams[slot].free_at = start + lead.latency + transfer;
}

// --- torch's view -------------------------------------------------------------------------------

namespace {

c10::Device sim_device(int index) {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}
c10::Stream torch_stream(int index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, sim_device(index), id);
}
int index_of(c10::Device d) { return d.has_index() ? d.index() : device_now; }
EventState* event_of(void* event) { return static_cast<EventState*>(event); }
void count_sync(int index) {
  ++device(index).n.syncs;
  ++device(index).n.host_waits;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device getDevice() const override { return sim_device(device_now); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  void setDevice(c10::Device d) const override {
    if (!d.has_index()) return;
    TORCH_CHECK(d.index() >= 0 && d.index() < kDevices, "sim:", d.index(), " is not a simulated device");
    device_now = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index() && d.index() < kDevices) device_now = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(std::max(1, active_devices()));
  }
  c10::Stream getStream(c10::Device d) const override {
    return torch_stream(index_of(d), stream_now[index_of(d)]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return torch_stream(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Lock lock;
    int turn = next_side_stream[index_of(d)]++ % kSideStreams;
    return torch_stream(index_of(d), 1 + turn);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    stream_now[index_of(s.device())] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &streams[slot_of(s)]; }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    consider_running();
    Lock lock;
    if (!*event) *event = new EventState();
    record_event(*event_of(*event), slot_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    consider_running();
    Lock lock;
    if (event) stream_waits(slot_of(s), *event_of(event));
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || query(*event_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (!event) return;
    count_sync(device_of(event_of(event)->slot));
    host_waits(*event_of(event));
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock;
    EventState now;
    record_event(now, slot_of(s));
    return query(now);
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock;
    count_sync(index_of(s.device()));
    host_waits_for(slot_of(s));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Lock lock;
    count_sync(index);
    for (int slot = index; slot < kSlots; slot += kDevices) host_waits_for(slot);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_stream(data.get(), s);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return (event_of(end)->at - event_of(start)->at) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sim
