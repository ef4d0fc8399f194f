// How schedule.cc splits a call, without its kernels: the cost of each split, by the plan's own measure.
// tests/native/test_plan.py compiles and reads it.
//
//   plan ROWS H K D BYTES LENGTH:TOKENS...  ->  the number of floats of partial results,
//                                               then every split's work item and cost
#include "schedule.cc"

#include <cstdio>

namespace jattn_native {

static int given_rows = 192;

Kernels stand_in() {
  Kernels k{};
  k.name = "none";
  k.work_item_rows = [](const Problem&) { return given_rows; };
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
  given_rows = int(number(1));
  Problem p{};
  p.H = number(2), p.K = number(3), p.D = p.V = number(4), p.causal = true, p.S = 128;
  p.key.row_bytes = p.value.row_bytes = p.key.stride = p.value.stride = number(5);
  std::vector<int32_t> lens, starts{0};
  int64_t longest = 1;
  for (int i = 6; i < argc; ++i) {
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
  std::vector<WorkItem> items;
  for (int64_t b = 0; b < p.B; ++b)
    if (!plan(p, b, &job, &items)) return 1;
  split_items(items, &job);
  size_t floats = 0;
  for (const Split& split : job.splits)
    if (split.partial) floats += size_t((split.t1 - split.t0) * p.group() * (p.V + 2));
  std::printf("%zu\n", floats);
  const double bytes = double(2 * p.key.row_bytes);
  for (size_t i = 0; i < job.splits.size(); ++i) {
    const Split& split = job.splits[i];
    const double keys = double(split.k1 - split.k0), rows = double((split.t1 - split.t0) * p.group());
    std::printf("%d %.0f\n", job.item_of[i], keys * bytes * (1 + kernels().row_work * rows) + 2048);
  }
  return 0;
}

}  // namespace jattn_native

int main(int argc, char** argv) { return jattn_native::report(argc, argv); }
