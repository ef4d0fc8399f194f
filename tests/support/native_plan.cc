// The split of a call over threads as schedule.cc makes it, without its kernels: what each piece
// costs, by the plan's own measure. tests/test_native_plan.py compiles and reads it.
//
//   plan THREADS ROWS H K D BYTES LENGTH:TOKENS...  ->  a line "pieces tiles cuts floats",
//                                                       then the cost of every piece
#include "schedule.cc"

#include <cstdio>

namespace jattn_native {

static int tile_rows_given = 192;

Kernels stand_in() {
  Kernels k{};
  k.name = "none";
  k.tile_of_rows = [](const Problem&) { return tile_rows_given; };
  return k;
}
Kernels kernels_base() { return stand_in(); }
#if defined(JATTN_X86)
Kernels kernels_amx() { return stand_in(); }
Kernels kernels_avx512bf16() { return stand_in(); }
Kernels kernels_avx512() { return stand_in(); }
Kernels kernels_avx2() { return stand_in(); }
#endif

int report(int argc, char** argv) {
  const auto number = [&](int i) { return std::strtoll(argv[i], nullptr, 10); };
  const int threads = int(number(1));
  tile_rows_given = int(number(2));
  Problem p{};
  p.H = number(3), p.K = number(4), p.D = p.V = number(5), p.causal = true, p.S = 128;
  p.key.row_bytes = p.value.row_bytes = p.key.stride = p.value.stride = number(6);
  std::vector<int32_t> lens, starts{0};
  int64_t longest = 1;
  for (int i = 7; i < argc; ++i) {
    char* rest;
    lens.push_back(int32_t(std::strtoll(argv[i], &rest, 10)));
    const int32_t tokens = int32_t(std::strtoll(rest + 1, nullptr, 10));
    starts.push_back(starts.back() + tokens);
    longest = most(longest, int64_t(lens.back()));
    p.max_query_len = most(p.max_query_len, int64_t(tokens));
  }
  p.B = int64_t(lens.size()), p.T = starts.back(), p.M = (longest + p.S - 1) / p.S, p.N = 1;
  const std::vector<int32_t> tables(size_t(p.B * p.M), 0);
  p.seq_lens = lens.data(), p.starts = starts.data(), p.tables = tables.data();

  Job job;
  job.p = p;
  std::vector<Tile> tiles;
  double total = 0;
  for (int64_t b = 0; b < p.B; ++b)
    if (!plan(p, b, &job, &tiles)) return 1;
  for (const Tile& tile : tiles) total += tile.cost;
  cut(tiles, threads, total / (threads * 6), &job);
  int cuts = 0;
  for (const int c : job.cut_of) cuts = std::max(cuts, c + 1);
  size_t floats = 0;
  for (const Piece& piece : job.pieces)
    if (piece.partial) floats += size_t((piece.t1 - piece.t0) * p.group() * (p.V + 2));
  std::printf("%zu %zu %d %zu\n", job.pieces.size(), tiles.size(), cuts, floats);
  const double bytes = double(2 * p.key.row_bytes);
  for (const Piece& piece : job.pieces)
    std::printf("%.0f\n", double(piece.k1 - piece.k0) * bytes * (1 + double((piece.t1 - piece.t0) * p.group()) / 6) + 2048);
  return 0;
}

}  // namespace jattn_native

int main(int argc, char** argv) { return jattn_native::report(argc, argv); }
