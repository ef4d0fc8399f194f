// One call of attention as plain memory, and the pieces it is cut into. Axis letters as in
// jattn.paged_attention: T tokens, B sequences, H query heads, K KV heads, G = H / K, D and V head
// sizes, N blocks of S tokens, M columns of a block table.
#pragma once
#include <atomic>
#include <cstdint>

namespace jattn_native {

// How a word of the cache is read; the numbers are those launch.py sends.
enum class Format : int64_t { f32, bf16, f16, e4m3, e5m2, int8, int4, nvfp4 };
// What a scale stored next to the words belongs to.
enum class Per : int64_t { nothing, block, token };

// Whether every number of the format, before scales per token or block, is a bfloat16.
constexpr bool fits_bf16(Format f) { return f != Format::f32 && f != Format::f16; }
// Two numbers a byte?
constexpr bool packed(Format f) { return f == Format::int4 || f == Format::nvfp4; }

// Keys or values: a pool of rows, one per block, head and token.
struct Side {
  const char* words;
  Format format;
  Per per;
  int64_t dim;        // numbers of a row that are used
  int64_t row_bytes;  // of a row; with keys and values side by side, of the numbers that are used
  int64_t stride;     // bytes from one row of the pool to the next
  const float* scale;     // per block [N, K] or per token, or null
  const float* zero;      // per token, or null
  const uint8_t* groups;  // e4m3, one per 16 numbers, or null
};

struct Problem {
  const void* query;  // [T, H, D]
  Format query_type;
  Side key, value;
  bool values_in_keys;
  const int32_t* tables;    // [B, M]
  const int32_t* seq_lens;  // [B]
  const int32_t* starts;    // [B + 1]
  void* out;                // [T, H, V]
  Format out_type;
  float* lse;  // [T, H]
  int64_t T, B, H, K, D, V, N, S, M;
  bool nhd;
  int64_t stored_heads;  // rows of a token: K, or more where an array of both is padded
  int64_t max_query_len;
  float scale;
  bool causal;               // where there is no array
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

  int64_t group() const { return H / K; }
  // The pool's row of a block, head and token, and from one token to the next.
  int64_t row(int64_t block, int64_t head, int64_t token) const {
    return nhd ? (block * S + token) * stored_heads + head : (block * K + head) * S + token;
  }
  int64_t row_step() const { return nhd ? stored_heads : 1; }
};

// The tokens [t0, t1) of a sequence, counted from its first, for one KV head, over keys [k0, k1).
struct Piece {
  int32_t b, head;
  int32_t t0, t1;
  int64_t k0, k1;
  const int32_t* columns;  // the blocks to read, ascending; null for all
  int64_t num_columns;
  float* partial;  // null: the piece is whole, and writes out and lse
};
// A partial result: rows of V weighted sums, then their maxima (base 2), then their denominators.

// The pieces as one thread takes them. It takes the next one when it works on the last keys of the one
// before: early enough to ask for the next one's first keys, and late enough that none waits for a
// thread that is busy while another has nothing to do.
class Queue {
 public:
  Queue(const Piece* pieces, int count, std::atomic<int>* next) : pieces_(pieces), count_(count), next_(next) {}

  // The index of the piece to work on now; the count or more after the last.
  int begin() {
    asked_ = coming_ >= 0;
    const int now = asked_ ? coming_ : next_->fetch_add(1, std::memory_order_relaxed);
    coming_ = -1;
    return now;
  }
  // The piece to work on after this one, whose first keys the caller asks for; null where there is none.
  const Piece* coming() {
    if (coming_ < 0) coming_ = next_->fetch_add(1, std::memory_order_relaxed);
    return coming_ < count_ ? pieces_ + coming_ : nullptr;
  }
  // Whether this piece's first keys were asked for.
  bool asked() const { return asked_; }

 private:
  const Piece* pieces_;
  int count_;
  std::atomic<int>* next_;
  int coming_ = -1;
  bool asked_ = false;
};

struct Update;  // update.h

// What one instruction set brings.
struct Kernels {
  const char* name;
  int (*tile_of_rows)(const Problem&);  // as many rows as keep queries, logits and sums in the second-level cache
  void (*run)(const Problem&, const Piece&, Queue&);
  // Joins the partial results of pieces that differ in their keys only.
  void (*merge)(const Problem&, const Piece* pieces, int count);
  // Writes one part's share of new rows.
  void (*update)(const Update&, int part, int parts);
  // For tests: a pool's row as float32; the logit of a product, for `count` lanes.
  void (*decode)(const Side&, int64_t row, float* out);
  void (*logits)(const float* dots, float scale, const float* cap, float slope, const float* bias,
                 int64_t bias_columns, int64_t q, int64_t k, int count, float* out);
};

Kernels kernels_base();
Kernels kernels_avx2();
Kernels kernels_avx512();
Kernels kernels_avx512bf16();
Kernels kernels_amx();

}  // namespace jattn_native
