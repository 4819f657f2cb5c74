// Causal attention over pages of 16 keys: forward, tiling, cache writes.
//
// Bits of one query row ("attention.pages16"): walk pages in ascending absolute order; per page
//
//   s   (FMA chain over d, ascending) * scale, keys along the lanes; -inf by select if invisible
//   m   grows to the page's maximum; only then l and acc are multiplied by exp(m_old - m_new)
//   p   exp(s - m);  l += p in 16 lanes;  acc: FMA chain over the visible keys, ascending
//
// and at the end o = acc / sum_lanes(l). Invisible keys are skipped, never multiplied by zero, so
// what lies in them cannot leak. A sink is a key before position 0 without a value.
//
// Everything else is schedule: how many rows or heads share a load of K, how many pages are scored
// ahead, which thread runs a tile. Storage `T` is float, or uint16_t holding bf16, widened exactly.
//
// Layout: K [page][kv_head][D][16], V [page][kv_head][16][D]; D a multiple of 16, at most 256.
#pragma once
#include "attention_blocks.h"

namespace ZM_NAMESPACE {

// One call's tensors. window 0: none; softcap 0: none; sinks null: none.
template <class T>
struct Attention {
  const T *q, *k, *v;
  const int32_t *query_start, *kv_len, *block_table;
  const float* sinks;
  T* out;
  float *m, *l;
  int64_t requests, max_pages, heads, kv_heads, dim, window;
  float scale, softcap;

  int64_t queries(int64_t b) const { return query_start[b + 1] - query_start[b]; }
  const T* page(const T* pages, int64_t b, int64_t index, int64_t kv_head) const {
    return pages + ((int64_t)block_table[b * max_pages + index] * kv_heads + kv_head) * PAGE * dim;
  }
  // Keys of page `index` that a query at `position` sees: offsets [lo, hi).
  void visible(int64_t position, int64_t index, int* lo, int* hi) const {
    int64_t end = position - index * PAGE + 1, begin = window ? end - window : 0;
    *hi = end > PAGE ? PAGE : end < 0 ? 0 : (int)end;
    *lo = begin < 0 ? 0 : begin > PAGE ? PAGE : (int)begin;
  }
  int64_t first_page(int64_t position) const {
    return window && position >= window ? (position - window + 1) / PAGE : 0;
  }
  f32x16 scored(f32x16 s) const {
    s = mul(s, splat(scale));
    return softcap != 0.0f ? mul(splat(softcap), tanh(div(s, splat(softcap)))) : s;
  }
};

// Work units: (request, block of tokens, kv head, block of that group's heads), all independent.
struct Tile {
  int64_t request, first_token, kv_head, first_head;
  int tokens, heads;
};

// How requests are cut into tiles: schedule only.
struct Tiling {
  int64_t group, kv_heads, heads_cap;
  int tokens(int64_t queries) const { return queries < 8 ? (int)queries : 8; }
  int heads(int64_t queries) const {
    int64_t cap = MAX_ROWS / tokens(queries);
    if (cap > heads_cap) cap = heads_cap;
    int64_t blocks = (group + cap - 1) / cap;
    return (int)((group + blocks - 1) / blocks);
  }
  int64_t head_blocks(int64_t queries) const {
    return (group + heads(queries) - 1) / heads(queries);
  }
  int64_t count(int64_t queries) const {
    if (queries <= 0) return 0;
    return (queries + tokens(queries) - 1) / tokens(queries) * kv_heads * head_blocks(queries);
  }
  Tile tile(int64_t request, int64_t queries, int64_t index) const {
    Tile t;
    int64_t blocks = head_blocks(queries), step = tokens(queries);
    t.request = request;
    t.first_head = index % blocks * heads(queries);
    t.kv_head = index / blocks % kv_heads;
    t.first_token = index / blocks / kv_heads * step;
    t.tokens = (int)(queries - t.first_token < step ? queries - t.first_token : step);
    t.heads = (int)(group - t.first_head < heads(queries) ? group - t.first_head : heads(queries));
    return t;
  }
};

// Runs body(tile) for every tile, latest tokens (the longest work) first.
template <class T, class Body>
static void for_each_tile(const Attention<T>& a, int threads, Body body) {
  Tiling tiling{a.heads / a.kv_heads, a.kv_heads, MAX_ROWS};
  int64_t* start = new int64_t[a.requests + 1];
  for (;; tiling.heads_cap = (tiling.heads_cap + 1) / 2) {
    start[0] = 0;
    for (int64_t b = 0; b < a.requests; b++) start[b + 1] = start[b] + tiling.count(a.queries(b));
    if (start[a.requests] >= threads || tiling.heads_cap == 1) break;
  }
  int64_t total = start[a.requests];
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (total > 1)
  for (int64_t unit = total - 1; unit >= 0; unit--) {
    int64_t low = 0, high = a.requests - 1;  // last request with start <= unit
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (start[middle] <= unit) low = middle;
      else high = middle - 1;
    }
    body(tiling.tile(low, a.queries(low), unit - start[low]));
  }
  delete[] start;
}

// The rows of a tile, head by head: index into [T, H], absolute position.
template <class T>
struct TileRows {
  int count;
  int64_t index[MAX_ROWS], position[MAX_ROWS], first_page, last_page;
  TileRows(const Attention<T>& a, const Tile& t) : count(0), first_page(INT64_MAX), last_page(-1) {
    int64_t group = a.heads / a.kv_heads, context = a.kv_len[t.request] - a.queries(t.request);
    for (int h = 0; h < t.heads; h++)
      for (int i = 0; i < t.tokens; i++) {
        int64_t token = t.first_token + i, at = context + token;
        index[count] =
            (a.query_start[t.request] + token) * a.heads + t.kv_head * group + t.first_head + h;
        position[count++] = at;
        if (a.first_page(at) < first_page) first_page = a.first_page(at);
        if (at / PAGE > last_page) last_page = at / PAGE;
      }
  }
};

// The online softmax of one row: running maximum, 16 partial sums, and the page in progress.
struct Softmax {
  float m = -INFINITY;
  f32x16 l = splat(0.0f);
};

// One page of one row: scores in, probabilities (relative to the running maximum) out.
template <class T>
static inline void softmax_page(const Attention<T>& a, Softmax& state, float* acc, float* row,
                                int lo, int hi) {
  f32x16 s = a.scored(load(row));
  mask16 seen = lanes_in(lo, hi);
  bool whole = lo == 0 && hi == PAGE;
  if (!whole) s = select(seen, s, splat(-INFINITY));
  if (any(less(splat(state.m), s))) {
    float grown = max_lanes(s);
    if (state.m != -INFINITY) {
      f32x16 shrink = exp(splat(state.m - grown));
      state.l = mul(state.l, shrink);
      for (int64_t d = 0; d < a.dim; d += L) store(acc + d, mul(load(acc + d), shrink));
    }
    state.m = grown;
  }
  f32x16 p = exp(sub(s, splat(state.m)));
  if (!whole) p = select(seen, p, splat(0.0f));
  state.l = add(state.l, p);
  store(row, p);
}

template <class T>
static void attend_tile(const Attention<T>& a, const Tile& tile) {
  TileRows<T> rows(a, tile);
  const T* q[MAX_ROWS];
  alignas(64) float packed[MAX_ROWS * MAX_DIM], acc[MAX_ROWS * MAX_DIM];
  alignas(64) float s[MAX_AHEAD][MAX_ROWS][L];
  Softmax state[MAX_ROWS];
  for (int r = 0; r < rows.count; r++) {
    q[r] = a.q + rows.index[r] * a.dim;
    if (a.sinks && a.sinks[rows.index[r] % a.heads] != -INFINITY) {
      state[r].m = a.sinks[rows.index[r] % a.heads];
      state[r].l = select(lanes_in(0, 1), splat(1.0f), splat(0.0f));
    }
  }
  memset(acc, 0, rows.count * a.dim * sizeof(float));
  pack_rows(q, rows.count, a.dim, packed);
  for (int64_t first = rows.first_page; first <= rows.last_page; first += MAX_AHEAD) {
    int ahead =
        (int)(rows.last_page - first + 1 < MAX_AHEAD ? rows.last_page - first + 1 : MAX_AHEAD);
    const T* keys[MAX_AHEAD];
    for (int p = 0; p < ahead; p++) keys[p] = a.page(a.k, tile.request, first + p, tile.kv_head);
    score_rows(packed, rows.count, keys, ahead, a.dim, s);
    for (int p = 0; p < ahead; p++) {
      int lo[MAX_ROWS], hi[MAX_ROWS];
      for (int r = 0; r < rows.count; r++) {
        a.visible(rows.position[r], first + p, lo + r, hi + r);
        if (lo[r] < hi[r]) softmax_page(a, state[r], acc + r * a.dim, s[p][r], lo[r], hi[r]);
      }
      const T* values = a.page(a.v, tile.request, first + p, tile.kv_head);
      accumulate_rows(acc, rows.count, s[p][0], L, values, a.dim, a.dim, lo, hi);
    }
  }
  for (int r = 0; r < rows.count; r++) {
    float l = sum_lanes(state[r].l);
    a.m[rows.index[r]] = state[r].m;
    a.l[rows.index[r]] = l;
    T* out = a.out + rows.index[r] * a.dim;
    for (int64_t d = 0; d < a.dim; d += L)
      store_as(out + d, div(load(acc + r * a.dim + d), splat(l)));
  }
}

// The first request that would read outside its block table or the cache, or -1; `requests` when
// the requests do not cover the rows.
template <class T>
static int64_t first_bad_request(const Attention<T>& a, int64_t rows, int64_t num_pages) {
  if (a.query_start[0] != 0 || a.query_start[a.requests] != rows) return a.requests;
  for (int64_t b = 0; b < a.requests; b++) {
    int64_t pages = ((int64_t)a.kv_len[b] + PAGE - 1) / PAGE;
    if (a.queries(b) < 0 || a.queries(b) > a.kv_len[b] || pages > a.max_pages) return b;
    for (int64_t i = 0; i < pages; i++) {
      int64_t page = a.block_table[b * a.max_pages + i];
      if (page < 0 || page >= num_pages) return b;
    }
  }
  return -1;
}

template <class U>
static void write_pages(U* k_pages, U* v_pages, const U* k, const U* v, const int64_t* slot,
                        int64_t tokens, int64_t kv_heads, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * kv_heads * dim > 16384)
  for (int64_t h = 0; h < kv_heads; h++)
    for (int64_t t = 0; t < tokens; t++) {
      int64_t page = (slot[t] / PAGE * kv_heads + h) * PAGE * dim, offset = slot[t] % PAGE;
      const U *k_row = k + (t * kv_heads + h) * dim, *v_row = v + (t * kv_heads + h) * dim;
      for (int64_t d = 0; d < dim; d++) k_pages[page + d * PAGE + offset] = k_row[d];
      if (v_pages) memcpy(v_pages + page + offset * dim, v_row, dim * sizeof(U));
    }
}

}  // namespace ZM_NAMESPACE

#define ZM_ATTENTION_FIELDS(T)                                                                    \
  {(const T*)q, (const T*)k, (const T*)v, query_start, kv_len, block_table, sinks, (T*)out, m, l, \
   requests,    max_pages,   heads,       kv_heads,    dim,    window,      scale, softcap}

extern "C" {

// bad[0]: what first_bad_request found; nothing is computed unless it is -1.
void ZM_EXPORT(attention)(const void* q, const void* k, const void* v, const int32_t* query_start,
                          const int32_t* kv_len, const int32_t* block_table, const float* sinks,
                          void* out, float* m, float* l, int64_t* bad, int64_t rows,
                          int64_t num_pages, int64_t requests, int64_t max_pages, int64_t heads,
                          int64_t kv_heads, int64_t dim, int64_t window, float scale, float softcap,
                          int64_t bf16, int64_t threads) {
  using namespace ZM_NAMESPACE;
  if (bf16) {
    Attention<uint16_t> a ZM_ATTENTION_FIELDS(uint16_t);
    if ((bad[0] = first_bad_request(a, rows, num_pages)) < 0)
      for_each_tile(a, (int)threads, [&](const Tile& t) { attend_tile(a, t); });
  } else {
    Attention<float> a ZM_ATTENTION_FIELDS(float);
    if ((bad[0] = first_bad_request(a, rows, num_pages)) < 0)
      for_each_tile(a, (int)threads, [&](const Tile& t) { attend_tile(a, t); });
  }
}

// Bit copies into the page layout; `bytes` is the element size, v_pages may be null. Equal slots:
// the later token wins.
void ZM_EXPORT(write_kv)(void* k_pages, void* v_pages, const void* k, const void* v,
                         const int64_t* slot, int64_t tokens, int64_t kv_heads, int64_t dim,
                         int64_t bytes, int64_t threads) {
  using namespace ZM_NAMESPACE;
  if (bytes == 2)
    write_pages((uint16_t*)k_pages, (uint16_t*)v_pages, (const uint16_t*)k, (const uint16_t*)v,
                slot, tokens, kv_heads, dim, (int)threads);
  else
    write_pages((uint32_t*)k_pages, (uint32_t*)v_pages, (const uint32_t*)k, (const uint32_t*)v,
                slot, tokens, kv_heads, dim, (int)threads);
}

}  // extern "C"
