// One attention call as plain memory, and the splits its work is divided into. Axis letters as in
// jattn.paged_attention: T tokens, B sequences, H query heads, K KV heads, G = H / K, D and V head sizes, N blocks of S
// tokens, M columns of a block table.
#pragma once
#include <atomic>
#include <cstdint>

// Inline everywhere: what is compiled for one instruction set must not be linked into another.
#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace jattn_native {

[[noreturn]] void out_of_memory();  // throws: schedule.cc

// How a word of the cache is read; launch.py sends these numbers.
enum class Format : int64_t { f32, bf16, f16, e4m3, e5m2, int8, int4, nvfp4 };
// What a stored scale applies to.
enum class Per : int64_t { nothing, block, token };

// Whether bfloat16 holds every number of the format exactly, before scales per token or block.
INLINE constexpr bool fits_bf16(Format f) { return f != Format::f32 && f != Format::f16; }
// Bytes of a word, which is one number, or the codes of two.
INLINE constexpr int64_t bytes_of(Format f) {
  return f == Format::f32 ? 4 : f == Format::bf16 || f == Format::f16 ? 2 : 1;
}
// Whether a byte holds two numbers.
INLINE constexpr bool packed(Format f) { return f == Format::int4 || f == Format::nvfp4; }

// Keys or values: a pool of rows, one per block, head and token.
struct Cache {
  const char* words;
  Format format;
  Per per;
  int64_t dim;        // numbers of a row that are used
  int64_t row_bytes;  // of a row; with keys and values side by side, only of the numbers that are used
  int64_t stride;     // bytes from one row of the pool to the next
  const float* scale;     // per block [N, K] or per token, or null
  const float* zero;      // per token, or null
  const uint8_t* groups;  // e4m3, one per 16 numbers, or null

  // Whether there are scales or zero points per block, token or group.
  INLINE bool scaled() const { return per != Per::nothing || zero || groups; }
};

struct Problem {
  const void* query;  // [T, H, D]
  Format query_type;
  Cache key, value;
  bool values_in_keys;
  const int32_t* tables;    // [B, M]
  const int32_t* seq_lens;  // [B]
  const int32_t* starts;    // [B + 1]
  void* out;                // [T, H, V]
  Format out_type;
  float* lse;  // [T, H]
  int64_t T, B, H, K, D, V, N, S, M;
  bool nhd;
  int64_t stored_heads;  // rows of a token: K, or more where an array of keys and values is padded
  // From this many contiguous bytes of a block on, prefetches of several runs are interleaved: see `kLongRow`.
  int64_t interleaved_run;
  int64_t max_query_len;
  float scale;
  bool causal;               // if is_causal is null
  const uint8_t* is_causal;  // [B] or null
  bool has_window, has_chunk;
  int64_t window, chunk;
  const float* cap;            // one number, or null
  const float* sinks;          // [H] or [T, H] or null
  bool sinks_per_token;
  const float* slopes;         // [H] or null
  const float* bias;           // [H, bias_columns] or null
  int64_t bias_columns;
  const float* k_scale;        // [K] or null
  const float* v_scale;        // [K] or null
  const int32_t* visible_end;  // [T] or null
  const uint32_t* tree;        // [T, tree_words] or null
  int64_t tree_words;
  const int32_t* selected;     // [B, num_selected] or null
  int64_t num_selected;

  INLINE int64_t group() const { return H / K; }
  // The pool's row of a block, head and token, and the step from one token to the next.
  INLINE int64_t row(int64_t block, int64_t head, int64_t token) const {
    return nhd ? (block * S + token) * stored_heads + head : (block * K + head) * S + token;
  }
  INLINE int64_t row_step() const { return nhd ? stored_heads : 1; }
};

// A split of a work item, or all of the item if it is not split: the tokens [t0, t1) of a sequence, counted from its
// first, for one KV head, over keys [k0, k1).
struct Split {
  int32_t b, head;
  int32_t t0, t1;
  int64_t k0, k1;
  const int32_t* columns;  // the blocks to read, ascending; null for all
  int64_t num_columns;
  float* partial;  // null: the work item is not split, so the kernel writes out and lse
};
// A partial result is rows of V weighted sums, then the rows' maxima (base 2), then their denominators.

// The splits [first, first + count) of one work item, which are merged when none is left.
struct Progress {
  int first = 0, count = 0;
  std::atomic<int> taken{0}, left{0};

  // A split that no thread has taken, or -1.
  INLINE int take() {
    if (taken.load(std::memory_order_relaxed) >= count) return -1;
    const int i = taken.fetch_add(1, std::memory_order_relaxed);
    return i < count ? first + i : -1;
  }
};

// The splits that one thread takes: those of one work item after another, whose partial results stay in its cache; once
// every item is begun, splits of other threads' items. It takes the next split while it works on the last keys of the
// current one: early enough to prefetch the next one's first keys, and late enough that no split waits for a busy
// thread while another thread is idle.
class Queue {
 public:
  INLINE Queue(const Split* splits, Progress* items, int count, std::atomic<int>* begun)
      : splits_(splits), items_(items), count_(count), begun_(begun) {}

  // The index of the split to work on now, or -1 after the last.
  INLINE int begin() {
    prefetched_ = upcoming_ >= 0;
    const int now = prefetched_ ? upcoming_ : take();
    upcoming_ = kUnknown;
    return now;
  }
  // The split to work on after this one, whose first keys the caller prefetches; null if there is none.
  INLINE const Split* upcoming() {
    if (upcoming_ == kUnknown) upcoming_ = take();
    return upcoming_ >= 0 ? splits_ + upcoming_ : nullptr;
  }
  // Whether this split's first keys were prefetched.
  INLINE bool prefetched() const { return prefetched_; }

 private:
  static constexpr int kUnknown = -2;

  INLINE int take() {
    while (own_ < count_) {
      if (const int split = own_ < 0 ? -1 : items_[own_].take(); split >= 0) return split;
      own_ = begun_->fetch_add(1, std::memory_order_relaxed);
    }
    for (; others_ < count_; ++others_)
      if (const int split = items_[others_].take(); split >= 0) return split;
    return -1;
  }

  const Split* splits_;
  Progress* items_;
  int count_;
  std::atomic<int>* begun_;
  int own_ = -1;    // the item that this thread began
  int others_ = 0;  // before it, every split is taken
  int upcoming_ = kUnknown;
  bool prefetched_ = false;
};

struct Update;  // update.h

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  int (*work_item_rows)(const Problem&);  // the most whose queries, logits and sums stay in the second-level cache
  void (*run)(const Problem&, const Split&, Queue&);
  // Merges the partial results of a work item's splits.
  void (*merge)(const Problem&, const Split* splits, int count);
  // Writes the new tokens of one part.
  void (*update)(const Update&, int part, int parts);
  // For tests: a pool's row as float32; the logit of a product, for `count` lanes.
  void (*decode)(const Cache&, int64_t row, float* out);
  void (*logits)(const float* dots, float scale, const float* cap, float slope, const float* bias,
                 int64_t bias_columns, int64_t q, int64_t k, int count, float* out);
  double row_work = 1.0 / 6;        // a row's work on a key, as a share of the key's bytes
  double least_shared = 192 << 10;  // in bytes: with less work, waking another thread does not pay
};

Kernels kernels_base();
Kernels kernels_avx2();
Kernels kernels_avx512();
Kernels kernels_avx512bf16();
Kernels kernels_amx();
Kernels kernels_bf16();

}  // namespace jattn_native
