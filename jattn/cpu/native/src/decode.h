// Few rows: decode, with head_dim in the lanes. Keys and values are read once, in place.
//
//   for each kv tile, prefetching the next one meanwhile:
//     decode K and V into scratch unless they are stored as they are multiplied, or are converted
//     to that in registers: bfloat16 (codes.h) or float32 (numbers.h)
//     s = q K^T, W sums at a time      then scales, options, the mask
//     m' = max(m, s), a = 2^(m - m'), p = 2^(s - m'), l = a l + sum p
//     o = a o + p V
//   write o / l, or for one of several splits the partial result (o, m, l)
//
// Scratch belongs to the thread: q, o, s and the decoded keys and values fit the second-level cache.
#pragma once
#include <unistd.h>

#include "products.h"
#include "softmax.h"

namespace jattn_native {
namespace {

inline int64_t second_level_cache() {  // in bytes; 1 MiB where the system does not say
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t size = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (size > 0) return size;
#endif
  return 1 << 20;
}

// What a row of a split sees, and what the options need to know about it.
struct Row {
  Range range;
  int64_t position;
  float slope;
  int32_t table;  // where its row of the bias table begins
  int64_t token;  // of the sequence
};

inline Row row_of(const Problem& p, const Split& split, const Sequence& sequence, int r) {
  const int64_t G = p.group(), t = split.t0 + r / G, head = split.head * G + r % G;
  return {sequence.sees(t), sequence.position(t), p.slopes ? p.slopes[head] : 0.0f,
          int32_t(head * p.bias_columns), t};
}

// The logit of a query and a key that are both tokens of a tree, or -inf if the key is hidden.
inline float tree_logit(const Sequence& sequence, const Row& row, const Logits& logits, float dot, int64_t key) {
  int64_t distance;
  const bool seen = sequence.path(row.token).sees(key - sequence.first(), &distance);
  const int64_t at = row.position - distance;
  if (!seen || at < row.range.lo || at >= row.range.hi) return -kInf;
  return logits.one(dot, -distance, row.slope, row.table);
}

// The scale of products: its sign, which the queries carry, and its magnitude, in `logits`. `power` turns products (if
// `plain`) or logits into exponents of 2.
struct Factors {
  float sign, power;
  Logits logits;

  // `gain`: what products must be multiplied by first.
  Factors(const Problem& p, const Split& split, float gain = 1) : Factors(p, scale_of(p, split) * gain) {}
  Factors(const Problem& p, float scale)
      : sign(scale < 0 ? -1.0f : 1.0f), logits(scale * sign, p.cap, p.slopes != nullptr, p.bias, p.bias_columns) {
    power = plain(p) ? logits.scale * kLog2e : kLog2e;
  }
  static float scale_of(const Problem& p, const Split& split) {
    return p.scale * (p.k_scale ? p.k_scale[split.head] : 1.0f);
  }
  // Whether logits are products times a factor. Not a tiny one or a NaN: masked logits must not be multiplied by these.
  bool plain(const Problem& p) const { return logits.plain() && logits.scale >= 1e-37f && !p.tree; }
};

// Whether the words of a row, `dim` numbers, are converted in registers to what is multiplied.
template <class M> bool from_codes([[maybe_unused]] Format format, [[maybe_unused]] int64_t dim) {
#if defined(__AVX512VBMI__)
  if (M::paired) return format != Format::bf16 && dim % 64 == 0;
#endif
  return kDecodesInRegisters && M::numbers == W && format != Format::f32 && dim % (2 * W) == 0;
}

// What a row has added up so far.
struct RowSums {
  float m = -kInf;  // the maximum, in exponents of 2
  Floats l = {};    // the denominator, per lane
  Floats zero = {};  // what zero points add to every column, per lane
  float total = 0;  // of the query's numbers, for zero points of keys
};

// Turns a row's products x of a kv tile into logits; -inf where it is masked. `in_tree`: the keys are draft tokens.
INLINE void logits_of_row(const Problem& p, const Sequence& sequence, const Factors& factors, bool plain,
                          const Row& row, float total, const Keys& here, bool in_tree, int width, float* x) {
  const int count = here.count;
  if (p.key.per != Per::nothing || p.key.zero)
    for (int j = 0; j < width; j += W) {
      Floats y = read<Floats>(x + j);
      if (p.key.per != Per::nothing) y *= read<Floats>(here.k_scale + j);
      if (p.key.zero) y += read<Floats>(here.k_zero + j) * total;
      write(x + j, y);
    }
  if (in_tree) {
    for (int j = 0; j < count; ++j) x[j] = tree_logit(sequence, row, factors.logits, x[j], here.first + j);
  } else {
    if (!plain) {
      const Logits& logits = factors.logits;
      const int64_t away = here.first - row.position;
      const Ints first = iota() + int32_t(away), table = splat(row.table);
      const bool one_bias = logits.one_bias(away, away + width - 1);
      const Floats found = one_bias ? logits.bias_of(first, table) : Floats{};
      for (int j = 0; j < width; j += W) {
        const Floats dot = read<Floats>(x + j), slope = splat(row.slope);
        write(x + j, one_bias ? logits.unbiased(dot, first + j, slope) + found : logits(dot, first + j, slope, table));
      }
    }
    const int64_t lo = least(row.range.lo - here.first, count);
    for (int64_t j = 0; j < lo; ++j) x[j] = -kInf;
    for (int64_t j = most(row.range.hi - here.first, 0); j < count; ++j) x[j] = -kInf;
  }
  for (int j = count; j < width; ++j) x[j] = -kInf;
}

// Turns a row's logits x into weights, as pairs with M::paired, and then as floats only if `floats`; returns the factor
// that rescales what was added up before.
template <class M>
INLINE float weights_of_row(const Problem& p, const Factors& factors, const Keys& here, int width, RowSums& sums,
                            float* x, uint32_t* pairs, bool floats) {
  Floats top = read<Floats>(x);
  for (int j = W; j < width; j += W) top = larger(read<Floats>(x + j), top);
  const float now = fmaxf(sums.m, exponent(largest(top), factors.power)), base = finite(now);
  const float alpha = sums.m == -kInf ? 0 : now == sums.m ? 1 : ::exp2f(sums.m - base);
  sums.m = now;
  const bool far = fabsf(base) > kFar;
  if (far)
    for (int j = 0; j < width; j += W) write(x + j, exponents(read<Floats>(x + j), factors.power) - base);
  const float power = far ? 1 : factors.power, from = far ? 0 : base;
  Floats sum_p{}, sum_z{};
  for (int j = 0; j < width; j += W) {
    Floats e = exp2<M::paired>(read<Floats>(x + j) * power - from);
    sum_p += e;
    if (p.value.zero)
      sum_z += read<Ints>(x + j) == (Ints)splat(-kInf) ? Floats{} : e * read<Floats>(here.v_zero + j);
    if (p.value.per != Per::nothing) e = e == 0.0f ? e : e * read<Floats>(here.v_scale + j);
    if (M::paired) write(reinterpret_cast<uint16_t*>(pairs) + j, nearest_bf16(e));
    if (!M::paired || floats) write(x + j, e);
  }
  sums.l = sums.l * alpha + sum_p;
  if (p.value.zero) sums.zero = sums.zero * alpha + sum_z;
  return alpha;
}

// How a split's keys and values are read: from codes that become numbers in registers, or from scratch, where they are
// decoded first unless they are stored as they are multiplied.
template <int R, class M, bool interleaved> struct Forms {
  static constexpr bool halves = M::bytes == 2;
  const Cache& value;
  int64_t D, V;  // with padding
  bool k_codes, v_codes;        // from codes
  bool k_nibbles, v_nibbles;    // of these, by `each_of_nibbles`
  bool k_unpacked, v_unpacked;  // by `decode_nibbles` into scratch
  bool k_tiled, v_tiled;        // into scratch
  int64_t k_bytes, v_bytes;     // of a row in scratch
  DecodeRow k_decode, v_decode;
  decltype(&kv_tile_dots<R, M, interleaved>) find_dots = kv_tile_dots<R, M, interleaved>;
  decltype(&kv_tile_values<R, M, interleaved>) find_values = kv_tile_values<R, M, interleaved>;

  Forms(const Problem& p, const Split& split)
      : value(p.values_in_keys ? p.key : p.value), D(round_up(p.D, M::numbers)), V(round_up(p.V, M::numbers)) {
    constexpr Format native = halves ? Format::bf16 : Format::f32;
    // NVFP4's numbers are multiplied by their scales in registers for few rows; for more, once, on the way to scratch.
    // That takes 0.83 to 1 of the time on two cores of a Zen 3.
    v_unpacked = unpacks(value, p.V) && (!p.values_in_keys || p.D % 64 == 0);
    k_unpacked = unpacks(p.key, p.D) && (!p.values_in_keys || v_unpacked);
    const float gained = fabsf(Factors::scale_of(p, split) * gain(M::paired, p.key.format));
    const bool keys_fit = from_codes<M>(p.key.format, p.D) && gained <= kMost;
    v_codes = !v_unpacked && from_codes<M>(value.format, p.V) && (!p.values_in_keys || keys_fit);
    k_codes = !k_unpacked && keys_fit && (!p.values_in_keys || v_codes);
    // On a Zen 3, decode by nibbles takes 0.7 to 0.85 of the time with one row and about 0.95 with two. With four,
    // whose products take longer than unpacking, it is no faster. The sums of 64 columns of one row fill the registers.
    k_nibbles = kNibbles && R <= 2 && k_codes && packed(p.key.format) && p.D % 64 == 0;
    v_nibbles = kNibbles && R == 1 && v_codes && packed(value.format) && p.V % 64 == 0;
    k_tiled = !k_codes && (p.key.format != native || p.D != D);
    v_tiled = !v_codes && !p.values_in_keys && (p.value.format != native || p.V != V);
    k_bytes = D * (k_unpacked ? 2 : M::bytes), v_bytes = V * (v_unpacked ? 2 : M::bytes);
    k_decode = k_unpacked ? decode_nibbles : decoder<halves>(p.key.format);
    v_decode = v_unpacked ? decode_nibbles : decoder<halves>(p.value.format);
    choose(p.key.format, value.format);
  }

  static bool unpacks(const Cache& cache, int64_t dim) {
    return kNibbles && M::numbers == W && R >= 4 && cache.format == Format::nvfp4 && dim % 64 == 0;
  }

  // The loops that read codes or unpacked rows.
  void choose([[maybe_unused]] Format key, [[maybe_unused]] Format of_value) {
#if defined(__AVX512VBMI__)
    if constexpr (M::paired) {
      auto dots_of = [](auto of) { return &kv_tile_dots<R, AsCodes<decltype(of)::value>, interleaved>; };
      auto values_of = [](auto of) { return &kv_tile_values<R, AsCodes<decltype(of)::value>, interleaved>; };
      if (k_codes) find_dots = by_format(key, dots_of);
      if (v_codes) find_values = by_format(of_value, values_of);
    }
#endif
    if constexpr (kDecodesInRegisters && M::numbers == W) {
      auto dots_of = [](auto of) { return &kv_tile_dots<R, AsNumbers<decltype(of)::value, 2>, interleaved>; };
      auto values_of = [](auto of) { return &kv_tile_values<R, AsNumbers<decltype(of)::value, 2>, interleaved>; };
      constexpr Of<Format::f16> f16{};
      if (k_codes) find_dots = key == f16.value ? dots_of(f16) : by_format(key, dots_of);
      if (v_codes) find_values = of_value == f16.value ? values_of(f16) : by_format(of_value, values_of);
      if constexpr (kNibbles && R <= 2) {
        auto nibble_dots_of = [](auto of) { return &kv_tile_dots<R, AsNibbles<decltype(of)::value>, interleaved>; };
        if (k_nibbles) find_dots = by_packed_format(key, nibble_dots_of);
      }
      if constexpr (kNibbles && R == 1) {
        auto nibble_values_of = [](auto of) { return &kv_tile_values<R, AsNibbles<decltype(of)::value>, interleaved>; };
        if (v_nibbles) find_values = by_packed_format(of_value, nibble_values_of);
      }
      if constexpr (kNibbles && R >= 4) {
        if (k_unpacked) find_dots = kv_tile_dots<R, AsHalves, interleaved>;
        if (v_unpacked) find_values = kv_tile_values<R, AsHalves, interleaved>;
      }
    }
  }
};

template <int R, class M, bool interleaved = false> void few_rows(const Problem& p, const Split& split, Queue& queue) {
  static thread_local Scratch scratch;
  const Forms<R, M, interleaved> forms(p, split);
  const Cache& value = forms.value;
  const int64_t D = forms.D, V = forms.V, k_bytes = forms.k_bytes, v_bytes = forms.v_bytes;
  const bool k_codes = forms.k_codes, v_codes = forms.v_codes;
  const int rows = int((split.t1 - split.t0) * p.group());
  // Two kv tiles stay in half of the second-level cache; decoded keys and values, and keys that are read again as
  // values, stay in the first-level cache. On two cores of a Xeon with AMX, where the first kv
  // tile of a split is waited for, windowed and short decode of four rows of 1 KiB take 0.92 to 0.97 of the time so.
  const bool read_again = forms.k_tiled || forms.v_tiled || p.values_in_keys;
  const int64_t near = read_again || kTiles ? 16384 : least(65536, second_level_cache() / 8);
  const int want = int(most(W, least(kKvTile, round_up(near / k_bytes, W))));
  const int64_t groups = M::paired && v_codes && value.format == Format::nvfp4 ? round_up(V / 16, W) : 0;
  Floats* q;
  float *o, *s, *line;
  uint32_t *pairs, *scaled;
  char *zeros, *k_tile, *v_tile;
  scratch.place(array(q, R * D / W), array(o, R * V), array(s, R * kKvTile), array(pairs, R * kKvTile / 2),
                array(scaled, R * kKvTile / 2 * groups), array(zeros, v_bytes), array(line, most(D, V)),
                array(k_tile, want * k_bytes), array(v_tile, want * v_bytes));
  if (!groups) scaled = nullptr;

  const Sequence sequence(p, split.b);
  const Factors factors(p, split, k_codes ? gain(M::paired, p.key.format) : 1);
  const float v_gain = v_codes ? gain(M::paired, value.format) : 1;
  const bool plain = factors.plain(p);
  float alpha[R];
  RowSums sums[R];
  Row row[R];
  memset(q, 0, R * D * 4);
  memset(o, 0, R * V * 4);
  memset(zeros, 0, v_bytes);
  KvTiles kv_tiles(p, split, queue, sequence, want, want, interleaved);
  const int64_t lines_per_row = kv_tiles.start().share(rows);
  for (int r = 0; r < R; ++r) {
    row[r] = row_of(p, split, sequence, r < rows ? r : rows - 1);
    if (r >= rows) continue;
    kv_tiles.start().prefetch_some(lines_per_row);
    sums[r].total = query_row(p, split, r, factors.sign, line);
    memset(line + p.D, 0, (D - p.D) * 4);
    if constexpr (M::paired) {
      uint16_t* to = reinterpret_cast<uint16_t*>(q) + r * D;
      for (int64_t d = 0; d < D; d += W) write(to + d, narrow((Words)read<Floats>(line + d) >> 16));  // exact
#if defined(__AVX512VBMI__)
      if (k_codes && packed(p.key.format)) in_order_of_codes(to, D);
#endif
    } else if constexpr (M::parts == 1) {
      if (forms.k_nibbles || forms.k_unpacked) in_order_of_nibbles(line, D, reinterpret_cast<float*>(q) + r * D);
      else memcpy(reinterpret_cast<float*>(q) + r * D, line, D * 4);
    } else {
      even_then_odd(line, D, reinterpret_cast<float*>(q) + r * D);
    }
  }

  kv_tiles.each([&](Keys& here, Keys& later) __attribute__((always_inline)) {
    if (!interleaved)
      for (int j = later.count; later.count && j <= want; ++j) later.k[j] = later.k[j - 1], later.v[j] = later.v[j - 1];
    const int count = here.count, width = int(round_up(count, W));
    if (forms.k_tiled) decode_cache(p.key, forms.k_decode, here, here.k, k_tile, D, k_bytes);
    if (forms.v_tiled) decode_cache(p.value, forms.v_decode, here, here.v, v_tile, V, v_bytes);
    if (p.values_in_keys) memcpy(here.v, here.k, count * sizeof(char*));
    for (int j = count; j < width; ++j) here.k[j] = here.k[count - 1], here.row[j] = here.row[count - 1];
    if (count % 2) here.v[count] = zeros;
    forms.find_dots(p.key, here, later, width, D, q, s);
    const bool in_tree = here.in_tree(kv_tiles.reader.first_in_tree);
    for (int r = 0; r < rows; ++r) {
      float* x = s + r * kKvTile;
      logits_of_row(p, sequence, factors, plain, row[r], sums[r].total, here, in_tree, width, x);
      alpha[r] = weights_of_row<M>(p, factors, here, width, sums[r], x, pairs + r * kKvTile / 2, scaled);
    }
    for (int r = rows; r < R; ++r) {  // padding rows stay finite
      alpha[r] = 0;
      memset(s + r * kKvTile, 0, kKvTile * 4);
      memset(pairs + r * kKvTile / 2, 0, kKvTile * 2);
    }
#if defined(__AVX512VBMI__)
    if (M::paired && scaled) scale_weights<R>(value, here, s, groups, scaled);
#endif
    forms.find_values(value, here, later, !p.values_in_keys, V, {s, pairs, scaled, groups, alpha}, o);
  });
  for (int r = 0; r < rows; ++r) {
    float* from = o + r * V;
    if (forms.halves) {
      in_columns<M>(from, V, v_codes && packed(value.format), line);
      from = line;
    } else if (forms.v_nibbles || forms.v_unpacked) {
      from_order_of_nibbles(from, V, line);
      from = line;
    }
    if (v_gain != 1) for (int64_t v = 0; v < p.V; ++v) from[v] *= v_gain;
    const float added = sum(sums[r].zero);
    if (p.value.zero) for (int64_t v = 0; v < p.V; ++v) from[v] += added;
    put_row(p, split, rows, r, from, sums[r].m, sum(sums[r].l));
  }
}

}  // namespace
}  // namespace jattn_native
