// The causal depthwise convolution of recurrent layers ("convolution.taps"), over pages.
//
// One FMA chain per element from the bias or 0, oldest tap first; the sum is rounded to storage,
// then its silu. A row's earlier rows come from this call or from its request's pages; before its
// first position they are zeros. Gradient: dx row by row; dw and db one chain over rows, ascending.
//
// Legend: B requests, C rows of a page, D channels, W taps (at most MAX_TAPS).
#pragma once
#include <vector>
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE::convolution {

constexpr int64_t MAX_TAPS = 4;

// The taps with channels along lanes: [W, D] fp32.
template <class T>
static std::vector<float> by_tap(const T* weight, int64_t D, int64_t W) {
  std::vector<float> taps(W * D), row(D * W + L);
  for (int64_t i = 0; i < D * W; i += L) store_n(row.data() + i, load_n(weight + i, D * W - i), L);
  for (int64_t d = 0; d < D; d++)
    for (int64_t w = 0; w < W; w++) taps[w * D + d] = row[d * W + w];
  return taps;
}

// z of one row at columns d..: rows[w] is null before the request.
template <class T>
static inline f32x16 sum(const T* const* rows, const float* taps, const T* bias, int64_t d,
                         int64_t D, int64_t W) {
  f32x16 z = splat(0.0f);
  if (bias) z = add(z, load_n(bias + d, D - d));
  for (int64_t w = 0; w < W; w++) {
    f32x16 x = rows[w] ? load_n(rows[w] + d, D - d) : splat(0.0f);
    z = fma(x, load_n(taps + w * D + d, D - d), z);
  }
  return round_to<T>(z);
}

template <class T>
static void forward(const T* x, const T* weight, const T* bias, const T* pages,
                    const int32_t* query_start, const int32_t* length, const int32_t* table, T* y,
                    int64_t B, int64_t widest, int64_t C, int64_t D, int64_t W, bool silu,
                    int threads) {
  std::vector<float> taps = by_tap(weight, D, W);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if ((query_start[B]) * D > 16384)
  for (int64_t b = 0; b < B; b++) {
    int64_t first = query_start[b], stop = query_start[b + 1], start = length[b] - (stop - first);
    for (int64_t t = first; t < stop; t++) {
      const T* rows[MAX_TAPS];
      for (int64_t w = 0; w < W; w++) {
        int64_t row = t - (W - 1) + w, position = start + row - first;
        rows[w] = position < 0 ? nullptr
                  : row >= first ? x + row * D
                                 : pages + (table[b * widest + position / C] * C + position % C) * D;
      }
      for (int64_t d = 0; d < D; d += L) {
        f32x16 z = sum(rows, taps.data(), bias, d, D, W);
        store_n(y + t * D + d, silu ? activated<Silu, T>(z) : z, D - d);
      }
    }
  }
}

// dz [T, D] in storage, then dx, dw [W, D], db; whole requests.
template <class T>
static void backward(const T* dy, const T* x, const T* weight, const T* bias,
                     const int32_t* query_start, T* dz, T* dx, float* dw, float* db, int64_t B,
                     int64_t D, int64_t W, bool silu, int threads) {
  std::vector<float> taps = by_tap(weight, D, W);
  int64_t blocks = (D + L - 1) / L;
#pragma omp parallel for num_threads(threads) if ((query_start[B]) * D > 16384)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t d = block * L, n = D - d;
    f32x16 sums[MAX_TAPS], total = db ? load_n(db + d, n) : splat(0.0f);
    for (int64_t w = 0; w < W; w++) sums[w] = load_n(dw + w * D + d, n);
    for (int64_t b = 0; b < B; b++) {
      int64_t first = query_start[b], stop = query_start[b + 1];
      for (int64_t t = first; t < stop; t++) {
        const T* rows[MAX_TAPS];
        for (int64_t w = 0; w < W; w++)
          rows[w] = t - (W - 1) + w >= first ? x + (t - (W - 1) + w) * D : nullptr;
        f32x16 g = load_n(dy + t * D + d, n);
        if (silu) {
          f32x16 z = sum(rows, taps.data(), bias, d, D, W);
          g = round_to<T>(mul(g, Silu::slope(z, div(splat(1.0f), one_plus_exp<Silu>(z)))));
        }
        store_n(dz + t * D + d, g, n);
        for (int64_t w = 0; w < W; w++)
          sums[w] = fma(rows[w] ? load_n(rows[w] + d, n) : splat(0.0f), g, sums[w]);
        total = add(total, g);
      }
      for (int64_t t = first; t < stop; t++) {
        f32x16 sum = splat(0.0f);
        for (int64_t later = 0; later < W; later++) {
          f32x16 g = t + later < stop ? load_n(dz + (t + later) * D + d, n) : splat(0.0f);
          sum = fma(g, load_n(taps.data() + (W - 1 - later) * D + d, n), sum);
        }
        store_n(dx + t * D + d, sum, n);
      }
    }
    for (int64_t w = 0; w < W; w++) store_n(dw + w * D + d, sums[w], n);
    if (db) store_n(db + d, total, n);
  }
}

}  // namespace ZM_NAMESPACE::convolution

extern "C" {

void ZM_EXPORT(convolution)(const void* x, const void* weight, const void* bias, const void* pages,
                            const int32_t* query_start, const int32_t* length,
                            const int32_t* table, void* y, int64_t B, int64_t widest, int64_t C,
                            int64_t D, int64_t W, int64_t silu, int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, convolution::forward((const T*)x, (const T*)weight, (const T*)bias,
                                           (const T*)pages, query_start, length, table, (T*)y, B,
                                           widest, C, D, W, silu, (int)threads));
}

// dz [T, D] is scratch; dw [W, D] and db (null without a bias) continue from what they hold.
void ZM_EXPORT(convolution_grad)(const void* dy, const void* x, const void* weight,
                                 const void* bias, const int32_t* query_start, void* dz, void* dx,
                                 float* dw, float* db, int64_t B, int64_t D, int64_t W,
                                 int64_t silu, int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, convolution::backward((const T*)dy, (const T*)x, (const T*)weight,
                                            (const T*)bias, query_start, (T*)dz, (T*)dx, dw, db, B,
                                            D, W, silu, (int)threads));
}

}  // extern "C"
