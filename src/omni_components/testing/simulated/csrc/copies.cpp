// Copies between host and device, and within the device.
#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

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

void copy_now(const at::Tensor& from, const at::Tensor& to, int slot, bool blocking) {
  bool link = from.is_cpu() || to.is_cpu();
  auto bytes = static_cast<int64_t>(to.numel() * to.itemsize());
  {
    Lock lock;
    auto access = begin(slot, copy_name(from, to));
    touch_tensor(from, access, false);
    touch_tensor(to, access, true);
    if (link) spend_on_link(slot, bytes, to.is_privateuseone());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(to).copy_(on_host(from));
  if (!link || !blocking) return;
  Lock lock;
  host_waits_for(slot);
  ++device(device_of(slot)).n.host_waits;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto from = source.sizes().equals(to.sizes()) ? source : source.expand(to.sizes());
  int index = from.is_cpu() ? to.device().index() : from.device().index();
  maybe_fail(from.device() == to.device() ? kStepFault : kCopyFault, index);
  consider_running();
  count_copy(from, to, index);
  const auto& host = from.is_cpu() ? from : to;
  bool late = non_blocking && host.is_cpu() && is_memcpy(from, to) &&
      is_pinned(extent_of(host).memory, extent_of(host).bytes);
  if (late) copy_late(from, to, current_slot(index));
  else copy_now(from, to, current_slot(index), !non_blocking || to.is_cpu());
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
  at::AutoDispatchBelowADInplaceOrView below;
  return host_alias(t).item();
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
}
// `copy_from` reads the conjugation and negation flags itself; torch's fallbacks would clone for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
