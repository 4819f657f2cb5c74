// Gated RMSNorms and the L2 norm of q and k, forward and gradient, row by row.
//
// As in rows.h; rows, gates and the weight each have a storage of their own. Means per group of G
// columns in 16 lanes, then the sum_lanes tree. Orders: kernels/reference/gated_norm.py.
//
// Legend: T rows, H columns, G columns of a group.
#pragma once
#include <vector>
#include "gates.h"
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE::gated_norm {

enum Order : int64_t { SILU_AFTER = 0, SIGMOID_AFTER = 1, SILU_BEFORE = 2 };

// Rounding to the wider of a row's and the weight's storage.
template <class T, class W>
static inline f32x16 round_wide(f32x16 v) {
  return sizeof(T) == 4 || sizeof(W) == 4 ? v : round_bf16(v);
}
static inline f32x16 act(int64_t order, f32x16 gate) {
  f32x16 below = add(splat(1.0f), exp(sub(splat(0.0f), gate)));
  return div(order == SIGMOID_AFTER ? splat(1.0f) : gate, below);
}
static inline f32x16 slope(int64_t order, f32x16 gate) {
  f32x16 sig = gates::sigmoid(gate);
  if (order == SIGMOID_AFTER) return mul(sig, sub(splat(1.0f), sig));
  return mul(sig, fma(gate, sub(splat(1.0f), sig), splat(1.0f)));
}

template <class T, class Z, class W>
struct Rows {
  const T* x;
  const Z* gate;
  const W* weight;
  int64_t H, G, order;
  float eps;
  bool before() const { return order == SILU_BEFORE; }
  f32x16 gated(int64_t c, int64_t n) const { return act(order, load_n(gate + c, n)); }
  f32x16 h(int64_t c, int64_t n) const {
    f32x16 v = load_n(x + c, n);
    return before() ? mul(v, gated(c, n)) : v;
  }
  float inverse(int64_t first) const {
    f32x16 squares = splat(0.0f);
    for (int64_t c = 0; c < G; c += L) {
      f32x16 v = h(first + c, G - c);
      squares = fma(v, v, squares);
    }
    return inverse_rms(squares, G, eps);
  }
  f32x16 normed(f32x16 h, f32x16 r) const {
    return order == SIGMOID_AFTER ? mul(h, r) : round_to<T>(mul(h, r));
  }
  f32x16 weighted(int64_t c, int64_t n, f32x16 normed) const {
    f32x16 m = mul(load_n(weight + c, n), normed);
    return order == SIGMOID_AFTER ? m : round_wide<T, W>(m);
  }
};

template <class T, class Z, class W>
static void forward(Rows<T, Z, W> row, void* y, int64_t rows, int threads) {
  int64_t H = row.H, G = row.G;
#pragma omp parallel for num_threads(threads) if (rows * H > 16384)
  for (int64_t t = 0; t < rows; t++) {
    Rows<T, Z, W> one = row;
    one.x += t * H, one.gate += t * H;
    for (int64_t first = 0; first < H; first += G) {
      f32x16 r = splat(one.inverse(first));
      for (int64_t c = first; c < first + G; c += L) {
        int64_t n = first + G - c;
        f32x16 m = one.weighted(c, n, one.normed(one.h(c, n), r));
        if (one.before()) {
          if (sizeof(T) == 4 || sizeof(W) == 4) store_n((float*)y + t * H + c, m, n);
          else store_n((T*)y + t * H + c, m, n);
        } else {
          store_n((T*)y + t * H + c, mul(m, one.gated(c, n)), n);
        }
      }
    }
  }
}

// dw is one chain over rows: dm and n of all rows are kept in scratch [2, T, H].
template <class T, class Z, class W, class D>
static void backward(const D* dy, Rows<T, Z, W> row, T* dx, Z* dgate, float* dw, float* scratch,
                     int64_t rows, int threads) {
  int64_t H = row.H, G = row.G;
  float *d_ms = scratch, *ns = scratch + rows * H;
#pragma omp parallel for num_threads(threads) if (rows * H > 16384)
  for (int64_t t = 0; t < rows; t++) {
    Rows<T, Z, W> one = row;
    one.x += t * H, one.gate += t * H;
    for (int64_t first = 0; first < H; first += G) {
      float r = one.inverse(first);
      f32x16 dot = splat(0.0f);
      for (int64_t c = first; c < first + G; c += L) {
        int64_t n = first + G - c, at = t * H + c;
        f32x16 d_m = load_n(dy + at, n), h = one.h(c, n);
        if (!one.before()) d_m = mul(d_m, one.gated(c, n));
        store_n(d_ms + at, d_m, n);
        store_n(ns + at, one.normed(h, splat(r)), n);
        dot = fma(mul(load_n(one.weight + c, n), d_m), h, dot);
      }
      f32x16 coefficient = splat(sum_lanes(dot) * r * r / (float)G);
      for (int64_t c = first; c < first + G; c += L) {
        int64_t n = first + G - c, at = t * H + c;
        f32x16 h = one.h(c, n), gate = load_n(one.gate + c, n);
        f32x16 d_n = mul(load_n(one.weight + c, n), load_n(d_ms + at, n));
        f32x16 d_h = mul(splat(r), fnma(h, coefficient, d_n)), d_act;
        if (one.before()) {
          d_act = mul(d_h, load_n(one.x + c, n));
          store_n(dx + at, mul(d_h, act(one.order, gate)), n);
        } else {
          d_act = mul(load_n(dy + at, n), one.weighted(c, n, load_n(ns + at, n)));
          store_n(dx + at, d_h, n);
        }
        store_n(dgate + at, mul(d_act, slope(one.order, gate)), n);
      }
    }
  }
  for (int64_t t = 0; t < rows; t++)
    for (int64_t c = 0; c < H; c += L) {
      f32x16 sum = fma(load_n(d_ms + t * H + c, H - c), load_n(ns + t * H + c, H - c),
                       load_n(dw + c, H - c));
      store_n(dw + c, sum, H - c);
    }
}

// s = sqrt(sum of squares + eps) of one row.
template <class T>
static inline float length(const T* x, int64_t H, float eps) {
  f32x16 squares = splat(0.0f);
  for (int64_t c = 0; c < H; c += L) {
    f32x16 v = load_n(x + c, H - c);
    squares = fma(v, v, squares);
  }
  return __builtin_sqrtf(sum_lanes(squares) + eps);
}
// dy null: y = (x / s) scale or (x (1 / s)) scale, fp32; else the gradient in x.
template <class T>
static void l2norm(const float* dy, const T* x, float* y, T* dx, int64_t rows, int64_t H, float eps,
                   bool divide, float scale, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * H > 16384)
  for (int64_t t = 0; t < rows; t++) {
    const T* row = x + t * H;
    float s = length(row, H, eps);
    f32x16 inverse = splat(1.0f / s), whole = splat(s), dot = splat(0.0f);
    if (dy)
      for (int64_t c = 0; c < H; c += L)
        dot = fma(load_n(dy + t * H + c, H - c), load_n(row + c, H - c), dot);
    f32x16 coefficient = splat(sum_lanes(dot) / s / s), factor = splat(scale / s);
    for (int64_t c = 0; c < H; c += L) {
      f32x16 v = load_n(row + c, H - c);
      if (dy) {
        v = mul(factor, fnma(v, coefficient, load_n(dy + t * H + c, H - c)));
        store_n(dx + t * H + c, v, H - c);
      } else {
        v = divide ? div(v, whole) : mul(v, inverse);
        store_n(y + t * H + c, mul(v, splat(scale)), H - c);
      }
    }
  }
}

template <class T, class Z>
static void forward_of(const void* x, const void* gate, const void* weight, void* y, int64_t rows,
                       int64_t H, int64_t G, float eps, int64_t order, bool wide, int threads) {
  if (wide)
    forward<T, Z, float>({(const T*)x, (const Z*)gate, (const float*)weight, H, G, order, eps}, y,
                         rows, threads);
  else
    forward<T, Z, uint16_t>({(const T*)x, (const Z*)gate, (const uint16_t*)weight, H, G, order, eps},
                            y, rows, threads);
}
template <class T, class Z, class W>
static void backward_of(const void* dy, const void* x, const void* gate, const void* weight,
                        void* dx, void* dgate, float* dw, float* scratch, int64_t rows, int64_t H,
                        int64_t G, float eps, int64_t order, int threads) {
  Rows<T, Z, W> row = {(const T*)x, (const Z*)gate, (const W*)weight, H, G, order, eps};
  if (order == SILU_BEFORE && sizeof(W) == 4)
    backward((const float*)dy, row, (T*)dx, (Z*)dgate, dw, scratch, rows, threads);
  else
    backward((const T*)dy, row, (T*)dx, (Z*)dgate, dw, scratch, rows, threads);
}

}  // namespace ZM_NAMESPACE::gated_norm

extern "C" {

// bf16: the rows; gate_wide, wide: whether gates and weight are fp32.
void ZM_EXPORT(gated_rmsnorm)(const void* x, const void* gate, const void* weight, void* y,
                              int64_t rows, int64_t H, int64_t G, float eps, int64_t order,
                              int64_t bf16, int64_t gate_wide, int64_t wide, int64_t threads) {
  ZM_BY_TWO(bf16, gate_wide,
            (ZM_NAMESPACE::gated_norm::forward_of<T, P>(x, gate, weight, y, rows, H, G, eps, order,
                                                        wide, (int)threads)));
}

// dw continues from what it holds; scratch [2, rows, H].
void ZM_EXPORT(gated_rmsnorm_grad)(const void* dy, const void* x, const void* gate,
                                   const void* weight, void* dx, void* dgate, float* dw,
                                   float* scratch, int64_t rows, int64_t H, int64_t G, float eps,
                                   int64_t order, int64_t bf16, int64_t gate_wide, int64_t wide,
                                   int64_t threads) {
  if (wide)
    ZM_BY_TWO(bf16, gate_wide, (ZM_NAMESPACE::gated_norm::backward_of<T, P, float>(
                                   dy, x, gate, weight, dx, dgate, dw, scratch, rows, H, G, eps,
                                   order, (int)threads)));
  else
    ZM_BY_TWO(bf16, gate_wide, (ZM_NAMESPACE::gated_norm::backward_of<T, P, uint16_t>(
                                   dy, x, gate, weight, dx, dgate, dw, scratch, rows, H, G, eps,
                                   order, (int)threads)));
}

// dy null: y; else dx.
void ZM_EXPORT(l2norm)(const float* dy, const void* x, float* y, void* dx, int64_t rows, int64_t H,
                       float eps, int64_t divide, float scale, int64_t bf16, int64_t threads) {
  ZM_BY_STORAGE(bf16, gated_norm::l2norm(dy, (const T*)x, y, (T*)dx, rows, H, eps, divide, scale,
                                         (int)threads));
}

}  // extern "C"
