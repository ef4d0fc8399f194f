// Products in AVX2's registers. There is no instruction for pairs of bfloat16: they are multiplied as
// float32, the tokens once for all outputs, weights for every pass over some tokens.
#pragma once
#include "product.h"

namespace jattn_native {
namespace {

constexpr int64_t kStep = 2 * W;      // numbers of a row at a time
constexpr int64_t kSummed = 256;      // numbers whose sums are added to each other, as in avx512.h

struct TileState {  // there is no matrix unit
  explicit TileState(int64_t) {}
};

// kStep numbers: of bfloat16 those in the low halves of words and those in the high ones.
template <bool pairs> INLINE void read_step(const char* row, int64_t number, Floats* low, Floats* high) {
  if constexpr (pairs) {
    const Words both = read<Words>(row + number * 2);
    *low = low_half(both), *high = high_half(both);
  } else {
    *low = read<Floats>(row + number * 4), *high = read<Floats>(row + (number + W) * 4);
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
      Floats low{}, high{};
      if (t < p.T) read_step<pairs>(p.x + t * p.row_bytes, i, &low, &high);
      write(to, low), write(to + W, high);
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
          if (token < count) read_row<pairs>(p.x + (first + token) * p.row_bytes + i * (pairs ? 2 : 4), W, rows + r * W);
          else write(rows + r * W, Floats{});
        }
        for (int r = 0; r < W; r += 4)
          for (int c = 0; c < W; c += 4) turn(rows + r * W + c, W, begin + ((i + c) * n + v) * W + r, n * W);
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

// Sums [N tokens][32 outputs] of few tokens. Their weights are one run of memory: with each line of them, one
// is prefetched `kSoon` lines later, past the end one of `following`, the next work item's.
template <bool pairs, int N>
INLINE void sums_of_few(const Problem& p, const char* w, const char* panel, float* sums, const char* following) {
  constexpr int64_t kNumbers = kLine / (pairs ? 2 : 4);  // of a line
  constexpr int kRows = N > 4 ? 1 : 2;                   // 16 registers have no room for more
  const int64_t lines = p.tiles(), apart = p.row_bytes;
  const char* const end = w + kOutputs * apart;
  for (int64_t output = 0; output < kOutputs; output += kRows, w += kRows * apart) {
    const char* soon = w + kSoon * kLine;
    const int64_t here = std::clamp<int64_t>((end - soon) / (kRows * kLine), 0, lines);
    Floats c[kRows][N] = {};
    const float* x = reinterpret_cast<const float*>(panel);
    auto add = [&](int64_t begin, int64_t end, const char* soon) __attribute__((always_inline)) {
      for (int64_t s = begin; s < end; ++s) {
        UNROLL for (int o = 0; o < kRows; ++o) _mm_prefetch(soon + (kRows * s + o) * kLine, _MM_HINT_T1);
        UNROLL for (int64_t i = 0; i < kNumbers; i += kStep, x += N * kStep) {
          Floats low[kRows], high[kRows];
          UNROLL for (int o = 0; o < kRows; ++o) read_step<pairs>(w + o * apart, s * kNumbers + i, low + o, high + o);
          UNROLL for (int n = 0; n < N; ++n) {
            const Floats first = read<Floats>(x + n * kStep), second = read<Floats>(x + n * kStep + W);
            UNROLL for (int o = 0; o < kRows; ++o)
              c[o][n] = multiply_add(multiply_add(c[o][n], low[o], first), high[o], second);
          }
        }
      }
    };
    add(0, here, soon);
    add(here, lines, following + (soon - end));
    for (int n = 0; n < N; ++n)
      for (int o = 0; o < kRows; ++o) sums[n * kOutputs + output + o] = sum(c[o][n]);
  }
}

// Sums [N vectors of tokens][32 outputs][8 tokens].
template <bool pairs, int N>
INLINE void sums_of_many(const Problem& p, const char* weights, const char* panel, float* sums, Ahead& ahead) {
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
        ahead.ask();
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
          float* to = sums + (n * kOutputs + first + o) * W;
          write(to, begin ? read<Floats>(to) + c[o][n] : c[o][n]);
        }
    }
  }
}

// One token's sums of 32 outputs from `output` on, to [T, O].
INLINE void store_row(const Problem& p, const float* sums, int64_t token, int64_t output) {
  const int64_t place = token * p.O + output;
  if (!p.rounds) {
    memcpy(static_cast<float*>(p.y) + place, sums, kOutputs * sizeof(float));
    return;
  }
  for (int64_t o = 0; o < kOutputs; o += W) {  // to nearest, ties to even
    const Floats x = read<Floats>(sums + o);
    const Words u = (Words)x, near = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    write(static_cast<uint16_t*>(p.y) + place + o, __builtin_convertvector(x == x ? near : u >> 16 | 64u, Halves));
  }
}

// Stores sums [32 outputs][8 tokens], of which `count` tokens are meant.
INLINE void store(const Problem& p, const float* sums, int64_t output, int64_t token, int64_t count) {
  if (p.turned) {
    float* y = static_cast<float*>(p.y) + output * p.T + token;
    for (int o = 0; o < kOutputs; ++o) memcpy(y + o * p.T, sums + o * W, count * sizeof(float));
    return;
  }
  alignas(32) float rows[W * kOutputs];
  for (int t = 0; t < W; t += 4)
    for (int o = 0; o < kOutputs; o += 4) turn(sums + o * W + t, W, rows + t * kOutputs + o, kOutputs);
  for (int64_t t = 0; t < count; ++t) store_row(p, rows + t * kOutputs, token + t, output);
}

// Multiplies the 32 outputs from `output` on with few tokens. `following` are the next item's weights.
template <bool pairs>
void multiply_few(const Problem& p, const Panel& panel, int64_t output, const char* following) {
  const char* w = p.w + output * p.row_bytes;
  alignas(32) float sums[kFew * kOutputs];
  switch (p.slots()) {
    case 1: sums_of_few<pairs, 1>(p, w, panel.at, sums, following); break;
    case 2: sums_of_few<pairs, 2>(p, w, panel.at, sums, following); break;
    case 4: sums_of_few<pairs, 4>(p, w, panel.at, sums, following); break;
    default: sums_of_few<pairs, kFew>(p, w, panel.at, sums, following);
  }
  for (int64_t t = 0; t < p.T; ++t) {
    if (!p.turned) store_row(p, sums + t * kOutputs, t, output);
    else
      for (int64_t o = 0; o < kOutputs; ++o) static_cast<float*>(p.y)[(output + o) * p.T + t] = sums[t * kOutputs + o];
  }
}

template <bool pairs>
void multiply_many(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count, Ahead& ahead) {
  const Passes passes(p, count);
  const int64_t steps = passes.count * (p.numbers() / kStep) * (kOutputs / (passes.vectors == 1 ? 8 : 4));
  ahead.lines = ((ahead.end - ahead.at) / kLine + steps - 1) / steps;
  const char* w = p.w + output * p.row_bytes;
  alignas(32) float sums[3 * kOutputs * W];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), v1 = passes.start(pass + 1);
    const char* tokens = panel.at + v0 * W * p.token_bytes();
    switch (v1 - v0) {
      case 1: sums_of_many<pairs, 1>(p, w, tokens, sums, ahead); break;
      case 2: sums_of_many<pairs, 2>(p, w, tokens, sums, ahead); break;
      default: sums_of_many<pairs, 3>(p, w, tokens, sums, ahead);
    }
    for (int64_t v = v0; v < v1; ++v) {
      const int64_t token = v * W, meant = std::min(kWidth, count - token);
      store(p, sums + (v - v0) * kOutputs * W, output, first + token, meant);
    }
  }
}

// Multiplies the 32 outputs from `output` on with a group of tokens. `ahead` are the next item's weights.
void multiply(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count, Ahead ahead) {
  if (p.few()) (p.pairs ? multiply_few<true> : multiply_few<false>)(p, panel, output, ahead.at);
  else (p.pairs ? multiply_many<true> : multiply_many<false>)(p, panel, output, first, count, ahead);
}

}  // namespace
}  // namespace jattn_native
