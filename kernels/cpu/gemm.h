// Matrix products as linear chains ("linear.chain"): the one GEMM of the CPU core.
//
// Every output of a forward product is a sum of short chains: fp32 FMAs over 128 values of k
// ascending, each chain from +0, the finished chains added in ascending order (the error then grows
// with 128 and with K / 128, not with K). Sums over tokens (dW, db) are one unbroken chain instead,
// from +0 or from a given accumulator, so that any split into micro-batches continues it. A bias is
// added to the finished sum, then it is rounded once to the output's dtype.
// Lanes run along the output columns, so no lane ever meets a tail: columns are padded with zeros.
// bf16 operands are widened exactly. Row count, tile, cache block, thread count and packing are
// schedule: storing an fp32 accumulator and loading it again is exact, and threads split no sum.
//
// B is read as panels [ceil(N / 16)][K][16] (zero padded), either prepared by `pack` from a weight
// [N, K], or cut from a row-major [K, N] into a stack buffer by the job that uses it. A is copied
// into tiles [K][R] of at most TILE_ROWS rows, so that a k-step reads R neighbouring numbers.
// A job is a group of panels times a run of tiles; it keeps its accumulators in a stack buffer
// between cache blocks of K_BLOCK. Very long chains pause every K_SPAN steps, so that the copy of A
// stays small; they wait in C, or in a scratch when C is bf16.
//
// Legend: M rows, N columns, K reduced; R rows of a tile, P panels of a group, L = 16 lanes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include "gemm_tiles.h"
#include "simd.h"

namespace ZM_NAMESPACE::gemm {

constexpr int RUN_TILES = 16;
constexpr int64_t K_BLOCK = 128;  // contract: the length of a short chain; also the cache block
constexpr int64_t K_SPAN = 4096, BLOCK_FLOATS = int64_t(1) << 20;
static_assert(K_SPAN % K_BLOCK == 0, "a pause falls between two short chains");
// Up to this much work one thread is done before two have met. Reading B costs as four rows do.
constexpr int64_t SMALL = 1 << 21, B_ROWS = 4;

static inline float widen(const void* p, int64_t i, int64_t is_bf16) {
  if (!is_bf16) return ((const float*)p)[i];
  uint32_t u = (uint32_t)((const uint16_t*)p)[i] << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

struct Operand {  // a matrix in memory: fp32 or bf16, leading dimension, transposed or not
  const void* data;
  bool bf16, transposed;
  int64_t ld;
};

struct Product {
  Operand A;
  const uint32_t* panels;  // packed B, or null: then `rows` is used
  int64_t panel_stride;    // words between panels
  Way way;                 // how panels are stored and A is packed
  const uint32_t* smallest;  // of each panel, for dots
  Operand rows;          // B row-major [K, N]
  const float* initial;  // [M, N] or null
  const float* bias;     // [N] or null
  void* C;
  bool c_bf16;
  bool unbroken;  // one chain over all of K, not chains of K_BLOCK
  int64_t M, N, K, threads;
};

// Rows [first, first + R) of A, k in [k0, k1) -> out[k - k0][R].
static void pack_tile(const Operand& A, int64_t first, int R, int64_t k0, int64_t k1, float* out) {
  for (int64_t k = k0; k < k1; k++)
    for (int r = 0; r < R; r++) {
      int64_t m = first + r;
      *out++ = widen(A.data, A.transposed ? k * A.ld + m : m * A.ld + k, A.bf16);
    }
}

// The same as pairs -> out[(k - k0) / 2][R]; returns the `smallest` of what it read.
static uint32_t pack_tile_pairs(const Operand& A, int64_t first, int R, int64_t k0, int64_t k1,
                                uint32_t* out) {
  uint32_t low = NONE_SMALL;
  for (int r = 0; r < R; r++) {
    const uint16_t* row = (const uint16_t*)A.data + (first + r) * A.ld;
    low = smallest(row + k0, k1 - k0, low);
    for (int64_t k = k0; k < k1; k += 2)
      out[(k - k0) / 2 * R + r] = (uint32_t)row[k] << 16 | (k + 1 < k1 ? row[k + 1] : 0u);
  }
  return low;
}

// Panels [p0, p0 + P) of a row-major B, k in [k0, k1) -> out[P][K_BLOCK][16].
static void pack_rows(const Operand& B, int64_t N, int64_t p0, int P, int64_t k0, int64_t k1,
                      float* out) {
  for (int p = 0; p < P; p++) {
    int64_t n = (p0 + p) * L;
    int valid = (int)std::min<int64_t>(L, N - n);
    float* to = out + p * K_BLOCK * L;
    for (int64_t k = k0; k < k1; k++, to += L) {
      if (valid == L) {
        int64_t at = k * B.ld + n;
        store(to,
              B.bf16 ? load_bf16((const uint16_t*)B.data + at) : load((const float*)B.data + at));
      } else {
        for (int j = 0; j < L; j++)
          to[j] = j < valid ? widen(B.data, k * B.ld + n + j, B.bf16) : 0.0f;
      }
    }
  }
}

// The finished chains of one row and P panels: bias, one rounding, no column beyond N.
static void finish_row(const Product& g, int64_t m, int64_t p0, int P, const float* acc) {
  for (int p = 0; p < P; p++) {
    int64_t n = (p0 + p) * L, valid = std::min<int64_t>(L, g.N - n);
    f32x16 c = load(acc + p * L);
    alignas(64) float rest[L] = {0};
    if (g.bias) {
      if (valid < L) memcpy(rest, g.bias + n, sizeof(float) * valid);
      c = add(c, valid < L ? load(rest) : load(g.bias + n));
    }
    if (g.c_bf16) {
      uint16_t* to = (uint16_t*)g.C + m * g.N + n;
      if (valid == L)
        store_bf16(to, c);
      else {
        store_bf16((uint16_t*)rest, c);
        memcpy(to, rest, sizeof(uint16_t) * valid);
      }
    } else {
      float* to = (float*)g.C + m * g.N + n;
      if (valid == L)
        store(to, c);
      else {
        store(rest, c);
        memcpy(to, rest, sizeof(float) * valid);
      }
    }
  }
}

static void load_initial(const Product& g, int64_t m, int64_t p0, int P, float* acc) {
  int64_t n = p0 * L, valid = std::min<int64_t>(P * L, g.N - n);
  memcpy(acc, g.initial + m * g.N + n, sizeof(float) * valid);
  std::fill(acc + valid, acc + P * L, 0.0f);
}

// Memory of one thread, kept between products. Not std::vector: g++ 13 refuses to inline its
// destructor where a file names its own target.
struct Buffer {
  uint32_t* words = nullptr;
  int64_t count = 0;
  ~Buffer() { free(words); }
  uint32_t* at_least(int64_t needed) {
    if (count < needed) {
      free(words);
      words = (uint32_t*)malloc(needed * sizeof(uint32_t));
      if (!words) abort();
      count = needed;
    }
    return words;
  }
};

// Rows shared out evenly over tiles.
struct Tiling {
  int64_t rows, count;
  int64_t start(int64_t t) const { return rows * t / count; }
};

// A in tiles, and the `smallest` of each tile's slab of K_BLOCK, where dots need it.
struct Packed {
  const uint32_t* words;
  const uint32_t* smallest;
  int64_t row_words;  // per row of A: K, or its pairs
};

static int64_t words_of(Way way, int64_t k) { return way == Way::dots ? (k + 1) / 2 : k; }

static TileFunction tile_of(Way way, bool exact, int R, int P) {
  if (way == Way::floats) return TILES<Way::floats>[R - 1][P - 1];
#if defined(ZM_AVX512)
  if (way == Way::dots)
    return exact ? TILES<Way::dots>[R - 1][P - 1] : TILES<Way::dots, false>[R - 1][P - 1];
#endif
  return TILES<Way::pairs>[R - 1][P - 1];
}

// Tiles [t0, t1) times panels [p0, p0 + P).
static void run_job(const Product& g, const Packed& packed, Tiling tiling, int64_t t0, int64_t t1,
                    int64_t p0, int P) {
  alignas(64) float acc[RUN_TILES * ACCUMULATORS * L];
  alignas(64) float cut[GROUP_PANELS * K_BLOCK * L];
  int64_t m0 = tiling.start(t0), m1 = tiling.start(t1), width = P * L;
  if (g.initial)
    for (int64_t m = m0; m < m1; m++) load_initial(g, m, p0, P, acc + (m - m0) * width);
  int64_t slabs = (g.K + K_BLOCK - 1) / K_BLOCK, panel_stride = g.panel_stride;
  uint32_t low = NONE_SMALL;
  if (g.way == Way::dots)
    for (int p = 0; p < P; p++) low = std::min(low, g.smallest[p0 + p]);
  for (int64_t k0 = 0; k0 < g.K || k0 == 0; k0 += K_BLOCK) {
    int64_t k1 = std::min(g.K, k0 + K_BLOCK);
    const uint32_t* b = g.panels + p0 * panel_stride + (g.way == Way::floats ? k0 : k0 / 2) * L;
    if (!g.panels) {
      pack_rows(g.rows, g.N, p0, P, k0, k1, cut);
      b = (const uint32_t*)cut;
      panel_stride = K_BLOCK * L;
    }
    Chain chain = k0 == 0 && !g.initial ? Chain::fresh
                  : g.unbroken          ? Chain::continued
                                        : Chain::added;
    for (int64_t t = t0; t < t1; t++) {
      int64_t m = tiling.start(t);
      int R = (int)(tiling.start(t + 1) - m);
      bool exact = g.way == Way::dots &&
                   dot_is_exact(packed.smallest[t * slabs + k0 / K_BLOCK], low);
      tile_of(g.way, exact, R, P)(packed.words + m * packed.row_words + words_of(g.way, k0) * R, b,
                                  panel_stride, k1 - k0, acc + (m - m0) * width, width, chain);
    }
  }
  for (int64_t m = m0; m < m1; m++) finish_row(g, m, p0, P, acc + (m - m0) * width);
}

// All rows of g at once: every thread packs a share of A, then every thread runs a share of the jobs.
static void run_block(const Product& g, Buffer& buffer) {
  Tiling tiling{g.M, (g.M + TILE_ROWS - 1) / TILE_ROWS};
  int64_t panels = (g.N + L - 1) / L, slabs = (g.K + K_BLOCK - 1) / K_BLOCK;
  int64_t widest = most_panels((int)((g.M + tiling.count - 1) / tiling.count));
  int64_t groups = ((panels + widest - 1) / widest + g.threads - 1) / g.threads * g.threads;
  groups = std::min(groups, panels);
  int64_t run =
      std::max<int64_t>(1, std::min<int64_t>(RUN_TILES, tiling.count * groups / (4 * g.threads)));
  int64_t runs = (tiling.count + run - 1) / run;
  bool direct = g.M == 1 && !g.A.bf16 && !g.A.transposed;
  bool dots = g.way == Way::dots;
  int64_t row_words = words_of(g.way, g.K), words = g.M * row_words;
  int64_t needed = words + (dots ? tiling.count * slabs : 0);
  uint32_t *to = direct ? nullptr : buffer.at_least(needed), *lowest = to + words;
  Packed packed{direct ? (const uint32_t*)g.A.data : to, lowest, row_words};
#pragma omp parallel num_threads(g.threads) if ((g.M + B_ROWS) * g.N * g.K > SMALL)
  {
    if (!direct) {
#pragma omp for schedule(static)
      for (int64_t u = 0; u < tiling.count * slabs; u++) {
        int64_t m = tiling.start(u / slabs), k0 = u % slabs * K_BLOCK;
        int64_t k1 = std::min(g.K, k0 + K_BLOCK);
        int R = (int)(tiling.start(u / slabs + 1) - m);
        uint32_t* tile = to + m * row_words + words_of(g.way, k0) * R;
        if (dots)
          lowest[u] = pack_tile_pairs(g.A, m, R, k0, k1, tile);
        else
          pack_tile(g.A, m, R, k0, k1, (float*)tile);
      }
    }
#pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < groups * runs; j++) {
      int64_t group = j / runs, p0 = panels * group / groups, p1 = panels * (group + 1) / groups;
      int64_t t0 = j % runs * run;
      run_job(g, packed, tiling, t0, std::min(tiling.count, t0 + run), p0, (int)(p1 - p0));
    }
  }
}

static const void* at(const void* p, bool bf16, int64_t i) {
  return (const char*)p + i * (bf16 ? 2 : 4);
}

// Rows [m0, m1) and steps [k0, k1) of g as a product of its own, whose chains start at `from`.
static Product part(const Product& g, int64_t m0, int64_t m1, int64_t k0, int64_t k1,
                    const float* from, void* to) {
  Product s = g;
  s.M = m1 - m0;
  s.K = k1 - k0;
  s.A.data = at(g.A.data, g.A.bf16, g.A.transposed ? k0 * g.A.ld + m0 : m0 * g.A.ld + k0);
  s.rows.data = at(g.rows.data, g.rows.bf16, k0 * g.rows.ld);
  if (g.panels) s.panels = g.panels + (g.way == Way::floats ? k0 : k0 / 2) * L;
  s.initial = from;
  s.C = to;
  if (k1 < g.K) {
    s.bias = nullptr;
    s.c_bf16 = false;
  }
  return s;
}

static void multiply(const Product& g) {
  if (g.M == 0 || g.N == 0) return;
  thread_local Buffer buffer, scratch;
  bool paused = g.K > K_SPAN;
  int64_t block = std::max<int64_t>(TILE_ROWS, BLOCK_FLOATS / std::clamp<int64_t>(g.K, 1, K_SPAN));
  bool waits = paused && g.c_bf16;
  float* sums = waits ? (float*)scratch.at_least(std::min(g.M, block) * g.N) : nullptr;
  int64_t blocks = (g.M + block - 1) / block;
  for (int64_t i = 0; i < blocks; i++) {
    int64_t m0 = g.M * i / blocks, m1 = g.M * (i + 1) / blocks;
    void* to = (void*)at(g.C, g.c_bf16, m0 * g.N);
    float* waiting = g.c_bf16 ? sums : (float*)to;
    const float* from = g.initial ? g.initial + m0 * g.N : nullptr;
    for (int64_t k0 = 0; k0 < g.K || k0 == 0; k0 += K_SPAN) {
      int64_t k1 = std::min(g.K, k0 + K_SPAN);
      run_block(part(g, m0, m1, k0, k1, from, k1 < g.K ? waiting : to), buffer);
      from = waiting;
    }
  }
}

}  // namespace ZM_NAMESPACE::gemm

// weight [N, K] -> panels [ceil(N / 16)][K][16] of fp32, or of bf16 [ceil(K / 2)][16] pairs followed,
// after all panels, by the `smallest` of each; columns beyond N are zero.
extern "C" void ZM_EXPORT(pack)(const void* weight, int64_t w_bf16, int64_t N, int64_t K,
                                uint32_t* panels, int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::gemm;
  int64_t count = (N + L - 1) / L, rows = w_bf16 ? (K + 1) / 2 : K;
  const uint16_t* halves = (const uint16_t*)weight;
#pragma omp parallel for num_threads(threads) schedule(static) if (B_ROWS * N * K > SMALL)
  for (int64_t p = 0; p < count; p++) {
    uint32_t *to = panels + p * rows * L, low = NONE_SMALL;
    int valid = (int)std::min<int64_t>(L, N - p * L);
    if (valid < L) std::fill(to, to + rows * L, 0u);
    for (int j = 0; j < valid; j++) {
      int64_t row = (p * L + j) * K;
      if (!w_bf16) {
        for (int64_t k = 0; k < K; k++) to[k * L + j] = ((const uint32_t*)weight)[row + k];
        continue;
      }
      for (int64_t k = 0; k < K; k += 2)
        to[k / 2 * L + j] =
            (uint32_t)halves[row + k] << 16 | (k + 1 < K ? halves[row + k + 1] : 0u);
      low = smallest(halves + row, K, low);
    }
    if (w_bf16) panels[count * rows * L + p] = low;
  }
}

// C [M, N] = round(A [M, K] x panels + bias); panels as `pack` left them for a weight of A's dtype.
// dots: bf16 by the dot instruction, where the processor has it.
extern "C" void ZM_EXPORT(gemm)(const void* A, int64_t bf16, const uint32_t* panels,
                                const float* bias, void* C, int64_t c_bf16, int64_t M, int64_t N,
                                int64_t K, int64_t dots, int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::gemm;
  Product g{};
  g.A = {A, bf16 != 0, false, K};
#if !defined(ZM_AVX512)
  dots = 0;
#endif
  g.way = !bf16 ? Way::floats : dots ? Way::dots : Way::pairs;
  g.panels = panels, g.panel_stride = (bf16 ? (K + 1) / 2 : K) * L;
  g.smallest = panels + (N + L - 1) / L * g.panel_stride;
  g.bias = bias;
  g.C = C, g.c_bf16 = c_bf16 != 0;
  g.M = M, g.N = N, g.K = K, g.threads = threads;
  multiply(g);
}

// C [M, N] = round(initial + A x B), B row-major [K, N]; A is [M, K], or [K, M] when a_transposed.
// With a_transposed, k runs over tokens and each sum is one unbroken chain from `initial` (fp32, may
// be C itself; null means +0). Otherwise short chains are added, to `initial` if given.
extern "C" void ZM_EXPORT(gemm_rows)(const void* A, int64_t a_bf16, int64_t a_transposed,
                                     const void* B, int64_t b_bf16, const float* initial, void* C,
                                     int64_t c_bf16, int64_t M, int64_t N, int64_t K,
                                     int64_t threads) {
  using namespace ZM_NAMESPACE;
  using namespace ZM_NAMESPACE::gemm;
  Product g{};
  g.A = {A, a_bf16 != 0, a_transposed != 0, a_transposed ? M : K};
  g.rows = {B, b_bf16 != 0, false, N};
  g.initial = initial;
  g.unbroken = a_transposed != 0;
  g.C = C, g.c_bf16 = c_bf16 != 0;
  g.M = M, g.N = N, g.K = K, g.threads = threads;
  multiply(g);
}
