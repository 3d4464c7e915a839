// Random numbers: a generator that belongs to the device and draws what a CPU generator would.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

at::Generator new_generator(int device_index);
const at::Generator& default_generator(int device_index);
at::Generator host_generator(const at::Generator& generator);  // the CPU generator behind it

}  // namespace sim
