// Writes new rows, shared among threads.
//
//   divide the tokens into ranges; if a slot comes twice, the slots; with scales per block, the heads of blocks
//   threads take parts and write the rows of each (encode.h: each_row)
//
// So no two threads write the same row, and results do not depend on the number of threads. The calling thread works
// too, and waits only for parts that some thread has begun: see schedule.cc.
#include "update.h"

#include <atomic>
#include <memory>
#include <vector>
#if defined(JATTN_X86)
#include <xmmintrin.h>
#endif

namespace jattn_native {
namespace {

// Treats subnormal numbers as zero, as operands and as results: XLA's threads do so, and the words must not depend on
// the thread that runs this.
class SubnormalsAreZero {
 public:
#if defined(JATTN_X86)
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  SubnormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1ull << 24));
  }
  ~SubnormalsAreZero() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

struct Writing {
  Update u;
  int parts;
  std::atomic<int> next{0}, done{0};

  void work() {
    const SubnormalsAreZero set;
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      kernels().update(u, i, parts);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Whether no slot of the pool comes twice. A hash table of groups of 64 slots, each with a bit per slot; neighbours in
// one group are looked up once.
bool distinct(const int32_t* slots, int64_t count, int64_t total) {
  struct Group {
    int32_t number = -1;
    uint64_t seen = 0;
  };
  const auto each_group = [&](auto of) {
    for (int64_t i = 0; i < count;) {
      if (slots[i] < 0 || slots[i] >= total) {
        ++i;
        continue;
      }
      const int32_t number = slots[i] / 64;
      uint64_t bits = 0;
      for (; i < count && slots[i] >= 0 && slots[i] < total && slots[i] / 64 == number; ++i) {
        const uint64_t bit = uint64_t{1} << slots[i] % 64;
        if (bits & bit) return false;
        bits |= bit;
      }
      if (!of(number, bits)) return false;
    }
    return true;
  };
  size_t groups = 0;
  if (!each_group([&](int32_t, uint64_t) { return ++groups > 0; })) return false;
  int shift = 31;  // of a hash of 32 bits: the table has at least twice as many places as groups
  while (size_t{1} << (32 - shift) < 2 * groups) --shift;
  std::vector<Group> table(size_t{1} << (32 - shift));
  return each_group([&](int32_t number, uint64_t bits) {
    size_t at = uint32_t(number) * 2654435769u >> shift;
    while (table[at].number >= 0 && table[at].number != number) at = (at + 1) % table.size();
    if (table[at].seen & bits) return false;
    table[at].number = number, table[at].seen |= bits;
    return true;
  });
}

constexpr int64_t kFewNumbers = 128 << 10;  // fewer are written before another thread wakes
constexpr int kPartsPerThread = 4;

}  // namespace

void write_rows(const Update& u, int threads, const Spawn& spawn) {
  int64_t numbers = 0;
  for (int i = 0; i < u.sides; ++i) numbers += u.T * u.K * u.side[i].dim;
  const bool alone = threads <= 1 || !spawn || numbers < kFewNumbers;
  auto writing = std::make_shared<Writing>();
  writing->u = u;
  writing->u.distinct = alone || distinct(u.slots, u.T, u.N * u.S);
  writing->parts = alone ? 1 : threads * kPartsPerThread;
  if (!alone)
    for (int i = 1; i < threads; ++i) spawn([writing] { writing->work(); });
  writing->work();
  while (writing->done.load(std::memory_order_acquire) < writing->parts) {
#if defined(JATTN_X86)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace jattn_native
