// Reads runs of a pool in a given order, as decode reads blocks, and does nothing else.
//
//   for `streams` interleaved runs, line by line:
//     prefetch the line `ahead` lines later in each stream, into the second-level cache
//     add this line up
#include <cstdint>

namespace {

constexpr int64_t kLine = 64;
using Line = uint64_t __attribute__((vector_size(kLine), aligned(8), may_alias));

template <int streams>
uint64_t read(const char* pool, const int64_t* starts, int64_t count, int64_t lines, int64_t ahead) {
  Line sum = {};
  int64_t later = ahead / lines * streams, later_line = ahead % lines;
  for (int64_t r = 0; r < count; r += streams) {
    for (int64_t line = 0; line < lines; ++line) {
      for (int s = 0; s < streams; ++s) {
        if (ahead && later + s < count) __builtin_prefetch(pool + starts[later + s] + later_line * kLine, 0, 2);
        sum ^= *reinterpret_cast<const Line*>(pool + starts[r + s] + line * kLine);
      }
      if (++later_line == lines) later_line = 0, later += streams;
    }
  }
  uint64_t all = 0;
  for (int i = 0; i < 8; ++i) all ^= sum[i];
  return all;
}

}  // namespace

// The exclusive or of `count` runs (a multiple of `streams`: 1, 2, 4 or 8) of `lines` lines of 64 bytes;
// `starts` are bytes, multiples of 64.
extern "C" uint64_t read_runs(const char* pool, const int64_t* starts, int64_t count, int64_t lines, int64_t ahead,
                              int streams) {
  switch (streams) {
    case 8: return read<8>(pool, starts, count, lines, ahead);
    case 4: return read<4>(pool, starts, count, lines, ahead);
    case 2: return read<2>(pool, starts, count, lines, ahead);
    default: return read<1>(pool, starts, count, lines, ahead);
  }
}
