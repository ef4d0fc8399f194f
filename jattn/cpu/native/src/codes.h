// Narrow formats as bfloat16, 64 numbers at a time, by tables: exact for every code.
//
//   codes of a byte          low, high = table[code]: the two bytes of a bfloat16, then interleaved
//   four codes in 16 bits    each in 16 bits of its own: table[code >> 4 i], or for NVFP4 table[group, size] and a sign
//
// Decode takes 16 bytes of each of four keys at a time, a key in each quarter of a vector, and 32 or 64 columns of two
// rows of values, as pairs. Of four codes in 16 bits it takes all the first ones, then all the second ones, and so on;
// NVFP4's scales are left out, and multiplied with the sums over a group of a key and with the weights of values.
// Elsewhere 64 numbers of a row stay in their order.
#pragma once
#include "semantics.h"
#include "vectors.h"

namespace jattn_native {
namespace {

// significand * 2^exponent as bfloat16, where that is exact.
constexpr uint16_t exact_bf16(int significand, int exponent) {
  if (significand == 0) return 0;
  while (significand < 128) significand *= 2, --exponent;
  while (significand > 255) significand /= 2, ++exponent;
  return uint16_t((exponent + 134) << 7 | (significand & 127));
}

constexpr int kTwiceE2m1[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // e2m1's sizes, times 2
// The number of a code of four bits, times 2^exponent.
template <Format F> constexpr uint16_t bf16_of_nibble(int code, int exponent) {
  const bool e2m1 = F == Format::nvfp4, negative = code >= 8;
  const uint16_t size = e2m1 ? exact_bf16(kTwiceE2m1[code % 8], exponent - 1)
                             : exact_bf16(negative ? 16 - code : code, exponent);
  return negative ? size | 0x8000 : size;
}

#if defined(__AVX512VBMI__)

// A code without its sign as bfloat16; for int8 its absolute value, see `codes_to_bf16`.
constexpr uint16_t bf16_of_code(Format f, int x) {
  if (f == Format::int8) return exact_bf16(x, 0);
  if (f == Format::e4m3) return x == 127 ? 0x7fc0 : x < 8 ? exact_bf16(x, -9) : exact_bf16(8 + x % 8, x / 8 - 10);
  if (x >= 124) return x == 124 ? 0x7f80 : 0x7fc0;  // e5m2
  return x < 4 ? exact_bf16(x, -16) : exact_bf16(4 + x % 4, x / 4 - 17);
}

// The low and the high bytes of bfloat16s.
struct Planes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr void set(int i, uint16_t x) { low[i] = uint8_t(x), high[i] = uint8_t(x >> 8); }
};
template <Format F> constexpr Planes planes_of() {
  Planes found;
  for (int i = 0; i < 128; ++i) found.set(i, bf16_of_code(F, i));
  return found;
}
template <Format F> constexpr Planes kPlanes = planes_of<F>();

// What decode's numbers must be multiplied by. NVFP4's, of 6 at most, are added up before their scales make them
// smaller: so that no sum over finite queries is infinite, decode has 2^-6 of each.
constexpr float gain_of_codes(Format f) { return f == Format::nvfp4 ? 64 : 1; }

// The numbers of a packed format, divided by that. There are two copies: the bit above the code does not matter.
template <Format F> struct Numbers {
  alignas(64) uint16_t of[32] = {};
  constexpr Numbers() {
    for (int i = 0; i < 32; ++i) of[i] = bf16_of_nibble<F>(i % 16, F == Format::nvfp4 ? -6 : 0);
  }
};
template <Format F> constexpr Numbers<F> kNumbers;

// For each scale of a group: e2m1's eight sizes times it.
struct Groups {
  alignas(64) uint16_t sizes[256][8] = {};
  constexpr Groups() {
    for (int scale = 0; scale < 256; ++scale)
      for (int i = 0; i < 8; ++i) {
        const int e = scale >> 3 & 15, m = scale & 7;
        uint16_t x = e ? exact_bf16(kTwiceE2m1[i] * (8 + m), e - 11) : exact_bf16(kTwiceE2m1[i] * m, -10);
        if ((scale & 127) == 127) x = 0x7fc0;
        if (scale & 128) x ^= 0x8000;
        sizes[scale][i] = x;
      }
  }
};
constexpr Groups kGroups;

// Number i of vector `half`, of two: 64 numbers of a row in their order, or 32 columns of two rows as pairs, a0 b0 a1
// b1 ..., of each quarter of the columns the first half in the first vector.
struct Place {
  int row, column;
  constexpr Place(bool two_rows, int half, int i) : row(0), column(half * 32 + i) {
    if (two_rows) row = i % 2, column = i / 8 * 8 + half * 4 + i % 8 / 2;
  }
};
// Where the codes of 64 places are among words: bytes, in the order that `interleave` needs.
template <bool TwoRows> struct ByteOrder {
  alignas(64) uint8_t byte[64] = {};
  constexpr ByteOrder() {
    for (int i = 0; i < 64; ++i) {
      const Place place(TwoRows, i / 8 % 2, i / 16 * 8 + i % 8);
      byte[i] = uint8_t(place.row * 32 + place.column);
    }
  }
};
template <bool TwoRows> constexpr ByteOrder<TwoRows> kByteOrder;
// The same of four codes in 16 bits: which of them, how far to shift it to the right and its sign to the left, and
// where its group's sizes are among those of four groups.
template <bool TwoRows> struct CodeOrder {
  struct Vector {
    alignas(64) uint16_t word[32] = {}, right[32] = {}, left[32] = {}, group[32] = {};
  } vector[2];
  constexpr CodeOrder() {
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 32; ++i) {
        const Place place(TwoRows, half, i);
        const int code = place.column % 4;
        vector[half].word[i] = uint16_t(place.row * 8 + place.column / 4);
        vector[half].right[i] = uint16_t(4 * code), vector[half].left[i] = uint16_t(12 - 4 * code);
        vector[half].group[i] = uint16_t(place.row * 2 + place.column / 16) * 8;
      }
  }
};
template <bool TwoRows> constexpr CodeOrder<TwoRows> kCodeOrder;

INLINE __m512i table(const void* at) { return _mm512_load_si512(at); }
INLINE void interleave(__m512i low, __m512i high, __m512i* first, __m512i* second) {
  *first = _mm512_unpacklo_epi8(low, high), *second = _mm512_unpackhi_epi8(low, high);
}
// Sixteen bytes from each of four addresses.
INLINE __m512i four(const void* a, const void* b, const void* c, const void* d) {
  auto part = [](const void* at) __attribute__((always_inline)) { return read<__m128i>(at); };
  __m512i x = _mm512_castsi128_si512(part(a));
  x = _mm512_inserti32x4(_mm512_inserti32x4(x, part(b), 1), part(c), 2);
  return _mm512_inserti32x4(x, part(d), 3);
}
// The sizes that four groups' scales make.
INLINE __m512i sizes_of(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
  return four(kGroups.sizes[a], kGroups.sizes[b], kGroups.sizes[c], kGroups.sizes[d]);
}

INLINE __m512i and_or(__m512i a, int16_t b, __m512i c) {
  return _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(b), c, 0xea);
}
INLINE __m512i and_xor(__m512i a, int16_t b, __m512i c) {
  return _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(b), c, 0x6a);
}

// Codes of a byte each as bfloat16.
template <Format F> INLINE void codes_to_bf16(__m512i x, __m512i* first, __m512i* second) {
  const Planes& planes = kPlanes<F>;
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(char(0x80)));
  if constexpr (F == Format::int8) x = _mm512_abs_epi8(x);
  const __m512i low = _mm512_permutex2var_epi8(table(planes.low), x, table(planes.low + 64));
  __m512i high = _mm512_permutex2var_epi8(table(planes.high), x, table(planes.high + 64));
  if constexpr (F == Format::int8)  // -128 has the code of 0
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(x), _mm512_set1_epi8(0x43));
  interleave(low, _mm512_or_si512(high, sign), first, second);
}

// Words of 64 numbers, in their order or of two rows, as bfloat16; `groups` are four scales.
template <Format F, bool TwoRows>
INLINE void as_bf16(__m512i words, const uint8_t* groups, __m512i* first, __m512i* second) {
  if constexpr (!packed(F)) {
    return codes_to_bf16<F>(_mm512_permutexvar_epi8(table(kByteOrder<TwoRows>.byte), words), first, second);
  } else {
    [[maybe_unused]] __m512i sizes;
    if constexpr (F == Format::nvfp4) sizes = sizes_of(groups[0], groups[1], groups[2], groups[3]);
    auto one = [&](const auto& order) __attribute__((always_inline)) {
      const __m512i four = _mm512_permutexvar_epi16(table(order.word), words);
      const __m512i code = _mm512_srlv_epi16(four, table(order.right));
      if constexpr (F == Format::int4) return _mm512_permutexvar_epi16(code, table(kNumbers<F>.of));
      else {
        const __m512i size = _mm512_permutexvar_epi16(and_or(code, 7, table(order.group)), sizes);
        return and_xor(_mm512_sllv_epi16(four, table(order.left)), int16_t(0x8000), size);
      }
    };
    *first = one(kCodeOrder<TwoRows>.vector[0]), *second = one(kCodeOrder<TwoRows>.vector[1]);
  }
}

// How many vectors of four keys are multiplied by R rows of queries at a time: their sums fill half the registers, or
// with NVFP4 those of all groups and those of one.
template <int R, Format F> constexpr int key_vectors = (R <= 4 ? 4 : 2) / (F == Format::nvfp4 ? 2 : 1);
// Numbers in 16 bytes.
template <Format F> constexpr int numbers_at_once = packed(F) ? 32 : 16;

// Code 0, 1, 2 or 3 of each 16 bits as bfloat16; NVFP4's without their scales.
template <Format F, int code> INLINE __m512i packed_to_bf16(__m512i words) {
  return _mm512_permutexvar_epi16(code ? _mm512_srli_epi16(words, 4 * code) : words, table(kNumbers<F>.of));
}

// Of 16 bytes of each of four keys, a key in each quarter of a vector, the numbers of part `P`: 8 of each key, and 8
// more. Packed bytes have two parts.
template <Format F, int P> INLINE void keys_to_bf16(__m512i words, __m512i* first, __m512i* second) {
  if constexpr (packed(F)) {
    *first = packed_to_bf16<F, 2 * P>(words), *second = packed_to_bf16<F, 2 * P + 1>(words);
  } else {
    codes_to_bf16<F>(words, first, second);
  }
}

// Puts numbers of a query into the order that `keys_to_bf16` has packed formats in.
struct NumberOrder {
  alignas(64) uint16_t of[32] = {};
  constexpr NumberOrder() {
    for (int i = 0; i < 32; ++i) of[i] = uint16_t(i % 8 * 4 + i / 8);
  }
};
constexpr NumberOrder kNumberOrder;
INLINE void in_order_of_codes(uint16_t* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 32)
    write(numbers + i, _mm512_permutexvar_epi16(table(kNumberOrder.of), read<__m512i>(numbers + i)));
}

// Where the scales of two groups of 8 are as float32, for the lanes that hold the sums of each: the upper half of a
// lane is bfloat16, the lower one 0.
struct ScaleOrder {
  alignas(64) uint8_t byte[4][64] = {};
  constexpr ScaleOrder() {
    for (int i = 0; i < 4; ++i)
      for (int at = 0; at < 64; ++at)
        byte[i][at] = uint8_t(at % 4 < 2 ? 0x80 : (2 * i + at % 16 / 8) * 2 + at % 2);
  }
};
constexpr ScaleOrder kScaleOrder;
// Scales of `count` groups, at most 8, of four keys, from group i on.
INLINE __m512i scales_of_keys(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, int64_t i,
                              int64_t count) {
  const __mmask16 mask = __mmask16((1u << count) - 1);
  auto some = [&](const uint8_t* of) __attribute__((always_inline)) { return _mm_maskz_loadu_epi8(mask, of + i); };
  __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(some(a)), some(b), 1), all, none;
  x = _mm512_inserti32x4(_mm512_inserti32x4(x, some(c), 2), some(d), 3);
  codes_to_bf16<Format::e4m3>(x, &all, &none);
  return all;
}
// Of these, those of groups 2 i and 2 i + 1.
INLINE Floats two_scales(__m512i scales, int64_t i) {
  return (Floats)_mm512_shuffle_epi8(scales, table(kScaleOrder.byte[i]));
}

// Where 16 words of each of two rows are in pairs, from two vectors; where 16 bytes of each are, in the first halves of
// the quarters.
struct PairOrder {
  alignas(64) uint16_t word[32] = {};
  alignas(64) uint8_t byte[64] = {};
  constexpr PairOrder() {
    for (int i = 0; i < 32; ++i) word[i] = uint16_t(i % 2 * 32 + i / 2);
    for (int i = 0; i < 64; ++i) byte[i] = uint8_t(i % 2 * 64 + i / 16 * 4 + i % 8 / 2);
  }
};
constexpr PairOrder kPairOrder;

// 64 columns of two rows of a packed format as pairs, in four vectors: every fourth column from the first on, then from
// the second on, and so on. N of the vectors: all 4, or 2, from `c` on.
template <Format F, int N> INLINE void packed_pairs(const char* a, const char* b, int64_t c, Words* out) {
  auto some = [&](const char* from) __attribute__((always_inline)) {
    return _mm512_castsi256_si512(read<__m256i>(from + c / 64 * 32));
  };
  __m512i words = _mm512_permutex2var_epi16(some(a), table(kPairOrder.word), some(b));
  if constexpr (N == 2) words = _mm512_srl_epi16(words, _mm_cvtsi64_si128(c % 64 / 4));
  out[0] = (Words)packed_to_bf16<F, 0>(words), out[1] = (Words)packed_to_bf16<F, 1>(words);
  if constexpr (N == 4) out[2] = (Words)packed_to_bf16<F, 2>(words), out[3] = (Words)packed_to_bf16<F, 3>(words);
}

// The scales of 16 groups of two rows as pairs of bfloat16; zeros past the first `count`.
INLINE Words scales_of_rows(const uint8_t* a, const uint8_t* b, int64_t count) {
  const __mmask16 mask = __mmask16((1u << count) - 1);
  auto some = [&](const uint8_t* from) __attribute__((always_inline)) {
    return _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, from));
  };
  __m512i pairs, none;
  codes_to_bf16<Format::e4m3>(_mm512_permutex2var_epi8(some(a), table(kPairOrder.byte), some(b)), &pairs, &none);
  return (Words)pairs;
}
// Weights of two rows times their scales of 16 groups: 16 of one row, 16 of the other.
INLINE __m512i scaled_weights(Words scales, float a, float b) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)(high_half(scales) * b), (__m512)(low_half(scales) * a));
}
// Of these, from group `first` on, a pair for each column of `packed_pairs`.
struct GroupOrder {
  alignas(64) uint16_t word[32] = {};
  constexpr GroupOrder() {
    for (int i = 0; i < 32; ++i) word[i] = uint16_t(i % 2 * 16 + i / 8);
  }
};
constexpr GroupOrder kGroupOrder;
INLINE Words pairs_of_columns(const uint32_t* scaled, int64_t first) {
  const __m512i order = _mm512_add_epi16(table(kGroupOrder.word), _mm512_set1_epi16(short(first % 16)));
  return (Words)_mm512_permutexvar_epi16(order, read<__m512i>(scaled + first / 16 * 16));
}

// The first `count` of 64 bytes, then zeros; with `Whole`, 64 of them.
template <bool Whole> INLINE __m512i some_bytes(const char* from, int64_t count) {
  if (Whole || count >= 64) return read<__m512i>(from);
  return count <= 0 ? __m512i{} : _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, from);
}

// `count` scales of groups, from group `i` of a row of the pool on; zeros after the row's last.
template <bool Whole> INLINE void some_groups(const Cache& cache, int64_t row, int64_t i, int count, uint8_t* to) {
  const uint8_t* from = cache.groups + row * (cache.row_bytes / 8) + i;
  const int64_t left = Whole ? count : cache.dim / 16 - i;
  for (int j = 0; j < count; ++j) to[j] = j < left ? from[j] : 0;
}

// Numbers c to c + 64 of a row, zeros past its last; `row` is its index in the pool. `Whole`: 64 are left.
template <Format F, bool Whole>
INLINE void row_to_bf16(const Cache& cache, const char* at, int64_t row, int64_t c, __m512i* first, __m512i* second) {
  const int64_t left = cache.dim - c;
  if constexpr (F == Format::bf16) {
    *first = some_bytes<Whole>(at + c * 2, left * 2), *second = some_bytes<Whole>(at + c * 2 + 64, left * 2 - 64);
  } else {
    uint8_t groups[4];
    if constexpr (F == Format::nvfp4) some_groups<Whole>(cache, row, c / 16, 4, groups);
    __m512i words;
    if constexpr (packed(F)) {
      words = Whole ? _mm512_castsi256_si512(read<__m256i>(at + c / 2))
                    : some_bytes<false>(at + c / 2, least(left / 2, 32));
    } else {
      words = some_bytes<Whole>(at + c, left);
    }
    as_bf16<F, false>(words, groups, first, second);
  }
}

// Columns c to c + 32 of two rows as pairs, zeros past their last and for a row that is null; `row`: their indices in
// the pool. `Whole`: neither row is null, and 32 columns are left.
template <Format F, bool Whole>
INLINE void rows_to_pairs(const Cache& cache, const char* a, const char* b, const int64_t* row, int64_t c,
                          __m512i* first, __m512i* second) {
  const int64_t left = cache.dim - c;
  if constexpr (F == Format::bf16) {
    auto part = [&](const char* from) __attribute__((always_inline)) {
      return Whole || from ? some_bytes<Whole>(from + c * 2, left * 2) : __m512i{};
    };
    const __m512i x = part(a), y = part(b);
    *first = _mm512_unpacklo_epi16(x, y), *second = _mm512_unpackhi_epi16(x, y);
  } else {
    constexpr int bytes = packed(F) ? 16 : 32;
    const int64_t at = packed(F) ? c / 2 : c;
    alignas(32) char some[2][32] = {};
    if constexpr (!Whole) {
      const int64_t count = least(packed(F) ? left / 2 : left, bytes);
      if (a) memcpy(some[0], a + at, count);
      if (b) memcpy(some[1], b + at, count);
    }
    const char *x = Whole ? a + at : some[0], *y = Whole ? b + at : some[1];
    uint8_t groups[4] = {};
    if constexpr (F == Format::nvfp4) {
      if (Whole || a) some_groups<Whole>(cache, row[0], c / 16, 2, groups);
      if (Whole || b) some_groups<Whole>(cache, row[1], c / 16, 2, groups + 2);
    }
    __m512i words;
    if constexpr (packed(F)) {
      words = _mm512_castsi256_si512(
          _mm256_inserti128_si256(_mm256_castsi128_si256(read<__m128i>(x)), read<__m128i>(y), 1));
    } else {
      words = _mm512_inserti64x4(_mm512_castsi256_si512(read<__m256i>(x)), read<__m256i>(y), 1);
    }
    as_bf16<F, true>(words, groups, first, second);
  }
}

#endif

}  // namespace
}  // namespace jattn_native
