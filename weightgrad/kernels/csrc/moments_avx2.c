/* AVX2 unit of moments.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

/* One group of WG_GROUP elements or fewer into its sixteen lanes. */
ALWAYS_INLINE uint32_t group_sums(const float *x, const float *residual, size_t m, I8 *top, double lane[3][16]) {
    __m256d acc[3][4];
    for (int s = 0; s < 3; s++)
        for (int j = 0; j < 4; j++) acc[s][j] = _mm256_setzero_pd();
    size_t i = 0;
    for (; i + 16 <= m; i += 16) {
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        for (size_t j = 0; j < 2; j++) {
            F8 h = _mm256_loadu_ps(x + i + 8 * j);
            if (residual) h = _mm256_add_ps(h, _mm256_loadu_ps(residual + i + 8 * j));
            *top = _mm256_max_epu32(*top, magnitude8(h));
            for (size_t half = 0; half < 2; half++) {
                __m128 part = half ? _mm256_extractf128_ps(h, 1) : _mm256_castps256_ps128(h);
                __m256d d = _mm256_cvtps_pd(part);
                const size_t k = 2 * j + half;
                acc[0][k] = _mm256_add_pd(acc[0][k], d);
                acc[1][k] = _mm256_add_pd(acc[1][k], _mm256_mul_pd(d, d));
                acc[2][k] = _mm256_add_pd(acc[2][k], _mm256_andnot_pd(_mm256_set1_pd(-0.0), d));
            }
        }
    }
    double group[3][16];
    for (int s = 0; s < 3; s++)
        for (int j = 0; j < 4; j++) _mm256_storeu_pd(&group[s][4 * j], acc[s][j]);
    uint32_t rest = 0;
    for (; i < m; i++) {
        float f = residual ? x[i] + residual[i] : x[i];
        uint32_t u = wg_magnitude(f);
        double h = f;
        rest = u > rest ? u : rest;
        group[0][i & 15] += h;
        group[1][i & 15] += h * h;
        group[2][i & 15] += (double)wg_float(u);
    }
    wg_close_group(group, lane, 3);
    return rest;
}

ALWAYS_INLINE uint32_t sums(const float *x, const float *residual, uint64_t n, double *partials) {
    I8 top = _mm256_setzero_si256();
    uint32_t rest = 0;
    for (uint64_t start = 0; start < n; start += WG_BLOCK, partials += 3) {
        const uint64_t stop = n - start < WG_BLOCK ? n : start + WG_BLOCK;
        double lane[3][16] = {{0}};
        for (uint64_t i = start; i < stop; i += WG_GROUP) {
            const size_t m = stop - i < WG_GROUP ? stop - i : WG_GROUP;
            uint32_t own = group_sums(x + i, residual ? residual + i : NULL, m, &top, lane);
            rest = own > rest ? own : rest;
        }
        wg_fold_lanes(lane, 3, partials);
    }
    const uint32_t body = top8(top);
    return body > rest ? body : rest;
}

uint32_t wg_moments_avx2(const float *x, const float *residual, uint64_t n, double *partials) {
    return residual ? sums(x, residual, n, partials) : sums(x, NULL, n, partials);
}

uint32_t wg_largest_avx2(const float *x, uint64_t n) {
    I8 top[4];
    for (int j = 0; j < 4; j++) top[j] = _mm256_setzero_si256();
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) top[j] = _mm256_max_epu32(top[j], magnitude8(_mm256_loadu_ps(x + i + 8 * (size_t)j)));
    uint32_t result = top8(_mm256_max_epu32(_mm256_max_epu32(top[0], top[1]), _mm256_max_epu32(top[2], top[3])));
    for (; i < n; i++) result = wg_magnitude(x[i]) > result ? wg_magnitude(x[i]) : result;
    return result;
}
#endif
