// The copy engine: on a thread of its own it moves bytes in the order in which the copies were issued, while
// the host goes on. It needs neither the process-wide lock, under which others wait for it, nor Python.
#include "state.h"

#include <unistd.h>

#include <condition_variable>
#include <cstring>
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
  pid_t process = 0;  // whose thread it is: a forked process has none
};
auto& engine = *new Engine;  // never destroyed: its thread runs until the process ends

void work() {
  std::unique_lock<std::mutex> guard(engine.mutex);
  while (true) {
    engine.changed.wait(guard, [] { return !engine.moves.empty(); });
    Move move = engine.moves.front();
    engine.moves.pop_front();
    guard.unlock();
    std::memcpy(move.to, move.from, move.bytes);
    guard.lock();
    ++engine.done;
    engine.changed.notify_all();
  }
}

}  // namespace

uint64_t start_moving(void* to, const void* from, size_t bytes) {
  std::lock_guard<std::mutex> guard(engine.mutex);
  if (engine.process != getpid()) {
    engine.process = getpid();
    std::thread(work).detach();
  }
  engine.moves.push_back({to, from, bytes});
  engine.changed.notify_all();
  return ++engine.issued;
}
bool has_moved(uint64_t number) {
  std::lock_guard<std::mutex> guard(engine.mutex);
  return engine.done >= number;
}
void wait_until_moved(uint64_t number) {
  std::unique_lock<std::mutex> guard(engine.mutex);
  engine.changed.wait(guard, [number] { return engine.done >= number; });
}

}  // namespace sim
