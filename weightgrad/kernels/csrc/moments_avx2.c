/* AVX2 unit of moments.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

ALWAYS_INLINE uint32_t sums(const float *x, const float *residual, uint64_t n, double *partials) {
    I8 top = _mm256_setzero_si256();
    uint32_t tail_top = 0;
    for (uint64_t start = 0; start < n; start += WG_BLOCK, partials += 3) {
        const size_t m = n - start < WG_BLOCK ? n - start : WG_BLOCK;
        __m256d acc[3][4];
        for (int s = 0; s < 3; s++)
            for (int j = 0; j < 4; j++) acc[s][j] = _mm256_setzero_pd();
        size_t i = 0;
        for (; i + 16 <= m; i += 16) {
            const float *at = x + start + i;
            _mm_prefetch((const char *)(at + PREFETCH_FLOATS), _MM_HINT_T0);
            for (int j = 0; j < 2; j++) {
                F8 h = _mm256_loadu_ps(at + 8 * j);
                if (residual) h = _mm256_add_ps(h, _mm256_loadu_ps(residual + start + i + 8 * (size_t)j));
                I8 u = magnitude8(h);
                top = _mm256_max_epu32(top, u);
                for (int half = 0; half < 2; half++) {
                    __m128 part = half ? _mm256_extractf128_ps(h, 1) : _mm256_castps256_ps128(h);
                    __m256d d = _mm256_cvtps_pd(part);
                    const int k = 2 * j + half;
                    acc[0][k] = _mm256_add_pd(acc[0][k], d);
                    acc[1][k] = _mm256_add_pd(acc[1][k], _mm256_mul_pd(d, d));
                    acc[2][k] = _mm256_add_pd(acc[2][k], _mm256_andnot_pd(_mm256_set1_pd(-0.0), d));
                }
            }
        }
        double lane[3][16];
        for (int s = 0; s < 3; s++)
            for (int j = 0; j < 4; j++) _mm256_storeu_pd(&lane[s][4 * j], acc[s][j]);
        for (; i < m; i++) {
            float f = residual ? x[start + i] + residual[start + i] : x[start + i];
            uint32_t u = wg_magnitude(f);
            double h = f;
            tail_top = u > tail_top ? u : tail_top;
            lane[0][i & 15] += h;
            lane[1][i & 15] += h * h;
            lane[2][i & 15] += (double)wg_float(u);
        }
        wg_fold_lanes(lane, 3, partials);
    }
    uint32_t body_top = top8(top);
    return body_top > tail_top ? body_top : tail_top;
}

uint32_t wg_moments_avx2(const float *x, const float *residual, uint64_t n, double *partials) {
    return residual ? sums(x, residual, n, partials) : sums(x, NULL, n, partials);
}
#endif
