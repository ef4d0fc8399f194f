// On which cores the threads of one call run, and how they wait for each other. The example server's products
// (examples/native) use it too.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif

namespace jattn_native {
namespace {

// The cores that a job's threads run on. Linux may queue a thread that has slept for some milliseconds behind the one
// that wakes it, on the same core, and leave other cores idle for a slice of 2 to 4 ms. So the waking thread yields,
// and the woken one moves to a core where no thread of the job runs.
class Cores {
 public:
  // Marks the calling thread's core as taken; true if it was taken before.
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

  // Takes the calling thread's core, or moves the thread to a free core if that one is taken.
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

// Waits until other threads have raised `done` to `count`. They are about to, so it polls for some tens of
// microseconds, then yields to other threads, which may be these.
template <class Count> void wait_for(const std::atomic<Count>& done, Count count) {
  constexpr int kSpins = 1000;
  for (int spins = 0; done.load(std::memory_order_acquire) < count;) {
    if (spins < kSpins) ++spins;
    else std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
  }
}

}  // namespace
}  // namespace jattn_native
