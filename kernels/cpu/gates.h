// Gates of recurrent layers and what stands beside them, forward and gradient, row by row.
//
// As in rows.h: columns in 16 lanes, `T` the storage of rows, `P` that of parameters, which may
// differ; `round_to<T>` where a value is rounded. Gradients of parameters are sums over rows,
// ascending, which continue from what they hold. Order and functions: kernels/reference/gates.py.
//
// Legend: T rows, H heads, P columns of a head, N = H P.
#pragma once
#include <vector>
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE::gates {

static inline f32x16 sigmoid(f32x16 x) {
  return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), x))));
}
static inline f32x16 sigmoid_slope(f32x16 x) {
  f32x16 sig = sigmoid(x);
  return mul(sig, sub(splat(1.0f), sig));
}

// log(1 + y), y in [0, 1] ("log1p.series.v1"): 2 artanh(y / (2 + y)) in fp64, nothing fused.
static inline f32x16 log1p(f32x16 y) {
  alignas(64) float t[L];
  alignas(64) double r[L], q[L], p[L];
  store(t, y);
  for (int i = 0; i < L; i++) r[i] = (double)t[i] / ((double)t[i] + 2.0);
  for (int i = 0; i < L; i++) q[i] = r[i] * r[i], p[i] = 1.0 / 23.0;
  for (int n = 21; n >= 1; n -= 2) {
    double term = 1.0 / n;
    for (int i = 0; i < L; i++) p[i] = p[i] * q[i] + term;
  }
  for (int i = 0; i < L; i++) t[i] = (float)((2.0 * r[i]) * p[i]);
  return load(t);
}

// x above 20, else max(x, 0) + log(1 + exp(-|x|)).
static inline f32x16 softplus(f32x16 x) {
  f32x16 zero = splat(0.0f), size = max(x, sub(zero, x));
  f32x16 small = add(max(zero, x), log1p(exp(sub(zero, size))));
  return select(less(splat(20.0f), x), x, small);
}
static inline f32x16 softplus_slope(f32x16 x) {
  return select(less(splat(20.0f), x), splat(1.0f), sigmoid(x));
}
// -exp(A_log) of one head.
template <class P>
static inline f32x16 rate(const P* a_log, int64_t h) {
  alignas(64) float t[L];
  store(t, exp(load_n(a_log + h, 1)));
  return splat(-t[0]);
}
template <class T>
static inline float one(const T* p) {
  alignas(64) float t[L];
  store(t, load_n(p, 1));
  return t[0];
}

enum Gate : int64_t { SIGMOID = 0, SIGMOID_MUL = 1, RELU_SQUARED = 2 };

template <class T>
static void elementwise(int64_t kind, const T* x, const T* gate, T* y, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
  for (int64_t i = 0; i < count; i += L) {
    int64_t n = count - i;
    f32x16 v = load_n(x + i, n);
    if (kind == SIGMOID) v = sigmoid(v);
    if (kind == SIGMOID_MUL) v = mul(v, round_to<T>(sigmoid(load_n(gate + i, n))));
    if (kind == RELU_SQUARED) {
      v = max(splat(0.0f), v);
      v = mul(v, v);
    }
    store_n(y + i, v, n);
  }
}

template <class T>
static void elementwise_grad(int64_t kind, const T* dy, const T* x, const T* gate, T* dx, T* dgate,
                             int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
  for (int64_t i = 0; i < count; i += L) {
    int64_t n = count - i;
    f32x16 d = load_n(dy + i, n), v = load_n(x + i, n);
    if (kind == SIGMOID) d = mul(d, sigmoid_slope(v));
    if (kind == RELU_SQUARED) {
      v = max(splat(0.0f), v);
      d = mul(d, add(v, v));
    }
    if (kind == SIGMOID_MUL) {
      f32x16 z = load_n(gate + i, n);
      store_n(dgate + i, mul(round_to<T>(mul(d, v)), sigmoid_slope(z)), n);
      d = mul(d, round_to<T>(sigmoid(z)));
    }
    store_n(dx + i, d, n);
  }
}

// g = -exp(A_log) softplus(a + dt_bias).
template <class T, class P>
static void decay(const T* a, const P* a_log, const P* dt_bias, float* g, int64_t rows, int64_t H,
                  int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 4096)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < H; h++) {
      f32x16 factor = rate(a_log, h);
      for (int64_t c = 0; c < columns; c += L) {
        int64_t n = columns - c, at = h * columns + c;
        f32x16 x = add(load_n(a + t * H * columns + at, n), load_n(dt_bias + at, n));
        store_n(g + t * H * columns + at, mul(factor, softplus(x)), n);
      }
    }
}

template <class T, class P>
static void decay_grad(const float* dg, const T* a, const P* a_log, const P* dt_bias, T* da,
                       float* d_log, float* d_bias, int64_t rows, int64_t H, int64_t columns,
                       int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 4096)
  for (int64_t h = 0; h < H; h++) {
    f32x16 factor = rate(a_log, h);
    for (int64_t t = 0; t < rows; t++) {
      f32x16 lanes = splat(0.0f);
      for (int64_t c = 0; c < columns; c += L) {
        int64_t n = columns - c, at = h * columns + c, row = t * H * columns + at;
        f32x16 x = add(load_n(a + row, n), load_n(dt_bias + at, n)), up = load_n(dg + row, n);
        f32x16 g = mul(factor, softplus(x));
        if (n < L) g = select(lanes_in(0, (int)n), g, splat(0.0f));
        lanes = fma(up, g, lanes);
        f32x16 d = mul(mul(up, factor), softplus_slope(x));
        store_n(da + row, d, n);
        store_n(d_bias + at, add(load_n(d_bias + at, n), d), n);
      }
      d_log[h] = d_log[h] + sum_lanes(lanes);
    }
  }
}

// clamp(round(softplus(round(dt + round(bias)))), low, high).
template <class T, class P>
static inline f32x16 shifted(const T* dt, const P* bias, int64_t n) {
  return round_to<T>(add(load_n(dt, n), round_to<T>(load_n(bias, n))));
}
template <class T, class P>
static void time_step(const T* dt, const P* bias, T* y, int64_t rows, int64_t H, float low,
                      float high, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H > 4096)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < H; h += L) {
      f32x16 v = round_to<T>(softplus(shifted(dt + t * H + h, bias + h, H - h)));
      v = min(splat(high), max(splat(low), v));
      store_n(y + t * H + h, v, H - h);
    }
}
template <class T, class P>
static void time_step_grad(const T* dy, const T* dt, const P* bias, T* d_dt, float* d_bias,
                           int64_t rows, int64_t H, float low, float high) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < H; h += L) {
      int64_t n = H - h, at = t * H + h;
      f32x16 x = shifted(dt + at, bias + h, n), soft = round_to<T>(softplus(x));
      f32x16 d = mul(load_n(dy + at, n), softplus_slope(x));
      d = select(less(soft, splat(low)), splat(0.0f), d);
      d = round_to<T>(select(less(splat(high), soft), splat(0.0f), d));
      store_n(d_dt + at, d, n);
      store_n(d_bias + h, add(load_n(d_bias + h, n), d), n);
    }
}

// v = x dt, g = -exp(A_log) dt.
template <class T, class P>
static void discretised(const T* x, const T* dt, const P* a_log, float* v, float* g, int64_t rows,
                        int64_t H, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 16384)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < H; h++) {
      f32x16 step = splat(one(dt + t * H + h));
      store_n(g + t * H + h, mul(rate(a_log, h), step), 1);
      for (int64_t c = 0, at = (t * H + h) * columns; c < columns; c += L)
        store_n(v + at + c, mul(load_n(x + at + c, columns - c), step), columns - c);
    }
}
template <class T, class P>
static void discretised_grad(const float* dv, const float* dg, const T* x, const T* dt,
                             const P* a_log, T* dx, T* d_dt, float* d_log, int64_t rows, int64_t H,
                             int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 16384)
  for (int64_t h = 0; h < H; h++) {
    alignas(64) float factor[L];
    store(factor, rate(a_log, h));
    for (int64_t t = 0; t < rows; t++) {
      float step = one(dt + t * H + h), up = dg[t * H + h];
      f32x16 lanes = splat(0.0f);
      for (int64_t c = 0, at = (t * H + h) * columns; c < columns; c += L) {
        f32x16 d = load_n(dv + at + c, columns - c);
        lanes = fma(d, load_n(x + at + c, columns - c), lanes);
        store_n(dx + at + c, mul(d, splat(step)), columns - c);
      }
      store_n(d_dt + t * H + h, splat(sum_lanes(lanes) + up * factor[0]), 1);
      d_log[h] = d_log[h] + up * (factor[0] * step);
    }
  }
}

// y = o + D x.
template <class T, class P>
static void skip(const float* o, const T* x, const P* d, float* y, int64_t rows, int64_t H,
                 int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 16384)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < H; h++) {
      f32x16 factor = splat(one(d + h));
      for (int64_t c = 0, at = (t * H + h) * columns; c < columns; c += L) {
        int64_t n = columns - c;
        store_n(y + at + c, add(load_n(o + at + c, n), mul(factor, load_n(x + at + c, n))), n);
      }
    }
}
template <class T, class P>
static void skip_grad(const float* dy, const T* x, const P* d, T* dx, float* d_d, int64_t rows,
                      int64_t H, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H * columns > 16384)
  for (int64_t h = 0; h < H; h++) {
    f32x16 factor = splat(one(d + h));
    for (int64_t t = 0; t < rows; t++) {
      f32x16 lanes = splat(0.0f);
      for (int64_t c = 0, at = (t * H + h) * columns; c < columns; c += L) {
        f32x16 up = load_n(dy + at + c, columns - c);
        lanes = fma(up, load_n(x + at + c, columns - c), lanes);
        store_n(dx + at + c, mul(up, factor), columns - c);
      }
      d_d[h] = d_d[h] + sum_lanes(lanes);
    }
  }
}

}  // namespace ZM_NAMESPACE::gates

// Rows of storage T beside parameters of storage P.
#define ZM_BY_TWO(bf16, wide, call)                  \
  do {                                               \
    if (bf16 && wide) {                              \
      using T = uint16_t; using P = float; call;     \
    } else if (bf16) {                               \
      using T = uint16_t; using P = uint16_t; call;  \
    } else if (wide) {                               \
      using T = float; using P = float; call;        \
    } else {                                         \
      using T = float; using P = uint16_t; call;     \
    }                                                \
  } while (0)

extern "C" {

// gate, dgate: null but for SIGMOID_MUL.
void ZM_EXPORT(gate)(const void* x, const void* gate, void* y, int64_t kind, int64_t count,
                     int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, gates::elementwise(kind, (const T*)x, (const T*)gate, (T*)y, count,
                                         (int)threads));
}
void ZM_EXPORT(gate_grad)(const void* dy, const void* x, const void* gate, void* dx, void* dgate,
                          int64_t kind, int64_t count, int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, gates::elementwise_grad(kind, (const T*)dy, (const T*)x, (const T*)gate,
                                              (T*)dx, (T*)dgate, count, (int)threads));
}

// wide: whether the parameters are fp32. Their gradients continue from what they hold.
void ZM_EXPORT(decay)(const void* a, const void* a_log, const void* dt_bias, float* g, int64_t rows,
                      int64_t H, int64_t columns, int64_t bf16, int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::decay((const T*)a, (const P*)a_log,
                                                   (const P*)dt_bias, g, rows, H, columns,
                                                   (int)threads));
}
void ZM_EXPORT(decay_grad)(const float* dg, const void* a, const void* a_log, const void* dt_bias,
                           void* da, float* d_log, float* d_bias, int64_t rows, int64_t H,
                           int64_t columns, int64_t bf16, int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::decay_grad(dg, (const T*)a, (const P*)a_log,
                                                        (const P*)dt_bias, (T*)da, d_log, d_bias,
                                                        rows, H, columns, (int)threads));
}
void ZM_EXPORT(time_step)(const void* dt, const void* bias, void* y, int64_t rows, int64_t H,
                          float low, float high, int64_t bf16, int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::time_step((const T*)dt, (const P*)bias, (T*)y, rows,
                                                       H, low, high, (int)threads));
}
void ZM_EXPORT(time_step_grad)(const void* dy, const void* dt, const void* bias, void* d_dt,
                               float* d_bias, int64_t rows, int64_t H, float low, float high,
                               int64_t bf16, int64_t wide) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::time_step_grad((const T*)dy, (const T*)dt,
                                                            (const P*)bias, (T*)d_dt, d_bias, rows,
                                                            H, low, high));
}
void ZM_EXPORT(discretised)(const void* x, const void* dt, const void* a_log, float* v, float* g,
                            int64_t rows, int64_t H, int64_t columns, int64_t bf16, int64_t wide,
                            int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::discretised((const T*)x, (const T*)dt,
                                                         (const P*)a_log, v, g, rows, H, columns,
                                                         (int)threads));
}
void ZM_EXPORT(discretised_grad)(const float* dv, const float* dg, const void* x, const void* dt,
                                 const void* a_log, void* dx, void* d_dt, float* d_log,
                                 int64_t rows, int64_t H, int64_t columns, int64_t bf16,
                                 int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::discretised_grad(
                            dv, dg, (const T*)x, (const T*)dt, (const P*)a_log, (T*)dx, (T*)d_dt,
                            d_log, rows, H, columns, (int)threads));
}
void ZM_EXPORT(skip)(const float* o, const void* x, const void* d, float* y, int64_t rows,
                     int64_t H, int64_t columns, int64_t bf16, int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::skip(o, (const T*)x, (const P*)d, y, rows, H, columns,
                                                  (int)threads));
}
void ZM_EXPORT(skip_grad)(const float* dy, const void* x, const void* d, void* dx, float* d_d,
                          int64_t rows, int64_t H, int64_t columns, int64_t bf16, int64_t wide,
                          int64_t threads) {
  ZM_BY_TWO(bf16, wide, ZM_NAMESPACE::gates::skip_grad(dy, (const T*)x, (const P*)d, (T*)dx, d_d,
                                                       rows, H, columns, (int)threads));
}

}  // extern "C"
