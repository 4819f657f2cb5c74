// Backward of packed causal attention, fp32, without atomics ("attention_grad.pages16").
//
// p is recomputed from the saved maximum and sum: p = exp(s - m) / l. With dp = dO . V (FMA chain
// over d) and delta = sum(dO * O) (16 lanes, then the tree): ds = p (dp - delta), times scale.
//
//   dQ      one FMA chain per element over the visible keys, ascending: rows are independent
//   dK, dV  one FMA chain per element over the group's heads, ascending, and in each head over the
//           queries that see the key, ascending
//
// Tiles and threads are schedule, as in the forward. Both page layouts are needed: keys
// [page][kv_head][D][16] of K and V (dot products), values [page][kv_head][16][D] of K (dQ).
#pragma once
#include "attention.h"

namespace ZM_NAMESPACE {

struct AttentionBackward {
  Attention<float> forward;  // q, K^T pages, and m, l of the forward
  const float *v_transposed, *k_rows, *dout, *delta;
  float *dq, *dk, *dv;
};

// p and scale * ds of one row against one page, in place of s and dp. Invisible lanes hold rubbish,
// which every reader skips.
static inline void backward_page(const Attention<float>& a, int64_t row, float delta, float* s,
                                 float* dp) {
  f32x16 raw = load(s);
  f32x16 p = div(exp(sub(a.scored(raw), splat(a.m[row]))), splat(a.l[row]));
  f32x16 ds = mul(p, sub(load(dp), splat(delta)));
  if (a.softcap != 0.0f) {
    f32x16 t = tanh(div(mul(raw, splat(a.scale)), splat(a.softcap)));
    ds = mul(ds, fnma(t, t, splat(1.0f)));
  }
  store(s, p);
  store(dp, mul(ds, splat(a.scale)));
}

static void delta_rows(const float* dout, const float* out, float* delta, int64_t rows, int64_t dim,
                       int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 32768)
  for (int64_t r = 0; r < rows; r++) {
    f32x16 sum = splat(0.0f);
    for (int64_t d = 0; d < dim; d += L)
      sum = fma(load(dout + r * dim + d), load(out + r * dim + d), sum);
    delta[r] = sum_lanes(sum);
  }
}

static void dq_tile(const AttentionBackward& g, const Tile& tile) {
  const Attention<float>& a = g.forward;
  TileRows<float> rows(a, tile);
  const float *q[MAX_ROWS], *dout[MAX_ROWS];
  alignas(64) float packed[MAX_ROWS * MAX_DIM], packed_dout[MAX_ROWS * MAX_DIM];
  alignas(64) float acc[MAX_ROWS * MAX_DIM];
  alignas(64) float s[1][MAX_ROWS][L], dp[1][MAX_ROWS][L];
  for (int r = 0; r < rows.count; r++) {
    q[r] = a.q + rows.index[r] * a.dim;
    dout[r] = g.dout + rows.index[r] * a.dim;
  }
  memset(acc, 0, rows.count * a.dim * sizeof(float));
  pack_rows(q, rows.count, a.dim, packed);
  pack_rows(dout, rows.count, a.dim, packed_dout);
  for (int64_t page = rows.first_page; page <= rows.last_page; page++) {
    const float* keys = a.page(a.k, tile.request, page, tile.kv_head);
    const float* values = a.page(g.v_transposed, tile.request, page, tile.kv_head);
    score_rows(packed, rows.count, &keys, 1, a.dim, s);
    score_rows(packed_dout, rows.count, &values, 1, a.dim, dp);
    int lo[MAX_ROWS], hi[MAX_ROWS];
    for (int r = 0; r < rows.count; r++) {
      a.visible(rows.position[r], page, lo + r, hi + r);
      backward_page(a, rows.index[r], g.delta[rows.index[r]], s[0][r], dp[0][r]);
    }
    const float* key_rows = a.page(g.k_rows, tile.request, page, tile.kv_head);
    accumulate_rows(acc, rows.count, dp[0][0], L, key_rows, a.dim, a.dim, lo, hi);
  }
  for (int r = 0; r < rows.count; r++)
    memcpy(g.dq + rows.index[r] * a.dim, acc + r * a.dim, a.dim * sizeof(float));
}

// One head's queries [first, first + count) of a request against one page: adds to dk and dv.
static void dkv_block(const AttentionBackward& g, int64_t request, int64_t page, int64_t head,
                      int64_t first, int count, int keys, float* dk, float* dv) {
  const Attention<float>& a = g.forward;
  const float *q[L], *dout[L];
  alignas(64) float packed[L * MAX_DIM], packed_dout[L * MAX_DIM];
  alignas(64) float s[1][MAX_ROWS][L], dp[1][MAX_ROWS][L], p_of_key[L][L], ds_of_key[L][L];
  int64_t row = (a.query_start[request] + first) * a.heads + head;
  for (int i = 0; i < count; i++) {
    q[i] = a.q + (row + i * a.heads) * a.dim;
    dout[i] = g.dout + (row + i * a.heads) * a.dim;
  }
  int64_t kv_head = head / (a.heads / a.kv_heads);
  const float* k_page = a.page(a.k, request, page, kv_head);
  const float* v_page = a.page(g.v_transposed, request, page, kv_head);
  pack_rows(q, count, a.dim, packed);
  pack_rows(dout, count, a.dim, packed_dout);
  score_rows(packed, count, &k_page, 1, a.dim, s);
  score_rows(packed_dout, count, &v_page, 1, a.dim, dp);
  for (int i = 0; i < count; i++) {
    backward_page(a, row + i * a.heads, g.delta[row + i * a.heads], s[0][i], dp[0][i]);
    for (int key = 0; key < PAGE; key++) {
      p_of_key[key][i] = s[0][i][key];
      ds_of_key[key][i] = dp[0][i][key];
    }
  }
  int lo[PAGE], hi[PAGE];  // queries of this block that see each key
  for (int key = 0; key < keys; key++) {
    int64_t begin = page * PAGE + key - first, end = a.window ? begin + a.window : count;
    lo[key] = begin < 0 ? 0 : begin > count ? count : (int)begin;
    hi[key] = end < 0 ? 0 : end > count ? count : (int)end;
  }
  int64_t stride = a.heads * a.dim;
  accumulate_rows(dv, keys, p_of_key[0], L, dout[0], stride, a.dim, lo, hi);
  accumulate_rows(dk, keys, ds_of_key[0], L, q[0], stride, a.dim, lo, hi);
}

static void dkv_page(const AttentionBackward& g, int64_t request, int64_t page, int64_t kv_head) {
  const Attention<float>& a = g.forward;
  int64_t group = a.heads / a.kv_heads, first_key = page * PAGE, queries = a.queries(request);
  int keys = (int)(queries - first_key < PAGE ? queries - first_key : PAGE);
  int64_t end = a.window ? first_key + keys - 1 + a.window : queries;
  if (end > queries) end = queries;
  alignas(64) float dk[PAGE * MAX_DIM], dv[PAGE * MAX_DIM];
  memset(dk, 0, keys * a.dim * sizeof(float));
  memset(dv, 0, keys * a.dim * sizeof(float));
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
    for (int64_t first = first_key; first < end; first += L) {
      int count = (int)(end - first < L ? end - first : L);
      dkv_block(g, request, page, head, first, count, keys, dk, dv);
    }
  for (int key = 0; key < keys; key++) {
    int64_t at = ((a.query_start[request] + first_key + key) * a.kv_heads + kv_head) * a.dim;
    memcpy(g.dk + at, dk + key * a.dim, a.dim * sizeof(float));
    memcpy(g.dv + at, dv + key * a.dim, a.dim * sizeof(float));
  }
}

static void dkv_all(const AttentionBackward& g, int threads) {
  const Attention<float>& a = g.forward;
  int64_t pages = a.max_pages;
#pragma omp parallel for collapse(3) schedule(dynamic, 1) num_threads(threads)
  for (int64_t b = 0; b < a.requests; b++)
    for (int64_t page = 0; page < pages; page++)
      for (int64_t h = 0; h < a.kv_heads; h++)
        if (page * PAGE < a.queries(b)) dkv_page(g, b, page, h);
}

// dsink[h] = -sum over all rows, ascending, of exp(sink - m) / l * delta.
static void dsink_all(const Attention<float>& a, const float* delta, float* dsinks) {
  int64_t rows = a.query_start[a.requests];
  for (int64_t h = 0; h < a.heads; h += L) {
    int64_t n = a.heads - h;
    f32x16 sum = splat(0.0f), sink = load_n(a.sinks + h, n);
    for (int64_t t = 0; t < rows; t++) {
      int64_t at = t * a.heads + h;
      f32x16 p = div(exp(sub(sink, load_n(a.m + at, n))), load_n(a.l + at, n));
      p = select(less(splat(-INFINITY), sink), p, splat(0.0f));
      sum = fnma(p, load_n(delta + at, n), sum);
    }
    store_n(dsinks + h, sum, n);
  }
}

}  // namespace ZM_NAMESPACE

extern "C" {

// Packed requests only: kv_len equals the number of queries. delta [T, H] is scratch.
void ZM_EXPORT(attention_backward)(const float* q, const float* k, const float* v_transposed,
                                   const float* k_rows, const float* out, const float* dout,
                                   const int32_t* query_start, const int32_t* kv_len,
                                   const int32_t* block_table, const float* sinks, float* m,
                                   float* l, float* delta, float* dq, float* dk, float* dv,
                                   float* dsinks, int64_t requests, int64_t max_pages,
                                   int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
                                   float scale, float softcap, int64_t threads) {
  using namespace ZM_NAMESPACE;
  Attention<float> a{q,     k,        nullptr, query_start, kv_len,   block_table,
                     sinks, nullptr,  m,       l,           requests, max_pages,
                     heads, kv_heads, dim,     window,      scale,    softcap};
  AttentionBackward g{a, v_transposed, k_rows, dout, delta, dq, dk, dv};
  delta_rows(dout, out, delta, query_start[requests] * heads, dim, (int)threads);
  for_each_tile(a, (int)threads, [&](const Tile& t) { dq_tile(g, t); });
  dkv_all(g, (int)threads);
  if (sinks) dsink_all(a, delta, dsinks);
}

}  // extern "C"
