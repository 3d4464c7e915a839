// The boxed kernels, for registration.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
