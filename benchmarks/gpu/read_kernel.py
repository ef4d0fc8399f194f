"""A Triton kernel that only reads."""

import triton
import triton.language as tl


@triton.jit
def read(numbers, half, steps, out, WORDS: tl.constexpr, STEP: tl.constexpr):
    """Set `out[program]` to the maximum of what a program reads of one half of int32 [2, WORDS].

    Sizes are constants, so that the compiler knows it can read 16 bytes at a time.
    """
    program = tl.program_id(0)
    at = tl.arange(0, STEP)
    start = tl.load(half).to(tl.int64) * WORDS
    most = tl.full([STEP], -(2**31), tl.int32)
    for step in range(steps):
        first = (program + step.to(tl.int64) * tl.num_programs(0)) * STEP
        word = tl.load(numbers + start + first + at, mask=first + at < WORDS, other=-(2**31))
        most = tl.maximum(most, word)
    tl.store(out + program, tl.max(most, 0))
