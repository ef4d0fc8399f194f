// Divides a call into work items and splits, and shares them among threads.
//
//   for each sequence: NaN if its numbers break a promise, else
//     work items: some of its tokens x one KV head, with the range of keys they see
//   split large work items by keys: only the sequence decides how, so its result has the same bits in every batch
//   threads take one work item after another, then help with others' splits; whoever finishes an item's last split
//   merges them
//
// The calling thread works too, and waits only for splits that some thread has begun: a task that starts
// late finds nothing left and touches none of the call's memory. So calls cannot wait for each other,
// whatever the pool's threads do.
#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "semantics.h"
#if defined(JATTN_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jattn_native {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

#if defined(JATTN_X86)
// What the processor has and the system saves between threads. Read by cpuid, because `__builtin_cpu_supports` needs
// a runtime library that not every compiler ships.
struct Features {
  bool avx2 = false, avx512 = false, bf16 = false, tiles = false, intersect = false;

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
    intersect = avx512 && (d >> 8 & 1);
    const bool has_tiles = (d >> 22 & 1) && (d >> 24 & 1), has_vbmi = c >> 1 & 1;
    if (!avx512 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    bf16 = has_vbmi && (a >> 5 & 1);
#if defined(__linux__)
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM for AMX tile data
    tiles = bf16 && has_tiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
  }
};
#endif

#if defined(JATTN_ARM)
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kHwcap2 = 26, kBf16 = 1 << 14;  // AT_HWCAP2, HWCAP2_BF16
  return getauxval(kHwcap2) & kBf16;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) && found;
#else
  return false;
#endif
}
#endif

struct Choice {
  Kernels found;
  // On two cores of a Zen 5, which VP2INTERSECT tells from a Zen 4, decode of one long row takes 0.83 to 0.95 of the
  // time if short runs (8 to 32 KiB) are not interleaved, the same for runs of 128 KiB, and 1.1 for runs of 256 KiB.
  int64_t interleaved_run = 0;  // bytes
  std::string all, left_out;

  Choice() {
    const char* wanted = std::getenv("JATTN_NATIVE_ISA");
    bool chosen = false;
    auto offer = [&](bool here, Kernels (*of)()) {
      if (!here) return;
      const Kernels k = of();
      if (!k.name) return;  // the compiler does not know it
      if (!k.run && chosen) return;  // an older one: nothing is missed
      std::string& names = k.run ? all : left_out;
      names += names.empty() ? k.name : std::string(" ") + k.name;
      if (!k.run || chosen || (wanted && *wanted && std::strcmp(wanted, k.name) != 0)) return;
      found = k;
      chosen = true;
    };
#if defined(JATTN_X86)
    const Features here;
    if (here.intersect) interleaved_run = 256 << 10;
    offer(here.tiles, kernels_amx);
    offer(here.bf16, kernels_avx512bf16);
    offer(here.avx512, kernels_avx512);
    offer(here.avx2, kernels_avx2);
#elif defined(JATTN_ARM)
    offer(has_bf16(), kernels_bf16);
#endif
    offer(true, kernels_base);
    if (!chosen) found = kernels_base();
  }
};

const Choice& choice() {
  static const Choice made;
  return made;
}

// What tasks share, including those that start too late.
struct Job {
  Cores cores;
  Problem p;
  std::vector<Split> splits;
  std::vector<int> item_of;  // of each split
  std::unique_ptr<Progress[]> items;
  int num_items = 0;
  std::unique_ptr<float[]> partials;  // if they are too many for the thread to keep
  std::vector<int32_t> columns;
  std::atomic<int> begun{0}, done{0};  // work items, splits
  std::atomic<bool> failed{false};     // a thread has no memory for its work, so the others stop

  void run(const Kernels& kernels, int i, Queue& queue) {
    kernels.run(p, splits[i], queue);
    if (!splits[i].partial) return;
    Progress& item = items[item_of[i]];
    if (item.left.fetch_sub(1, std::memory_order_acq_rel) == 1) kernels.merge(p, &splits[item.first], item.count);
  }
  void work() {
    const Kernels& kernels = jattn_native::kernels();
    Queue queue(splits.data(), items.get(), num_items, &begun);
    for (int i = queue.begin(); i >= 0; i = queue.begin()) {
      try {
        if (!failed.load(std::memory_order_relaxed)) run(kernels, i, queue);
      } catch (const std::bad_alloc&) {
        failed.store(true, std::memory_order_relaxed);
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Fills the rows of tokens [t0, t1) with NaN if `broken`, else with the result of seeing no keys.
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

// The table columns to read in a range of keys: null for all, or the selected ones, ascending.
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

// Whether every block id that the sequence's queries need is in the pool.
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

struct WorkItem {
  Split whole;  // with all of its keys
  double cost;
  double split_cost;  // what a split of it may cost
};

// What a split of `item` may cost; it does not depend on other sequences or on threads. One token's keys are split as
// if its sequence were alone on a few threads, into parts that take a thread some tens of microseconds; a prompt's only
// if it has few work items. Partial results, which are written and read again, stay a small share.
double split_cost(const Problem& p, const WorkItem& item, double sequence_cost, size_t num_items) {
  constexpr double kLeast = 256 << 10, kMost = 1024 << 10;
  constexpr size_t kMany = 64;
  const int32_t tokens = item.whole.t1 - item.whole.t0;
  const double partial = double(tokens * p.group() * (p.V + 2) * 4), least = std::max(kLeast, 16 * partial);
  if (tokens == 1) return std::min(std::max(sequence_cost / 4, least), std::max(kMost, 64 * partial));
  return num_items >= kMany ? std::numeric_limits<double>::infinity() : std::max(sequence_cost / kMany, least);
}

// Adds a sequence's work items; false if its numbers break a promise.
bool plan(const Problem& p, int64_t b, Job* job, std::vector<WorkItem>* items) {
  const Sequence sequence(p, b);
  if (sequence.count > p.max_query_len || sequence.seq_len > p.M * p.S) return false;
  const Range all = sequence.hull(0, sequence.count);
  Columns columns;
  if (p.selected) columns = selected(p, b, all, &job->columns);
  if (!ids_fit(p, b, all, columns)) return false;
  const int64_t G = p.group();
  const int64_t step = most(1, kernels().work_item_rows(p) / G);
  const double bytes = double(p.key.row_bytes + p.value.row_bytes);
  const double share = p.selected && all.lo < all.hi
                           ? std::min(1.0, double(columns.count * p.S) / double(all.hi - all.lo))
                           : 1.0;
  // Late tokens first: they see the most keys, and the last work items to run should be small. One head after
  // another: work items that run at the same time, or soon after, read the same keys.
  const size_t first = items->size();
  double sequence_cost = 0;
  for (int64_t t0 = (sequence.count - 1) / step * step; t0 >= 0; t0 -= step) {
    const int64_t t1 = least(sequence.count, t0 + step);
    const Range keys = sequence.hull(t0, t1);
    // In bytes of memory traffic.
    const double work = 1 + kernels().row_work * double((t1 - t0) * G);
    const double cost = share * double(keys.hi - keys.lo) * bytes * work + 2048;
    items->push_back({{int32_t(b), 0, int32_t(t0), int32_t(t1), keys.lo, keys.hi, p.selected ? columns.at : nullptr,
                       columns.count, nullptr},
                      cost,
                      0});
    sequence_cost += cost * double(p.K);
  }
  const size_t end = items->size();
  for (size_t i = first; i < end; ++i)
    (*items)[i].split_cost = split_cost(p, (*items)[i], sequence_cost, (end - first) * size_t(p.K));
  for (int32_t head = 1; head < p.K; ++head)
    for (size_t i = first; i < end; ++i) {
      items->push_back((*items)[i]);
      items->back().whole.head = head;
    }
  return true;
}

// Splits of one token start at multiples of 128 keys, or of 64 if those take tens of microseconds; of a prompt at
// multiples of 512, because the partial results of more splits would cost more than they gain.
int64_t split_unit(const WorkItem& item) {
  if (item.whole.t1 - item.whole.t0 > 1) return 512;
  return item.cost * 128 > double(1536 << 10) * double(item.whole.k1 - item.whole.k0) ? 64 : 128;
}

// Memory for partial results, not cleared: every split writes its own. If they are few, the calling thread keeps the
// memory for its next call, because new memory costs a page fault for every 4 KiB; all splits end before it returns.
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

// Turns work items into splits: large items into several, by their keys, and others into one.
void split_items(const std::vector<WorkItem>& items, Job* job) {
  constexpr size_t kWhole = SIZE_MAX;
  std::vector<size_t> offsets;  // of partial results
  size_t floats = 0;
  const Problem& p = job->p;
  job->num_items = int(items.size());
  job->items = std::make_unique<Progress[]>(items.size());
  for (int i = 0; i < job->num_items; ++i) {
    const WorkItem& item = items[i];
    const Split& whole = item.whole;
    const int64_t keys = whole.k1 - whole.k0, unit = split_unit(item);
    const int64_t num_splits = least(int64_t(std::ceil(item.cost / item.split_cost)), most(1, keys / unit));
    const int64_t step = (keys / most(1, num_splits) + unit - 1) / unit * unit;
    const int first = int(job->splits.size());
    int64_t k = whole.k0;
    do {
      Split split = whole;
      split.k0 = k;
      if (num_splits > 1) {
        split.k1 = least(whole.k1, k / unit * unit + step);
        if (whole.k1 - split.k1 < step / 4) split.k1 = whole.k1;
      }
      k = split.k1;
      const bool alone = split.k0 == whole.k0 && k == whole.k1;
      job->splits.push_back(split), job->item_of.push_back(i), offsets.push_back(alone ? kWhole : floats);
      if (!alone) floats += size_t((split.t1 - split.t0) * p.group()) * size_t(p.V + 2);
    } while (k < whole.k1);
    Progress& progress = job->items[i];
    progress.first = first, progress.count = int(job->splits.size()) - first;
    progress.left.store(progress.count, std::memory_order_relaxed);
  }
  float* const kept = partials(floats, job);
  for (size_t i = 0; i < job->splits.size(); ++i)
    if (offsets[i] != kWhole) job->splits[i].partial = kept + offsets[i];
}

}  // namespace

void out_of_memory() { throw std::bad_alloc(); }

const Kernels& kernels() { return choice().found; }
const char* instruction_sets() { return choice().all.c_str(); }
const char* left_out() { return choice().left_out.c_str(); }

bool moves_off_a_taken_core() {
  Cores cores;
  cores.take();
  cores.settle();
  return cores.count() == 2;
}

void attend(const Problem& p, int threads, const Spawn& spawn) {
  auto job = std::make_shared<Job>();
  job->p = p;
  job->p.interleaved_run = choice().interleaved_run;
  job->columns.reserve(p.selected ? size_t(p.B * p.num_selected) : 0);
  std::vector<WorkItem> items;
  double total = 0;
  bool ordered = p.starts[0] == 0 && p.starts[p.B] <= p.T;
  for (int64_t b = 0; b < p.B; ++b) ordered &= p.starts[b] <= p.starts[b + 1];
  // Otherwise nothing says which sequence a token belongs to.
  if (!ordered) return fill(p, 0, p.T, true);
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t begin = p.starts[b], end = p.starts[b + 1];
    const size_t before = items.size();
    if (begin == end) continue;
    if (!plan(p, b, job.get(), &items)) fill(p, begin, end, true);
    for (size_t i = before; i < items.size(); ++i) total += items[i].cost;
  }
  fill(p, p.starts[p.B], p.T, false);
  // Another thread begins a microsecond later if it is still looking for work, and tens of microseconds later if it
  // must be woken: worth it only for larger calls.
  const bool alone = threads <= 1 || !spawn || total < kernels().least_shared;
  split_items(items, job.get());
  const int count = int(job->splits.size());
  work_together(job, alone ? 1 : least(threads, count), count, spawn);
  job->partials.reset();  // a task that starts late keeps the job, but reads no results
  if (job->failed.load(std::memory_order_relaxed)) out_of_memory();
}

}  // namespace jattn_native
