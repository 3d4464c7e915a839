#include "random.h"

#include "state.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

struct Generator final : c10::GeneratorImpl {
  Generator(c10::Device device, at::Generator inner)
      : c10::GeneratorImpl(device, kKeys), host(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override { return new Generator(device(), host.clone()); }

  at::Generator host;
};

}  // namespace

at::Generator new_generator(int index) {
  auto known = static_cast<c10::DeviceIndex>(index < 0 ? current_device() : index);
  c10::Device device(c10::DeviceType::PrivateUse1, known);
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}
const at::Generator& default_generator(int index) {
  static auto* generators = new at::Generator[kDevices];
  int device = index < 0 ? current_device() : index;
  Lock lock;
  if (!generators[device].defined()) generators[device] = new_generator(device);
  return generators[device];
}
at::Generator host_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->host : generator;
}

}  // namespace sim
