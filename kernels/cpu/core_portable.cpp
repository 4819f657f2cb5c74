// The CPU core, built as the "portable" variant. See simd.h for why variants share their bits.
#if 1
#define ZM_PORTABLE 1
#define ZM_NAMESPACE zm_portable
#define ZM_EXPORT(name) zm_portable_##name
#include "all.h"
#endif
