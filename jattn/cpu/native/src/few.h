// Which form of few rows takes a split: by the number of rows, and by how the next keys are prefetched.
#pragma once
#include "decode.h"

namespace jattn_native {
namespace {

constexpr int kFewRows = W >= 8 ? 8 : 4;

template <int R, class M> void few(const Problem& p, const Split& split, Queue& queue) {
  if constexpr (kLongRow<R> < kNever) {
    const bool longer = kLongRow<R> == 0 || p.nhd || p.S * p.key.row_bytes >= p.interleaved_run;
    if (longer && p.key.row_bytes >= kLongRow<R>) return few_rows<R, M, true>(p, split, queue);
  }
  if constexpr (kLongRow<R> > 0) few_rows<R, M>(p, split, queue);
}

template <class M> void few(const Problem& p, const Split& split, Queue& queue, int rows) {
  if (rows <= 1) return few<1, M>(p, split, queue);
  if constexpr (kTiles && M::paired) return;  // more rows go to the matrix unit
  else if (rows <= 2) few<2, M>(p, split, queue);
  else if (rows <= 4) few<4, M>(p, split, queue);
  else if constexpr (W >= 8) few<8, M>(p, split, queue);
}

}  // namespace
}  // namespace jattn_native
