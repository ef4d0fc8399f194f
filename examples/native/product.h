// A product, the order of its passes, and the memory of its tokens: for any instruction set.
#pragma once
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace jattn_native {
namespace {

constexpr int64_t kWidth = W;             // 32-bit words of a register, and tokens whose sums are in one
constexpr int64_t kOutputs = 32;          // of a work item
constexpr int64_t kAlone = 1 << 18;       // for fewer bytes of weights it does not pay to wake a thread
constexpr int64_t kLine = 64;
constexpr int64_t kHugePage = 2 << 20;
#if defined(__AVX512F__)
constexpr int64_t kPanel = 5 << 18;       // bytes of a group's tokens: most of a second-level cache
#else
constexpr int64_t kPanel = 3 << 17;
#endif
// Up to so many tokens, two or three outputs at a time with their numbers in the lanes are faster than more outputs
// with tokens in the lanes (Zen 3, 4).
constexpr int64_t kFew = 8;
constexpr int64_t few_tokens(bool pairs) { return pairs || W == 16 ? kFew : kFew / 2; }

struct Problem {
  const char* x;  // T rows of row_bytes, and others that are padding
  const char* w;  // O rows of row_bytes
  void* y;        // [rows, O], or [O, rows] if `transposed`
  int64_t T, O, row_bytes;
  int64_t rows;       // T and padding
  bool pairs;         // bfloat16 numbers, two in a word, else float32
  bool tiled;         // the matrix unit multiplies them
  bool rounds;        // y is bfloat16
  bool transposed;

  int64_t tiles() const { return row_bytes / kLine; }  // of 16 words a row
  int64_t numbers() const { return row_bytes / (pairs ? 2 : 4); }
  // Bytes of a token in a panel: without an instruction for pairs they are float32 there.
  int64_t token_bytes() const { return kDot ? row_bytes : numbers() * 4; }
  bool few() const { return !tiled && T <= few_tokens(pairs); }
  int64_t most() const { return tiled ? 2 : 3; }       // vectors of tokens in a pass
  int64_t slots() const { return T <= 2 ? T : T <= 4 ? 4 : kFew; }  // of few tokens in a panel
};

// The passes over a group of tokens: each has about as many vectors.
struct Passes {
  int64_t vectors, count;

  Passes(const Problem& p, int64_t tokens)
      : vectors((tokens + kWidth - 1) / kWidth), count((vectors + p.most() - 1) / p.most()) {}
  int64_t start(int64_t pass) const { return vectors * pass / count; }
};

// Prefetches the weights of the next work item, some lines with every step.
struct Prefetcher {
  const char *at, *end;
  int64_t lines;

  INLINE void prefetch_some() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += kLine) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// A group's tokens, one panel per thread, as long as it lives.
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
};

}  // namespace
}  // namespace jattn_native
