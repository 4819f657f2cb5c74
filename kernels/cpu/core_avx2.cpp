// The CPU core, built as the "avx2" variant. See simd.h for why variants share their bits.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,bmi2")
#define ZM_AVX2 1
#define ZM_NAMESPACE zm_avx2
#define ZM_EXPORT(name) zm_avx2_##name
#include "all.h"
#endif
