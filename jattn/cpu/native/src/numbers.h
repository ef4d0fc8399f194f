// Rows of the pool as numbers: every cache format is decoded in registers, and multiplied there (decode.h) or written
// to scratch, as float32 or, where that is exact, as bfloat16 (codes.h). Scales per head, block and token are applied
// elsewhere, to logits and weights; those of NVFP4's groups are applied here, but not where decode multiplies codes.
#pragma once
#include "codes.h"

namespace jattn_native {
namespace {

// By hand where GCC 12 would go through halves of registers, which takes several times as long.
#if defined(__AVX512F__)
INLINE Words widen(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE Words widen(Bytes x) { return (Words)_mm512_cvtepu8_epi32((__m128i)x); }
INLINE Ints widen_signed(Bytes x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
INLINE Halves narrow(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
INLINE Words widen(Halves x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }
INLINE Words widen(Bytes x) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&x)); }
INLINE Ints widen_signed(Bytes x) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&x)); }
INLINE Halves narrow(Words x) { return __builtin_convertvector(x, Halves); }
#else
INLINE Words widen(Halves x) { return __builtin_convertvector(x, Words); }
INLINE Words widen(Bytes x) { return __builtin_convertvector(x, Words); }
INLINE Ints widen_signed(Bytes x) { return (Ints)(widen(x) << 24) >> 24; }
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

#if defined(__AVX2__)
// Whether words of every format become float32 fast enough to do it where they are multiplied.
constexpr bool kDecodesInRegisters = true;

// e4m3 as float16 times 2^-8: the bits are the same except for the bias, from bit 7 on. The sign fills two bits at
// first. Adding 1 to the significand carries into the lower one only for NaN, for which it is then set; it is cleared
// for all others.
INLINE __m256i halves_of_e4m3(__m128i bytes) {
  const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i carry = _mm256_and_si256(_mm256_add_epi16(x, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
  return _mm256_xor_si256(x, carry);
}
#if defined(__AVX512BW__)
INLINE __m512i halves_of_e4m3(__m256i bytes) {
  const __m512i x = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
  const __m512i carry = _mm512_and_si512(_mm512_add_epi16(x, _mm512_set1_epi16(0x80)), _mm512_set1_epi16(0x4000));
  return _mm512_xor_si512(x, carry);
}
INLINE Floats small_e4m3(Bytes x) { return of_f16((Halves)halves_of_e4m3((__m128i)x)); }  // times 2^-8
INLINE void small_e4m3(const char* at, Floats* out) {  // 2 W of them
  const __m512i halves = halves_of_e4m3(read<__m256i>(at));
  out[0] = of_f16((Halves)_mm512_castsi512_si256(halves));
  out[1] = of_f16((Halves)_mm512_extracti64x4_epi64(halves, 1));
}
INLINE Floats of_e5m2(Bytes x) {  // the upper half of float16
  return of_f16((Halves)_mm256_slli_epi16(_mm256_cvtepu8_epi16((__m128i)x), 8));
}
#else
INLINE Floats small_e4m3(Bytes x) {
  return of_f16((Halves)_mm256_castsi256_si128(halves_of_e4m3(_mm_loadl_epi64((const __m128i*)&x))));
}
INLINE void small_e4m3(const char* at, Floats* out) {
  const __m256i halves = halves_of_e4m3(read<__m128i>(at));
  out[0] = of_f16((Halves)_mm256_castsi256_si128(halves));
  out[1] = of_f16((Halves)_mm256_extracti128_si256(halves, 1));
}
INLINE Floats of_e5m2(Bytes x) {
  return of_f16((Halves)_mm_unpacklo_epi8(__m128i{}, _mm_loadl_epi64((const __m128i*)&x)));
}
INLINE void of_e5m2(const char* at, Floats* out) {  // 2 W of them
  const __m128i bytes = read<__m128i>(at);
  out[0] = of_f16((Halves)_mm_unpacklo_epi8(__m128i{}, bytes));
  out[1] = of_f16((Halves)_mm_unpackhi_epi8(__m128i{}, bytes));
}
#endif
INLINE Floats of_e4m3(Bytes x) { return small_e4m3(x) * 256.0f; }
#else
constexpr bool kDecodesInRegisters = false;

INLINE Floats of_e4m3(Bytes x) {
  const Words wide = widen(x), size = wide & 0x7fu;
  // Subnormal numbers have no leading 1: subtract the one that the exponent adds.
  const Words small = (Words)((Floats)((size << 20) + (121u << 23)) - 0x1p-6f);
  Words found = size < 8u ? small : (size << 20) + (120u << 23);
  found = size == 0x7fu ? Words{} + 0x7fc00000u : found;
  return (Floats)(found | (wide & 0x80u) << 24);
}
INLINE Floats of_e5m2(Bytes x) { return of_f16(__builtin_convertvector(x, Halves) << 8); }
#endif

// W numbers of a format with one number a word.
template <Format F> INLINE Floats numbers(const char* words) {
  if constexpr (F == Format::f32) return read<Floats>(words);
  if constexpr (F == Format::bf16) return (Floats)(widen(read<Halves>(words)) << 16);
  if constexpr (F == Format::f16) return of_f16(read<Halves>(words));
  if constexpr (F == Format::e4m3) return of_e4m3(read<Bytes>(words));
  if constexpr (F == Format::e5m2) return of_e5m2(read<Bytes>(words));
  if constexpr (F == Format::int8) return __builtin_convertvector(widen_signed(read<Bytes>(words)), Floats);
  return Floats{};
}

// e4m3 by its code: the scales of NVFP4's groups.
struct Scales {
  float of[256] = {};
  constexpr Scales() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, size = exponent ? 8 + (code & 7) : code & 7;
      float x = float(size) * 0x1p-9f;
      for (int i = 1; i < exponent; ++i) x *= 2;
      if ((code & 127) == 127) x = __builtin_nanf("");
      of[code] = code & 128 ? -x : x;
    }
  }
};
constexpr Scales kScales;

#if defined(__AVX512F__)
// The numbers of codes of four bits.
template <Format F> INLINE Floats table_of_codes() {
  if constexpr (F == Format::int4) return Floats{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  else return Floats{0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
}
// W numbers of codes of four bits, of one group if NVFP4's, whose scale is in the table.
INLINE Floats numbers_of_codes(const char* at, Floats table) {
  const __m128i low = _mm_cvtsi32_si128(read<int32_t>(at)), high = _mm_cvtsi32_si128(read<int32_t>(at + 4));
  const __m512i eight = _mm512_mask_broadcastd_epi32(_mm512_broadcastd_epi32(low), 0xff00, high);  // in every lane
  const __m512i down = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  return (Floats)_mm512_permutexvar_ps(_mm512_srlv_epi32(eight, down), (__m512)table);
}
#elif !defined(__AVX2__)
// e2m1's 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign, or integers of four bits.
template <Format F> INLINE Floats of_nibbles(Words x) {
  if constexpr (F == Format::int4) return __builtin_convertvector((Ints)(x ^ 8u) - 8, Floats);
  const Words size = x & 7u;
  const Words small = (Words)(__builtin_convertvector(size, Floats) * 0.5f);
  return (Floats)((size < 2u ? small : (size << 22) + (126u << 23)) | (x & 8u) << 28);
}
#endif

// What numbers that are multiplied in registers must be multiplied by afterwards; `pairs`: as bfloat16.
constexpr float gain([[maybe_unused]] bool pairs, Format f) {
#if defined(__AVX512VBMI__)
  if (pairs) return gain_of_codes(f);
#endif
  return kDecodesInRegisters && f == Format::e4m3 ? 256 : 1;
}

// `count` vectors of numbers of a row in memory, `first` and those after it; `groups`: of the row. Each vector lies in
// one group of NVFP4's. Without `exponents` they must be multiplied by `gain`.
template <Format F, int count, bool exponents = true>
INLINE void vectors(const char* words, const uint8_t* groups, int64_t first, Floats* out) {
  static_assert(count == 2 || !packed(F) || kDecodesInRegisters);
  const char* at = words + (packed(F) ? first / 2 : first * bytes_of(F));
#if defined(__AVX2__)
  if constexpr (F == Format::e4m3) {
    if constexpr (count == 2) small_e4m3(at, out);
    else out[0] = small_e4m3(read<Bytes>(at));
    if (exponents) UNROLL for (int i = 0; i < count; ++i) out[i] *= gain(false, F);
    return;
  }
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (F == Format::e5m2 && count == 2) return of_e5m2(at, out);
#endif
  if constexpr (!packed(F)) {
    UNROLL for (int i = 0; i < count; ++i) out[i] = numbers<F>(at + i * W * bytes_of(F));
    return;
  }
#if defined(__AVX512F__)
  UNROLL for (int i = 0; i < count; ++i) {
    Floats table = table_of_codes<F>();
    if constexpr (F == Format::nvfp4) table *= splat(kScales.of[groups[first / 16 + i]]);
    out[i] = numbers_of_codes(at + 8 * i, table);
  }
#elif defined(__AVX2__)
  // Eight codes in every lane: its own one is moved to the lower or the upper end.
  const __m256i down = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i up = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  [[maybe_unused]] __m256 sizes;
  if constexpr (F == Format::nvfp4)
    sizes = _mm256_mul_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), _mm256_set1_ps(kScales.of[groups[first / 16]]));
  UNROLL for (int i = 0; i < count; ++i) {
    const __m256i codes = _mm256_set1_epi32(read<int32_t>(at + 4 * i)), upper = _mm256_sllv_epi32(codes, up);
    if constexpr (F == Format::int4) {
      out[i] = (Floats)_mm256_cvtepi32_ps(_mm256_srai_epi32(upper, 28));
    } else {  // the lowest three bits choose a size
      const __m256 size = _mm256_permutevar8x32_ps(sizes, _mm256_srlv_epi32(codes, down));
      out[i] = (Floats)_mm256_xor_ps(size, _mm256_and_ps((__m256)upper, _mm256_set1_ps(-0.0f)));
    }
  }
#else
  const Words wide = widen(read<Bytes>(at));
  Floats even = of_nibbles<F>(wide & 15u), odd = of_nibbles<F>(wide >> 4);
  interleave(even, odd, &out[0], &out[1]);
  if constexpr (F == Format::nvfp4)
    for (int i = 0; i < 2; ++i) out[i] *= splat(kScales.of[groups[(first + i * W) / 16]]);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Whether decode takes 64 numbers of packed formats at a time, in a special order: `each_of_nibbles`.
constexpr bool kNibbles = true;

// The low and the high bytes of a packed format's numbers as bfloat16, by code, in both halves of a vector.
template <Format F> struct NibblePlanes {
  alignas(32) uint8_t low[32] = {}, high[32] = {};
  constexpr NibblePlanes() {
    for (int i = 0; i < 32; ++i) {
      const uint16_t x = bf16_of_nibble<F>(i % 16, 0);
      low[i] = uint8_t(x), high[i] = uint8_t(x >> 8);
    }
  }
};
template <Format F> constexpr NibblePlanes<F> kNibblePlanes;

// 64 numbers of a row, from `first` on, as bfloat16, two in a lane: codes become bytes of bfloat16 by tables, and those
// are interleaved within the halves of a vector. In lane i, pairs[half][nibble] has the lower (nibble 0) or upper codes
// of bytes 16 (i / 4) + 8 half + 2 (i % 4) and, in the upper half of the lane, of the next one.
template <Format F> INLINE void pairs_of_nibbles(const char* words, int64_t first, Words (*pairs)[2]) {
  const __m256i bytes = read<__m256i>(words + first / 2), lower = _mm256_set1_epi8(15);
  UNROLL for (int nibble = 0; nibble < 2; ++nibble) {
    const __m256i code = _mm256_and_si256(nibble ? _mm256_srli_epi16(bytes, 4) : bytes, lower);
    const __m256i low = _mm256_shuffle_epi8(read<__m256i>(kNibblePlanes<F>.low), code);
    const __m256i high = _mm256_shuffle_epi8(read<__m256i>(kNibblePlanes<F>.high), code);
    pairs[0][nibble] = (Words)_mm256_unpacklo_epi8(low, high);
    pairs[1][nibble] = (Words)_mm256_unpackhi_epi8(low, high);
  }
}

// The scales of NVFP4's two groups that each vector of a half has.
INLINE Floats scales_of_half(const uint8_t* groups, int64_t first, int half) {
  const uint8_t* of = groups + first / 16 + half;
  const __m128 a = _mm_broadcast_ss(&kScales.of[of[0]]), b = _mm_broadcast_ss(&kScales.of[of[2]]);
  return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256(a), b, 1);
}

// Calls `use` with 0 to 7 and 8 of 64 numbers of a row, from `first` on, as float32: vector 4 half + 2 nibble + odd has
// one half of the lanes of pairs[half][nibble].
template <Format F, class Use>
INLINE void each_of_nibbles(const char* words, const uint8_t* groups, int64_t first, Use use) {
  Words pairs[2][2];
  pairs_of_nibbles<F>(words, first, pairs);
  UNROLL for (int half = 0; half < 2; ++half) {
    [[maybe_unused]] Floats scale;
    if constexpr (F == Format::nvfp4) scale = scales_of_half(groups, first, half);
    UNROLL for (int nibble = 0; nibble < 2; ++nibble) {
      Floats even = low_half(pairs[half][nibble]), odd = high_half(pairs[half][nibble]);
      if constexpr (F == Format::nvfp4) even *= scale, odd *= scale;
      use(4 * half + 2 * nibble, even), use(4 * half + 2 * nibble + 1, odd);
    }
  }
}

// A row of NVFP4 as bfloat16, exactly, in the order of `pairs_of_nibbles`.
inline void decode_nibbles(const Cache& cache, int64_t row, void* to, int64_t count) {
  const char* words = cache.words + row * cache.stride;
  const uint8_t* groups = cache.groups + row * (cache.row_bytes / 8);
  for (int64_t i = 0; i < count; i += 8 * W) {
    Words pairs[2][2];
    pairs_of_nibbles<Format::nvfp4>(words, i, pairs);
    UNROLL for (int half = 0; half < 2; ++half) {
      const Floats scale = scales_of_half(groups, i, half);
      UNROLL for (int nibble = 0; nibble < 2; ++nibble) {
        const Words both = pairs[half][nibble];
        const Words even = (Words)(low_half(both) * scale) >> 16, odd = (Words)(high_half(both) * scale);
        write(static_cast<char*>(to) + (i + (4 * half + 2 * nibble) * W) * 2, even | odd);
      }
    }
  }
}
#else
constexpr bool kNibbles = false;
template <Format F, class Use> void each_of_nibbles(const char*, const uint8_t*, int64_t, Use);  // is not called
inline void decode_nibbles(const Cache&, int64_t, void*, int64_t) {}
#endif

// The number, of 8 W, that `each_of_nibbles` has in a lane of a vector.
constexpr int nibble_number(int vector, int lane) {
  const int byte = lane / 4 * 16 + vector / 4 * 8 + lane % 4 * 2 + vector % 2;
  return 2 * byte + vector / 2 % 2;
}

// Where the scales of a row's groups are, or null.
template <Format F> INLINE const uint8_t* groups_of(const Cache& cache, int64_t row) {
  return F == Format::nvfp4 ? cache.groups + row * (cache.row_bytes / 8) : nullptr;
}

// A row of the pool as `padded` numbers (a multiple of W), zeros past its last: float32, or with `Pairs` bfloat16, for
// formats that fit it.
template <Format F, bool Pairs> void decode_row(const Cache& cache, int64_t row, void* to, int64_t padded) {
  constexpr int64_t per_word = packed(F) ? 2 : 1;
  const char* words = cache.words + row * cache.stride;
  const uint8_t* groups = groups_of<F>(cache, row);
  char* out = static_cast<char*>(to);
  int64_t i = 0;
  auto put = [&](int64_t at, Floats x) __attribute__((always_inline)) {
    if constexpr (Pairs) write(out + at * 2, narrow((Words)x >> 16));
    else write(out + at * 4, x);
  };
  for (; i + 2 * W <= cache.dim; i += 2 * W) {
    Floats both[2];
    vectors<F, 2>(words, groups, i, both);
    put(i, both[0]), put(i + W, both[1]);
  }
  if (i < cache.dim) {
    char tail[2 * W * 4] = {};
    uint8_t last[2] = {};  // a vector has at most one group, and the numbers past the row's last are zeros
    memcpy(tail, words + i / per_word * bytes_of(F), (cache.dim - i) / per_word * bytes_of(F));
    if (F == Format::nvfp4) memcpy(last, groups + i / 16, (cache.dim - i + 15) / 16);
    Floats both[2];
    vectors<F, 2>(tail, last, 0, both);
    put(i, both[0]);
    if (i + W < padded) put(i + W, both[1]);
    i += 2 * W;
  }
  for (; i < padded; i += W) put(i, Floats{});
}

#if defined(__AVX512VBMI__)
// The same as bfloat16, 64 numbers at a time.
template <Format F> void decode_pairs(const Cache& cache, int64_t row, void* to, int64_t padded) {
  const char* words = cache.words + row * cache.stride;
  uint16_t* out = static_cast<uint16_t*>(to);
  for (int64_t c = 0; c < padded; c += 64) {
    __m512i first, second;
    if (c + 64 <= cache.dim) row_to_bf16<F, true>(cache, words, row, c, &first, &second);
    else row_to_bf16<F, false>(cache, words, row, c, &first, &second);
    write(out + c, first);
    if (c + 32 < padded) write(out + c + 32, second);
  }
}
#endif

template <Format F> struct Of {
  static constexpr Format value = F;
};

// Calls `make` with a format that fits bfloat16 as a constant.
template <class Make> auto by_format(Format f, Make make) {
  switch (f) {  // every format: the build fails where one is missing
    case Format::e4m3: return make(Of<Format::e4m3>{});
    case Format::e5m2: return make(Of<Format::e5m2>{});
    case Format::int8: return make(Of<Format::int8>{});
    case Format::int4: return make(Of<Format::int4>{});
    case Format::nvfp4: return make(Of<Format::nvfp4>{});
    case Format::bf16: case Format::f16: case Format::f32: break;
  }
  return make(Of<Format::bf16>{});
}
// The same for packed formats only.
template <class Make> auto by_packed_format(Format f, Make make) {
  static_assert(packed(Format::int4) && packed(Format::nvfp4));
  switch (f) {
    case Format::int4: return make(Of<Format::int4>{});
    case Format::nvfp4: break;
    case Format::bf16: case Format::f16: case Format::f32: break;
    case Format::e4m3: case Format::e5m2: case Format::int8: break;
  }
  return make(Of<Format::nvfp4>{});
}

using DecodeRow = void (*)(const Cache&, int64_t row, void* out, int64_t padded);

// The function that decodes rows of a format to float32 or bfloat16; null if it cannot be done.
template <bool Pairs> DecodeRow decoder(Format f) {
  if constexpr (Pairs) {
    if (!fits_bf16(f)) return nullptr;
#if defined(__AVX512VBMI__)
    return by_format(f, [](auto of) -> DecodeRow { return decode_pairs<decltype(of)::value>; });
#else
    return by_format(f, [](auto of) -> DecodeRow { return decode_row<decltype(of)::value, true>; });
#endif
  }
  if (f == Format::f32) return decode_row<Format::f32, false>;
  if (f == Format::f16) return decode_row<Format::f16, false>;
  return by_format(f, [](auto of) -> DecodeRow { return decode_row<decltype(of)::value, false>; });
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
  if (!p.key.zero) return 0;
  double total[W] = {};  // in as many parts, which are added up at once
  for (int64_t d = 0; d + W <= p.D; d += W)
    for (int i = 0; i < W; ++i) total[i] += line[d + i];
  for (int64_t d = p.D - p.D % W; d < p.D; ++d) total[0] += line[d];
  for (int i = 1; i < W; ++i) total[0] += total[i];
  return float(total[0]);
}

}  // namespace
}  // namespace jattn_native
