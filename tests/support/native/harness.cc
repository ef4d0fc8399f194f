// The native kernel without Python, JAX or XLA: reads one call, runs it on this thread, and writes
// the result. tests/native/test_machines.py compiles it together with the kernel's sources for other
// machines, and runs it under an emulator. It prints the machine's instruction sets.
//
// A case is int64 numbers, then arrays, each preceded by its size in bytes (0 if absent). A result
// is arrays without sizes. `main` has the order.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "schedule.h"
#include "update.h"

using namespace jattn_native;

namespace {

FILE* in;
FILE* out;

int64_t number() {
  int64_t x;
  if (fread(&x, 8, 1, in) != 1) exit(2);
  return x;
}

struct Array {
  std::vector<char> bytes;

  Array() : bytes(number()) {
    if (!bytes.empty() && fread(bytes.data(), 1, bytes.size(), in) != bytes.size()) exit(2);
  }
  template <class X> X* as() { return bytes.empty() ? nullptr : reinterpret_cast<X*>(bytes.data()); }
  void put() const {
    if (fwrite(bytes.data(), 1, bytes.size(), out) != bytes.size()) exit(2);
  }
};

struct Pool {
  Format format;
  Per per;
  int64_t dim, row_bytes;
  Array words, scale, zero, groups;

  Pool() : format(Format(number())), per(Per(number())), dim(number()), row_bytes(number()) {}
};

int attention() {
  Problem p{};
  p.T = number(), p.B = number(), p.H = number(), p.K = number(), p.N = number(), p.S = number(), p.M = number();
  p.nhd = number(), p.causal = number(), p.has_window = number(), p.window = number(), p.max_query_len = number();
  p.query_type = Format(number()), p.out_type = Format::f32;
  Array scale, query, tables, lens, starts, sinks;
  Pool pools[2];
  Cache* caches[2] = {&p.key, &p.value};
  for (int i = 0; i < 2; ++i) {
    Pool& from = pools[i];
    Cache& cache = *caches[i];
    cache.words = from.words.as<char>(), cache.format = from.format, cache.per = from.per;
    cache.dim = from.dim, cache.row_bytes = cache.stride = from.row_bytes;
    cache.scale = from.scale.as<float>(), cache.zero = from.zero.as<float>(), cache.groups = from.groups.as<uint8_t>();
  }
  Array k_scale, v_scale;
  p.scale = *scale.as<float>();
  p.query = query.as<char>(), p.tables = tables.as<int32_t>(), p.seq_lens = lens.as<int32_t>(), p.starts = starts.as<int32_t>();
  p.sinks = sinks.as<float>(), p.k_scale = k_scale.as<float>(), p.v_scale = v_scale.as<float>();
  p.D = p.key.dim, p.V = p.value.dim, p.stored_heads = p.K;
  std::vector<float> result(p.T * p.H * p.V), lse(p.T * p.H);
  p.out = result.data(), p.lse = lse.data();
  attend(p, 1, {});
  fwrite(result.data(), 4, result.size(), out);
  fwrite(lse.data(), 4, lse.size(), out);
  return fclose(out);
}

int writing() {
  Update u{};
  u.T = number(), u.K = number(), u.N = number(), u.S = number(), u.nhd = number(), u.caches = 1;
  Written& cache = u.cache[0];
  cache.source = Format(number());
  Array slots, rows, divisor;
  Pool pool;
  u.slots = slots.as<int32_t>();
  cache.rows = rows.as<char>(), cache.divisor = divisor.as<float>();
  cache.format = pool.format, cache.per = pool.per, cache.dim = pool.dim, cache.row_bytes = pool.row_bytes;
  cache.words = pool.words.as<char>(), cache.scale = pool.scale.as<float>(), cache.zero = pool.zero.as<float>();
  cache.groups = pool.groups.as<uint8_t>();
  write_rows(u, 1, {});
  for (const Array* each : {&pool.words, &pool.scale, &pool.zero, &pool.groups}) each->put();
  return fclose(out);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  in = fopen(argv[2], "rb"), out = fopen(argv[3], "wb");
  if (!in || !out) return 2;
  puts(instruction_sets());
  return argv[1][0] == 'w' ? writing() : attention();
}
