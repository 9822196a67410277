/* Shared by the AVX2 and the AVX-512 unit of bucket.c: an element before it is quantized, eight at a time. */
#ifndef WG_BUCKET_LANES_H
#define WG_BUCKET_LANES_H

#include "lanes.h"

ALWAYS_INLINE F8 load_sum(const float *x, const float *residual) {
    F8 h = _mm256_loadu_ps(x);
    return residual ? _mm256_add_ps(h, _mm256_loadu_ps(residual)) : h;
}

/* Cut to +-limit. A NaN stays one: the second operand is what these instructions return then. */
ALWAYS_INLINE F8 cut8(F8 h, F8 limit, const int clips) {
    if (!clips) return h;
    return _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), limit), _mm256_min_ps(limit, h));
}

#endif
