// Vectors as wide as the target's registers, by the vector extension of GCC and Clang. A file that includes this is
// compiled once per instruction set, with that set's flags; everything here is in an anonymous namespace, so that no
// function of one set is linked into another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "problem.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jattn_native {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kDot = true;  // an instruction multiplies pairs of bfloat16 and adds in float32
#else
constexpr bool kDot = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool kTiles = true;  // an instruction multiplies 16 x 32 by 32 x 16 bfloat16: matrix.h
#else
constexpr bool kTiles = false;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

#define UNROLL _Pragma("GCC unroll 16")
// Keeps a vector in a register that the compiler would otherwise read from memory again and again.
#if defined(JATTN_X86)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) __asm__("" : "+w"(x))
#endif

// Lanes of two vectors, by their numbers: one result as wide as they are.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE __builtin_shufflevector
#else
template <int... Lanes, class V> INLINE V shuffle(V a, V b) {
  typedef int32_t Mask __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Mask{Lanes...});
}
#define SHUFFLE(a, b, ...) shuffle<__VA_ARGS__>(a, b)
#endif

template <class V> INLINE V read(const void* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class V> INLINE void write(void* p, V x) { memcpy(p, &x, sizeof x); }
INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat(int32_t x) { return x + Ints{}; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE Ints iota() {
  Ints x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}
// Reduces all lanes by halves: one lane after another would take as long as the products of a kv tile.
typedef float Quad __attribute__((vector_size(16)));
template <class Both> INLINE float reduce(Floats a, Both both) {
  Quad x[W / 4];
  memcpy(x, &a, sizeof x);
  UNROLL for (int n = W / 8; n; n /= 2) UNROLL for (int i = 0; i < n; ++i) x[i] = both(x[i], x[i + n]);
  x[0] = both(x[0], SHUFFLE(x[0], x[0], 2, 3, 0, 1));
  return both(x[0], SHUFFLE(x[0], x[0], 1, 0, 3, 2))[0];
}
INLINE float sum(Floats a) { return reduce(a, [](Quad x, Quad y) { return x + y; }); }
INLINE float largest(Floats a) { return reduce(a, [](Quad x, Quad y) { return x > y ? x : y; }); }

// bfloat16 is the upper half of a float32. A word holds a pair, the first in its low half.
INLINE float from_bf16(uint16_t x) {
  const uint32_t u = uint32_t(x) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return uint16_t(u >> 16 | 64);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE uint16_t to_f16(float f) {  // to nearest even
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (u < 0x38800000u) {  // below the normal numbers: float32 rounds while it adds
    float size;
    memcpy(&size, &u, 4);
    size += 0.5f;
    memcpy(&u, &size, 4);
    return uint16_t(sign | (u - 0x3f000000u));
  }
  u += 0xfffu + (u >> 13 & 1);
  return uint16_t(sign | ((u - 0x38000000u) >> 13));
}
INLINE Floats low_half(Words x) { return (Floats)(x << 16); }
INLINE Floats high_half(Words x) { return (Floats)(x & 0xffff0000u); }
// Pairs rounded to nearest, halves up: for weights, which are neither negative nor infinite.
INLINE Words rounded_pairs(Floats first, Floats second) {
  const Words a = (Words)first + 0x8000u, b = (Words)second + 0x8000u;
  return (a >> 16) | (b & 0xffff0000u);
}
INLINE Halves rounded_bf16(Floats x) {  // as `to_bf16`
  const Words u = (Words)x, near = (u + 0x7fffu + (u >> 16 & 1u)) >> 16, nan = u >> 16 | 0x40u;
  const Words found = x == x ? near : nan;
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)found);
#else
  return __builtin_convertvector(found, Halves);
#endif
}
// To nearest, ties to even; keeps NaN and signs, but on x86 not numbers below the normal ones.
INLINE Halves nearest_bf16(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Halves)vcvt_bf16_f32((float32x4_t)x);
#else
  const Words u = (Words)x, near = (u + 0x7fffu + (u >> 16 & 1u)) >> 16, nan = u >> 16 | 0x40u;
  return __builtin_convertvector(x == x ? near : nan, Halves);
#endif
}
INLINE Words nearest_pairs(Floats first, Floats second) {
#if defined(__AVX512BF16__)
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  const __m512i order = _mm512_mask_add_epi16(
      (__m512i)iota(), 0xaaaaaaaa, _mm512_slli_epi32((__m512i)iota(), 16), _mm512_set1_epi16(16));
  return (Words)_mm512_permutexvar_epi16(order, both);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)first);
  const uint16x8_t both = (uint16x8_t)vcvtq_high_bf16_f32(low, (float32x4_t)second);
  return (Words)vzip1q_u16(both, vextq_u16(both, both, 4));
#else
  return __builtin_convertvector(nearest_bf16(first), Words) | __builtin_convertvector(nearest_bf16(second), Words)
                                                                   << 16;
#endif
}
// 2 W bfloat16s of each of two rows as pairs: W of them and W more, in their order or on x86 in that of `in_columns`.
INLINE void pairs_of_rows(const void* a, const void* b, Words* first, Words* second) {
#if defined(__AVX512BW__)
  const __m512i x = read<__m512i>(a), y = read<__m512i>(b);
  *first = (Words)_mm512_unpacklo_epi16(x, y), *second = (Words)_mm512_unpackhi_epi16(x, y);
#elif defined(__aarch64__)
  const uint16x8_t x = read<uint16x8_t>(a), y = read<uint16x8_t>(b);
  *first = (Words)vzip1q_u16(x, y), *second = (Words)vzip2q_u16(x, y);
#else
  auto some = [](const void* from, int at) {
    return __builtin_convertvector(read<Halves>(static_cast<const char*>(from) + 2 * at), Words);
  };
  *first = some(a, 0) | some(b, 0) << 16, *second = some(a, W) | some(b, W) << 16;
#endif
}
// The same, in their order.
INLINE void pairs_in_order(const void* a, const void* b, Words* first, Words* second) {
#if defined(__AVX512BW__)
  struct Order {
    alignas(64) uint16_t of[2 * 2 * W] = {};
    constexpr Order() {
      for (int i = 0; i < 2 * W; ++i) of[2 * i] = uint16_t(i), of[2 * i + 1] = uint16_t(i + 2 * W);
    }
  };
  static constexpr Order order;
  const __m512i x = read<__m512i>(a), y = read<__m512i>(b);
  *first = (Words)_mm512_permutex2var_epi16(x, read<__m512i>(order.of), y);
  *second = (Words)_mm512_permutex2var_epi16(x, read<__m512i>(order.of + 2 * W), y);
#else
  pairs_of_rows(a, b, first, second);
#endif
}
#if defined(__AVX512F__)
// The sums of each quarter of four vectors: lane 4 i + n has that of quarter i of vector n.
INLINE Floats sums_of_quarters(const Floats* x) {
  auto halves = [&](int n) __attribute__((always_inline)) {
    const __m512 a = (__m512)x[n], b = (__m512)x[n + 1];
    return (__m512d)((Floats)_mm512_unpacklo_ps(a, b) + (Floats)_mm512_unpackhi_ps(a, b));
  };
  const __m512d a = halves(0), b = halves(2);
  return (Floats)_mm512_unpacklo_pd(a, b) + (Floats)_mm512_unpackhi_pd(a, b);
}
#endif
// sum + a.first * b.first + a.second * b.second
INLINE Floats multiply_add(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  sum += low_half(a) * low_half(b);
  return sum + high_half(a) * high_half(b);
#endif
}
INLINE Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }
// sum + a * b[lane], or the same of pairs: on 64-bit ARM one instruction, so that four numbers of b are one load.
#if defined(__aarch64__)
constexpr bool kLanes = true;
#else
constexpr bool kLanes = false;
#endif
template <int lane> INLINE Floats multiply_add_lane(Floats sum, Floats a, Floats b) {
#if defined(__aarch64__)
  return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b, lane);
#else
  return multiply_add(sum, a, splat(b[lane]));
#endif
}
template <int lane> INLINE Floats multiply_add_lane(Floats sum, Words a, Words b) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Floats)vbfdotq_laneq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b, lane);
#else
  return multiply_add(sum, a, Words{} + b[lane]);
#endif
}

// Reduces each of W vectors to a lane, in their order.
template <class Both> INLINE Floats reduce_each(const Floats* a, Both both) {
#if defined(__AVX512F__)
#define LO(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HI(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LO2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HI2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif defined(__AVX2__)
#define LO(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HI(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LO2(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HI2(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define LO(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HI(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define LO2(a, b) SHUFFLE(a, b, 0, 1, 4, 5)
#define HI2(a, b) SHUFFLE(a, b, 2, 3, 6, 7)
#define EVEN(a, b) a
#define ODD(a, b) Floats {}
#endif
  Floats b[W / 2], c[W / 4];
  UNROLL for (int i = 0; i < W / 2; ++i) b[i] = both(LO(a[2 * i], a[2 * i + 1]), HI(a[2 * i], a[2 * i + 1]));
  UNROLL for (int i = 0; i < W / 4; ++i) c[i] = both(LO2(b[2 * i], b[2 * i + 1]), HI2(b[2 * i], b[2 * i + 1]));
  [[maybe_unused]] constexpr int one = 1 % (W / 4), two = 2 % (W / 4), three = 3 % (W / 4);
  if constexpr (W == 4) return c[0];
  const Floats d = both(EVEN(c[0], c[one]), ODD(c[0], c[one]));
  if constexpr (W == 8) return d;
  [[maybe_unused]] const Floats e = both(EVEN(c[two], c[three]), ODD(c[two], c[three]));
  return both(EVEN(d, e), ODD(d, e));
#undef LO
#undef HI
#undef LO2
#undef HI2
#undef EVEN
#undef ODD
}
INLINE Floats sums(const Floats* a) {
  return reduce_each(a, [](Floats x, Floats y) { return x + y; });
}

// a0 b0 a1 b1 ...: the first W of them and the last W.
INLINE void interleave(Floats a, Floats b, Floats* first, Floats* last) {
#if defined(__AVX512F__)
  *first = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *last = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  *first = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  *last = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *first = SHUFFLE(a, b, 0, 4, 1, 5);
  *last = SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Transposes 4 x 4 numbers, between rows that are `apart` and `to_apart` numbers apart.
INLINE void transpose(const float* from, int64_t apart, float* to, int64_t to_apart) {
  const Quad a = read<Quad>(from), b = read<Quad>(from + apart);
  const Quad c = read<Quad>(from + 2 * apart), d = read<Quad>(from + 3 * apart);
  const Quad ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
  const Quad ab2 = SHUFFLE(a, b, 2, 6, 3, 7), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
  write(to, SHUFFLE(ab, cd, 0, 1, 4, 5));
  write(to + to_apart, SHUFFLE(ab, cd, 2, 3, 6, 7));
  write(to + 2 * to_apart, SHUFFLE(ab2, cd2, 0, 1, 4, 5));
  write(to + 3 * to_apart, SHUFFLE(ab2, cd2, 2, 3, 6, 7));
}

// Prefetches into the second-level cache: it holds more misses than the first, and leaves that one to the arithmetic.
// On one core of a Zen 4, random blocks of 4 KiB: 11.6 GB/s with this hint, 7 with any other.
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// An array to be placed: where its address goes, and its numbers.
template <class X> struct Array {
  X** at;
  size_t count;
};
template <class X> INLINE Array<X> array(X*& at, int64_t count) { return {&at, size_t(count)}; }

// Memory that a thread keeps between splits, aligned to a page.
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }

  // Places arrays one after another, each at the beginning of a cache line.
  template <class... X> void place(Array<X>... arrays) {
    size_t used = 0;
    auto next = [&](size_t bytes) { return (used += (bytes + 63) / 64 * 64) - (bytes + 63) / 64 * 64; };
    const size_t offsets[] = {next(arrays.count * sizeof(X))...};
    reserve(used);
    const size_t* offset = offsets;
    ((*arrays.at = reinterpret_cast<X*>(memory + *offset++)), ...);
  }

 private:
  void reserve(size_t n) {
    if (n <= size) return;
    free(memory);
    // On two cores of a Xeon with AMX, prefill takes 0.97 to 0.98 of the time with its scratch in huge pages.
    const size_t page = kTiles && n >= 512 << 10 ? 2 << 20 : 4096;
    size = (n + page - 1) / page * page;
    memory = static_cast<char*>(aligned_alloc(page, size));
#if defined(MADV_HUGEPAGE)
    if (memory && page > 4096) madvise(memory, size, MADV_HUGEPAGE);
#endif
    if (memory) return;
    size = 0;
    out_of_memory();  // throws: schedule.cc
  }
};

}  // namespace
}  // namespace jattn_native
