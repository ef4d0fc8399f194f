// Which keys a query sees, in C++: the rules of jattn/spec.py, which a test compares with these functions point by
// point. The formula of a logit is in softmax.h.
//
//   sees(q, k) = lo <= k < hi                          a query sees one range of positions
//   in a tree:   k is before the query tokens and in the range, or on the query's path, and the
//                position counted along the path is in the range
#pragma once
#include <cstdint>

#include "problem.h"

namespace jattn_native {
namespace {

struct Range {
  int64_t lo, hi;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// The positions that a query at position q sees.
inline Range visible(const Problem& p, int64_t q, int64_t seq_len, bool causal, int64_t visible_end) {
  Range r{0, most(seq_len, 0)};
  if (causal) r.hi = least(r.hi, most(q + 1, visible_end));
  if (p.has_window) {
    r.lo = most(r.lo, q - p.window + 1);
    if (!causal) r.hi = least(r.hi, q + p.window);
  }
  if (p.has_chunk) {
    if (p.chunk < 1) return {0, 0};
    const int64_t chunk = floor_div(q, p.chunk);
    r.lo = most(r.lo, chunk * p.chunk);
    r.hi = least(r.hi, (chunk + 1) * p.chunk);
  }
  r.hi = most(r.hi, 0);
  r.lo = least(r.lo, r.hi);
  return r;
}

// A query token in a tree of draft tokens; `index` is its place among the query tokens of its sequence.
struct Path {
  const uint32_t* mask;  // [words]
  int64_t words, index;

  static uint32_t bits_until(int64_t last) {  // bits 0 to `last`
    return last < 0 ? 0 : last >= 31 ? 0xffffffffu : (1u << (last + 1)) - 1;
  }
  // The path's bits: the token itself, and those before it that its mask names.
  uint32_t row(int64_t word) const {
    const uint32_t until = bits_until(index - 32 * word), before = bits_until(index - 1 - 32 * word);
    return (mask[word] & before) | (until ^ before);
  }
  // Whether draft token `key` is on the path; `distance` is how many of the path's tokens follow it.
  bool sees(int64_t key, int64_t* distance) const {
    const int64_t bits = 32 * words;
    bool seen = key < 0 || (key >= bits && key <= index);
    *distance = most(index - most(key, bits - 1), 0) + most(-1 - key, 0);
    for (int64_t word = 0; word < words; ++word) {
      const int64_t at = key - 32 * word;
      const uint32_t bits_here = row(word);
      seen = seen || (at >= 0 && at < 32 && (bits_here >> at & 1));
      *distance += __builtin_popcount(bits_here & ~bits_until(at));
    }
    return seen;
  }
  int64_t depth() const {
    int64_t distance;
    sees(-1, &distance);
    return distance - 1;
  }
};

// A sequence of the call, and what its query tokens see.
struct Sequence {
  const Problem& p;
  int64_t b, start, count, seq_len;
  bool causal;

  Sequence(const Problem& problem, int64_t index)
      : p(problem),
        b(index),
        start(p.starts[b]),
        count(p.starts[b + 1] - p.starts[b]),
        seq_len(most(p.seq_lens[b], 0)),
        causal(p.is_causal ? p.is_causal[b] != 0 : p.causal) {}
  int64_t first() const { return int64_t(p.seq_lens[b]) - count; }  // position of its first query
  Path path(int64_t t) const { return {p.tree + (start + t) * p.tree_words, p.tree_words, t}; }
  int64_t position(int64_t t) const { return first() + (p.tree ? path(t).depth() : t); }
  Range sees(int64_t t) const {
    return visible(p, position(t), seq_len, causal, p.visible_end ? p.visible_end[start + t] : 0);
  }
  // All keys that a token in [t0, t1) may see, including those that a tree hides.
  Range hull(int64_t t0, int64_t t1) const {
    if (p.tree) {
      // Whatever its index, a token's position may be as early as the first one's; it sees no token after itself.
      const Range early = visible(p, first(), seq_len, causal, 0);
      return {least(early.lo, most(seq_len, 0)), most(least(seq_len, first() + t1), 0)};
    }
    if (p.visible_end) {
      Range all = sees(t0);
      for (int64_t t = t0 + 1; t < t1; ++t) {
        const Range r = sees(t);
        if (r.lo >= r.hi) continue;
        all = all.lo >= all.hi ? r : Range{least(all.lo, r.lo), most(all.hi, r.hi)};
      }
      return all;
    }
    const Range a = sees(t0), z = sees(t1 - 1);
    if (a.lo >= a.hi) {  // queries before the first key see nothing; later ones may
      for (int64_t t = t0 + 1; t < t1; ++t) {
        const Range r = sees(t);
        if (r.lo < r.hi) return {r.lo, most(r.hi, z.hi)};
      }
      return z;
    }
    return {least(a.lo, z.lo < z.hi ? z.lo : a.lo), most(a.hi, z.hi)};
  }
};

}  // namespace
}  // namespace jattn_native
