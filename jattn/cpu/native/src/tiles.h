// Rows on the matrix unit: decode of five and more rows, or two where codes are converted, and prefill, in bfloat16.
//
//   for each kv tile, prefetching the next one meanwhile:
//     with several panels: convert K to bfloat16 unless it is, and transpose V: [columns][keys]
//     for each panel of one or two vectors of rows:
//       S = K q                        [keys][rows], the rows in the lanes
//       as in panel.h, P and a         P in pairs of keys, in place of S
//       with one panel: transpose P to [rows][keys], convert V to pairs of keys, O = a O + P V
//       with several:   O = a O + V P                                            [columns][rows]
//   write O / l, or for one of several splits the partial result (O, m, l)
//
// Keys are read in place, 16 at a time, if they are bfloat16 and evenly spaced. With one panel, other keys, and values,
// are converted a few columns at a time just before they are multiplied, in the first-level cache (codes.h). Scratch
// belongs to the thread: q and O of all panels as the matrix unit's tiles, one panel's S and P, and the converted K and
// V.
#pragma once
#if defined(__AMX_BF16__)
#include "matrix.h"
#include "panel.h"

namespace jattn_native {
namespace {

constexpr int kTilePanel = 2;  // vectors of rows at most

// A vector's rows of q as tiles [steps] of pairs; returns the rows' sums, which zero points need.
inline Floats tile_query(const Problem& p, const Split& split, int first, int rows, const Factors& factors,
                         int64_t steps, float* line, char* to, Prefetcher& prefetcher, int64_t lines) {
  alignas(64) uint16_t some[W][32];
  const uint16_t* query[W];
  Floats total{};
  for (int i = 0; i < W; ++i) {
    const int r = first + i < rows ? first + i : rows - 1;
    query[i] = reinterpret_cast<const uint16_t*>(query_at(p, split, r));
    if (p.key.zero) total[i] = query_row(p, split, r, factors.sign, line);
  }
  const Words sign = Words{} + (factors.sign < 0 ? 0x80008000u : 0u);
  for (int64_t d = 0; d < steps; ++d) {
    prefetcher.prefetch_some(lines);
    __m512i x[W];
    if (p.D >= (d + 1) * 32) {
      UNROLL for (int i = 0; i < W; ++i) x[i] = (__m512i)(read<Words>(query[i] + d * 32) ^ sign);
    } else {
      memset(some, 0, sizeof some);
      for (int i = 0; i < W; ++i) memcpy(some[i], query[i] + d * 32, (p.D - d * 32) * 2);
      UNROLL for (int i = 0; i < W; ++i) x[i] = (__m512i)(read<Words>(some[i]) ^ sign);
    }
    transpose(x);
    UNROLL for (int i = 0; i < W; ++i) write(to + d * kTile + i * 64, x[i]);
  }
  return total;
}

// Up to 32 rows of a kv tile, and where they are in the pool.
struct Rows32 {
  const Cache* cache;
  const char* const* at;
  const int64_t* row;
  int count;
};
// Makes numbers c to c + 64 of 32 rows, which are written `apart` bytes from each other; zeros past the
// last number and the last row.
using MakeKeys =
    void (*)(const Rows32& rows, int64_t c, char* to, int64_t apart, Prefetcher& prefetcher, int64_t lines);
// Makes columns c to c + 32 of 32 rows as two tiles of pairs of rows, in the order of the lanes: see `in_columns`.
using MakeValues = void (*)(const Rows32& rows, int64_t c, char* to, Prefetcher& prefetcher, int64_t lines);
using MakeValuesAcross = void (*)(const Rows32& rows, int64_t c, char* to);

template <Format F>
void make_keys(const Rows32& rows, int64_t c, char* to, int64_t apart, Prefetcher& prefetcher, int64_t lines) {
  const Cache cache = *rows.cache;
  auto each = [&](auto whole) __attribute__((always_inline)) {
    for (int i = 0; i < rows.count; ++i, to += apart) {
      if (i % 2) prefetcher.prefetch_some(lines);
      __m512i first, second;
      row_to_bf16<F, decltype(whole)::value == 1>(cache, rows.at[i], rows.row[i], c, &first, &second);
      write(to, first);
      write(to + 64, second);
    }
  };
  if (c + 64 <= cache.dim) each(Number<1>{});
  else each(Number<0>{});
  for (int i = rows.count; i < 32; ++i, to += apart) memset(to, 0, 128);
}

template <Format F> void make_values(const Rows32& rows, int64_t c, char* to, Prefetcher& prefetcher, int64_t lines) {
  const Cache cache = *rows.cache;
  auto each = [&](auto whole) __attribute__((always_inline)) {
    constexpr bool Whole = decltype(whole)::value == 1;
    for (int i = 0; i < 32; i += 2, to += 64) {
      prefetcher.prefetch_some(lines);
      const char* a = Whole || i < rows.count ? rows.at[i] : nullptr;
      const char* b = Whole || i + 1 < rows.count ? rows.at[i + 1] : nullptr;
      __m512i first, second;
      rows_to_pairs<F, Whole>(cache, a, b, rows.row + i, c, &first, &second);
      write(to, first);
      write(to + kTile, second);
    }
  };
  if (c + 32 <= cache.dim && rows.count == 32) each(Number<1>{});
  else each(Number<0>{});
}

// The same with the columns in the tiles' rows, and the pairs of rows in the lanes.
template <Format F> void make_values_across(const Rows32& rows, int64_t c, char* to) {
  const Cache cache = *rows.cache;
  __m512i first[16], second[16];
  auto each = [&](auto whole) __attribute__((always_inline)) {
    constexpr bool Whole = decltype(whole)::value == 1;
    UNROLL for (int i = 0; i < 16; ++i) {
      const char* a = Whole || 2 * i < rows.count ? rows.at[2 * i] : nullptr;
      const char* b = Whole || 2 * i + 1 < rows.count ? rows.at[2 * i + 1] : nullptr;
      rows_to_pairs<F, Whole>(cache, a, b, rows.row + 2 * i, c, &first[i], &second[i]);
    }
  };
  if (c + 32 <= cache.dim && rows.count == 32) each(Number<1>{});
  else each(Number<0>{});
  transpose(first), transpose(second);
  UNROLL for (int i = 0; i < 16; ++i) write(to + i * 64, first[i]), write(to + kTile + i * 64, second[i]);
}

// Whether 16 of the rows are evenly spaced, and where they are.
inline bool evenly_apart(const char* const* rows, int count, Rows16* found) {
  int64_t apart;
  if (count < 16 || !evenly_apart<16>(rows, &apart)) return false;
  *found = {rows[0], apart};
  return true;
}

// How many lines of the next kv tile each step of the work on this one prefetches, in proportion to the step's time.
struct Pace {
  int64_t keys, dots, weights, values, columns;

  // `made`: whether keys are converted; `vectors`: of all rows.
  Pace(int64_t lines, int count, int vectors, int64_t steps, int64_t tiles, bool made) {
    auto share = [&](int64_t percent, int64_t parts) { return (lines * percent / 100 + parts - 1) / parts; };
    keys = made ? share(25, (count + 31) / 32 * 16 * ((steps + 1) / 2)) : 0;
    dots = made ? 0 : share(25, vectors * (count + 15) / 16 * steps);
    weights = share(8, vectors * count / 2 + 1);
    values = share(47, (count + 31) / 32 * 16 * (tiles / 2));
    columns = share(20, vectors * (count + 31) / 32 * tiles);
    // With several panels the products read from the second-level cache, and would wait for lines from memory.
    if (vectors > kTilePanel) keys = dots = values = columns = 0, weights = share(100, vectors * count / 2 + 1);
  }
};

// A kv tile as all panels use it.
struct MatrixKvTile {
  const Keys* keys;
  bool in_tree;
  Rows16 k[kMostKeys / 16];       // where the keys are or will be
  bool k_made[kMostKeys / 32];    // whether they are converted later: with one panel, where they are multiplied
  Rows32 k_rows[kMostKeys / 32], v_rows[kMostKeys / 32];
  MakeKeys make_keys;
  MakeValues make_values;
  char* v;  // [groups of 32 keys][tiles] of columns x keys, or with one panel scratch for two tiles of each group
};

// The weights of a panel for a kv tile, pairs of keys in place of logits s, and the factors that rescale earlier sums.
// q is [N][steps] tiles. `Once`: there is one panel.
template <int N, bool Once>
INLINE void tile_weights(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel,
                         const MatrixKvTile& kv_tile, int count, const char* q, int64_t steps, Floats* s, Floats* alpha,
                         Prefetcher& prefetcher, const Pace& pace) {
  const int groups = (count + 15) / 16;
  // With few rows memory is the bottleneck: prefetch between the products. With many, prefetch before them.
  auto prefetch_some = [&](int64_t lines) __attribute__((always_inline)) {
    if (N == 1) prefetcher.prefetch_some(lines);
  };
  int g = 0;
  for (; g + 2 <= groups || (Once && g < groups); g += 2) {
    if (N > 1) prefetcher.prefetch_some(pace.dots * steps * N);
    const bool made = Once && kv_tile.k_made[g / 2];
    auto make = [&](int64_t d) {
      kv_tile.make_keys(kv_tile.k_rows[g / 2], d * 32, const_cast<char*>(kv_tile.k[g].at), 128, prefetcher, pace.keys);
    };
    some_dots<2, N>(kv_tile.k + g, q, steps, s + g * 16 * N, made, make, [&] { prefetch_some(pace.dots); });
  }
  if constexpr (!Once)
    for (; g < groups; ++g)
      some_dots<1, N>(kv_tile.k + g, q, steps, s + g * 16 * N, false, [](int64_t) {},
                      [&] { prefetch_some(pace.dots); });
  Floats base[N];
  see<N, true>(p, sequence, factors, panel, *kv_tile.keys, kv_tile.in_tree, count, s, alpha, base);
  weigh_up<N, true>(p, factors, panel, *kv_tile.keys, count, s, alpha, base,
                    [&] { prefetcher.prefetch_some(pace.weights); });
  for (int j = (count + 1) / 2 * N; j < int(round_up(count, 32)) / 2 * N; ++j) s[j] = Floats{};
}

// A kv tile of the only panel: o is [N][tiles] tiles of 16 rows x 16 columns, and weights scratch.
template <int N>
void one_panel_step(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel,
                    const MatrixKvTile& kv_tile, int count, const char* q, int64_t steps, char* o, int64_t tiles,
                    Floats* s, char* weights, Prefetcher& prefetcher, const Pace& pace) {
  Floats alpha[N];
  tile_weights<N, true>(p, sequence, factors, panel, kv_tile, count, q, steps, s, alpha, prefetcher, pace);
  const int groups = (count + 31) / 32;
  const int64_t apart = kMostKeys / 32 * kTile;
  for (int i = 0; i < groups; ++i)
    for (int n = 0; n < N; ++n) {
      __m512i x[16];
      UNROLL for (int j = 0; j < 16; ++j) x[j] = (__m512i)s[(i * 16 + j) * N + n];
      transpose(x);
      UNROLL for (int j = 0; j < 16; ++j) write(weights + n * apart + i * kTile + j * 64, x[j]);
    }
  for (int n = 0; n < N; ++n) {
    if (all_ones(alpha[n])) continue;
    for (int r = 0; r < W; ++r) {
      const Floats factor = splat(alpha[n][r]);
      char* at = o + n * tiles * kTile + r * 64;
      for (int64_t c = 0; c < tiles; ++c) write(at + c * kTile, read<Floats>(at + c * kTile) * factor);
    }
  }
  for (int64_t c = 0; c < tiles; c += 2) {
    if (N > 1) prefetcher.prefetch_some(pace.columns * groups * N * 4);
    // Alternates between two buffers: the products read one while the other is filled.
    char* const buffer = kv_tile.v + c / 2 % 2 * (kMostKeys / 32) * 2 * kTile;
    for (int i = 0; i < groups; ++i)
      kv_tile.make_values(kv_tile.v_rows[i], c * 16, buffer + i * 2 * kTile, prefetcher, pace.values);
    some_columns<N>(weights, apart, buffer, groups, 2, o + c * kTile, o + (tiles + c) * kTile, [&] {
      if (N == 1) prefetcher.prefetch_some(pace.columns);
    });
  }
}

// A kv tile of one of several panels: o is [N][tiles] tiles of 16 columns x 16 rows.
template <int N>
void panel_step(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel,
                const MatrixKvTile& kv_tile, int count, const char* q, int64_t steps, char* o, int64_t tiles, Floats* s,
                Prefetcher& prefetcher, const Pace& pace) {
  Floats alpha[N];
  tile_weights<N, false>(p, sequence, factors, panel, kv_tile, count, q, steps, s, alpha, prefetcher, pace);
  for (int n = 0; n < N; ++n) {
    if (all_ones(alpha[n])) continue;
    Floats* const from = reinterpret_cast<Floats*>(o + n * tiles * kTile);
    for (int64_t i = 0; i < tiles * 16; ++i) from[i] *= alpha[n];
  }
  for (int64_t c = 0; c < tiles; c += 2)
    some_columns_across<N>(s, kv_tile.v + c * kTile, (count + 31) / 32, tiles, o + c * kTile, o + (tiles + c) * kTile);
}

// Transposes `count` tiles in place.
inline void transpose_tiles(char* o, int64_t count) {
  for (int64_t i = 0; i < count; ++i, o += kTile) {
    __m512i x[16];
    UNROLL for (int j = 0; j < 16; ++j) x[j] = read<__m512i>(o + j * 64);
    transpose(x);
    UNROLL for (int j = 0; j < 16; ++j) write(o + j * 64, x[j]);
  }
}

// Writes the sums of a panel's rows, o [panel.size][tiles] tiles. `line` is scratch for a row.
inline void put_tiles(const Problem& p, const Split& split, const Panel& panel, int rows, const char* o, int64_t tiles,
                      float* line) {
  for (int n = 0; n < panel.size; ++n)
    for (int r = 0; r < W && (panel.first + n) * W + r < rows; ++r) {
      const char* from = o + n * tiles * kTile + r * 64;
      for (int64_t c = 0; c < tiles; c += 2) {
        const Floats a = read<Floats>(from + c * kTile) + panel.zero[n][r];
        const Floats b = read<Floats>(from + (c + 1) * kTile) + panel.zero[n][r];
        write(line + c * 16, SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        write(line + c * 16 + 16, SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
      }
      put_row(p, split, rows, (panel.first + n) * W + r, line, panel.m[n][r], panel.l[n][r]);
    }
}

inline void tile_rows(const Problem& p, const Split& split, Queue& queue) {
  static thread_local Scratch scratch;
  const int64_t D = round_up(p.D, 32), V = round_up(p.V, 32), steps = D / 32, tiles = V / 16;
  const int rows = int((split.t1 - split.t0) * p.group()), vectors = (rows + W - 1) / W;
  const int panels = (vectors + kTilePanel - 1) / kTilePanel;
  // With several panels, a panel's logits, keys and values fit the first-level cache if D + V is at most 256. With one,
  // sums are loaded and stored once a kv tile, and the first one of a split is waited for.
  const int want = panels > 1 && p.D + p.V > 256 ? kMostKeys : 64;
  // With one panel, keys and values that need converting are converted a few columns at a time, just before they are
  // multiplied. With several panels they are converted first, and so are keys that are values too.
  const bool in_place = p.key.format == Format::bf16 && p.D == D;
  const bool keys_before = panels > 1 || (p.values_in_keys && !in_place);
  const int64_t made_bytes = round_up(p.D, 64) * 2;  // of a row of keys converted first
  Cache made_values{};                                // read from keys converted first
  made_values.format = Format::bf16, made_values.dim = p.V;
  const Cache& values = p.values_in_keys && !in_place ? made_values : p.value;
  char *q, *o, *weights, *k_made, *v_pairs;
  Panel* panel;
  Row* row;
  Floats* s;
  float* line;
  scratch.place(array(q, vectors * steps * kTile), array(o, vectors * tiles * kTile), array(panel, panels),
                array(row, vectors * W), array(s, want * kTilePanel),
                array(weights, kTilePanel * kMostKeys / 32 * kTile),
                array(k_made, want * (keys_before ? made_bytes : 128)),
                array(v_pairs, panels > 1 ? want * V * 2 : kMostKeys / 32 * 4 * kTile), array(line, most(D, V)));

  const Sequence sequence(p, split.b);
  const Factors factors(p, split);
  memset(o, 0, vectors * tiles * kTile);
  // Groups of 16 keys from the end of the first kv tile on do not cross blocks whose size is a multiple of 16.
  // With eight ranges at once rather than four, decode of 8 and 16 rows takes 0.94 to 1.03 of the time on two cores of
  // a Xeon, 0.99 in the mean.
  KvTiles kv_tiles(p, split, queue, sequence, want - int(split.k0 % 16), want, true, 8);
  const int64_t lines_per_step = kv_tiles.start().share(vectors * steps);
  for (int i = 0; i < panels; ++i) {
    Panel& x = panel[i];
    x.begin(p, split, sequence, i * kTilePanel, int(least(kTilePanel, vectors - i * kTilePanel)), row);
    for (int n = 0; n < x.size; ++n)
      x.total[n] = tile_query(p, split, (x.first + n) * W, rows, factors, steps, line,
                              q + (x.first + n) * steps * kTile, kv_tiles.start(), lines_per_step);
  }

  const TileState state(rows < W ? rows : W);
  MatrixKvTile kv_tile;
  kv_tile.make_keys = by_format(p.key.format, [](auto of) -> MakeKeys { return make_keys<decltype(of)::value>; });
  kv_tile.make_values =
      by_format(values.format, [](auto of) -> MakeValues { return make_values<decltype(of)::value>; });
  const auto make_across =
      by_format(values.format, [](auto of) -> MakeValuesAcross { return make_values_across<decltype(of)::value>; });
  kv_tile.v = v_pairs;
  kv_tiles.each([&](Keys& here, Keys& later) __attribute__((always_inline)) {
    const int count = here.count;
    kv_tile.keys = &here, kv_tile.in_tree = here.in_tree(kv_tiles.reader.first_in_tree);
    const char* const* v = p.values_in_keys ? here.k : here.v;
    // Every step of the work prefetches its share of the next kv tile.
    const Pace pace(later.prefetcher.left(), count, vectors, steps, tiles, !in_place);
    for (int j = 0; j < count; j += 32) {
      const int g = j / 16, i = j / 32, some = int(least(32, count - j));
      kv_tile.k_rows[i] = {&p.key, here.k + j, here.row + j, some};
      bool& made = kv_tile.k_made[i];
      made = !(in_place && evenly_apart(here.k + j, some, kv_tile.k + g) &&
               evenly_apart(here.k + j + 16, some - 16, kv_tile.k + g + 1));
      if (made) {
        const int64_t apart = keys_before ? made_bytes : 128;
        char* const to = k_made + j * apart;
        kv_tile.k[g] = {to, apart}, kv_tile.k[g + 1] = {to + 16 * apart, apart};
        if (keys_before) {
          for (int64_t c = 0; c < p.D; c += 64)
            kv_tile.make_keys(kv_tile.k_rows[i], c, to + c * 2, apart, later.prefetcher, pace.keys);
          made = false;
          if (p.values_in_keys && !in_place)
            for (int x = 0; x < some; ++x) here.v[j + x] = to + x * apart;
        }
      }
      kv_tile.v_rows[i] = {&values, &values == &made_values ? here.v + j : v + j, here.row + j, some};
      if (panels > 1)
        for (int64_t c = 0; c < tiles; c += 2)
          make_across(kv_tile.v_rows[i], c * 16, v_pairs + (i * tiles + c) * kTile);
    }
    for (int i = 0; i < panels; ++i) {
      Panel& x = panel[i];
      const int upto = x.upto(here, kv_tile.in_tree);
      if (!upto) continue;
      const char* some_q = q + x.first * steps * kTile;
      char* some_o = o + x.first * tiles * kTile;
      auto go = [&](auto n) {
        constexpr int N = decltype(n)::value;
        if (panels == 1)
          one_panel_step<N>(p, sequence, factors, x, kv_tile, upto, some_q, steps, some_o, tiles, s, weights,
                            later.prefetcher, pace);
        else
          panel_step<N>(p, sequence, factors, x, kv_tile, upto, some_q, steps, some_o, tiles, s, later.prefetcher,
                        pace);
      };
      if (x.size == 1) go(Number<1>{});
      else go(Number<2>{});
    }
  });
  if (panels > 1) transpose_tiles(o, vectors * tiles);
  for (int i = 0; i < panels; ++i)
    put_tiles(p, split, panel[i], rows, o + panel[i].first * tiles * kTile, tiles, line);
}

}  // namespace
}  // namespace jattn_native
#endif
