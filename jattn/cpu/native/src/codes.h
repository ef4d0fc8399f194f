// Narrow formats as bfloat16, 64 numbers at a time, by tables: exact for every code.
//
//   codes: a byte for each number, in an order that the last line turns into that of the numbers
//   low, high = table[code]        the two bytes of a bfloat16
//   interleaved                    32 numbers and 32 numbers
//
// Decode takes 16 numbers of each of four keys at a time, a key in each quarter of a vector, and 32 columns of two rows
// of values, as pairs in the order of `column`. Elsewhere 64 numbers of a row stay in their order. With NVFP4 the table
// is that of the four groups of the 64 numbers.
#pragma once
#include "semantics.h"
#include "vectors.h"

namespace jattn_native {
namespace {

// Where number i of a query is multiplied by what `keys_to_bf16` gives.
INLINE int64_t in_order(Format f, int64_t i) { return f == Format::int4 ? i / 32 * 32 + i % 2 * 16 + i % 32 / 2 : i; }

#if defined(__AVX512VBMI__)

// significand * 2^exponent as bfloat16, where that is exact.
constexpr uint16_t exact_bf16(int significand, int exponent) {
  if (significand == 0) return 0;
  while (significand < 128) significand *= 2, --exponent;
  while (significand > 255) significand /= 2, ++exponent;
  return uint16_t((exponent + 134) << 7 | (significand & 127));
}

// A code without its sign as bfloat16; for int8 its absolute value, see `as_bf16`.
constexpr uint16_t bf16_of_code(Format f, int x) {
  if (f == Format::int8) return exact_bf16(x, 0);
  if (f == Format::e4m3) return x == 127 ? 0x7fc0 : x < 8 ? exact_bf16(x, -9) : exact_bf16(8 + x % 8, x / 8 - 10);
  if (x >= 124) return x == 124 ? 0x7f80 : 0x7fc0;  // e5m2
  return x < 4 ? exact_bf16(x, -16) : exact_bf16(4 + x % 4, x / 4 - 17);
}

// The low and the high bytes of bfloat16s.
template <int N> struct Planes {
  alignas(64) uint8_t low[N] = {}, high[N] = {};
  constexpr void set(int i, uint16_t x) { low[i] = uint8_t(x), high[i] = uint8_t(x >> 8); }
};
template <Format F> constexpr Planes<128> planes_of() {
  Planes<128> found;
  for (int i = 0; i < 128; ++i) found.set(i, bf16_of_code(F, i));
  return found;
}
template <Format F> constexpr Planes<128> kPlanes = planes_of<F>();

constexpr Planes<64> planes_of_int4() {
  Planes<64> found;
  for (int i = 0; i < 64; ++i)
    found.set(i, i % 16 < 8 ? exact_bf16(i % 16, 0) : uint16_t(0x8000 | exact_bf16(16 - i % 16, 0)));
  return found;
}
constexpr Planes<64> kInt4 = planes_of_int4();

// For each scale of a group: the low bytes of e2m1's eight sizes times it, and the high bytes.
struct Groups {
  alignas(64) uint8_t bytes[256][16] = {};
  constexpr Groups() {
    constexpr int twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int scale = 0; scale < 256; ++scale)
      for (int i = 0; i < 8; ++i) {
        const int e = scale >> 3 & 15, m = scale & 7;
        uint16_t x = e ? exact_bf16(twice[i] * (8 + m), e - 11) : exact_bf16(twice[i] * m, -10);
        if ((scale & 127) == 127) x = 0x7fc0;
        if (scale & 128) x ^= 0x8000;
        bytes[scale][i] = uint8_t(x), bytes[scale][8 + i] = uint8_t(x >> 8);
      }
  }
};
constexpr Groups kGroups;

// Where each code is in 64 bytes of words; with two codes per byte, its first bit among the eight bytes that were
// gathered; and where its group's sizes are in the table.
struct Order {
  alignas(64) uint8_t byte[64] = {}, bit[64] = {}, group[64] = {};
  constexpr Order(bool packed, bool two_rows) {
    for (int i = 0; i < 64; ++i) {
      const int lane = i / 16, half = i / 8 % 2, at = i % 8;
      if (two_rows) {  // a b a b ..., eight columns of each in a lane
        const int row = i % 2, column = lane * 8 + half * 4 + at / 2;
        byte[i] = uint8_t(packed ? at % 4 / 2 * 16 + lane * 4 + half * 2 + at % 2 : row * 32 + column);
        bit[i] = uint8_t(row * 16 + at / 2 * 4);
        group[i] = uint8_t((row * 2 + column / 16) * 16);
      } else {
        const int number = half * 32 + lane * 8 + at;
        byte[i] = uint8_t(packed ? (number - at) / 2 + at % 4 : number);
        bit[i] = uint8_t(at * 4);
        group[i] = uint8_t(number / 16 * 16);
      }
    }
  }
};
template <bool Packed, bool TwoRows> constexpr Order kOrder{Packed, TwoRows};

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
  return four(kGroups.bytes[a], kGroups.bytes[b], kGroups.bytes[c], kGroups.bytes[d]);
}

// Codes of any format but NVFP4, a byte each, as bfloat16. Of packed ones the upper four bits are ignored.
template <Format F> INLINE void codes_to_bf16(__m512i x, __m512i* first, __m512i* second) {
  __m512i low, high;
  if constexpr (F == Format::int4) {
    x = _mm512_and_si512(x, _mm512_set1_epi8(15));
    low = _mm512_shuffle_epi8(table(kInt4.low), x);
    high = _mm512_shuffle_epi8(table(kInt4.high), x);
  } else {
    const Planes<128>& planes = kPlanes<F>;
    const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(char(0x80)));
    if constexpr (F == Format::int8) x = _mm512_abs_epi8(x);
    low = _mm512_permutex2var_epi8(table(planes.low), x, table(planes.low + 64));
    high = _mm512_permutex2var_epi8(table(planes.high), x, table(planes.high + 64));
    if constexpr (F == Format::int8)  // -128 has the code of 0
      high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(x), _mm512_set1_epi8(0x43));
    high = _mm512_or_si512(high, sign);
  }
  interleave(low, high, first, second);
}

// The same of e2m1's codes; `look_up` finds bytes among `sizes`, at the positions `at` of the codes' sizes.
template <class LookUp>
INLINE void e2m1_to_bf16(__m512i x, __m512i at, __m512i sizes, LookUp look_up, __m512i* first, __m512i* second) {
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi8(char(0x80)));
  const __m512i low = look_up(sizes, at), high = look_up(sizes, _mm512_or_si512(at, _mm512_set1_epi8(8)));
  interleave(low, _mm512_xor_si512(high, sign), first, second);
}

// Words of 64 numbers, in their order or of two rows, as bfloat16; `groups` are four scales.
template <Format F, bool TwoRows>
INLINE void as_bf16(__m512i words, const uint8_t* groups, __m512i* first, __m512i* second) {
  constexpr const Order& order = kOrder<packed(F), TwoRows>;
  __m512i x = _mm512_permutexvar_epi8(table(order.byte), words);
  if constexpr (packed(F)) x = _mm512_multishift_epi64_epi8(table(order.bit), x);
  if constexpr (F == Format::nvfp4) {
    const __m512i sizes = sizes_of(groups[0], groups[1], groups[2], groups[3]);
    const __m512i at = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi8(7)), table(order.group));
    auto look_up = [](__m512i sizes, __m512i at) __attribute__((always_inline)) {
      return _mm512_permutexvar_epi8(at, sizes);
    };
    e2m1_to_bf16(x, at, sizes, look_up, first, second);
  } else {
    codes_to_bf16<F>(x, first, second);
  }
}

// How many vectors of four keys are multiplied by R rows of queries at a time: their sums fill half of the registers.
template <int R> constexpr int key_vectors = R <= 4 ? 4 : 2;
// Numbers in 16 bytes.
template <Format F> constexpr int numbers_at_once = packed(F) ? 32 : 16;

// Part `P` of 16 bytes of each of four keys, a key in each quarter of a vector: 8 numbers of each, and 8 more. Packed
// bytes have two parts. Of int4 the first has the even numbers, the second the odd ones (`in_order`); others are in
// their order. `groups`: of NVFP4, the four keys' scales of these 16 numbers.
template <Format F, int P>
INLINE void keys_to_bf16(__m512i words, const uint8_t* groups, __m512i* first, __m512i* second) {
  const __m512i odd = packed(F) ? _mm512_srli_epi16(words, 4) : words;
  if constexpr (F == Format::nvfp4) {
    // The 16 codes of a group in a quarter; a table of 16 bytes there.
    const __m512i x = P ? _mm512_unpackhi_epi8(words, odd) : _mm512_unpacklo_epi8(words, odd);
    const __m512i sizes = sizes_of(groups[0], groups[1], groups[2], groups[3]);
    const __m512i at = _mm512_and_si512(x, _mm512_set1_epi8(7));
    auto look_up = [](__m512i sizes, __m512i at) __attribute__((always_inline)) {
      return _mm512_shuffle_epi8(sizes, at);
    };
    e2m1_to_bf16(x, at, sizes, look_up, first, second);
  } else {
    codes_to_bf16<F>(P ? odd : words, first, second);
  }
}

// The first `count` of 64 bytes, then zeros; with `Whole`, 64 of them.
template <bool Whole> INLINE __m512i some_bytes(const char* from, int64_t count) {
  if (Whole || count >= 64) return read<__m512i>(from);
  return count <= 0 ? __m512i{} : _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, from);
}

// `count` scales of groups, from group `i` of a row of the pool on; zeros after the row's last.
template <bool Whole> INLINE void some_groups(const Side& side, int64_t row, int64_t i, int count, uint8_t* to) {
  const uint8_t* from = side.groups + row * (side.row_bytes / 8) + i;
  const int64_t left = Whole ? count : side.dim / 16 - i;
  for (int j = 0; j < count; ++j) to[j] = j < left ? from[j] : 0;
}

// Numbers c to c + 64 of a row, zeros past its last; `row` is its index in the pool. `Whole`: 64 are left.
template <Format F, bool Whole>
INLINE void row_to_bf16(const Side& side, const char* at, int64_t row, int64_t c, __m512i* first, __m512i* second) {
  const int64_t left = side.dim - c;
  if constexpr (F == Format::bf16) {
    *first = some_bytes<Whole>(at + c * 2, left * 2), *second = some_bytes<Whole>(at + c * 2 + 64, left * 2 - 64);
  } else {
    uint8_t groups[4];
    if constexpr (F == Format::nvfp4) some_groups<Whole>(side, row, c / 16, 4, groups);
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
INLINE void rows_to_pairs(const Side& side, const char* a, const char* b, const int64_t* row, int64_t c,
                          __m512i* first, __m512i* second) {
  const int64_t left = side.dim - c;
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
      if (Whole || a) some_groups<Whole>(side, row[0], c / 16, 2, groups);
      if (Whole || b) some_groups<Whole>(side, row[1], c / 16, 2, groups + 2);
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
