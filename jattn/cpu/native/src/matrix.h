// The matrix unit (AMX): sums of 16 x 16 float32 += 16 x 32 bfloat16 times 32 x 16, the second of these in pairs. There
// are eight tiles; four hold sums, so that one product need not wait for another.
//
//   some_dots      S = K q: 16 or 32 keys times 16 or 32 rows of queries, 32 numbers at a time
//   some_columns   o = o + P V: 16 or 32 rows times 32 columns, 32 keys at a time
#pragma once
#include "vectors.h"

namespace jattn_native {
namespace {

// The asm of the tile instructions does not tell the compiler which memory it reads.
INLINE void fence() { __asm__ volatile("" ::: "memory"); }

// Configures this thread's tiles for its lifetime: 16 rows of 64 bytes, but `rows` rows in tiles 2, 3 and 6. The time
// of a product grows with the rows of its first operand, that of a load or store with the tile's rows.
struct TileState {
  explicit TileState(int rows) {
    alignas(64) uint8_t shape[64] = {1};
    for (int i = 0; i < 8; ++i) {
      shape[16 + 2 * i] = 64;
      shape[48 + i] = uint8_t(i == 2 || i == 3 || i == 6 ? rows : 16);
    }
    fence();
    _tile_loadconfig(shape);
  }
  ~TileState() { _tile_release(); }
};

// 16 rows of 64 bytes, evenly spaced.
struct Rows16 {
  const char* at;
  int64_t apart;
};

constexpr int64_t kTile = 1024;  // bytes of a tile in memory, if its rows are contiguous

#define LOAD(tile, from) _tile_loadd(tile, from, 64)

// s[keys][N] = K q for 16 x A keys; q is [N][steps] tiles. If `made`, k is scratch for two steps, and `make(d)` fills
// it with those of d and d + 1.
template <int A, int N, class Make, class Prefetch>
INLINE void some_dots(const Rows16* k, const char* q, int64_t steps, Floats* s, bool made, Make make,
                      Prefetch prefetch_next) {
  static_assert(A <= 2);
  constexpr int64_t step = N * sizeof(Floats);
  fence();
  _tile_zero(0);
  if constexpr (A * N > 1) _tile_zero(1);
  if constexpr (A * N > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t in_place = made ? 1 : -1;
  for (int64_t d = 0; d < steps; ++d) {
    if (made && d % 2 == 0) {
      make(d);
      fence();
    }
    const char* rows = q + d * kTile;
    auto key = [&](int a) __attribute__((always_inline)) { return k[a].at + (d & in_place) * 64; };
    if constexpr (N == 2) {  // sums 0, 1 of the first keys and 2, 3 of the second
      LOAD(6, rows);
      _tile_loadd(4, key(0), k[0].apart);
      _tile_dpbf16ps(0, 4, 6);
      prefetch_next();
      LOAD(7, rows + steps * kTile);
      _tile_dpbf16ps(1, 4, 7);
      prefetch_next();
      if constexpr (A == 2) {
        _tile_loadd(5, key(1), k[1].apart);
        _tile_dpbf16ps(2, 5, 6);
        prefetch_next();
        _tile_dpbf16ps(3, 5, 7);
        prefetch_next();
      }
    } else {
      LOAD(7, rows);
      _tile_loadd(4, key(0), k[0].apart);
      _tile_dpbf16ps(0, 4, 7);
      prefetch_next();
      if constexpr (A > 1) {
        _tile_loadd(5, key(1), k[1].apart);
        _tile_dpbf16ps(1, 5, 7);
        prefetch_next();
      }
    }
  }
  _tile_stored(0, s, step);
  if constexpr (N == 2) {
    _tile_stored(1, s + 1, step);
    if constexpr (A == 2) {
      _tile_stored(2, s + 32, step);
      _tile_stored(3, s + 33, step);
    }
  } else {
    if constexpr (A > 1) _tile_stored(1, s + 16, step);
  }
  fence();
}

// o += P V for two tiles of 16 columns: p is [N][groups] tiles, v [groups][tiles], and a group has 32 keys. The weights
// of the next vector of rows are `apart` bytes further on, its sums at `next`.
template <int N, class Prefetch>
INLINE void some_columns(const char* p, int64_t apart, const char* v, int groups, int64_t tiles, char* o, char* next,
                         Prefetch prefetch_next) {
  fence();
  LOAD(2, o);
  LOAD(3, o + kTile);
  if constexpr (N == 2) {
    LOAD(0, next);
    LOAD(1, next + kTile);
  }
  for (int g = 0; g < groups; ++g) {
    const char *weights = p + g * kTile, *values = v + g * tiles * kTile;
    LOAD(6, weights);
    LOAD(4, values);
    _tile_dpbf16ps(2, 6, 4);
    prefetch_next();
    LOAD(5, values + kTile);
    _tile_dpbf16ps(3, 6, 5);
    prefetch_next();
    if constexpr (N == 2) {
      LOAD(7, weights + apart);
      _tile_dpbf16ps(0, 7, 4);
      prefetch_next();
      _tile_dpbf16ps(1, 7, 5);
      prefetch_next();
    }
  }
  _tile_stored(2, o, 64);
  _tile_stored(3, o + kTile, 64);
  if constexpr (N == 2) {
    _tile_stored(0, next, 64);
    _tile_stored(1, next + kTile, 64);
  }
  fence();
}

// The same with the columns in the tiles' rows: v is [groups][tiles] tiles of 16 columns x 32 keys, p pairs of keys as
// `weigh_up` leaves them, [16 groups][N], and o [N][tiles] tiles of 16 columns x 16 rows.
template <int N>
INLINE void some_columns_across(const Floats* p, const char* v, int groups, int64_t tiles, char* o, char* next) {
  constexpr int64_t apart = N * sizeof(Floats);
  fence();
  LOAD(0, o);
  LOAD(1, o + kTile);
  if constexpr (N == 2) {
    LOAD(2, next);
    LOAD(3, next + kTile);
  }
  for (int g = 0; g < groups; ++g) {
    const char* values = v + g * tiles * kTile;
    const Floats* weights = p + g * 16 * N;
    LOAD(4, values);
    _tile_loadd(6, weights, apart);
    _tile_dpbf16ps(0, 4, 6);
    LOAD(5, values + kTile);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, weights + 1, apart);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, o, 64);
  _tile_stored(1, o + kTile, 64);
  if constexpr (N == 2) {
    _tile_stored(2, next, 64);
    _tile_stored(3, next + kTile, 64);
  }
  fence();
}
#undef LOAD

INLINE bool all_ones(Floats x) { return _mm512_cmpeq_ps_mask((__m512)x, _mm512_set1_ps(1.0f)) == 0xffff; }

// Transposes 16 x 16 words.
INLINE void transpose(__m512i* x) {
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

}  // namespace
}  // namespace jattn_native
