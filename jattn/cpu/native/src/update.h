// One call of update_kv_cache as plain memory. Axis letters as in problem.h; T counts new tokens.
#pragma once
#include <cstdint>

#include "problem.h"
#include "schedule.h"

namespace jattn_native {

// Keys or values of new tokens: their rows, and the pool's arrays that they go to.
struct Written {
  const void* rows;      // [T, K, dim]
  Format source;         // of the rows: f32, bf16 or f16
  const float* divisor;  // [K], the rows are divided by it first; or null
  Format format;
  Per per;
  int64_t dim;        // numbers of a row
  int64_t row_bytes;  // of its words
  char* words;
  float* scale;     // [N, K] or one per token, or null
  float* zero;      // one per token, or null
  uint8_t* groups;  // e4m3, one per 16 numbers, or null
};

struct Update {
  const int32_t* slots;  // [T]
  int64_t T, K, N, S;
  bool nhd;
  int caches;
  Written cache[2];
  // Set by `write_rows`.
  bool distinct;  // no slot of the pool appears twice
  int64_t runs;   // of tokens in one block, if no block appears again after another; else 0

  // The pool's row of a block, head and token.
  int64_t row(int64_t block, int64_t head, int64_t token) const {
    return nhd ? (block * S + token) * K + head : (block * K + head) * S + token;
  }
};

// Writes all rows, on as many threads as there is work for.
void write_rows(const Update& u, int threads, const Spawn& spawn);

}  // namespace jattn_native
