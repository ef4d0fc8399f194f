"""Which keys a query sees, for Triton: `jattn/spec.py` in its language.

A Triton kernel can only call Triton functions, so this file repeats the rules, and a test compares
every function with the one in spec.py, point by point.

    visible, key_range                       as in spec.py, by the same names
    path_bits, tree_path, depth_of           trees of draft tokens
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jattn import integers

NO_LIMIT = tl.constexpr(integers.NO_LIMIT)


class Limits(NamedTuple):
    """The limits that all sequences of a call share; a new one is a field that `load_limits` reads.

    `window` applies if C.HAS_WINDOW, `chunk` if C.HAS_CHUNK.
    """

    window: Any
    chunk: Any


class SequenceSight(NamedTuple):
    """What decides which keys the queries of one sequence see: `spec.Sight`, and its length.

    `is_causal` applies if C.CAUSAL is 2; `visible_end`, of each query or the largest, if C.HAS_END.
    """

    seq_len: Any
    is_causal: Any
    limits: Any
    visible_end: Any


@triton.jit
def up_to(sight, visible_end):
    """The same sight with other visible ends."""
    return SequenceSight(sight.seq_len, sight.is_causal, sight.limits, visible_end)


@triton.jit
def visible(q_pos, k_pos, sight, C: tl.constexpr):
    """Whether queries see keys; broadcasts. C.CAUSAL: 0 no, 1 yes, 2 as `sight.is_causal` says."""
    seen = (k_pos >= 0) & (k_pos < sight.seq_len)
    reach = k_pos <= q_pos
    if C.HAS_END:
        reach = reach | (k_pos < sight.visible_end)
    if C.CAUSAL == 1:
        seen = seen & reach
    if C.CAUSAL == 2:
        seen = seen & (reach | (sight.is_causal == 0))
    if C.HAS_WINDOW:
        # Differences: a window of 2^31 - 1 must not overflow.
        seen = seen & (q_pos - k_pos < sight.limits.window)
        if C.CAUSAL == 0:
            seen = seen & (k_pos - q_pos < sight.limits.window)
        if C.CAUSAL == 2:
            seen = seen & ((k_pos - q_pos < sight.limits.window) | (sight.is_causal != 0))
    if C.HAS_CHUNK:
        chunk = sight.limits.chunk
        begin = tl.maximum(q_pos, 0) // chunk * chunk  # one division a row
        seen = seen & (k_pos >= begin)
        if C.CAUSAL != 1 or C.HAS_END:  # positions below 0 are in no key's chunk
            seen = seen & (q_pos >= 0) & (k_pos - begin < chunk)
    return seen


@triton.jit
def load_limits(window_ptr, chunk_ptr, C: tl.constexpr):
    """Load the call's limits, 0 for one that it does not have."""
    window = 0
    if C.HAS_WINDOW:
        window = tl.load(window_ptr)
    chunk = 0
    if C.HAS_CHUNK:
        chunk = tl.load(chunk_ptr)
    return Limits(window, chunk)


@triton.jit
def key_range(first_q, last_q, sight, C: tl.constexpr):
    """`(start, end)`: no query in `[first_q, last_q]` sees a key outside `start <= k < end`."""
    start = first_q * 0
    end = tl.maximum(sight.seq_len, 0)
    reach = last_q + 1
    if C.HAS_END:
        reach = tl.maximum(reach, sight.visible_end)
    causal_end = tl.minimum(end, reach)
    if C.HAS_WINDOW:
        near = tl.minimum(sight.limits.window, NO_LIMIT)
        start = tl.maximum(start, first_q - near + 1)
        end = tl.minimum(end, last_q + near)
    if C.CAUSAL == 1:
        end = causal_end
    if C.CAUSAL == 2:
        end = tl.where(sight.is_causal != 0, causal_end, end)
    if C.HAS_CHUNK:
        chunk = tl.minimum(sight.limits.chunk, NO_LIMIT)
        start = tl.maximum(start, tl.maximum(first_q, 0) // chunk * chunk)
        last = (tl.maximum(last_q, 0) // chunk + 1) * chunk
        end = tl.where(last_q < 0, 0, tl.minimum(end, last))
    end = tl.maximum(end, 0)
    return tl.minimum(start, end), end


@triton.jit
def bits_until(last):
    """uint32 with the bits 0 to `last`, int32 [n], set: none below 0, all from 31 on."""
    one = tl.full(last.shape, 1, tl.uint32)
    some = (one << tl.minimum(tl.maximum(last + 1, 0), 31).to(tl.uint32)) - 1
    return tl.where(last >= 31, 0xFFFFFFFF, some)


@triton.jit
def count_bits(x):
    """How many bits of each uint32 are set, as int32; LLVM turns it into one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def path_bits(tree, index, real, WORD: tl.constexpr):
    """uint32 [rows]: a word of the paths of query tokens `index`, from the masks at `tree`."""
    mask = tl.load(tree + WORD, mask=real, other=0)
    until = bits_until(index - 32 * WORD)
    before = bits_until(index - 32 * WORD - 1)
    return mask & before | (until ^ before)


@triton.jit
def tree_path(tree, index, real, key, C: tl.constexpr):
    """`(seen, distance)` from query tokens `index` [rows] to `key` [keys], both [rows, keys].

    `key` counts from the sequence's first query token.
    """
    SIZE: tl.constexpr = 32 * C.TREE_WORDS
    query = index[:, None]
    at_key = key[None, :]
    seen = (at_key < 0) | ((at_key >= SIZE) & (at_key <= query))
    distance = tl.maximum(query - tl.maximum(at_key, SIZE - 1), 0) + tl.maximum(-1 - at_key, 0)
    for word in tl.static_range(C.TREE_WORDS):
        path = path_bits(tree, index, real, word)[:, None]
        at = key - 32 * word
        bit = (path >> (at & 31).to(tl.uint32)[None, :]) & 1
        inside = (at >= 0) & (at < 32)
        seen = seen | (inside[None, :] & (bit == 1))
        distance += count_bits(path & (bits_until(at) ^ 0xFFFFFFFF)[None, :])
    return seen, distance


@triton.jit
def depth_of(tree, index, real, C: tl.constexpr):
    """int32 [rows]: how many tokens of their paths come before query tokens `index`."""
    depth = tl.maximum(index - (32 * C.TREE_WORDS - 1), 0) - 1
    for word in tl.static_range(C.TREE_WORDS):
        depth += count_bits(path_bits(tree, index, real, word))
    return depth
