/* AVX2 unit of reference.c: the same loops, eight floats at a time. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "reference_loops.h"

void wg_reference_avx2(const float *weights, const float *residual, float share, uint64_t n, float *out) {
    reference_loop(weights, residual, share, n, out);
}

void wg_distance_avx2(const float *local, const float *weights, const float *residual, float share, uint64_t n, float *out) {
    distance_loop(local, weights, residual, share, n, out);
}

void wg_difference_avx2(const float *local, uint64_t n, float *out) { difference_loop(local, n, out); }

uint32_t wg_advance_avx2(const float *local, const float *residual, uint64_t n, float *out) {
    return advance_loop(local, residual, n, out);
}
#endif
