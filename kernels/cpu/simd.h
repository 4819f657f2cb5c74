// Sixteen fp32 lanes, three ways: AVX-512, AVX2 + FMA, and plain C++ with std::fma.
//
// Every operator of the CPU core is written once against `f32x16`. The three variants execute the
// same IEEE operations lane by lane, so their bits are equal (a test proves it on each machine);
// the variant is schedule, never contract. Compile with -ffp-contract=off: an FMA happens exactly
// where `fma` is written.
//
// Legend: L = 16 lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(ZM_AVX512) || defined(ZM_AVX2)
#include <immintrin.h>
#endif

namespace ZM_NAMESPACE {

constexpr int L = 16;

#if defined(ZM_AVX512)

struct f32x16 { __m512 v; };
using mask16 = __mmask16;
static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// max/min return the second operand when either is NaN, in all three variants.
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline f32x16 round_even(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for integral n in [-126, 127].
static inline f32x16 pow2i(f32x16 n) {
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
static inline mask16 lanes_in(int lo, int hi) {  // lanes lo <= i < hi
  uint32_t below_hi = hi >= 16 ? 0xffffu : (hi <= 0 ? 0u : (1u << hi) - 1u);
  uint32_t below_lo = lo >= 16 ? 0xffffu : (lo <= 0 ? 0u : (1u << lo) - 1u);
  return (mask16)(below_hi & ~below_lo);
}
static inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
// Sixteen words of two bf16 each: the high halves, the low halves.
static inline f32x16 load_high(const uint32_t* p) {
  __m512i u = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u));
  return {_mm512_castsi512_ps(u)};
}
static inline f32x16 load_low(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline f32x16 load_bf16(const uint16_t* p) {
  __m256i h = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// Round to bf16 (nearest even, NaN to 0x7fc0), kept as fp32.
static inline f32x16 round_bf16(f32x16 a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  u = _mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, u, _mm512_set1_epi32(0x7fc00000)))};
}
static inline void store_bf16(uint16_t* p, f32x16 a) {
  __m512i u = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(a).v), 16);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(u));
}
static inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
static inline mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
static inline bool any(mask16 m) { return m != 0; }

#elif defined(ZM_AVX2)

struct f32x16 { __m256 a, b; };
struct mask16 { __m256 a, b; };
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32x16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline f32x16 splat(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline f32x16 add(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline f32x16 sub(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline f32x16 mul(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline f32x16 div(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline f32x16 fnma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
static inline f32x16 max(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline f32x16 min(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline f32x16 round_even(f32x16 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 pow2i8(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
static inline f32x16 pow2i(f32x16 n) { return {pow2i8(n.a), pow2i8(n.b)}; }
static inline mask16 lanes_in(int lo, int hi) {
  __m256i i0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), i1 = _mm256_add_epi32(i0, _mm256_set1_epi32(8));
  __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(i0, l), _mm256_cmpgt_epi32(h, i0))),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(i1, l), _mm256_cmpgt_epi32(h, i1)))};
}
static inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
static inline f32x16 load_high(const uint32_t* p) {
  __m256i high = _mm256_set1_epi32((int)0xffff0000u);
  __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 8));
  return {_mm256_castsi256_ps(_mm256_and_si256(a, high)),
          _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
static inline f32x16 load_low(const uint32_t* p) {
  __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
static inline f32x16 load_bf16(const uint16_t* p) {
  __m128i h0 = _mm_loadu_si128((const __m128i*)p), h1 = _mm_loadu_si128((const __m128i*)(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h1), 16))};
}
static inline __m256 round_bf16_8(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  u = _mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u));
  __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(_mm256_castsi256_ps(u), quiet, nan);
}
static inline f32x16 round_bf16(f32x16 x) { return {round_bf16_8(x.a), round_bf16_8(x.b)}; }
static inline void store_bf16(uint16_t* p, f32x16 x) {
  x = round_bf16(x);
  __m256i a = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16);
  __m256i b = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
  __m256i ab = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  _mm256_storeu_si256((__m256i*)p, ab);
}
static inline f32x16 sqrt(f32x16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline mask16 less(f32x16 x, f32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
static inline bool any(mask16 m) {
  return (_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b)) != 0;
}

#else

struct f32x16 { float v[16]; };
struct mask16 { bool v[16]; };
#define ZM_EACH(expr) do { f32x16 r; for (int i = 0; i < 16; i++) r.v[i] = (expr); return r; } while (0)
static inline f32x16 load(const float* p) { f32x16 r; memcpy(r.v, p, 64); return r; }
static inline void store(float* p, f32x16 x) { memcpy(p, x.v, 64); }
static inline f32x16 splat(float x) { ZM_EACH(x); }
static inline f32x16 add(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] + b.v[i]); }
static inline f32x16 sub(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] - b.v[i]); }
static inline f32x16 mul(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] * b.v[i]); }
static inline f32x16 div(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] / b.v[i]); }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { ZM_EACH(std::fma(a.v[i], b.v[i], c.v[i])); }
static inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { ZM_EACH(std::fma(-a.v[i], b.v[i], c.v[i])); }
static inline f32x16 max(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline f32x16 min(f32x16 a, f32x16 b) { ZM_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline f32x16 round_even(f32x16 a) { ZM_EACH(std::nearbyint(a.v[i])); }
static inline float pow2i1(float n) {
  uint32_t e = (uint32_t)((int)n + 127) << 23; float f; memcpy(&f, &e, 4); return f;
}
static inline f32x16 pow2i(f32x16 n) { ZM_EACH(pow2i1(n.v[i])); }
static inline mask16 lanes_in(int lo, int hi) {
  mask16 m; for (int i = 0; i < 16; i++) m.v[i] = i >= lo && i < hi; return m;
}
static inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) { ZM_EACH(m.v[i] ? yes.v[i] : no.v[i]); }
static inline float bf16_to_f32(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline f32x16 load_high(const uint32_t* p) { ZM_EACH(bf16_to_f32((uint16_t)(p[i] >> 16))); }
static inline f32x16 load_low(const uint32_t* p) { ZM_EACH(bf16_to_f32((uint16_t)p[i])); }
static inline f32x16 load_bf16(const uint16_t* p) { ZM_EACH(bf16_to_f32(p[i])); }
static inline float round_bf16_1(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  u = x != x ? 0x7fc00000u : (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  memcpy(&x, &u, 4);
  return x;
}
static inline f32x16 round_bf16(f32x16 a) { ZM_EACH(round_bf16_1(a.v[i])); }
static inline void store_bf16(uint16_t* p, f32x16 a) {
  a = round_bf16(a);
  for (int i = 0; i < 16; i++) { uint32_t u; memcpy(&u, a.v + i, 4); p[i] = (uint16_t)(u >> 16); }
}
static inline f32x16 sqrt(f32x16 a) { ZM_EACH(std::sqrt(a.v[i])); }
static inline mask16 less(f32x16 a, f32x16 b) {
  mask16 m; for (int i = 0; i < 16; i++) m.v[i] = a.v[i] < b.v[i]; return m;
}
static inline bool any(mask16 m) {
  bool r = false;
  for (int i = 0; i < 16; i++) r |= m.v[i];
  return r;
}
#undef ZM_EACH

#endif

// exp(x), the only exponential of the CPU core ("exp.cpu.v1"): range reduction by ln 2 in two
// pieces, degree-5 polynomial (Cephes' coefficients), scaled by 2^n. Inputs are clamped to
// [-87.33654, 88]; callers mask -inf themselves. Lane-wise, so no tail path exists.
static inline f32x16 exp(f32x16 x) {
  x = min(splat(88.0f), max(splat(-87.33654f), x));  // this operand order lets a NaN through
  f32x16 n = round_even(mul(x, splat(1.44269504f)));
  f32x16 r = fnma(n, splat(0.693359375f), x);
  r = fnma(n, splat(-2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, splat(1.0f)));
  return mul(p, pow2i(n));
}

// tanh.cpu.v1: odd polynomial below 0.625 (Cephes' tanhf), else 1 - 2 / (exp(2|x|) + 1).
static inline f32x16 tanh(f32x16 x) {
  f32x16 zero = splat(0.0f), one = splat(1.0f), size = max(x, sub(zero, x)), z = mul(x, x);
  f32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  f32x16 small = fma(mul(p, z), x, x);
  f32x16 large = sub(one, div(splat(2.0f), add(exp(add(size, size)), one)));
  large = select(less(x, zero), sub(zero, large), large);
  return select(less(size, splat(0.625f)), small, large);
}

// Sum of 16 lanes by halving: (i) + (i + 8), then +4, +2, +1 ("lanes16.tree.v1").
static inline float sum_lanes(f32x16 x) {
  alignas(64) float t[16];
  store(t, x);
  for (int w = 8; w > 0; w >>= 1) for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
static inline float max_lanes(f32x16 x) {
  alignas(64) float t[16];
  store(t, x);
  float m = t[0];
  for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
  return m;
}

}  // namespace ZM_NAMESPACE
