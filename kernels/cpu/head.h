// Rows of a vocabulary: log-probabilities, their gradient, embedding rows in and out.
//
// "logprob.lanes16": z = logit / temperature by IEEE division; m = max z; the sum of exp(z - m) runs
// in 16 lanes over the vocabulary in ascending order and ends in the sum_lanes tree; terms below
// EXP_FLOOR are exactly zero; lanes of the last group that lie beyond the vocabulary add nothing.
// lp = (z_target - m) - log(sum). A NaN logit makes the row's result NaN: max may lose it, the sum
// cannot. Rows are independent, so threads share them out freely.
//
// The gradient repeats z and exp from the saved m and log(sum): nothing of size V is kept.
//
// Legend: T = rows (tokens), V = vocabulary, H = hidden width.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include "gemm.h"
#include "simd.h"

namespace ZM_NAMESPACE::head {

constexpr float EXP_FLOOR = -87.33654f;
constexpr int64_t SMALL = 1 << 14;  // up to here one thread is done before two have met

static inline f32x16 exp_or_zero(f32x16 x) {
  return select(less(x, splat(EXP_FLOOR)), splat(0.0f), exp(x));
}

// log(s) for s >= 1 ("log.series.v1"): s = 2^e * f with f in [sqrt(1/2), sqrt(2)), then the series of
// 2 artanh((f - 1) / (f + 1)) up to the 23rd power. All in fp64 with separate mul and add, rounded
// once to fp32, so any device with IEEE fp64 gets the same bits. NaN and infinity pass through.
static inline float log_series(float s) {
  if (!(s <= 3.4028235e38f)) return s;
  int e;
  double f = std::frexp((double)s, &e);
  if (f < 0.70710678118654752440) {
    f = f * 2.0;
    e -= 1;
  }
  double r = (f - 1.0) / (f + 1.0), q = r * r, p = 1.0 / 23.0;
  for (int n = 21; n >= 1; n -= 2) p = p * q + 1.0 / n;
  return (float)((double)e * 0.69314718055994530942 + (2.0 * r) * p);
}

// Calls body(z, first column, number of valid lanes) for each group of 16 columns.
template <class Body>
static inline void each_tempered(const float* row, int64_t V, float temperature, Body body) {
  f32x16 t = splat(temperature);
  int64_t v = 0;
  for (; v + L <= V; v += L) body(div(load(row + v), t), v, L);
  if (v < V) {
    alignas(64) float rest[L] = {0};
    memcpy(rest, row + v, sizeof(float) * (V - v));
    body(div(load(rest), t), v, (int)(V - v));
  }
}

static inline void row_logprob(const float* row, int64_t target, float temperature, int64_t V,
                               float* lp, float* row_max, float* row_log_sum) {
  f32x16 lanes_max = splat(-INFINITY), lanes_sum = splat(0.0f);
  each_tempered(row, V, temperature, [&](f32x16 z, int64_t, int valid) {
    f32x16 m = max(z, lanes_max);
    lanes_max = valid == L ? m : select(lanes_in(0, valid), m, lanes_max);
  });
  float m = max_lanes(lanes_max) + 0.0f;  // one zero, not two
  each_tempered(row, V, temperature, [&](f32x16 z, int64_t, int valid) {
    f32x16 s = add(lanes_sum, exp_or_zero(sub(z, splat(m))));
    lanes_sum = valid == L ? s : select(lanes_in(0, valid), s, lanes_sum);
  });
  float log_sum = log_series(sum_lanes(lanes_sum));
  *row_max = log_sum == log_sum ? m : log_sum;
  *row_log_sum = log_sum;
  *lp = (row[target] / temperature - m) - log_sum;
}

static inline void row_logprob_grad(const float* row, int64_t target, float temperature, float m,
                                    float log_sum, float grad, int64_t V, float* out) {
  each_tempered(row, V, temperature, [&](f32x16 z, int64_t v, int valid) {
    bool here = target >= v && target < v + L;
    int lane = here ? (int)(target - v) : 0;
    f32x16 onehot = select(lanes_in(lane, here ? lane + 1 : 0), splat(1.0f), splat(0.0f));
    f32x16 p = exp_or_zero(sub(sub(z, splat(m)), splat(log_sum)));
    f32x16 d = div(mul(splat(grad), sub(onehot, p)), splat(temperature));
    if (valid == L) {
      store(out + v, d);
    } else {
      alignas(64) float rest[L];
      store(rest, d);
      memcpy(out + v, rest, sizeof(float) * valid);
    }
  });
}

}  // namespace ZM_NAMESPACE::head

// logits [T, V], targets [T], temperature [T] -> lp, row_max, row_log_sum [T].
extern "C" void ZM_EXPORT(logprob)(const float* logits, const int64_t* targets,
                                   const float* temperature, float* lp, float* row_max,
                                   float* row_log_sum, int64_t T, int64_t V, int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::head;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * V > SMALL)
  for (int64_t t = 0; t < T; t++)
    row_logprob(logits + t * V, targets[t], temperature[t], V, lp + t, row_max + t,
                row_log_sum + t);
}

// d_logits [T, V] = (grad * (onehot - softmax)) / temperature; may overwrite logits in place.
extern "C" void ZM_EXPORT(logprob_grad)(const float* logits, const int64_t* targets,
                                        const float* temperature, const float* row_max,
                                        const float* row_log_sum, const float* grad,
                                        float* d_logits, int64_t T, int64_t V, int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::head;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * V > SMALL)
  for (int64_t t = 0; t < T; t++)
    row_logprob_grad(logits + t * V, targets[t], temperature[t], row_max[t], row_log_sum[t],
                     grad[t], V, d_logits + t * V);
}

// out[t] = table[ids[t]]; rows are copied as bytes.
extern "C" void ZM_EXPORT(gather_rows)(const char* table, const int64_t* ids, char* out, int64_t T,
                                       int64_t row_bytes, int64_t threads) {
  using namespace ZM_NAMESPACE::head;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * row_bytes > 4 * SMALL)
  for (int64_t t = 0; t < T; t++)
    memcpy(out + t * row_bytes, table + ids[t] * row_bytes, row_bytes);
}

// d_table[ids[t]] += grad[t] for t ascending, in fp32. Threads own columns, so the order is one.
extern "C" void ZM_EXPORT(scatter_rows)(const void* grad, int64_t grad_bf16, const int64_t* ids,
                                        float* d_table, int64_t T, int64_t H, int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::head;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * H > SMALL)
  for (int64_t part = 0; part < threads; part++) {
    int64_t first = H * part / threads, last = H * (part + 1) / threads;
    for (int64_t t = 0; t < T; t++) {
      float* sum = d_table + ids[t] * H;
      for (int64_t h = first; h < last; h++)
        sum[h] += ZM_NAMESPACE::gemm::widen(grad, t * H + h, grad_bf16);
    }
  }
}
