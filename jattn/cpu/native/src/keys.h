// The keys of a piece, a chunk at a time: where each lies, the scales next to it, and the memory to
// ask for while the chunk before is worked on.
#pragma once
#include <utility>

#include "numbers.h"
#include "semantics.h"

namespace jattn_native {
namespace {

constexpr int kMostKeys = 128;  // of a chunk
constexpr int kFewKeys = 32;    // of one where few rows share a key, so that memory is what takes long

// Ranges of memory to prefetch, a few lines at a time, by turns from some of them: memory answers
// sooner where several pages are read at once.
struct Ahead {
  static constexpr int kStreams = 4;
  struct Lines {
    const char* at;
    int64_t count;
  };
  Lines ranges[2 * kMostKeys];
  int size = 0, next = 0;      // what comes before `next` is done,
  int streams = 0;             // and these are under way:
  int64_t done = 0, last = 0;  // `done` lines of each; one of them has `last`
  int64_t credit = 0;          // lines granted and not asked for

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
  INLINE void touch(int64_t lines) {
    for (credit += lines; credit > 0 && (done < last || begin()); ++done) {
      for (int i = 0; i < streams; ++i) prefetch(ranges[next + i].at + done * 64);
      credit -= streams;
    }
  }
  // Puts ranges that have ended before `next`, and takes up others; false where there are none.
  __attribute__((noinline)) bool begin() {
    for (int i = next, end = next + streams; i < end; ++i) {
      ranges[i] = {ranges[i].at + done * 64, ranges[i].count - done};
      if (!ranges[i].count) std::swap(ranges[i], ranges[next++]);
    }
    streams = size - next < kStreams ? size - next : kStreams;
    done = last = 0;
    for (int i = 0; i < streams; ++i) last = i && last < ranges[next + i].count ? last : ranges[next + i].count;
    return streams > 0;
  }
};

// Keys at consecutive positions. In a tree, either all are query tokens of the sequence or none is.
struct Keys {
  int count = 0;
  int64_t first = 0;
  int64_t row[kMostKeys];  // of the pool
  const char* k[kMostKeys];
  const char* v[kMostKeys];
  alignas(64) float k_scale[kMostKeys], k_zero[kMostKeys], v_scale[kMostKeys], v_zero[kMostKeys];
  Ahead ahead;

  bool own(int64_t first_own) const { return first >= first_own; }
};

// What a piece reads, in order.
struct Reader {
  const Problem& p;
  const Piece& w;
  int64_t key, first_own, column = 0;
  bool listed;  // whether chunks come with the list of their memory

  Reader(const Problem& problem, const Piece& piece, const Sequence& sequence, bool listed = false)
      : p(problem), w(piece), key(piece.k0), first_own(p.tree ? sequence.first() : INT64_MAX), listed(listed) {}

  // Moves to the next key that lies in a column to read; false where there is none.
  bool seek() {
    if (!w.columns) return key < w.k1;
    while (column < w.num_columns && w.columns[column] < key / p.S) ++column;
    if (column == w.num_columns) return false;
    key = most(key, w.columns[column] * p.S);
    return key < w.k1;
  }

  // The next chunk of at most `want` keys.
  void next(int want, Keys* keys) {
    keys->count = 0;
    keys->ahead.clear();
    while (keys->count < want && seek()) {
      if (keys->count == 0) keys->first = key;
      if (key != keys->first + keys->count || (keys->first < first_own && key >= first_own)) return;
      const int64_t in_block = key % p.S;
      int64_t n = least(least(p.S - in_block, w.k1 - key), want - keys->count);
      if (key < first_own) n = least(n, first_own - key);
      int64_t block = p.tables[w.b * p.M + key / p.S];
      block = block < 0 ? 0 : block < p.N ? block : p.N - 1;  // never a read outside the pool
      add(block, in_block, int(n), keys);
      key += n;
    }
  }

  void add(int64_t block, int64_t in_block, int n, Keys* keys) {
    const int64_t row = p.row(block, w.head, in_block), step = p.row_step();
    const int at = keys->count;
    for (int i = 0; i < n; ++i) {
      keys->row[at + i] = row + i * step;
      keys->k[at + i] = p.key.words + (row + i * step) * p.key.stride;
      keys->v[at + i] = p.value.words + (row + i * step) * p.value.stride;
    }
    scales(p.key, block, row, step, n, keys->k_scale + at, keys->k_zero + at);
    scales(p.value, block, row, step, n, keys->v_scale + at, keys->v_zero + at);
    if (listed) {
      list(p.key, row, step, n, &keys->ahead);
      if (!p.values_in_keys) list(p.value, row, step, n, &keys->ahead);
    }
    touch_pages(p.key, row, step, n);
    if (!p.values_in_keys) touch_pages(p.value, row, step, n);
    keys->count = at + n;
  }

  // Asks for a line of every page of a run: walks of the page table, which in a pool of gigabytes are
  // misses too, are done by the time that the other lines are asked for.
  static void touch_pages(const Side& side, int64_t row, int64_t step, int n) {
    const char *from = side.words + row * side.stride, *end = from + (n - 1) * step * side.stride + side.row_bytes;
    for (; from < end; from += 4096) prefetch(from);
    prefetch(end - 1);
  }

  static void list(const Side& side, int64_t row, int64_t step, int n, Ahead* ahead) {
    const char* from = side.words + row * side.stride;
    if (step * side.stride == side.row_bytes) return ahead->add(from, n * side.row_bytes);
    for (int i = 0; i < n; ++i) ahead->add(from + i * step * side.stride, side.row_bytes);
  }

  void scales(const Side& side, int64_t block, int64_t row, int64_t step, int n, float* scale, float* zero) const {
    if (side.per == Per::block) {
      for (int i = 0; i < n; ++i) scale[i] = side.scale[block * p.K + w.head];
    } else if (side.per == Per::token) {
      for (int i = 0; i < n; ++i) scale[i] = side.scale[row + i * step];
    }
    if (side.zero) for (int i = 0; i < n; ++i) zero[i] = side.zero[row + i * step];
  }
};

// The chunks of a piece: the one to work on, the one to ask for meanwhile, and one after it, whose
// pages are looked up. After the last, the one to ask for is the first of the thread's next piece; of
// a thread's first piece, the first one is asked for before the work.
struct Chunks {
  Reader reader;
  Queue& queue;
  int want;
  Keys all[3];
  int turn = 0;

  // `listed`: whether chunks after the first come with the list of their memory.
  Chunks(const Problem& p, const Piece& w, Queue& queue, const Sequence& sequence, int first, int want, bool listed)
      : reader(p, w, sequence, true), queue(queue), want(want) {
    reader.next(first, &all[0]);
    reader.listed = listed;
    reader.next(want, &all[1]);
    if (queue.asked()) all[0].ahead.clear();
  }

  // The first chunk's memory, to ask for while the queries are made ready.
  Ahead& start() { return all[0].ahead; }

  // `work(here, later)` on each; `later` is empty where there is nothing to ask for.
  template <class Work> INLINE void each(Work work) {
    for (bool last = !all[0].count; !last; turn = (turn + 1) % 3) {
      Keys &here = all[turn], &later = all[(turn + 1) % 3];
      last = !later.count;
      if (!last) {
        reader.next(want, &all[(turn + 2) % 3]);
      } else if (const Piece* piece = queue.coming()) {
        Reader(reader.p, *piece, Sequence(reader.p, piece->b), reader.listed).next(want, &later);
      }
      work(here, later);
    }
  }
};

// Decodes one side of a chunk into a tile, and points to it.
INLINE void decode_side(const Side& side, DecodeRow decode, const Keys& keys, const char** at, char* tile,
                        int64_t padded, int64_t tile_bytes) {
  for (int j = 0; j < keys.count; ++j) {
    decode(side, keys.row[j], tile + j * tile_bytes, padded);
    at[j] = tile + j * tile_bytes;
  }
}

}  // namespace
}  // namespace jattn_native
