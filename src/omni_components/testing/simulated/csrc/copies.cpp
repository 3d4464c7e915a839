// Copies between host and device, and within the device.
#include "tensors.h"

#include <algorithm>

namespace sim {
namespace {

bool is_memcpy(const at::Tensor& from, const at::Tensor& to) {
  if (from.scalar_type() != to.scalar_type() || !from.sizes().equals(to.sizes())) return false;
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) return false;
  if (from.is_contiguous() && to.is_contiguous()) return true;
  return from.strides().equals(to.strides()) && from.is_non_overlapping_and_dense();
}
void count_copy(const at::Tensor& from, const at::Tensor& to, int index) {
  Lock lock;
  auto& n = device(index).n;
  auto bytes = static_cast<int64_t>(to.numel() * to.itemsize());  // values cross the link converted
  if (from.is_cpu()) n.h2d_bytes += bytes, ++n.h2d_copies;
  else if (to.is_cpu()) n.d2h_bytes += bytes, ++n.d2h_copies;
}
const std::string* copy_name(const at::Tensor& from, const at::Tensor& to) {
  static const auto *h2d = intern("host-to-device copy"), *d2h = intern("device-to-host copy"),
                    *d2d = intern("device-to-device copy");
  return from.is_cpu() ? h2d : to.is_cpu() ? d2h : d2d;
}

// Copies between the device and pinned memory run late; everything else is staged or synchronous.
void copy_late(const at::Tensor& from, const at::Tensor& to, int slot) {
  auto source = extent_of(from), target = extent_of(to);
  Lock lock;
  PendingCopy copy;
  copy.access = issue(slot, copy_name(from, to));
  touch(source.memory, source.bytes, copy.access, false);
  touch(target.memory, target.bytes, copy.access, true);
  copy.from = source.memory;
  copy.to = const_cast<void*>(target.memory);
  copy.bytes = source.bytes;
  copy.host = from.is_cpu() ? from.storage() : to.storage();
  spend_on_link(slot, static_cast<int64_t>(copy.bytes), to.is_privateuseone());
  enqueue(std::move(copy));
}
at::Tensor on_host(const at::Tensor& t) { return t.is_privateuseone() ? host_alias(t) : t; }

// Between two devices the streams wait for each other on both sides, as CUDA's do.
void join_devices(const at::Tensor& from, const at::Tensor& to, bool after) {
  if (from.is_cpu() || to.is_cpu() || from.device() == to.device()) return;
  int source = current_slot(from.device().index()), target = current_slot(to.device().index());
  if (after) stream_waits(target, record_event(source));
  else stream_waits(source, record_event(target));
}
// Pageable memory is staged: the host is busy until the copy is over, though it need not know it is.
void keep_host_busy(int slot, bool blocking) {
  auto& lead = leader_of(device_of(slot));
  if (blocking) host_waits_for(slot);
  else lead.host_time = std::max(lead.host_time, stream(slot).free_at);
  ++device(device_of(slot)).n.host_waits;
}
void copy_now(const at::Tensor& from, const at::Tensor& to, int slot, bool blocking) {
  bool link = from.is_cpu() || to.is_cpu();
  auto bytes = static_cast<int64_t>(to.numel() * to.itemsize());
  {
    Lock lock;
    join_devices(from, to, false);
    auto access = begin(slot, copy_name(from, to));
    touch_tensor(from, access, false);
    touch_tensor(to, access, true);
    if (link) spend_on_link(slot, bytes, to.is_privateuseone());
    join_devices(from, to, true);
  }
  HostScope scope;
  on_host(to).copy_(on_host(from));
  if (!link) return;
  Lock lock;
  keep_host_busy(slot, blocking);
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto from = source.sizes().equals(to.sizes()) ? source : source.expand(to.sizes());
  int index = from.is_cpu() ? to.device().index() : from.device().index();
  maybe_fail(from.device() == to.device() ? kStepFault : kCopyFault, index);
  consider_running();
  const auto& host = from.is_cpu() ? from : to;
  bool stale = is_revoked(from.storage()) || is_revoked(to.storage());
  bool late = non_blocking && !stale && host.is_cpu() && is_memcpy(from, to) &&
      is_pinned(extent_of(host).memory, extent_of(host).bytes);
  if (late) copy_late(from, to, current_slot(index));
  else copy_now(from, to, current_slot(index), !non_blocking || to.is_cpu());
  count_copy(from, to, index);
  locate_races(index);
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& t) {
  static const auto* name = intern("item");
  int index = t.device().index(), slot = current_slot(index);
  maybe_fail(kStepFault, index);
  consider_running();
  {
    Lock lock;
    touch_tensor(t, begin(slot, name), false);
    host_waits_for(slot);
    ++device(index).n.host_waits;
  }
  locate_races(index);
  HostScope scope;
  return host_alias(t).item();
}

}  // namespace sim
