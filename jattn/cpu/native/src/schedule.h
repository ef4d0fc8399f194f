// Chooses the instruction set, divides a call into splits and shares them among threads.
#pragma once
#include <functional>

#include "problem.h"

namespace jattn_native {

// Runs a task on another thread, at any later time; empty if there is no other thread.
using Spawn = std::function<void(std::function<void()>)>;

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
