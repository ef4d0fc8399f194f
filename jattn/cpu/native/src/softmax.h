// Logits and their exponentials: the formula of jattn/spec.py and its softmax, in base 2.
//
//   s = cap * tanh(scale * dot / cap) + slope * (k - q) + bias[clip(k - q, -E, E) + E]
//   m' = max(m, s log2 e),  l = l 2^(m - m') + sum 2^(s log2 e - m')
#pragma once
#include <math.h>

#include "semantics.h"
#include "vectors.h"

namespace jattn_native {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kMost = __FLT_MAX__;

// 2^r - 1 for |r| <= 1/2, without the rounding of its leading r: the relative error is 3e-9.
INLINE Floats fraction(Floats r) {
  Floats p = r * 0.00015345810970757157f + 0.0013399930903688073f;
  p = p * r + 0.009618489071726799f;
  p = p * r + 0.05550328642129898f;
  p = p * r + 0.24022646248340607f;
  return (p * r + 0.6931471824645996f) * r;
}

// The exponents of 2 of logits x, rounded. A logit may be as large as a float can be, and would be infinite times
// log2(e): it then counts as the largest float. Infinities and NaN stay what they are.
INLINE Floats exponents(Floats x, float power) {
  Floats product = x * power;
#if defined(__AVX512F__)
  asm("" : "+v"(product));  // must not be fused with what follows
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#else
  asm("" : "+w"(product));
#endif
  const Floats most = splat(kMost);
  const Floats within = product > most ? most : product < -most ? -most : product;
  return ((x <= most) & (x >= -most)) ? within : product;
}
INLINE float exponent(float x, float power) { return exponents(splat(x), power)[0]; }

// Exponents beyond this are rounded before the maximum, which is also rounded, is subtracted: fused with the
// subtraction they would keep an error of 2^-25, more than an exponent may have.
constexpr float kFar = 1 << 24;

// 2^t for t up to about 0, at most 64; 0 from -151 down, NaN if t is NaN. `Rough`: to 2e-7, for weights that will be
// rounded to bfloat16.
template <bool Rough> INLINE Floats exp2(Floats t) {
#if defined(__AMX_BF16__)
  if constexpr (Rough) {  // 2^floor(t) times a polynomial of the rest, which is exact at 0
    const Floats r = (Floats)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF);  // 0 for infinities
    Floats p = r * 0.0018671300495043397f + 0.009017030708491802f;
    p = p * r + 0.05579991266131401f;
    p = p * r + 0.24016444385051727f;
    p = p * r + 0.6931512951850891f;
    p = p * r + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)t);
  }
#endif
#if defined(__AVX512F__)
  // If an operand is NaN, the result is the second one.
  t = (Floats)_mm512_max_ps(_mm512_set1_ps(-151.0f), _mm512_min_ps(_mm512_set1_ps(64.0f), (__m512)t));
#else
  t = t > 64.0f ? splat(64.0f) : t;
#endif
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = t + magic;
  const Floats r = t - (n - magic);
  Floats p;
  if constexpr (Rough) {
    p = r * 0.0013276472454890609f + 0.009675541892647743f;
    p = p * r + 0.05550713092088699f;
    p = p * r + 0.24022120237350464f;
    p = p * r + 0.6931469440460205f;
    p = p * r + 1.0000001192092896f;
  } else {
    p = fraction(r) + 1.0f;
  }
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)(n - magic));
#else
  const Floats x = (Floats)((Ints)p + ((Ints)n << 23));
  return t < -126.0f ? Floats{} : t == t ? x : t;
#endif
}

// tanh(y) = u / (u + 2) with u = e^2y - 1, computed from 2^n and 2^r - 1 so that nothing cancels.
INLINE Floats tanh(Floats y) {
  const float magic = 12582912.0f;
  Floats t = y * (2 * kLog2e);
  t = t > 60.0f ? splat(60.0f) : t;
  t = t < -60.0f ? splat(-60.0f) : t;
  const Floats n = t + magic;
  const Floats r = t - (n - magic);
  const Floats power = (Floats)(((Ints)n << 23) + 0x3f800000);
  const Floats u = power * fraction(r) + (power - 1.0f), below = u + 2.0f;
#if defined(__AVX512F__)
  // A division takes as long as ten products; this quotient is accurate to 2^-22.
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)below);
  return u * (near * (2.0f - below * near));
#else
  return u / below;
#endif
}

// Products to logits, with the options; a lane is a key or a row.
struct Logits {
  float scale;  // of products, including that of the keys
  bool capped, alibi;
  float cap, into_cap;  // the second is scale / cap
  const float* bias;    // the call's table, or null
  int64_t columns;

  // `cap` and `bias` are null if the call has none.
  Logits(float scale, const float* cap, bool alibi, const float* bias, int64_t columns)
      : scale(scale), capped(cap), alibi(alibi), cap(cap ? *cap : 0), into_cap(cap ? scale / *cap : 0), bias(bias),
        columns(columns) {}

  bool plain() const { return !capped && !alibi && !bias; }

  // Whether all distances from `low` to `high` have the same bias, because they are at the end of the table or past it.
  bool one_bias(int64_t low, int64_t high) const { return bias && (high <= -(columns / 2) || low >= columns / 2); }

  // `table`: where each lane's row of the bias table begins.
  INLINE Floats bias_of(Ints distance, Ints table) const {
    const int32_t extent = int32_t(columns / 2);
    distance = distance > extent ? splat(extent) : distance;
    distance = distance < -extent ? splat(-extent) : distance;
    const Ints at = distance + extent + table;
    Floats found;
    for (int i = 0; i < W; ++i) found[i] = bias[at[i]];
    return found;
  }

  // Without the bias; `distance` is k - q.
  INLINE Floats unbiased(Floats dot, Ints distance, Floats slope) const {
    Floats x = dot * scale;
    if (capped) x = cap * tanh(dot * into_cap);
    if (alibi) x += slope * __builtin_convertvector(distance, Floats);
    return x;
  }

  INLINE Floats operator()(Floats dot, Ints distance, Floats slope, Ints table) const {
    const Floats x = unbiased(dot, distance, slope);
    return bias ? x + bias_of(distance, table) : x;
  }
  float one(float dot, int64_t distance, float slope, int32_t table) const {
    return (*this)(splat(dot), splat(int32_t(distance)), splat(slope), splat(table))[0];
  }
};

// The running maximum is stored multiplied and rounded, so rescaling starts from exactly what was subtracted.
INLINE float finite(float m) { return m == -kInf ? 0.0f : m; }
INLINE Floats finite(Floats m) { return m == -kInf ? Floats{} : m; }

// Writes out and lse of row r of a work item, from its weighted sums o [V], maximum and denominator.
inline void finish_row(const Problem& p, const Split& split, int r, const float* o, float m, float l) {
  const int64_t G = p.group(), head = split.head * G + r % G;
  const int64_t token = p.starts[split.b] + split.t0 + r / G, row = token * p.H + head;
  float rescale = 1;
  if (p.sinks) {
    const float sink = exponent(p.sinks[p.sinks_per_token ? row : head], kLog2e);
    const float top = sink > m || sink != sink ? sink : m;
    if (top != -kInf) {
      rescale = m == -kInf ? 0 : ::exp2f(m - top);
      l = l * rescale + ::exp2f(sink - top);
      m = top;
    }
  }
  float inverse = l > 0 || l != l ? rescale / l : 0;
  if (p.v_scale && inverse != 0) inverse *= p.v_scale[split.head];
  char* out = static_cast<char*>(p.out) + row * p.V * (p.out_type == Format::f32 ? 4 : 2);
  if (p.out_type == Format::f32) {
    for (int64_t v = 0; v < p.V; ++v) reinterpret_cast<float*>(out)[v] = o[v] * inverse;
  } else if (p.out_type == Format::bf16) {
    int64_t v = 0;
    for (; v + W <= p.V; v += W) write(out + v * 2, rounded_bf16(read<Floats>(o + v) * inverse));
    for (; v < p.V; ++v) reinterpret_cast<uint16_t*>(out)[v] = to_bf16(o[v] * inverse);
  } else {
    for (int64_t v = 0; v < p.V; ++v) reinterpret_cast<uint16_t*>(out)[v] = to_f16(o[v] * inverse);
  }
  // A maximum that counts as the largest float stays the largest.
  const float lse = fabsf(m) == kMost ? m : (m + ::log2f(l)) * kLn2;
  p.lse[row] = l > 0 || l != l ? lse : -kInf;
}

// The same, or for one of several splits the partial result, to be merged.
inline void put_row(const Problem& p, const Split& split, int rows, int r, const float* o, float m, float l) {
  if (!split.partial) return finish_row(p, split, r, o, m, l);
  memcpy(split.partial + r * p.V, o, p.V * 4);
  split.partial[rows * p.V + r] = m;
  split.partial[rows * p.V + rows + r] = l;
}

inline void merge(const Problem& p, const Split* splits, int count) {
  const int rows = int((splits[0].t1 - splits[0].t0) * p.group());
  float* o = static_cast<float*>(malloc(p.V * 4));
  if (!o) out_of_memory();
  for (int r = 0; r < rows; ++r) {
    float m = -kInf, l = 0;
    for (int i = 0; i < count; ++i) {
      const float other = splits[i].partial[rows * p.V + r];
      if (other > m || other != other) m = other;
    }
    memset(o, 0, p.V * 4);
    for (int i = 0; i < count; ++i) {
      const float* x = splits[i].partial;
      const float at = x[rows * p.V + r];
      if (at == -kInf && x[rows * p.V + rows + r] == 0) continue;  // NaN if all logits are
      const float share = ::exp2f(at - m);
      l += share * x[rows * p.V + rows + r];
      for (int64_t v = 0; v < p.V; ++v) o[v] += share * x[r * p.V + v];
    }
    finish_row(p, splits[0], r, o, m, l);
  }
  free(o);
}

}  // namespace
}  // namespace jattn_native
