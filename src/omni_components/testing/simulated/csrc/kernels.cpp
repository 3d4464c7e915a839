// Kernels: each runs the CPU's kernel on host aliases of the same memory. Views and in-place writes keep
// their meaning, and results equal the CPU's bit for bit.
#include "kernels.h"

#include "random.h"
#include "tensors.h"

#include <ATen/core/enum_tag.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>

#include <unordered_map>

namespace sim {
namespace {

using torch::jit::Stack;

// --- what an operator does to its arguments, read off its schema once -----------------------------

enum class Use { kRead, kWrite, kView };  // kView: the result aliases it, its bytes are not read

struct Operator {
  const std::string* name = nullptr;
  std::vector<Use> uses;
  std::vector<size_t> generators;
  bool host_indices = false;  // index tensors may live on the host
  bool is_kernel = true;      // false: only makes a view, no stream runs anything
};

bool takes_host_indices(const std::string& name) {
  auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  return has("index") && !has("index_select") && !has("index_add") && !has("index_copy") &&
      !has("index_fill") && !has("index_reduce");
}
bool returns_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}
Operator describe_anew(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Operator op;
  op.name = intern(schema.name());
  op.host_indices = takes_host_indices(schema.name());
  bool in_place_view = handle.hasTag(at::Tag::inplace_view);  // writes the tensor's geometry, not its bytes
  bool views = in_place_view || returns_views(schema);
  static const auto generator = c10::OptionalType::create(c10::GeneratorType::get());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    auto* alias = argument.alias_info();
    bool writes = alias && alias->isWrite() && !in_place_view;
    op.uses.push_back(writes ? Use::kWrite : alias && views ? Use::kView : Use::kRead);
    if (*argument.type() == *generator) op.generators.push_back(i);
  }
  op.is_kernel = !views;
  return op;
}
const Operator& describe(const c10::OperatorHandle& handle) {
  static auto& known = *new std::unordered_map<const c10::FunctionSchema*, Operator>;
  Lock lock;
  const auto* schema = &handle.schema();
  auto found = known.find(schema);
  return found != known.end() ? found->second : known.emplace(schema, describe_anew(handle)).first->second;
}

// --- one call -----------------------------------------------------------------------------------

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& t : value.toTensorList()) visit(t);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      if (t.has_value()) visit(*t);
}

class Call {
 public:
  Call(const c10::OperatorHandle& seen, Stack* stack)
      : op_(describe(seen)), stack_(stack), first_(stack->size() - seen.schema().arguments().size()) {}

  void prepare() {
    find_device();
    if (op_.is_kernel) begin_kernel();
    for (size_t i = first_; i < stack_->size(); ++i) to_host((*stack_)[i]);
    for (size_t position : op_.generators) pass_generator((*stack_)[first_ + position]);
  }
  void finish(size_t results) {
    for (auto& storage : storages_) take_back_if_grown(storage);
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) to_device((*stack_)[i]);
  }

 private:
  struct Shared {
    c10::Storage device, host;
  };
  struct Known {
    at::Tensor device, host;
  };

  // A host tensor among device tensors raises, as on other accelerators, save for 0-dim tensors that are
  // only read and for the indices of indexing.
  void find_device() {
    bool host = false;
    for (size_t i = 0; i < op_.uses.size(); ++i) {
      const auto& value = (*stack_)[first_ + i];
      bool indices = op_.host_indices && value.isOptionalTensorList();
      each_tensor(value, [&](const at::Tensor& t) {
        if (!t.defined()) return;
        host |= t.is_cpu() && !indices && (t.dim() > 0 || op_.uses[i] == Use::kWrite);
        if (t.is_privateuseone()) see(t);
      });
      if (value.isDevice() && value.toDevice().is_privateuseone()) see_device(value.toDevice());
    }
    if (device_ >= 0 && host && !factory_) mixed("cpu");
    if (device_ < 0) device_ = current_device();
  }
  void see(const at::Tensor& t) {
    if (device_ >= 0 && device_ != t.device().index()) mixed(t.device().str());
    device_ = t.device().index();
  }
  void see_device(c10::Device device) {
    factory_ = true;
    if (device_ < 0) device_ = device.has_index() ? device.index() : current_device();
  }
  [[noreturn]] void mixed(const std::string& other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, sim:", device_,
        " and ", other, "! (when checking the arguments of ", *op_.name, ")");
  }

  void begin_kernel() {
    maybe_fail(kStepFault, device_);
    consider_running();
    {
      Lock lock;
      access_ = begin(current_slot(device_), op_.name);
      note_accesses(Use::kRead);
      note_accesses(Use::kWrite);
    }
    locate_races(device_);
  }
  void note_accesses(Use use) {
    for (size_t i = 0; i < op_.uses.size(); ++i)
      if (op_.uses[i] == use)
        each_tensor((*stack_)[first_ + i], [&](const at::Tensor& t) {
          if (t.defined() && t.is_privateuseone()) touch_tensor(t, access_, use == Use::kWrite);
        });
  }

  const c10::Storage& host_of(const c10::Storage& device) {
    for (auto& shared : storages_)
      if (shared.device.unsafeGetStorageImpl() == device.unsafeGetStorageImpl()) return shared.host;
    storages_.push_back({device, host_storage(device)});
    return storages_.back().host;
  }
  at::Tensor to_host(const at::Tensor& t) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    for (auto& pair : tensors_)
      if (pair.device.is_same(t)) return pair.host;
    tensors_.push_back({t, host_alias(t, host_of(t.storage()))});
    return tensors_.back().host;
  }
  void to_host(c10::IValue& value) {
    if (value.isTensor()) value = to_host(value.toTensor());
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = to_host(t);
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(to_host(*t)) : std::nullopt);
      value = c10::IValue(std::move(list));
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      value = c10::IValue(c10::Device(c10::kCPU));
    }
  }
  void pass_generator(c10::IValue& value) {
    value = host_generator(value.isNone() ? default_generator(device_) : value.toGenerator());
  }

  // An out= argument may have been resized: its host alias then has new memory, which the device adopts.
  void take_back_if_grown(Shared& shared) {
    if (shared.host.data() == shared.device.data() || is_revoked(shared.device)) return;
    auto* storage = shared.device.unsafeGetStorageImpl();
    size_t bytes = shared.host.nbytes();
    storage->set_data_ptr_noswap(adopt(shared.host, device_));
    storage->set_nbytes(bytes);
    note_result(shared.device);
  }
  void note_result(const c10::Storage& made) {
    if (access_.slot < 0 || made.nbytes() == 0) return;
    Lock lock;
    touch(made.data(), made.nbytes(), access_, true);
  }
  at::Tensor to_device(const at::Tensor& h) {
    if (!h.defined() || !h.is_cpu() || !h.has_storage()) return h;
    for (auto& pair : tensors_)
      if (pair.host.is_same(h)) return same_tensor(pair);
    const auto* storage = h.storage().unsafeGetStorageImpl();
    for (auto& shared : storages_)
      if (shared.host.unsafeGetStorageImpl() == storage) return device_view(h, shared.device);
    storages_.push_back({adopt_storage(h.storage(), device_), h.storage()});
    note_result(storages_.back().device);
    return device_view(h, storages_.back().device);
  }
  static at::Tensor same_tensor(const Known& pair) {
    auto* impl = pair.device.unsafeGetTensorImpl();
    const auto& h = pair.host;
    if (pair.device.storage_offset() != h.storage_offset()) impl->set_storage_offset(h.storage_offset());
    if (!pair.device.sizes().equals(h.sizes()) || !pair.device.strides().equals(h.strides()))
      impl->set_sizes_and_strides(h.sizes(), h.strides());
    return pair.device;
  }
  void to_device(c10::IValue& value) {
    if (value.isTensor()) value = to_device(value.toTensor());
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = to_device(t);
      value = c10::IValue(c10::List<at::Tensor>(list));
    }
  }

  const Operator& op_;
  Stack* stack_;
  size_t first_;
  Access access_;
  int device_ = -1;
  bool factory_ = false;
  std::vector<Shared> storages_;
  std::vector<Known> tensors_;
};

void run_on_host(const c10::OperatorHandle& seen, const c10::OperatorHandle& run, Stack* stack) {
  Call call(seen, stack);
  HostScope scope;
  call.prepare();
  run.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish(run.schema().returns().size());
}
}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run_on_host(op, op, stack); }

// --- operators that choose by device type what the CPU would choose otherwise ------------------------

static c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto host = find("aten::convolution");
  run_on_host(op, host, stack);
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  static const auto host = find("aten::convolution_backward");
  Call call(op, stack);
  HostScope scope;
  call.prepare();
  size_t first = stack->size() - op.schema().arguments().size();
  bool transposed = (*stack)[first + 6].toBool();
  auto weight = (*stack)[first + 2].toTensor();
  int64_t bias = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + static_cast<int64_t>(first) + 3, c10::IValue(std::vector<int64_t>{bias}));
  host.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish(host.schema().returns().size());
}

static int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
    bool grouped) {
  std::optional<at::Tensor> host_mask;
  if (mask.has_value() && mask->defined()) host_mask = mask->is_privateuseone() ? host_alias(*mask) : *mask;
  HostScope scope;
  return at::_fused_sdp_choice(
      host_alias(query), host_alias(key), host_alias(value), host_mask, dropout, causal, scale, grouped);
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}
