// Mixtures of experts: which experts a token goes to, with which weights, and their combination.
//
// "topk.scores": scores are a softmax of the row's logits ("logprob.lanes16" order) or a sigmoid;
// a correction bias is added for the choice only; groups are ranked by the sum of their two best;
// whatever is chosen is chosen by (score descending, index ascending), so that ties have one answer.
// "combine.slots": fp32 FMA chain over a token's slots, in the order in which they were chosen.
//
// Legend: T = tokens, E = experts, K = slots per token, H = width, G = groups.
#pragma once
#include <vector>
#include "head.h"
#include "rows.h"
#include "simd.h"

namespace ZM_NAMESPACE::moe {

// softmax or sigmoid of one row of logits.
static inline void row_scores(const float* z, int64_t E, bool sigmoid, float* out) {
  if (sigmoid) {
    for (int64_t e = 0; e < E; e += L) {
      f32x16 v = sub(splat(0.0f), load_n(z + e, E - e));
      store_n(out + e, div(splat(1.0f), add(splat(1.0f), exp(v))), E - e);
    }
    return;
  }
  f32x16 lanes = splat(0.0f);
  float top = -INFINITY;
  for (int64_t e = 0; e < E; e++) top = z[e] > top ? z[e] : top;
  for (int64_t e = 0; e < E; e += L) {
    f32x16 p = head::exp_or_zero(sub(load_n(z + e, E - e), splat(top)));
    if (E - e < L) p = select(lanes_in(0, (int)(E - e)), p, splat(0.0f));
    lanes = add(lanes, p);
    store_n(out + e, p, E - e);
  }
  f32x16 total = splat(sum_lanes(lanes));
  for (int64_t e = 0; e < E; e += L) store_n(out + e, div(load_n(out + e, E - e), total), E - e);
}

// The k best of n by (value descending, index ascending) among those with allowed[i / per].
static inline void best(const float* value, int64_t n, int64_t k, const char* allowed, int64_t per,
                        char* taken, int64_t* chosen) {
  for (int64_t i = 0; i < n; i++) taken[i] = allowed && !allowed[i / per];
  for (int64_t slot = 0; slot < k; slot++) {
    int64_t top = -1;
    for (int64_t i = 0; i < n; i++)
      if (!taken[i] && (top < 0 || value[i] > value[top])) top = i;
    taken[top] = 1;
    chosen[slot] = top;
  }
}

static inline void row_topk(const float* scores, const float* bias, int64_t E, int64_t K, int64_t G,
                            int64_t groups_kept, float* value, char* taken, int64_t* chosen) {
  for (int64_t e = 0; e < E; e++) value[e] = bias ? scores[e] + bias[e] : scores[e];
  if (groups_kept == G) return best(value, E, K, nullptr, 1, taken, chosen);
  int64_t per = E / G;
  std::vector<float> rank(G);
  std::vector<int64_t> kept(groups_kept);
  std::vector<char> used(G), allowed(G, 0);
  for (int64_t g = 0; g < G; g++) {
    int64_t two[2];
    best(value + g * per, per, 2, nullptr, 1, taken, two);
    rank[g] = value[g * per + two[0]] + value[g * per + two[1]];
  }
  best(rank.data(), G, groups_kept, nullptr, 1, used.data(), kept.data());
  for (int64_t g : kept) allowed[g] = 1;
  best(value, E, K, allowed.data(), per, taken, chosen);
}

}  // namespace ZM_NAMESPACE::moe

// logits [T, E], bias [E] or null -> chosen [T, K], best first.
extern "C" void ZM_EXPORT(topk)(const float* logits, const float* bias, int64_t* chosen, int64_t T,
                                int64_t E, int64_t K, int64_t G, int64_t groups_kept,
                                int64_t sigmoid, int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * E > head::SMALL)
  for (int64_t t = 0; t < T; t++) {
    std::vector<float> scores(E), value(E);
    std::vector<char> taken(E);
    moe::row_scores(logits + t * E, E, sigmoid, scores.data());
    moe::row_topk(scores.data(), bias, E, K, G, groups_kept, value.data(), taken.data(),
                  chosen + t * K);
  }
}

// w[t, k] = score of chosen[t, k], divided by (sum over the slots + eps) if normed, times scale.
extern "C" void ZM_EXPORT(topk_weights)(const float* logits, const int64_t* chosen, float* weights,
                                        int64_t T, int64_t E, int64_t K, int64_t sigmoid,
                                        int64_t normed, float eps, float scale, int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * E > head::SMALL)
  for (int64_t t = 0; t < T; t++) {
    std::vector<float> scores(E);
    moe::row_scores(logits + t * E, E, sigmoid, scores.data());
    float total = 0.0f;
    for (int64_t k = 0; k < K; k++) total += scores[chosen[t * K + k]];
    for (int64_t k = 0; k < K; k++) {
      float w = scores[chosen[t * K + k]];
      weights[t * K + k] = (normed ? w / (total + eps) : w) * scale;
    }
  }
}

// d_logits [T, E] from d_weights [T, K]; the choice itself has no gradient.
extern "C" void ZM_EXPORT(topk_weights_grad)(const float* d_weights, const float* logits,
                                             const int64_t* chosen, float* d_logits, int64_t T,
                                             int64_t E, int64_t K, int64_t sigmoid, int64_t normed,
                                             float eps, float scale, int64_t threads) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for num_threads(threads) schedule(static) if (T * E > head::SMALL)
  for (int64_t t = 0; t < T; t++) {
    const int64_t* slot = chosen + t * K;
    const float* dw = d_weights + t * K;
    float* dz = d_logits + t * E;
    std::vector<float> scores(E), dp(K);
    moe::row_scores(logits + t * E, E, sigmoid, scores.data());
    float total = 0.0f, mean = 0.0f, inner = 0.0f;
    for (int64_t k = 0; k < K; k++) total += scores[slot[k]];
    total = total + eps;
    for (int64_t k = 0; k < K; k++) mean += dw[k] * (scores[slot[k]] / total);
    for (int64_t k = 0; k < K; k++) dp[k] = (normed ? (dw[k] - mean) / total : dw[k]) * scale;
    for (int64_t k = 0; k < K; k++) inner += dp[k] * scores[slot[k]];
    for (int64_t e = 0; e < E; e++) dz[e] = sigmoid ? 0.0f : -(scores[e] * inner);
    for (int64_t k = 0; k < K; k++) {
      float p = scores[slot[k]];
      dz[slot[k]] = sigmoid ? dp[k] * (p * (1.0f - p)) : p * (dp[k] - inner);
    }
  }
}

namespace ZM_NAMESPACE::moe {

template <class S>
static void combine_rows(const S* y, const float* w, S* out, int64_t T, int64_t K, int64_t H,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * K * H > head::SMALL)
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h += L) {
      f32x16 sum = splat(0.0f);
      for (int64_t k = 0; k < K; k++)
        sum = fma(splat(w[t * K + k]), load_n(y + (t * K + k) * H + h, H - h), sum);
      store_n(out + t * H + h, sum, H - h);
    }
}

template <class S>
static void combine_grad_rows(const S* g, const S* y, const float* w, S* dy, float* dw, int64_t T,
                              int64_t K, int64_t H, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * K * H > head::SMALL)
  for (int64_t t = 0; t < T; t++)
    for (int64_t k = 0; k < K; k++) {
      f32x16 lanes = splat(0.0f), scale = splat(w[t * K + k]);
      for (int64_t h = 0; h < H; h += L) {
        f32x16 up = load_n(g + t * H + h, H - h);
        lanes = fma(up, load_n(y + (t * K + k) * H + h, H - h), lanes);
        store_n(dy + (t * K + k) * H + h, mul(scale, up), H - h);
      }
      dw[t * K + k] = sum_lanes(lanes);
    }
}

}  // namespace ZM_NAMESPACE::moe

// y [T, K, H], w [T, K] -> out [T, H], rounded once.
extern "C" void ZM_EXPORT(combine)(const void* y, const float* w, void* out, int64_t T, int64_t K,
                                   int64_t H, int64_t bf16, int64_t threads) {
  using namespace ZM_NAMESPACE::moe;
  if (bf16)
    combine_rows((const uint16_t*)y, w, (uint16_t*)out, T, K, H, (int)threads);
  else
    combine_rows((const float*)y, w, (float*)out, T, K, H, (int)threads);
}

// g [T, H] -> dy [T, K, H] = round(w g), dw [T, K] = sum over 16 lanes of g y.
extern "C" void ZM_EXPORT(combine_grad)(const void* g, const void* y, const float* w, void* dy,
                                        float* dw, int64_t T, int64_t K, int64_t H, int64_t bf16,
                                        int64_t threads) {
  using namespace ZM_NAMESPACE::moe;
  if (bf16)
    combine_grad_rows((const uint16_t*)g, (const uint16_t*)y, w, (uint16_t*)dy, dw, T, K, H,
                      (int)threads);
  else
    combine_grad_rows((const float*)g, (const float*)y, w, (float*)dy, dw, T, K, H, (int)threads);
}
