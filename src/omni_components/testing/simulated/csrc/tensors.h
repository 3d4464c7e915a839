// Device tensors and their host aliases: CPU tensors over the same bytes.
#pragma once

#include "state.h"

#include <ATen/core/Tensor.h>

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
const at::Tensor& resize(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> format);
void touch_tensor(const at::Tensor& tensor, const Access& by, bool write);

}  // namespace sim
