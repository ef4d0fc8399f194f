// Products in AVX2's registers. There is no instruction for pairs of bfloat16, so they are multiplied as float32:
// tokens are converted once for all outputs, weights in every pass over some tokens.
#pragma once
#include "product.h"

namespace jattn_native {
namespace {

constexpr int64_t kStep = 2 * W;      // numbers of a row at a time
constexpr int64_t kSummed = 256;      // numbers whose sums are added to each other, as in avx512.h
constexpr int64_t kBlock = 1 << 13;   // bytes of few tokens that stay in the first-level cache

struct TileState {  // there is no matrix unit
  explicit TileState(int64_t) {}
};

// Half of kStep numbers: of bfloat16 those in the low halves of words, or in the high ones.
template <bool pairs> INLINE Floats read_half(const char* row, int64_t number, int half) {
  if constexpr (pairs) {
    const Words both = read<Words>(row + number * 2);
    return half ? high_half(both) : low_half(both);
  } else {
    return read<Floats>(row + (number + half * W) * 4);
  }
}

// `count` numbers of a row in their order, a multiple of W.
template <bool pairs> INLINE void read_row(const char* row, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += W)
    if constexpr (pairs) write(to + i, (Floats)(__builtin_convertvector(read<Halves>(row + i * 2), Words) << 16));
    else write(to + i, read<Floats>(row + i * 4));
}

template <bool pairs> void fill_few(const Problem& p, float* to) {
  for (int64_t i = 0; i < p.numbers(); i += kStep)
    for (int64_t t = 0; t < p.slots(); ++t, to += kStep) {
      for (int half = 0; half < 2; ++half)
        write(to + half * W, t < p.T ? read_half<pairs>(p.x + t * p.row_bytes, i, half) : Floats{});
    }
}

template <bool pairs> void fill_many(const Problem& p, float* panel, int64_t first, int64_t count) {
  const Passes passes(p, count);
  alignas(32) float rows[W * W];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), n = passes.start(pass + 1) - v0;
    float* const begin = panel + v0 * W * p.numbers();
    for (int64_t v = 0; v < n; ++v)
      for (int64_t i = 0; i < p.numbers(); i += W) {
        for (int64_t r = 0; r < W; ++r) {
          const int64_t token = (v0 + v) * W + r;
          if (token < count)
            read_row<pairs>(p.x + (first + token) * p.row_bytes + i * (pairs ? 2 : 4), W, rows + r * W);
          else
            write(rows + r * W, Floats{});
        }
        for (int r = 0; r < W; r += 4)
          for (int c = 0; c < W; c += 4) transpose(rows + r * W + c, W, begin + ((i + c) * n + v) * W + r, n * W);
      }
  }
}

// Panels of few tokens are [steps][slots][16 numbers]; of more, for each pass [numbers][its vectors][8 tokens]:
// what is read together lies together. Tokens past the last are zeros.
void fill(const Problem& p, Panel& panel, int64_t first, int64_t count) {
  panel.reserve((p.few() ? p.slots() : Passes(p, count).vectors * W) * p.token_bytes());
  float* const to = reinterpret_cast<float*>(panel.at);
  if (p.few()) (p.pairs ? fill_few<true> : fill_few<false>)(p, to);
  else (p.pairs ? fill_many<true> : fill_many<false>)(p, to, first, count);
}

// Sums of `kRows` outputs and `kSlots` tokens over `lines` lines of each row, up to four tokens at a time: a register
// each, whose lanes are still to be added up.
template <bool pairs, int kSlots, int kRows>
INLINE void multiply_rows(const char* w, int64_t apart, int64_t lines, const float* panel, Prefetcher& prefetcher,
                          Floats (*made)[W]) {
  constexpr int64_t kNumbers = kLine / (pairs ? 2 : 4);  // of a line
  constexpr int N = kSlots < 4 ? kSlots : 4;
  UNROLL for (int first = 0; first < kSlots; first += N) {
    Floats c[kRows][N] = {};
    const float* x = panel + first * kStep;
    for (int64_t s = 0; s < lines; ++s) {
      if (first == 0) prefetcher.prefetch_some();
      UNROLL for (int64_t i = 0; i < kNumbers; i += kStep, x += kSlots * kStep) {
        UNROLL for (int half = 0; half < 2; ++half) {  // 16 registers: 12 sums, 3 of weights, one of a token
          asm volatile("" ::: "memory");               // or the compiler loads early, and spills sums
          Floats row[kRows];
          UNROLL for (int o = 0; o < kRows; ++o) row[o] = read_half<pairs>(w + o * apart, s * kNumbers + i, half);
          UNROLL for (int n = 0; n < N; ++n) {
            const Floats v = read<Floats>(x + n * kStep + half * W);
            UNROLL for (int o = 0; o < kRows; ++o) c[o][n] = multiply_add(c[o][n], row[o], v);
          }
        }
      }
    }
    for (int o = 0; o < kRows; ++o)
      for (int n = 0; n < N; ++n) made[o][first + n] = c[o][n];
  }
}

// Sums [32 outputs][8 tokens] of few tokens: of kLines lines of each row, then of the next.
template <bool pairs, int kSlots>
INLINE void sums_of_few(const Problem& p, const char* w, const char* panel, float* to, Prefetcher& prefetcher) {
  constexpr int kRows = 3, kLast = kOutputs % kRows;
  constexpr int64_t kNumbers = kLine / (pairs ? 2 : 4), kLines = kBlock / (kSlots * 4 * kNumbers);
  Floats made[kRows][W] = {};
  auto add = [&](int output, int rows, bool begins) __attribute__((always_inline)) {
    for (int o = 0; o < rows; ++o) {
      float* found = to + (output + o) * W;
      write(found, begins ? sums(made[o]) : read<Floats>(found) + sums(made[o]));
    }
  };
  for (int64_t line = 0; line < p.tiles(); line += kLines) {
    const int64_t lines = std::min(kLines, p.tiles() - line);
    const char* row = w + line * kLine;
    const float* x = reinterpret_cast<const float*>(panel) + line * kNumbers * kSlots;
    int output = 0;
    for (; output + kRows <= kOutputs; output += kRows, row += kRows * p.row_bytes) {
      multiply_rows<pairs, kSlots, kRows>(row, p.row_bytes, lines, x, prefetcher, made);
      add(output, kRows, line == 0);
    }
    multiply_rows<pairs, kSlots, kLast>(row, p.row_bytes, lines, x, prefetcher, made);
    add(output, kLast, line == 0);
  }
}

// Sums [N vectors of tokens][32 outputs][8 tokens].
template <bool pairs, int N>
INLINE void sums_of_many(const Problem& p, const char* weights, const char* panel, float* found,
                         Prefetcher& prefetcher) {
  constexpr int kRows = N == 1 ? 8 : 4;
  alignas(32) float made[kRows][kSummed];
  for (int64_t begin = 0; begin < p.numbers(); begin += kSummed) {
    const int64_t count = std::min(p.numbers() - begin, kSummed);
    for (int64_t first = 0; first < kOutputs; first += kRows) {
      const char* from = weights + first * p.row_bytes + begin * (pairs ? 2 : 4);
      const float* w[kRows];
      UNROLL for (int o = 0; o < kRows; ++o) {
        w[o] = reinterpret_cast<const float*>(from + o * p.row_bytes);
        if constexpr (pairs) {
          read_row<true>(from + o * p.row_bytes, count, made[o]);
          w[o] = made[o];
        }
      }
      const float* x = reinterpret_cast<const float*>(panel) + begin * N * W;
      Floats c[kRows][N] = {};
      for (int64_t i = 0; i < count; i += kStep) {
        prefetcher.prefetch_some();
        for (int64_t k = i; k < i + kStep; ++k, x += N * W) {
          Floats v[N];
          UNROLL for (int n = 0; n < N; ++n) v[n] = read<Floats>(x + n * W);
          UNROLL for (int o = 0; o < kRows; ++o) {
            const Floats one = splat(w[o][k]);
            UNROLL for (int n = 0; n < N; ++n) c[o][n] = multiply_add(c[o][n], one, v[n]);
          }
        }
      }
      UNROLL for (int o = 0; o < kRows; ++o)
        UNROLL for (int n = 0; n < N; ++n) {
          float* to = found + (n * kOutputs + first + o) * W;
          write(to, begin ? read<Floats>(to) + c[o][n] : c[o][n]);
        }
    }
  }
}

// One token's sums of 32 outputs from `output` on, to [T, O].
INLINE void store_row(const Problem& p, const float* row, int64_t token, int64_t output) {
  const int64_t place = token * p.O + output;
  if (!p.rounds) {
    memcpy(static_cast<float*>(p.y) + place, row, kOutputs * sizeof(float));
    return;
  }
  for (int64_t o = 0; o < kOutputs; o += W) {  // to nearest, ties to even
    const Floats x = read<Floats>(row + o);
    const Words u = (Words)x, near = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    write(static_cast<uint16_t*>(p.y) + place + o, __builtin_convertvector(x == x ? near : u >> 16 | 64u, Halves));
  }
}

// Stores sums [32 outputs][8 tokens] of the first `count` tokens.
INLINE void store(const Problem& p, const float* sums, int64_t output, int64_t token, int64_t count) {
  if (p.transposed) {
    float* y = static_cast<float*>(p.y) + output * p.rows + token;
    for (int o = 0; o < kOutputs; ++o) memcpy(y + o * p.rows, sums + o * W, count * sizeof(float));
    return;
  }
  alignas(32) float rows[W * kOutputs];
  for (int t = 0; t < W; t += 4)
    for (int o = 0; o < kOutputs; o += 4) transpose(sums + o * W + t, W, rows + t * kOutputs + o, kOutputs);
  for (int64_t t = 0; t < count; ++t) store_row(p, rows + t * kOutputs, token + t, output);
}

// Multiplies the 32 outputs from `output` on with few tokens. `prefetcher` has the next work item's weights.
template <bool pairs>
void multiply_few(const Problem& p, const Panel& panel, int64_t output, Prefetcher& prefetcher) {
  const char* w = p.w + output * p.row_bytes;
  prefetcher.lines = 3;  // with each line of three outputs
  alignas(32) float sums[kOutputs * W] = {};
  switch (p.slots()) {
    case 1: sums_of_few<pairs, 1>(p, w, panel.at, sums, prefetcher); break;
    case 2: sums_of_few<pairs, 2>(p, w, panel.at, sums, prefetcher); break;
    case 4: sums_of_few<pairs, 4>(p, w, panel.at, sums, prefetcher); break;
    default: sums_of_few<pairs, kFew>(p, w, panel.at, sums, prefetcher);
  }
  store(p, sums, output, 0, p.T);
}

template <bool pairs>
void multiply_many(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count,
                   Prefetcher& prefetcher) {
  const Passes passes(p, count);
  const int64_t steps = passes.count * (p.numbers() / kStep) * (kOutputs / (passes.vectors == 1 ? 8 : 4));
  prefetcher.lines = ((prefetcher.end - prefetcher.at) / kLine + steps - 1) / steps;
  const char* w = p.w + output * p.row_bytes;
  alignas(32) float sums[3 * kOutputs * W];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), v1 = passes.start(pass + 1);
    const char* tokens = panel.at + v0 * W * p.token_bytes();
    switch (v1 - v0) {
      case 1: sums_of_many<pairs, 1>(p, w, tokens, sums, prefetcher); break;
      case 2: sums_of_many<pairs, 2>(p, w, tokens, sums, prefetcher); break;
      default: sums_of_many<pairs, 3>(p, w, tokens, sums, prefetcher);
    }
    for (int64_t v = v0; v < v1; ++v) {
      const int64_t token = v * W, meant = std::min(kWidth, count - token);
      store(p, sums + (v - v0) * kOutputs * W, output, first + token, meant);
    }
  }
}

// Multiplies the 32 outputs from `output` on with a group of tokens. `prefetcher` has the next work item's weights.
void multiply(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count,
              Prefetcher prefetcher) {
  if (p.few()) (p.pairs ? multiply_few<true> : multiply_few<false>)(p, panel, output, prefetcher);
  else (p.pairs ? multiply_many<true> : multiply_many<false>)(p, panel, output, first, count, prefetcher);
}

}  // namespace
}  // namespace jattn_native
