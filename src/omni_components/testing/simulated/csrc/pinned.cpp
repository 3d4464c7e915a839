// Pinned host memory with a limit. As a caching host allocator does, ours rounds up to a power of two; unlike
// it, freed memory goes back at once. Registered memory (the analogue of cudaHostRegister) takes whole pages.
#include "state.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kSmallest = 512, kPage = 4096;

struct Pinned {
  int leader = 0;
  int64_t generation = 0;
  size_t bytes = 0, taken = 0;
  bool registered = false;
};
using Map = std::map<uintptr_t, Pinned>;
auto& pinned = *new Map;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

bool covers(const Map::value_type& entry, uintptr_t from, size_t bytes) {
  return entry.first <= from && from + bytes <= entry.first + entry.second.bytes;
}
bool overlaps_pinned(uintptr_t from, size_t bytes) {
  auto it = pinned.upper_bound(from);
  if (it != pinned.end() && it->first < from + bytes) return true;
  return it != pinned.begin() && std::prev(it)->first + std::prev(it)->second.bytes > from;
}
void note_pinned(uintptr_t from, size_t bytes, size_t taken, bool registered) {
  int lead = device(current_device()).leader;
  auto& d = device(lead);
  if (static_cast<int64_t>(taken) > d.pinned_capacity - d.n.pinned)
    TORCH_CHECK(
        false, "simulated accelerator cannot pin ", mib(static_cast<int64_t>(taken)), ": ",
        mib(std::max<int64_t>(0, d.pinned_capacity - d.n.pinned)), " of ", mib(d.pinned_capacity), " left");
  d.n.pinned += static_cast<int64_t>(taken);
  pinned[from] = {lead, d.generation, bytes, taken, registered};
}
void forget_pinned(Map::iterator entry) {
  auto& d = device(entry->second.leader);
  if (entry->second.generation == d.generation) d.n.pinned -= static_cast<int64_t>(entry->second.taken);
  forget(reinterpret_cast<void*>(entry->first), entry->second.bytes);
  pinned.erase(entry);
}
// What was never unregistered ends with its device: the system may have given the addresses to others since.
void forget_left_behind(uintptr_t from, size_t bytes) {
  auto it = pinned.lower_bound(from);
  if (it != pinned.begin() && std::prev(it)->first + std::prev(it)->second.bytes > from) --it;
  while (it != pinned.end() && it->first < from + bytes) {
    auto entry = it++;
    const Pinned& one = entry->second;
    if (one.registered && one.generation != device(one.leader).generation) forget_pinned(entry);
  }
}
void free_pinned(void* memory) {
  if (!memory) return;
  Lock lock;
  auto entry = pinned.find(address(memory));
  if (entry == pinned.end()) return;
  forget_pinned(entry);
  std::free(memory);
}
size_t power_of_two(size_t bytes) {
  size_t rounded = kSmallest;
  while (rounded < bytes) rounded <<= 1;
  return rounded;
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, cpu};
    TORCH_CHECK(active_devices() > 0, "Cannot access accelerator device when none is available.");
    maybe_fail(kPinFault, current_device());
    Lock lock;
    size_t taken = power_of_two(bytes);
    void* memory = std::aligned_alloc(kSmallest, taken);
    TORCH_CHECK(memory, "the host has no ", taken, " bytes left to pin");
    try {
      note_pinned(address(memory), taken, taken, false);
    } catch (...) {
      std::free(memory);
      throw;
    }
    return {memory, memory, &free_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}  // there is none
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_memory);

}  // namespace

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* memory, size_t bytes) {
  Lock lock;
  auto it = pinned.upper_bound(address(memory));
  return it != pinned.begin() && covers(*std::prev(it), address(memory), bytes);
}

void host_register(uintptr_t memory, int64_t bytes) {
  TORCH_CHECK(memory != 0 && bytes > 0, "host_register needs an address and a positive number of bytes");
  TORCH_CHECK(active_devices() > 0, "host_register: no simulated accelerator is active");
  maybe_fail(kPinFault, current_device());
  Lock lock;
  auto size = static_cast<size_t>(bytes);
  forget_left_behind(memory, size);
  TORCH_CHECK(!overlaps_pinned(memory, size), "host_register: part or all of these ", bytes,
              " bytes is already pinned");
  note_pinned(memory, size, round_up(size, kPage), true);
}
void host_unregister(uintptr_t memory) {
  Lock lock;
  auto entry = pinned.find(memory);
  TORCH_CHECK(
      entry != pinned.end() && entry->second.registered, "host_unregister: this address is not registered");
  auto* bytes = reinterpret_cast<void*>(memory);
  check_unregister(bytes, entry->second.bytes, entry->second.leader);
  run_overlapping(bytes, entry->second.bytes);
  forget_pinned(entry);
}

}  // namespace sim
