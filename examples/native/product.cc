// y = x w^T: tokens x [T, I] times a linear layer's weight w [O, I], as a checkpoint has it. Of x only the first
// `count` rows are multiplied, and y has zeros for the others: padding costs little more than to write those.
//
// A work item is 32 outputs and a group of tokens. Threads take the work items of a call in order:
//
//   lay out the group's tokens so that 16 (AVX2: 8) fill a register   each thread for itself
//   for every 1 to 3 registers of tokens: sums of 32 outputs x tokens, over all of I
//   transpose the sums, round, store                                  y [T, O], or [O, T] if `transposed`
//
//   bfloat16, by the matrix unit (AMX)        sums [16 outputs, 16 tokens] += w [16, 32] x [32, 16]:
//                                             16 rows of the weight in place, tokens as pairs
//   in AVX-512's registers                    8 outputs, each of whose words is broadcast, and up
//                                             to 48 tokens; a word is a float32, or a pair of bfloat16
//   the same, up to 8 tokens                  2 outputs, of whose words 16 fill a register, whose lanes
//                                             are added up at the end: nearly as fast as memory; where
//                                             the tokens do not fit the first-level cache, some
//                                             words of all outputs first
//   in AVX2's                                 4 outputs and up to 24 tokens, 8 numbers in a register,
//                                             of bfloat16 as float32
//   the same, up to 4 tokens (8 in bfloat16)  3 outputs and 4 tokens, as above
//
// So a group of tokens reads every weight once, in place, on the core that multiplies with it. While a
// thread works on an item, it prefetches the weights of its next one: 32 rows, one after another. With
// few tokens in AVX-512's registers the stream of prefetches simply continues into the next item.
//
// The calling thread works too, and waits only for work items that some thread has begun.
//
// Of mixtures of experts, w [E, O, I], each matrix has a run of rows of x: one product after another.
//
// Tiles, transposition and threads are those of jattn's attention kernel, whose sources are in its package.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cores.h"
#if defined(__AVX512F__)
#include "avx512.h"
#else
#include "avx2.h"
#endif
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jattn_native {
namespace {

// What threads share, including those that start too late.
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
      if (group != filled) fill(p, panel, first, here), filled = group;
      // The next work item is taken early, to prefetch it; not near the end, where others would wait for it.
      int64_t following = next.load(std::memory_order_relaxed);
      const bool early = following + 2 * threads < count();
      following = early ? next.fetch_add(1, std::memory_order_relaxed) : following + threads - 1;  // likely
      const char* next_weights = p.w + following % blocks * kOutputs * p.row_bytes;
      multiply(p, panel, item % blocks * kOutputs, first, here,
               {next_weights, next_weights + (following < count() ? kOutputs * p.row_bytes : 0), 0});
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

// What is wrong with a call's arguments; empty if nothing is. w is one matrix, or `several`.
std::string mismatches(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const ffi::AnyBuffer& y, bool several,
                       bool transposed) {
  std::string found;
  auto must = [&found](bool holds, const std::string& text) {
    if (!holds) found += (found.empty() ? "" : "; ") + text;
  };
  const ffi::DataType type = x.element_type();
  must(type == ffi::F32 || type == ffi::BF16, "x is " + name_of(type) + ", but must be float32 or bfloat16");
  must(w.element_type() == type, "w is " + name_of(w.element_type()) + ", but must be " + name_of(type) + " as x is");
  const bool rounds = type == ffi::BF16 && !transposed;
  must(y.element_type() == ffi::F32 || (rounds && y.element_type() == type),
       "y is " + name_of(y.element_type()) + ", but must be float32" + (rounds ? " or bfloat16" : ""));
  must(x.dimensions().size() == 2, "x is " + shape_of(x) + ", but must be [T, I]");
  must(w.dimensions().size() == (several ? 3 : 2),
       "w is " + shape_of(w) + ", but must be " + (several ? "[E, O, I]" : "[O, I]"));
  if (!found.empty()) return found;
  const auto of_w = w.dimensions().last(2);
  const int64_t T = x.dimensions()[0], I = x.dimensions()[1], O = of_w[0];
  const int64_t fit = kLine / (type == ffi::BF16 ? 2 : 4);
  must(of_w[1] == I, "w has I = " + std::to_string(of_w[1]) + " inputs, but must have x's " + std::to_string(I));
  must(I % fit == 0, "x has I = " + std::to_string(I) + " inputs, but must have a multiple of " + std::to_string(fit));
  must(O % kOutputs == 0,
       "w has O = " + std::to_string(O) + " outputs, but must have a multiple of " + std::to_string(kOutputs));
  const int64_t rows = transposed ? O : T, columns = transposed ? T : O;
  must(y.dimensions().size() == 2 && y.dimensions()[0] == rows && y.dimensions()[1] == columns,
       "y is " + shape_of(y) + ", but must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  return found;
}

// A product of all rows of x with the first matrix of w.
Problem problem_of(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, ffi::AnyBuffer& y, bool tiles, bool transposed) {
  Problem p;
  p.x = static_cast<const char*>(x.untyped_data()), p.w = static_cast<const char*>(w.untyped_data());
  p.y = y.untyped_data();
  p.T = p.rows = x.dimensions()[0], p.O = w.dimensions().last(2)[0];
  p.pairs = x.element_type() == ffi::BF16, p.rounds = y.element_type() == ffi::BF16, p.transposed = transposed;
  p.tiled = kTiles && p.pairs && tiles;
  p.row_bytes = x.dimensions()[1] * (p.pairs ? 2 : 4);
  return p;
}

// Zeros for the rows of y that are padding.
void clear_padding(const Problem& p) {
  char* const to = static_cast<char*>(p.y);
  const int64_t size = p.rounds ? 2 : 4, left = (p.rows - p.T) * size;
  if (!left) return;
  if (!p.transposed) std::memset(to + p.T * p.O * size, 0, left * p.O);
  else for (int64_t o = 0; o < p.O; ++o) std::memset(to + (o * p.rows + p.T) * size, 0, left);
}

// One product, by the pool's threads and the calling one, which does `meanwhile` as they begin.
template <class Meanwhile> void run(ffi::ThreadPool& pool, const Problem& p, Meanwhile meanwhile) {
  if (!p.T || !p.O || !p.row_bytes) return meanwhile();
  auto job = std::make_shared<Job>();
  job->p = p;
  const int64_t fit = std::max<int64_t>(kPanel / p.token_bytes() / (3 * kWidth), 1) * 3 * kWidth;
  job->groups = (p.T + fit - 1) / fit;
  job->tokens = ((p.T + job->groups - 1) / job->groups + kWidth - 1) / kWidth * kWidth;
  job->blocks = p.O / kOutputs;
  const bool alone = p.O * p.row_bytes < kAlone;
  job->threads = alone ? 1 : int(std::min<int64_t>(pool.num_threads(), job->count()));
  for (int i = 1; i < job->threads; ++i) pool.Schedule([job] { job->work(); });
  if (job->threads > 1) sched_yield();  // lets them begin
  meanwhile();
  job->work();
  wait_for(job->done, job->count());
}

// `count`: rows of x that are no padding. `tiles`: the matrix unit multiplies bfloat16.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::BufferR0<ffi::S32> count,
                   ffi::Result<ffi::AnyBuffer> y, int64_t tiles, int64_t transposed) {
  const std::string wrong = mismatches(x, w, *y, false, transposed);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("the product x w^T: " + wrong);
  Problem p = problem_of(x, w, *y, tiles, transposed);
  p.T = p.row_bytes ? std::clamp<int64_t>(*count.typed_data(), 0, p.rows) : 0;
  run(pool, p, [&] { clear_padding(p); });
  return ffi::Error::Success();
}

// y = x w_e^T for each of the runs of rows, of `counts` rows each; what comes after the last is padding.
ffi::Error grouped(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::BufferR1<ffi::S32> counts,
                   ffi::Result<ffi::AnyBuffer> y, int64_t tiles) {
  std::string wrong = mismatches(x, w, *y, true, false);
  if (wrong.empty() && counts.dimensions()[0] != w.dimensions()[0])
    wrong = "counts has " + std::to_string(counts.dimensions()[0]) + " runs, but must have one for each of w's " +
            std::to_string(w.dimensions()[0]) + " matrices";
  if (!wrong.empty()) return ffi::Error::InvalidArgument("the products x w_e^T: " + wrong);
  const Problem all = problem_of(x, w, *y, tiles, false);
  const int64_t y_bytes = all.O * (all.rounds ? 2 : 4);
  int64_t begin = 0;
  for (int64_t e = 0; all.row_bytes && e < counts.dimensions()[0]; ++e) {
    Problem p = all;
    p.T = p.rows = std::clamp<int64_t>(counts.typed_data()[e], 0, all.rows - begin);
    p.x += begin * p.row_bytes, p.w += e * p.O * p.row_bytes;
    p.y = static_cast<char*>(p.y) + begin * y_bytes;
    run(pool, p, [] {});
    begin += p.T;
  }
  std::memset(static_cast<char*>(all.y) + begin * y_bytes, 0, (all.rows - begin) * y_bytes);
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
        .Arg<ffi::BufferR0<ffi::S32>>()
        .Ret<ffi::AnyBuffer>()
        .Attr<int64_t>("tiles")
        .Attr<int64_t>("transposed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    examples_grouped, jattn_native::grouped,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::BufferR1<ffi::S32>>()
        .Ret<ffi::AnyBuffer>()
        .Attr<int64_t>("tiles"));
#pragma GCC visibility pop

// Whether the system lets this process use the matrix unit.
extern "C" __attribute__((visibility("default"))) int examples_product_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of the state of tiles
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
