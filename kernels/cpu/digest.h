// Row digests: 128 bits per row, integer arithmetic modulo 2^64 only ("digest.v1").
//
// kernels/reference/digest.py is the definition and spells the algebra out. In short: elements become
// 32-bit words; each block of 1,024 words is summed against odd constants A and B; block sums are mixed
// and summed against odd block constants; row length and dtype are mixed in last. Integer sums have no
// order, so threads, vector width and variant cannot change a bit.
#pragma once

namespace ZM_NAMESPACE {

constexpr int64_t kDigestBlock = 1024;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kSeedB = 0xD1B54A32D192ED03ull, kSeedC = 0x8CB92BA72F3D8DD7ull;

static inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
static inline uint64_t odd_constant(uint64_t seed, int64_t i) {
  return mix64(kGolden * (uint64_t)(i + 1) + seed) | 1;
}

struct DigestTable {
  alignas(64) uint64_t a[kDigestBlock];
  alignas(64) uint64_t b[kDigestBlock];
  DigestTable() {
    for (int64_t i = 0; i < kDigestBlock; i++) {
      a[i] = odd_constant(0, i);
      b[i] = odd_constant(kSeedB, i);
    }
  }
};

struct DigestSums { uint64_t a, b; };

#if defined(ZM_AVX2)
static inline __m256i load_words(const uint32_t* w) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i*)w));
}
static inline __m256i load_words(const uint16_t* w) {
  return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i*)w));
}
static inline __m256i load_words(const uint8_t* w) {
  int32_t four;
  memcpy(&four, w, 4);
  return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
}
// Four words times four 64-bit constants: AVX2 has only 32 x 32 -> 64, so halves of the constant.
static inline void digest_step(__m256i w, const uint64_t* constants, __m256i& low, __m256i& high) {
  __m256i c = _mm256_load_si256((const __m256i*)constants);
  low = _mm256_add_epi64(low, _mm256_mul_epu32(w, c));
  high = _mm256_add_epi64(high, _mm256_mul_epu32(w, _mm256_srli_epi64(c, 32)));
}
static inline uint64_t digest_total(__m256i low, __m256i high) {
  alignas(32) uint64_t t[4];
  _mm256_store_si256((__m256i*)t, _mm256_add_epi64(low, _mm256_slli_epi64(high, 32)));
  return t[0] + t[1] + t[2] + t[3];
}
#endif

// One block of at most 1,024 words, already mixed and weighted. Word: uint8_t, uint16_t or uint32_t.
template <typename Word>
static inline DigestSums digest_block(const DigestTable& t, const Word* w, int64_t words, int64_t block) {
  uint64_t a = 0, b = 0;
  int64_t done = 0;
#if defined(ZM_AVX2)
  __m256i a_low = _mm256_setzero_si256(), a_high = a_low, b_low = a_low, b_high = a_low;
  for (; done + 4 <= words; done += 4) {
    __m256i word = load_words(w + done);
    digest_step(word, t.a + done, a_low, a_high);
    digest_step(word, t.b + done, b_low, b_high);
  }
  a = digest_total(a_low, a_high);
  b = digest_total(b_low, b_high);
#endif
#pragma omp simd reduction(+ : a, b)
  for (int64_t i = done; i < words; i++) {
    a += (uint64_t)w[i] * t.a[i];
    b += (uint64_t)w[i] * t.b[i];
  }
  uint64_t c = odd_constant(kSeedC, block);
  return {mix64(a) * c, mix64(b) * c};
}

template <typename Word>
static DigestSums digest_span(const DigestTable& t, const Word* w, int64_t words, int64_t first,
                              int64_t last) {
  DigestSums total{0, 0};
  for (int64_t block = first; block < last; block++) {
    int64_t begin = block * kDigestBlock;
    int64_t count = words - begin < kDigestBlock ? words - begin : kDigestBlock;
    DigestSums part = digest_block(t, w + begin, count, block);
    total.a += part.a;
    total.b += part.b;
  }
  return total;
}

template <typename Word>
static void digest_rows(const Word* x, int64_t rows, int64_t words, uint64_t header, int64_t* out) {
  static const DigestTable table;
  const int64_t blocks = (words + kDigestBlock - 1) / kDigestBlock;
  const bool large = rows * words > (1 << 17) && omp_get_max_threads() > 1;
  auto finish = [&](int64_t row, DigestSums total) {
    out[2 * row] = (int64_t)mix64(total.a + header);
    out[2 * row + 1] = (int64_t)mix64(total.b ^ header);
  };
  if (large && rows < 2 * omp_get_max_threads()) {  // few long rows: threads share each row's blocks
    for (int64_t row = 0; row < rows; row++) {
      uint64_t a = 0, b = 0;
#pragma omp parallel for schedule(static) reduction(+ : a, b)
      for (int64_t block = 0; block < blocks; block++) {
        DigestSums part = digest_span(table, x + row * words, words, block, block + 1);
        a += part.a;
        b += part.b;
      }
      finish(row, {a, b});
    }
    return;
  }
#pragma omp parallel for schedule(static) if (large)
  for (int64_t row = 0; row < rows; row++)
    finish(row, digest_span(table, x + row * words, words, 0, blocks));
}

}  // namespace ZM_NAMESPACE

// x: rows of `elements` elements of `width` bytes (1, 2, or a multiple of 4); code: the dtype's number.
extern "C" void ZM_EXPORT(digest_rows)(const void* x, int64_t rows, int64_t elements, int64_t width,
                                       int64_t code, int64_t* out) {
  using namespace ZM_NAMESPACE;
  const uint64_t header = mix64((((uint64_t)elements << 8) | (uint64_t)code) * kGolden);
  if (width == 1) digest_rows((const uint8_t*)x, rows, elements, header, out);
  else if (width == 2) digest_rows((const uint16_t*)x, rows, elements, header, out);
  else digest_rows((const uint32_t*)x, rows, elements * (width / 4), header, out);
}
