// Row operators: RMSNorm, rotary, silu, gelu, softcap and their backward passes, fp32 and bf16.
//
// Every row is computed by one thread and reads nothing of its neighbours. Columns go through 16
// lanes; a last chunk of fewer columns is padded with zeros and runs through the same lanes, so no
// scalar tail exists. `T` is the storage type: float, or uint16_t holding bf16. Arithmetic is fp32;
// `round_to<T>` marks each place where a value is rounded to storage.
#pragma once
#include "simd.h"

namespace ZM_NAMESPACE {

static inline f32x16 load_as(const float* p) { return load(p); }
static inline f32x16 load_as(const uint16_t* p) { return load_bf16(p); }
static inline void store_as(float* p, f32x16 v) { store(p, v); }
static inline void store_as(uint16_t* p, f32x16 v) { store_bf16(p, v); }
template <class T>
static inline f32x16 round_to(f32x16 v);
template <>
inline f32x16 round_to<float>(f32x16 v) {
  return v;
}
template <>
inline f32x16 round_to<uint16_t>(f32x16 v) {
  return round_bf16(v);
}

// The first n <= 16 elements; missing lanes are zero.
template <class T>
static inline f32x16 load_n(const T* p, int64_t n) {
  if (n >= L) return load_as(p);
  alignas(64) T t[L] = {};
  memcpy(t, p, n * sizeof(T));
  return load_as(t);
}
template <class T>
static inline void store_n(T* p, f32x16 v, int64_t n) {
  if (n >= L) return store_as(p, v);
  alignas(64) T t[L];
  store_as(t, v);
  memcpy(p, t, n * sizeof(T));
}

// 1 / sqrt(mean square + eps) from the 16 partial sums of squares.
static inline float inverse_rms(f32x16 squares, int64_t cols, float eps) {
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)cols + eps);
}

// How a norm applies its weight w to the normalised value v, and where it rounds.
enum Weighting : int64_t {
  ROUNDED = 0,      // round(round(v) * w)
  UNIT_OFFSET = 1,  // round(v * (1 + w))
  WIDE = 2,         // round(v * w), w in fp32
};

// y = norm(x) or, with a residual, s = round(x + residual) and y = norm(s). W stores the weight.
template <class T, class W>
static void rmsnorm_rows(const T* x, const T* residual, const W* weight, T* y, T* sum, int64_t rows,
                         int64_t cols, float eps, int64_t weighting, int threads) {
  f32x16 offset = splat(weighting == UNIT_OFFSET ? 1.0f : 0.0f);
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (int64_t t = 0; t < rows; t++) {
    const T* row = residual ? sum + t * cols : x + t * cols;
    f32x16 squares = splat(0.0f);
    for (int64_t c = 0; c < cols; c += L) {
      f32x16 v = load_n(x + t * cols + c, cols - c);
      if (residual) {
        v = round_to<T>(add(v, load_n(residual + t * cols + c, cols - c)));
        store_n(sum + t * cols + c, v, cols - c);
      }
      squares = fma(v, v, squares);
    }
    f32x16 r = splat(inverse_rms(squares, cols, eps));
    for (int64_t c = 0; c < cols; c += L) {
      f32x16 v = mul(load_n(row + c, cols - c), r), w = load_n(weight + c, cols - c);
      if (weighting == UNIT_OFFSET) w = add(offset, w);
      v = mul(weighting == ROUNDED ? round_to<T>(v) : v, w);
      store_n(y + t * cols + c, v, cols - c);
    }
  }
}

// dx = r (g - x (sum(g x) r r / cols)), g = dy w; a residual's own gradient is added before
// rounding. r is recomputed as in the forward and left in rstd.
template <class T, class W>
static void rmsnorm_dx_rows(const T* dy, const T* x, const W* weight, const T* dsum, T* dx,
                            float* rstd, int64_t rows, int64_t cols, float eps, int64_t weighting,
                            int threads) {
  f32x16 offset = splat(weighting == UNIT_OFFSET ? 1.0f : 0.0f);
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (int64_t t = 0; t < rows; t++) {
    int64_t at = t * cols;
    f32x16 squares = splat(0.0f), dots = splat(0.0f);
    for (int64_t c = 0; c < cols; c += L) {
      f32x16 g = mul(load_n(dy + at + c, cols - c), add(offset, load_n(weight + c, cols - c)));
      f32x16 v = load_n(x + at + c, cols - c);
      squares = fma(v, v, squares);
      dots = fma(g, v, dots);
    }
    float r = rstd[t] = inverse_rms(squares, cols, eps);
    f32x16 coefficient = splat(sum_lanes(dots) * r * r / (float)cols);
    for (int64_t c = 0; c < cols; c += L) {
      f32x16 g = mul(load_n(dy + at + c, cols - c), add(offset, load_n(weight + c, cols - c)));
      f32x16 d = mul(splat(r), fnma(load_n(x + at + c, cols - c), coefficient, g));
      if (dsum) d = add(load_n(dsum + at + c, cols - c), d);
      store_n(dx + at + c, d, cols - c);
    }
  }
}

// dw: one FMA chain per column, rows ascending, continuing from what dw holds.
template <class T>
static void rmsnorm_dw_rows(const T* dy, const T* x, const float* rstd, float* dw, int64_t rows,
                            int64_t cols, int64_t weighting, int threads) {
  int64_t chunks = (cols + L - 1) / L;
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (int64_t part = 0; part < threads; part++) {
    int64_t first = chunks * part / threads * L, last = chunks * (part + 1) / threads * L;
    for (int64_t t = 0; t < rows; t++) {
      f32x16 r = splat(rstd[t]);
      for (int64_t c = first; c < last; c += L) {
        f32x16 v = mul(load_n(x + t * cols + c, cols - c), r);
        if (weighting == ROUNDED) v = round_to<T>(v);
        v = fma(load_n(dy + t * cols + c, cols - c), v, load_n(dw + c, cols - c));
        store_n(dw + c, v, cols - c);
      }
    }
  }
}

// Rotates the first `width` columns of every head: (a, b) -> (a cos - b sin, b cos + a sin).
template <class T>
static void rotary_rows(const T* x, const float* cos, const float* sin, T* y, int64_t rows,
                        int64_t heads, int64_t dim, int64_t width, int threads) {
  int64_t half = width / 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > 32768)
  for (int64_t t = 0; t < rows; t++) {
    const float *cos_a = cos + t * width, *sin_a = sin + t * width;
    const float *cos_b = cos_a + half, *sin_b = sin_a + half;
    for (int64_t h = 0; h < heads; h++) {
      const T* x_a = x + (t * heads + h) * dim;
      T* y_a = y + (t * heads + h) * dim;
      for (int64_t c = 0; c < half; c += L) {
        int64_t n = half - c;
        f32x16 a = load_n(x_a + c, n), b = load_n(x_a + half + c, n);
        f32x16 to_a = sub(mul(a, load_n(cos_a + c, n)), mul(b, load_n(sin_a + c, n)));
        f32x16 to_b = add(mul(b, load_n(cos_b + c, n)), mul(a, load_n(sin_b + c, n)));
        store_n(y_a + c, to_a, n);
        store_n(y_a + half + c, to_b, n);
      }
      memcpy(y_a + width, x_a + width, (dim - width) * sizeof(T));
    }
  }
}

// cos and sin in fp64 without FMA ("sincos64.v1"): reduction by pi/2 in three pieces (exact
// products for angles below 2^20 quarter turns), then fdlibm's kernel polynomials. Plain + - *
// only, so the same bits come from any IEEE machine.
static inline void sincos64(double angle, double* cosine, double* sine) {
  double n = std::nearbyint(angle * 6.36619772367581382433e-01);
  double r = angle - n * 1.57079632673412561417e+00;
  r = r - n * 6.07710050630396597660e-11;
  r = r - n * 2.02226624871116645580e-21;
  double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = s * z + -2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z + -1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z + -1.66666666666666324348e-01;
  s = r + r * z * s;
  double c = -1.13596475577881948265e-11;
  c = c * z + 2.08757232129817482790e-09;
  c = c * z + -2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z + -1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  c = 1.0 - (0.5 * z - z * z * c);
  int64_t quadrant = (int64_t)n & 3;
  double even_c = quadrant & 1 ? s : c, even_s = quadrant & 1 ? c : s;
  *cosine = quadrant == 1 || quadrant == 2 ? -even_c : even_c;
  *sine = quadrant >= 2 ? -even_s : even_s;
}

// An activation is x / (1 + exp(-w)), its slope sig (1 + x (1 - sig) dw/dx),
// sig = 1 / (1 + exp(-w)).
struct Silu {  // w = x
  static inline f32x16 top(f32x16 x) { return x; }
  static inline f32x16 inside(f32x16 x) { return x; }
  static inline f32x16 slope(f32x16 x, f32x16 sig) {
    return mul(sig, fma(x, sub(splat(1.0f), sig), splat(1.0f)));
  }
};
// gelu by tanh: 0.5 (1 + tanh u) = sig at w = 2 u, u = sqrt(2 / pi) (x + 0.044715 x^3). Beyond 100
// the activation is saturated; the clamp keeps x^2 and its products finite and lets a NaN through.
struct Gelu {
  static inline f32x16 top(f32x16 x) { return max(splat(-100.0f), x); }
  static inline f32x16 clamped(f32x16 x) { return max(splat(-100.0f), min(splat(100.0f), x)); }
  static inline f32x16 inside(f32x16 x) {
    f32x16 t = clamped(x);
    return mul(t, mul(splat(1.5957691216f), fma(splat(0.044715f), mul(t, t), splat(1.0f))));
  }
  static inline f32x16 slope(f32x16 x, f32x16 sig) {
    f32x16 t = clamped(x);
    f32x16 d = mul(splat(1.5957691216f), fma(splat(0.134145f), mul(t, t), splat(1.0f)));
    return mul(sig, fma(mul(t, sub(splat(1.0f), sig)), d, splat(1.0f)));
  }
};
template <class A>
static inline f32x16 one_plus_exp(f32x16 x) {
  return add(splat(1.0f), exp(sub(splat(0.0f), A::inside(x))));
}
template <class A, class T>
static inline f32x16 activated(f32x16 x) {
  return round_to<T>(div(A::top(x), one_plus_exp<A>(x)));
}

template <class A, class T>
static void gated_all(const T* gate, const T* up, T* y, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
  for (int64_t i = 0; i < count; i += L) {
    int64_t n = count - i;
    f32x16 s = activated<A, T>(load_n(gate + i, n));
    store_n(y + i, up ? mul(s, load_n(up + i, n)) : s, n);
  }
}

template <class A, class T>
static void gated_backward_all(const T* dy, const T* gate, const T* up, T* dgate, T* dup,
                               int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
  for (int64_t i = 0; i < count; i += L) {
    int64_t n = count - i;
    f32x16 d = load_n(dy + i, n), g = load_n(gate + i, n);
    if (up) {
      store_n(dup + i, mul(d, activated<A, T>(g)), n);
      d = round_to<T>(mul(d, load_n(up + i, n)));
    }
    f32x16 sig = div(splat(1.0f), one_plus_exp<A>(g));
    store_n(dgate + i, mul(d, A::slope(g, sig)), n);
  }
}

template <class T>
static void silu_or_gelu(bool gelu, const T* gate, const T* up, T* y, int64_t count, int threads) {
  gelu ? gated_all<Gelu>(gate, up, y, count, threads)
       : gated_all<Silu>(gate, up, y, count, threads);
}
template <class T>
static void silu_or_gelu_backward(bool gelu, const T* dy, const T* gate, const T* up, T* dgate,
                                  T* dup, int64_t count, int threads) {
  gelu ? gated_backward_all<Gelu>(dy, gate, up, dgate, dup, count, threads)
       : gated_backward_all<Silu>(dy, gate, up, dgate, dup, count, threads);
}

// y = cap tanh(x / cap); with dy instead of null: dy (1 - tanh^2).
static void softcap_all(const float* dy, const float* x, float* y, float cap, int64_t count,
                        int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
  for (int64_t i = 0; i < count; i += L) {
    int64_t n = count - i;
    f32x16 t = tanh(div(load_n(x + i, n), splat(cap)));
    f32x16 v = dy ? mul(load_n(dy + i, n), fnma(t, t, splat(1.0f))) : mul(splat(cap), t);
    store_n(y + i, v, n);
  }
}

}  // namespace ZM_NAMESPACE

// Entry points: tensors as void*, `bf16` selects the storage type, null for absent tensors.
#define ZM_BY_STORAGE(bf16, call) \
  do {                            \
    if (bf16) {                   \
      using T = uint16_t;         \
      ZM_NAMESPACE::call;         \
    } else {                      \
      using T = float;            \
      ZM_NAMESPACE::call;         \
    }                             \
  } while (0)

extern "C" {

// weighting: see Weighting; with WIDE the weight is fp32 whatever the rows are.
void ZM_EXPORT(rmsnorm)(const void* x, const void* residual, const void* weight, void* y, void* sum,
                        int64_t rows, int64_t cols, float eps, int64_t weighting, int64_t bf16,
                        int64_t threads) {
  if (bf16 && weighting == ZM_NAMESPACE::WIDE)
    return ZM_NAMESPACE::rmsnorm_rows((const uint16_t*)x, (const uint16_t*)residual,
                                      (const float*)weight, (uint16_t*)y, (uint16_t*)sum, rows,
                                      cols, eps, weighting, (int)threads);
  ZM_BY_STORAGE(bf16, rmsnorm_rows((const T*)x, (const T*)residual, (const T*)weight, (T*)y,
                                   (T*)sum, rows, cols, eps, weighting, (int)threads));
}

// rstd [rows] is scratch; dw may be null, else its chains continue from what it holds.
void ZM_EXPORT(rmsnorm_backward)(const void* dy, const void* x, const void* weight,
                                 const void* dsum, void* dx, float* dw, float* rstd, int64_t rows,
                                 int64_t cols, float eps, int64_t weighting, int64_t bf16,
                                 int64_t threads) {
  if (bf16 && weighting == ZM_NAMESPACE::WIDE)
    ZM_NAMESPACE::rmsnorm_dx_rows((const uint16_t*)dy, (const uint16_t*)x, (const float*)weight,
                                  (const uint16_t*)dsum, (uint16_t*)dx, rstd, rows, cols, eps,
                                  weighting, (int)threads);
  else
    ZM_BY_STORAGE(bf16, rmsnorm_dx_rows((const T*)dy, (const T*)x, (const T*)weight,
                                        (const T*)dsum, (T*)dx, rstd, rows, cols, eps, weighting,
                                        (int)threads));
  if (dw)
    ZM_BY_STORAGE(bf16, rmsnorm_dw_rows<T>((const T*)dy, (const T*)x, rstd, dw, rows, cols,
                                           weighting, (int)threads));
}

void ZM_EXPORT(rotary)(const void* x, const float* cos, const float* sin, void* y, int64_t rows,
                       int64_t heads, int64_t dim, int64_t width, int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(
      bf16, rotary_rows<T>((const T*)x, cos, sin, (T*)y, rows, heads, dim, width, (int)threads));
}

void ZM_EXPORT(rotary_table)(const double* inv_freq, const int64_t* positions, double* scaling,
                             float* cos, float* sin, int64_t rows, int64_t half, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * half > 8192)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t i = 0; i < half; i++) {
      double c, s;
      ZM_NAMESPACE::sincos64((double)positions[t] * inv_freq[i], &c, &s);
      int64_t at = t * 2 * half + i;
      cos[at] = cos[at + half] = (float)(c * scaling[0]);
      sin[at] = sin[at + half] = (float)(s * scaling[0]);
    }
}

// The exponential by itself, so that its reference can be proved.
void ZM_EXPORT(exp)(const float* x, float* y, int64_t count) {
  using namespace ZM_NAMESPACE;
  for (int64_t i = 0; i < count; i += L)
    store_n(y + i, ZM_NAMESPACE::exp(load_n(x + i, count - i)), count - i);
}

// gelu: whether the activation is gelu instead of silu.
void ZM_EXPORT(gated)(const void* gate, const void* up, void* y, int64_t count, int64_t gelu,
                      int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, silu_or_gelu<T>(gelu, (const T*)gate, (const T*)up, (T*)y, count,
                                      (int)threads));
}

void ZM_EXPORT(gated_backward)(const void* dy, const void* gate, const void* up, void* dgate,
                               void* dup, int64_t count, int64_t gelu, int64_t bf16,
                               int64_t threads) {
  ZM_BY_STORAGE(bf16, silu_or_gelu_backward<T>(gelu, (const T*)dy, (const T*)gate, (const T*)up,
                                               (T*)dgate, (T*)dup, count, (int)threads));
}

// dy null: the capped values; else the gradient that passes.
void ZM_EXPORT(softcap)(const float* dy, const float* x, float* y, float cap, int64_t count,
                        int64_t threads) {
  ZM_NAMESPACE::softcap_all(dy, x, y, cap, count, (int)threads);
}

}  // extern "C"
