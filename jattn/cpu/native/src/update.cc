// Writes new tokens, shared among threads.
//
//   divide the tokens into ranges, with scales per block of whole blocks and, if those are few, of some heads; if a
//   slot or such a block appears again, divide slots or blocks by a hash
//   threads take parts and write the rows of each (encode.h: each_row)
//
// So no two threads write the same row, and results do not depend on the number of threads. The calling thread works
// too, and waits only for parts that some thread has begun: see schedule.h.
#include "update.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace jattn_native {
namespace {

struct Writing {
  Cores cores;
  Update u;
  int parts;
  std::atomic<int> next{0}, done{0};
  std::atomic<bool> failed{false};  // a thread has no memory for its part

  void work() {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      try {
        kernels().update(u, i, parts);
      } catch (const std::bad_alloc&) {
        failed.store(true, std::memory_order_relaxed);
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Calls `of(number, first, end)` for runs of tokens whose slots are in one group of `size` slots. Stops at false.
template <class Of> bool each_run(const Update& u, int64_t size, Of of) {
  for (int64_t t = 0; t < u.T;) {
    const int64_t slot = u.slots[t], first = t++;
    if (slot < 0 || slot >= u.N * u.S) continue;
    const int64_t start = slot / size * size, end = std::min(start + size, u.N * u.S);
    while (t < u.T && u.slots[t] >= start && u.slots[t] < end) ++t;
    if (!of(start / size, first, t)) return false;
  }
  return true;
}

// A hash table of numbers with 64 bits each.
class Seen {
 public:
  explicit Seen(int64_t count) {
    while (int64_t{1} << (32 - shift_) < 2 * count) --shift_;
    table_.resize(size_t{1} << (32 - shift_));
  }
  // Adds bits to those of a number; false if one of them is already set.
  bool add(int64_t number, uint64_t bits) {
    size_t at = uint32_t(number) * 2654435769u >> shift_;
    while (table_[at].bits && table_[at].number != number) at = (at + 1) % table_.size();
    if (table_[at].bits & bits) return false;
    table_[at].number = number, table_[at].bits |= bits;
    return true;
  }

 private:
  struct Entry {
    int64_t number = 0;
    uint64_t bits = 0;
  };
  int shift_ = 31;  // of a hash of 32 bits
  std::vector<Entry> table_;
};

int64_t runs(const Update& u, int64_t size) {
  int64_t count = 0;
  each_run(u, size, [&](int64_t, int64_t, int64_t) { return ++count; });
  return count;
}
bool distinct_slots(const Update& u) {
  Seen seen(runs(u, 64));
  return each_run(u, 64, [&](int64_t number, int64_t first, int64_t end) {
    uint64_t all = 0;
    for (int64_t t = first; t < end; ++t) {
      const uint64_t bit = uint64_t{1} << u.slots[t] % 64;
      if (all & bit) return false;
      all |= bit;
    }
    return seen.add(number, all);
  });
}
int64_t distinct_runs(const Update& u) {
  const int64_t count = runs(u, u.S);
  Seen seen(count);
  return each_run(u, u.S, [&](int64_t block, int64_t, int64_t) { return seen.add(block, 1); }) ? count : 0;
}

constexpr int64_t kFewNumbers = 128 << 10;  // fewer are written before another thread wakes
constexpr int kPartsPerThread = 4;

}  // namespace

void write_rows(const Update& u, int threads, const Spawn& spawn) {
  int64_t numbers = 0;
  for (int i = 0; i < u.caches; ++i) numbers += u.T * u.K * u.cache[i].dim;
  const bool alone = threads <= 1 || !spawn || numbers < kFewNumbers;
  auto writing = std::make_shared<Writing>();
  writing->u = u;
  bool by_block = false, by_token = false;
  for (int i = 0; i < u.caches; ++i) (u.cache[i].per == Per::block ? by_block : by_token) = true;
  writing->u.distinct = alone || (by_token && distinct_slots(u));
  writing->u.runs = alone ? 1 : by_block ? distinct_runs(u) : 0;
  writing->parts = alone ? 1 : threads * kPartsPerThread;
  work_together(writing, alone ? 1 : threads, writing->parts, spawn);
  if (writing->failed.load(std::memory_order_relaxed)) out_of_memory();
}

}  // namespace jattn_native
