// The CPU core, built as the "avx512" variant. See simd.h for why variants share their bits.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2")
#define ZM_AVX512 1
#define ZM_NAMESPACE zm_avx512
#define ZM_EXPORT(name) zm_avx512_##name
#include "all.h"
#endif
