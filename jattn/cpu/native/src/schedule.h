// Chooses the instruction set, divides a call into splits and shares them among threads.
#pragma once
#include <functional>
#include <memory>

#include "cores.h"
#include "problem.h"
#if defined(JATTN_X86)
#include <xmmintrin.h>
#endif

namespace jattn_native {

// Treats subnormal numbers as zero, as operands and as results: XLA's threads do so, and a result must not depend on
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

// Runs a task on another thread, at any later time; empty if there is no other thread.
using Spawn = std::function<void(std::function<void()>)>;

// Does the `count` parts of a job on this thread and on up to `threads - 1` others; returns when all are done. A thread
// takes part after part in `work`, and a thread that starts too late finds none. If there is no memory to start another
// thread, the others do its work.
template <class Job> void work_together(const std::shared_ptr<Job>& job, int threads, int count, const Spawn& spawn) {
  if (threads > 1) {
    job->cores.take();
    try {
      const std::function<void()> task = [job, count] {
        if (job->done.load(std::memory_order_relaxed) < count) job->cores.settle();
        const SubnormalsAreZero set;
        job->work();
      };
      for (int i = 1; i < threads; ++i) spawn(task);
    } catch (...) {  // e.g. std::bad_alloc: threads that were started must not outlive the call's buffers
    }
    std::this_thread::yield();  // lets threads that were woken on this core begin
  }
  const SubnormalsAreZero set;
  job->work();
  wait_for(job->done, count);
}

void attend(const Problem& p, int threads, const Spawn& spawn);

// The newest instruction set that this machine and the environment's JATTN_NATIVE_ISA allow.
const Kernels& kernels();
// The instruction sets of this machine that the library has, newest first, separated by spaces; and those that it
// was built without.
const char* instruction_sets();
const char* left_out();

// For tests: moves the calling thread as if another thread of its call ran on its core. Returns whether it ends on
// another core.
bool moves_off_a_taken_core();

}  // namespace jattn_native
