// Products in AVX-512's registers and by the matrix unit.
#pragma once
#include "matrix.h"
#include "product.h"

namespace jattn_native {
namespace {

// How many lines early the weights of few tokens are prefetched, into the second-level cache: next to the tokens they
// would not stay in the first (4 tokens of 8 layers of Qwen3-0.6B in bfloat16, on a Zen 4: 13.6 ms there, 9.5 here).
constexpr int64_t kSoon = 128;
// Few tokens are multiplied by so many lines at a time if all of their lines take more than the first-level cache. Their
// sums do not depend on that, nor on how many tokens there are.
constexpr int64_t kFewLines = 32;

void fill_few(const Problem& p, Panel& panel) {
  const int64_t slots = p.slots();
  panel.reserve(slots * p.row_bytes);
  for (int64_t s = 0; s < p.tiles(); ++s)
    for (int64_t t = 0; t < slots; ++t) {
      const __m512i some = t < p.T ? _mm512_loadu_si512(p.x + t * p.row_bytes + s * kLine) : _mm512_setzero_si512();
      _mm512_store_si512(panel.at + (s * slots + t) * kLine, some);
    }
}

// Panels of few tokens are [tiles][slots][64 bytes]; of more, for each pass [tiles][16 words][its vectors]
// [16 tokens], and for the matrix unit [its vectors][tiles][16 words][16 tokens]: what is read together lies
// together. Tokens past the last are zeros.
void fill(const Problem& p, Panel& panel, int64_t first, int64_t count) {
  if (p.few()) return fill_few(p, panel);
  const Passes passes(p, count);
  panel.reserve(passes.vectors * kWidth * p.row_bytes);
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), n = passes.start(pass + 1) - v0;
    char* const begin = panel.at + v0 * kWidth * p.row_bytes;
    for (int64_t v = 0; v < n; ++v)
      for (int64_t s = 0; s < p.tiles(); ++s) {
        __m512i rows[16];
        for (int64_t r = 0; r < kWidth; ++r) {
          const int64_t token = (v0 + v) * kWidth + r;
          rows[r] = token < count ? _mm512_loadu_si512(p.x + (first + token) * p.row_bytes + s * kLine)
                                  : _mm512_setzero_si512();
        }
        transpose(rows);
        const int64_t apart = p.tiled ? 1 : n, tile = p.tiled ? (v * p.tiles() + s) * kWidth : s * kWidth * n + v;
        for (int64_t r = 0; r < kWidth; ++r) _mm512_store_si512(begin + (tile + r * apart) * kLine, rows[r]);
      }
  }
}

// sum + a b, word by word: of float32 numbers, or of both numbers of a pair.
template <bool pairs>
INLINE __m512 multiply_add(__m512 sum, __m512 a, __m512 b) {
  if constexpr (pairs) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  else return _mm512_fmadd_ps(a, b, sum);
}

// Sums [N tokens][32 outputs] of few tokens. Sums over `kFewLines` lines of a row are added to each other. Where the
// tokens' lines do not fit the first-level cache, all outputs take `kFewLines` of them before the next ones. With two
// lines of weights, those two are prefetched that come `kSoon` lines later, past the end those of `following`, the next
// work item's.
template <bool pairs, int N>
INLINE void sums_of_few(const Problem& p, const char* w, const char* panel, float* to, const char* following) {
  constexpr int kPairs = kOutputs / 2;    // of outputs
  constexpr int kTogether = W / (2 * N);  // pairs whose sums are reduced together
  const int64_t tiles = p.tiles(), apart = p.row_bytes;
  const int64_t at_once = tiles * N <= 16 * kFewLines ? tiles : kFewLines;
  Floats all[kPairs / kTogether][N][kTogether][2];
  for (int64_t begin = 0; begin < tiles; begin += at_once) {
    const int64_t end = std::min(begin + at_once, tiles);
    const int ahead = int(std::min<int64_t>((kSoon / 2 + end - begin - 1) / (end - begin), kPairs));
    for (int pair = 0; pair < kPairs; ++pair) {
      const bool here = pair + ahead < kPairs;
      const char* const soon = (here ? w + begin * kLine : end < tiles ? w + end * kLine : following) +
                               (pair + ahead - (here ? 0 : kPairs)) * 2 * apart;
      const char* const row = w + pair * 2 * apart;
      const int64_t gap = apart - (end - begin) * kLine;
      auto& lanes = all[pair / kTogether];
      for (int64_t from = begin; from < end; from += kFewLines) {
        __m512 c[2][N];
        UNROLL for (int n = 0; n < N; ++n) c[0][n] = c[1][n] = _mm512_setzero_ps();
        for (int64_t s = from; s < std::min(from + kFewLines, end); ++s) {
          const __m512 v0 = _mm512_loadu_ps(row + s * kLine), v1 = _mm512_loadu_ps(row + apart + s * kLine);
          const int64_t line = 2 * (s - begin);  // one row's, then the other's: memory is read in order
          const char* const at = soon + line * kLine + (line < end - begin ? 0 : gap);
          _mm_prefetch(at, _MM_HINT_T1);
          _mm_prefetch(at + kLine, _MM_HINT_T1);
          UNROLL for (int n = 0; n < N; ++n) {
            const __m512 x = _mm512_load_ps(panel + (s * N + n) * kLine);
            c[0][n] = multiply_add<pairs>(c[0][n], x, v0);
            c[1][n] = multiply_add<pairs>(c[1][n], x, v1);
          }
        }
        UNROLL for (int n = 0; n < N; ++n)
          UNROLL for (int o = 0; o < 2; ++o) {
            Floats& sum = lanes[n][pair % kTogether][o];
            sum = from ? sum + (Floats)c[o][n] : (Floats)c[o][n];
          }
      }
      if (end < tiles || pair % kTogether < kTogether - 1) continue;
      float found[N][2 * kTogether];
      write(found, sums(&lanes[0][0][0]));
      const int first = pair / kTogether * 2 * kTogether;
      for (int n = 0; n < N; ++n) memcpy(to + n * kOutputs + first, found[n], sizeof found[n]);
    }
  }
}

// Sums [N vectors of tokens][2][16 outputs][16 tokens] of 32 outputs, by the matrix unit.
template <int N>
INLINE void sums_by_tiles(const Problem& p, const char* w, const char* panel, float* sums, Prefetcher& prefetcher) {
  const int64_t tiles = p.tiles(), apart = p.row_bytes;
  const char* second = panel + tiles * kWidth * kLine;
  fence();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (N == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < tiles; ++s) {
    _tile_loadd(6, panel + s * kWidth * kLine, kLine);
    _tile_loadd(4, w + s * kLine, apart);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w + kWidth * apart + s * kLine, apart);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, second + s * kWidth * kLine, kLine);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    prefetcher.prefetch_some();
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + 256, kLine);
  if constexpr (N == 2) {
    _tile_stored(2, sums + 512, kLine);
    _tile_stored(3, sums + 768, kLine);
  }
  fence();
}

// The same without the matrix unit, 8 outputs at a time: rows of weights are often a multiple of 4 KiB apart, and a
// first-level cache keeps 8 or 12 such lines. With one vector of tokens each output has two sums, of even and odd
// words, so that one addition need not wait for another. Sums over kSummed words are added to each other: a longer sum
// would round more often, and its tokens would not stay in that cache.
constexpr int64_t kSummed = 128;

template <bool pairs, int N>
INLINE void sums_by_vectors(const Problem& p, const char* weights, const char* panel, float* sums,
                            Prefetcher& prefetcher) {
  constexpr int kRows = 8, kParts = N == 1 ? 2 : 1;
  const int64_t tiles = p.tiles(), apart = p.row_bytes / 4;
  for (int64_t begin = 0; begin < tiles; begin += kSummed / kWidth) {
    const int64_t steps = std::min(tiles - begin, kSummed / kWidth);
    for (int64_t first = 0; first < kOutputs; first += kRows) {
      const float* w = reinterpret_cast<const float*>(weights) + first * apart + begin * kWidth;
      const float* x = reinterpret_cast<const float*>(panel) + begin * kWidth * kWidth * N;
      __m512 c[kParts][kRows][N];
#pragma GCC unroll 16
      for (int o = 0; o < kParts * kRows; ++o)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) c[o / kRows][o % kRows][n] = _mm512_setzero_ps();
      for (int64_t s = 0; s < steps; ++s, w += kWidth) {
#pragma GCC unroll 16
        for (int o = 0; o < kRows; ++o) _mm_prefetch(w + o * apart + kWidth, _MM_HINT_T0);
        for (int64_t k = 0; k < kWidth; k += kParts)
#pragma GCC unroll 2
          for (int i = 0; i < kParts; ++i, x += N * kWidth) {
            __m512 v[N];
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) v[n] = _mm512_load_ps(x + n * kWidth);
#pragma GCC unroll 16
            for (int o = 0; o < kRows; ++o) {
              const __m512 one = _mm512_set1_ps(w[o * apart + k + i]);
#pragma GCC unroll 3
              for (int n = 0; n < N; ++n) c[i][o][n] = multiply_add<pairs>(c[i][o][n], one, v[n]);
            }
          }
        prefetcher.prefetch_some();
      }
#pragma GCC unroll 16
      for (int o = 0; o < kRows; ++o)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) {
          float* sum = sums + n * 512 + (first + o) * kWidth;
          const __m512 all = kParts == 2 ? _mm512_add_ps(c[0][o][n], c[kParts - 1][o][n]) : c[0][o][n];
          _mm512_store_ps(sum, begin ? _mm512_add_ps(_mm512_load_ps(sum), all) : all);
        }
    }
  }
}

template <bool pairs>
void pass_by_vectors(const Problem& p, int64_t vectors, const char* w, const char* tokens, float* sums,
                     Prefetcher& prefetcher) {
  if (vectors == 3) sums_by_vectors<pairs, 3>(p, w, tokens, sums, prefetcher);
  else if (vectors == 2) sums_by_vectors<pairs, 2>(p, w, tokens, sums, prefetcher);
  else sums_by_vectors<pairs, 1>(p, w, tokens, sums, prefetcher);
}

// Stores sums [2][16 outputs][16 tokens] of the first `count` tokens.
INLINE void store(const Problem& p, const float* sums, int64_t output, int64_t token, int64_t count) {
  if (p.transposed) {
    float* y = static_cast<float*>(p.y) + output * p.rows + token;
    for (int r = 0; r < kOutputs; ++r)
      _mm512_mask_storeu_epi32(y + r * p.rows, (1u << count) - 1, _mm512_load_si512(sums + r * kWidth));
    return;
  }
  __m512i low[16], high[16];
  for (int r = 0; r < 16; ++r) low[r] = _mm512_load_si512(sums + r * kWidth);
  transpose(low);
  for (int r = 0; r < 16; ++r) high[r] = _mm512_load_si512(sums + 256 + r * kWidth);
  transpose(high);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t place = (token + r) * p.O + output;
    if (p.rounds) {
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(high[r]), _mm512_castsi512_ps(low[r]));
      _mm512_storeu_si512(static_cast<uint16_t*>(p.y) + place, (__m512i)both);
    } else {
      float* y = static_cast<float*>(p.y) + place;
      _mm512_storeu_si512(y, low[r]);
      _mm512_storeu_si512(y + kWidth, high[r]);
    }
  }
}

// Multiplies the 32 outputs from `output` on with few tokens. `following` are the next item's weights.
template <bool pairs>
void multiply_few(const Problem& p, const Panel& panel, int64_t output, const char* following) {
  const char* w = p.w + output * p.row_bytes;
  alignas(64) float sums[kFew * kOutputs];
  switch (p.slots()) {
    case 1: sums_of_few<pairs, 1>(p, w, panel.at, sums, following); break;
    case 2: sums_of_few<pairs, 2>(p, w, panel.at, sums, following); break;
    case 4: sums_of_few<pairs, 4>(p, w, panel.at, sums, following); break;
    default: sums_of_few<pairs, kFew>(p, w, panel.at, sums, following);
  }
  if (p.rounds) {
    for (int64_t t = 0; t < p.T; ++t) {
      const float* of = sums + t * kOutputs;
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(of + kWidth), _mm512_load_ps(of));
      _mm512_storeu_si512(static_cast<uint16_t*>(p.y) + t * p.O + output, (__m512i)both);
    }
    return;
  }
  float* y = static_cast<float*>(p.y) + (p.transposed ? output * p.rows : output);
  for (int64_t t = 0; t < p.T; ++t)
    for (int64_t o = 0; o < kOutputs; ++o) y[p.transposed ? o * p.rows + t : t * p.O + o] = sums[t * kOutputs + o];
}

// Multiplies the 32 outputs from `output` on with a group of tokens. `prefetcher` has the next work item's weights.
void multiply(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count,
              Prefetcher prefetcher) {
  if (p.few()) return (p.pairs ? multiply_few<true> : multiply_few<false>)(p, panel, output, prefetcher.at);
  const Passes passes(p, count);
  const int64_t rows = p.tiled ? kOutputs : 8;
  const int64_t steps = passes.count * p.tiles() * (kOutputs / rows);
  prefetcher.lines = ((prefetcher.end - prefetcher.at) / kLine + steps - 1) / steps;
  const char* w = p.w + output * p.row_bytes;
  alignas(64) float sums[3 * 512];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), v1 = passes.start(pass + 1);
    const char* tokens = panel.at + v0 * kWidth * p.row_bytes;
    if (p.tiled) (v1 - v0 == 2 ? sums_by_tiles<2> : sums_by_tiles<1>)(p, w, tokens, sums, prefetcher);
    else if (p.pairs) pass_by_vectors<true>(p, v1 - v0, w, tokens, sums, prefetcher);
    else pass_by_vectors<false>(p, v1 - v0, w, tokens, sums, prefetcher);
    for (int64_t v = v0; v < v1; ++v) {
      const int64_t token = v * kWidth, meant = std::min(kWidth, count - token);
      store(p, sums + (v - v0) * 512, output, first + token, meant);
    }
  }
}

}  // namespace
}  // namespace jattn_native
