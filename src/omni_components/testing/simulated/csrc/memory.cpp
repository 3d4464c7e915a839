// Device memory with a capacity, pinned memory with a limit, and faults on demand.
//
// "Device memory" is host memory. As a caching device allocator does, ours rounds blocks up to 512
// bytes and keeps freed blocks for reuse; as a caching host allocator does, the pinned one rounds up to
// a power of two. Registered memory (the analogue of cudaHostRegister) takes whole pages.
#include "state.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kRounding = 512, kPage = 4096;
// What one device keeps of freed blocks, and the largest block it keeps: a test process is not to hoard.
constexpr int64_t kCacheLimit = 256 << 20, kCachedBlockLimit = 64 << 20;

struct Block {
  int device = 0, owner = 0;  // the stream that allocated it
  int64_t generation = 0;
  size_t bytes = 0, rounded = 0;
  c10::Storage adopted;  // the host memory it lives in, when a host kernel made it
  bool is_adopted = false;
  std::vector<int> recorded;  // streams that use it, by record_stream
};
struct Pinned {
  int leader = 0;
  int64_t generation = 0;
  size_t bytes = 0, taken = 0;
  bool registered = false;
};
struct Limbo {  // freed, but a recorded stream has not come past it yet
  void* memory;
  std::vector<std::pair<int, Epoch>> until;
};

Device devices[kDevices];
std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, Pinned> pinned;
std::vector<Limbo> limbo;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

std::string mib(int64_t bytes) {
  if (bytes == kUnlimited) return "unlimited";
  char text[64];
  std::snprintf(text, sizeof text, bytes < 10 << 20 ? "%.3f MiB" : "%.1f MiB", bytes / 1048576.0);
  return text;
}

// --- device blocks ------------------------------------------------------------------------------

[[noreturn]] void out_of_memory(size_t bytes, int index) {
  auto& d = devices[index];
  C10_THROW_ERROR(
      OutOfMemoryError,
      "simulated accelerator out of memory: sim:" + std::to_string(index) + " tried to allocate " +
          mib(static_cast<int64_t>(bytes)) + "; " + mib(d.capacity - d.n.allocated) + " of " +
          mib(d.capacity) + " free, " + mib(d.n.allocated) + " allocated");
}
// Takes `rounded` bytes off the device's capacity.
void reserve(size_t rounded, int index) {
  auto& d = devices[index];
  auto bytes = static_cast<int64_t>(rounded);
  if (bytes > d.capacity - d.n.allocated - d.cached) empty_cache(index);
  if (bytes > d.capacity - d.n.allocated) out_of_memory(rounded, index);
  d.n.allocated += bytes;
  d.n.peak = std::max(d.n.peak, d.n.allocated);
  ++d.n.allocations;
}
void* take_cached(size_t rounded, int index) {
  auto& d = devices[index];
  auto hit = d.cache.find(rounded);
  if (hit == d.cache.end()) return nullptr;
  void* memory = hit->second;
  d.cache.erase(hit);
  d.cached -= static_cast<int64_t>(rounded);
  return memory;
}
void* take_block(size_t rounded, int index) {
  if (void* memory = take_cached(rounded, index)) return memory;
  void* memory = std::aligned_alloc(kRounding, rounded);
  if (!memory) C10_THROW_ERROR(OutOfMemoryError, "the host has no " + mib(static_cast<int64_t>(rounded)) + " left for the simulated accelerator");
  if (leader_of(index).poison) std::memset(memory, 0xFF, rounded);  // NaN in every float format
  return memory;
}
void give_block(void* memory, const Block& block) {
  auto& d = devices[block.device];
  auto bytes = static_cast<int64_t>(block.rounded);
  bool keep = d.active && block.generation == d.generation && bytes <= kCachedBlockLimit &&
      d.cached + bytes <= kCacheLimit;
  if (!keep) return std::free(memory);
  d.cache.emplace(block.rounded, memory);
  d.cached += bytes;
}
Block new_block(size_t bytes, int index) {
  Block block;
  block.device = index;
  block.owner = current_slot(index);
  block.generation = devices[index].generation;
  block.bytes = bytes;
  block.rounded = round_up(bytes, kRounding);
  return block;
}

void really_free(void* memory) {
  auto node = blocks.extract(address(memory));
  auto& block = node.mapped();
  auto& d = devices[block.device];
  if (block.generation == d.generation) d.n.allocated -= static_cast<int64_t>(block.rounded);
  if (leader_of(block.device).poison) std::memset(memory, 0xFF, block.bytes);
  forget(memory, block.rounded);
  if (block.is_adopted) bury(std::move(block.adopted));
  else give_block(memory, block);
}
bool wait_for_recorded(void* memory, const Block& block) {
  Limbo waiting{memory, {}};
  for (int slot : block.recorded)
    if (anything_queued(slot)) waiting.until.emplace_back(slot, stream(slot).knows.of(slot));
  if (waiting.until.empty()) return false;
  limbo.push_back(std::move(waiting));
  return true;
}
void free_block(void* memory) {
  if (!memory) return;
  Lock lock;
  auto found = blocks.find(address(memory));
  if (found == blocks.end()) return;
  auto& block = found->second;
  if (block.generation == devices[block.device].generation)
    check_free(memory, block.bytes, block.owner, block.recorded);
  if (wait_for_recorded(memory, block)) return;
  run_overlapping(memory, block.bytes);  // reported above; run now, they must not touch the next owner's bytes
  really_free(memory);
}

// --- torch's device allocator -------------------------------------------------------------------

void set_current(c10::CachingAllocator::StatArray& stat, int64_t current, int64_t peak) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = current;
  all.peak = peak;
}
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    for (int index = 0; index < kDevices; ++index) {
      empty_cache(index);
      if (devices[index].active) ++devices[index].n.flushes;
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream s) override { record_stream(data.get(), s); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock;
    auto& d = device(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    set_current(stats.allocated_bytes, d.n.allocated, d.n.peak);
    set_current(stats.active_bytes, d.n.allocated, d.n.peak);
    set_current(stats.requested_bytes, d.n.allocated, d.n.peak);
    set_current(stats.reserved_bytes, d.n.allocated + d.cached, d.n.peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock;
    device(index).n.peak = device(index).n.allocated;
  }
  // No `override`: torch before 2.10 does not have it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    Lock lock;
    auto& d = device(index);
    return {static_cast<size_t>(d.capacity - d.n.allocated - d.cached), static_cast<size_t>(d.capacity)};
  }
} device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

// --- pinned memory ------------------------------------------------------------------------------

bool covers(const std::map<uintptr_t, Pinned>::value_type& entry, uintptr_t from, size_t bytes) {
  return entry.first <= from && from + bytes <= entry.first + entry.second.bytes;
}
bool overlaps_pinned(uintptr_t from, size_t bytes) {
  auto it = pinned.upper_bound(from);
  if (it != pinned.end() && it->first < from + bytes) return true;
  return it != pinned.begin() && std::prev(it)->first + std::prev(it)->second.bytes > from;
}
void note_pinned(uintptr_t from, size_t bytes, size_t taken, bool registered) {
  int lead = device(current_device()).leader;
  auto& d = devices[lead];
  if (static_cast<int64_t>(taken) > d.pinned_capacity - d.n.pinned)
    TORCH_CHECK(false, "simulated accelerator cannot pin ", mib(static_cast<int64_t>(taken)), ": ",
                mib(d.pinned_capacity - d.n.pinned), " of ", mib(d.pinned_capacity), " left");
  d.n.pinned += static_cast<int64_t>(taken);
  pinned[from] = {lead, d.generation, bytes, taken, registered};
}
void forget_pinned(std::map<uintptr_t, Pinned>::iterator entry) {
  auto& d = devices[entry->second.leader];
  if (entry->second.generation == d.generation) d.n.pinned -= static_cast<int64_t>(entry->second.taken);
  forget(reinterpret_cast<void*>(entry->first), entry->second.bytes);
  pinned.erase(entry);
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
  size_t rounded = kRounding;
  while (rounded < bytes) rounded <<= 1;
  return rounded;
}

// Freed pinned memory goes back at once, so there is no cache to empty.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, cpu};
    TORCH_CHECK(active_devices() > 0, "Cannot access accelerator device when none is available.");
    maybe_fail(kPinFault, current_device());
    Lock lock;
    size_t taken = power_of_two(bytes);
    void* memory = std::aligned_alloc(kRounding, taken);
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
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_memory);

}  // namespace

// --- what other files use -----------------------------------------------------------------------

Device& device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim:", index, " is not a simulated device");
  return devices[index];
}
Device& leader_of(int index) { return devices[devices[index].leader]; }
int active_devices() {
  int count = 0;
  for (int index = 0; index < kDevices; ++index)
    if (devices[index].active) count = index + 1;
  return count;
}

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

static c10::DataPtr device_pointer(void* memory, int index) {
  return {memory, memory, &free_block, c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index))};
}
c10::DataPtr allocate_on(size_t bytes, int index) {
  if (bytes == 0) return device_pointer(nullptr, index);
  maybe_fail(kAllocationFault, index);
  Lock lock;
  settle();
  auto block = new_block(bytes, index);
  void* memory = take_cached(block.rounded, index);
  try {
    reserve(block.rounded, index);
  } catch (...) {
    if (memory) give_block(memory, block);
    throw;
  }
  if (!memory) memory = take_block(block.rounded, index);
  blocks.emplace(address(memory), std::move(block));
  return device_pointer(memory, index);
}
c10::DataPtr adopt(const c10::Storage& host, int index) {
  size_t bytes = host.nbytes();
  if (bytes == 0) return device_pointer(nullptr, index);
  maybe_fail(kAllocationFault, index);
  Lock lock;
  settle();
  auto block = new_block(bytes, index);
  reserve(block.rounded, index);
  block.adopted = host;
  block.is_adopted = true;
  void* memory = host.mutable_data();
  blocks.insert_or_assign(address(memory), std::move(block));
  return device_pointer(memory, index);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto data = allocate_on(bytes, storage->device().index());
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

void settle() {
  auto waits = [](const Limbo& entry) {
    return std::any_of(entry.until.begin(), entry.until.end(), [](const std::pair<int, Epoch>& until) {
      const auto& queue = stream(until.first).queue;
      return !queue.empty() && queue.front().epoch <= until.second;
    });
  };
  auto done = std::stable_partition(limbo.begin(), limbo.end(), waits);
  for (auto it = done; it != limbo.end(); ++it) really_free(it->memory);
  limbo.erase(done, limbo.end());
}

void empty_cache(int index) {
  auto& d = devices[index];
  settle();
  for (auto& entry : d.cache) std::free(entry.second);
  d.cache.clear();
  d.cached = 0;
}

void record_stream(const void* memory, const c10::Stream& s) {
  Lock lock;
  auto it = blocks.upper_bound(address(memory));
  if (it == blocks.begin()) return;
  --it;
  if (it->first + it->second.bytes > address(memory)) it->second.recorded.push_back(slot_of(s));
}

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
  TORCH_CHECK(!overlaps_pinned(memory, size), "host_register: part or all of these ", bytes,
              " bytes is already pinned");
  note_pinned(memory, size, round_up(size, kPage), true);
}
void host_unregister(uintptr_t memory) {
  Lock lock;
  auto entry = pinned.find(memory);
  TORCH_CHECK(entry != pinned.end() && entry->second.registered, "host_unregister: this address is not registered");
  run_overlapping(reinterpret_cast<void*>(memory), entry->second.bytes);
  forget_pinned(entry);
}

// --- opening and closing ------------------------------------------------------------------------

static int free_run(int count) {
  for (int first = 0; first + count <= kDevices; ++first) {
    bool taken = false;
    for (int i = first; i < first + count; ++i) taken |= devices[i].active;
    if (!taken) return first;
  }
  TORCH_CHECK(false, "no room for ", count, " more simulated devices: there are at most ", kDevices);
}
static void start_fresh(int index, int leader) {
  auto& d = devices[index];
  auto generation = d.generation + 1;
  empty_cache(index);
  d = Device();
  d.generation = generation;
  d.leader = leader;
}
int open_devices(int count) {
  Lock lock;
  int first = free_run(count);
  for (int index = first; index < first + count; ++index) {
    start_fresh(index, first);
    devices[index].active = true;
  }
  return first;
}
void close_devices(int first) {
  Lock lock;
  for (int index = 0; index < kDevices; ++index) {
    if (!devices[index].active || devices[index].leader != first) continue;
    run_all(index);
    for (int slot = index; slot < kSlots; slot += kDevices) {
      host_waits_for(slot);
      stream(slot).free_at = 0;
    }
  }
  for (int index = kDevices - 1; index >= 0; --index)
    if (devices[index].active && devices[index].leader == first) start_fresh(index, index);
}

}  // namespace sim
