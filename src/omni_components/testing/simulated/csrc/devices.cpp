// The devices themselves: opened for a SimulatedAccelerator, closed and made as new after it.
#include "state.h"

#include <c10/util/Exception.h>

#include <cstdio>

namespace sim {

static Device* make_devices() {
  auto* made = new Device[kDevices];  // never destroyed, as all state here
  for (int index = 0; index < kDevices; ++index) made[index].leader = index;
  return made;
}
static Device* const devices = make_devices();

Device& device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim:", index, " is not a simulated device");
  return devices[index];
}
Device& leader_of(int index) { return devices[device(index).leader]; }
int active_devices() {
  int count = 0;
  for (int index = 0; index < kDevices; ++index)
    if (devices[index].active) count = index + 1;
  return count;
}

std::string mib(int64_t bytes) {
  if (bytes == kUnlimited) return "unlimited";
  char text[64];
  auto amount = static_cast<double>(bytes) / 1048576;
  std::snprintf(text, sizeof text, bytes < 10 << 20 ? "%.3f MiB" : "%.1f MiB", amount);
  return text;
}

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
    restart_stream_pool(index);
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
