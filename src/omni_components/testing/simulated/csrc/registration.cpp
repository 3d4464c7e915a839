// Which operator runs what. The only file that needs torch's registration header, which is slow to compile.
#include "kernels.h"
#include "tensors.h"

#include <torch/library.h>

namespace sim {

using torch::CppFunction;

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
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(CppFunction::makeFromBoxedFunction<&fallback>()); }

// `copy_from` reads the conjugation and negation flags itself; torch's fallbacks would clone for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }

// Every operator for which the CPU has a kernel of its own takes that kernel here too. Otherwise torch
// would decompose some of them on this device only, and results would differ in the last bits.
void register_host_kernels() {
  constexpr auto key = c10::DispatchKey::PrivateUse1;
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || op->hasKernelForDispatchKey(key)) continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace sim
