// On which cores the threads of one call run. The example server's products (examples/native) use it, too.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <sched.h>
#endif

namespace jattn_native {
namespace {

// Where a job's threads run. Linux may queue a thread that has slept for some milliseconds behind
// the one that wakes it, on the same core, and leave the others idle for a slice of 2 to 4 ms. So
// the waker lets it begin, and it moves to a core where none of the job's threads runs.
class Cores {
 public:
  // The calling thread's core is taken from now on; true if it was before.
  bool take() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (core < 0 || core >= kMost) return false;
    const uint64_t bit = uint64_t(1) << core % 64;
    return taken_[core / 64].fetch_or(bit, std::memory_order_relaxed) & bit;
#else
    return false;
#endif
  }

  // Takes a core for the calling thread, another one if its own is taken and there is a free one.
  void settle() {
    if (!take()) return;
#if defined(__linux__)
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;  // more cores than the set holds
    free = allowed;
    for (int core = 0; core < kMost; ++core)
      if (taken_[core / 64].load(std::memory_order_relaxed) >> core % 64 & 1) CPU_CLR(core, &free);
    if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
    take();
    sched_setaffinity(0, sizeof allowed, &allowed);
#endif
  }

  int count() const {
    int found = 0;
    for (const auto& word : taken_) found += __builtin_popcountll(word.load(std::memory_order_relaxed));
    return found;
  }

 private:
  static constexpr int kMost = 1024;  // of cpu_set_t
  std::atomic<uint64_t> taken_[kMost / 64] = {};
};

}  // namespace
}  // namespace jattn_native
