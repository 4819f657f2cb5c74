// Recurrent layers' state: Mamba-2, gated delta rule, KDA ("recurrence.*"), chunk by chunk.
//
// A row reads the state at its chunk's start and the chunk's rows up to itself, in the order of
// kernels/reference/recurrence.py: log decays added from the row backwards, dots in 16 lanes, one
// FMA chain per value column over the state's rows, then over the chunk's. Nothing depends on how
// many rows a call brings, so tiles, threads and calls are schedule. Earlier rows of a chunk come
// from pages; k, u and g of a page and of this call have the same row step, so a row is a pointer.
//
// Legend: B requests, C rows of a chunk, HK/HV key and value heads, K, V their sizes; n rows of the
// chunk so far, m of them old; kh, h a key and a value head.
#pragma once
#include <algorithm>
#include <vector>
#include "head.h"
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE::recurrence {

using head::exp_or_zero;
#if defined(ZM_AVX512)
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_VECTORS = 1;
#endif
constexpr int TILE_ROWS = 4, WIDE = 4;

struct Sizes {
  int64_t C, HK, HV, K, V;
  bool per_channel;
  int64_t group() const { return HV / HK; }
  int64_t decay_step() const { return per_channel ? HV * K : HV; }
};

// Rows of a chunk: the first m lie on a page, the others came with the call.
struct RowsOf {
  const float *old_rows, *new_rows;
  int64_t m, step;
  const float* operator[](int64_t j) const {
    return j < m ? old_rows + j * step : new_rows + (j - m) * step;
  }
};

// Sums of 16 vectors, each by the sum_lanes tree.
static inline void sum_each(float (*t)[L], float* sums) {
  for (int r = 0; r < L; r++)
    for (int i = 0; i < 8; i++) t[r][i] += t[r][i + 8];
  for (int r = 0; r < L; r++)
    for (int i = 0; i < 4; i++) t[r][i] += t[r][i + 4];
  for (int r = 0; r < L; r++) sums[r] = (t[r][0] + t[r][2]) + (t[r][1] + t[r][3]);
}

// out[j] = left . right_j in 16 lanes, then the tree, for j < count.
template <class Right>
static void dots(const float* left, const Right& right, int64_t count, int64_t width, float* out) {
  alignas(64) float t[L][L], sums[L];
  for (int64_t j0 = 0; j0 < count; j0 += L) {
    for (int64_t j1 = 0; j1 < L; j1 += 4) {
      const float* p[4];
      for (int64_t r = 0; r < 4; r++) p[r] = right[std::min(j0 + j1 + r, count - 1)];
      f32x16 s0 = splat(0.0f), s1 = s0, s2 = s0, s3 = s0;
      int64_t d = 0;
      for (; d + L <= width; d += L) {
        f32x16 a = load(left + d);
        s0 = fma(a, load(p[0] + d), s0);
        s1 = fma(a, load(p[1] + d), s1);
        s2 = fma(a, load(p[2] + d), s2);
        s3 = fma(a, load(p[3] + d), s3);
      }
      if (d < width) {
        f32x16 a = load_n(left + d, width - d);
        s0 = fma(a, load_n(p[0] + d, width - d), s0);
        s1 = fma(a, load_n(p[1] + d, width - d), s1);
        s2 = fma(a, load_n(p[2] + d, width - d), s2);
        s3 = fma(a, load_n(p[3] + d, width - d), s3);
      }
      store(t[j1], s0), store(t[j1 + 1], s1), store(t[j1 + 2], s2), store(t[j1 + 3], s3);
      if (j0 + j1 + 4 >= count) break;
    }
    sum_each(t, sums);
    for (int64_t j = j0; j < std::min(j0 + L, count); j++) out[j] = sums[j - j0];
  }
}

// acc[r] += sum over k ascending of coefficient[r][k] * x_k, one FMA each.
template <int R, int N, bool TAIL>
static inline void chain(f32x16 (&acc)[R][N], const float* coefficient, int64_t row_step,
                         int64_t k_step, const float* x, int64_t x_step, int64_t count,
                         int64_t lanes) {
  for (int64_t k = 0; k < count; k++, x += x_step) {
    f32x16 s[N];
    for (int n = 0; n < N; n++) s[n] = TAIL ? load_n(x + n * L, lanes) : load(x + n * L);
    for (int r = 0; r < R; r++) {
      f32x16 c = splat(coefficient[r * row_step + k * k_step]);
      for (int n = 0; n < N; n++) acc[r][n] = fma(c, s[n], acc[r][n]);
    }
  }
}

// One value head of one chunk.
struct Head {
  const Sizes& sizes;
  int64_t m, n;
  RowsOf k, g, u;          // of this head
  const float *q, *v, *beta;  // the call's rows; beta null for ssd
  float *o, *u_new;
  const float* state;      // null in chunk 0
  float *a, *b, *qs, *ks;  // [n - m, C], [n - m, K]; b and ks for the delta rules
  float *fold;             // [n, K] e_last,j k_j
  float *last;             // w of the last row: [K] or [1]
};

// Decays of the new rows from the chunk's start and between rows; a, b hold raw dots and get their
// decays; qs, ks.
static void scale_rows(const Head& x, std::vector<float>& scratch) {
  const Sizes& z = x.sizes;
  int64_t n = x.n, K = z.K;
  scratch.resize((n + 2 * L) * TILE_ROWS);
  for (int64_t i0 = x.m; i0 < n; i0 += TILE_ROWS) {
    int64_t rows = std::min<int64_t>(TILE_ROWS, n - i0), step = n + 2 * L;
    float sum[TILE_ROWS] = {};
    float* d = scratch.data();
    for (int64_t j = i0 + rows - 1; j >= 0; j--) {  // d[r][j]: from row j to row i0 + r
      float gate = j + 1 < n ? *x.g[j + 1] : 0.0f;
      for (int64_t r = 0; r < rows; r++) {
        sum[r] = j < i0 + r ? sum[r] + gate : 0.0f;
        d[r * step + j] = sum[r];
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      int64_t i = i0 + r - x.m;
      float *a = x.a + i * z.C, *b = x.b ? x.b + i * z.C : nullptr, *row = d + r * step;
      bool folds = x.fold && i0 + r == n - 1;
      row[i0 + rows] = sum[r] + *x.g[0];  // from the chunk's start; rows + 1 entries in all
      float start = row[i0 + rows];
      for (int64_t j = 0; j <= i0 + r; j += L) {
        int64_t left = i0 + r + 1 - j;
        f32x16 e = exp_or_zero(load_n(row + j, left));
        if (folds) store_n(row + j, e, left);
        store_n(a + j, mul(e, load_n(a + j, left)), left);
        if (b) store_n(b + j, mul(e, load_n(b + j, left)), left);
      }
      alignas(64) float w[L];
      store(w, exp_or_zero(splat(start)));
      const float *q = x.q + i * z.HK * K, *k = x.k[i0 + r];
      for (int64_t c = 0; c < K; c += L) {
        store_n(x.qs + i * K + c, mul(load_n(q + c, K - c), splat(w[0])), K - c);
        if (x.ks) store_n(x.ks + i * K + c, mul(load_n(k + c, K - c), splat(w[0])), K - c);
      }
      if (!folds) continue;
      x.last[0] = w[0];
      for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < K; c += L)
          store_n(x.fold + j * K + c, mul(splat(row[j]), load_n(x.k[j] + c, K - c)), K - c);
    }
  }
}

// The same with a decay per key channel: a and b are formed here, not scaled.
static void scale_channels(const Head& x, std::vector<float>& scratch) {
  const Sizes& z = x.sizes;
  int64_t n = x.n, K = z.K, padded = (n + L - 1) / L * L;
  scratch.assign(2 * padded * L, 0.0f);
  float(*to_a)[L] = (float(*)[L])scratch.data(), (*to_b)[L] = to_a + padded;
  for (int64_t i = x.m; i < n; i++) {
    int64_t at = i - x.m;
    const float *q = x.q + at * z.HK * K, *k = x.k[i];
    bool folds = x.fold && i == n - 1;
    memset(scratch.data(), 0, 2 * padded * L * sizeof(float));
    for (int64_t c = 0; c < K; c += L) {
      int64_t left = K - c;
      f32x16 decay = splat(0.0f), qc = load_n(q + c, left), kc = load_n(k + c, left);
      for (int64_t j = i; j >= 0; j--) {
        f32x16 moved = mul(exp_or_zero(decay), load_n(x.k[j] + c, left));
        store(to_a[j], fma(qc, moved, load(to_a[j])));
        if (x.b) store(to_b[j], fma(kc, moved, load(to_b[j])));
        if (folds) store_n(x.fold + j * K + c, moved, left);
        decay = add(decay, load_n(x.g[j] + c, left));
      }
      f32x16 w = exp_or_zero(decay);
      store_n(x.qs + at * K + c, mul(qc, w), left);
      if (x.ks) store_n(x.ks + at * K + c, mul(kc, w), left);
      if (folds) store_n(x.last + c, w, left);
    }
    alignas(64) float sums[L];
    for (int64_t j = 0; j <= i; j += L) {
      int64_t left = std::min<int64_t>(L, i + 1 - j);
      sum_each(to_a + j, sums);
      memcpy(x.a + at * z.C + j, sums, left * sizeof(float));
      if (!x.b) continue;
      sum_each(to_b + j, sums);
      memcpy(x.b + at * z.C + j, sums, left * sizeof(float));
    }
  }
}

// Rows i0 .. i0 + R - 1 (counted from the first new one), N vectors of value columns from v on.
template <int R, int N, bool TAIL>
static inline void tile(const Head& x, int64_t i0, int64_t v) {
  const Sizes& z = x.sizes;
  int64_t step = z.HV * z.V, lanes = z.V - v, m = x.m;
  const float *old_u = x.u.old_rows + v, *state = x.state ? x.state + v : nullptr;
  f32x16 acc[R][N];
  auto begin = [&](const float* moved, const float* weights) {
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) acc[r][n] = splat(0.0f);
    if (state)
      chain<R, N, TAIL>(acc, moved + i0 * z.K, z.K, 1, state, z.V, z.K, lanes);
    if (m) chain<R, N, TAIL>(acc, weights + i0 * z.C, z.C, 1, old_u, step, m, lanes);
    chain<R, N, TAIL>(acc, weights + i0 * z.C + m, z.C, 1, x.u_new + v, step, i0, lanes);
  };
  if (x.beta) {
    begin(x.ks, x.b);
    for (int r = 0; r < R; r++) {
      float* u = x.u_new + (i0 + r) * step + v;
      const float* value = x.v + (i0 + r) * step + v;
      f32x16 strength = splat(x.beta[(i0 + r) * z.HV]);
      for (int n = 0; n < N; n++) {
        f32x16 given = TAIL ? load_n(value + n * L, lanes) : load(value + n * L);
        f32x16 fresh = mul(strength, sub(given, acc[r][n]));
        TAIL ? store_n(u + n * L, fresh, lanes) : store(u + n * L, fresh);
        for (int later = r + 1; later < R; later++) {
          float weight = x.b[(i0 + later) * z.C + m + i0 + r];
          acc[later][n] = fma(splat(weight), fresh, acc[later][n]);
        }
      }
    }
  }
  begin(x.qs, x.a);
  for (int r = 0; r < R; r++) {
    for (int j = 0; j <= r; j++) {
      const float* u = x.u_new + (i0 + j) * step + v;
      f32x16 weight = splat(x.a[(i0 + r) * z.C + m + i0 + j]);
      for (int n = 0; n < N; n++) {
        f32x16 s = TAIL ? load_n(u + n * L, lanes) : load(u + n * L);
        acc[r][n] = fma(weight, s, acc[r][n]);
      }
    }
    float* o = x.o + (i0 + r) * step + v;
    for (int n = 0; n < N; n++)
      TAIL ? store_n(o + n * L, acc[r][n], lanes) : store(o + n * L, acc[r][n]);
  }
}

static void rows_of_head(const Head& x) {
  const Sizes& z = x.sizes;
  int64_t count = x.n - x.m, v = 0;
  if (!x.beta)
    for (int64_t i = 0; i < count; i++)
      memcpy(x.u_new + i * z.HV * z.V, x.v + i * z.HV * z.V, z.V * sizeof(float));
  for (; v + WIDE * L <= z.V; v += WIDE * L) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= count; i += TILE_ROWS)
      for (int64_t c = v; c < v + WIDE * L; c += TILE_VECTORS * L)
        tile<TILE_ROWS, TILE_VECTORS, false>(x, i, c);
    for (; i < count; i++) tile<1, WIDE, false>(x, i, v);
  }
  for (; v < z.V; v += L) {
    bool tail = z.V - v < L;
    int64_t i = 0;
    for (; i + TILE_ROWS <= count; i += TILE_ROWS)
      tail ? tile<TILE_ROWS, 1, true>(x, i, v) : tile<TILE_ROWS, 1, false>(x, i, v);
    for (; i < count; i++) tail ? tile<1, 1, true>(x, i, v) : tile<1, 1, false>(x, i, v);
  }
}

// end = w_last S + sum over j ascending of (e_last,j k_j) u_j; rows d .. d + R - 1 of the state.
template <int R, bool TAIL>
static inline void fold_tile(const Head& x, float* end, int64_t d, int64_t v) {
  const Sizes& z = x.sizes;
  int64_t step = z.HV * z.V, lanes = z.V - v;
  f32x16 acc[R][1];
  for (int r = 0; r < R; r++) {
    f32x16 w = splat(x.last[z.per_channel ? d + r : 0]);
    acc[r][0] = splat(0.0f);
    if (x.state) acc[r][0] = mul(w, load_n(x.state + (d + r) * z.V + v, lanes));
  }
  if (x.m) chain<R, 1, TAIL>(acc, x.fold + d, 1, z.K, x.u.old_rows + v, step, x.m, lanes);
  chain<R, 1, TAIL>(acc, x.fold + x.m * z.K + d, 1, z.K, x.u_new + v, step, x.n - x.m, lanes);
  for (int r = 0; r < R; r++) store_n(end + (d + r) * z.V + v, acc[r][0], lanes);
}

static void fold(const Head& x, float* end) {
  const Sizes& z = x.sizes;
  for (int64_t v = 0; v < z.V; v += L) {
    bool tail = z.V - v < L;
    int64_t d = 0;
    for (; d + TILE_ROWS <= z.K; d += TILE_ROWS)
      tail ? fold_tile<TILE_ROWS, true>(x, end, d, v) : fold_tile<TILE_ROWS, false>(x, end, d, v);
    for (; d < z.K; d++) tail ? fold_tile<1, true>(x, end, d, v) : fold_tile<1, false>(x, end, d, v);
  }
}

struct Call {
  const float *q, *k, *v, *g, *beta, *k_pages, *u_pages, *g_pages, *end_pages;
  float *o, *u, *ends;
};

// One key head of one request: its chunks in order. first_end: of the request's full chunks.
static void request(const Call& c, const Sizes& z, int64_t row, int64_t stop, int64_t position,
                    const int32_t* table, int64_t first_end, int64_t kh) {
  std::vector<float> raw, scaled, folded, scratch, last(z.K);
  int64_t group = z.group(), ks = z.HK * z.K, vs = z.HV * z.V, gs = z.decay_step();
  std::vector<const float*> states(group, nullptr);
  if (position >= z.C)
    for (int64_t h = 0; h < group; h++)
      states[h] = c.end_pages + (table[position / z.C - 1] * z.HV + kh * group + h) * z.K * z.V;
  for (; row < stop;) {
    int64_t m = position % z.C, count = std::min(z.C - m, stop - row), n = m + count;
    int64_t page = m ? table[position / z.C] : 0;
    bool full = n == z.C, delta = c.beta != nullptr;
    RowsOf k = {c.k_pages + page * z.C * ks + kh * z.K, c.k + row * ks + kh * z.K, m, ks};
    int64_t square = count * z.C;
    raw.resize(2 * square), scaled.resize(2 * (square + count * z.K)), folded.resize(n * z.K);
    if (!z.per_channel)
      for (int64_t i = 0; i < count; i++) {
        dots(c.q + (row + i) * ks + kh * z.K, k, m + i + 1, z.K, raw.data() + i * z.C);
        if (delta) dots(k[m + i], k, m + i, z.K, raw.data() + square + i * z.C);
      }
    for (int64_t h = kh * group; h < (kh + 1) * group; h++) {
      int64_t gate = z.per_channel ? h * z.K : h, values = h * z.V;
      float* space = scaled.data();
      Head x = {z, m, n, k,
                {c.g_pages + page * z.C * gs + gate, c.g + row * gs + gate, m, gs},
                {c.u_pages + page * z.C * vs + values, nullptr, m, vs},
                c.q + row * ks + kh * z.K, c.v + row * vs + values,
                delta ? c.beta + row * z.HV + h : nullptr,
                c.o + row * vs + values, c.u + row * vs + values, states[h - kh * group],
                space, delta ? space + square : nullptr, space + 2 * square,
                delta ? space + 2 * square + count * z.K : nullptr,
                full ? folded.data() : nullptr, last.data()};
      if (z.per_channel) {
        scale_channels(x, scratch);
      } else {
        memcpy(x.a, raw.data(), 2 * square * sizeof(float));
        scale_rows(x, scratch);
      }
      rows_of_head(x);
      if (!full) continue;
      float* end = c.ends + (first_end * z.HV + h) * z.K * z.V;
      fold(x, end);
      states[h - kh * group] = end;
    }
    first_end += full, row += count, position += count;
  }
}

static void call(const Call& c, const Sizes& z, const int32_t* query_start, const int32_t* length,
                 const int32_t* table, int64_t B, int64_t widest, int threads) {
  std::vector<int64_t> first_end(B + 1, 0);
  for (int64_t b = 0; b < B; b++) {
    int64_t rows = query_start[b + 1] - query_start[b], before = length[b] - rows;
    first_end[b + 1] = first_end[b] + (rows ? length[b] / z.C - before / z.C : 0);
  }
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t b = 0; b < B; b++)
    for (int64_t kh = 0; kh < z.HK; kh++)
      request(c, z, query_start[b], query_start[b + 1],
              length[b] - (query_start[b + 1] - query_start[b]), table + b * widest, first_end[b],
              kh);
}

// Token by token: the state after every token. N vectors of value columns from v on.
template <int N, bool TAIL>
static void steps(const float* q, const float* k, const float* v, const float* g, const float* beta,
                  const float* start, float* o, float* end, const Sizes& z, int64_t count,
                  int64_t lanes) {
  auto get = [&](const float* p, int n) { return TAIL ? load_n(p + n * L, lanes) : load(p + n * L); };
  auto put = [&](float* p, int n, f32x16 s) {
    TAIL ? store_n(p + n * L, s, lanes) : store(p + n * L, s);
  };
  std::vector<float> decay(z.K + L);
  if (end != start)
    for (int64_t d = 0; d < z.K; d++)
      for (int n = 0; n < N; n++) put(end + d * z.V, n, get(start + d * z.V, n));
  for (int64_t t = 0; t < count; t++) {
    int64_t gates = z.per_channel ? z.K : 1;
    for (int64_t d = 0; d < gates; d += L)
      store_n(decay.data() + d, exp_or_zero(load_n(g + d, gates - d)), gates - d);
    f32x16 sum[N];
    for (int n = 0; n < N; n++) sum[n] = splat(0.0f);
    for (int64_t d = 0; d < z.K; d++)
      for (int n = 0; n < N; n++) {
        f32x16 s = mul(splat(decay[z.per_channel ? d : 0]), get(end + d * z.V, n));
        put(end + d * z.V, n, s);
        sum[n] = fma(splat(k[d]), s, sum[n]);
      }
    f32x16 u[N], out[N];
    for (int n = 0; n < N; n++) {
      u[n] = beta ? mul(splat(*beta), sub(get(v, n), sum[n])) : get(v, n);
      out[n] = splat(0.0f);
    }
    for (int64_t d = 0; d < z.K; d++)
      for (int n = 0; n < N; n++) {
        f32x16 s = fma(splat(k[d]), u[n], get(end + d * z.V, n));
        put(end + d * z.V, n, s);
        out[n] = fma(splat(q[d]), s, out[n]);
      }
    for (int n = 0; n < N; n++) put(o, n, out[n]);
    q += z.HK * z.K, k += z.HK * z.K, v += z.HV * z.V, o += z.HV * z.V, g += z.decay_step();
    beta = beta ? beta + z.HV : nullptr;
  }
}

}  // namespace ZM_NAMESPACE::recurrence

extern "C" {

// See the reference for shapes; beta null for ssd; ends: of the chunks that became full.
void ZM_EXPORT(recurrence)(const float* q, const float* k, const float* v, const float* g,
                           const float* beta, const float* k_pages, const float* u_pages,
                           const float* g_pages, const float* end_pages,
                           const int32_t* query_start, const int32_t* length, const int32_t* table,
                           float* o, float* u, float* ends, int64_t B, int64_t widest, int64_t C,
                           int64_t HK, int64_t HV, int64_t K, int64_t V, int64_t per_channel,
                           int64_t threads) {
  using namespace ZM_NAMESPACE::recurrence;
  Call c = {q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, o, u, ends};
  call(c, {C, HK, HV, K, V, per_channel != 0}, query_start, length, table, B, widest, (int)threads);
}

void ZM_EXPORT(recurrence_stepwise)(const float* q, const float* k, const float* v, const float* g,
                                    const float* beta, const float* start,
                                    const int32_t* query_start, float* o, float* end, int64_t B,
                                    int64_t HK, int64_t HV, int64_t K, int64_t V,
                                    int64_t per_channel, int64_t threads) {
  using namespace ZM_NAMESPACE::recurrence;
  using ZM_NAMESPACE::L;
  Sizes z = {1, HK, HV, K, V, per_channel != 0};
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads((int)threads)
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < HV; h++) {
      int64_t row = query_start[b], count = query_start[b + 1] - row, kh = h / z.group();
      const float *qh = q + (row * HK + kh) * K, *kk = k + (row * HK + kh) * K;
      const float* gh = g + row * z.decay_step() + (per_channel ? h * K : h);
      const float* bh = beta ? beta + row * HV + h : nullptr;
      int64_t state = (b * HV + h) * K * V, at = (row * HV + h) * V, c = 0;
      for (; c + 2 * L <= V; c += 2 * L)
        steps<2, false>(qh, kk, v + at + c, gh, bh, start + state + c, o + at + c, end + state + c,
                        z, count, V - c);
      for (; c < V; c += L)
        steps<1, true>(qh, kk, v + at + c, gh, bh, start + state + c, o + at + c, end + state + c,
                       z, count, V - c);
    }
}

}  // extern "C"
