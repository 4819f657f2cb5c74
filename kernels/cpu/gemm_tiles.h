// Register tiles of the GEMM: R rows times P panels of short chains, in three ways of reading bf16.
//
//   floats  A and B are fp32.
//   pairs   A is fp32; B holds bf16 pairs, widened in registers: half the memory for the same bits.
//   dots    A and B hold bf16 pairs, and the processor's dot instruction (AVX512_BF16) adds them:
//           two FMAs in order, each rounded to nearest even, so the same bits at twice the speed.
//           It flushes subnormal numbers, which FMAs keep. `dot_is_exact` rules them out from the
//           smallest magnitudes: a sum of products is a multiple of the smallest product's last
//           bit, so it is never subnormal when that bit is not. Elsewhere `pairs` arithmetic runs.
//
// A pair is one 32-bit word with the number of the even k in its high half, since the instruction
// adds the high half first; an odd K ends in a zero. `dots_are_chains` asks the processor.
//
// Legend: R rows of a tile, P panels of a group, L = 16 lanes.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include "simd.h"

namespace ZM_NAMESPACE::gemm {

// Accumulators that fit the register file beside one k-step of B, in units of f32x16.
#if defined(ZM_AVX512)
constexpr int TILE_ROWS = 14, ACCUMULATORS = 28;
#elif defined(ZM_AVX2)
constexpr int TILE_ROWS = 6, ACCUMULATORS = 6;
#else
constexpr int TILE_ROWS = 4, ACCUMULATORS = 4;
#endif
constexpr int GROUP_PANELS = 8;

constexpr int most_panels(int rows) { return std::min(GROUP_PANELS, ACCUMULATORS / rows); }

// What becomes of the accumulators in `acc`: overwritten by new chains, continued, or added to.
enum class Chain { fresh, continued, added };
enum class Way { floats, pairs, dots };

// R * P accumulators in registers.
template <int R, int P>
struct Accumulators {
  f32x16 c[R][P];
  inline void begin(const float* acc, int64_t stride, Chain chain) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
        c[r][p] = chain == Chain::continued ? load(acc + r * stride + p * L) : splat(0.0f);
  }
  inline void step(const float* a, const f32x16* b) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      f32x16 ar = splat(a[r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) c[r][p] = fma(ar, b[p], c[r][p]);
    }
  }
  inline void end(float* acc, int64_t stride, Chain chain) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        float* to = acc + r * stride + p * L;
        store(to, chain == Chain::added ? add(load(to), c[r][p]) : c[r][p]);
      }
  }
};

// A [steps][R] fp32; B panels of [steps][16] fp32, panel_stride words apart.
template <int R, int P>
static void tile_floats(const void* a_words, const uint32_t* b_words, int64_t panel_stride,
                        int64_t steps, float* acc, int64_t acc_stride, Chain chain) {
  const float *a = (const float*)a_words, *b = (const float*)b_words;
  Accumulators<R, P> sums;
  sums.begin(acc, acc_stride, chain);
  for (int64_t k = 0; k < steps; k++) {
    f32x16 bk[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) bk[p] = load(b + p * panel_stride + k * L);
    sums.step(a + k * R, bk);
  }
  sums.end(acc, acc_stride, chain);
}

// A [steps][R] fp32; B panels of [ceil(steps / 2)][16] pairs.
template <int R, int P>
static void tile_pairs(const void* a_words, const uint32_t* b, int64_t panel_stride, int64_t steps,
                       float* acc, int64_t acc_stride, Chain chain) {
  const float* a = (const float*)a_words;
  Accumulators<R, P> sums;
  sums.begin(acc, acc_stride, chain);
  for (int64_t k = 0; k < steps; k += 2) {
    f32x16 bk[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) bk[p] = load_high(b + p * panel_stride + k / 2 * L);
    sums.step(a + k * R, bk);
    if (k + 1 == steps) break;
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) bk[p] = load_low(b + p * panel_stride + k / 2 * L);
    sums.step(a + (k + 1) * R, bk);
  }
  sums.end(acc, acc_stride, chain);
}

#if defined(ZM_AVX512)
static inline float high_half(uint32_t pair) {
  pair &= 0xffff0000u;
  float f;
  memcpy(&f, &pair, 4);
  return f;
}
static inline float low_half(uint32_t pair) { return high_half(pair << 16); }

// A [ceil(steps / 2)][R] pairs and B likewise, without the dot instruction.
template <int R, int P>
static void tile_unpaired(const void* a_words, const uint32_t* b, int64_t panel_stride,
                          int64_t steps, float* acc, int64_t acc_stride, Chain chain) {
  const uint32_t* a = (const uint32_t*)a_words;
  Accumulators<R, P> sums;
  sums.begin(acc, acc_stride, chain);
  for (int64_t k = 0; k < (steps + 1) / 2; k++) {
    f32x16 bk[P];
    float ak[R];
    for (int r = 0; r < R; r++) ak[r] = high_half(a[k * R + r]);
    for (int p = 0; p < P; p++) bk[p] = load_high(b + p * panel_stride + k * L);
    sums.step(ak, bk);
    for (int r = 0; r < R; r++) ak[r] = low_half(a[k * R + r]);
    for (int p = 0; p < P; p++) bk[p] = load_low(b + p * panel_stride + k * L);
    sums.step(ak, bk);
  }
  sums.end(acc, acc_stride, chain);
}

#define ZM_DOTS __attribute__((target("avx512bf16")))

ZM_DOTS static inline __m512 dot(__m512 c, uint32_t a, __m512i b) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}

template <int R, int P>
ZM_DOTS static void tile_dots(const void* a_words, const uint32_t* b, int64_t panel_stride,
                              int64_t steps, float* acc, int64_t acc_stride, Chain chain) {
  const uint32_t* a = (const uint32_t*)a_words;
  Accumulators<R, P> sums;
  sums.begin(acc, acc_stride, chain);
  for (int64_t k = 0; k < (steps + 1) / 2; k++) {
    __m512i bk[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) bk[p] = _mm512_loadu_si512(b + p * panel_stride + k * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) sums.c[r][p].v = dot(sums.c[r][p].v, a[k * R + r], bk[p]);
  }
  sums.end(acc, acc_stride, chain);
}
#endif

using TileFunction = void (*)(const void*, const uint32_t*, int64_t, int64_t, float*, int64_t,
                              Chain);
template <Way W, bool Exact, int R, int P>
constexpr TileFunction tile_or_null() {
  if constexpr (P > most_panels(R))
    return nullptr;
  else if constexpr (W == Way::floats)
    return tile_floats<R, P>;
  else if constexpr (W == Way::pairs)
    return tile_pairs<R, P>;
#if defined(ZM_AVX512)
  else if constexpr (Exact)
    return tile_dots<R, P>;
  else
    return tile_unpaired<R, P>;
#endif
}
template <Way W, bool Exact, int R, int... P>
constexpr std::array<TileFunction, GROUP_PANELS> tile_row(std::integer_sequence<int, P...>) {
  return {tile_or_null<W, Exact, R, P + 1>()...};
}
template <Way W, bool Exact, int... R>
constexpr auto tile_table(std::integer_sequence<int, R...>) {
  return std::array<std::array<TileFunction, GROUP_PANELS>, TILE_ROWS>{
      tile_row<W, Exact, R + 1>(std::make_integer_sequence<int, GROUP_PANELS>())...};
}
template <Way W, bool Exact = true>
constexpr auto TILES = tile_table<W, Exact>(std::make_integer_sequence<int, TILE_ROWS>());

// The smallest magnitude that is not zero, as the bits of a bf16 less one (65535: none), and 0 where
// a number is not finite: what `dot_is_exact` needs to know about one side.
static inline uint32_t smallest(const uint16_t* x, int64_t count, uint32_t so_far) {
  uint16_t low = 0xffff, high = 0;
  for (int64_t i = 0; i < count; i++) {
    uint16_t size = x[i] & 0x7fff;
    low = std::min<uint16_t>(low, (uint16_t)(size - 1));
    high = std::max(high, size);
  }
  return high >= 0x7f80 ? 0 : std::min<uint32_t>(so_far, low);
}
constexpr uint32_t NONE_SMALL = 0xffff;

// Exponents of the two smallest magnitudes, biased by 127: their product's last bit has exponent
// (a - 127) + (b - 127) - 14, which must not lie below -126; neither may be subnormal itself.
static inline bool dot_is_exact(uint32_t a, uint32_t b) {
  uint32_t ea = (a + 1) >> 7, eb = (b + 1) >> 7;
  return ea > 0 && eb > 0 && ea + eb >= 142;
}

}  // namespace ZM_NAMESPACE::gemm

// Whether the dot instruction is what `dots` takes it for: two FMAs, the high half first.
#if defined(ZM_AVX512)
ZM_DOTS static int64_t dots_are_chains() {
  uint32_t state = 12345;
  auto draw = [&state] { return state = state * 1664525u + 1013904223u; };
  auto number = [&draw] {  // bf16 of either sign with exponents 96 ... 159
    uint32_t x = draw() >> 8;
    return (x & 0x807f) | ((96 + (x >> 16) % 64) << 7);
  };
  using namespace ZM_NAMESPACE;
  for (int turn = 0; turn < 4096; turn++) {
    uint32_t a = number() << 16 | number();
    alignas(64) uint32_t b[16];
    alignas(64) float from[16], by_dot[16], by_fma[16];
    for (int i = 0; i < 16; i++) {
      b[i] = number() << 16 | number();
      uint32_t start = (draw() & 0x807fffff) | (96 + (draw() >> 16) % 64) << 23;
      memcpy(from + i, &start, 4);
    }
    _mm512_store_ps(by_dot, gemm::dot(_mm512_load_ps(from), a, _mm512_load_si512(b)));
    f32x16 c = fma(splat(gemm::high_half(a)), load_high(b), load(from));
    store(by_fma, fma(splat(gemm::low_half(a)), load_low(b), c));
    if (memcmp(by_dot, by_fma, sizeof by_dot)) return 0;
  }
  return 1;
}
extern "C" void ZM_EXPORT(dots_are_chains)(int64_t* yes) { *yes = dots_are_chains(); }
#endif
