/* Sums of h, h*h and |h| and the largest |h|, where h = x, or x + residual.
 *
 * One partial sum for each WG_BLOCK elements, in double, by the tree drawn in units.h. The
 * caller adds the partials exactly (math.fsum), so the result depends neither on threads nor on
 * chunks.
 *
 * `partials` has three doubles a block. Returns the bits of the largest |h|.
 */
#include "units.h"

uint32_t wg_moments_run(const float *x, const float *residual, size_t m, double *partials) {
    double wide[3][WG_LANES] = {{0}};
    uint32_t top = 0;
    for (size_t i = 0; i < m; i++) {
        float f = residual ? x[i] + residual[i] : x[i];
        uint32_t u = wg_magnitude(f);
        double h = f;
        top = u > top ? u : top;
        wide[0][i % WG_LANES] += h;
        wide[1][i % WG_LANES] += h * h;
        wide[2][i % WG_LANES] += (double)wg_float(u);
    }
    for (int s = 0; s < 3; s++) wg_fold_block(wide[s], partials + s);
    return top;
}

static uint32_t moments(const float *x, const float *residual, uint64_t n, double *partials) {
    uint32_t top = 0;
    for (uint64_t i = 0; i < n; i += WG_BLOCK, partials += 3) {
        uint32_t own = wg_moments_run(x + i, residual ? residual + i : NULL, n - i < WG_BLOCK ? n - i : WG_BLOCK, partials);
        top = own > top ? own : top;
    }
    return top;
}

/* Without `absolute` the third sum of each block may be anything. */
WG_API uint32_t wg_moments(const float *x, const float *residual, uint64_t n, int absolute, double *partials) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() == 2) return wg_moments_avx512(x, residual, n, absolute, partials);
    if (wg_isa()) return wg_moments_avx2(x, residual, n, absolute, partials);
#endif
    (void)absolute;
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
