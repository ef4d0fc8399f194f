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
//   float32, in AVX-512's registers           8 or 16 outputs, each of whose numbers is broadcast,
//                                             and up to 48 tokens
//   float32, up to 8 tokens                   2 outputs, of whose numbers 16 fill a register; its sum
//                                             is added up at last: as fast as memory
//
// So a group of tokens reads every weight once, where it lies, on the core that multiplies with it.
// While a thread works on an item, it prefetches the weights of its next one: 32 rows, one after
// another. In float32 with 9 to 48 tokens it leaves that to the processor, which is faster, and with
// fewer the next item is simply what the stream goes on with.
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
constexpr int64_t kFew = 8;               // float32 tokens whose sums of two outputs fit into registers
constexpr int64_t kSoon = 32;             // lines by which their weights are prefetched
constexpr int64_t kMany = 48;             // float32 tokens, more than few, up to which no item is prefetched
constexpr int64_t kHugePage = 2 << 20;

struct Problem {
  const char* x;  // T rows of row_bytes
  const char* w;  // O rows of row_bytes
  void* y;
  int64_t T, O, row_bytes;
  bool pairs;         // bfloat16 numbers, else float32
  bool rounds;        // y is bfloat16
  bool turned;

  int64_t tiles() const { return row_bytes / kLine; }  // of 16 rows, in a panel's 16 tokens
  bool few() const { return !pairs && T <= kFew; }
  int64_t most() const { return pairs ? 2 : 3; }       // vectors of 16 tokens in a pass
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
// of more, for each pass [tiles][16 words][its vectors][16 tokens] in float32, and [its vectors][tiles]
// [16 words][16 tokens] in bfloat16: what is read together lies together. Tokens past the last are zeros.
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
          const int64_t apart = p.pairs ? 1 : n, tile = p.pairs ? (v * p.tiles() + s) * kWidth : s * kWidth * n + v;
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

// Sums [N tokens][32 outputs] of few tokens. The weights `kSoon` lines ahead are prefetched in each of
// two rows, and after these of the next two: `following` are those of the next work item.
template <int N>
INLINE void sums_of_few(const Problem& p, const char* w, const char* panel, float* sums, const char* following) {
  const int64_t tiles = p.tiles(), apart = p.row_bytes, last = tiles - std::min(tiles, kSoon);
  for (int64_t output = 0; output < kOutputs; output += 2, w += 2 * apart) {
    const char* next = output + 2 < kOutputs ? w + 2 * apart : following;
    __m512 c[2][N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) c[0][n] = c[1][n] = _mm512_setzero_ps();
    auto add = [&](int64_t begin, int64_t end, const char* soon) __attribute__((always_inline)) {
      for (int64_t s = begin; s < end; ++s) {
        const __m512 v0 = _mm512_loadu_ps(w + s * kLine), v1 = _mm512_loadu_ps(w + apart + s * kLine);
        _mm_prefetch(soon + s * kLine, _MM_HINT_T0);
        _mm_prefetch(soon + apart + s * kLine, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const __m512 x = _mm512_load_ps(panel + (s * N + n) * kLine);
          c[0][n] = _mm512_fmadd_ps(x, v0, c[0][n]);
          c[1][n] = _mm512_fmadd_ps(x, v1, c[1][n]);
        }
      }
    };
    add(0, last, w + (tiles - last) * kLine);
    add(last, tiles, next - last * kLine);
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

// The same of float32 numbers, 8 or 16 outputs at a time. Sums of so many numbers are added to each
// other: a longer one would round more often, and its tokens would not stay in the first-level cache.
constexpr int64_t kSummed = 128;

template <int N>
INLINE void sums_by_vectors(const Problem& p, const char* weights, const char* panel, float* sums, Ahead& ahead) {
  constexpr int kRows = N == 1 ? 16 : 8;  // 16 sums or more, so that one need not wait for another
  const int64_t tiles = p.tiles(), apart = p.row_bytes / 4;
  for (int64_t begin = 0; begin < tiles; begin += kSummed / kWidth) {
    const int64_t steps = std::min(tiles - begin, kSummed / kWidth);
    for (int64_t first = 0; first < kOutputs; first += kRows) {
      const float* w = reinterpret_cast<const float*>(weights) + first * apart + begin * kWidth;
      const float* x = reinterpret_cast<const float*>(panel) + begin * kWidth * kWidth * N;
      __m512 c[kRows][N];
#pragma GCC unroll 16
      for (int o = 0; o < kRows; ++o)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) c[o][n] = _mm512_setzero_ps();
      for (int64_t s = 0; s < steps; ++s, w += kWidth) {
#pragma GCC unroll 16
        for (int o = 0; o < kRows; ++o) _mm_prefetch(w + o * apart + kWidth, _MM_HINT_T0);
        for (int64_t k = 0; k < kWidth; ++k, x += N * kWidth) {
          __m512 v[N];
#pragma GCC unroll 3
          for (int n = 0; n < N; ++n) v[n] = _mm512_load_ps(x + n * kWidth);
#pragma GCC unroll 16
          for (int o = 0; o < kRows; ++o) {
            const __m512 one = _mm512_set1_ps(w[o * apart + k]);
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) c[o][n] = _mm512_fmadd_ps(one, v[n], c[o][n]);
          }
        }
        ahead.ask();
      }
#pragma GCC unroll 16
      for (int o = 0; o < kRows; ++o)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) {
          float* sum = sums + n * 512 + (first + o) * kWidth;
          _mm512_store_ps(sum, begin ? _mm512_add_ps(_mm512_load_ps(sum), c[o][n]) : c[o][n]);
        }
    }
  }
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
void multiply_few(const Problem& p, const Panel& panel, int64_t output, const char* following) {
  const char* w = p.w + output * p.row_bytes;
  alignas(64) float sums[kFew * kOutputs];
  switch (p.slots()) {
    case 1: sums_of_few<1>(p, w, panel.at, sums, following); break;
    case 2: sums_of_few<2>(p, w, panel.at, sums, following); break;
    case 4: sums_of_few<4>(p, w, panel.at, sums, following); break;
    default: sums_of_few<kFew>(p, w, panel.at, sums, following);
  }
  float* y = static_cast<float*>(p.y) + (p.turned ? output * p.T : output);
  for (int64_t t = 0; t < p.T; ++t)
    for (int64_t o = 0; o < kOutputs; ++o) y[p.turned ? o * p.T + t : t * p.O + o] = sums[t * kOutputs + o];
}

// Multiplies the 32 outputs from `output` on with a group of tokens. `ahead` are the next item's weights.
void multiply(const Problem& p, const Panel& panel, int64_t output, int64_t first, int64_t count, Ahead ahead) {
  if (p.few()) return multiply_few(p, panel, output, ahead.at);
  const Passes passes(p, count);
  if (!p.pairs && p.T <= kMany) ahead.end = ahead.at;
  const int64_t rows = p.pairs ? kOutputs : passes.vectors == 1 ? 16 : 8;
  const int64_t steps = passes.count * p.tiles() * (kOutputs / rows);
  ahead.lines = ((ahead.end - ahead.at) / kLine + steps - 1) / steps;
  const char* w = p.w + output * p.row_bytes;
  alignas(64) float sums[3 * 512];
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t v0 = passes.start(pass), v1 = passes.start(pass + 1);
    const char* tokens = panel.at + v0 * kWidth * p.row_bytes;
    if (p.pairs && v1 - v0 == 2) sums_by_tiles<2>(p, w, tokens, sums, ahead);
    else if (p.pairs) sums_by_tiles<1>(p, w, tokens, sums, ahead);
    else if (v1 - v0 == 3) sums_by_vectors<3>(p, w, tokens, sums, ahead);
    else if (v1 - v0 == 2) sums_by_vectors<2>(p, w, tokens, sums, ahead);
    else sums_by_vectors<1>(p, w, tokens, sums, ahead);
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
    if (p.pairs) tiles.emplace(kWidth);
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

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                   int64_t turned) {
  const std::string wrong = mismatches(x, w, *y, turned);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("the product x w^T: " + wrong);
  auto job = std::make_shared<Job>();
  Problem& p = job->p;
  p.x = static_cast<const char*>(x.untyped_data()), p.w = static_cast<const char*>(w.untyped_data());
  p.y = y->untyped_data();
  p.T = x.dimensions()[0], p.O = w.dimensions()[0];
  p.pairs = x.element_type() == ffi::BF16, p.rounds = y->element_type() == ffi::BF16, p.turned = turned != 0;
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
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int64_t>(
        "turned"));
#pragma GCC visibility pop

// Whether the system lets this process use the matrix unit.
extern "C" __attribute__((visibility("default"))) int examples_product_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of the state of tiles
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
