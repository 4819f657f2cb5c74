// The two inner loops of attention and its backward.
//
//   score_rows       dot products of packed rows with pages of 16 keys: keys along the lanes, one
//                    FMA chain over d
//   accumulate_rows  weighted sums of value rows: columns along the lanes, one FMA chain over rows
//
// How many rows and pages a loop holds in registers differs between variants: schedule, not bits.
#pragma once
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE {

constexpr int PAGE = 16, MAX_ROWS = 32, MAX_DIM = 256, MAX_AHEAD = 4;
#if defined(ZM_AVX512)
constexpr int SCORE_ROWS = 8, SCORE_CHAINS = 16, VALUE_COLUMNS = 4;
#else
constexpr int SCORE_ROWS = 4, SCORE_CHAINS = 4, VALUE_COLUMNS = 1;
#endif
constexpr int VALUE_ROWS = 4;

// out[p][r] = FMA chain over d of q[d][r] * k[p][d], for P pages and R rows at once.
// q is packed [dim][R]; pages are `k[p]`; out has MAX_ROWS rows per page.
template <class T, int R, int P>
static inline void dots(const float* q, const T* const* k, int64_t dim, float (*out)[MAX_ROWS][L]) {
  f32x16 s[P][R];
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) s[p][r] = splat(0.0f);
  for (int64_t d = 0; d < dim; d++) {
    f32x16 key[P];
    for (int p = 0; p < P; p++) key[p] = load_as(k[p] + d * PAGE);
    for (int r = 0; r < R; r++) {
      f32x16 a = splat(q[d * R + r]);
      for (int p = 0; p < P; p++) s[p][r] = fma(a, key[p], s[p][r]);
    }
  }
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) store(out[p][r], s[p][r]);
}

template <class T, int R>
static void dots_pages(const float* q, const T* const* k, int pages, int64_t dim,
                       float (*out)[MAX_ROWS][L]) {
  constexpr int fitting = SCORE_CHAINS / R > MAX_AHEAD ? MAX_AHEAD : SCORE_CHAINS / R;
  constexpr int P = fitting < 1 ? 1 : fitting;
  int p = 0;
  for (; p + P <= pages; p += P) dots<T, R, P>(q, k + p, dim, out + p);
  for (; p < pages; p++) dots<T, R, 1>(q, k + p, dim, out + p);
}

// Rows are packed in groups of SCORE_ROWS, the rest in groups of 4 and then of what is left.
static inline int group_size(int rows, int first) {
  int left = rows - first;
  if (left >= SCORE_ROWS) return SCORE_ROWS;
  return left >= 4 ? 4 : left;
}

template <class T>
static void score_rows(const float* packed, int rows, const T* const* k, int pages, int64_t dim,
                       float (*out)[MAX_ROWS][L]) {
  for (int first = 0, size; first < rows; first += size) {
    size = group_size(rows, first);
    const float* q = packed + first * dim;
    float (*to)[MAX_ROWS][L] = (float (*)[MAX_ROWS][L])out[0][first];
    if (size == 8) dots_pages<T, 8>(q, k, pages, dim, to);
    else if (size == 4) dots_pages<T, 4>(q, k, pages, dim, to);
    else if (size == 3) dots_pages<T, 3>(q, k, pages, dim, to);
    else if (size == 2) dots_pages<T, 2>(q, k, pages, dim, to);
    else dots_pages<T, 1>(q, k, pages, dim, to);
  }
}

template <class T>
static void pack_rows(const T* const* rows, int count, int64_t dim, float* packed) {
  for (int first = 0, size; first < count; first += size) {
    size = group_size(count, first);
    for (int r = 0; r < size; r++)
      for (int64_t d = 0; d < dim; d += L) {
        alignas(64) float t[L];
        store(t, load_as(rows[first + r] + d));
        for (int i = 0; i < L; i++) packed[first * dim + (d + i) * size + r] = t[i];
      }
  }
}

// acc[r] += sum over t in [lo, hi), ascending FMA chain, of weight[r][t] * value[t], for R rows.
template <class T, int R, int NV>
static inline void accumulate(float* acc, int64_t acc_stride, const float* weight,
                              int64_t weight_stride, const T* value, int64_t value_stride, int lo,
                              int hi) {
  f32x16 a[R][NV];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < NV; j++) a[r][j] = load(acc + r * acc_stride + j * L);
  for (int t = lo; t < hi; t++) {
    f32x16 v[NV];
    for (int j = 0; j < NV; j++) v[j] = load_as(value + t * value_stride + j * L);
    for (int r = 0; r < R; r++) {
      f32x16 w = splat(weight[r * weight_stride + t]);
      for (int j = 0; j < NV; j++) a[r][j] = fma(w, v[j], a[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < NV; j++) store(acc + r * acc_stride + j * L, a[r][j]);
}

template <class T, int R>
static void accumulate_columns(float* acc, const float* weight, int64_t weight_stride,
                               const T* value, int64_t value_stride, int64_t dim, int lo, int hi) {
  constexpr int NV = R == 1 ? 4 : VALUE_COLUMNS;
  int64_t c = 0;
  for (; c + NV * L <= dim; c += NV * L)
    accumulate<T, R, NV>(acc + c, dim, weight, weight_stride, value + c, value_stride, lo, hi);
  for (; c < dim; c += L)
    accumulate<T, R, 1>(acc + c, dim, weight, weight_stride, value + c, value_stride, lo, hi);
}

// For every row r: the chain over its own range [lo[r], hi[r]); rows with equal ranges share loads.
template <class T>
static void accumulate_rows(float* acc, int rows, const float* weight, int64_t weight_stride,
                            const T* value, int64_t value_stride, int64_t dim, const int* lo,
                            const int* hi) {
  for (int r = 0, size; r < rows; r += size) {
    size = 1;
    while (size < VALUE_ROWS && r + size < rows && lo[r + size] == lo[r] && hi[r + size] == hi[r])
      size++;
    float* a = acc + r * dim;
    const float* w = weight + r * weight_stride;
    if (lo[r] >= hi[r]) continue;
    if (size == 4)
      accumulate_columns<T, 4>(a, w, weight_stride, value, value_stride, dim, lo[r], hi[r]);
    else if (size == 3)
      accumulate_columns<T, 3>(a, w, weight_stride, value, value_stride, dim, lo[r], hi[r]);
    else if (size == 2)
      accumulate_columns<T, 2>(a, w, weight_stride, value, value_stride, dim, lo[r], hi[r]);
    else accumulate_columns<T, 1>(a, w, weight_stride, value, value_stride, dim, lo[r], hi[r]);
  }
}

}  // namespace ZM_NAMESPACE
