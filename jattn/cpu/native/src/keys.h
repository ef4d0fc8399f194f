// The keys of a split, one kv tile at a time: where each key lies, the scales stored with it, and the memory to
// prefetch while the kernel works on the previous kv tile.
//
//   for each kv tile: from the next key that is selected and visible to some row, up to `want` keys that follow it
//     for each block: its id from the table, between 0 and N - 1
//       the rows of its keys: where they are in the pool, and their scales per block
//       the lines of both pools go to the list of what to prefetch
//     scales per token are read when the kernel gets to the kv tile
#pragma once
#include <utility>

#include "numbers.h"
#include "semantics.h"

namespace jattn_native {
namespace {

constexpr int kMostKeys = 128;  // of a kv tile
constexpr int kFewKeys = 32;    // of a kv tile where few rows share a key, so that memory is the bottleneck

// Ranges of memory to prefetch, a few lines at a time, with the lines of several ranges interleaved: memory
// responds sooner when several pages are read at once.
struct Prefetcher {
  // On one core of a Zen 3, decode of one row takes 0.92 to 0.97 of the time with eight rather than four.
  static constexpr int kStreams = kRegisters == 32 ? 4 : 8;
  static constexpr int64_t kLeastPart = 64;  // lines: a page
  struct Lines {
    const char* at;
    int64_t count;
  };
  Lines ranges[2 * kMostKeys];
  int most_streams = kStreams;  // ranges at once
  int size = 0, next = 0;      // ranges before `next` are done
  int streams = 0;             // ranges from `next` on that are being prefetched
  int64_t done = 0, last = 0;  // lines done of each of these; lines of the shortest
  int64_t credit = 0;          // lines granted but not yet prefetched

  void clear() { size = next = streams = 0, done = last = credit = 0; }
  int64_t left() const {  // in lines
    int64_t lines = -streams * done;
    for (int i = next; i < size; ++i) lines += ranges[i].count;
    return lines;
  }
  int64_t share(int64_t parts) const { return (left() + parts - 1) / parts; }
  void add(const char* from, int64_t bytes) {
    const int64_t skew = reinterpret_cast<uintptr_t>(from) % 64;
    ranges[size++] = {from - skew, (bytes + skew + 63) / 64};
  }
  INLINE void prefetch_some(int64_t lines) {
    for (credit += lines; credit > 0 && (done < last || begin()); ++done) {
      const Lines* const from = ranges + next;
      int i = 0;
      for (; i + 4 <= streams; i += 4) UNROLL for (int j = 0; j < 4; ++j) prefetch(from[i + j].at + done * 64);
      for (; i < streams; ++i) prefetch(from[i].at + done * 64);
      credit -= streams;
    }
  }
  // Divides long ranges where there are fewer than can be interleaved: on two cores of a Xeon with AMX, decode from
  // blocks of 128 takes 0.91 to 0.96 of the time. With parts of less than 4 KiB it would take longer.
  void divide() {
    for (int i = next; i < size && size - next < most_streams && size < 2 * kMostKeys; ++i) {
      const int64_t first = ranges[i].count / 2;
      if (first < kLeastPart) continue;
      ranges[size++] = {ranges[i].at + first * 64, ranges[i].count - first};
      ranges[i].count = first;
    }
  }
  // Moves finished ranges before `next` and starts others; false if none are left.
  __attribute__((noinline)) bool begin() {
    for (int i = next, end = next + streams; i < end; ++i) {
      ranges[i] = {ranges[i].at + done * 64, ranges[i].count - done};
      if (!ranges[i].count) std::swap(ranges[i], ranges[next++]);
    }
    if (kTiles) divide();
    streams = size - next < most_streams ? size - next : most_streams;
    done = last = 0;
    for (int i = 0; i < streams; ++i) last = i && last < ranges[next + i].count ? last : ranges[next + i].count;
    return streams > 0;
  }
};

// The keys of a kv tile, at consecutive positions. In a tree, either all are query tokens of the sequence or none is.
struct Keys {
  int count = 0;
  int64_t first = 0;
  int64_t row[kMostKeys];  // in the pool
  const char* k[kMostKeys];
  const char* v[kMostKeys];
  alignas(64) float k_scale[kMostKeys], k_zero[kMostKeys], v_scale[kMostKeys], v_zero[kMostKeys];
  Prefetcher prefetcher;

  bool in_tree(int64_t first_in_tree) const { return first >= first_in_tree; }
};

// Reads the keys of a split in order.
struct Reader {
  const Problem& p;
  const Split& split;
  int64_t key, first_in_tree, column = 0;
  bool listed;  // whether kv tiles come with a list of their memory
  bool scaled;  // whether keys or values have scales or zero points per block, token or group

  Reader(const Problem& problem, const Split& split, const Sequence& sequence, bool listed = false)
      : p(problem),
        split(split),
        key(split.k0),
        first_in_tree(p.tree ? sequence.first() : INT64_MAX),
        listed(listed),
        scaled(p.key.scaled() || p.value.scaled()) {}

  // Moves to the next key in a column to read; false if there is none.
  bool seek() {
    if (!split.columns) return key < split.k1;
    while (column < split.num_columns && split.columns[column] < key / p.S) ++column;
    if (column == split.num_columns) return false;
    key = most(key, split.columns[column] * p.S);
    return key < split.k1;
  }

  // Reads the next kv tile, of at most `want` keys.
  void next(int want, Keys* keys) {
    keys->count = 0;
    keys->prefetcher.clear();
    while (keys->count < want && seek()) {
      if (keys->count == 0) keys->first = key;
      if (key != keys->first + keys->count || (keys->first < first_in_tree && key >= first_in_tree)) return;
      const int64_t in_block = key % p.S;
      int64_t n = least(least(p.S - in_block, split.k1 - key), want - keys->count);
      if (key < first_in_tree) n = least(n, first_in_tree - key);
      int64_t block = p.tables[split.b * p.M + key / p.S];
      block = block < 0 ? 0 : block < p.N ? block : p.N - 1;  // never read outside the pool
      add(block, in_block, int(n), keys);
      key += n;
    }
  }

  void add(int64_t block, int64_t in_block, int n, Keys* keys) {
    const int64_t row = p.row(block, split.head, in_block), step = p.row_step();
    const int at = keys->count;
    const int64_t k_step = step * p.key.stride, v_step = step * p.value.stride;
    const char *k = p.key.words + row * p.key.stride, *v = p.value.words + row * p.value.stride;
    int64_t one = row;
    for (int i = at; i < at + n; ++i, one += step, k += k_step, v += v_step)
      keys->row[i] = one, keys->k[i] = k, keys->v[i] = v;
    if (listed) {
      list(p.key, row, step, n, &keys->prefetcher);
      if (!p.values_in_keys) list(p.value, row, step, n, &keys->prefetcher);
    }
    if (scaled) {
      block_scales(p.key, block, n, keys->k_scale + at), block_scales(p.value, block, n, keys->v_scale + at);
      prefetch_scales(p.key, row, step, n), prefetch_scales(p.value, row, step, n);
    }
    keys->count = at + n;
  }

  static void list(const Cache& cache, int64_t row, int64_t step, int n, Prefetcher* prefetcher) {
    const char* from = cache.words + row * cache.stride;
    if (step * cache.stride == cache.row_bytes) return prefetcher->add(from, n * cache.row_bytes);
    for (int i = 0; i < n; ++i) prefetcher->add(from + i * step * cache.stride, cache.row_bytes);
  }

  // Prefetches a run's scales and zero points, per token and per group, into the first-level cache: a Zen 4 drops other
  // prefetches that miss the TLB, as a run's first one often does.
  static void prefetch_scales(const Cache& cache, int64_t row, int64_t step, int n) {
    auto lines = [&](const void* first, int64_t bytes) {  // of each row
      __asm__ volatile("");  // GCC drops calls of functions that do nothing but prefetch
      const char *from = static_cast<const char*>(first) + row * bytes, *last = from + ((n - 1) * step + 1) * bytes - 1;
      for (; from < last; from += most(64, step * bytes)) __builtin_prefetch(from, 0, 3);
      __builtin_prefetch(last, 0, 3);
    };
    if (cache.per == Per::token) lines(cache.scale, sizeof(float));
    if (cache.zero) lines(cache.zero, sizeof(float));
    if (cache.groups) lines(cache.groups, cache.row_bytes / 8);
  }

  // The scale of a block, for each of its keys: there are few, so they are read at once.
  void block_scales(const Cache& cache, int64_t block, int n, float* scale) const {
    if (cache.per == Per::block) for (int i = 0; i < n; ++i) scale[i] = cache.scale[block * p.K + split.head];
  }

  // The scales and zero points per token of a kv tile, which were prefetched when it was read.
  void token_scales(Keys* keys) const {
    if (!scaled) return;
    const int64_t step = p.row_step();
    int64_t n = p.S - keys->first % p.S;  // keys of one block
    for (int at = 0; at < keys->count; at += int(n), n = p.S) {
      n = least(n, keys->count - at);
      const int64_t row = keys->row[at];
      auto copy = [&](const float* from, float* to) __attribute__((always_inline)) {
        if (step == 1) memcpy(to + at, from + row, n * sizeof(float));
        else for (int64_t i = 0; i < n; ++i) to[at + i] = from[row + i * step];
      };
      if (p.key.per == Per::token) copy(p.key.scale, keys->k_scale);
      if (p.value.per == Per::token) copy(p.value.scale, keys->v_scale);
      if (p.key.zero) copy(p.key.zero, keys->k_zero);
      if (p.value.zero) copy(p.value.zero, keys->v_zero);
    }
  }
};

// The kv tiles of a split, three at a time: the one to work on, the next one, which is prefetched meanwhile, and the
// one after that, whose scales are prefetched. During the last kv tile of a split, the first one of the thread's next
// split is prefetched; the first one of the thread's first split is prefetched before the work starts.
struct KvTiles {
  Reader reader;
  Queue& queue;
  int want;
  Keys all[3];
  int current = 0;

  // `listed`: whether kv tiles after the first come with a list of their memory; `streams`: how many ranges of it are
  // prefetched at once.
  KvTiles(const Problem& p, const Split& split, Queue& queue, const Sequence& sequence, int first, int want,
          bool listed, int streams = Prefetcher::kStreams)
      : reader(p, split, sequence, true), queue(queue), want(want) {
    for (Keys& keys : all) keys.prefetcher.most_streams = streams;
    reader.next(first, &all[0]);
    reader.listed = listed;
    reader.next(want, &all[1]);
    if (queue.prefetched()) all[0].prefetcher.clear();
  }

  // The first kv tile's memory, to prefetch while the queries are prepared.
  Prefetcher& start() { return all[0].prefetcher; }

  // Calls `work(here, later)` on each kv tile; `later` is empty where there is nothing to prefetch.
  template <class Work> INLINE void each(Work work) {
    for (bool last = !all[0].count; !last; current = (current + 1) % 3) {
      Keys &here = all[current], &later = all[(current + 1) % 3];
      last = !later.count;
      if (!last) {
        reader.next(want, &all[(current + 2) % 3]);
      } else if (const Split* next = queue.upcoming()) {
        Reader(reader.p, *next, Sequence(reader.p, next->b), reader.listed).next(want, &later);
      }
      reader.token_scales(&here);
      work(here, later);
    }
  }
};

// Whether `count` rows are evenly spaced in memory, and how many bytes apart.
template <int count> INLINE bool evenly_apart(const char* const* rows, int64_t* apart) {
  *apart = rows[1] - rows[0];
  bool even = true;
  for (int i = 2; i < count; ++i) even &= rows[i] - rows[i - 1] == *apart;
  return even;
}

// Decodes the keys or values of a kv tile into scratch, and points to them there.
INLINE void decode_cache(const Cache& cache, DecodeRow decode, const Keys& keys, const char** at, char* tile,
                        int64_t padded, int64_t tile_bytes) {
  for (int j = 0; j < keys.count; ++j) {
    decode(cache, keys.row[j], tile + j * tile_bytes, padded);
    at[j] = tile + j * tile_bytes;
  }
}

}  // namespace
}  // namespace jattn_native
