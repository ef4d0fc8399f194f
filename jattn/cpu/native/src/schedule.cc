// A call as pieces of work, shared by threads.
//
//   for each sequence: NaN where its numbers break a promise, else
//     tiles of its tokens x KV heads, with the range of keys they see
//   unless whole tiles keep all threads busy, cut them by keys until every piece is at most a sixth of
//   a thread's share
//   threads take pieces in order; whoever ends a tile's last piece merges them
//
// The calling thread takes part, and waits only for pieces that some thread has begun: a task that
// starts late finds nothing left and touches none of the call's memory. So calls cannot wait for
// each other, whatever the pool's threads do.
#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "cores.h"
#include "semantics.h"
#if defined(JATTN_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jattn_native {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

#if defined(JATTN_X86)
// What the machine has and the system saves between threads. Asked of the processor itself: compilers
// answer `__builtin_cpu_supports` from a library of their own, which not all of them bring.
struct Features {
  bool avx2 = false, avx512 = false, bf16 = false, tiles = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    constexpr unsigned kFma = 1u << 12, kSaved = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    if ((c & (kFma | kSaved | kAvx | kF16c)) != (kFma | kSaved | kAvx | kF16c)) return;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;  // halves of registers
    avx2 = b >> 5 & 1;
    constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
    avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & (kF | kDq | kBw | kVl)) == (kF | kDq | kBw | kVl);
    const bool has_tiles = (d >> 22 & 1) && (d >> 24 & 1), has_vbmi = c >> 1 & 1;
    if (!avx512 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    bf16 = has_vbmi && (a >> 5 & 1);
#if defined(__linux__)
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of the state of tiles
    tiles = bf16 && has_tiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
  }
};
#endif

struct Choice {
  Kernels found;
  std::string all;

  Choice() {
    const char* wanted = std::getenv("JATTN_NATIVE_ISA");
    bool chosen = false;
    auto offer = [&](bool here, Kernels (*of)()) {
      if (!here) return;
      const Kernels k = of();
      all += all.empty() ? k.name : std::string(" ") + k.name;
      if (chosen || (wanted && *wanted && std::strcmp(wanted, k.name) != 0)) return;
      found = k;
      chosen = true;
    };
#if defined(JATTN_X86)
    const Features here;
    offer(here.tiles, kernels_amx);
    offer(here.bf16, kernels_avx512bf16);
    offer(here.avx512, kernels_avx512);
    offer(here.avx2, kernels_avx2);
#endif
    offer(true, kernels_base);
    if (!chosen) found = kernels_base();
  }
};

const Choice& choice() {
  static const Choice made;
  return made;
}

// Pieces [first, first + count) are one tile's, cut by its keys.
struct Cut {
  int first, count;
  std::atomic<int> left;
};

// Lets threads begin that were woken on this core.
void let_begin() {
#if defined(__linux__)
  sched_yield();
#endif
}

// What tasks share, those that come too late included.
struct Job {
  Cores cores;
  Problem p;
  std::vector<Piece> pieces;
  std::vector<int> cut_of;  // -1: whole
  std::unique_ptr<Cut[]> cuts;
  std::unique_ptr<float[]> partials;  // where they are too many to be kept
  std::vector<int32_t> columns;
  std::atomic<int> next{0}, done{0};

  void work() {
    const int count = int(pieces.size());
    const Kernels& kernels = jattn_native::kernels();
    Queue queue(pieces.data(), count, &next);
    for (int i = queue.begin(); i < count; i = queue.begin()) {
      kernels.run(p, pieces[i], queue);
      if (const int c = cut_of[i]; c >= 0 && cuts[c].left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        kernels.merge(p, &pieces[cuts[c].first], cuts[c].count);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Rows of the tokens [t0, t1): zeros that saw nothing, or NaN.
void fill(const Problem& p, int64_t t0, int64_t t1, bool broken) {
  t0 = most(t0, 0), t1 = least(t1, p.T);
  if (t1 <= t0) return;
  const int64_t first = t0 * p.H * p.V, count = (t1 - t0) * p.H * p.V;
  if (p.out_type == Format::f32) {
    std::fill_n(static_cast<float*>(p.out) + first, count, broken ? kNan : 0.0f);
  } else {
    const uint16_t nan = p.out_type == Format::bf16 ? 0x7fc0 : 0x7e00;
    std::fill_n(static_cast<uint16_t*>(p.out) + first, count, broken ? nan : uint16_t(0));
  }
  std::fill_n(p.lse + t0 * p.H, (t1 - t0) * p.H, broken ? kNan : kNothing);
}

// The columns of the table to read in a range of keys: null for all, or those selected, ascending.
struct Columns {
  const int32_t* at = nullptr;
  int64_t count = 0;
};

Columns selected(const Problem& p, int64_t b, Range keys, std::vector<int32_t>* kept) {
  const size_t begin = kept->size();
  for (int64_t i = 0; i < p.num_selected; ++i) {
    const int64_t column = p.selected[b * p.num_selected + i];
    if (keys.lo < keys.hi && column >= keys.lo / p.S && column <= (keys.hi - 1) / p.S) kept->push_back(int32_t(column));
  }
  std::sort(kept->begin() + begin, kept->end());
  kept->erase(std::unique(kept->begin() + begin, kept->end()), kept->end());
  return {kept->data() + begin, int64_t(kept->size() - begin)};
}

// Whether every id that the sequence's queries need is one of the pool's.
bool ids_fit(const Problem& p, int64_t b, Range keys, const Columns& columns) {
  if (keys.lo >= keys.hi) return true;
  const int32_t* table = p.tables + b * p.M;
  bool fit = true;
  if (p.selected) {
    for (int64_t i = 0; i < columns.count; ++i) fit &= table[columns.at[i]] >= 0 && table[columns.at[i]] < p.N;
  } else {
    for (int64_t i = keys.lo / p.S; i <= (keys.hi - 1) / p.S; ++i) fit &= table[i] >= 0 && table[i] < p.N;
  }
  return fit;
}

struct Tile {
  Piece piece;
  double cost;
};

// What a sequence adds to the tiles; false where its numbers break a promise.
bool plan(const Problem& p, int64_t b, Job* job, std::vector<Tile>* tiles) {
  const Sequence sequence(p, b);
  if (sequence.count > p.max_query_len || sequence.seq_len > p.M * p.S) return false;
  const Range all = sequence.hull(0, sequence.count);
  Columns columns;
  if (p.selected) columns = selected(p, b, all, &job->columns);
  if (!ids_fit(p, b, all, columns)) return false;
  const int64_t G = p.group();
  const int64_t step = most(1, kernels().tile_of_rows(p) / G);
  const double bytes = double(p.key.row_bytes + p.value.row_bytes);
  const double share = p.selected && all.lo < all.hi ? std::min(1.0, double(columns.count * p.S) / double(all.hi - all.lo)) : 1.0;
  // Late tiles first: they see most keys, and the last to run should be small. One head after
  // another: tiles that run together, or soon after, read the same keys.
  const size_t first = tiles->size();
  for (int64_t t0 = (sequence.count - 1) / step * step; t0 >= 0; t0 -= step) {
    const int64_t t1 = least(sequence.count, t0 + step);
    const Range keys = sequence.hull(t0, t1);
    // In bytes of memory traffic; a row's work on a key is worth about a sixth of its bytes.
    const double cost = share * double(keys.hi - keys.lo) * bytes * (1 + double((t1 - t0) * G) / 6) + 2048;
    tiles->push_back({{int32_t(b), 0, int32_t(t0), int32_t(t1), keys.lo, keys.hi, p.selected ? columns.at : nullptr,
                       columns.count, nullptr},
                      cost});
  }
  const size_t end = tiles->size();
  for (int32_t head = 1; head < p.K; ++head)
    for (size_t i = first; i < end; ++i) {
      tiles->push_back((*tiles)[i]);
      tiles->back().piece.head = head;
    }
  return true;
}

// Keys are cut at multiples of 128, or of 64 where those of one token take tens of microseconds. With many
// tokens the partial results of more pieces would cost more than they bring.
int64_t step_of(const Tile& tile) {
  const int64_t keys = tile.piece.k1 - tile.piece.k0;
  const bool heavy = tile.cost * 128 > double(1536 << 10) * double(keys);
  return heavy && tile.piece.t1 - tile.piece.t0 == 1 ? 64 : 128;
}

// Memory for partial results, not cleared: every piece writes its own. Few of them are kept by the thread
// that calls, and all pieces end before it returns: new memory would cost a page fault for every 4 KiB.
float* partials(size_t count, Job* job) {
  constexpr size_t kKept = 1 << 20;  // numbers
  static thread_local std::unique_ptr<float[]> kept;
  static thread_local size_t size = 0;
  if (count > kKept) {
    job->partials.reset(new float[count]);
    return job->partials.get();
  }
  if (count > size) {
    kept.reset(new float[count]);
    size = count;
  }
  return kept.get();
}

// Whether threads that take whole tiles in order all end at about the same time. With few tiles a
// thread, one that begins late would be waited for; of many, few are large enough to be cut.
bool even(const std::vector<Tile>& tiles, int threads) {
  if (tiles.size() < size_t(threads) * 4 || tiles.size() > size_t(threads) * 8) return false;
  std::priority_queue<double, std::vector<double>, std::greater<double>> ends;
  for (int i = 0; i < threads; ++i) ends.push(0);
  double total = 0, last = 0;
  for (const Tile& tile : tiles) {
    const double end = ends.top() + tile.cost;
    ends.pop();
    ends.push(end);
    total += tile.cost;
    last = std::max(last, end);
  }
  return last <= 1.03 * total / threads;
}

// The tiles as pieces, the large ones cut by their keys.
void cut(const std::vector<Tile>& tiles, int threads, double share, Job* job) {
  std::vector<size_t> offsets;
  std::vector<std::pair<int, int>> cuts;
  size_t floats = 0;
  const Problem& p = job->p;
  const bool whole = std::isinf(share) || even(tiles, threads);
  for (const Tile& tile : tiles) {
    const int64_t keys = tile.piece.k1 - tile.piece.k0, unit = step_of(tile);
    const int64_t parts = least(int64_t(std::ceil(tile.cost / share)), most(1, keys / unit));
    if (parts <= 1 || whole || tiles.size() > size_t(threads) * 24) {
      job->pieces.push_back(tile.piece), job->cut_of.push_back(-1), offsets.push_back(0);
      continue;
    }
    const int first = int(job->pieces.size());
    const int64_t step = (keys / parts + unit - 1) / unit * unit;
    for (int64_t k = tile.piece.k0; k < tile.piece.k1;) {
      Piece piece = tile.piece;
      piece.k0 = k;
      piece.k1 = least(tile.piece.k1, k / unit * unit + step);
      if (tile.piece.k1 - piece.k1 < step / 4) piece.k1 = tile.piece.k1;
      k = piece.k1;
      job->pieces.push_back(piece), job->cut_of.push_back(int(cuts.size())), offsets.push_back(floats);
      floats += size_t((piece.t1 - piece.t0) * p.group()) * size_t(p.V + 2);
    }
    cuts.push_back({first, int(job->pieces.size()) - first});
  }
  float* const kept = partials(floats, job);
  job->cuts = std::make_unique<Cut[]>(cuts.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    job->cuts[i].first = cuts[i].first, job->cuts[i].count = cuts[i].second;
    job->cuts[i].left.store(cuts[i].second, std::memory_order_relaxed);
  }
  for (size_t i = 0; i < job->pieces.size(); ++i)
    if (job->cut_of[i] >= 0) job->pieces[i].partial = kept + offsets[i];
}

}  // namespace

const Kernels& kernels() { return choice().found; }
const char* instruction_sets() { return choice().all.c_str(); }

bool moves_off_a_taken_core() {
  Cores cores;
  cores.take();
  cores.settle();
  return cores.count() == 2;
}

void attend(const Problem& p, int threads, const Spawn& spawn) {
  auto job = std::make_shared<Job>();
  job->p = p;
  job->columns.reserve(p.selected ? size_t(p.B * p.num_selected) : 0);
  std::vector<Tile> tiles;
  double total = 0;
  bool ordered = p.starts[0] == 0 && p.starts[p.B] <= p.T;
  for (int64_t b = 0; b < p.B; ++b) ordered &= p.starts[b] <= p.starts[b + 1];
  // Then there is no saying which token is whose.
  if (!ordered) return fill(p, 0, p.T, true);
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t begin = p.starts[b], end = p.starts[b + 1];
    const size_t before = tiles.size();
    if (begin == end) continue;
    if (!plan(p, b, job.get(), &tiles)) fill(p, begin, end, true);
    for (size_t i = before; i < tiles.size(); ++i) total += tiles[i].cost;
  }
  fill(p, p.starts[p.B], p.T, false);
  // Another thread begins a microsecond later if it still looks for work, and tens of them if it must be
  // woken: only where there is more to do.
  const bool alone = threads <= 1 || !spawn || total < double(192 << 10);
  cut(tiles, threads, alone ? std::numeric_limits<double>::infinity() : total / (threads * 6), job.get());
  const int count = int(job->pieces.size());
  if (!alone) {
    job->cores.take();
    for (int i = 1; i < least(threads, count); ++i)
      spawn([job] {
        if (job->next.load(std::memory_order_relaxed) < int(job->pieces.size())) job->cores.settle();
        job->work();
      });
    let_begin();
  }
  job->work();
  while (job->done.load(std::memory_order_acquire) < count) {
#if defined(JATTN_X86)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace jattn_native
