// Finds races by happens-before: per address interval, who wrote last and who read since.
//
// Two accesses to a byte race if one of them writes and neither's stream knew, by a chain of waits, that
// the other was over. That does not depend on when late copies happen to run.
#include "state.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

struct Interval {
  uintptr_t end = 0;
  Access write;
  c10::SmallVector<Access, 2> reads;
};
using Map = std::map<uintptr_t, Interval>;
auto& history = *new Map;

struct Label {
  uintptr_t end;
  std::string name;
};
auto& labels = *new std::map<uintptr_t, Label>;

// Splits the interval that `at` lies inside of, so that one begins there.
void split(uintptr_t at) {
  auto it = history.upper_bound(at);
  if (it == history.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Interval tail = it->second;
  it->second.end = at;
  history.emplace(at, std::move(tail));
}

bool known(const Access& earlier, const Clock& clock) {
  return earlier.slot < 0 || clock.of(earlier.slot) >= earlier.epoch;
}

const char* kind_of(bool earlier_writes, bool later_writes) {
  if (earlier_writes) return later_writes ? "write over an unfinished write" : "read of an unfinished write";
  return "write over memory still being read";
}

struct Found {
  uintptr_t from, to;
  const char* kind;
};

void report_pair(const Access& earlier, const std::string& later, const std::string& by, const Found& found,
                 int index) {
  Race race;
  race.kind = found.kind;
  race.first = *earlier.what;
  race.first_stream = stream_name(earlier.slot);
  race.second = later;
  race.second_stream = by;
  race.address = found.from;
  race.bytes = static_cast<int64_t>(found.to - found.from);
  race.label = label_at(found.from, found.to - found.from);
  report(std::move(race), index);
}
void report_pair(const Access& earlier, const Access& later, const Found& found) {
  report_pair(earlier, *later.what, stream_name(later.slot), found, device_of(later.slot));
  // One missing wait, one report: from here on the stream counts as having waited.
  stream(later.slot).knows.advance(earlier.slot, earlier.epoch);
}

void check(uintptr_t from, const Interval& now, const Access& by, bool write) {
  const auto& clock = stream(by.slot).knows;
  if (!known(now.write, clock)) report_pair(now.write, by, {from, now.end, kind_of(true, write)});
  if (!write) return;
  for (const auto& read : now.reads)
    if (!known(read, clock)) report_pair(read, by, {from, now.end, kind_of(false, true)});
}

void note_read(Interval& interval, const Access& by) {
  for (auto& read : interval.reads)
    if (read.slot == by.slot) {
      read = by;
      return;
    }
  interval.reads.push_back(by);
}

void read_range(uintptr_t from, uintptr_t to, const Access& by) {
  uintptr_t at = from;
  for (auto it = history.lower_bound(from); at < to; ++it) {
    if (it == history.end() || it->first > at) {  // a gap: nobody has touched this yet
      Interval fresh;
      fresh.end = it == history.end() ? to : std::min(to, it->first);
      it = history.emplace_hint(it, at, fresh);
    }
    check(it->first, it->second, by, false);
    note_read(it->second, by);
    at = it->second.end;
  }
}
void write_range(uintptr_t from, uintptr_t to, const Access& by) {
  auto first = history.lower_bound(from), last = history.lower_bound(to);
  for (auto it = first; it != last; ++it) check(it->first, it->second, by, true);
  history.erase(first, last);
  Interval written;
  written.end = to;
  written.write = by;
  history.emplace(from, std::move(written));
}

}  // namespace

void touch(const void* memory, size_t bytes, const Access& by, bool write) {
  if (!memory || bytes == 0) return;
  auto from = reinterpret_cast<uintptr_t>(memory), to = from + bytes;
  split(from);
  split(to);
  if (write) write_range(from, to, by);
  else read_range(from, to, by);
}

static void forget_labels(uintptr_t from, uintptr_t to);

void forget(const void* memory, size_t bytes) {
  if (!memory || bytes == 0) return;
  auto from = reinterpret_cast<uintptr_t>(memory), to = from + bytes;
  split(from);
  split(to);
  history.erase(history.lower_bound(from), history.lower_bound(to));
  forget_labels(from, to);
}

// Memory goes back to the stream that allocated it: the next block there may be this one. So whatever
// other streams did to it must be known to that stream or to the host, or be recorded with record_stream.
void check_free(const void* memory, size_t bytes, int owner, const std::vector<int>& recorded) {
  auto from = reinterpret_cast<uintptr_t>(memory), to = from + bytes;
  auto& clock = stream(owner).knows;
  auto safe = [&](const Access& access) {
    return known(access, clock) || known(access, host_clock()) || access.slot == owner ||
        std::find(recorded.begin(), recorded.end(), access.slot) != recorded.end();
  };
  Access freeing{owner, clock.of(owner), intern("free")};
  for (auto it = history.lower_bound(from); it != history.end() && it->first < to; ++it) {
    Found found{it->first, it->second.end, "freed while another stream uses it"};
    if (!safe(it->second.write)) report_pair(it->second.write, freeing, found);
    for (const auto& read : it->second.reads)
      if (!safe(read)) report_pair(read, freeing, found);
  }
}

// Registered memory goes back to the host: no stream may be using it.
void check_unregister(const void* memory, size_t bytes, int index) {
  auto from = reinterpret_cast<uintptr_t>(memory), to = from + bytes;
  for (auto it = history.lower_bound(from); it != history.end() && it->first < to; ++it) {
    Found found{it->first, it->second.end, "unregistered while a copy uses it"};
    std::vector<Access> accesses(it->second.reads.begin(), it->second.reads.end());
    accesses.push_back(it->second.write);
    for (const auto& access : accesses)
      if (!known(access, host_clock())) return report_pair(access, "host_unregister", "host", found, index);
  }
}

static void forget_labels(uintptr_t from, uintptr_t to) {
  auto it = labels.lower_bound(from);
  if (it != labels.begin() && std::prev(it)->second.end > from) --it;
  while (it != labels.end() && it->first < to) it = labels.erase(it);
}
void set_label(const void* memory, size_t bytes, std::string name) {
  auto from = reinterpret_cast<uintptr_t>(memory);
  forget_labels(from, from + bytes);  // a new tenant of the same memory
  labels[from] = {from + bytes, std::move(name)};
}
std::string label_at(uintptr_t address, size_t bytes) {
  auto it = labels.upper_bound(address);
  if (it != labels.begin() && std::prev(it)->second.end > address) return std::prev(it)->second.name;
  return it != labels.end() && it->first < address + bytes ? it->second.name : "";
}

void report(Race race, int index) {
  if (device(index).active) leader_of(index).races.push_back(std::move(race));
}

// Four lanes of multiply-and-mix: memory speed, and any changed byte changes the sum.
uint64_t checksum(const void* memory, size_t bytes) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;
  const auto* at = static_cast<const unsigned char*>(memory);
  uint64_t lanes[4] = {1, 2, 3, 4};
  for (; bytes >= 32; bytes -= 32, at += 32) {
    uint64_t words[4];
    std::memcpy(words, at, 32);
    for (int i = 0; i < 4; ++i) {
      lanes[i] = (lanes[i] ^ words[i]) * kPrime;
      lanes[i] ^= lanes[i] >> 29;
    }
  }
  uint64_t sum = bytes;
  for (; bytes > 0; --bytes, ++at) sum = (sum ^ *at) * kPrime;
  for (uint64_t lane : lanes) sum = (sum ^ lane) * kPrime;
  return sum;
}

}  // namespace sim
