// The gradient of recurrence.h over whole requests ("recurrence_grad.*"), chunks descending.
//
// Each value head of a request is walked alone, from the saved states at its chunks' starts; the
// chains and their order are those of kernels/reference/recurrence_grad.py. Value heads of a key
// head are added ascending by one thread, so a request's gradient has the same bits in any pack.
//
// Legend: as in recurrence.h; n rows of a chunk, S the state at its start, dE the gradient of the
// state at its end, x = do S^T, y = dr S^T, z = u dE^T.
#pragma once
#include <vector>
#include "recurrence.h"

namespace ZM_NAMESPACE::recurrence {

// acc[r] += c1[r][k] x1_k, then c2[r][k] x2_k where there is one; k in the order of the steps.
template <int R, int N>
static inline void two_chains(f32x16 (&acc)[R][N], const float* c1, const float* c2,
                              int64_t row_step, int64_t k_step, const float* x1, const float* x2,
                              int64_t x_step, int64_t count, int64_t lanes) {
  for (int64_t k = 0; k < count; k++, x1 += x_step, x2 = x2 ? x2 + x_step : x2)
    for (int n = 0; n < N; n++) {
      f32x16 s = load_n(x1 + n * L, lanes - n * L), t = s;
      if (x2) t = load_n(x2 + n * L, lanes - n * L);
      for (int r = 0; r < R; r++) {
        acc[r][n] = fma(splat(c1[r * row_step + k * k_step]), s, acc[r][n]);
        if (x2) acc[r][n] = fma(splat(c2[r * row_step + k * k_step]), t, acc[r][n]);
      }
    }
}

// Calls body.operator()<N>(first column) over blocks of columns.
template <class Body>
static inline void each_block(int64_t columns, Body body) {
  int64_t c = 0;
  for (; columns - c > 3 * L; c += 4 * L) body(std::integral_constant<int, 4>(), c);
  for (; c < columns; c += L) body(std::integral_constant<int, 1>(), c);
}

// One chunk of one value head. Rows of q, k step by ks, of v, u, do, dv by vs.
struct BackChunk {
  const Sizes& sizes;
  int64_t n, ks, vs, gs;
  const float *q, *k, *v, *g, *beta, *u, *d_o, *state, *d_end;
  float *dv, *dg, *dbeta;     // outputs
  float *dq, *dk;             // [n, K] of this head
  float *d_start;             // dS [K, V]; null in chunk 0
  const float *raw_a, *raw_b; // dots of this chunk, null for a decay per channel
};

struct BackSpace {
  std::vector<float> a, b, e, qs, ks, fold, w, du, dr, da, db, x, y, z, between, first, rows, r;
  std::vector<float> scratch;
  void resize(const Sizes& s, int64_t n) {
    int64_t square = n * s.C, width = s.per_channel ? s.K : 1;
    for (auto* each : {&a, &b, &e, &da, &db}) each->resize(square);
    for (auto* each : {&qs, &ks, &fold, &x, &y, &z}) each->resize(n * s.K);
    for (auto* each : {&du, &dr, &r}) each->resize(n * s.V);
    w.resize(n * width), first.resize(n * width + L);
    between.resize(s.per_channel ? n * s.K : square);
    rows.resize(n * L);
  }
};

// e, w and the scaled dots with one decay per head.
static void decays_of_head(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  std::vector<float> d(c.n + L);
  for (int64_t i = 0; i < c.n; i++) {
    float sum = 0.0f;
    for (int64_t j = i; j >= 0; j--) {
      d[j] = sum;
      sum = sum + c.g[j * c.gs];
    }
    for (int64_t j = 0; j <= i; j += L) {
      int64_t left = i + 1 - j, at = i * z.C + j;
      f32x16 e = exp_or_zero(load_n(d.data() + j, left));
      store_n(s.e.data() + at, e, left);
      store_n(s.a.data() + at, mul(e, load_n(c.raw_a + at, left)), left);
      if (c.beta) store_n(s.b.data() + at, mul(e, load_n(c.raw_b + at, left)), left);
    }
    store_n(s.w.data() + i, exp_or_zero(splat(sum)), 1);
    f32x16 w = splat(s.w[i]);
    for (int64_t f = 0; f < z.K; f += L) {
      store_n(s.qs.data() + i * z.K + f, mul(load_n(c.q + i * c.ks + f, z.K - f), w), z.K - f);
      store_n(s.ks.data() + i * z.K + f, mul(load_n(c.k + i * c.ks + f, z.K - f), w), z.K - f);
    }
  }
  const float* last = s.e.data() + (c.n - 1) * z.C;
  for (int64_t j = 0; j < c.n; j++)
    for (int64_t f = 0; f < z.K; f += L)
      store_n(s.fold.data() + j * z.K + f, mul(splat(last[j]), load_n(c.k + j * c.ks + f, z.K - f)),
              z.K - f);
}

// du (s.du), dr (s.dr): rows descending.
static void values(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  each_block(z.V, [&](auto width, int64_t v) {
    constexpr int N = decltype(width)::value;
    auto rows = [&](auto count, int64_t j0) {
      constexpr int R = decltype(count)::value;
      int64_t lanes = z.V - v;
      f32x16 acc[R][N];
      for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = splat(0.0f);
      if (c.d_end)
        two_chains<R, N>(acc, s.fold.data() + j0 * z.K, nullptr, z.K, 1, c.d_end + v, nullptr, z.V,
                         z.K, lanes);
      for (int64_t i = c.n - 1; i >= j0 + R; i--)
        two_chains<R, N>(acc, s.a.data() + i * z.C + j0, s.b.data() + i * z.C + j0, 1, 0, c.d_o + i * c.vs + v,
                         c.beta ? s.dr.data() + i * z.V + v : nullptr, 0, 1, lanes);
      for (int64_t i = j0 + R - 1; i >= j0; i--) {
        int own = (int)(i - j0);
        float strength = c.beta ? c.beta[i * z.HV] : 1.0f;
        for (int n = 0; n < N; n++) {
          int64_t left = lanes - n * L;
          f32x16 up = load_n(c.d_o + i * c.vs + v + n * L, left);
          for (int r = 0; r <= own; r++)
            acc[r][n] = fma(splat(s.a[i * z.C + j0 + r]), up, acc[r][n]);
          f32x16 du = acc[own][n], dv = c.beta ? mul(splat(strength), du) : du;
          store_n(s.du.data() + i * z.V + v + n * L, du, left);
          store_n(c.dv + i * c.vs + v + n * L, dv, left);
          if (!c.beta) continue;
          f32x16 dr = mul(splat(-1.0f), dv);
          store_n(s.dr.data() + i * z.V + v + n * L, dr, left);
          for (int r = 0; r < own; r++)
            acc[r][n] = fma(splat(s.b[i * z.C + j0 + r]), dr, acc[r][n]);
        }
      }
    };
    int64_t j = c.n;
    if (N == 1)
      for (; j >= TILE_ROWS; j -= TILE_ROWS)
        rows(std::integral_constant<int, TILE_ROWS>(), j - TILE_ROWS);
    for (; j > 0; j--) rows(std::integral_constant<int, 1>(), j - 1);
  });
}

// dbeta_i = du_i . (v_i - r_i), with r repeated.
static void strengths(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  each_block(z.V, [&](auto width, int64_t v) {
    constexpr int N = decltype(width)::value;
    for (int64_t i = 0; i < c.n; i++) {
      f32x16 acc[1][N];
      for (int n = 0; n < N; n++) acc[0][n] = splat(0.0f);
      if (c.state)
        two_chains<1, N>(acc, s.ks.data() + i * z.K, nullptr, 0, 1, c.state + v, nullptr, z.V, z.K,
                         z.V - v);
      two_chains<1, N>(acc, s.b.data() + i * z.C, nullptr, 0, 1, c.u + v, nullptr, c.vs, i, z.V - v);
      for (int n = 0; n < N; n++) {
        int64_t left = z.V - v - n * L;
        f32x16 rest = sub(load_n(c.v + i * c.vs + v + n * L, left), acc[0][n]);
        store_n(s.r.data() + i * z.V + v + n * L, rest, left);
      }
    }
  });
  for (int64_t i = 0; i < c.n; i++) {
    RowsOf one = {nullptr, s.r.data() + i * z.V, 0, 0};
    dots(s.du.data() + i * z.V, one, 1, z.V, c.dbeta + i * z.HV);
  }
}

// da, db, x, y, z.
static void products(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  RowsOf u = {nullptr, c.u, 0, c.vs}, state = {nullptr, c.state, 0, z.V};
  RowsOf d_end = {nullptr, c.d_end, 0, z.V};
  for (int64_t i = 0; i < c.n; i++) {
    const float *up = c.d_o + i * c.vs, *dr = s.dr.data() + i * z.V;
    dots(up, u, i + 1, z.V, s.da.data() + i * z.C);
    if (c.beta) dots(dr, u, i, z.V, s.db.data() + i * z.C);
    if (c.state) dots(up, state, z.K, z.V, s.x.data() + i * z.K);
    if (c.state && c.beta) dots(dr, state, z.K, z.V, s.y.data() + i * z.K);
    if (c.d_end) dots(u[i], d_end, z.K, z.V, s.z.data() + i * z.K);
  }
}

// dq, dk and dD with one decay per head.
static void keys_of_head(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  const float* last = s.e.data() + (c.n - 1) * z.C;
  std::vector<float> &ga = s.da, &gb = s.db;
  for (int64_t i = 0; i < c.n; i++)
    for (int64_t j = 0; j <= i; j += L) {
      int64_t at = i * z.C + j, left = i + 1 - j;
      f32x16 da = load_n(ga.data() + at, left), e = load_n(s.e.data() + at, left);
      f32x16 d = mul(da, load_n(s.a.data() + at, left));
      if (c.beta) {
        f32x16 db = load_n(gb.data() + at, left);
        d = fma(da, load_n(s.a.data() + at, left), mul(db, load_n(s.b.data() + at, left)));
        store_n(gb.data() + at, mul(db, e), left);
      }
      store_n(s.between.data() + at, d, left);
      store_n(ga.data() + at, mul(da, e), left);
    }
  each_block(z.K, [&](auto width, int64_t f) {
    constexpr int N = decltype(width)::value;
    int64_t lanes = z.K - f;
    auto begin = [&](f32x16(&acc)[1][N], const float* product, int64_t i) {
      for (int n = 0; n < N; n++) {
        acc[0][n] = splat(0.0f);
        if (product)
          acc[0][n] = mul(splat(s.w[i]), load_n(product + i * z.K + f + n * L, lanes - n * L));
      }
    };
    auto end = [&](f32x16(&acc)[1][N], float* out, int64_t i) {
      for (int n = 0; n < N; n++) store_n(out + i * z.K + f + n * L, acc[0][n], lanes - n * L);
    };
    for (int64_t i = 0; i < c.n; i++) {
      f32x16 acc[1][N];
      begin(acc, c.state ? s.x.data() : nullptr, i);
      two_chains<1, N>(acc, ga.data() + i * z.C, nullptr, 0, 1, c.k + f, nullptr, c.ks, i + 1, lanes);
      end(acc, c.dq, i);
      begin(acc, c.state && c.beta ? s.y.data() : nullptr, i);
      if (c.beta)
        two_chains<1, N>(acc, gb.data() + i * z.C, nullptr, 0, 1, c.k + f, nullptr, c.ks, i, lanes);
      const float *wa = ga.data() + i * z.C + i, *wb = gb.data() + i * z.C + i;
      two_chains<1, N>(acc, wa, nullptr, 0, z.C, c.q + i * c.ks + f, nullptr, c.ks, 1, lanes);
      two_chains<1, N>(acc, wa + z.C, wb + z.C, 0, z.C, c.q + (i + 1) * c.ks + f,
                       c.beta ? c.k + (i + 1) * c.ks + f : nullptr, c.ks, c.n - 1 - i, lanes);
      if (c.d_end)
        for (int n = 0; n < N; n++)
          acc[0][n] = fma(splat(last[i]), load_n(s.z.data() + i * z.K + f + n * L, lanes - n * L),
                          acc[0][n]);
      end(acc, c.dk, i);
    }
  });
}

static void gates_of_head(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  int64_t n = c.n;
  for (int64_t i = 0; i < n; i++) {
    float first = 0.0f, other = 0.0f;
    RowsOf x = {nullptr, s.x.data() + i * z.K, 0, 0}, y = {nullptr, s.y.data() + i * z.K, 0, 0};
    if (c.state) dots(c.q + i * c.ks, x, 1, z.K, &first);
    if (c.state && c.beta) dots(c.k + i * c.ks, y, 1, z.K, &other), first = first + other;
    s.first[i] = c.state ? s.w[i] * first : 0.0f;
  }
  if (c.d_end) {
    const float* last = s.e.data() + (n - 1) * z.C;
    float* between = s.between.data() + (n - 1) * z.C;
    for (int64_t j = 0; j < n - 1; j++) {
      RowsOf one = {nullptr, s.z.data() + j * z.K, 0, 0};
      float dot;
      dots(c.k + j * c.ks, one, 1, z.K, &dot);
      between[j] = between[j] + last[j] * dot;
    }
    if (c.state) {
      float inner = 0.0f, dot;
      for (int64_t f = 0; f < z.K; f++) {
        RowsOf one = {nullptr, c.d_end + f * z.V, 0, 0};
        dots(c.state + f * z.V, one, 1, z.V, &dot);
        inner = inner + dot;
      }
      s.first[n - 1] = s.first[n - 1] + s.w[n - 1] * inner;
    }
  }
  for (int64_t m = 0; m < n; m++) c.dg[m * c.gs] = 0.0f;
  for (int64_t i = 0; i < n; i++) {
    float total = s.first[i];
    for (int64_t m = 0; m <= i; m++) {
      c.dg[m * c.gs] = c.dg[m * c.gs] + total;
      total = total + s.between[i * z.C + m];
    }
  }
}

// Decays, dots, scaled rows with a decay per channel; the last row's decays stay in s.rows.
static void decays_of_channels(const BackChunk& c, BackSpace& s) {
  RowsOf k = {nullptr, c.k, 0, c.ks}, g = {nullptr, c.g, 0, c.gs}, none = {nullptr, nullptr, 0, 0};
  std::vector<float> last(c.sizes.K);
  Head x = {c.sizes, 0, c.n, k, g, none, c.q, c.v, c.beta, nullptr, nullptr, nullptr,
            s.a.data(), c.beta ? s.b.data() : nullptr, s.qs.data(), s.ks.data(), s.fold.data(),
            last.data()};
  scale_channels(x, s.scratch);
}

// dq, dk, dD and dg with a decay per channel: row by row, its decays repeated.
static void keys_of_channels(const BackChunk& c, BackSpace& s) {
  const Sizes& z = c.sizes;
  int64_t n = c.n, K = z.K;
  std::vector<float> inner(K, 0.0f);
  if (c.state && c.d_end)
    for (int64_t f = 0; f < K; f++) {
      RowsOf one = {nullptr, c.d_end + f * z.V, 0, 0};
      dots(c.state + f * z.V, one, 1, z.V, inner.data() + f);
    }
  for (int64_t f = 0; f < K; f += L) {
    int64_t left = K - f;
    auto get = [&](const float* p) { return load_n(p + f, left); };
    for (int64_t m = 0; m < n; m++) store_n(c.dg + m * c.gs + f, splat(0.0f), left);
    for (int64_t i = 0; i < n; i++) {
      f32x16 decay = splat(0.0f), q = get(c.q + i * c.ks), k = get(c.k + i * c.ks);
      for (int64_t j = i; j >= 0; j--) {
        store(s.rows.data() + j * L, exp_or_zero(decay));
        decay = add(decay, get(c.g + j * c.gs));
      }
      f32x16 w = exp_or_zero(decay), zero = splat(0.0f), dq = zero, dk = zero, first = zero;
      if (c.state) {
        f32x16 x = get(s.x.data() + i * K), y = zero, with = mul(q, x);
        dq = mul(w, x);
        if (c.beta) {
          y = get(s.y.data() + i * K);
          dk = mul(w, y);
          with = fma(q, x, mul(k, y));
        }
        first = mul(w, with);
        if (c.d_end && i == n - 1) first = add(first, mul(w, get(inner.data())));
      }
      for (int64_t j = 0; j <= i; j++) {
        f32x16 moved = mul(load(s.rows.data() + j * L), get(c.k + j * c.ks));
        dq = fma(splat(s.da[i * z.C + j]), moved, dq);
        if (c.beta && j < i) dk = fma(splat(s.db[i * z.C + j]), moved, dk);
      }
      store_n(c.dq + i * K + f, dq, left);
      store_n(c.dk + i * K + f, dk, left);
      f32x16 total = first;
      for (int64_t j = 0; j <= i; j++) {
        f32x16 e = load(s.rows.data() + j * L), key = get(c.k + j * c.ks);
        f32x16 da = splat(s.da[i * z.C + j]), t = mul(da, q);
        if (c.beta && j < i) t = fma(da, q, mul(splat(s.db[i * z.C + j]), k));
        store_n(c.dk + j * K + f, fma(e, t, get(c.dk + j * K)), left);
        store_n(c.dg + j * c.gs + f, add(get(c.dg + j * c.gs), total), left);
        if (j == i) break;
        f32x16 d = mul(mul(e, key), t);
        if (c.d_end && i == n - 1) d = add(d, mul(e, mul(key, get(s.z.data() + j * K))));
        total = add(total, d);
      }
      if (c.d_end && i == n - 1)
        for (int64_t j = 0; j < n; j++)
          store_n(c.dk + j * K + f,
                  fma(load(s.rows.data() + j * L), get(s.z.data() + j * K), get(c.dk + j * K)), left);
      if (i == n - 1) store_n(s.first.data() + f, w, left);  // for dS
    }
  }
}

// dS = w_last dE + sum over i of qs_i do_i + ks_i dr_i.
static void start_state(const BackChunk& c, BackSpace& s, float* out) {
  const Sizes& z = c.sizes;
  for (int64_t v = 0; v < z.V; v += L) {
    int64_t lanes = z.V - v;
    auto rows = [&](auto count, int64_t d) {
      constexpr int R = decltype(count)::value;
      f32x16 acc[R][1];
      for (int r = 0; r < R; r++) {
        float w = z.per_channel ? s.first[d + r] : s.w[c.n - 1];
        acc[r][0] = splat(0.0f);
        if (c.d_end) acc[r][0] = mul(splat(w), load_n(c.d_end + (d + r) * z.V + v, lanes));
      }
      for (int64_t i = 0; i < c.n; i++)
        two_chains<R, 1>(acc, s.qs.data() + i * z.K + d, s.ks.data() + i * z.K + d, 1, 0,
                         c.d_o + i * c.vs + v, c.beta ? s.dr.data() + i * z.V + v : nullptr, 0, 1,
                         lanes);
      for (int r = 0; r < R; r++) store_n(out + (d + r) * z.V + v, acc[r][0], lanes);
    };
    int64_t d = 0;
    for (; d + TILE_ROWS <= z.K; d += TILE_ROWS) rows(std::integral_constant<int, TILE_ROWS>(), d);
    for (; d < z.K; d++) rows(std::integral_constant<int, 1>(), d);
  }
}

struct BackCall {
  const float *d_o, *q, *k, *v, *g, *beta, *u, *ends;
  float *dq, *dk, *dv, *dg, *dbeta;
};

// One key head of one request.
static void request_backward(const BackCall& c, const Sizes& z, int64_t row, int64_t stop,
                             int64_t first_end, int64_t kh) {
  int64_t ks = z.HK * z.K, vs = z.HV * z.V, gs = z.decay_step(), chunks = (stop - row + z.C - 1) / z.C;
  BackSpace s;
  std::vector<float> raw, dq, dk, states(2 * z.K * z.V);
  for (int64_t h = kh * z.group(); h < (kh + 1) * z.group(); h++) {
    const float* d_end = nullptr;
    for (int64_t i = chunks - 1; i >= 0; i--) {
      int64_t t = row + i * z.C, n = std::min(z.C, stop - t), square = n * z.C;
      const float* state = i ? c.ends + ((first_end + i - 1) * z.HV + h) * z.K * z.V : nullptr;
      float* d_start = states.data() + (i % 2) * z.K * z.V;
      s.resize(z, n);
      dq.resize(n * z.K), dk.resize(n * z.K), raw.resize(2 * square);
      int64_t gate = z.per_channel ? h * z.K : h;
      BackChunk x = {z, n, ks, vs, gs, c.q + t * ks + kh * z.K, c.k + t * ks + kh * z.K,
                     c.v + t * vs + h * z.V, c.g + t * gs + gate,
                     c.beta ? c.beta + t * z.HV + h : nullptr, c.u + t * vs + h * z.V,
                     c.d_o + t * vs + h * z.V, state, d_end, c.dv + t * vs + h * z.V,
                     c.dg + t * gs + gate, c.beta ? c.dbeta + t * z.HV + h : nullptr, dq.data(),
                     dk.data(), d_start, raw.data(), raw.data() + square};
      if (z.per_channel) {
        decays_of_channels(x, s);
      } else {
        RowsOf keys = {nullptr, x.k, 0, ks};
        for (int64_t r = 0; r < n; r++) {
          dots(x.q + r * ks, keys, r + 1, z.K, raw.data() + r * z.C);
          if (c.beta) dots(x.k + r * ks, keys, r, z.K, raw.data() + square + r * z.C);
        }
        decays_of_head(x, s);
      }
      values(x, s);
      products(x, s);
      if (c.beta) strengths(x, s);
      if (z.per_channel) {
        keys_of_channels(x, s);
      } else {
        keys_of_head(x, s);
        gates_of_head(x, s);
      }
      if (state) start_state(x, s, d_start);
      bool first = h == kh * z.group();
      for (int64_t r = 0; r < n; r++)
        for (int64_t f = 0; f < z.K; f += L) {
          float *to_q = c.dq + (t + r) * ks + kh * z.K + f, *to_k = c.dk + (t + r) * ks + kh * z.K + f;
          f32x16 mine_q = load_n(dq.data() + r * z.K + f, z.K - f);
          f32x16 mine_k = load_n(dk.data() + r * z.K + f, z.K - f);
          store_n(to_q, first ? mine_q : add(load_n(to_q, z.K - f), mine_q), z.K - f);
          store_n(to_k, first ? mine_k : add(load_n(to_k, z.K - f), mine_k), z.K - f);
        }
      d_end = state ? d_start : nullptr;
    }
  }
}

}  // namespace ZM_NAMESPACE::recurrence

// Shapes as in the reference; dbeta null with beta.
extern "C" void ZM_EXPORT(recurrence_grad)(
    const float* d_o, const float* q, const float* k, const float* v, const float* g,
    const float* beta, const float* u, const float* ends, const int32_t* query_start, float* dq,
    float* dk, float* dv, float* dg, float* dbeta, int64_t B, int64_t C, int64_t HK, int64_t HV,
    int64_t K, int64_t V, int64_t per_channel, int64_t threads) {
  using namespace ZM_NAMESPACE::recurrence;
  BackCall c = {d_o, q, k, v, g, beta, u, ends, dq, dk, dv, dg, dbeta};
  Sizes z = {C, HK, HV, K, V, per_channel != 0};
  std::vector<int64_t> first_end(B + 1, 0);
  for (int64_t b = 0; b < B; b++)
    first_end[b + 1] = first_end[b] + (query_start[b + 1] - query_start[b]) / C;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads((int)threads)
  for (int64_t b = 0; b < B; b++)
    for (int64_t kh = 0; kh < HK; kh++)
      request_backward(c, z, query_start[b], query_start[b + 1], first_end[b], kh);
}
