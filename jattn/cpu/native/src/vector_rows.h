// One vector of rows, 9 to 16, with AVX-512: decode with large groups and of latent caches.
//
//   q: 16 bytes of four rows to a vector, so that 16 bytes of a key are multiplied by them all
//   for each kv tile, prefetching the next one meanwhile:
//     decode K and V into scratch unless they are stored as they are multiplied: pairs of bfloat16, or float32
//     S = K q, four keys at a time           the rows in the lanes
//     as in panel.h, P and a
//     O = a O + P V, eight rows at a time    the columns in the lanes
//   write O / l, or for one of several splits the partial result (O, m, l)
//
// A register of keys is multiplied by four of queries, and one of weights by two of values. Numbers that are broadcast
// to 16 rows, as prefill.h does for more rows, would be read from memory for each product. Scratch belongs to the
// thread.
#pragma once
#include "prefill.h"

#if defined(__AVX512F__)
namespace jattn_native {
namespace {

constexpr int kQuad = 4;  // keys at a time, and vectors of queries: 4 x 4 sums

// After this many steps of either product, some lines of the next kv tile are prefetched.
constexpr int kQuadSteps = 8;

// S = K q: row i of the queries is quarter i / 4 of vector i % 4 in each of `steps`.
template <class V>
NOINLINE void multiply_quads(const char* const* keys, int count, const V* q, int64_t steps, Floats* s,
                             Prefetcher& prefetcher, int64_t lines) {
  for (int j = 0; j < count; j += kQuad) {
    Floats sum[kQuad][kQuad] = {};
    const char* k[kQuad];
    UNROLL for (int i = 0; i < kQuad; ++i) k[i] = keys[j + i];
    for (int64_t from = 0; from < steps; from += kQuadSteps) {
      prefetcher.prefetch_some(lines);
      const int64_t end = least(from + kQuadSteps, steps);
      for (int64_t d = from; d < end; ++d) {
        V y[kQuad];
        UNROLL for (int n = 0; n < kQuad; ++n) {
          y[n] = q[d * kQuad + n];
          IN_REGISTER(y[n]);
        }
        UNROLL for (int i = 0; i < kQuad; ++i) {
          const V x = (V)_mm512_broadcast_i32x4(read<__m128i>(k[i] + d * 16));
          UNROLL for (int n = 0; n < kQuad; ++n) sum[i][n] = multiply_add(sum[i][n], x, y[n]);
        }
      }
    }
    UNROLL for (int i = 0; i < kQuad; ++i) s[j + i] = sums_of_quarters(sum[i]);
  }
}

// Columns c to c + 2 W of a row of values, or as pairs of two rows, in the order of `in_columns`.
INLINE void two_vectors(const char* const* v, int64_t c, Floats* y) {
  y[0] = read<Floats>(v[0] + c * 4), y[1] = read<Floats>(v[0] + c * 4 + W * 4);
}
INLINE void two_vectors(const char* const* v, int64_t c, Words* y) {
  pairs_of_rows(v[0] + c * 2, v[1] + c * 2, y, y + 1);
}

// O = a O + P V for R rows and 2 W columns; weights are of keys, or of pairs of them, [][W].
template <int R, class E>
INLINE void add_values(const char* const* v, int count, const E* weights, const float* alpha, float* o, int64_t c,
                       int64_t columns, Prefetcher& prefetcher, int64_t lines) {
  using V = Vector<E>;
  constexpr int keys = __is_same(E, float) ? 1 : 2;
  Floats sum[R][2];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int i = 0; i < 2; ++i) sum[r][i] = read<Floats>(o + r * columns + c + i * W) * alpha[r];
  for (int from = 0; from < count; from += keys * kQuadSteps) {
    prefetcher.prefetch_some(lines);
    const int end = int(least(from + keys * kQuadSteps, count));
    for (int j = from; j < end; j += keys) {
      V y[2];
      two_vectors(v + j, c, y);
      UNROLL for (int r = 0; r < R; ++r) {
        V x = weights[unsigned(j) / keys * W + r] - V{};
        IN_REGISTER(x);
        UNROLL for (int i = 0; i < 2; ++i) sum[r][i] = multiply_add(sum[r][i], y[i], x);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int i = 0; i < 2; ++i) write(o + r * columns + c + i * W, sum[r][i]);
}

// The same for 9 to 16 rows and all columns.
template <class E>
NOINLINE void add_all_values(const char* const* v, int count, int rows, const E* weights, const float* alpha, float* o,
                             int64_t columns, Prefetcher& prefetcher, int64_t lines) {
  constexpr int R = 8;
  float* const others = o + R * columns;
  for (int64_t c = 0; c < columns; c += 2 * W) {
    add_values<R>(v, count, weights, alpha, o, c, columns, prefetcher, lines);
    if (rows > 12) add_values<8>(v, count, weights + R, alpha + R, others, c, columns, prefetcher, lines);
    else add_values<4>(v, count, weights + R, alpha + R, others, c, columns, prefetcher, lines);
  }
}

// E: float, or uint32_t for pairs of bfloat16.
template <class E> void vector_rows(const Problem& p, const Split& split, Queue& queue) {
  static thread_local Scratch scratch;
  using V = Vector<E>;
  constexpr bool paired = !__is_same(E, float);
  constexpr Format native = paired ? Format::bf16 : Format::f32;
  constexpr int64_t bytes = paired ? 2 : 4, numbers = 16 / bytes;
  const int64_t D = round_up(p.D, 2 * W), VC = round_up(p.V, 2 * W), steps = (p.D + numbers - 1) / numbers;
  const int rows = int((split.t1 - split.t0) * p.group());
  const bool k_tiled = p.key.format != native || p.D % numbers;
  const bool v_tiled = !(p.values_in_keys && k_tiled) && (p.value.format != native || p.V != VC);
  const DecodeRow k_decode = decoder<paired>(p.key.format), v_decode = decoder<paired>(p.value.format);
  const int want = kKvTile;
  V* q;
  Floats* s;
  float *o, *line;
  Row* row;
  char *k_tile, *v_tile, *zeros;
  scratch.place(array(q, steps * kQuad), array(s, want), array(o, W * VC), array(line, most(D, VC)), array(row, W),
                array(k_tile, k_tiled ? want * D * bytes : 0), array(v_tile, v_tiled ? want * VC * bytes : 0),
                array(zeros, VC * bytes));
  const Sequence sequence(p, split.b);
  const Factors factors(p, split);
  memset(q, 0, steps * kQuad * sizeof(V));
  memset(o, 0, W * VC * 4);
  memset(zeros, 0, VC * bytes);
  KvTiles kv_tiles(p, split, queue, sequence, want, want, true);
  const int64_t lines_per_row = kv_tiles.start().share(rows);
  Panel panel;
  panel.begin(p, split, sequence, 0, 1, row);
  for (int r = 0; r < rows; ++r) {
    kv_tiles.start().prefetch_some(lines_per_row);
    if (!paired || p.key.zero) panel.total[0][r] = query_row(p, split, r, factors.sign, line);
    if (paired) pairs_of_row(query_at(p, split, r), p.D, factors.sign, reinterpret_cast<uint32_t*>(line));
    memset(reinterpret_cast<char*>(line) + round_up(p.D * bytes, 4), 0, D * bytes - round_up(p.D * bytes, 4));
    for (int64_t d = 0; d < steps; ++d)
      memcpy(reinterpret_cast<char*>(q + d * kQuad + r % kQuad) + r / kQuad * 16, line + d * 4, 16);
  }

  kv_tiles.each([&](Keys& here, Keys& later) __attribute__((always_inline)) {
    if (k_tiled) decode_cache(p.key, k_decode, here, here.k, k_tile, D, D * bytes);
    if (v_tiled) decode_cache(p.value, v_decode, here, here.v, v_tile, VC, VC * bytes);
    else if (p.values_in_keys) memcpy(here.v, here.k, here.count * sizeof(char*));
    const bool in_tree = here.in_tree(kv_tiles.reader.first_in_tree);
    const int count = panel.upto(here, in_tree);
    if (!count) return;
    for (int j = count; j % kQuad; ++j) here.k[j] = here.k[count - 1];
    if (count % 2) here.v[count] = zeros;
    auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    const int64_t prefetches = parts(count, kQuad) * parts(steps, kQuadSteps) +
                               VC / W * parts(count, (paired ? 2 : 1) * kQuadSteps);
    const int64_t lines = later.prefetcher.share(prefetches);
    multiply_quads(here.k, count, q, steps, s, later.prefetcher, lines);
    Floats alpha, base;
    see<1, false>(p, sequence, factors, panel, here, in_tree, count, s, &alpha, &base);
    weigh_up<1, paired>(p, factors, panel, here, count, s, &alpha, &base, [] {});
    float factor[W];
    write(factor, alpha);
    add_all_values(here.v, count, rows, reinterpret_cast<const E*>(s), factor, o, VC, later.prefetcher, lines);
  });
  for (int r = 0; r < rows; ++r) {
    float* from = o + r * VC;
    if (paired) {
      in_columns<AsPairs>(from, VC, false, line);
      from = line;
    }
    if (p.value.zero) for (int64_t v = 0; v < p.V; ++v) from[v] += panel.zero[0][r];
    put_row(p, split, rows, r, from, panel.m[0][r], panel.l[0][r]);
  }
}

}  // namespace
}  // namespace jattn_native
#endif
