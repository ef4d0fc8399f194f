// The handlers that XLA calls: they turn operands and attributes, as jattn/cpu/native sends them,
// into a Problem, with checks; and the functions that Python calls through ctypes.
//
//   refuse a program that was made for another version of the library
//   for each bit of `present`: the next operand is that one
//   sizes and formats from attributes and operands; an error if an operand has other bytes than they say
//   attend(problem) or write_rows(update) with XLA's pool of threads: schedule.cc, update.cc
//   an exception becomes an error of the call, and the process goes on
#include <cstring>
#include <optional>
#include <string>

#include "schedule.h"
#include "semantics.h"
#include "update.h"
#include "xla/ffi/api/ffi.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ffi = xla::ffi;
using namespace jattn_native;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The operands in their order; a call passes those whose bit of `present` is set.
enum Operand {
  kQuery, kKey, kValue, kTables, kSeqLens, kStarts, kScale, kIsCausal, kWindow, kCap, kSinks, kSlopes,
  kKScale, kVScale, kChunk, kVisibleEnd, kTree, kSelected, kBias,
  kKeyScales, kKeyZeros, kKeyGroups, kValueScales, kValueZeros, kValueGroups, kOperands
};

struct Wrong {
  std::string text;
};

struct Buffers {
  std::optional<ffi::AnyBuffer> at[kOperands];
  bool here[kOperands] = {};

  Buffers(const ffi::RemainingArgs& args, int64_t present) {
    size_t next = 0;
    for (int i = 0; i < kOperands; ++i) {
      if (!(present >> i & 1)) continue;
      auto buffer = args.get<ffi::AnyBuffer>(next++);
      if (!buffer.has_value()) throw Wrong{buffer.error().message()};
      at[i] = *buffer;
      here[i] = true;
    }
    if (next != args.size()) throw Wrong{"more operands than `present` names"};
  }
  // The data of an operand, `count` numbers of type X; null if it is absent.
  template <class X> const X* data(Operand which, int64_t count) const {
    if (!here[which]) return nullptr;
    if (int64_t(at[which]->element_count()) != count || int64_t(at[which]->size_bytes()) != count * int64_t(sizeof(X)))
      throw Wrong{"operand " + std::to_string(which) + " does not have the size that the others imply"};
    return static_cast<const X*>(at[which]->untyped_data());
  }
  int64_t size(Operand which, size_t axis, size_t rank) const {
    if (!here[which] || at[which]->dimensions().size() != rank)
      throw Wrong{"operand " + std::to_string(which) + " is absent or has the wrong rank"};
    return at[which]->dimensions()[axis];
  }
};

Format type_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return Format::f32;
    case ffi::BF16: return Format::bf16;
    case ffi::F16: return Format::f16;
    default: throw Wrong{"queries and outputs are float32, bfloat16 or float16"};
  }
}

int64_t attribute(const ffi::Dictionary& attributes, const char* name) {
  auto found = attributes.get<int64_t>(name);
  if (!found.has_value()) throw Wrong{std::string("no attribute ") + name};
  return *found;
}

// Programs can be saved and run with another version of the library, whose operands differ.
void check_version(const ffi::Dictionary& attributes) {
  static const int64_t own = std::stoll(std::string(JATTN_STAMP).substr(0, 15), nullptr, 16);
  auto made_for = attributes.get<int64_t>("version");
  if (!made_for.has_value() || *made_for != own)
    throw Wrong{"another version of jattn made this program: make it again, or install that version"};
}

Cache cache_of(const Buffers& x, const ffi::Dictionary& attributes, bool key, int64_t dim, const Problem& p) {
  Cache cache{};
  cache.format = Format(attribute(attributes, key ? "key_format" : "value_format"));
  cache.per = Per(attribute(attributes, key ? "key_per" : "value_per"));
  cache.dim = dim;
  const int64_t width = attribute(attributes, "row_width");
  const Operand words = key || width ? kKey : kValue;
  if (!x.here[words]) throw Wrong{"a cache is absent"};
  const int64_t rows = p.N * p.S * p.stored_heads, bytes = int64_t(x.at[words]->size_bytes());
  cache.row_bytes = cache.stride = bytes / rows;
  const int64_t number_bytes = bytes_of(cache.format);
  if (bytes % rows || cache.row_bytes * (packed(cache.format) ? 2 : 1) < dim * number_bytes)
    throw Wrong{"a cache's words do not fit its format"};
  cache.words = static_cast<const char*>(x.at[words]->untyped_data());
  if (width) {  // keys and values side by side
    const int64_t start = key ? 0 : attribute(attributes, "value_start");
    if (packed(cache.format) || cache.stride != width * number_bytes || start < 0 || start + dim > width)
      throw Wrong{"keys and values do not fit their rows"};
    cache.words += start * number_bytes;
    cache.row_bytes = dim * number_bytes;
  }
  cache.scale = x.data<float>(key ? kKeyScales : kValueScales, cache.per == Per::block ? p.N * p.K : rows);
  cache.zero = x.data<float>(key ? kKeyZeros : kValueZeros, rows);
  cache.groups = x.data<uint8_t>(key ? kKeyGroups : kValueGroups, rows * (cache.row_bytes / 8));
  if ((cache.per != Per::nothing && !cache.scale) || (cache.format == Format::nvfp4 && !cache.groups))
    throw Wrong{"a cache's scales are absent"};
  return cache;
}

Problem problem_of(const Buffers& x, const ffi::Dictionary& attributes, ffi::AnyBuffer out, ffi::AnyBuffer lse) {
  Problem p{};
  p.T = x.size(kQuery, 0, 3), p.H = x.size(kQuery, 1, 3), p.D = x.size(kQuery, 2, 3);
  p.nhd = attribute(attributes, "nhd") != 0;
  p.N = attribute(attributes, "blocks"), p.K = attribute(attributes, "kv_heads");
  p.S = attribute(attributes, "block_size"), p.stored_heads = attribute(attributes, "stored_heads");
  p.B = x.size(kTables, 0, 2), p.M = x.size(kTables, 1, 2);
  p.V = attribute(attributes, "value_dim");
  p.values_in_keys = !x.here[kValue] && attribute(attributes, "value_start") == 0;
  if (!x.here[kKey] || p.K <= 0 || p.H % p.K || p.N <= 0 || p.S <= 0 || p.stored_heads < p.K || p.D == 0 || p.V <= 0 ||
      (p.values_in_keys && p.V > p.D))
    throw Wrong{"the operands' sizes contradict each other"};
  p.query_type = type_of(x.at[kQuery]->element_type());
  p.query = x.at[kQuery]->untyped_data();
  p.key = cache_of(x, attributes, true, p.D, p);
  if (p.values_in_keys) {
    p.value = p.key;
    p.value.dim = p.V;
  } else {
    p.value = cache_of(x, attributes, false, p.V, p);
  }
  p.tables = x.data<int32_t>(kTables, p.B * p.M);
  p.seq_lens = x.data<int32_t>(kSeqLens, p.B);
  p.starts = x.data<int32_t>(kStarts, p.B + 1);
  const float* scale = x.data<float>(kScale, 1);
  if (!p.seq_lens || !p.starts || !scale) throw Wrong{"lengths, starts or the scale are absent"};
  p.scale = *scale;
  p.causal = attribute(attributes, "causal") != 0;
  p.is_causal = x.data<uint8_t>(kIsCausal, p.B);
  const int32_t* window = x.data<int32_t>(kWindow, 1);
  const int32_t* chunk = x.data<int32_t>(kChunk, 1);
  p.has_window = window, p.window = window ? *window : 0;
  p.has_chunk = chunk, p.chunk = chunk ? *chunk : 0;
  p.cap = x.data<float>(kCap, 1);
  p.sinks_per_token = x.here[kSinks] && x.at[kSinks]->dimensions().size() == 2;
  p.sinks = x.data<float>(kSinks, p.sinks_per_token ? p.T * p.H : p.H);
  p.slopes = x.data<float>(kSlopes, p.H);
  p.k_scale = x.data<float>(kKScale, p.K);
  p.v_scale = x.data<float>(kVScale, p.K);
  p.visible_end = x.data<int32_t>(kVisibleEnd, p.T);
  if (x.here[kTree]) p.tree_words = x.size(kTree, 1, 2);
  p.tree = x.data<uint32_t>(kTree, p.T * p.tree_words);
  if (x.here[kSelected]) p.num_selected = x.size(kSelected, 1, 2);
  p.selected = x.data<int32_t>(kSelected, p.B * p.num_selected);
  if (x.here[kBias]) p.bias_columns = x.size(kBias, 1, 2);
  p.bias = x.data<float>(kBias, p.H * p.bias_columns);
  if (p.H * p.bias_columns > INT32_MAX) throw Wrong{"a relative bias of 2^31 numbers or more"};
  p.max_query_len = attribute(attributes, "max_query_len");
  p.out_type = type_of(out.element_type());
  p.out = out.untyped_data();
  if (int64_t(out.element_count()) != p.T * p.H * p.V || int64_t(lse.element_count()) != p.T * p.H)
    throw Wrong{"a result has the wrong size"};
  p.lse = static_cast<float*>(lse.untyped_data());
  return p;
}

// New memory in pages of 2 MiB instead of 4 KiB, each of which would cost an interrupt. Memory that the C library had
// before keeps its pages unless the system takes them back (`forget`): then its contents are lost.
void use_huge_pages([[maybe_unused]] void* at, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool forget) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at), first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (begin + bytes) / kHuge * kHuge;
  if (first >= last) return;
  // Refused or not, the memory is the same.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  if (forget) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
}

// Does a handler's work, and turns what it throws into the handler's error.
template <class Work> ffi::Error answer(Work work) {
  try {
    work();
  } catch (const Wrong& wrong) {
    return ffi::Error::InvalidArgument("jattn's native kernel: " + wrong.text);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jattn's native kernel: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jattn's native kernel: ") + error.what());
  }
  return ffi::Error::Success();
}

ffi::Error attend_handler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                          ffi::Result<ffi::AnyBuffer> lse, ffi::Dictionary attributes) {
  return answer([&] {
    check_version(attributes);
    const Problem p = problem_of(Buffers(args, attribute(attributes, "present")), attributes, *out, *lse);
    use_huge_pages(out->untyped_data(), out->size_bytes(), /*forget=*/false);
    attend(p, int(pool.num_threads()), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  });
}

// What update_kv_cache sends, in this order; a call passes those whose bit of `present` is set. The
// pools' arrays, the first eight, are also results, in the same memory.
enum Sent { kPool, kPoolScale, kPoolZero, kPoolGroups, kPools = 8, kRows = 8, kDivisor = 10, kSlots = 12, kSent };

ffi::Error update_handler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return answer([&] {
    check_version(attributes);
    const int64_t present = attribute(attributes, "present");
    std::optional<ffi::AnyBuffer> at[kSent];
    size_t next = 0;
    for (int i = 0; i < kSent; ++i) {
      if (!(present >> i & 1)) continue;
      auto buffer = args.get<ffi::AnyBuffer>(next);
      if (!buffer.has_value()) throw Wrong{buffer.error().message()};
      at[i] = *buffer;
      if (i < kPools) {
        auto result = results.get<ffi::AnyBuffer>(next);
        if (!result.has_value()) throw Wrong{result.error().message()};
        if ((*result)->untyped_data() != buffer->untyped_data()) throw Wrong{"a pool and its result are two buffers"};
      }
      ++next;
    }
    if (next != args.size()) throw Wrong{"more operands than `present` names"};
    auto data = [&](int which, int64_t bytes) -> void* {
      if (!at[which]) return nullptr;
      if (int64_t(at[which]->size_bytes()) != bytes)
        throw Wrong{"operand " + std::to_string(which) + " does not have the size that the others imply"};
      return at[which]->untyped_data();
    };
    auto sizes = [&](int which, size_t rank) {
      if (!at[which] || at[which]->dimensions().size() != rank)
        throw Wrong{"operand " + std::to_string(which) + " is absent or has the wrong rank"};
      return at[which]->dimensions();
    };
    Update u{};
    u.nhd = attribute(attributes, "nhd") != 0;
    u.T = sizes(kSlots, 1)[0];
    // A token of KVRows is more than K rows: it counts as one row of a single head.
    if (!at[kPool] || !at[kRows]) throw Wrong{"a pool or its new rows are absent"};
    const bool rows_of_heads = at[kPool]->dimensions().size() == 4;
    if (!rows_of_heads && (!u.nhd || at[kPool]->dimensions().size() < 3)) throw Wrong{"a pool has the wrong rank"};
    const auto words = at[kPool]->dimensions();
    u.N = words[0], u.K = rows_of_heads ? words[u.nhd ? 2 : 1] : 1, u.S = words[u.nhd || !rows_of_heads ? 1 : 2];
    const int64_t rows = u.N * u.K * u.S;
    if (!rows) throw Wrong{"a pool without blocks, heads or tokens"};
    u.slots = static_cast<const int32_t*>(data(kSlots, u.T * 4));
    u.caches = at[kRows + 1] ? 2 : 1;
    for (int i = 0; i < u.caches; ++i) {
      Written& cache = u.cache[i];
      const char* prefix = i ? "value_" : "key_";
      cache.format = Format(attribute(attributes, (std::string(prefix) + "format").c_str()));
      cache.per = Per(attribute(attributes, (std::string(prefix) + "per").c_str()));
      const auto given = rows_of_heads ? sizes(kRows + i, 3) : at[kRows + i]->dimensions();
      if (given.size() < 2 || given[0] != u.T || (rows_of_heads && given[1] != u.K))
        throw Wrong{"the new rows do not match the slots or the heads"};
      cache.dim = 1;
      for (size_t axis = rows_of_heads ? 2 : 1; axis < given.size(); ++axis) cache.dim *= given[axis];
      cache.source = type_of(at[kRows + i]->element_type());
      cache.rows = at[kRows + i]->untyped_data();
      cache.divisor = static_cast<const float*>(data(kDivisor + i, u.K * 4));
      const int64_t numbers = packed(cache.format) ? cache.dim / 2 : cache.dim;
      cache.row_bytes = numbers * bytes_of(cache.format);
      cache.words = static_cast<char*>(data(4 * i + kPool, rows * cache.row_bytes));
      cache.scale = static_cast<float*>(data(4 * i + kPoolScale, 4 * (cache.per == Per::block ? u.N * u.K : rows)));
      cache.zero = static_cast<float*>(data(4 * i + kPoolZero, 4 * rows));
      cache.groups = static_cast<uint8_t*>(data(4 * i + kPoolGroups, rows * (cache.dim / 16)));
      if (!cache.words || (cache.per != Per::nothing && !cache.scale) ||
          (cache.format == Format::nvfp4 && !cache.groups))
        throw Wrong{"a cache's words or scales are absent"};
    }
    write_rows(u, int(pool.num_threads()), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  });
}

// Zeros, in huge pages where the system lets programs ask for them, because the memory is new.
ffi::Error zeros_handler(ffi::Result<ffi::AnyBuffer> out) {
  use_huge_pages(out->untyped_data(), out->size_bytes(), /*forget=*/true);
  memset(out->untyped_data(), 0, out->size_bytes());
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)  // what ctypes looks up; all else is hidden
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_native_attend, attend_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_native_update, update_handler,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_native_zeros, zeros_handler, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop

EXPORT const char* jattn_native_stamp() { return JATTN_STAMP; }
EXPORT int jattn_native_ffi_major() { return XLA_FFI_API_MAJOR; }
EXPORT int jattn_native_ffi_minor() { return XLA_FFI_API_MINOR; }
EXPORT const char* jattn_native_isa() { return kernels().name; }
EXPORT const char* jattn_native_isas() { return instruction_sets(); }
EXPORT const char* jattn_native_left_out() { return left_out(); }

EXPORT int jattn_native_moves() { return moves_off_a_taken_core(); }

// For tests: the result of one function of semantics.h. INT64_MIN means no window or no chunk.
EXPORT void jattn_native_visible(int64_t q, int64_t seq_len, int causal, int64_t window, int64_t chunk,
                                 int64_t visible_end, int64_t* range) {
  Problem p{};
  p.has_window = window != INT64_MIN, p.window = window;
  p.has_chunk = chunk != INT64_MIN, p.chunk = chunk;
  const Range found = visible(p, q, seq_len, causal != 0, visible_end);
  range[0] = found.lo, range[1] = found.hi;
}

EXPORT int jattn_native_tree(const uint32_t* mask, int64_t words, int64_t index, int64_t key, int64_t* distance) {
  return Path{mask, words, index}.sees(key, distance);
}

EXPORT void jattn_native_logits(const float* dots, float scale, const float* cap, float slope, const float* bias,
                                int64_t columns, int64_t q, int64_t k, int count, float* out) {
  kernels().logits(dots, scale, cap, slope, bias, columns, q, k, count, out);
}

EXPORT void jattn_native_decode(int64_t format, const void* words, const uint8_t* groups, int64_t dim,
                                int64_t row_bytes, int64_t row, float* out) {
  Cache cache{};
  cache.words = static_cast<const char*>(words);
  cache.format = Format(format), cache.dim = dim, cache.row_bytes = cache.stride = row_bytes, cache.groups = groups;
  kernels().decode(cache, row, out);
}
