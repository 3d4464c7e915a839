// Device tensors: making them, viewing them, copying them.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace sim {

c10::Storage host_storage(const c10::Storage& device) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), device.nbytes(),
      c10::DataPtr(device.mutable_data_ptr().get(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
}

// Conjugation and negation are flags of a tensor, not of its bytes: view kernels pass them on.
static void copy_flags(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}
static at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  copy_flags(like, made);
  return made;
}
at::Tensor host_alias(const at::Tensor& t, const c10::Storage& host) { return over(host, c10::DispatchKey::CPU, t); }
at::Tensor host_alias(const at::Tensor& t) { return host_alias(t, host_storage(t.storage())); }
at::Tensor device_view(const at::Tensor& h, const c10::Storage& device) {
  return over(device, c10::DispatchKey::PrivateUse1, h);
}
c10::Storage adopt_storage(const c10::Storage& host, int index) {
  return c10::Storage(c10::Storage::use_byte_size_t(), host.nbytes(), adopt(host, index), device_allocator(), true);
}

Extent extent_of(const at::Tensor& t) {
  if (t.numel() == 0) return {nullptr, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  auto size = static_cast<int64_t>(t.itemsize());
  int64_t from = t.storage_offset() * size, bytes = (last + 1) * size;
  auto held = static_cast<int64_t>(t.storage().nbytes());
  TORCH_CHECK(
      from + bytes <= held, "a tensor of shape ", t.sizes(), " on ", t.device(), " needs ", from + bytes,
      " bytes of storage, but its storage holds ", held, ": its memory was freed or resized");
  return {static_cast<const char*>(t.storage().data()) + from, static_cast<size_t>(bytes)};
}
void touch_tensor(const at::Tensor& t, const Access& by, bool write) {
  if (!t.defined() || !t.has_storage()) return;
  auto extent = extent_of(t);
  if (extent.bytes == 0 || (t.is_cpu() && !is_pinned(extent.memory))) return;  // pageable memory has no streams
  Lock lock;
  touch(extent.memory, extent.bytes, by, write);
}

namespace {

using Sizes = at::IntArrayRef;

int index_of(std::optional<at::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}
// Makes `index` the current device for the allocator, which is not told the device.
class OnDevice {
 public:
  explicit OnDevice(int index) : guard_(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index))) {}

 private:
  c10::DeviceGuard guard_;
};
constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(size, device_allocator(), kDeviceKeys, c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(
    Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kDeviceKeys, c10::dtype_or_default(type));
}

// --- views --------------------------------------------------------------------------------------

at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, Sizes size, Sizes stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return t;
}
at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return set_storage(t, std::move(storage), 0, {count}, {1});
}
at::Tensor& set_to_tensor(at::Tensor& t, const at::Tensor& other) {
  return set_storage(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
at::Tensor& set_to_nothing(at::Tensor& t) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocate_on(0, t.device().index()), device_allocator(), true);
  return set_storage(t, std::move(nothing), 0, {0}, {1});
}
at::Tensor as_strided(const at::Tensor& t, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  auto inferred = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), t.numel());
  auto stride = at::detail::computeStride(t.sizes(), t.strides(), inferred);
  TORCH_CHECK(
      stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one dimension "
      "spans across two contiguous subspaces). Use .reshape(...) instead.");
  return as_strided(t, inferred, *stride, t.storage_offset());
}
const at::Tensor& resize(const at::Tensor& t, Sizes size, std::optional<at::MemoryFormat> format) {
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  size_t needed = static_cast<size_t>(t.storage_offset() + t.numel()) * t.itemsize();
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(storage, needed);
  return t;
}

// --- copies -------------------------------------------------------------------------------------

bool is_memcpy(const at::Tensor& from, const at::Tensor& to) {
  if (from.scalar_type() != to.scalar_type() || !from.sizes().equals(to.sizes())) return false;
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) return false;
  if (from.is_contiguous() && to.is_contiguous()) return true;
  return from.strides().equals(to.strides()) && from.is_non_overlapping_and_dense();
}
void count_copy(const at::Tensor& from, const at::Tensor& to, int index) {
  Lock lock;
  auto& n = device(index).n;
  auto bytes = static_cast<int64_t>(to.numel() * to.itemsize());  // what crosses the link is already converted
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
  {
    Lock lock;
    auto access = begin(slot, copy_name(from, to));
    touch_tensor(from, access, false);
    touch_tensor(to, access, true);
    if (link) spend_on_link(slot, static_cast<int64_t>(to.numel() * to.itemsize()), to.is_privateuseone());
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
  bool same_device = from.device() == to.device();
  if (!same_device) maybe_fail(kCopyFault, index);
  consider_running();
  count_copy(from, to, index);
  const auto& host = from.is_cpu() ? from : to;
  bool late = non_blocking && host.is_cpu() && is_memcpy(from, to) &&
      is_pinned(extent_of(host).memory, extent_of(host).bytes);
  if (late) copy_late(from, to, current_slot(index));
  else copy_now(from, to, current_slot(index), !non_blocking || to.is_cpu());
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& t) {
  static const auto* name = intern("item");
  int index = t.device().index(), slot = current_slot(index);
  {
    Lock lock;
    touch_tensor(t, begin(slot, name), false);
    host_waits_for(slot);
    ++device(index).n.host_waits;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return host_alias(t).item();
}
void record(at::Tensor& t, c10::Stream stream) { record_stream(t.storage().data(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  // Without these the fallback would set a device storage on a host alias.
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("set_", &set_to_nothing);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record);
}

// `copy_from` reads the conjugation and negation flags itself; torch's fallbacks would clone for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
