// y = x w^T: tokens x [T, I] times a linear layer's weight w [O, I], as a checkpoint has it.
//
// A work item is 32 outputs and a group of tokens. Threads take the work items of a call in order:
//
//   lay the group's tokens out so that 16 of them fill a register     each thread for itself
//   for every 16 to 48 tokens: sums of 32 outputs x tokens, over all of I
//   turn the sums, round, store                                       y [T, O], or [O, T] if `turned`
//
//   bfloat16, by the matrix unit (AMX)        sums [16 outputs, 16 tokens] += w [16, 32] x [32, 16]:
//                                             16 rows of the weight where they lie, tokens as pairs
//   in AVX-512's registers                    8 outputs, each of whose words is broadcast, and up
//                                             to 48 tokens; a word is a float32, or a pair of bfloat16
//   the same, up to 8 tokens                  2 outputs, of whose words 16 fill a register; its sum is
//                                             added up at last: nearly as fast as memory
//
// So a group of tokens reads every weight once, where it lies, on the core that multiplies with it.
// While a thread works on an item, it prefetches the weights of its next one: 32 rows, one after
// another. Of few tokens without the matrix unit the next item is simply what the stream goes on with.
//
// The calling thread works, too, and waits only for work items that some thread has begun.
//
// Tiles, transposition and threads are those of jattn's own kernel, whose sources are in its package.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cores.h"
#include "matrix.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jattn_native {
namespace {

constexpr int64_t kWidth = 16;            // 32-bit words of a register, and rows of a tile
constexpr int64_t kOutputs = 32;          // of a work item
constexpr int64_t kPanel = 5 << 18;       // bytes of a group's tokens: most of a second-level cache
constexpr int64_t kAlone = 1 << 18;       // bytes of weights that are not worth waking a thread for
constexpr int64_t kLine = 64;
constexpr int64_t kFew = 8;               // tokens with which 2 outputs at a time are faster than 8 outputs (Zen 4)
// Lines by which their weights are prefetched, into the second-level cache: with the tokens, they would not
// stay in the first (4 tokens of 8 layers of Qwen3-0.6B in bfloat16, on a Zen 4: 13.6 ms there, 9.5 here).
constexpr int64_t kSoon = 128;
constexpr int64_t kHugePage = 2 << 20;

struct Problem {
  const char* x;  // T rows of row_bytes
  const char* w;  // O rows of row_bytes
  void* y;
  int64_t T, O, row_bytes;
  bool pairs;         // bfloat16 numbers, two in a word, else float32
  bool tiled;         // they are multiplied by the matrix unit
  bool rounds;        // y is bfloat16
  bool turned;

  int64_t tiles() const { return row_bytes / kLine; }  // of 16 rows, in a panel's 16 tokens
  bool few() const { return !tiled && T <= kFew; }
  int64_t most() const { return tiled ? 2 : 3; }       // vectors of 16 tokens in a pass
  int64_t slots() const { return T <= 2 ? T : T <= 4 ? 4 : kFew; }  // of few tokens in a panel
};

// The passes over a group of tokens: each has about as many vectors of 16.
struct Passes {
  int64_t vectors, count;

  Passes(const Problem& p, int64_t tokens)
      : vectors((tokens + kWidth - 1) / kWidth), count((vectors + p.most() - 1) / p.most()) {}
  int64_t start(int64_t pass) const { return vectors * pass / count; }
};

// Asks for the lines of the next weights, some with every step.
struct Ahead {
  const char *at, *end;
  int64_t lines;

  INLINE void ask() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += kLine) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// A group's tokens, one panel per thread, as long as it lives. Of few tokens [tiles][slots][64 bytes];
// of more, for each pass [tiles][16 words][its vectors][16 tokens], and for the matrix unit [its vectors]
// [tiles][16 words][16 tokens]: what is read together lies together. Tokens past the last are zeros.
struct Panel {
  char* at = nullptr;
  int64_t size = 0;

  ~Panel() { free(at); }

  void reserve(int64_t bytes) {
    if (bytes <= size) return;
    free(at);
    size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    at = static_cast<char*>(aligned_alloc(kHugePage, size));
    if (!at) abort();
    madvise(at, size, MADV_HUGEPAGE);  // refused or not, the memory is the same
  }

  void fill(const Problem& p, int64_t first, int64_t count) {
    if (p.few()) return fill_few(p);
    const Passes passes(p, count);
    reserve(passes.vectors * kWidth * p.row_bytes);
    for (int64_t pass = 0; pass < passes.count; ++pass) {
      const int64_t v0 = passes.start(pass), n = passes.start(pass + 1) - v0;
      char* const begin = at + v0 * kWidth * p.row_bytes;
      for (int64_t v = 0; v < n; ++v)
        for (int64_t s = 0; s < p.tiles(); ++s) {
          __m512i rows[16];
          for (int64_t r = 0; r < kWidth; ++r) {
            const int64_t token = (v0 + v) * kWidth + r;
            rows[r] = token < count ? _mm512_loadu_si512(p.x + (first + token) * p.row_bytes + s * kLine)
                                    : _mm512_setzero_si512();
          }
          turn(rows);
          const int64_t apart = p.tiled ? 1 : n, tile = p.tiled ? (v * p.tiles() + s) * kWidth : s * kWidth * n + v;
          for (int64_t r = 0; r < kWidth; ++r) _mm512_store_si512(begin + (tile + r * apart) * kLine, rows[r]);
        }
    }
  }

  void fill_few(const Problem& p) {
    const int64_t slots = p.slots();
    reserve(slots * p.row_bytes);
    for (int64_t s = 0; s < p.tiles(); ++s)
      for (int64_t t = 0; t < slots; ++t) {
        const __m512i some = t < p.T ? _mm512_loadu_si512(p.x + t * p.row_bytes + s * kLine) : _mm512_setzero_si512();
        _mm512_store_si512(at + (s * slots + t) * kLine, some);
      }
  }
};

// sum + a b, word by word: of float32 numbers, or of both numbers of a pair.
template <bool pairs>
INLINE __m512 multiply_add(__m512 sum, __m512 a, __m512 b) {
  if constexpr (pairs) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  else return _mm512_fmadd_ps(a, b, sum);
}

// Sums [N tokens][32 outputs] of few tokens. Their weights are one run of memory: with two lines of them, two
// are prefetched `kSoon` lines later, past the end those of `following`, the next work item's.
template <bool pairs, int N>
INLINE void sums_of_few(const Problem& p, const char* w, const char* panel, float* sums, const char* following) {
  const int64_t tiles = p.tiles(), apart = p.row_bytes;
  const char* const end = w + kOutputs * apart;
  for (int64_t output = 0; output < kOutputs; output += 2, w += 2 * apart) {
    const char* soon = w + kSoon * kLine;
    const int64_t here = std::clamp<int64_t>((end - soon) / (2 * kLine), 0, tiles);
    __m512 c[2][N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) c[0][n] = c[1][n] = _mm512_setzero_ps();
    auto add = [&](int64_t begin, int64_t end, const char* soon) __attribute__((always_inline)) {
      for (int64_t s = begin; s < end; ++s) {
        const __m512 v0 = _mm512_loadu_ps(w + s * kLine), v1 = _mm512_loadu_ps(w + apart + s * kLine);
        _mm_prefetch(soon + 2 * s * kLine, _MM_HINT_T1);
        _mm_prefetch(soon + (2 * s + 1) * kLine, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const __m512 x = _mm512_load_ps(panel + (s * N + n) * kLine);
          c[0][n] = multiply_add<pairs>(c[0][n], x, v0);
          c[1][n] = multiply_add<pairs>(c[1][n], x, v1);
        }
      }
    };
    add(0, here, soon);
    add(here, tiles, following + (soon - end));
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      for (int o = 0; o < 2; ++o) sums[n * kOutputs + output + o] = _mm512_reduce_add_ps(c[o][n]);
  }
}

// Sums [N vectors of tokens][2][16 outputs][16 tokens] of 32 outputs, by the matrix unit.
template <int N>
INLINE void sums_by_tiles(const Problem& p, const char* w, const char* panel, float* sums, Ahead& ahead) {
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
    ahead.ask();
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + 256, kLine);
  if constexpr (N == 2) {
    _tile_stored(2, sums + 512, kLine);
    _tile_stored(3, sums + 768, kLine);
  }
  fence();
}

// The same without it, 8 outputs at a time: rows of weights are often a multiple of 4 KiB apart, and a
// first-level cache keeps 8 or 12 lines that are. With one vector of tokens there are two sums of each,
// of even and odd words, so that one addition need not wait for another. Sums over kSummed words are
// added to each other: a longer one would round more often, and its tokens would not stay in that cache.
constexpr int64_t kSummed = 128;

template <bool pairs, int N>
INLINE void sums_by_vectors(const Problem& p, const char* weights, const char* panel, float* sums, Ahead& ahead) {
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
        ahead.ask();
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
void pass_by_vectors(const Problem& p, int64_t vectors, const char* w, const char* tokens, float* sums, Ahead& ahead) {
  if (vectors == 3) sums_by_vectors<pairs, 3>(p, w, tokens, sums, ahead);
  else if (vectors == 2) sums_by_vectors<pairs, 2>(p, w, tokens, sums, ahead);
  else sums_by_vectors<pairs, 1>(p, w, tokens, sums, ahead);
}

// Stores sums [2][16 outputs][16 tokens], of which `count` tokens are meant.
INLINE void store(const Problem& p, const float* sums, int64_t output, int64_t token, int64_t count) {
  if (p.turned) {
    float* y = static_cast<float*>(p.y) + output * p.T + token;
    for (int r = 0; r < kOutputs; ++r)
      _mm512_mask_storeu_epi32(y + r * p.T, (1u << count) - 1, _mm512_load_si512(sums + r * kWidth));
    return;
  }
  __m512i low[16], high[16];
  for (int r = 0; r < 16; ++r) low[r] = _mm512_load_si512(sums + r * kWidth);
  turn(low);
  for (int r = 0; r < 16; ++r) high[r] = _mm512_load_si512(sums + 256 + r * kWidth);
  turn(high);
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
  float* y = static_cast<float*>(p.y) + (p.turned ? output * p.T : output);
  for (int64_t t = 0; t < p.T; ++t)
    for (int64_t o = 0; o < kOutputs; ++o) y[p.turned ? o * p.T + t : t * p.O + o] = sums[t * kOutputs + o];
}

// Multiplies the 32 outputs from `output` on with a group of tokens. `ahead` are the next item's weights.
void multiply(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count, Ahead ahead) {
  if (p.few()) return (p.pairs ? multiply_few<true> : multiply_few<false>)(p, panel, output, ahead.at);
  const Passes passes(p, count);
  const int64_t rows = p.tiled ? kOutputs : 8;
  const int64_t steps = passes.count * p.tiles() * (kOutputs / rows);
  ahead.lines = ((ahead.end - ahead.at) / kLine + steps - 1) / steps;
  const char* w = p.w + output * p.row_bytes;
  alignas(64) float sums[3 * 512];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), v1 = passes.start(pass + 1);
    const char* tokens = panel.at + v0 * kWidth * p.row_bytes;
    if (p.tiled) (v1 - v0 == 2 ? sums_by_tiles<2> : sums_by_tiles<1>)(p, w, tokens, sums, ahead);
    else if (p.pairs) pass_by_vectors<true>(p, v1 - v0, w, tokens, sums, ahead);
    else pass_by_vectors<false>(p, v1 - v0, w, tokens, sums, ahead);
    for (int64_t v = v0; v < v1; ++v) {
      const int64_t token = v * kWidth, meant = std::min(kWidth, count - token);
      store(p, sums + (v - v0) * 512, output, first + token, meant);
    }
  }
}

// What threads share, those that come too late included.
struct Job {
  Problem p;
  int64_t blocks, groups, tokens;  // of a group
  int threads;
  Cores cores;
  std::atomic<int64_t> next{0}, done{0};

  int64_t count() const { return blocks * groups; }

  void work() {
    int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    if (item >= count()) return;
    if (threads > 1) cores.settle();
    static thread_local Panel panel;
    std::optional<TileState> tiles;
    if (p.tiled) tiles.emplace(kWidth);
    int64_t filled = -1;
    while (item < count()) {
      const int64_t group = item / blocks, first = group * tokens, here = std::min(tokens, p.T - first);
      if (group != filled) panel.fill(p, first, here), filled = group;
      // The next work item is taken early, to prefetch it; not near the end, where others would wait for it.
      int64_t following = next.load(std::memory_order_relaxed);
      const bool early = following + 2 * threads < count();
      following = early ? next.fetch_add(1, std::memory_order_relaxed) : following + threads - 1;  // likely
      const char* ahead = p.w + following % blocks * kOutputs * p.row_bytes;
      multiply(p, panel, item % blocks * kOutputs, first, here,
               {ahead, ahead + (following < count() ? kOutputs * p.row_bytes : 0), 0});
      done.fetch_add(1, std::memory_order_release);
      item = early ? following : next.fetch_add(1, std::memory_order_relaxed);
    }
  }
};

std::string shape_of(const ffi::AnyBuffer& x) {
  std::string text;
  for (const int64_t n : x.dimensions()) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

std::string name_of(ffi::DataType type) {
  if (type == ffi::F32) return "float32";
  if (type == ffi::BF16) return "bfloat16";
  return "of XLA's type " + std::to_string(int(type));
}

// What is wrong with a call's arguments; empty if nothing is.
std::string mismatches(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const ffi::AnyBuffer& y, bool turned) {
  std::string found;
  auto must = [&found](bool holds, const std::string& text) {
    if (!holds) found += (found.empty() ? "" : "; ") + text;
  };
  const ffi::DataType type = x.element_type();
  must(type == ffi::F32 || type == ffi::BF16, "x is " + name_of(type) + ", but must be float32 or bfloat16");
  must(w.element_type() == type, "w is " + name_of(w.element_type()) + ", but must be " + name_of(type) + " as x is");
  const bool rounds = type == ffi::BF16 && !turned;
  must(y.element_type() == ffi::F32 || (rounds && y.element_type() == type),
       "y is " + name_of(y.element_type()) + ", but must be float32" + (rounds ? " or bfloat16" : ""));
  must(x.dimensions().size() == 2, "x is " + shape_of(x) + ", but must be [T, I]");
  must(w.dimensions().size() == 2, "w is " + shape_of(w) + ", but must be [O, I]");
  if (!found.empty()) return found;
  const int64_t T = x.dimensions()[0], I = x.dimensions()[1], O = w.dimensions()[0];
  const int64_t fit = kLine / (type == ffi::BF16 ? 2 : 4);
  must(w.dimensions()[1] == I, "w has I = " + std::to_string(w.dimensions()[1]) + " inputs, but must have x's " + std::to_string(I));
  must(I % fit == 0, "x has I = " + std::to_string(I) + " inputs, but must have a multiple of " + std::to_string(fit));
  must(O % kOutputs == 0, "w has O = " + std::to_string(O) + " outputs, but must have a multiple of " + std::to_string(kOutputs));
  const int64_t rows = turned ? O : T, columns = turned ? T : O;
  must(y.dimensions().size() == 2 && y.dimensions()[0] == rows && y.dimensions()[1] == columns,
       "y is " + shape_of(y) + ", but must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  return found;
}

// `tiles`: the matrix unit multiplies bfloat16.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                   int64_t tiles, int64_t turned) {
  const std::string wrong = mismatches(x, w, *y, turned);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("the product x w^T: " + wrong);
  auto job = std::make_shared<Job>();
  Problem& p = job->p;
  p.x = static_cast<const char*>(x.untyped_data()), p.w = static_cast<const char*>(w.untyped_data());
  p.y = y->untyped_data();
  p.T = x.dimensions()[0], p.O = w.dimensions()[0];
  p.pairs = x.element_type() == ffi::BF16, p.rounds = y->element_type() == ffi::BF16, p.turned = turned != 0;
  p.tiled = p.pairs && tiles;
  p.row_bytes = x.dimensions()[1] * (p.pairs ? 2 : 4);
  if (!p.T || !p.O) return ffi::Error::Success();
  if (!p.row_bytes) {  // sums of nothing
    std::memset(p.y, 0, y->size_bytes());
    return ffi::Error::Success();
  }
  const int64_t fit = std::max<int64_t>(kPanel / p.row_bytes / 48 * 48, 48);
  job->groups = (p.T + fit - 1) / fit;
  job->tokens = ((p.T + job->groups - 1) / job->groups + kWidth - 1) / kWidth * kWidth;
  job->blocks = p.O / kOutputs;
  const bool alone = p.O * p.row_bytes < kAlone;
  job->threads = alone ? 1 : int(std::min<int64_t>(pool.num_threads(), job->count()));
  for (int i = 1; i < job->threads; ++i) pool.Schedule([job] { job->work(); });
  if (job->threads > 1) sched_yield();  // lets them begin
  job->work();
  while (job->done.load(std::memory_order_acquire) < job->count()) _mm_pause();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jattn_native

#pragma GCC visibility push(default)  // what ctypes looks up; all else is hidden
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    examples_product, jattn_native::product,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<int64_t>("tiles")
        .Attr<int64_t>("turned"));
#pragma GCC visibility pop

// Whether the system lets this process use the matrix unit.
extern "C" __attribute__((visibility("default"))) int examples_product_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of the state of tiles
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
