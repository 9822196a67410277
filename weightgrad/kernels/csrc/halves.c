/* float32 to itself, float16 or bfloat16 and back, rounded to nearest even, with a look at the
 * largest magnitude on the way. Only in AVX2: elsewhere torch's own casts do it. */
#include "units.h"

/* kind is 32, 16 (float16) or 17 (bfloat16). Returns the bits of the largest |x|. Call only when
 * wg_isa() is 1. */
WG_API uint32_t wg_narrow(const float *x, uint64_t n, int kind, void *out) {
#if WG_HAS_AVX2_UNIT
    return wg_narrow_avx2(x, n, kind, out);
#else
    (void)x, (void)n, (void)kind, (void)out;
    return 0;
#endif
}

WG_API void wg_widen(const void *in, uint64_t n, int kind, int mode, float *out) {
#if WG_HAS_AVX2_UNIT
    wg_widen_avx2(in, n, kind, mode, out);
#else
    (void)in, (void)n, (void)kind, (void)mode, (void)out;
#endif
}

/* Zeros, past the cache when there are many. */
WG_API void wg_clear(float *out, uint64_t n) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_clear_avx2(out, n);
        return;
    }
#endif
    memset(out, 0, n * sizeof(float));
}
