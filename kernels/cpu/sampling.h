// Gumbel-max sampling: one token per row, noise keyed by (seed, position, token id) alone.
//
// kernels/reference/sampling.py is the definition. All steps are IEEE fp32 and fp64 operations written
// one by one, without FMA, so vector width and variant cannot change a bit; the maximum has no order
// (lowest id on ties), so threads cannot either.
#pragma once

namespace ZM_NAMESPACE {

constexpr uint64_t kSeedNoise = 0x2545F4914F6CDD1Dull;

static inline double double_of_bits(uint64_t bits) { double d; memcpy(&d, &bits, 8); return d; }
static inline uint64_t bits_of_double(double d) { uint64_t bits; memcpy(&bits, &d, 8); return bits; }

// log(x) for positive normal x ("log.fp64.v1"): fdlibm's polynomial, argument in [sqrt(1/2), sqrt(2)).
static inline double log64(double x) {
  uint64_t bits = bits_of_double(x);
  uint64_t mantissa = bits & 0x000FFFFFFFFFFFFFull;
  // adds 1 to the exponent field when the mantissa is at or above that of sqrt(2)
  uint64_t above = (mantissa + 0x00095F619980C434ull) >> 52;
  double k = double_of_bits(((bits >> 52) + above) | 0x4330000000000000ull) - (4503599627370496.0 + 1023.0);
  double m = double_of_bits(mantissa | (0x3FF0000000000000ull - (above << 52)));
  double f = m - 1.0;
  double s = f / (2.0 + f);
  double z = s * s;
  double w = z * z;
  double even = w * (0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332));
  double odd = z * (0.6666666666666735130 + w * (0.2857142874366239149 +
               w * (0.1818357216161805012 + w * 0.1479819860511658591)));
  double half = (0.5 * f) * f;
  double low = s * (half + (odd + even)) + k * 1.90821492927058770002e-10;
  return k * 6.93147180369123816490e-01 - ((half - low) - f);
}

// log(-log(u)), u uniform in (0, 1) from the hash: the negative of the Gumbel noise.
static inline double negative_gumbel(uint64_t key, int64_t token) {
  uint64_t h = mix64(kGolden * (uint64_t)(token + 1) + key);
  double u = double_of_bits((h >> 12) | 0x3FF0000000000000ull) - 0.99999999999999988898;
  return log64(-log64(u));
}

constexpr int64_t kSampleTile = 256;

// Token of one row, or a negative reason: -1 NaN, -2 +inf, -3 nothing finite, -4 logit / T overflows.
static int64_t sample_row(const float* logits, int64_t vocabulary, uint64_t key, float temperature) {
  alignas(64) double score[kSampleTile];
  double best = -HUGE_VAL;
  int64_t token = -3;
  for (int64_t begin = 0; begin < vocabulary; begin += kSampleTile) {
    const int64_t count = vocabulary - begin < kSampleTile ? vocabulary - begin : kSampleTile;
    const float* x = logits + begin;
    int nan = 0, infinite = 0;
#pragma omp simd reduction(| : nan, infinite)
    for (int64_t i = 0; i < count; i++) {
      nan |= x[i] != x[i];
      infinite |= x[i] == HUGE_VALF;
    }
    if (nan) return -1;
    if (infinite) return -2;
    if (temperature == 0.0f) {
#pragma omp simd
      for (int64_t i = 0; i < count; i++) score[i] = (double)x[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; i++)
        score[i] = (double)(x[i] / temperature) - negative_gumbel(key, begin + i);
    }
    double top = score[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) top = score[i] > top ? score[i] : top;
    if (top == HUGE_VAL) return -4;
    if (top > best) {
      best = top;
      for (int64_t i = count - 1; i >= 0; i--) if (score[i] == top) token = begin + i;
    }
  }
  return token;
}

}  // namespace ZM_NAMESPACE

// logits fp32 [rows, vocabulary]; seeds, positions int64 [rows]; temperature fp32 [rows]; out int64 [rows].
extern "C" void ZM_EXPORT(sample)(const float* logits, const int64_t* seeds, const int64_t* positions,
                                  const float* temperature, int64_t rows, int64_t vocabulary, int64_t* out) {
  using namespace ZM_NAMESPACE;
#pragma omp parallel for schedule(dynamic) if (rows > 1 && rows * vocabulary > (1 << 14))
  for (int64_t row = 0; row < rows; row++) {
    uint64_t key = mix64(kGolden * (uint64_t)(positions[row] + 1) + mix64((uint64_t)seeds[row] ^ kSeedNoise));
    out[row] = sample_row(logits + row * vocabulary, vocabulary, key, temperature[row]);
  }
}
