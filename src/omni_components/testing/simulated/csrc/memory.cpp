// Device memory with a capacity. It is host memory; as a caching device allocator does, ours rounds blocks up
// to 512 bytes and keeps freed blocks for reuse.
#include "state.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kRounding = 512;
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
struct Limbo {  // freed, but a recorded stream has not come past it yet
  void* memory;
  std::vector<std::pair<int, Epoch>> until;
};

// Never destroyed: tensors may outlive this library's static objects at exit.
auto& blocks = *new std::map<uintptr_t, Block>;
auto& limbo = *new std::vector<Limbo>;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// --- device blocks ------------------------------------------------------------------------------

[[noreturn]] void out_of_memory(size_t bytes, int index) {
  auto& d = device(index);
  C10_THROW_ERROR(
      OutOfMemoryError,
      "simulated accelerator out of memory: sim:" + std::to_string(index) + " tried to allocate " +
          mib(static_cast<int64_t>(bytes)) + "; " +
          mib(std::max<int64_t>(0, d.capacity - d.n.allocated)) + " of " +
          mib(d.capacity) + " free, " + mib(d.n.allocated) + " allocated");
}
// Takes `rounded` bytes off the device's capacity.
void reserve(size_t rounded, int index) {
  auto& d = device(index);
  auto bytes = static_cast<int64_t>(rounded);
  if (bytes > d.capacity - d.n.allocated - d.cached) empty_cache(index);
  if (bytes > d.capacity - d.n.allocated) out_of_memory(rounded, index);
  d.n.allocated += bytes;
  d.n.peak = std::max(d.n.peak, d.n.allocated);
  ++d.n.allocations;
}
void* take_cached(size_t rounded, int index) {
  auto& d = device(index);
  auto hit = d.cache.find(rounded);
  if (hit == d.cache.end()) return nullptr;
  void* memory = hit->second;
  d.cache.erase(hit);
  d.cached -= static_cast<int64_t>(rounded);
  return memory;
}
void* make_block(size_t rounded, int index) {
  void* memory = std::aligned_alloc(kRounding, rounded);
  if (!memory) C10_THROW_ERROR(OutOfMemoryError, "the host is out of memory for the simulated accelerator");
  if (leader_of(index).poison) std::memset(memory, 0xFF, rounded);  // NaN in every float format
  return memory;
}
void give_block(void* memory, const Block& block) {
  auto& d = device(block.device);
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
  block.generation = device(index).generation;
  block.bytes = bytes;
  block.rounded = round_up(bytes, kRounding);
  return block;
}

void really_free(void* memory) {
  auto node = blocks.extract(address(memory));
  auto& block = node.mapped();
  auto& d = device(block.device);
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
  if (block.generation == device(block.device).generation)
    check_free(memory, block.bytes, block.owner, block.recorded);
  if (wait_for_recorded(memory, block)) return;
  run_overlapping(memory, block.bytes);  // Reported above. Later they would hit the next owner's bytes.
  really_free(memory);
}

// --- torch's device allocator -------------------------------------------------------------------

void set_current(c10::CachingAllocator::StatArray& stat, int64_t current, int64_t peak) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = current;
  all.peak = peak;
}
int64_t host_memory() { return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    int leader = device(current_device()).leader;
    for (int index = 0; index < kDevices; ++index) {
      if (!device(index).active || device(index).leader != leader) continue;
      empty_cache(index);
      ++device(index).n.flushes;
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
    auto total = d.capacity == kUnlimited ? host_memory() : d.capacity;
    auto free = std::max<int64_t>(0, total - d.n.allocated - d.cached);
    return {static_cast<size_t>(free), static_cast<size_t>(total)};
  }
} device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

}  // namespace

// --- what other files use -----------------------------------------------------------------------

c10::Allocator* device_allocator() { return &device_memory; }

static c10::DataPtr device_pointer(void* memory, int index) {
  c10::Device d(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
  return {memory, memory, &free_block, d};
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
  if (!memory) memory = make_block(block.rounded, index);
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
  auto& d = device(index);
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

}  // namespace sim
