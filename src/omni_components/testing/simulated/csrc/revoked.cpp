// References to memory that has changed hands. Whoever lends the same memory in turns, as an arena does, revokes
// the storages of the one that leaves: what reads through them sees poison, what writes through them is lost,
// and both are reported. It costs a look-up per access while anything is revoked, and needs `poison`.
#include "tensors.h"

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstring>
#include <unordered_map>

namespace sim {
namespace {

// Weak: the address of a storage that is gone is not given to another one while it is a key here.
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
auto& revoked = *new std::unordered_map<const c10::StorageImpl*, Weak>;
std::atomic<size_t> count{0};
size_t clean_at = 1024;

void drop_dead() {
  if (revoked.size() < clean_at) return;
  for (auto it = revoked.begin(); it != revoked.end();)
    it = it->second.use_count() == 0 ? revoked.erase(it) : std::next(it);
  clean_at = std::max<size_t>(1024, 2 * revoked.size());
}

}  // namespace

void revoke(const std::vector<at::Tensor>& tensors) {
  Lock lock;
  for (const auto& t : tensors) {
    if (!t.is_privateuseone() || !leader_of(t.device().index()).poison) continue;
    revoked.insert_or_assign(t.storage().unsafeGetStorageImpl(), t.storage().getWeakStorageImpl());
  }
  drop_dead();
  count = revoked.size();
}
void restore(const std::vector<at::Tensor>& tensors) {
  Lock lock;
  for (const auto& t : tensors) revoked.erase(t.storage().unsafeGetStorageImpl());
  count = revoked.size();
}

bool is_revoked(const c10::Storage& storage) {
  if (count == 0) return false;
  Lock lock;
  return revoked.count(storage.unsafeGetStorageImpl()) > 0;
}

c10::Storage poison_for(const c10::Storage& device) {
  auto* allocator = c10::GetAllocator(c10::kCPU);
  auto bytes = allocator->allocate(device.nbytes());
  std::memset(bytes.get(), 0xFF, device.nbytes());  // NaN in every float format
  return {c10::Storage::use_byte_size_t(), device.nbytes(), std::move(bytes), allocator, true};
}

void report_revoked(const at::Tensor& t, const Access& by, bool write) {
  Race race;
  race.kind = write ? "write through a stale reference" : "read through a stale reference";
  race.first = "revoke";
  race.first_stream = "host";
  race.second = *by.what;
  race.second_stream = stream_name(by.slot);
  race.address = reinterpret_cast<uintptr_t>(t.storage().data());
  race.bytes = static_cast<int64_t>(t.numel() * t.itemsize());
  race.label = label_at(race.address, static_cast<size_t>(race.bytes));
  report(std::move(race), t.device().index());
}

}  // namespace sim
