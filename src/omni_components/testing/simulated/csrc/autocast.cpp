// torch.autocast("sim"): the same operators in the same precision as torch.autocast("cpu").
#include "state.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>

namespace sim {
namespace {

using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Calls `visit` with each floating-point tensor among the arguments; it may be replaced.
template <class Visit>
void each_argument(const c10::OperatorHandle& op, Stack* stack, Visit visit) {
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      auto t = value.toTensor();
      visit(t);
      value = t;
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) visit(t);
      value = c10::IValue(c10::List<at::Tensor>(list));
    }
  }
}
void call_in(at::ScalarType type, const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  each_argument(op, stack, [&](at::Tensor& t) {
    if (t.defined()) t = at::autocast::cached_cast(type, t, kType);
  });
  op.callBoxed(stack);
}
void in_low_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_in(at::autocast::get_lower_precision_fp_from_device_type(kType), op, stack);
}
void in_single_precision(const c10::OperatorHandle& op, Stack* stack) { call_in(at::kFloat, op, stack); }
void in_widest_precision(const c10::OperatorHandle& op, Stack* stack) {
  bool single = false;
  each_argument(op, stack, [&](at::Tensor& t) { single |= t.defined() && t.scalar_type() == at::kFloat; });
  call_in(single ? at::kFloat : at::autocast::get_lower_precision_fp_from_device_type(kType), op, stack);
}

// As on the CPU (ATen/autocast_mode.cpp): these in low precision, these in the widest of their arguments,
// everything else that the CPU's autocast knows in single precision.
const std::set<std::string> kLow{
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "bmm", "mm",
    "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear", "_addmm_activation", "_convolution.deprecated",
    "matmul", "conv_tbc", "mkldnn_rnn_layer", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "prelu", "scaled_dot_product_attention", "_native_multi_head_attention"};
const std::set<std::string> kWidest{"stack", "cat", "index_copy"};

torch::CppFunction kernel_for(const std::string& name) {
  if (kLow.count(name)) return torch::CppFunction::makeFromBoxedFunction<&in_low_precision>();
  if (kWidest.count(name)) return torch::CppFunction::makeFromBoxedFunction<&in_widest_precision>();
  return torch::CppFunction::makeFromBoxedFunction<&in_single_precision>();
}

}  // namespace

void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  const auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::AutocastCPU)) {
    auto bare = name.name.substr(name.name.find("::") + 2);
    auto full = name.overload_name.empty() ? bare : bare + "." + name.overload_name;
    if (name.name.rfind("aten::", 0) == 0) library.impl(full.c_str(), kernel_for(full));
  }
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace sim
