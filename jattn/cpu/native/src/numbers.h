// Rows of the pool as numbers: every cache format is decoded in registers and written to scratch as float32 or, where
// that is exact, as bfloat16 (codes.h). Scales per head, block and token are applied elsewhere, to logits and weights;
// those of NVFP4's groups are applied here.
#pragma once
#include "codes.h"

namespace jattn_native {
namespace {

// By hand where GCC 12 would go through halves of registers, which takes several times as long.
#if defined(__AVX512F__)
INLINE Words widen(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE Words widen(Bytes x) { return (Words)_mm512_cvtepu8_epi32((__m128i)x); }
INLINE Halves narrow(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
#else
INLINE Words widen(Halves x) { return __builtin_convertvector(x, Words); }
INLINE Words widen(Bytes x) { return __builtin_convertvector(x, Words); }
INLINE Halves narrow(Words x) { return __builtin_convertvector(x, Halves); }
#endif

INLINE Floats of_f16(Halves x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
  const Words wide = widen(x), size = wide & 0x7fffu;
  const Words normal = (size << 13) + (size >= 0x7c00u ? Words{} + (224u << 23) : Words{} + (112u << 23));
  const Words small = (Words)(__builtin_convertvector(size, Floats) * 0x1p-24f);
  return (Floats)((size < 0x400u ? small : normal) | (wide & 0x8000u) << 16);
#endif
}

INLINE Floats of_e4m3(Bytes x) {
  const Words wide = widen(x), size = wide & 0x7fu;
  // Subnormal numbers have no leading 1: subtract the one that the exponent adds.
  const Words small = (Words)((Floats)((size << 20) + (121u << 23)) - 0x1p-6f);
  Words found = size < 8u ? small : (size << 20) + (120u << 23);
  found = size == 0x7fu ? Words{} + 0x7fc00000u : found;
  return (Floats)(found | (wide & 0x80u) << 24);
}

// W numbers of a format with one number a word.
template <Format F> INLINE Floats numbers(const char* words) {
  if constexpr (F == Format::f32) return read<Floats>(words);
  if constexpr (F == Format::bf16) return (Floats)(widen(read<Halves>(words)) << 16);
  if constexpr (F == Format::f16) return of_f16(read<Halves>(words));
  if constexpr (F == Format::e4m3) return of_e4m3(read<Bytes>(words));
  if constexpr (F == Format::e5m2)
    return of_f16(__builtin_convertvector(read<Bytes>(words), Halves) << 8);
  if constexpr (F == Format::int8) {
    const Ints wide = (Ints)(widen(read<Bytes>(words)) << 24) >> 24;  // with its sign
    return __builtin_convertvector(wide, Floats);
  }
  return Floats{};
}

// Numbers of four bits: integers, or e2m1's 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign.
template <Format F> INLINE Floats of_nibbles(Words x) {
  if constexpr (F == Format::int4) return __builtin_convertvector((Ints)(x ^ 8u) - 8, Floats);
  const Words size = x & 7u;
  const Words small = (Words)(__builtin_convertvector(size, Floats) * 0.5f);
  return (Floats)((size < 2u ? small : (size << 22) + (126u << 23)) | (x & 8u) << 28);
}

// Writes W words at `i` of a row as numbers, 1 or 2 per word, from number `i` or `2 i` on.
template <Format F> INLINE void decode_words(const char* words, const float* groups, int64_t i, float* out) {
  if constexpr (packed(F)) {
    const Words wide = widen(read<Bytes>(words));
    Floats even = of_nibbles<F>(wide & 15u), odd = of_nibbles<F>(wide >> 4);
    if constexpr (F == Format::nvfp4) {
      Floats scale = splat(groups[i / 8]);
      if constexpr (W == 16) scale = (iota() < 8) ? scale : splat(groups[i / 8 + 1]);
      even *= scale;
      odd *= scale;
    }
    Floats first, last;
    interleave(even, odd, &first, &last);
    write(out + 2 * i, first);
    write(out + 2 * i + W, last);
  } else {
    write(out + i, numbers<F>(words));
  }
}

constexpr int64_t bytes_of(Format f) {
  return f == Format::f32 ? 4 : f == Format::bf16 || f == Format::f16 ? 2 : 1;
}

// A row of the pool as `padded` float32 numbers (a multiple of 2 W), zeros past its last.
template <Format F> void decode_row(const Side& side, int64_t row, void* to, int64_t padded) {
  const char* words = side.words + row * side.stride;
  float* out = static_cast<float*>(to);
  const int64_t per_word = packed(F) ? 2 : 1, count = side.dim / per_word;
  const int64_t total = padded / per_word;
  float groups[2 * W];  // of 8 W words at a time; one of a vector of words may begin in the next
  for (int64_t i = 0; i < total; i += W) {
    if constexpr (F == Format::nvfp4) {
      if (i % (8 * W) == 0) {
        const uint8_t* from = side.groups + row * (side.row_bytes / 8) + i / 8;
        uint8_t bytes[W] = {};
        const int64_t left = side.row_bytes / 8 - i / 8;
        if (left > 0) memcpy(bytes, from, left < W ? left : W);
        write(groups, of_e4m3(read<Bytes>(bytes)));
      }
    }
    const float* here = groups - i / (8 * W) * W;
    if (i + W <= count) {
      decode_words<F>(words + i * bytes_of(F), here, i, out);
    } else {
      char tail[W * 4] = {};
      if (i < count) memcpy(tail, words + i * bytes_of(F), (count - i) * bytes_of(F));
      decode_words<F>(tail, here, i, out);
    }
  }
}

// The same as bfloat16, which is exact for every narrow format. Without instructions for pairs, only for rows of
// bfloat16.
template <Format F> void decode_pairs(const Side& side, int64_t row, void* to, int64_t padded) {
  const char* words = side.words + row * side.stride;
  uint16_t* out = static_cast<uint16_t*>(to);
#if defined(__AVX512VBMI__)
  for (int64_t c = 0; c < padded; c += 64) {
    __m512i first, second;
    if (c + 64 <= side.dim) row_to_bf16<F, true>(side, words, row, c, &first, &second);
    else row_to_bf16<F, false>(side, words, row, c, &first, &second);
    write(out + c, first);
    if (c + 32 < padded) write(out + c + 32, second);
  }
#else
  static_assert(F == Format::bf16);
  memcpy(out, words, side.dim * 2);
  memset(out + side.dim, 0, (padded - side.dim) * 2);
#endif
}

template <Format F> struct Of {
  static constexpr Format value = F;
};

// Calls `make` with a format that fits bfloat16 as a constant.
template <class Make> auto by_format(Format f, Make make) {
  switch (f) {
    case Format::e4m3: return make(Of<Format::e4m3>{});
    case Format::e5m2: return make(Of<Format::e5m2>{});
    case Format::int8: return make(Of<Format::int8>{});
    case Format::int4: return make(Of<Format::int4>{});
    case Format::nvfp4: return make(Of<Format::nvfp4>{});
    default: return make(Of<Format::bf16>{});
  }
}

using DecodeRow = void (*)(const Side&, int64_t row, void* out, int64_t padded);

// The function that decodes rows of a format to float32 or bfloat16; null if it cannot be done.
template <bool Pairs> DecodeRow decoder(Format f) {
  if constexpr (Pairs) {
    if (!fits_bf16(f)) return nullptr;
#if defined(__AVX512VBMI__)
    return by_format(f, [](auto of) -> DecodeRow { return decode_pairs<decltype(of)::value>; });
#else
    return f == Format::bf16 ? decode_pairs<Format::bf16> : nullptr;
#endif
  }
  if (f == Format::f32) return decode_row<Format::f32>;
  if (f == Format::f16) return decode_row<Format::f16>;
  return by_format(f, [](auto of) -> DecodeRow { return decode_row<decltype(of)::value>; });
}

// `count` numbers of a format, times `sign`.
template <Format F> INLINE void signed_numbers(const char* from, int64_t count, float sign, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) write(to + i, numbers<F>(from + i * bytes_of(F)) * sign);
  if (i == count) return;
  char tail[W * 4] = {};
  float last[W];
  memcpy(tail, from + i * bytes_of(F), (count - i) * bytes_of(F));
  write(last, numbers<F>(tail) * sign);
  memcpy(to + i, last, (count - i) * sizeof(float));
}

// Where row r of a split's queries is.
INLINE const char* query_at(const Problem& p, const Split& split, int r) {
  const int64_t G = p.group();
  const int64_t row = (p.starts[split.b] + split.t0 + r / G) * p.H + split.head * G + r % G;
  return static_cast<const char*>(p.query) + row * p.D * bytes_of(p.query_type);
}

// Row r of a split's queries as float32 [D], times `sign`; returns the sum of its numbers if keys have zero points.
inline float query_row(const Problem& p, const Split& split, int r, float sign, float* line) {
  const char* from = query_at(p, split, r);
  switch (p.query_type) {
    case Format::f32: signed_numbers<Format::f32>(from, p.D, sign, line); break;
    case Format::bf16: signed_numbers<Format::bf16>(from, p.D, sign, line); break;
    default: signed_numbers<Format::f16>(from, p.D, sign, line);
  }
  double total = 0;
  if (p.key.zero)
    for (int64_t d = 0; d < p.D; ++d) total += line[d];
  return float(total);
}

}  // namespace
}  // namespace jattn_native
