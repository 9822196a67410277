/* Sums of h, h*h and |h| and the largest |h|, where h = x, or x + residual.
 *
 * One partial sum for each WG_BLOCK elements, in double, by the tree drawn in units.h. The
 * caller adds the partials exactly (math.fsum), so the result depends neither on threads nor on
 * chunks.
 *
 * `partials` has three doubles a block. Returns the bits of the largest |h|.
 */
#include "units.h"

static uint32_t moments(const float *x, const float *residual, uint64_t n, double *partials) {
    uint32_t top = 0;
    for (uint64_t start = 0; start < n; start += WG_BLOCK, partials += 3) {
        size_t m = n - start < WG_BLOCK ? n - start : WG_BLOCK;
        double lane[3][16] = {{0}}, group[3][16] = {{0}};
        for (size_t i = 0; i < m; i++) {
            float f = residual ? x[start + i] + residual[start + i] : x[start + i];
            uint32_t u = wg_magnitude(f);
            double h = f;
            top = u > top ? u : top;
            group[0][i & 15] += h;
            group[1][i & 15] += h * h;
            group[2][i & 15] += (double)wg_float(u);
            if ((i + 1) % WG_GROUP == 0) wg_close_group(group, lane, 3);
        }
        wg_close_group(group, lane, 3);
        wg_fold_lanes(lane, 3, partials);
    }
    return top;
}

WG_API uint32_t wg_moments(const float *x, const float *residual, uint64_t n, double *partials) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) return wg_moments_avx2(x, residual, n, partials);
#endif
    return moments(x, residual, n, partials);
}

/* The bits of the largest |x| alone. */
WG_API uint32_t wg_largest(const float *x, uint64_t n) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) return wg_largest_avx2(x, n);
#endif
    uint32_t top = 0;
    for (uint64_t i = 0; i < n; i++) top = wg_magnitude(x[i]) > top ? wg_magnitude(x[i]) : top;
    return top;
}
