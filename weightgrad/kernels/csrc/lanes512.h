/* Shared by the AVX-512 units only: sixteen lanes of what lanes.h has in eight. */
#ifndef WG_LANES512_H
#define WG_LANES512_H

#include "lanes.h"

typedef __m512i I16;
typedef __m512 F16;

ALWAYS_INLINE I16 same16(uint32_t v) { return _mm512_set1_epi32((int)v); }
ALWAYS_INLINE I16 magnitude16(F16 x) { return _mm512_and_si512(_mm512_castps_si512(x), same16(WG_ABS_MASK)); }
ALWAYS_INLINE uint32_t top16(I16 v) { return _mm512_reduce_max_epu32(v); }
ALWAYS_INLINE __m512d low_half(F16 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
ALWAYS_INLINE __m512d high_half(F16 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

/* Sixteen lanes of a block sum, folded as wg_fold_block says. */
ALWAYS_INLINE void fold16(__m512d low, __m512d high, double *sum) {
    double stored[16];
    _mm512_storeu_pd(stored, low);
    _mm512_storeu_pd(stored + 8, high);
    wg_fold_lanes(stored, sum);
}

#endif
