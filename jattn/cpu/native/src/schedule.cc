// Divides a call into work items and splits, and shares them among threads.
//
//   for each sequence: NaN if its numbers break a promise, else
//     work items: some of its tokens x one KV head, with the range of keys they see
//   unless whole work items keep all threads busy, split them by keys until every split is at most a
//   sixth of a thread's share
//   threads take splits in order; the thread that finishes a work item's last split merges its splits
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
// What the processor has and the system saves between threads. Read by cpuid, because `__builtin_cpu_supports` needs
// a library of the compiler that not every compiler brings.
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
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM for AMX tile data
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

// Splits [first, first + count) of one work item, which are merged when none is left.
struct PendingMerge {
  int first, count;
  std::atomic<int> left;
};

// Lets threads that were woken on this core begin.
void let_begin() {
#if defined(__linux__)
  sched_yield();
#endif
}

// What tasks share, including those that start too late.
struct Job {
  Cores cores;
  Problem p;
  std::vector<Split> splits;
  std::vector<int> merge_of;  // index in `merges`; -1: the work item is not split
  std::unique_ptr<PendingMerge[]> merges;
  std::unique_ptr<float[]> partials;  // if they are too many for the thread to keep
  std::vector<int32_t> columns;
  std::atomic<int> next{0}, done{0};

  void work() {
    const int count = int(splits.size());
    const Kernels& kernels = jattn_native::kernels();
    Queue queue(splits.data(), count, &next);
    for (int i = queue.begin(); i < count; i = queue.begin()) {
      kernels.run(p, splits[i], queue);
      if (const int m = merge_of[i]; m >= 0 && merges[m].left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        kernels.merge(p, &splits[merges[m].first], merges[m].count);
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
};

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
  for (int64_t t0 = (sequence.count - 1) / step * step; t0 >= 0; t0 -= step) {
    const int64_t t1 = least(sequence.count, t0 + step);
    const Range keys = sequence.hull(t0, t1);
    // In bytes of memory traffic; a row's work on a key counts as about a sixth of the key's bytes.
    const double cost = share * double(keys.hi - keys.lo) * bytes * (1 + double((t1 - t0) * G) / 6) + 2048;
    items->push_back({{int32_t(b), 0, int32_t(t0), int32_t(t1), keys.lo, keys.hi, p.selected ? columns.at : nullptr,
                       columns.count, nullptr},
                      cost});
  }
  const size_t end = items->size();
  for (int32_t head = 1; head < p.K; ++head)
    for (size_t i = first; i < end; ++i) {
      items->push_back((*items)[i]);
      items->back().whole.head = head;
    }
  return true;
}

// Splits start at multiples of 128 keys, or of 64 if those of one token take tens of microseconds. With many tokens the
// partial results of more splits would cost more than they gain.
int64_t split_unit(const WorkItem& item) {
  const int64_t keys = item.whole.k1 - item.whole.k0;
  const bool heavy = item.cost * 128 > double(1536 << 10) * double(keys);
  return heavy && item.whole.t1 - item.whole.t0 == 1 ? 64 : 128;
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

// Whether threads that take whole work items in order all end at about the same time. With few work items per thread,
// the others would wait for a thread that begins late; of many, few are large enough to be split.
bool even(const std::vector<WorkItem>& items, int threads) {
  if (items.size() < size_t(threads) * 4 || items.size() > size_t(threads) * 8) return false;
  std::priority_queue<double, std::vector<double>, std::greater<double>> ends;
  for (int i = 0; i < threads; ++i) ends.push(0);
  double total = 0, last = 0;
  for (const WorkItem& item : items) {
    const double end = ends.top() + item.cost;
    ends.pop();
    ends.push(end);
    total += item.cost;
    last = std::max(last, end);
  }
  return last <= 1.03 * total / threads;
}

// Turns work items into splits: large items into several, by their keys, and others into one.
void split_items(const std::vector<WorkItem>& items, int threads, double share, Job* job) {
  std::vector<size_t> offsets;
  std::vector<std::pair<int, int>> merges;
  size_t floats = 0;
  const Problem& p = job->p;
  const bool keep_whole = std::isinf(share) || even(items, threads);
  for (const WorkItem& item : items) {
    const Split& whole = item.whole;
    const int64_t keys = whole.k1 - whole.k0, unit = split_unit(item);
    const int64_t num_splits = least(int64_t(std::ceil(item.cost / share)), most(1, keys / unit));
    if (num_splits <= 1 || keep_whole || items.size() > size_t(threads) * 24) {
      job->splits.push_back(whole), job->merge_of.push_back(-1), offsets.push_back(0);
      continue;
    }
    const int first = int(job->splits.size());
    const int64_t step = (keys / num_splits + unit - 1) / unit * unit;
    for (int64_t k = whole.k0; k < whole.k1;) {
      Split split = whole;
      split.k0 = k;
      split.k1 = least(whole.k1, k / unit * unit + step);
      if (whole.k1 - split.k1 < step / 4) split.k1 = whole.k1;
      k = split.k1;
      job->splits.push_back(split), job->merge_of.push_back(int(merges.size())), offsets.push_back(floats);
      floats += size_t((split.t1 - split.t0) * p.group()) * size_t(p.V + 2);
    }
    merges.push_back({first, int(job->splits.size()) - first});
  }
  float* const kept = partials(floats, job);
  job->merges = std::make_unique<PendingMerge[]>(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    job->merges[i].first = merges[i].first, job->merges[i].count = merges[i].second;
    job->merges[i].left.store(merges[i].second, std::memory_order_relaxed);
  }
  for (size_t i = 0; i < job->splits.size(); ++i)
    if (job->merge_of[i] >= 0) job->splits[i].partial = kept + offsets[i];
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
  const bool alone = threads <= 1 || !spawn || total < double(192 << 10);
  split_items(items, threads, alone ? std::numeric_limits<double>::infinity() : total / (threads * 6), job.get());
  const int count = int(job->splits.size());
  if (!alone) {
    job->cores.take();
    for (int i = 1; i < least(threads, count); ++i)
      spawn([job] {
        if (job->next.load(std::memory_order_relaxed) < int(job->splits.size())) job->cores.settle();
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
