// Matrix products as linear chains (simple first version; see the signatures).
#pragma once
#include <cstdint>
#include <cstring>
#include "simd.h"

namespace ZM_NAMESPACE {
static inline float widen(const void* p, int64_t i, int64_t is_bf16) {
  if (!is_bf16) return ((const float*)p)[i];
  uint32_t u = (uint32_t)((const uint16_t*)p)[i] << 16;
  float f; memcpy(&f, &u, 4); return f;
}
static inline uint16_t round_bf16(float x) {
  uint32_t u; memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline void narrow(void* p, int64_t i, int64_t is_bf16, float x) {
  if (is_bf16) ((uint16_t*)p)[i] = round_bf16(x); else ((float*)p)[i] = x;
}
}  // namespace ZM_NAMESPACE

extern "C" void ZM_EXPORT(pack)(const void* W, int64_t w_bf16, int64_t N, int64_t K, float* panels, int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < (N + 15) / 16; p++)
    for (int64_t k = 0; k < K; k++)
      for (int j = 0; j < 16; j++) {
        int64_t n = p * 16 + j;
        panels[(p * K + k) * 16 + j] = n < N ? widen(W, n * K + k, w_bf16) : 0.0f;
      }
}

extern "C" void ZM_EXPORT(gemm)(const void* A, int64_t a_bf16, const float* panels, const float* bias, void* C,
                                int64_t c_bf16, int64_t M, int64_t N, int64_t K, int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < (N + 15) / 16; p++)
    for (int64_t m = 0; m < M; m++) {
      f32x16 acc = splat(0.0f);
      for (int64_t k = 0; k < K; k++) acc = fma(splat(widen(A, m * K + k, a_bf16)), load(panels + (p * K + k) * 16), acc);
      float t[16]; store(t, acc);
      for (int64_t n = p * 16; n < N && n < p * 16 + 16; n++) narrow(C, m * N + n, c_bf16, bias ? t[n - p * 16] + bias[n] : t[n - p * 16]);
    }
}

extern "C" void ZM_EXPORT(gemm_rows)(const void* A, int64_t a_bf16, int64_t a_transposed, const void* B, int64_t b_bf16,
                                     const float* initial, void* C, int64_t c_bf16, int64_t M, int64_t N, int64_t K,
                                     int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads)
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      float acc = initial ? initial[m * N + n] : 0.0f;
      for (int64_t k = 0; k < K; k++)
        acc = std::fma(widen(A, a_transposed ? k * M + m : m * K + k, a_bf16), widen(B, k * N + n, b_bf16), acc);
      narrow(C, m * N + n, c_bf16, acc);
    }
}
