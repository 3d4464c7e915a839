// The copy engine: on a thread of its own it moves bytes in the order in which the copies were issued, while
// the host goes on. It needs neither the process-wide lock, under which others wait for it, nor Python.
#include "state.h"

#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

namespace sim {
namespace {

struct Move {
  void* to;
  const void* from;
  size_t bytes;
};
struct Engine {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Move> moves;
  uint64_t issued = 0, done = 0;
};
Engine* latest = new Engine;  // never destroyed: its thread runs until the process ends
pid_t process = 0;            // whose thread that is

void work(Engine& engine) {
  std::unique_lock<std::mutex> guard(engine.mutex);
  while (true) {
    engine.changed.wait(guard, [&engine] { return !engine.moves.empty(); });
    Move move = engine.moves.front();
    engine.moves.pop_front();
    guard.unlock();
    std::memcpy(move.to, move.from, move.bytes);
    guard.lock();
    ++engine.done;
    engine.changed.notify_all();
  }
}

// This process's, under the process-wide lock. A forked process has no thread of its parent's, and may find its
// mutex taken: it begins anew, and what was under way counts as moved.
Engine& here() {
  if (process == getpid()) return *latest;
  auto* fresh = new Engine;
  fresh->issued = fresh->done = latest->issued;
  latest = fresh;
  process = getpid();
  std::thread(work, std::ref(*fresh)).detach();
  return *fresh;
}

}  // namespace

uint64_t start_moving(void* to, const void* from, size_t bytes) {
  auto& engine = here();
  std::lock_guard<std::mutex> guard(engine.mutex);
  engine.moves.push_back({to, from, bytes});
  engine.changed.notify_all();
  return ++engine.issued;
}
bool has_moved(uint64_t number) {
  auto& engine = here();
  std::lock_guard<std::mutex> guard(engine.mutex);
  return engine.done >= number;
}
void wait_until_moved(uint64_t number) {
  auto& engine = here();
  std::unique_lock<std::mutex> guard(engine.mutex);
  engine.changed.wait(guard, [&engine, number] { return engine.done >= number; });
}

}  // namespace sim
