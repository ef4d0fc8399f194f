// Rows by the matrix unit: decode of two rows and more, and prefill, in bfloat16.
//
//   for each chunk of keys, the next one's memory asked for on the way:
//     V as pairs of keys
//     for each panel of one or two vectors of rows:
//       S = K q                        [keys][rows], the rows in the lanes
//       what panel.h says: P, a        then P turned: [rows][keys]
//       O = a O + P V                  [rows][columns]
//   write O / l, or the state (O, m, l) where the keys are split over pieces
//
// Keys are read where they lie, 16 at a time, if those are evenly apart. Scratch belongs to the
// thread: q and O of all panels as tiles, one panel's S and P, and V's pairs.
#pragma once
#if defined(__AMX_BF16__)
#include "matrix.h"
#include "panel.h"

namespace jattn_native {
namespace {

constexpr int kTilePanel = 2;  // vectors of rows at most

// The rows of q of a vector as tiles [steps] of pairs; returns what zero points need, their sums.
inline Floats tile_query(const Problem& p, const Piece& w, int first, int rows, const Factors& factors, int64_t steps,
                         float* line, char* to, Ahead& ahead, int64_t lines) {
  alignas(64) uint16_t some[W][32];
  const int64_t G = p.group();
  const uint16_t* query[W];
  Floats total{};
  for (int i = 0; i < W; ++i) {
    const int r = first + i < rows ? first + i : rows - 1;
    query[i] = static_cast<const uint16_t*>(p.query) + ((p.starts[w.b] + w.t0 + r / G) * p.H + w.head * G + r % G) * p.D;
    if (p.key.zero) total[i] = query_row(p, w, r, factors.sign, line);
  }
  const Words sign = Words{} + (factors.sign < 0 ? 0x80008000u : 0u);
  for (int64_t d = 0; d < steps; ++d) {
    ahead.touch(lines);
    __m512i x[W];
    if (p.D >= (d + 1) * 32) {
      UNROLL for (int i = 0; i < W; ++i) x[i] = (__m512i)(read<Words>(query[i] + d * 32) ^ sign);
    } else {
      memset(some, 0, sizeof some);
      for (int i = 0; i < W; ++i) memcpy(some[i], query[i] + d * 32, (p.D - d * 32) * 2);
      UNROLL for (int i = 0; i < W; ++i) x[i] = (__m512i)(read<Words>(some[i]) ^ sign);
    }
    turn(x);
    UNROLL for (int i = 0; i < W; ++i) write(to + d * kTile + i * 64, x[i]);
  }
  return total;
}

// Groups of 16 keys where they lie if they are evenly apart; others, and the last, in a copy that
// ends in zeros.
inline int tile_keys(const char* const* k, int count, int64_t bytes, char* copies, Rows16* groups) {
  const int size = (count + 15) / 16;
  for (int g = 0; g < size; ++g) {
    const char* const* rows = k + g * 16;
    const int some = int(least(16, count - g * 16));
    const int64_t apart = some > 1 ? rows[1] - rows[0] : 0;
    bool even = some == 16;
    for (int i = 2; even && i < 16; ++i) even = rows[i] - rows[i - 1] == apart;
    groups[g] = {rows[0], apart};
    if (even) continue;
    char* to = copies + g * 16 * bytes;
    for (int i = 0; i < some; ++i)
      if (rows[i] != to + i * bytes) memcpy(to + i * bytes, rows[i], bytes);
    memset(to + some * bytes, 0, (16 - some) * bytes);
    groups[g] = {to, bytes};
  }
  return size;
}

// Values as tiles [groups of 32 keys][columns / 16] of pairs of keys, in the order of the lanes: see
// `column`.
inline void tile_values(const char* const* v, int count, int64_t columns, const char* zeros, char* to, Ahead& ahead,
                        int64_t lines) {
  const int64_t tiles = columns / 16;
  for (int j = 0; j < round_up(count, 32); j += 2) {
    ahead.touch(lines);
    const char *a = j < count ? v[j] : zeros, *b = j + 1 < count ? v[j + 1] : zeros;
    char* at = to + j / 32 * tiles * kTile + j % 32 / 2 * 64;
    for (int64_t c = 0; c < tiles; c += 2) {
      const __m512i first = read<__m512i>(a + c * 32), second = read<__m512i>(b + c * 32);
      write(at + c * kTile, _mm512_unpacklo_epi16(first, second));
      write(at + (c + 1) * kTile, _mm512_unpackhi_epi16(first, second));
    }
  }
}

// Lines of the next chunk to ask for at each step of the work on this one, by the time steps take.
struct Pace {
  int64_t values, dots, weights, columns;

  Pace(int64_t lines, int count, int vectors, int64_t steps, int64_t tiles) {
    auto share = [&](int64_t percent, int64_t parts) { return (lines * percent / 100 + parts - 1) / parts; };
    values = share(15, count / 2 + 1);
    dots = share(35, vectors * (count + 15) / 16 * steps);
    weights = share(30, vectors * count / 2 + 1);
    columns = share(20, vectors * (count + 31) / 32 * tiles);
  }
};

// What a chunk is for all panels.
struct TileChunk {
  const Keys* keys;
  const Rows16* k;
  const char* v;
  bool own;
};

// q is [N][steps] tiles, o [N][tiles]; p is scratch.
template <int N>
void tile_step(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel, const TileChunk& chunk,
               int count, const char* q, int64_t steps, char* o, int64_t tiles, Floats* s, char* weights, Ahead& ahead,
               const Pace& pace) {
  const int groups = (count + 15) / 16;
  // With few rows memory is what takes long: asked for between the products. With many, before them.
  auto ask = [&](int64_t lines) __attribute__((always_inline)) { if (N == 1) ahead.touch(lines); };
  int g = 0;
  for (; g + 2 <= groups; g += 2) {
    if (N > 1) ahead.touch(pace.dots * steps * N);
    some_dots<2, N>(chunk.k + g, q, steps, s + g * 16 * N, [&] { ask(pace.dots); });
  }
  for (; g < groups; ++g) some_dots<1, N>(chunk.k + g, q, steps, s + g * 16 * N, [&] { ask(pace.dots); });

  Floats alpha[N], base[N];
  see<N, true>(p, sequence, factors, panel, *chunk.keys, chunk.own, count, s, alpha, base);
  weigh_up<N, true>(p, factors, panel, *chunk.keys, count, s, alpha, base, [&] { ask(pace.weights); });

  const int pairs = (count + 1) / 2, v_groups = (pairs + 15) / 16;
  const int64_t apart = kMostKeys / 32 * kTile;
  Floats* of_pair = s;
  for (int j = pairs * N; j < v_groups * 16 * N; ++j) s[j] = Floats{};
  for (int i = 0; i < v_groups; ++i)
    for (int n = 0; n < N; ++n) {
      __m512i x[16];
      UNROLL for (int j = 0; j < 16; ++j) x[j] = (__m512i)of_pair[(i * 16 + j) * N + n];
      turn(x);
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
  constexpr int columns_at_once = N == 1 ? 4 : 2;
  int64_t c = 0;
  for (; c + columns_at_once <= tiles; c += columns_at_once) {
    if (N > 1) ahead.touch(pace.columns * v_groups * N * 4);
    some_columns<N, columns_at_once>(weights, apart, chunk.v + c * kTile, v_groups, tiles, o + c * kTile, [&] { ask(pace.columns); });
  }
  for (; c < tiles; c += 2) some_columns<N, 2>(weights, apart, chunk.v + c * kTile, v_groups, tiles, o + c * kTile, [&] { ask(pace.columns); });
}

inline void tile_rows(const Problem& p, const Piece& w, Queue& queue) {
  static thread_local Scratch scratch;
  const int64_t D = round_up(p.D, 32), V = round_up(p.V, 32), steps = D / 32, tiles = V / 16;
  const bool k_tiled = p.key.format != Format::bf16 || p.D != D;
  const bool v_tiled = !(p.values_in_keys && k_tiled) && (p.value.format != Format::bf16 || p.V != V);
  const DecodeRow k_decode = decoder<true>(p.key.format), v_decode = decoder<true>(p.value.format);
  const int rows = int((w.t1 - w.t0) * p.group()), vectors = (rows + W - 1) / W;
  const int panels = (vectors + kTilePanel - 1) / kTilePanel;
  const int want = rows <= kTilePanel * W ? kFewKeys : kMostKeys;
  const int64_t v_tile_bytes = v_tiled ? want * V * 2 : 0;
  scratch.reserve(size_t(vectors) * (steps + tiles) * kTile + panels * sizeof(Panel) + vectors * W * sizeof(Row) +
                  want * kTilePanel * sizeof(Floats) + kTilePanel * kMostKeys / 32 * kTile + want * (D + V) * 2 +
                  v_tile_bytes + V * 2 + most(D, V) * 4 + 16384);
  char* q = scratch.take<char>(vectors * steps * kTile);
  char* o = scratch.take<char>(vectors * tiles * kTile);
  Panel* panel = scratch.take<Panel>(panels);
  Row* row = scratch.take<Row>(vectors * W);
  Floats* s = scratch.take<Floats>(want * kTilePanel);
  char* weights = scratch.take<char>(kTilePanel * kMostKeys / 32 * kTile);
  char* k_tile = scratch.take<char>(want * D * 2);
  char* v_tile = scratch.take<char>(v_tile_bytes);
  char* v_pairs = scratch.take<char>(want * V * 2);
  char* zeros = scratch.take<char>(V * 2);
  float* line = scratch.take<float>(most(D, V));
  Rows16 groups[kMostKeys / 16];

  const Sequence sequence(p, w.b);
  const Factors factors(p, w);
  memset(o, 0, vectors * tiles * kTile);
  memset(zeros, 0, V * 2);
  // Groups of 16 that begin where the first chunk ends do not cross blocks whose size is a multiple.
  Chunks chunks(p, w, queue, sequence, want - int(w.k0 % 16), want, true);
  const int64_t asking = chunks.start().share(vectors * steps);
  for (int i = 0; i < panels; ++i) {
    Panel& x = panel[i];
    x.begin(p, w, sequence, i * kTilePanel, int(least(kTilePanel, vectors - i * kTilePanel)), row);
    for (int n = 0; n < x.size; ++n)
      x.total[n] = tile_query(p, w, (x.first + n) * W, rows, factors, steps, line, q + (x.first + n) * steps * kTile,
                            chunks.start(), asking);
  }

  const TileState state;
  chunks.each([&](Keys& here, Keys& later) __attribute__((always_inline)) {
    const int count = here.count;
    if (k_tiled) decode_side(p.key, k_decode, here, here.k, k_tile, D, D * 2);
    if (v_tiled) decode_side(p.value, v_decode, here, here.v, v_tile, V, V * 2);
    else if (p.values_in_keys) memcpy(here.v, here.k, count * sizeof(char*));
    tile_keys(here.k, count, D * 2, k_tile, groups);
    // Every part of the work asks for its share of the next chunk.
    const Pace pace(later.ahead.left(), count, vectors, steps, tiles);
    tile_values(here.v, count, V, zeros, v_pairs, later.ahead, pace.values);
    const TileChunk chunk{&here, groups, v_pairs, here.own(chunks.reader.first_own)};
    for (int i = 0; i < panels; ++i) {
      Panel& x = panel[i];
      const int upto = x.upto(here, chunk.own);
      if (!upto) continue;
      const char* some_q = q + x.first * steps * kTile;
      char* some_o = o + x.first * tiles * kTile;
      if (x.size == 1) tile_step<1>(p, sequence, factors, x, chunk, upto, some_q, steps, some_o, tiles, s, weights, later.ahead, pace);
      else tile_step<2>(p, sequence, factors, x, chunk, upto, some_q, steps, some_o, tiles, s, weights, later.ahead, pace);
    }
  });
  for (int i = 0; i < panels; ++i) {
    const Panel& x = panel[i];
    for (int n = 0; n < x.size; ++n)
      for (int r = 0; r < W && (x.first + n) * W + r < rows; ++r) {
        const char* from = o + (x.first + n) * tiles * kTile + r * 64;
        for (int64_t c = 0; c < tiles; c += 2) {
          const Floats a = read<Floats>(from + c * kTile) + x.zero[n][r];
          const Floats b = read<Floats>(from + (c + 1) * kTile) + x.zero[n][r];
          write(line + c * 16, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
          write(line + c * 16 + 16,
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
        }
        put_row(p, w, rows, (x.first + n) * W + r, line, x.m[n][r], x.l[n][r]);
      }
  }
}

}  // namespace
}  // namespace jattn_native
#endif
