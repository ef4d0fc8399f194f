// New rows as words of the pool: `quantize` of jattn/formats for every cache format, in the same float32 operations, so
// that the words are the same bits. Divisors are turned into reciprocals; subnormal float32 numbers count as zero, as
// in everything that XLA runs on a CPU (update.cc sets the processor accordingly).
//
//   for each token of this part: skip it if its slot is outside the pool
//     for each KV head: the row as float32, divided by its head's scale
//       scale, zero or groups from the row's largest numbers -> the pool
//       words of row / scale, to nearest even               -> the pool
#pragma once
#include "numbers.h"
#include "semantics.h"
#include "update.h"

namespace jattn_native {
namespace {

constexpr float kLimit = 0x1p126f;     // an infinity counts as this when a scale is chosen
constexpr float kHeadroom = 8.0f;      // jattn/cpu/xla/writing.py: HEADROOM
constexpr float kEmpty = 0x1p-100f;    // a block's scale up to this one becomes 1
constexpr uint32_t kInfinity = 0x7f800000u;

// NaN stays NaN: a comparison with it is false, and instructions return their second operand then.
INLINE Floats clip(Floats x, float low, float high) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), (__m256)x));
#else
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
#endif
}
INLINE float clip(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
// By hand because GCC 12 compares and blends where one of the two is constant.
INLINE Words smaller(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_min_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_min_epu32((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}
INLINE Words larger(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
INLINE Words magnitude(Floats x) { return (Words)x & 0x7fffffffu; }
INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The largest word of a vector. By hand where compilers would take the lanes one at a time.
INLINE uint32_t largest(Words x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#elif defined(__AVX2__)
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1))));
#else
  uint32_t found = x[0];
  for (int i = 1; i < W; ++i) found = x[i] > found ? x[i] : found;
  return found;
#endif
}
// Maps floats to words that have the same order, and back.
INLINE Words ordered(Floats x) {
  const Words bits = (Words)x;
  return bits ^ ((Words)((Ints)bits >> 31) | 0x80000000u);
}
INLINE float unordered(uint32_t x) { return float_of(x & 0x80000000u ? x ^ 0x80000000u : ~x); }

// The lanes of `code` where `x` is a number, zero elsewhere.
INLINE Words where_number(Floats x, Words code) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q), (__m512i)code);
#else
  return code & (Words)(x == x);
#endif
}

// As jattn/formats/rounding.py: to_float. The word of a small float's magnitude, whose mantissa has `drop` bits fewer.
// The sum with a power of two, whose last bit is worth what the last bit of the word is, rounds and counts those at
// once.
template <int mantissa, int exponent, uint32_t largest, uint32_t nan> INLINE Words to_small(Floats x) {
  constexpr int drop = 23 - mantissa;
  constexpr uint32_t smallest = uint32_t(127 + exponent) << 23, ahead = uint32_t(drop) << 23;
  constexpr uint32_t limit = uint32_t((largest >> mantissa) + 126 + exponent) << 23 | (largest << drop & 0x7fffffu);
  const Words size = smaller(magnitude(x), Words{} + limit);
  const Words unit = larger(size & kInfinity, Words{} + smallest) + ahead;
  const Words count = (Words)((Floats)size + (Floats)unit) - unit;
  const Words steps = (unit >> drop) - ((smallest + ahead) >> drop);
  return x == x ? count + steps : Words{} + nan;
}
INLINE Words to_e4m3(Floats x) { return to_small<3, -6, 0x7e, 0x7f>(x); }
INLINE Words to_e5m2(Floats x) { return to_small<2, -14, 0x7b, 0x7e>(x); }

// To integers, to nearest even. For |x| < 2^22, and with AVX2 for any x: those that are too large become -2^31.
INLINE Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: float32 has no fractions there
  return (Ints)(x + splat(shift)) - 0x4b400000;
#endif
}
// Integers between two bounds; NaN is 0.
INLINE Words to_integer(Floats x, float low, float high) {
  return where_number(x, (Words)nearest(clip(x, low, high)));
}
// 0, 1/2, 1, 3/2, 2, 3, 4 and 6 are the words 0 to 7, and a NaN is 0.
INLINE Words to_e2m1(Floats x) {
#if defined(__AVX2__)
  // The least of three roundings, one for each distance between neighbours: 1/2, 1 and 2. A number that is too large
  // for an integer becomes 2^31, and then 7.
  const Floats size = (Floats)magnitude(x);
  const auto rounded = [](Floats y) { return (Words)nearest(y); };
  const Words code = smaller(smaller(rounded(size + size), rounded(size) + 2u), rounded(size * splat(0.5f)) + 4u);
  return where_number(x, smaller(code, Words{} + 7u));
#else
  return to_small<1, 0, 7, 0>(x);
#endif
}

INLINE Words to_bf16(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return magnitude(x) > kInfinity ? bits >> 31 << 15 | 0x7fc0u : rounded;
}

// By hand where GCC 12 would go through halves of registers.
INLINE void write_bytes(char* out, Words x) {
#if defined(__AVX512F__)
  write(out, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m256i picked = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  const uint64_t low = uint32_t(_mm256_extract_epi32(picked, 0)), high = uint32_t(_mm256_extract_epi32(picked, 4));
  write(out, low | high << 32);
#else
  write(out, __builtin_convertvector(x, Bytes));
#endif
}
INLINE void write_nibbles(char* out, Words x) {  // the first of two in the low half of a byte
  typedef uint64_t Pairs __attribute__((vector_size(W * 4)));
  const Pairs both = (Pairs)(x & 15u), bytes = both | both >> 28;
#if defined(__AVX512F__)
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8((__m512i)bytes));
#elif defined(__AVX2__)
  const __m256i picked = _mm256_shuffle_epi8((__m256i)bytes, _mm256_set1_epi32(0x0800));
  write(out, uint16_t(_mm256_extract_epi16(picked, 0)));
  write(out + 2, uint16_t(_mm256_extract_epi16(picked, 8)));
#else
  for (int i = 0; i < W / 2; ++i) out[i] = char(bytes[i]);
#endif
}
INLINE void write_halves(char* out, Floats x) {
#if defined(__AVX512F__)
  write(out, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  write(out, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  uint16_t halves[W];
  for (int i = 0; i < W; ++i) halves[i] = to_f16(x[i]);
  memcpy(out, halves, sizeof halves);
#endif
}

constexpr int64_t bytes_for(Format f, int64_t numbers) {
  return packed(f) ? numbers / 2 : numbers * bytes_of(f);
}

constexpr bool in_codes(Format f) { return packed(f) || bytes_of(f) == 1; }

// W numbers, divided by all their scales, as integers or, of floats, their words without the sign.
template <Format F> INLINE Words code(Floats x, float low) {
  if constexpr (F == Format::e4m3) return to_e4m3(x);
  if constexpr (F == Format::e5m2) return to_e5m2(x);
  if constexpr (F == Format::int8) return to_integer(x, low, 127);
  if constexpr (F == Format::int4) return to_integer(x, low, 7);
  return to_e2m1(x);
}
constexpr uint32_t sign_bit(Format f) {
  return f == Format::nvfp4 ? 8 : f == Format::e4m3 || f == Format::e5m2 ? 128 : 0;  // integers have none
}

// W numbers, divided by all their scales, as words.
template <Format F> INLINE void put(char* out, Floats x, float low) {
  if constexpr (F == Format::f32) write(out, x);
  if constexpr (F == Format::bf16) write(out, narrow(to_bf16(x)));
  if constexpr (F == Format::f16) write_halves(out, x);
  if constexpr (in_codes(F)) {
    const Words words = code<F>(x, low) | ((Words)x >> 31) * sign_bit(F);
    packed(F) ? write_nibbles(out, words) : write_bytes(out, words);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The lanes of four vectors as bytes, in a special order. Numbers that are too large keep their sign.
INLINE __m256i narrow_four(const Words* x) {
  return _mm256_packs_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                            _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
}
// `put` of 4 W numbers.
template <Format F> INLINE void put_four(char* out, const Floats* x, float low) {
  Words codes[4], given[4];
  UNROLL for (int i = 0; i < 4; ++i) codes[i] = code<F>(x[i], low), given[i] = (Words)x[i];
  __m256i bytes = narrow_four(codes);
  if constexpr (sign_bit(F) != 0) {
    const __m256i signs = _mm256_and_si256(narrow_four(given), _mm256_set1_epi8(char(128)));
    bytes = _mm256_or_si256(bytes, packed(F) ? _mm256_srli_epi16(signs, 4) : signs);
  }
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if constexpr (!packed(F)) return write(out, bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
  write(out, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
#endif

// `of(i)` gives W numbers of the row from the i-th on; `low` bounds integers from below.
template <Format F, class Of> INLINE void put_row(char* out, int64_t dim, float low, Of of) {
  int64_t i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (in_codes(F))
    for (; i + 4 * W <= dim; i += 4 * W) {
      const Floats four[] = {of(i), of(i + W), of(i + 2 * W), of(i + 3 * W)};
      put_four<F>(out + bytes_for(F, i), four, low);
    }
#endif
  for (; i + W <= dim; i += W) put<F>(out + bytes_for(F, i), of(i), low);
  if (i == dim) return;
  char tail[W * 4];
  put<F>(tail, of(i), low);
  memcpy(out + bytes_for(F, i), tail, bytes_for(F, dim - i));
}

// The row as float32, divided by its head's scale; past its end its first number is repeated, which changes no minimum
// or maximum.
template <Format F> INLINE void load_row(const char* from, int64_t dim, const float* divisor, float* line) {
  int64_t i = 0;
  const Floats by = splat(divisor ? 1 / *divisor : 1.0f);
  const auto over = [&](Floats x) { return divisor ? x * by : x; };
  for (; i + 4 * W <= dim; i += 4 * W) {
    Floats four[4];
    UNROLL for (int j = 0; j < 4; ++j) four[j] = numbers<F>(from + (i + j * W) * bytes_of(F));
    if (divisor) UNROLL for (int j = 0; j < 4; ++j) four[j] *= by;
    UNROLL for (int j = 0; j < 4; ++j) write(line + i + j * W, four[j]);
  }
  for (; i + W <= dim; i += W) write(line + i, over(numbers<F>(from + i * bytes_of(F))));
  if (i == dim) return;
  char tail[W * 4];
  for (int j = 0; j < W; ++j) memcpy(tail + j * bytes_of(F), from, bytes_of(F));
  memcpy(tail, from + i * bytes_of(F), (dim - i) * bytes_of(F));
  write(line + i, over(numbers<F>(tail)));
}

struct Line {
  float* at;
  int64_t dim;

  Floats operator[](int64_t i) const { return read<Floats>(at + i); }
  // The largest magnitude. A NaN is the result, or is left out.
  template <bool with_nan> float largest() const {
    Words found = {};
    for (int64_t i = 0; i < dim; i += W) {
      Words here = magnitude((*this)[i]);
      if constexpr (!with_nan) here = where_number((*this)[i], here);
      found = larger(here, found);
    }
    return float_of(::jattn_native::largest(found));
  }
  // The smallest and the largest number; NaN both where there is one.
  void range(float* low, float* high) const {
    Floats first = (*this)[0], last = first;
    Words nan = {};
    for (int64_t i = 0; i < dim; i += W) {
      const Floats x = (*this)[i];
      first = x < first ? x : first;
      last = larger(x, last);
      nan |= (Words)(x != x);
    }
    *low = unordered(~::jattn_native::largest(~ordered(first)));
    *high = unordered(::jattn_native::largest(ordered(last)));
    if (::jattn_native::largest(nan)) *low = *high = __builtin_nanf("");
  }
};

INLINE float reciprocal(float scale) { return scale == 0 ? 1 : 1 / scale; }

#if defined(__AVX512F__)
// The largest lane of each of eight vectors, in the first eight lanes.
INLINE __m512i largest_of_each(const Words* groups) {
  __m512i four[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    __m512i x[4];
    UNROLL for (int j = 0; j < 4; ++j) x[j] = (__m512i)groups[4 * i + j];
    const __m512i first = _mm512_max_epu32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i last = _mm512_max_epu32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    four[i] = _mm512_max_epu32(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
  }
  const __m512i halves =
      _mm512_max_epu32(_mm512_shuffle_i32x4(four[0], four[1], 0x44), _mm512_shuffle_i32x4(four[0], four[1], 0xee));
  return _mm512_max_epu32(_mm512_shuffle_i32x4(halves, halves, 0x88), _mm512_shuffle_i32x4(halves, halves, 0xdd));
}
constexpr int kMaxima = 8;
INLINE void write_largest(float* to, const Words* groups) {
  write(to, _mm512_castsi512_si256(largest_of_each(groups)));
}
#else
constexpr int kMaxima = W;
INLINE void write_largest(float* to, const Words* groups) {
  Floats sizes[W];
  UNROLL for (int i = 0; i < W; ++i) sizes[i] = (Floats)groups[i];
  write(to, reduce_each(sizes, [](Floats x, Floats y) { return (Floats)larger((Words)x, (Words)y); }));
}
#endif

// The largest magnitude of each group of 16; NaN where there is one.
INLINE void group_maxima(const Line& x, float* most) {
  const auto group = [&](int64_t i) {
    Words found = magnitude(x[i]);
    UNROLL for (int j = W; j < 16; j += W) found = larger(magnitude(x[i + j]), found);
    return found;
  };
  int64_t i = 0;
  for (; i + 16 * kMaxima <= x.dim; i += 16 * kMaxima) {
    Words groups[kMaxima];
    UNROLL for (int j = 0; j < kMaxima; ++j) groups[j] = group(i + 16 * j);
    write_largest(most + i / 16, groups);
  }
  for (; i < x.dim; i += 16) most[i / 16] = float_of(largest(group(i)));
}

// Writes row `row` of the pool from the numbers of `x`, which are divided by their head's scale. `sizes` is scratch.
template <Format F> void store_row(const Written& cache, int64_t row, float block_scale, const Line& x, float* sizes) {
  char* out = cache.words + row * cache.row_bytes;
  // Not needed if only this row sets the scale: a number beyond the limit is then the largest word anyway.
  const auto limited = [&](int64_t i) { return clip(x[i], -kLimit, kLimit); };
  if constexpr (F == Format::nvfp4) {
    const int64_t groups = cache.dim / 16;
    group_maxima(x, sizes);
    for (int64_t g = 0; g < groups; g += W) {
      const Floats most = clip(read<Floats>(sizes + g), 0, kLimit) * splat(1.0f / 6);
      char words[W];
      write_bytes(words, to_e4m3(most));
      uint8_t* to = cache.groups + row * groups + g;
      if (groups - g >= W) write(to, read<Bytes>(words));
      else memcpy(to, words, groups - g);
      const Floats size = of_e4m3(read<Bytes>(words));
      write(sizes + g, splat(1.0f) / (size == Floats{} ? splat(1.0f) : size));
    }
    put_row<F>(out, cache.dim, 0, [&](int64_t i) { return x[i] * splat(sizes[i / 16]); });
  } else if constexpr (F == Format::int8 || F == Format::int4) {
    constexpr float most = F == Format::int8 ? 127 : 7;
    if (cache.zero) {
      float low, high;
      x.range(&low, &high);
      low = clip(low, -kLimit, kLimit), high = clip(high, -kLimit, kLimit);
      const float scale = (high - low) * (1 / (2 * most + 1)), zero = low + scale * (most + 1);
      cache.scale[row] = scale, cache.zero[row] = zero;
      const Floats by = splat(reciprocal(scale)), from = splat(zero);
      put_row<F>(out, cache.dim, -most - 1, [&](int64_t i) { return (limited(i) - from) * by; });
    } else {
      const float scale = clip(x.largest<true>(), 0, kLimit) * (1 / most);
      cache.scale[row] = scale;
      const Floats by = splat(reciprocal(scale));
      put_row<F>(out, cache.dim, -most, [&](int64_t i) { return x[i] * by; });
    }
  } else if (cache.per == Per::token) {
    constexpr float most = F == Format::e4m3 ? 448 : 57344;
    const float scale = clip(x.largest<false>(), 0, kLimit) * (1 / most);
    cache.scale[row] = scale;
    const Floats by = splat(reciprocal(scale));
    put_row<F>(out, cache.dim, 0, [&](int64_t i) { return x[i] * by; });
  } else if (cache.per == Per::block) {
    const Floats by = splat(reciprocal(block_scale));
    put_row<F>(out, cache.dim, 0, [&](int64_t i) { return limited(i) * by; });
  } else {
    put_row<F>(out, cache.dim, 0, [&](int64_t i) { return x[i]; });
  }
}

using LoadRow = void (*)(const char*, int64_t, const float*, float*);
using StoreRow = void (*)(const Written&, int64_t, float, const Line&, float*);

inline LoadRow loader(Format f) {
  switch (f) {
    case Format::bf16: return load_row<Format::bf16>;
    case Format::f16: return load_row<Format::f16>;
    default: return load_row<Format::f32>;
  }
}
inline StoreRow storer(Format f) {
  if (f == Format::f32) return store_row<Format::f32>;
  if (f == Format::f16) return store_row<Format::f16>;
  return by_format(f, [](auto of) -> StoreRow { return store_row<decltype(of)::value>; });
}

// Part `part` of a range of numbers that is divided into `parts` equal parts.
struct Part {
  int part, parts;

  int64_t first(int64_t count) const { return count * part / parts; }
  int64_t end(int64_t count) const { return count * (part + 1) / parts; }
  bool has(int64_t one) const {  // scattered, so that no stride goes to a single part
    return int(uint64_t(uint32_t(one) * 2654435769u) * uint32_t(parts) >> 32) == part;
  }
};
constexpr int64_t kRun = 16;  // slots: a line of float32 scales

// The first token from `t` on that is not in the same block as the one before it.
INLINE int64_t next_block(const Update& u, int64_t t) {
  if (t == 0 || t >= u.T || u.slots[t - 1] < 0) return t;
  const int64_t start = u.slots[t - 1] / u.S * u.S;
  while (t < u.T && u.slots[t] >= start && u.slots[t] < start + u.S) ++t;
  return t;
}

// Calls `of(t, block, offset, head)` for every row of the part, in token order. A part is a range of tokens; if the
// rows of a block share a scale, of whole blocks, and if those are few, of some heads. But where a slot or block
// appears twice (`distinct`, `runs`), a part has scattered runs of slots or scattered blocks: of two tokens with one
// slot the later one stays.
template <class Of> INLINE void each_row(const Update& u, const Written& cache, const Part& part, Of of) {
  const bool by_block = cache.per == Per::block, in_range = by_block ? u.runs > 0 : u.distinct;
  const int64_t S = u.S, slots = u.N * S;
  const int64_t for_heads = in_range ? part.parts / least(part.parts, most(u.runs, 1)) : part.parts;
  const int by_head = by_block ? int(least(u.K, for_heads)) : 1;
  const Part heads{part.part % by_head, by_head}, rest{part.part / by_head, part.parts / by_head};
  if (rest.part >= rest.parts) return;
  int64_t t = in_range ? rest.first(u.T) : 0, end = in_range ? rest.end(u.T) : u.T;
  if (in_range && by_block) t = next_block(u, t), end = next_block(u, end);
  const int64_t first_head = heads.first(u.K), end_head = heads.end(u.K);
  int64_t block = -1, start = -S;  // of the token before: most are in its block, and division is slow
  bool has = true;
  for (; t < end; ++t) {
    const int64_t slot = u.slots[t];
    if (slot < 0 || slot >= slots) continue;
    if (uint64_t(slot - start) >= uint64_t(S)) {
      block = slot / S, start = block * S;
      if (by_block && !in_range) has = rest.has(block);
    }
    if (!by_block && !in_range) has = rest.has(slot / kRun);
    if (!has) continue;
    for (int64_t head = first_head; head < end_head; ++head) of(t, block, slot - start, head);
  }
}

// Sets the scales of blocks whose first slot this call writes, from everything that it writes into them. Until then
// they are negative.
inline void set_block_scales(const Update& u, const Written& cache, const Part& part, LoadRow load, const Line& line) {
  const float most = cache.format == Format::e4m3 ? 448 : 57344;
  const char* rows = static_cast<const char*>(cache.rows);
  each_row(u, cache, part, [&](int64_t, int64_t block, int64_t offset, int64_t head) {
    if (offset == 0) cache.scale[block * u.K + head] = -__FLT_MIN__;
  });
  each_row(u, cache, part, [&](int64_t t, int64_t block, int64_t, int64_t head) {
    float* scale = cache.scale + block * u.K + head;
    if (!(*scale < 0)) return;
    load(rows + (t * u.K + head) * cache.dim * bytes_of(cache.source), cache.dim,
         cache.divisor ? cache.divisor + head : nullptr, line.at);
    const float here = clip(line.largest<false>(), 0, kLimit);
    *scale = here > -*scale ? -here : *scale;
  });
  each_row(u, cache, part, [&](int64_t, int64_t block, int64_t offset, int64_t head) {
    float* scale = cache.scale + block * u.K + head;
    if (offset != 0 || !(*scale < 0)) return;
    const float found = -*scale * (kHeadroom / most);
    *scale = found <= kEmpty ? 1 : found;
  });
}

void update(const Update& u, int number, int parts) {
  const Part part{number, parts};
  int64_t padded = 0;
  for (int i = 0; i < u.caches; ++i) padded = most(padded, u.cache[i].dim);
  Scratch scratch;
  float *numbers, *sizes;
  scratch.place(array(numbers, padded + 2 * W), array(sizes, padded / 16 + 2 * W));
  for (int i = 0; i < u.caches; ++i) {
    const Written& cache = u.cache[i];
    const LoadRow load = loader(cache.source);
    const StoreRow store = storer(cache.format);
    const Line line{numbers, cache.dim};
    if (cache.per == Per::block) set_block_scales(u, cache, part, load, line);
    const bool same = cache.format == cache.source && !cache.divisor;  // keeps every bit, also of a NaN
    const char* rows = static_cast<const char*>(cache.rows);
    const int64_t bytes = cache.dim * bytes_of(cache.source);
    each_row(u, cache, part, [&](int64_t t, int64_t block, int64_t offset, int64_t head) {
      const char* from = rows + (t * u.K + head) * bytes;
      const int64_t row = u.row(block, head, offset);
      if (same) {
        memcpy(cache.words + row * cache.row_bytes, from, bytes);
        return;
      }
      load(from, cache.dim, cache.divisor ? cache.divisor + head : nullptr, numbers);
      store(cache, row, cache.per == Per::block ? cache.scale[block * u.K + head] : 1, line, sizes);
    });
  }
}

}  // namespace
}  // namespace jattn_native
