// Writes new rows, shared among threads.
//
//   divide the slots into parts: every slot, and with scales per block every head of a block, belongs to one part
//   threads take parts; for each they go through all slots and write the rows of its share
//
// So no two threads write the same row, and results do not depend on the number of threads. The calling thread works
// too, and waits only for parts that some thread has begun: see schedule.cc.
#include "update.h"

#include <atomic>
#include <memory>
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

constexpr int64_t kFewNumbers = 128 << 10;  // fewer are written before another thread wakes
constexpr int kPartsPerThread = 4;

}  // namespace

void write_rows(const Update& u, int threads, const Spawn& spawn) {
  int64_t numbers = 0;
  for (int i = 0; i < u.sides; ++i) numbers += u.T * u.K * u.side[i].dim;
  const bool alone = threads <= 1 || !spawn || numbers < kFewNumbers;
  auto writing = std::make_shared<Writing>();
  writing->u = u;
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
