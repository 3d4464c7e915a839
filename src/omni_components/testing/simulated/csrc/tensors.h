// Device tensors and their host aliases: CPU tensors over the same bytes.
#pragma once

#include "state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim {

// A CPU storage over the bytes of a device storage; it owns nothing.
c10::Storage host_storage(const c10::Storage& device);
at::Tensor host_alias(const at::Tensor& tensor, const c10::Storage& host);
at::Tensor host_alias(const at::Tensor& tensor);
// A device tensor with the geometry of a host tensor.
at::Tensor device_view(const at::Tensor& host, const c10::Storage& device);
c10::Storage adopt_storage(const c10::Storage& host, int device_index);

// The bytes from a tensor's first element to its last. Throws if its storage no longer holds them.
struct Extent {
  const void* memory;
  size_t bytes;
};
Extent extent_of(const at::Tensor& tensor);
// Storages revoked with `torch.sim.revoke`: their memory belongs to somebody else by now.
void revoke(const std::vector<at::Tensor>& tensors);
void restore(const std::vector<at::Tensor>& tensors);
bool is_revoked(const c10::Storage& storage);
c10::Storage poison_for(const c10::Storage& device);  // what one sees through it
void report_revoked(const at::Tensor& tensor, const Access& by, bool write);
void touch_tensor(const at::Tensor& tensor, const Access& by, bool write);

// While host aliases are worked on: autograd, autocast and Python's modes have had their turn already, on
// the device's tensors.
class HostScope {
 public:
  HostScope()
      : exclude_(c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::Python,
                                      c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

// --- operators with code of their own; registration.cpp names them ---------------------------------

using Sizes = at::IntArrayRef;

at::Tensor empty(
    Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format);
at::Tensor empty_strided(
    Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin);
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, Sizes size, Sizes stride);
at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage);
at::Tensor& set_to_tensor(at::Tensor& t, const at::Tensor& other);
at::Tensor& set_to_nothing(at::Tensor& t);
at::Tensor as_strided(const at::Tensor& t, Sizes size, Sizes stride, std::optional<int64_t> offset);
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size);
const at::Tensor& resize(const at::Tensor& t, Sizes size, std::optional<at::MemoryFormat> format);
void record(at::Tensor& t, c10::Stream stream);

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking);
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to);
at::Scalar item(const at::Tensor& t);

}  // namespace sim
