// The kernels of one instruction set: this file is compiled once for each, with its flags and its name. few_rows.cc is
// the other half, so that two cores compile them at once.
//
//   a split's rows are its tokens x G; products are of pairs if all numbers are exact as bfloat16, else of float32
//   with a matrix unit, pairs and more than 1 or 2 rows     tile_rows    tiles.h
//   up to 8 rows (4 with vectors of 4 numbers)              few_rows     decode.h
//   up to 16 rows, with AVX-512                             vector_rows  vector_rows.h
//   more                                                    many_rows    prefill.h
#include "encode.h"
#include "few.h"
#include "names.h"
#include "prefill.h"
#include "tiles.h"
#include "vector_rows.h"

namespace jattn_native {

void NAME(few_floats_)(const Problem& p, const Split& split, Queue& queue, int rows);

namespace {

// Products of pairs are exact if both operands are bfloat16; everything else is multiplied as float32.
bool as_pairs(const Problem& p) {
  return kDot && p.query_type == Format::bf16 && fits_bf16(p.key.format) && fits_bf16(p.value.format);
}

int work_item_rows(const Problem& p) {
  // The matrix unit is faster than the third-level cache: the more rows share a key, the better.
  if (kTiles && as_pairs(p)) return 256;
  // Otherwise as many as the second-level cache holds together with two kv tiles.
  return (p.D + p.V) * 4 * (192 + 2 * kMostKeys) <= second_level_cache() ? 192 : 96;
}

template <class E> void more_rows(const Problem& p, const Split& split, Queue& queue, int rows) {
#if defined(__AVX512F__)
  if (rows <= W) return vector_rows<E>(p, split, queue);
#endif
  many_rows<E>(p, split, queue);
}

void run(const Problem& p, const Split& split, Queue& queue) {
  const int rows = int((split.t1 - split.t0) * p.group());
  const bool pairs = as_pairs(p);
  const bool halves = p.key.format == Format::bf16 && p.value.format == Format::bf16 && p.D % (2 * W) == 0 &&
                      p.V % (2 * W) == 0;
#if defined(__AMX_BF16__)
  // Four rows are faster with the keys' numbers in the lanes: 0.83 to 0.95 of the time on two cores of a Xeon.
  if (pairs && (rows > 4 || (rows > 1 && !halves))) return tile_rows(p, split, queue);
#endif
  if (rows <= kFewRows) {
    // A single row on processors with a matrix unit: the instruction for pairs is slower there than two multiply-adds
    // (25 ns a key of D = 128 and 4 rows against 20, from a cache).
    if constexpr (kDot) {
      if (pairs && !(kTiles && halves)) return few<AsPairs>(p, split, queue, rows);
    }
    return halves ? few<AsHalves>(p, split, queue, rows) : NAME(few_floats_)(p, split, queue, rows);
  }
  if constexpr (kDot && !kTiles) {
    if (pairs) return more_rows<uint32_t>(p, split, queue, rows);
  }
  more_rows<float>(p, split, queue, rows);
}

void decode(const Cache& cache, int64_t row, float* out) {
  const int64_t padded = round_up(cache.dim, 2 * W);
  float* floats = static_cast<float*>(aligned_alloc(64, round_up(padded * 4, 64)));
  decoder<false>(cache.format)(cache, row, floats, padded);
  if (kDot && fits_bf16(cache.format)) {  // the same numbers as pairs, or NaN
    uint16_t* pairs = static_cast<uint16_t*>(aligned_alloc(64, round_up(padded * 2, 64)));
    decoder<true>(cache.format)(cache, row, pairs, padded);
    for (int64_t i = 0; i < cache.dim; ++i)
      if (!(from_bf16(pairs[i]) == floats[i])) floats[i] = __builtin_nanf("");
    free(pairs);
  }
  memcpy(out, floats, cache.dim * 4);
  free(floats);
}

void logits(const float* dots, float scale, const float* cap, float slope, const float* bias, int64_t columns,
            int64_t q, int64_t k, int count, float* out) {
  const Logits found(scale, cap, true, bias, columns);
  for (int i = 0; i < count; ++i) out[i] = found.one(dots[i], k + i - q, slope, 0);
}

}  // namespace

Kernels NAME(kernels_)() {
  Kernels kernels{TEXT(INSTRUCTION_SET), work_item_rows, run, merge, update, decode, logits};
  // On two cores of a Xeon with AMX, decode of 8 and 16 rows takes 0.96 to 1.00 of the time with a 24th rather than a
  // sixth: there are fewer splits and partial results.
  if (kTiles) kernels.row_work = 1.0 / 24, kernels.least_shared = 144 << 10;
  return kernels;
}

}  // namespace jattn_native
