// Multiplies and adds in registers, and does nothing else: the arithmetic that no product can exceed.
//
//   for each step, for each of twelve independent vectors of sums:
//     sum = sum x + y        float32, or sum + x y for pairs of bfloat16 where one instruction multiplies them
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kBytes)));
constexpr int kSums = 12;  // hide an instruction's latency where two begin in a cycle, and fit 16 registers

// Keeps a vector in a register, where the compiler does not know its numbers.
inline __attribute__((always_inline)) void keep(Floats& x) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#endif
}

// Does `step` to each vector of sums, and returns a number that depends on all.
template <class Step> float repeat(int64_t steps, Step step) {
  Floats sums[kSums];
#pragma GCC unroll 12
  for (int n = 0; n < kSums; ++n) sums[n] = Floats{};
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int n = 0; n < kSums; ++n) {
      sums[n] = step(sums[n]);
      keep(sums[n]);
    }
  }
  float all = 0;
#pragma GCC unroll 12
  for (int n = 0; n < kSums; ++n) all += sums[n][0];
  return all;
}

}  // namespace

// Operations of a step in float32, or 0 where bfloat16 has no instruction.
extern "C" int64_t operations_of_a_step(int bfloat16) {
  constexpr int64_t numbers = kSums * kBytes / 4;
  if (!bfloat16) return 2 * numbers;
#if defined(__AVX512BF16__)
  return 4 * numbers;
#else
  return 0;
#endif
}

extern "C" float multiply_and_add(int64_t steps, int bfloat16) {
#if defined(__AVX512BF16__)
  if (bfloat16) {
    const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = (__m512bh)_mm512_set1_epi16(0x3400);
    return repeat(steps, [&](Floats sum) { return (Floats)_mm512_dpbf16_ps((__m512)sum, x, y); });
  }
#endif
  Floats x = Floats{} + 1.0f, y = Floats{} + 0x1p-24f;
  keep(x), keep(y);
  return repeat(steps, [&](Floats sum) { return sum * x + y; });
}
