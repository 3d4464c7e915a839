// Devices, streams and events as torch sees them.
#include "state.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace sim {
namespace {

int next_side_stream[kDevices] = {};
thread_local int device_now = 0;
thread_local c10::StreamId stream_now[kDevices] = {};

c10::Device sim_device(int index) {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}
c10::Stream torch_stream(int index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, sim_device(index), id);
}
int index_of(c10::Device d) { return d.has_index() ? d.index() : device_now; }
EventState* event_of(void* event) { return static_cast<EventState*>(event); }

// Every call that orders work is a step at which a fault may strike, and a chance for a late copy to run.
void step(int index) {
  maybe_fail(kStepFault, index);
  consider_running();
}
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
    device(d.index());  // throws if there is no such device
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
  void* getStreamNativeHandle(const c10::Stream s) const override { return &stream(slot_of(s)); }

  void record(
      void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    step(index_of(s.device()));
    Lock lock;
    if (!*event) *event = new EventState();
    *event_of(*event) = record_event(slot_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    step(index_of(s.device()));
    Lock lock;
    if (event) stream_waits(slot_of(s), *event_of(event));
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || is_over(*event_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    step(device_of(event_of(event)->slot));
    Lock lock;
    count_sync(device_of(event_of(event)->slot));
    host_waits(*event_of(event));
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock;
    return is_over(record_event(slot_of(s)));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    step(index_of(s.device()));
    Lock lock;
    count_sync(index_of(s.device()));
    host_waits_for(slot_of(s));
  }
  void synchronizeDevice(const c10::DeviceIndex given) const override {
    int index = given < 0 ? device_now : given;
    step(index);
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

int current_device() { return device_now; }
void restart_stream_pool(int index) { next_side_stream[index] = 0; }
int current_slot(int index) { return static_cast<int>(stream_now[index]) * kDevices + index; }

}  // namespace sim
