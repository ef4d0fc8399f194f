// Chooses the instruction set, divides a call into splits and shares them among threads.
#pragma once
#include <functional>
#include <new>

#include "problem.h"

namespace jattn_native {

// Runs a task on another thread, at any later time; empty if there is no other thread.
using Spawn = std::function<void(std::function<void()>)>;

// Runs `task` on up to `count` other threads. Where memory for one more is missing, those that are there do its work.
inline void spawn_some(const Spawn& spawn, int count, const std::function<void()>& task) {
  try {
    for (int i = 0; i < count; ++i) spawn(task);
  } catch (const std::bad_alloc&) {
  }
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
