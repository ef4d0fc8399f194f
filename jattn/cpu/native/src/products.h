// What decode multiplies: dots of keys with up to 8 rows of queries, and weighted sums of values. The numbers of a row
// are in the lanes, and read once.
//
//   dots             W / R keys at a time: their sums fill the registers, then lanes are added up
//   dots_of_codes    W keys of a narrow format: 16 bytes of four keys fill a register
//   weigh            up to 8 vectors of columns at a time, over all keys of the kv tile
//
// Each takes its share of what to prefetch of the next kv tile.
#pragma once
#include "keys.h"

namespace jattn_native {
namespace {

INLINE int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

template <int N> struct Number {
  static constexpr int value = N;
};

// How the numbers of a row are read and multiplied: a vector of `numbers` gives `parts` products, and `step` numbers of
// a key are multiplied at a time.
struct AsFloats {
  static constexpr int numbers = W, parts = 1, bytes = 4, step = W;
  static constexpr bool paired = false, codes = false;
};
struct AsPairs {  // bfloat16 times bfloat16 in pairs
  static constexpr int numbers = 2 * W, parts = 2, bytes = 2, step = 2 * W;
  static constexpr bool paired = true, codes = false;
};
template <Format F> struct AsCodes : AsPairs {  // pairs in registers, of a narrow format in memory
  static constexpr bool codes = true;
  static constexpr Format format = F;
};
template <Format F, int P> struct AsNumbers {  // float32 / `gain` in registers, of another format in memory
  static constexpr int numbers = P * W, parts = P, step = P * W;
  static constexpr bool paired = false, codes = true;
  static constexpr Format format = F;
};
template <Format F> struct AsNibbles {  // the same of a packed format, in the order of `each_of_nibbles`
  static constexpr int numbers = 8 * W, parts = 8, step = 8 * W;
  static constexpr bool paired = false, codes = true;
  static constexpr Format format = F;
};
struct AsHalves {  // bfloat16, multiplied as float32
  static constexpr int numbers = 2 * W, parts = 2, bytes = 2, step = 2 * W;
  static constexpr bool paired = false, codes = false;
};

// Whether the codes come in a special order (`packed_pairs` or `each_of_nibbles`), and whether without their scales.
template <class M> constexpr bool packed_codes = false;
template <Format F> constexpr bool packed_codes<AsCodes<F>> = packed(F);
template <class M> constexpr bool nibbles = false;
template <Format F> constexpr bool nibbles<AsNibbles<F>> = true;
template <class M> constexpr bool scaled_codes = false;
template <> constexpr bool scaled_codes<AsCodes<Format::nvfp4>> = true;

constexpr int kKvTile = 64;  // keys of a kv tile, at most

// While the kernel works on a kv tile, it prefetches the next one line by line: a core keeps few misses in flight, and
// a burst of prefetches would stall it until they return. It prefetches either, with each row of this kv tile, the row
// at the same place in the next one...
struct SameRow {
  static constexpr bool interleaved = false;
  const char* const* row;
  int64_t lines;  // of a row, from `offset` on; 0 to prefetch nothing
  int64_t offset;

  INLINE void prefetch_line(int64_t j, int64_t i) const {
    if (i < lines) prefetch(row[j] + offset + i * 64);
  }
  // How many lines of W rows to prefetch in each of `steps` steps.
  INLINE int64_t every(int64_t steps) const { return (W * lines + steps - 1) / steps; }
};

// ... or a few lines with every step, interleaved from several runs. Memory responds sooner, but finding the lines
// takes longer.
struct InterleavedRuns {
  static constexpr bool interleaved = true;
  Prefetcher& prefetcher;
  int64_t lines;

  INLINE void prefetch_some() const { prefetcher.prefetch_some(lines); }
};

// Interleaved lines are prefetched after this many steps, or keys of a vector of columns. On a core of a Zen 3, decode
// of one to four rows takes 0.8 to 0.98 of the time with every fourth step rather than each.
template <int R> constexpr int kStepsBetweenPrefetches = kRegisters == 32 ? 1 : R == 1 ? 4 : 8;
template <int R> INLINE int64_t num_prefetches(int64_t steps) {
  return (steps + kStepsBetweenPrefetches<R> - 1) / kStepsBetweenPrefetches<R>;
}
// A separate loop for the steps between two prefetches: GCC keeps constants in registers there.
template <int R, class One> INLINE void each_step(int64_t count, const InterleavedRuns& next, One one) {
  constexpr int every = kStepsBetweenPrefetches<R>;
  int64_t i = 0;
  for (; i + every <= count; i += every) {
    next.prefetch_some();
    for (int n = 0; n < every; ++n) one(i + n);
  }
  if (i < count) next.prefetch_some();
  for (; i < count; ++i) one(i);
}

// From this many bytes of a row of keys on, prefetches are interleaved if R rows of queries read it. On two cores of a
// Zen 4 that takes 0.65 to 1.08 of the time for one row of 512 to 2,048 bytes, and up to 1.3 for one of 128 and 256. On
// two cores of a Zen 3, which has no AVX-512, it takes 0.7 to 1.04 for one to eight rows of 128 bytes and more; on two
// cores of a Xeon with AMX, 0.76 to 1.02 for one to eight.
constexpr int64_t kNever = INT64_MAX;
template <int R> constexpr int64_t kLongRow = kRegisters == 16 || kTiles ? 0 : R == 1 ? 512 : kNever;

// The sums of this many keys with R rows fill the registers. If many vectors of a key follow each other, each row has
// several sums of it, so that they do not wait for one another.
constexpr int kRoom = kRegisters == 32 ? 16 : 8;
template <int R, class M> constexpr int chains = nibbles<M> && R < 4 ? 4 / R : 1;
template <int R, class M> constexpr int room_for_keys = kRoom / (R * chains<R, M>);
template <int R, class M>
constexpr int keys_at_once = room_for_keys<R, M> == 0      ? 1
                             : W / R < room_for_keys<R, M> ? W / R
                             : room_for_keys<R, M> > 8     ? 8
                                                           : room_for_keys<R, M>;

// The dots of W / R keys with R rows; q is [R][steps] times the vectors of a step. `row`: the keys' rows in the pool.
template <int R, class M, class Next>
INLINE void dots([[maybe_unused]] const Cache& cache, const char* const* k, [[maybe_unused]] const int64_t* row,
                 int64_t steps, const Floats* q, float* s, int64_t stride, const Next& next) {
  constexpr int keys = W / R, at_once = keys_at_once<R, M>, C = chains<R, M>;
  constexpr int parts = M::step / W / (M::paired ? 2 : 1);
  Floats all[W];
  UNROLL for (int g = 0; g < keys; g += at_once) {
    Floats sum[R * at_once * C] = {};
    auto one_step = [&](int64_t i) __attribute__((always_inline)) {
      if constexpr (nibbles<M>) {
        UNROLL for (int j = 0; j < at_once; ++j) {
          auto multiply = [&](int n, Floats y) __attribute__((always_inline)) {
            UNROLL for (int r = 0; r < R; ++r) {
              Floats& x = sum[(r * at_once + j) * C + n % C];
              x = multiply_add(x, y, q[(r * steps + i) * parts + n]);
            }
          };
          each_of_nibbles<M::format>(k[g + j], groups_of<M::format>(cache, row[g + j]), i * M::step, multiply);
        }
        return;
      }
      // Of several rows each number of a query is read once for all keys.
      constexpr int together = R >= 4 ? at_once : 1;
      UNROLL for (int j = 0; j < at_once; j += together) {
        Floats y[together][parts];
        UNROLL for (int n = 0; n < together; ++n) {
          const char* at = k[g + j + n] + i * (W * 4);
          if constexpr (M::codes) {
            vectors<M::format, parts, false>(k[g + j + n], groups_of<M::format>(cache, row[g + j + n]), i * M::step,
                                             y[n]);
          } else if constexpr (parts == 1) {
            y[n][0] = read<Floats>(at);
          } else {
            y[n][0] = low_half(read<Words>(at)), y[n][1] = high_half(read<Words>(at));
          }
        }
        UNROLL for (int r = 0; r < R; ++r)
          UNROLL for (int part = 0; part < parts; ++part) {
            Floats query = q[(r * steps + i) * parts + part];
            if constexpr (together > 1) IN_REGISTER(query);
            UNROLL for (int n = 0; n < together; ++n) {
              Floats& x = sum[r * at_once + j + n];
              if constexpr (M::paired) x = multiply_add(x, (Words)y[n][part], (Words)query);
              else x = multiply_add(x, y[n][part], query);
            }
          }
      }
    };
    if constexpr (Next::interleaved) {
      each_step<R>(steps, next, one_step);
    } else {
      int64_t i = 0;
      for (const int64_t prefetching = least(next.lines, steps); i < prefetching; ++i) {
        UNROLL for (int j = 0; j < at_once; ++j) next.prefetch_line(g + j, i);
        one_step(i);
      }
      for (; i < steps; ++i) one_step(i);
    }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int j = 0; j < at_once; ++j) {
        const Floats* of = sum + (r * at_once + j) * C;
        Floats& x = all[r * keys + g + j] = of[0];
        UNROLL for (int n = 1; n < C; ++n) x += of[n];
      }
  }
  const Floats found = sums(all);
  float numbers[W];
  write(numbers, found);
  UNROLL for (int r = 0; r < R; ++r) memcpy(s + r * stride, numbers + r * keys, keys * 4);
}

#if defined(__AVX512VBMI__)
// The same of W keys in a narrow format, `dim` numbers, with 16 bytes of each of four keys in a vector: sums of four
// lanes take a fifth of the shuffles that sums of all lanes would. q is [R][dim] bfloat16, in the order of the codes.
template <int R, Format F, class Next>
INLINE void dots_of_codes(const Cache& cache, const char* const* k, const int64_t* row, int64_t dim, const uint16_t* q,
                          float* s, int64_t stride, const Next& next) {
  constexpr int vectors = key_vectors<R, F>, parts = numbers_at_once<F> / 16;
  constexpr bool scaled = F == Format::nvfp4;
  constexpr int chains = R == 1 && !scaled ? 2 : 1;  // sums of a vector, so that eight do not wait for each other
  const int64_t steps = dim / numbers_at_once<F>;
  [[maybe_unused]] const uint8_t* groups[W];  // each key's
  if constexpr (scaled)
    for (int j = 0; j < W; ++j) groups[j] = cache.groups + row[j] * (cache.row_bytes / 8);
  Floats all[R][4];
  int64_t prefetched = 0, due = 0;
  UNROLL for (int g = 0; g < 4; g += vectors) {
    Floats sum[R][vectors][chains] = {};
    [[maybe_unused]] __m512i scales[vectors];
    for (int64_t i = 0; i < steps; ++i) {
      if constexpr (Next::interleaved) {
        next.prefetch_some();
      } else {
        const int64_t lines = W * next.lines;
        for (due = least(lines, due + next.every(steps * 4 / vectors)); prefetched < due; ++prefetched)
          next.prefetch_line(prefetched % W, prefetched / W);
      }
      if constexpr (scaled)
        if (i % 4 == 0)
          UNROLL for (int j = 0; j < vectors; ++j) {
            const uint8_t* const* of = groups + g + j;
            scales[j] = scales_of_keys(of[0], of[4], of[8], of[12], i * 2, least(dim / 16 - i * 2, 8));
          }
      __m512i words[vectors];
      UNROLL for (int j = 0; j < vectors; ++j) {
        const char* const* at = k + g + j;
        words[j] = four(at[0] + i * 16, at[4] + i * 16, at[8] + i * 16, at[12] + i * 16);
      }
      Floats of_groups[R][vectors][1] = {};
      auto& to = [&]() -> auto& {
        if constexpr (scaled) return of_groups;
        else return sum;
      }();
      auto part = [&](auto of) __attribute__((always_inline)) {
        constexpr int P = decltype(of)::value;
        __m512i y[vectors][2];
        UNROLL for (int j = 0; j < vectors; ++j) keys_to_bf16<F, P>(words[j], &y[j][0], &y[j][1]);
        UNROLL for (int r = 0; r < R; ++r)
          UNROLL for (int n = 0; n < 2; ++n) {
            const __m512i query = _mm512_broadcast_i32x4(read<__m128i>(q + r * dim + (i * parts + P) * 16 + n * 8));
            UNROLL for (int j = 0; j < vectors; ++j) {
              Floats& x = to[r][j][n % chains];
              x = multiply_add(x, (Words)y[j][n], (Words)query);
            }
          }
      };
      part(Number<0>{});
      if constexpr (parts == 2) part(Number<1>{});
      if constexpr (scaled)
        UNROLL for (int j = 0; j < vectors; ++j) {
          const Floats scale = two_scales(scales[j], i % 4);
          UNROLL for (int r = 0; r < R; ++r) sum[r][j][0] = multiply_add(sum[r][j][0], of_groups[r][j][0], scale);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int j = 0; j < vectors; ++j)
        all[r][g + j] = chains == 2 ? sum[r][j][0] + sum[r][j][chains - 1] : sum[r][j][0];
  }
  UNROLL for (int r = 0; r < R; ++r) write(s + r * stride, sums_of_quarters(all[r]));
}

// The weights of a kv tile times the scales of NVFP4's groups of values.
template <int R>
void scale_weights(const Cache& cache, const Keys& here, const float* p, int64_t groups, uint32_t* to) {
  for (int j = 0; j < here.count; j += 2)
    for (int64_t g = 0; g < groups; g += W) {
      auto of = [&](int key) { return cache.groups + here.row[key] * (cache.row_bytes / 8) + g; };
      const Words scales = scales_of_rows(of(j), of(j + 1), least(cache.dim / 16 - g, W));
      UNROLL for (int r = 0; r < R; ++r) {
        const float* weight = p + r * kKvTile + j;
        write(to + (j / 2 * R + r) * groups + g, scaled_weights(scales, weight[0], weight[1]));
      }
    }
}
#endif

// The weights of a kv tile.
struct Weights {
  const float* p;          // [R][kKvTile]
  const uint32_t* pairs;   // the same of two keys
  const uint32_t* scaled;  // of two keys, times NVFP4's scales [kKvTile / 2][R][groups]: `scaled_weights`
  int64_t groups;
  const float* alpha;  // factors that rescale earlier sums [R]

  Weights from(int row) const { return {p + row * kKvTile, pairs, scaled, groups, alpha + row}; }
};

// o[r] = alpha[r] o[r] + p[r] V over a kv tile, for NV vectors of columns. o is in the order of the lanes: see
// `in_columns`. `index`: the keys' rows in the pool; `from`: the first column.
template <int R, int NV, class M, class Next>
INLINE void weigh([[maybe_unused]] const Cache& cache, const char* const* v, [[maybe_unused]] const int64_t* index,
                  int count, int64_t from, const Weights& weights, float* o, int64_t row, const Next& next) {
  constexpr int A = M::parts;
  Floats sum[R][NV * A];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int i = 0; i < NV * A; ++i) sum[r][i] = read<Floats>(o + r * row + i * W) * weights.alpha[r];
  if constexpr (M::paired) {
    for (int j = 0; j < count; j += 2) {
      if constexpr (Next::interleaved) {
        next.prefetch_some();
      } else {
        UNROLL for (int x = 0; x < NV; ++x) next.prefetch_line(j, x), next.prefetch_line(j + 1, x);
      }
      Words y[NV * A];
      constexpr int at_once = packed_codes<M> && NV > 1 ? 2 : 1;
      UNROLL for (int x = 0; x < NV; x += at_once) {
        const int64_t c = from + x * M::numbers;
#if defined(__AVX512VBMI__)
        if constexpr (packed_codes<M>) {
          packed_pairs<M::format, at_once * A>(v[j], v[j + 1], c, y + x * A);
          continue;
        } else if constexpr (M::codes) {
          __m512i first, second;
          rows_to_pairs<M::format, true>(cache, v[j], v[j + 1], index + j, c, &first, &second);
          y[x * A] = (Words)first, y[x * A + 1] = (Words)second;
          continue;
        }
#endif
        pairs_of_rows(v[j] + c * 2, v[j + 1] + c * 2, y + x * A, y + x * A + 1);
      }
      UNROLL for (int r = 0; r < R; ++r) {
        Words weight = Words{} + weights.pairs[r * (kKvTile / 2) + (unsigned(j) >> 1)];
        UNROLL for (int x = 0; x < NV * A; ++x) {
#if defined(__AVX512VBMI__)
          if constexpr (scaled_codes<M>)
            if (x % 4 == 0)
              weight = pairs_of_columns(weights.scaled + (j / 2 * R + r) * weights.groups, from / 64 * 4 + x);
#endif
          sum[r][x] = multiply_add(sum[r][x], y[x], weight);
        }
      }
    }
  } else {
    auto one_key = [&](int64_t j) __attribute__((always_inline)) {
      if constexpr (nibbles<M>) {
        Floats weight[R];
        UNROLL for (int r = 0; r < R; ++r) weight[r] = splat(weights.p[r * kKvTile + j]);
        auto multiply = [&](int n, Floats y) __attribute__((always_inline)) {
          UNROLL for (int r = 0; r < R; ++r) sum[r][n] = multiply_add(sum[r][n], y, weight[r]);
        };
        each_of_nibbles<M::format>(v[j], groups_of<M::format>(cache, index[j]), from, multiply);
      } else {
        Floats y[NV * A];
        UNROLL for (int x = 0; x < NV; ++x) {
          if constexpr (M::codes) {
            vectors<M::format, A, false>(v[j], groups_of<M::format>(cache, index[j]), from + x * M::numbers, y + x * A);
          } else if constexpr (A == 1) {
            y[x] = read<Floats>(v[j] + from * M::bytes + x * W * 4);
          } else {
            const Words both = read<Words>(v[j] + from * M::bytes + x * W * 4);
            y[2 * x] = low_half(both);
            y[2 * x + 1] = high_half(both);
          }
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const Floats weight = splat(weights.p[r * kKvTile + j]);
          UNROLL for (int x = 0; x < NV * A; ++x) sum[r][x] = multiply_add(sum[r][x], y[x], weight);
        }
      }
    };
    if constexpr (Next::interleaved) {
      each_step<R>(count, next, one_key);
    } else {
      for (int j = 0; j < count; ++j) {
        UNROLL for (int x = 0; x < NV; ++x) next.prefetch_line(j, x);
        one_key(j);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int i = 0; i < NV * A; ++i) write(o + r * row + i * W, sum[r][i]);
}

// Of every 2 W numbers the even ones, then the odd ones: as the halves of words of bfloat16 lie in the lanes.
INLINE void even_then_odd(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 2 * W)
    for (int lane = 0; lane < W; ++lane)
      to[i + lane] = from[i + 2 * lane], to[i + W + lane] = from[i + 2 * lane + 1];
}

// The same in the order of `each_of_nibbles`, and back.
INLINE void in_order_of_nibbles(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 8 * W)
    for (int n = 0; n < 8; ++n)
      for (int lane = 0; lane < W; ++lane) to[i + n * W + lane] = from[i + nibble_number(n, lane)];
}
INLINE void from_order_of_nibbles(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 8 * W)
    for (int n = 0; n < 8; ++n)
      for (int lane = 0; lane < W; ++lane) to[i + nibble_number(n, lane)] = from[i + n * W + lane];
}

// A row of o, `count` numbers, in the order of columns; `packed_codes`: whether it is that of `packed_pairs`.
template <class M> INLINE void in_columns(const float* from, int64_t count, bool packed_codes, float* to) {
  if (packed_codes) {
    for (int64_t i = 0; i < count; i += 4 * W) {
      Floats x[4], even[2], odd[2];
      memcpy(x, from + i, sizeof x);
      interleave(x[0], x[2], &even[0], &even[1]), interleave(x[1], x[3], &odd[0], &odd[1]);
      for (int n = 0; n < 2; ++n) {
        interleave(even[n], odd[n], &x[0], &x[1]);
        memcpy(to + i + n * 2 * W, x, 2 * sizeof(Floats));
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; i += 2 * W) {
    if constexpr (M::paired) {
      for (int k = 0; k < W; k += 4)
        memcpy(to + i + 2 * k, from + i + k, 16), memcpy(to + i + 2 * k + 4, from + i + W + k, 16);
    } else {
      for (int lane = 0; lane < W; ++lane)
        to[i + 2 * lane] = from[i + lane], to[i + 2 * lane + 1] = from[i + W + lane];
    }
  }
}

// The logits [R][kKvTile] of a kv tile; `width` keys include those that fill the last vector.
template <int R, class M, bool interleaved>
void kv_tile_dots(const Cache& cache, const Keys& here, Keys& later, int width, int64_t dim, const Floats* q,
                  float* s) {
  // Half of interleaved lines come with the keys, half with the values.
  auto each = [&](int keys, int64_t prefetches, auto some) __attribute__((always_inline)) {
    const int64_t of_row = later.count ? (cache.row_bytes + 63) / 64 : 0;
    const int64_t lines = interleaved ? later.prefetcher.share(2 * prefetches) : of_row;
    for (int j = 0; j < width; j += keys) {
      if constexpr (interleaved) some(j, InterleavedRuns{later.prefetcher, lines});
      else some(j, SameRow{later.k + j, lines, 0});
    }
  };
  if constexpr (M::codes && M::paired) {
#if defined(__AVX512VBMI__)
    const int64_t steps = width / W * dim / numbers_at_once<M::format> * (4 / key_vectors<R, M::format>);
    each(W, steps, [&](int j, auto next) __attribute__((always_inline)) {
      dots_of_codes<R, M::format>(cache, here.k + j, here.row + j, dim, reinterpret_cast<const uint16_t*>(q), s + j,
                                  kKvTile, next);
    });
#endif
  } else {
    // With 16 registers eight rows leave room for one key: half of the rows, then the others, unless keys are decoded.
    constexpr int rows = R == 8 && kRegisters == 16 && !M::codes ? R / 2 : R;
    const int64_t steps = dim / M::step;
    const int64_t prefetches = width / keys_at_once<rows, M> * num_prefetches<rows>(steps);
    each(W / rows, prefetches, [&](int j, auto next) __attribute__((always_inline)) {
      dots<rows, M>(cache, here.k + j, here.row + j, steps, q, s + j, kKvTile, next);
      if constexpr (rows < R)
        dots<rows, M>(cache, here.k + j, here.row + j, steps, q + rows * (dim / W), s + rows * kKvTile + j, kKvTile,
                      SameRow{later.k, 0, 0});
    });
  }
}

// o = alpha o + p V over a kv tile, o [R][V].
template <int R, class M, bool interleaved>
void kv_tile_values(const Cache& cache, const Keys& here, Keys& later, bool prefetch_next, int64_t V,
                    const Weights& weights, float* o) {
  const int count = here.count;
  const int64_t prefetches = M::paired ? (count + 1) / 2 : num_prefetches<R>(count);
  int64_t v = 0;
  auto columns = [&](auto vectors) {
    constexpr int NV = decltype(vectors)::value;
    constexpr int numbers = NV * M::numbers;
    if constexpr (M::codes && M::paired && NV == 1 && R < 8) return;  // codes come in whole 64s
    else if constexpr (R * M::parts * NV <= kRoom || NV == 1) {
      auto one = [&](auto next) {
        if constexpr (R == 8 && R * M::parts * NV > kRoom && kRegisters == 16) {  // half of the rows, then the others
          weigh<R / 2, NV, M>(cache, here.v, here.row, count, v, weights, o + v, V, next);
          weigh<R / 2, NV, M>(cache, here.v, here.row, count, v, weights.from(R / 2), o + R / 2 * V + v, V,
                              SameRow{later.v, 0, 0});
        } else {
          weigh<R, NV, M>(cache, here.v, here.row, count, v, weights, o + v, V, next);
        }
      };
      const int64_t lines = prefetch_next && later.count ? (numbers * cache.row_bytes / cache.dim + 63) / 64 : 0;
      for (; v + numbers <= V; v += numbers)
        if constexpr (interleaved)
          one(InterleavedRuns{later.prefetcher, later.prefetcher.share((V - v) / numbers * prefetches)});
        else
          one(SameRow{later.v, lines, v * cache.row_bytes / cache.dim});
    }
  };
  columns(Number<8>{});
  columns(Number<4>{});
  columns(Number<2>{});
  columns(Number<1>{});
}

}  // namespace
}  // namespace jattn_native
