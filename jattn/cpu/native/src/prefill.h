// Many rows: prefill, and decode with large groups. The rows are in the lanes, so a number of a key or value is
// broadcast to them, and sums stay in registers.
//
//   transpose q, 4 x 4 numbers at a time, and at the end O
//   for each kv tile, prefetching the next one meanwhile:
//     V as pairs of keys (bfloat16), or in place (float32)
//     for each panel of up to three vectors of rows (two on 64-bit ARM):
//       S = K q, 4 to 8 keys at a time       then, as in panel.h, P and a
//       O = a O + V^T P, 4 to 8 columns at a time
//   write O / l, or for one of several splits the partial result (O, m, l)
//
// Scratch belongs to the thread: q and O of all panels, one panel's S, which P replaces, and V's pairs. A work item has
// as many rows as the second-level cache holds (kernel.cc).
#pragma once
#include "panel.h"

namespace jattn_native {
namespace {

// Keys or columns at a time: their sums fill the registers, together with a vector of each key where lanes of it are
// multiplied.
constexpr int at_once(int vectors) { return kRegisters == 32 || vectors == 1 ? 8 : vectors == 2 ? 6 : 4; }

// The number of columns left after that is a multiple of this, since rows of values are padded to a multiple of 2 W.
constexpr int left_at_once(int at_once) { return at_once & -at_once; }

// Keys of a kv tile where memory is the bottleneck: a multiple of six if keys are multiplied six at a time.
constexpr int few_keys(int vectors) { return at_once(vectors) == 6 ? 48 : kFewKeys; }

// After this many steps of a sum, over numbers of a product or over keys, lines of the next kv tile are prefetched.
// With one vector of rows memory is the bottleneck, and a burst of prefetches would stall the core.
constexpr int steps_between_prefetches(int vectors) { return vectors == 1 ? 8 : 16; }
constexpr int kNear = 4;      // rows of values that are prefetched into the first-level cache
constexpr int kNearRows = 4;  // rows of queries that are prefetched: each may lie in another page

// Calls `of` with each lane as a constant.
template <class Of> INLINE void each_lane(Of of) {
  static_assert(!kLanes || W == 4);
  of(Number<0>{}), of(Number<1>{}), of(Number<2>{}), of(Number<3>{});
}

// How often `step` prefetches.
INLINE int64_t num_prefetches(int vectors, int64_t keys, int64_t length, int64_t columns, int64_t rows) {
  const int64_t some = at_once(vectors), every = steps_between_prefetches(vectors);
  auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  return parts(keys, some) * parts(length, every) + parts(columns, some) * parts(rows, every);
}

template <class E> struct Lanes;
template <> struct Lanes<float> { using type = Floats; };
template <> struct Lanes<uint32_t> { using type = Words; };
template <class E> using Vector = typename Lanes<E>::type;

// A kv tile as all panels use it.
template <class E> struct KvTile {
  const Keys* keys;
  const E* const* k;  // rows of keys
  const E* const* v;  // rows of values, or of pairs of them
  bool in_tree;
};

// S = K q of a kv tile: s [keys][N] from q [length][N], numbers or pairs of them. Neither this nor the next function is
// inlined: the sums fill the registers, and if other values live too, GCC keeps some of the sums on the stack.
template <int N, class E, class V>
NOINLINE void multiply_keys(const KvTile<E>& kv_tile, int count, const V* q, Floats* s, int64_t length,
                            Prefetcher& prefetcher, int64_t lines) {
  constexpr int MR = at_once(N), every = steps_between_prefetches(N);
  for (int j = 0; j < count; j += MR) {
    Floats sum[MR][N] = {};
    const E* const* k = kv_tile.k + j;
    for (int64_t from = 0; from < length; from += every) {
      prefetcher.prefetch_some(lines);
      int64_t d = from;
      const int64_t end = least(from + every, length);
      if constexpr (kLanes)
        for (; d + W <= end; d += W) {
          V x[MR];
          UNROLL for (int i = 0; i < MR; ++i) x[i] = read<V>(k[i] + d);
          each_lane([&](auto lane) __attribute__((always_inline)) {
            constexpr int at = decltype(lane)::value;
            V y[N];
            UNROLL for (int n = 0; n < N; ++n) y[n] = q[(d + at) * N + n];
            UNROLL for (int i = 0; i < MR; ++i)
              UNROLL for (int n = 0; n < N; ++n) sum[i][n] = multiply_add_lane<at>(sum[i][n], y[n], x[i]);
          });
        }
      for (; d < end; ++d) {
        V y[N];
        UNROLL for (int n = 0; n < N; ++n) y[n] = q[d * N + n];
        UNROLL for (int i = 0; i < MR; ++i) {
          const V x = k[i][d] - V{};
          UNROLL for (int n = 0; n < N; ++n) sum[i][n] = multiply_add(sum[i][n], x, y[n]);
        }
      }
    }
    UNROLL for (int i = 0; i < MR; ++i)
      UNROLL for (int n = 0; n < N; ++n) s[(j + i) * N + n] = sum[i][n];
  }
}

// O = a O + V^T P of a kv tile: o [columns][N] from weights [rows][N], numbers or pairs of them.
template <int N, class E, class V>
NOINLINE void multiply_values(const KvTile<E>& kv_tile, int rows, const V* weights, const Floats* alpha, Floats* all_o,
                              int64_t num_columns, Prefetcher& prefetcher, int64_t lines) {
  constexpr int at_most = at_once(N), last = left_at_once(at_most), every = steps_between_prefetches(N);
  const int64_t padded = round_up(num_columns, last);
  int64_t c = 0;
  auto columns = [&](auto size) __attribute__((always_inline)) {
    constexpr int MC = decltype(size)::value;
    for (; c + MC <= padded; c += MC) {
      Floats sum[MC][N] = {};  // over this kv tile only: long sums lose more digits
      Floats* o = all_o + c * N;
      for (int from = 0; from < rows; from += every) {
        prefetcher.prefetch_some(lines);
        for (int j = from; j < least(from + every, rows); ++j) {
          const E* v = kv_tile.v[j] + c;
          __asm__("" : "+r"(v));  // so that columns are constant offsets and need no register each
          __builtin_prefetch(kv_tile.v[j + kNear] + c, 0, 3);
          V y[N];
          UNROLL for (int n = 0; n < N; ++n) y[n] = weights[j * N + n];
          if constexpr (kLanes) {
            UNROLL for (int i = 0; i < MC; i += W) {
              const V x = read<V>(v + i);
              each_lane([&](auto lane) __attribute__((always_inline)) {
                constexpr int at = decltype(lane)::value;
                UNROLL for (int n = 0; n < N; ++n) sum[i + at][n] = multiply_add_lane<at>(sum[i + at][n], y[n], x);
              });
            }
          } else {
            UNROLL for (int i = 0; i < MC; ++i) {
              const V x = v[i] - V{};
              UNROLL for (int n = 0; n < N; ++n) sum[i][n] = multiply_add(sum[i][n], x, y[n]);
            }
          }
        }
      }
      UNROLL for (int i = 0; i < MC; ++i)
        UNROLL for (int n = 0; n < N; ++n) o[i * N + n] = multiply_add(sum[i][n], o[i * N + n], alpha[n]);
    }
  };
  columns(Number<at_most>{});
  if constexpr (last < at_most) columns(Number<last>{});
}

// A kv tile of one panel; q is [length][N], o [V][N], s scratch [count][N].
template <int N, class E, class V>
void step(const Problem& p, const Sequence& sequence, const Factors& factors, Panel& panel, const KvTile<E>& kv_tile,
          int count, const V* q, Floats* o, Floats* s, int64_t length, Prefetcher& prefetcher, int64_t lines) {
  constexpr bool paired = !__is_same(E, float);
  multiply_keys<N>(kv_tile, count, q, s, length, prefetcher, lines);
  Floats alpha[N], base[N];
  see<N, false>(p, sequence, factors, panel, *kv_tile.keys, kv_tile.in_tree, count, s, alpha, base);
  weigh_up<N, paired>(p, factors, panel, *kv_tile.keys, count, s, alpha, base, [] {});
  const int rows = paired ? (count + 1) / 2 : count;
  multiply_values<N>(kv_tile, rows, reinterpret_cast<const V*>(s), alpha, o, p.V, prefetcher, lines);
}

// Pairs of two keys' values, one per column: [V] from rows of bfloat16, whose length is a multiple of 2 W.
INLINE void pair_rows(const char* a, const char* b, int64_t columns, uint32_t* to) {
  for (int64_t c = 0; c < columns; c += 2 * W) {
    Words first, second;
    pairs_in_order(a + c * 2, b + c * 2, &first, &second);
    write(to + c, first), write(to + c + W, second);
  }
}

// A row of bfloat16 queries as pairs, times `sign`.
INLINE void pairs_of_row(const char* from, int64_t dim, float sign, uint32_t* to) {
  const uint32_t flip = sign < 0 ? 0x80008000u : 0;
  to[(dim - 1) / 2] = 0;
  memcpy(to, from, dim * 2);
  for (int64_t i = 0; i < (dim + 1) / 2; ++i) to[i] ^= flip;
}

// A panel's queries, numbers or pairs of them: to [length][panel.size]. `lines` is scratch [W][D].
template <class E>
void panel_queries(const Problem& p, const Split& split, const Factors& factors, Panel& panel, int rows,
                   int64_t length, int64_t D, float* lines, Vector<E>* to, Prefetcher& prefetcher,
                   int64_t lines_per_row) {
  constexpr bool paired = !__is_same(E, float);
  const int64_t row_bytes = p.D * bytes_of(p.query_type);
  for (int n = 0; n < panel.size; ++n) {
    for (int i = 0; i < W; ++i) {
      const int r = (panel.first + n) * W + i;
      float* line = lines + i * D;
      prefetcher.prefetch_some(lines_per_row);
      if (r + kNearRows < rows)
        for (int64_t b = 0; b < row_bytes; b += 64) prefetch(query_at(p, split, r + kNearRows) + b);
      if (r >= rows) {
        memset(line, 0, D * 4);
        continue;
      }
      if (!paired || p.key.zero) panel.total[n][i] = query_row(p, split, r, factors.sign, line);
      if (paired) pairs_of_row(query_at(p, split, r), p.D, factors.sign, reinterpret_cast<uint32_t*>(line));
    }
    int64_t d = 0;
    for (; d + 4 <= length; d += 4)
      for (int i = 0; i < W; i += 4)
        transpose(lines + i * D + d, D, reinterpret_cast<float*>(to + d * panel.size + n) + i, panel.size * W);
    for (; d < length; ++d)
      for (int i = 0; i < W; ++i)
        memcpy(reinterpret_cast<float*>(to + d * panel.size + n) + i, lines + i * D + d, 4);
  }
}

// Writes the sums of a panel's rows, o [VC][panel.size]. `lines` is scratch [W][VC].
inline void put_panel(const Problem& p, const Split& split, const Panel& panel, int rows, const Floats* o, int64_t VC,
                      float* lines) {
  for (int n = 0; n < panel.size; ++n) {
    const int first = (panel.first + n) * W;
    for (int64_t c = 0; c < p.V; c += 4)
      for (int r = 0; r < W; r += 4)
        transpose(reinterpret_cast<const float*>(o + c * panel.size + n) + r, panel.size * W, lines + r * VC + c, VC);
    for (int r = 0; r < W && first + r < rows; ++r) {
      float* line = lines + r * VC;
      if (p.value.zero)
        for (int64_t c = 0; c < p.V; ++c) line[c] += panel.zero[n][r];
      put_row(p, split, rows, first + r, line, panel.m[n][r], panel.l[n][r]);
    }
  }
}

// E: float, or uint32_t for pairs of bfloat16.
template <class E> void many_rows(const Problem& p, const Split& split, Queue& queue) {
  static thread_local Scratch scratch;
  constexpr bool paired = !__is_same(E, float);
  constexpr Format native = paired ? Format::bf16 : Format::f32;
  using V = Vector<E>;
  constexpr int numbers = paired ? 2 : 1;  // of an E of q and of keys
  const int64_t D = round_up(p.D, 2 * W), VC = round_up(p.V, 2 * W), length = (p.D + numbers - 1) / numbers;
  const int64_t number_bytes = paired ? 2 : 4;
  // Pairs are read where they lie if none begins at an odd number.
  const bool k_tiled = p.key.format != native || p.D % numbers || p.key.stride % (numbers * number_bytes);
  const bool v_tiled = !(p.values_in_keys && k_tiled) && (p.value.format != native || p.V != VC);
  const DecodeRow k_decode = decoder<paired>(p.key.format), v_decode = decoder<paired>(p.value.format);
  const int rows = int((split.t1 - split.t0) * p.group()), vectors = (rows + W - 1) / W;
  const int panels = (vectors + kPanel - 1) / kPanel + 1;
  const int want = vectors <= kPanel ? few_keys(vectors) : kMostKeys;
  const int64_t k_tile_bytes = k_tiled ? D * number_bytes : 0, v_tile_bytes = v_tiled ? VC * number_bytes : 0;
  V* q;
  Floats *o, *s;
  Panel* panel;
  Row* row;
  char *k_tile, *v_tile, *zeros;
  uint32_t* pairs;
  float* lines;  // [W][D]
  scratch.place(array(q, vectors * length), array(o, vectors * VC), array(panel, panels), array(row, vectors * W),
                array(s, (kMostKeys + 16) * kPanel), array(k_tile, kMostKeys * k_tile_bytes),
                array(v_tile, kMostKeys * v_tile_bytes), array(pairs, paired ? kMostKeys / 2 * VC : 0),
                array(zeros, VC * 4), array(lines, W * most(D, VC)));
  const E* k_rows[kMostKeys + 16];
  const E* v_rows[kMostKeys + kNear];

  const Sequence sequence(p, split.b);
  const Factors factors(p, split);
  memset(o, 0, vectors * VC * sizeof(Floats));
  memset(zeros, 0, VC * 4);
  KvTiles kv_tiles(p, split, queue, sequence, want, want, true);
  const int64_t lines_per_row = kv_tiles.start().share(vectors * W);
  int count_panels = 0;
  for (int done = 0; done < vectors; ++count_panels) {
    const int left = vectors - done;
    const int size = left < kPanel ? left : left == 4 ? 2 : kPanel;
    panel[count_panels].begin(p, split, sequence, done, size, row);
    panel_queries<E>(p, split, factors, panel[count_panels], rows, length, D, lines, q + done * length,
                     kv_tiles.start(), lines_per_row);
    done += size;
  }

  kv_tiles.each([&](Keys& here, Keys& later) __attribute__((always_inline)) {
    const int count = here.count;
    if (k_tiled) decode_cache(p.key, k_decode, here, here.k, k_tile, D, k_tile_bytes);
    if (v_tiled) decode_cache(p.value, v_decode, here, here.v, v_tile, VC, v_tile_bytes);
    else if (p.values_in_keys) memcpy(here.v, here.k, count * sizeof(char*));
    for (int j = 0; j < count + 16; ++j) k_rows[j] = reinterpret_cast<const E*>(here.k[j < count ? j : count - 1]);
    if constexpr (paired) {
      for (int j = 0; j < count; j += 2) {
        pair_rows(here.v[j], j + 1 < count ? here.v[j + 1] : zeros, VC, pairs + j / 2 * VC);
        v_rows[j / 2] = pairs + j / 2 * VC;
      }
    } else {
      for (int j = 0; j < count; ++j) v_rows[j] = reinterpret_cast<const E*>(here.v[j]);
    }
    const int v_count = paired ? (count + 1) / 2 : count;
    for (int j = v_count; j < v_count + kNear; ++j) v_rows[j] = v_rows[v_count - 1];
    const KvTile<E> kv_tile{&here, k_rows, v_rows, here.in_tree(kv_tiles.reader.first_in_tree)};
    // Every loop prefetches its share of the next kv tile.
    Prefetcher& prefetcher = later.prefetcher;
    int64_t prefetches = 0;
    for (int i = 0; i < count_panels; ++i)
      prefetches += num_prefetches(panel[i].size, count, length, p.V, v_count);
    const int64_t share = prefetcher.share(prefetches);
    for (int i = 0; i < count_panels; ++i) {
      Panel& x = panel[i];
      const int upto = x.upto(here, kv_tile.in_tree);
      if (!upto) continue;
      const V* some_q = q + x.first * length;
      Floats* some_o = o + x.first * VC;
      auto go = [&](auto size) {
        step<decltype(size)::value>(p, sequence, factors, x, kv_tile, upto, some_q, some_o, s, length, prefetcher,
                                    share);
      };
      if (x.size == 2) go(Number<2>{});
      else if constexpr (kPanel == 3 && W == 16) go(Number<3>{});  // a single vector goes to vector_rows.h
      else if (x.size == 1) go(Number<1>{});
      else if constexpr (kPanel == 3) go(Number<3>{});
    }
  });
  for (int i = 0; i < count_panels; ++i)
    put_panel(p, split, panel[i], rows, o + panel[i].first * VC, VC, lines);
}

}  // namespace
}  // namespace jattn_native
