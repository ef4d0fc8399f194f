// Rows in the lanes: the rows of a panel, and how their products become weights.
//
//   S, scaled, with the options, masked
//   m' = max(m, S), a = 2^(m - m'), P = 2^(S - m'), l = a l + sum P
#pragma once
#include "decode.h"

namespace jattn_native {
namespace {

constexpr int kPanel = kLanes ? 2 : 3;  // vectors of rows at most

// The rows of a panel and their results so far. Lanes past the last row of the split repeat that row.
struct Panel {
  int first, size;  // vectors
  Floats m[kPanel], l[kPanel], zero[kPanel], total[kPanel], slope[kPanel];
  Ints lo[kPanel], hi[kPanel], position[kPanel], table[kPanel];
  Row* rows;      // [size * W]
  int64_t last_lo, first_hi, first_lo, last_hi;  // extremes of the rows' ranges,
  int64_t first_position, last_position;          // and positions

  void begin(const Problem& p, const Split& split, const Sequence& sequence, int from, int vectors, Row* all) {
    const int count = int((split.t1 - split.t0) * p.group());
    first = from, size = vectors, rows = all + from * W;
    first_lo = first_hi = first_position = INT64_MAX;
    last_lo = last_hi = last_position = 0;
    for (int n = 0; n < size; ++n) {
      m[n] = splat(-kInf);
      l[n] = zero[n] = total[n] = Floats{};
      for (int i = 0; i < W; ++i) {
        const int r = (first + n) * W + i;
        const Row here = rows[n * W + i] = row_of(p, split, sequence, r < count ? r : count - 1);
        lo[n][i] = int32_t(here.range.lo), hi[n][i] = int32_t(here.range.hi);
        position[n][i] = int32_t(here.position), slope[n][i] = here.slope, table[n][i] = here.table;
        first_lo = least(first_lo, here.range.lo), last_lo = most(last_lo, here.range.lo);
        first_hi = least(first_hi, here.range.hi), last_hi = most(last_hi, here.range.hi);
        first_position = least(first_position, here.position), last_position = most(last_position, here.position);
      }
    }
  }

  // How many of the keys to work on: up to the last one that a row sees.
  int upto(const Keys& keys, bool in_tree) const {
    if (in_tree) return keys.count;
    if (keys.first + keys.count <= first_lo) return 0;
    return int(most(least(keys.count, last_hi - keys.first), 0));
  }
};

// Turns products s [count][N] into logits and updates the maximum.
// `Lazy`: the maximum stays while exponentials are at most 2^8 times as large, so that sums need no rescaling.
template <int N, bool Lazy>
INLINE void see(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel, const Keys& keys,
                bool in_tree, int count, Floats* s, Floats* alpha, Floats* base) {
  if (p.key.per != Per::nothing)
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n) s[j * N + n] *= keys.k_scale[j];
  if (p.key.zero)
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n) s[j * N + n] += keys.k_zero[j] * panel.total[n];
  if (in_tree) {
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n)
        for (int x = 0; x < W; ++x) {
          const float dot = s[j * N + n][x];
          s[j * N + n][x] = tree_logit(sequence, panel.rows[n * W + x], factors.logits, dot, keys.first + j);
        }
  } else if (const Logits& logits = factors.logits;
             logits.one_bias(keys.first - panel.last_position, keys.first + count - 1 - panel.first_position)) {
    for (int n = 0; n < N; ++n) {
      const Floats found = logits.bias_of(int32_t(keys.first) - panel.position[n], panel.table[n]);
      for (int j = 0; j < count; ++j)
        s[j * N + n] =
            logits.unbiased(s[j * N + n], int32_t(keys.first + j) - panel.position[n], panel.slope[n]) + found;
    }
  } else if (!factors.plain(p)) {
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n)
        s[j * N + n] = factors.logits(s[j * N + n], int32_t(keys.first + j) - panel.position[n], panel.slope[n],
                                      panel.table[n]);
  }
  const bool masked = !in_tree && (keys.first < panel.last_lo || keys.first + count > panel.first_hi);
  for (int n = 0; n < N; ++n) {
    Floats top = splat(-kInf), other = top;
    if (masked) {
      for (int j = 0; j < count; ++j) {
        const Ints at = splat(int32_t(keys.first + j));
        const Floats x = ((at >= panel.lo[n]) & (at < panel.hi[n])) ? s[j * N + n] : splat(-kInf);
        s[j * N + n] = x;
        top = larger(x, top);
      }
    } else {
      int j = 0;
      for (; j + 2 <= count; j += 2) top = larger(s[j * N + n], top), other = larger(s[(j + 1) * N + n], other);
      if (j < count) top = larger(s[j * N + n], top);
      top = larger(other, top);
    }
    Floats now = larger(exponents(top, factors.power), panel.m[n]);
    if (Lazy) now = now <= panel.m[n] + 8.0f ? panel.m[n] : now;
    base[n] = finite(now);
    alpha[n] = panel.m[n] == -kInf ? splat(1.0f) : exp2<false>(panel.m[n] - base[n]);  // sums are still zero
    panel.m[n] = now;
  }
}

// Replaces logits s [count][N] with weights: [count][N] floats, or [count / 2][N] pairs.
template <int N, bool Paired, class Prefetch>
INLINE void weigh_up(const Problem& p, const Factors& factors, Panel& panel, const Keys& keys, int count, Floats* s,
                     const Floats* alpha, const Floats* base, Prefetch prefetch_next) {
  Words* weights = reinterpret_cast<Words*>(s);
  const bool scaled = p.value.per != Per::nothing || p.value.zero;
  for (int n = 0; n < N; ++n) {
    Floats sum{}, more{}, sum_z{};
    const bool far = largest(((base[n] <= kFar) & (base[n] >= -kFar)) ? Floats{} : splat(1.0f)) > 0;  // or NaN
    if (far)
      for (int j = 0; j < count; ++j) s[j * N + n] = exponents(s[j * N + n], factors.power) - base[n];
    const float power = far ? 1 : factors.power;
    const Floats from = far ? Floats{} : base[n];
    // Scales are not part of the denominator.
    auto weight = [&](int j, Floats& sum) __attribute__((always_inline)) {
      const Floats e = exp2<Paired>(s[j * N + n] * power - from);
      sum += e;
      if (!scaled) return e;
      if (p.value.zero) sum_z += e == 0.0f ? e : e * keys.v_zero[j];
      return p.value.per == Per::nothing ? e : e == 0.0f ? e : e * keys.v_scale[j];
    };
    if constexpr (Paired) {
      int j = 0;
      for (; j + 2 <= count; j += 2) {
        const Floats x = weight(j, sum), y = weight(j + 1, more);
        prefetch_next();
        weights[j / 2 * N + n] = scaled ? nearest_pairs(x, y) : rounded_pairs(x, y);
      }
      if (j < count) {
        const Floats x = weight(j, sum);
        weights[j / 2 * N + n] = scaled ? nearest_pairs(x, Floats{}) : rounded_pairs(x, Floats{});
      }
    } else {
      for (int j = 0; j < count; ++j) s[j * N + n] = weight(j, sum);
    }
    panel.l[n] = panel.l[n] * alpha[n] + (sum + more);
    panel.zero[n] = panel.zero[n] * alpha[n] + sum_z;
  }
}

}  // namespace
}  // namespace jattn_native
