// Device tensors: making them, viewing them, giving them other memory.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>

namespace sim {

c10::Storage host_storage(const c10::Storage& device) {
  if (is_revoked(device)) return poison_for(device);
  c10::DataPtr bytes(device.mutable_data_ptr().get(), c10::Device(c10::kCPU));
  auto* allocator = c10::GetAllocator(c10::kCPU);
  return {c10::Storage::use_byte_size_t(), device.nbytes(), std::move(bytes), allocator, true};
}

// Conjugation and negation are flags of a tensor, not of its bytes: view kernels pass them on.
static void copy_flags(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}
static at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  c10::DispatchKeySet keys(key);
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  copy_flags(like, made);
  return made;
}
at::Tensor host_alias(const at::Tensor& t, const c10::Storage& host) {
  return over(host, c10::DispatchKey::CPU, t);
}
at::Tensor host_alias(const at::Tensor& t) { return host_alias(t, host_storage(t.storage())); }
at::Tensor device_view(const at::Tensor& h, const c10::Storage& device) {
  return over(device, c10::DispatchKey::PrivateUse1, h);
}
c10::Storage adopt_storage(const c10::Storage& host, int index) {
  return {c10::Storage::use_byte_size_t(), host.nbytes(), adopt(host, index), device_allocator(), true};
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
  // Copies of pageable memory are staged: no stream ever touches it.
  if (extent.bytes == 0 || (t.is_cpu() && !is_pinned(extent.memory))) return;
  Lock lock;
  if (is_revoked(t.storage())) return report_revoked(t, by, write);
  touch(extent.memory, extent.bytes, by, write);
}

namespace {

int index_of(std::optional<at::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}
// Makes `index` the current device for the allocator, which is not told the device.
class OnDevice {
 public:
  explicit OnDevice(int index)
      : guard_(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index))) {}

 private:
  c10::DeviceGuard guard_;
};
constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

}  // namespace

at::Tensor empty(
    Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  auto dtype = c10::dtype_or_default(type);
  return at::detail::empty_generic(size, device_allocator(), kDeviceKeys, dtype, format);
}
at::Tensor empty_strided(
    Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  auto dtype = c10::dtype_or_default(type);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kDeviceKeys, dtype);
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
  c10::Storage nothing(
      c10::Storage::use_byte_size_t(), 0, allocate_on(0, t.device().index()), device_allocator(), true);
  return set_storage(t, std::move(nothing), 0, {0}, {1});
}
at::Tensor as_strided(const at::Tensor& t, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  auto inferred = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), t.numel());
  auto stride = at::detail::computeStride(t.sizes(), t.strides(), inferred);
  TORCH_CHECK(
      stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one "
      "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
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
void record(at::Tensor& t, c10::Stream stream) { record_stream(t.storage().data(), stream); }

}  // namespace sim
