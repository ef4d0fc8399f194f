// Many rows: prefill, and decode with large groups. The rows are in the lanes, so that a number of a
// key or value is broadcast to them, and sums stay in registers.
//
//   for each chunk of keys, the next one's memory asked for on the way:
//     V as pairs of keys (bfloat16), or where it lies (float32)
//     for each panel of up to three vectors of rows:
//       S = K q, 8 keys at a time      then scales, options, the mask
//       m' = max(m, S), a = 2^(m - m'), P = 2^(S - m'), l = a l + sum P
//       O = a O + V^T P, 8 columns at a time
//   write O / l, or the state (O, m, l) where the keys are split over pieces
//
// Scratch belongs to the thread: q and O of all panels, one panel's S, which P replaces, and V's
// pairs. Tiles of rows are as many as the second-level cache holds (schedule.cc).
#pragma once
#include "decode.h"
#include "matrix.h"

namespace jattn_native {
namespace {

constexpr int kPanel = kRegisters == 32 ? 3 : 2;  // vectors of rows at most
// Keys or columns at a time, so that their sums fill the registers.
constexpr int at_once(int vectors) {
  return kRegisters == 32 ? (vectors == 1 ? 16 : 8) : (vectors == 1 ? 8 : 4);
}

// What the rows of a panel are, and have so far. Lanes past the piece's rows repeat its last.
template <class V> struct Panel {
  int size;       // vectors
  V* q;           // [D, or pairs][size]
  Floats* o;      // [V][size]
  Floats m[kPanel], l[kPanel], zero[kPanel], total[kPanel], slope[kPanel];
  Ints lo[kPanel], hi[kPanel], position[kPanel], table[kPanel];
  Row* rows;      // [size * W]
  int64_t last_lo, first_hi, first_lo, last_hi;  // extremes of the rows' ranges
};

template <class E> struct Lanes;
template <> struct Lanes<float> { using type = Floats; };
template <> struct Lanes<uint32_t> { using type = Words; };
template <class E> using Vector = typename Lanes<E>::type;

// Rounded to bfloat16, to nearest and ties to even, NaN and signs included.
INLINE Floats rounded(Floats x) {
  const Words u = (Words)x;
  const Words near = (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u;
  return (Floats)(x == x ? near : u | 0x00400000u);
}

// What a chunk is for all panels.
template <class E> struct Tile {
  const Keys* keys;
  const E* const* k;  // rows of keys
  const E* const* v;  // rows of values, or of pairs of them
  bool own;
};

template <int N, class E, class V>
void step(const Problem& p, const Sequence& sequence, const Factors& factors, Panel<V>& panel, const Tile<E>& tile,
          int count, Floats* s, int64_t length, Ahead& ahead, int64_t lines) {
  constexpr bool paired = sizeof(E) == 4 && !__is_same(E, float);
  constexpr int MR = at_once(N);
  const Keys& keys = *tile.keys;
  const V* q = panel.q;
  constexpr bool tiles = kTiles && paired;
  if constexpr (tiles) {
    ahead.touch(lines * ((count + MR - 1) / MR));
    tile_dots<N>(reinterpret_cast<const char* const*>(tile.k), q, length, count, s);
  }
  for (int j = 0; j < count && !tiles; j += MR) {
    ahead.touch(lines);
    Floats sum[MR][N] = {};
    const E* const* k = tile.k + j;
    for (int64_t d = 0; d < length; ++d) {
      V y[N];
      UNROLL for (int n = 0; n < N; ++n) y[n] = q[d * N + n];
      UNROLL for (int i = 0; i < MR; ++i) {
        const V x = k[i][d] - V{};
        UNROLL for (int n = 0; n < N; ++n) sum[i][n] = multiply_add(sum[i][n], x, y[n]);
      }
    }
    UNROLL for (int i = 0; i < MR; ++i)
      UNROLL for (int n = 0; n < N; ++n) s[(j + i) * N + n] = sum[i][n];
  }
  if (p.key.per != Per::nothing)
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n) s[j * N + n] *= keys.k_scale[j];
  if (p.key.zero)
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n) s[j * N + n] += keys.k_zero[j] * panel.total[n];
  if (tile.own) {
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n)
        for (int x = 0; x < W; ++x)
          s[j * N + n][x] = own_logit(sequence, panel.rows[n * W + x], factors.logits, s[j * N + n][x], keys.first + j);
  } else if (!factors.plain(p)) {
    for (int j = 0; j < count; ++j)
      for (int n = 0; n < N; ++n)
        s[j * N + n] = factors.logits(s[j * N + n], int32_t(keys.first + j) - panel.position[n], panel.slope[n], panel.table[n]);
  }
  const bool masked = !tile.own && (keys.first < panel.last_lo || keys.first + count > panel.first_hi);
  Floats alpha[N], base[N];
  for (int n = 0; n < N; ++n) {
    Floats top = splat(-kInf), other = top;
    if (masked) {
      for (int j = 0; j < count; ++j) {
        const Ints at = splat(int32_t(keys.first + j));
        const Floats x = ((at >= panel.lo[n]) & (at < panel.hi[n])) ? s[j * N + n] : splat(-kInf);
        s[j * N + n] = x;
        top = larger(x, top);
      }
    } else {
      int j = 0;
      for (; j + 2 <= count; j += 2) top = larger(s[j * N + n], top), other = larger(s[(j + 1) * N + n], other);
      if (j < count) top = larger(s[j * N + n], top);
      top = larger(other, top);
    }
    const Floats now = larger(top * factors.power, panel.m[n]);
    base[n] = finite(now);
    alpha[n] = panel.m[n] == -kInf ? Floats{} : exp2<false>(panel.m[n] - base[n]);
    panel.m[n] = now;
  }
  V* weights = reinterpret_cast<V*>(s);  // in the place of their logits
  const bool scaled = p.value.per != Per::nothing || p.value.zero;
  for (int n = 0; n < N; ++n) {
    Floats sum{}, more{}, sum_z{};
    auto weight = [&](int j) {
      Floats x = s[j * N + n] * factors.power - base[n];
      const Floats e = exp2<paired>(x);
      if (!scaled) return e;
      if (p.value.zero) sum_z += e == 0.0f ? e : e * keys.v_zero[j];
      return p.value.per == Per::nothing ? e : e == 0.0f ? e : e * keys.v_scale[j];
    };
    if (scaled) {  // the denominator has no scales in it
      for (int j = 0; j < count; ++j) sum += exp2<paired>(s[j * N + n] * factors.power - base[n]);
      sum_z = Floats{};
    }
    if constexpr (paired) {
      int j = 0;
      for (; j + 2 <= count; j += 2) {
        const Floats x = weight(j), y = weight(j + 1);
        if (!scaled) sum += x, more += y;
        weights[j / 2 * N + n] = scaled ? exact_pairs(rounded(x), rounded(y)) : rounded_pairs(x, y);
      }
      if (j < count) {
        const Floats x = weight(j);
        if (!scaled) sum += x;
        weights[j / 2 * N + n] = scaled ? exact_pairs(rounded(x), Floats{}) : rounded_pairs(x, Floats{});
      }
    } else {
      for (int j = 0; j < count; ++j) {
        const Floats x = weight(j);
        if (!scaled) sum += x;
        weights[j * N + n] = (V)x;
      }
    }
    panel.l[n] = panel.l[n] * alpha[n] + (sum + more);
    panel.zero[n] = panel.zero[n] * alpha[n] + sum_z;
  }
  const int rows = paired ? (count + 1) / 2 : count;
  if constexpr (tiles) {
    bool same = true;
    for (int n = 0; n < N; ++n) same &= all_ones(alpha[n]);
    for (int64_t i = 0; !same && i < p.V; ++i)
      for (int n = 0; n < N; ++n) panel.o[i * N + n] *= alpha[n];
    for (int64_t j = rows; j < round_up(rows, 16); ++j)
      for (int n = 0; n < N; ++n) weights[j * N + n] = V{};
    tile_weigh<N>(tile.v[0], weights, rows, p.V, panel.o);
    return;
  }
  for (int64_t c = 0; c < p.V; c += MR) {
    Floats sum[MR][N];
    Floats* o = panel.o + c * N;
    UNROLL for (int i = 0; i < MR; ++i)
      UNROLL for (int n = 0; n < N; ++n) sum[i][n] = o[i * N + n] * alpha[n];
    for (int j = 0; j < rows; ++j) {
      const E* v = tile.v[j] + c;
      V y[N];
      UNROLL for (int n = 0; n < N; ++n) y[n] = weights[j * N + n];
      UNROLL for (int i = 0; i < MR; ++i) {
        const V x = v[i] - V{};
        UNROLL for (int n = 0; n < N; ++n) sum[i][n] = multiply_add(sum[i][n], x, y[n]);
      }
    }
    UNROLL for (int i = 0; i < MR; ++i)
      UNROLL for (int n = 0; n < N; ++n) o[i * N + n] = sum[i][n];
  }
}

// Pairs of two keys' values, column by column: [V] from rows of bfloat16.
INLINE void pair_rows(const char* a, const char* b, int64_t columns, uint32_t* to) {
  for (int64_t c = 0; c < columns; c += W) {
    const Words first = widen(read<Halves>(a + c * 2)), second = widen(read<Halves>(b + c * 2));
    write(to + c, first | second << 16);
  }
}

// E: float, or uint32_t for pairs of bfloat16.
template <class E> void many_rows(const Problem& p, const Piece& w) {
  static thread_local Scratch scratch;
  constexpr bool paired = !__is_same(E, float);
  constexpr Format native = paired ? Format::bf16 : Format::f32;
  using V = Vector<E>;
  constexpr int numbers = paired ? 2 : 1;  // of an E of q and of keys
  const int64_t D = round_up(p.D, 2 * W), VC = round_up(p.V, 2 * W), length = (kTiles && paired ? D : p.D + numbers - 1) / numbers;
  const int64_t number_bytes = paired ? 2 : 4;
  constexpr bool tiles = kTiles && paired;
  const bool k_tiled = p.key.format != native || p.D % (tiles ? 2 * W : numbers);
  const bool v_tiled = !(p.values_in_keys && k_tiled) && (p.value.format != native || p.V != VC);
  const DecodeRow k_decode = decoder<paired>(p.key.format), v_decode = decoder<paired>(p.value.format);
  const int rows = int((w.t1 - w.t0) * p.group()), vectors = (rows + W - 1) / W;
  const int panels = (vectors + kPanel - 1) / kPanel + 1;
  const int64_t k_tile_bytes = k_tiled || tiles ? D * number_bytes : 0, v_tile_bytes = v_tiled ? VC * number_bytes : 0;
  scratch.reserve(size_t(vectors) * W * 4 * (length + VC) + panels * sizeof(Panel<V>) + vectors * W * sizeof(Row) +
                  size_t(kMostKeys + 16) * W * kPanel * 4 + kMostKeys * (k_tile_bytes + v_tile_bytes) +
                  (paired ? kMostKeys / 2 * VC * 4 : 0) + size_t(W) * most(D, VC) * 4 + VC * 4 + kMostKeys * 64 + 16384);
  V* q = scratch.take<V>(vectors * length);
  Floats* o = scratch.take<Floats>(vectors * VC);
  Panel<V>* panel = scratch.take<Panel<V>>(panels);
  Row* row = scratch.take<Row>(vectors * W);
  Floats* s = scratch.take<Floats>((kMostKeys + 16) * kPanel);
  char* k_tile = scratch.take<char>(kMostKeys * k_tile_bytes);
  char* v_tile = scratch.take<char>(kMostKeys * v_tile_bytes);
  uint32_t* pairs = scratch.take<uint32_t>(paired ? kMostKeys / 2 * VC : 0);
  char* zeros = scratch.take<char>(VC * 4);
  float* lines = scratch.take<float>(W * most(D, VC));  // [W][D]
  const E* k_rows[kMostKeys + 16];
  const E* v_rows[kMostKeys];

  const Sequence sequence(p, w.b);
  const Factors factors(p, w);
  memset(o, 0, vectors * VC * sizeof(Floats));
  memset(zeros, 0, VC * 4);
  int count_panels = 0;
  for (int done = 0; done < vectors; ++count_panels) {
    const int left = vectors - done;
    Panel<V>& x = panel[count_panels];
    x.size = left < kPanel ? left : kPanel == 3 && left == 4 ? 2 : kPanel;
    x.q = q + done * length;
    x.o = o + done * VC;
    x.rows = row + done * W;
    x.first_lo = x.first_hi = INT64_MAX;
    x.last_lo = x.last_hi = 0;
    for (int n = 0; n < x.size; ++n) {
      x.m[n] = splat(-kInf);
      x.l[n] = x.zero[n] = x.total[n] = Floats{};
      for (int i = 0; i < W; ++i) {
        const int r = (done + n) * W + i;
        const Row here = x.rows[n * W + i] = row_of(p, w, sequence, r < rows ? r : rows - 1);
        x.lo[n][i] = int32_t(here.range.lo), x.hi[n][i] = int32_t(here.range.hi);
        x.position[n][i] = int32_t(here.position), x.slope[n][i] = here.slope, x.table[n][i] = here.table;
        x.first_lo = least(x.first_lo, here.range.lo), x.last_lo = most(x.last_lo, here.range.lo);
        x.first_hi = least(x.first_hi, here.range.hi), x.last_hi = most(x.last_hi, here.range.hi);
        float* line = lines + i * D;
        memset(line, 0, D * 4);
        x.total[n][i] = r < rows ? query_row(p, w, r, factors.sign, line) : 0.0f;
      }
      // Lanes innermost: writing whole vectors is several times faster than a column at a time.
      V* to = x.q + n;
      for (int64_t d = 0; d < length; ++d, to += x.size) {
        V numbers_of_rows;
        for (int i = 0; i < W; ++i) {
          if constexpr (paired) {  // exact: the queries are bfloat16
            numbers_of_rows[i] = to_bf16(lines[i * D + 2 * d]) | uint32_t(to_bf16(lines[i * D + 2 * d + 1])) << 16;
          } else {
            numbers_of_rows[i] = lines[i * D + d];
          }
        }
        *to = numbers_of_rows;
      }
    }
    done += x.size;
  }

  [[maybe_unused]] const TileState<tiles> state;
  Reader reader(p, w, sequence, true);
  Keys chunks[2];
  reader.next(kMostKeys, &chunks[0]);
  for (int turn = 0; chunks[turn].count; turn ^= 1) {
    Keys& here = chunks[turn];
    Ahead& ahead = chunks[turn ^ 1].ahead;
    reader.next(kMostKeys, &chunks[turn ^ 1]);
    const int count = here.count;
    if (k_tiled) decode_side(p.key, k_decode, here, here.k, k_tile, D, k_tile_bytes);
    if (v_tiled) decode_side(p.value, v_decode, here, here.v, v_tile, VC, v_tile_bytes);
    else if (p.values_in_keys) memcpy(here.v, here.k, count * sizeof(char*));
    for (int j = 0; j < count + 16; ++j) k_rows[j] = reinterpret_cast<const E*>(here.k[j < count ? j : count - 1]);
    if constexpr (tiles) {
      for (int j = 0; j < count; j += 16)
        if (!evenly_apart(here.k, j, count))
          copy_rows(here.k, j, count, D * 2, k_tile + j * k_tile_bytes, reinterpret_cast<const char**>(k_rows));
      turn_pairs(here.v, count, VC, zeros, pairs);
      v_rows[0] = pairs;
    } else if constexpr (paired) {
      for (int j = 0; j < count; j += 2) {
        pair_rows(here.v[j], j + 1 < count ? here.v[j + 1] : zeros, VC, pairs + j / 2 * VC);
        v_rows[j / 2] = pairs + j / 2 * VC;
      }
    } else {
      for (int j = 0; j < count; ++j) v_rows[j] = reinterpret_cast<const E*>(here.v[j]);
    }
    const Tile<E> tile{&here, k_rows, v_rows, here.own(reader.first_own)};
    // Each panel asks for its share of the next chunk.
    const int64_t lines_ahead = (p.key.row_bytes + p.value.row_bytes) * at_once(kPanel) / 64 / count_panels + 1;
    for (int i = 0; i < count_panels; ++i) {
      Panel<V>& x = panel[i];
      // A panel's keys end with its last row's; chunks wholly outside are skipped.
      const int upto = tile.own ? count : int(least(count, x.last_hi - here.first));
      if (!tile.own && (upto <= 0 || here.first + count <= x.first_lo)) continue;
      if (x.size == 1) step<1>(p, sequence, factors, x, tile, upto, s, length, ahead, lines_ahead);
      else if (x.size == 2) step<2>(p, sequence, factors, x, tile, upto, s, length, ahead, lines_ahead);
      else if constexpr (kPanel == 3) step<3>(p, sequence, factors, x, tile, upto, s, length, ahead, lines_ahead);
    }
  }
  for (int i = 0; i < count_panels; ++i) {
    const Panel<V>& x = panel[i];
    for (int n = 0; n < x.size; ++n) {
      const int first = int(x.rows - row) + n * W;
      for (int64_t c = 0; c < p.V; ++c) {
        const Floats columns = x.o[c * x.size + n] + x.zero[n];
        for (int r = 0; r < W; ++r) lines[r * VC + c] = columns[r];
      }
      for (int r = 0; r < W && first + r < rows; ++r) put_row(p, w, rows, first + r, lines + r * VC, x.m[n][r], x.l[n][r]);
    }
  }
}

}  // namespace
}  // namespace jattn_native
