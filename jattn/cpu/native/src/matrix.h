// Products by the matrix unit (AMX): tiles of 16 keys by 32 numbers times 32 numbers by 16 rows, all
// bfloat16, summed in float32. It takes keys where they lie, if they are evenly apart, and values
// turned, a column's keys in pairs one after another; queries and weights as prefill.h has them.
//
//   tiles 0 to 2: sums, one per vector of rows      3 to 5: rows      6: keys, or columns of values
#pragma once
#include "decode.h"

namespace jattn_native {
namespace {

constexpr int kPairs = kMostKeys / 2;  // of a turned column

#if defined(__AMX_BF16__)

// The asm of the tile instructions does not say which memory it reads.
INLINE void fence() { __asm__ volatile("" ::: "memory"); }

// This thread's tiles, all of 16 rows of 64 bytes, as long as this lives.
template <bool Used> struct TileState {
  TileState() {
    if (!Used) return;
    alignas(64) uint8_t shape[64] = {1};
    for (int i = 0; i < 8; ++i) {
      shape[16 + 2 * i] = 64;
      shape[48 + i] = 16;
    }
    fence();
    _tile_loadconfig(shape);
  }
  ~TileState() {
    if (Used) _tile_release();
  }
};

// s[j][n] = k[j] . q[.][n] for `count` keys, rounded up to 16, whose rows are evenly apart in 16s.
template <int N>
INLINE void tile_dots(const char* const* k, const Words* q, int64_t length, int count, Floats* s) {
  constexpr int64_t step = N * sizeof(Words);
  fence();
  for (int j = 0; j < count; j += 16) {
    const char* keys = k[j];
    const int64_t apart = k[j + 1] - k[j];
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    for (int64_t d = 0; d < length; d += 16) {
      const Words* rows = q + d * N;
      _tile_loadd(6, keys + d * 4, apart);
      _tile_loadd(3, rows, step);
      _tile_dpbf16ps(0, 6, 3);
      if constexpr (N > 1) {
        _tile_loadd(4, rows + 1, step);
        _tile_dpbf16ps(1, 6, 4);
      }
      if constexpr (N > 2) {
        _tile_loadd(5, rows + 2, step);
        _tile_dpbf16ps(2, 6, 5);
      }
    }
    Floats* to = s + j * N;
    _tile_stored(0, to, step);
    if constexpr (N > 1) _tile_stored(1, to + 1, step);
    if constexpr (N > 2) _tile_stored(2, to + 2, step);
  }
  fence();
}

// o[c][n] += sum of v[c][j] weights[j][n] over pairs of keys j, rounded up to 16.
template <int N>
INLINE void tile_weigh(const uint32_t* v, const Words* weights, int pairs, int64_t columns, Floats* o) {
  constexpr int64_t step = N * sizeof(Words);
  fence();
  for (int64_t c = 0; c < columns; c += 16) {
    Floats* to = o + c * N;
    _tile_loadd(0, to, step);
    if constexpr (N > 1) _tile_loadd(1, to + 1, step);
    if constexpr (N > 2) _tile_loadd(2, to + 2, step);
    for (int j = 0; j < pairs; j += 16) {
      const Words* rows = weights + j * N;
      _tile_loadd(6, v + c * kPairs + j, kPairs * 4);
      _tile_loadd(3, rows, step);
      _tile_dpbf16ps(0, 6, 3);
      if constexpr (N > 1) {
        _tile_loadd(4, rows + 1, step);
        _tile_dpbf16ps(1, 6, 4);
      }
      if constexpr (N > 2) {
        _tile_loadd(5, rows + 2, step);
        _tile_dpbf16ps(2, 6, 5);
      }
    }
    _tile_stored(0, to, step);
    if constexpr (N > 1) _tile_stored(1, to + 1, step);
    if constexpr (N > 2) _tile_stored(2, to + 2, step);
  }
  fence();
}

INLINE bool all_ones(Floats x) { return _mm512_cmpeq_ps_mask((__m512)x, _mm512_set1_ps(1.0f)) == 0xffff; }

// Whether the keys [j, j + 16) are all there, and their rows evenly apart.
INLINE bool evenly_apart(const char* const* k, int j, int count) {
  if (j + 16 > count) return false;
  const int64_t apart = k[j + 1] - k[j];
  for (int i = 2; i < 16; ++i)
    if (k[j + i] - k[j + i - 1] != apart) return false;
  return true;
}

// Copies of them that are; past the last key, zeros.
INLINE void copy_rows(const char* const* k, int j, int count, int64_t bytes, char* to, const char** rows) {
  for (int i = 0; i < 16; ++i) {
    char* row = to + i * bytes;
    if (j + i < count) {
      if (k[j + i] != row) memcpy(row, k[j + i], bytes);
    } else {
      memset(row, 0, bytes);
    }
    rows[j + i] = row;
  }
}

// 16 x 16 words, turned.
INLINE void turn(__m512i* x) {
  __m512i y[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

// Values [count][columns] as pairs of keys by column: [columns][kPairs].
INLINE void turn_pairs(const char* const* v, int count, int64_t columns, const char* zeros, uint32_t* to) {
  for (int j = 0; j < count; j += 32)
    for (int64_t c = 0; c < columns; c += 16) {
      __m512i x[16];
      for (int i = 0; i < 16; ++i) {
        const int key = j + 2 * i;
        const Words first = widen(read<Halves>((key < count ? v[key] : zeros) + c * 2));
        const Words second = widen(read<Halves>((key + 1 < count ? v[key + 1] : zeros) + c * 2));
        x[i] = (__m512i)(first | second << 16);
      }
      turn(x);
      for (int i = 0; i < 16; ++i) write(to + (c + i) * kPairs + j / 2, x[i]);
    }
}

#else

// Named by what is compiled for machines without tiles, and used there by nothing.
template <bool Used> struct TileState {};
template <int N> void tile_dots(const char* const* k, const Words* q, int64_t length, int count, Floats* s);
template <int N>
void tile_weigh(const uint32_t* v, const Words* weights, int pairs, int64_t columns, Floats* o);
INLINE bool all_ones(Floats) { return false; }
INLINE bool evenly_apart(const char* const*, int, int) { return false; }
INLINE void copy_rows(const char* const*, int, int, int64_t, char*, const char**) {}
INLINE void turn_pairs(const char* const*, int, int64_t, const char*, uint32_t*) {}

#endif

}  // namespace
}  // namespace jattn_native
