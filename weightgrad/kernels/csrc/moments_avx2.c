/* AVX2 unit of moments.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

/* A whole block, sixteen lanes at a time. */
ALWAYS_INLINE I8 block_sums(const float *x, const float *residual, I8 top, double *partials, const int count) {
    __m256d lane[3][4];
    for (int s = 0; s < 3; s++)
        for (int j = 0; j < 4; j++) lane[s][j] = _mm256_setzero_pd();
    for (size_t c = 0; c < WG_LANES; c += 16) {
        __m256d acc[3][4];
        for (int s = 0; s < 3; s++)
            for (int j = 0; j < 4; j++) acc[s][j] = _mm256_setzero_pd();
        for (size_t r = 0; r < WG_BLOCK; r += WG_LANES) {
            _mm_prefetch((const char *)(x + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            if (residual) _mm_prefetch((const char *)(residual + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            for (size_t j = 0; j < 2; j++) {
                F8 h = _mm256_loadu_ps(x + r + c + 8 * j);
                if (residual) h = _mm256_add_ps(h, _mm256_loadu_ps(residual + r + c + 8 * j));
                top = _mm256_max_epu32(top, magnitude8(h));
                for (size_t half = 0; half < 2; half++) {
                    __m256d d = _mm256_cvtps_pd(half ? _mm256_extractf128_ps(h, 1) : _mm256_castps256_ps128(h));
                    const size_t k = 2 * j + half;
                    acc[0][k] = _mm256_add_pd(acc[0][k], d);
                    acc[1][k] = _mm256_add_pd(acc[1][k], _mm256_mul_pd(d, d));
                    if (count == 3) acc[2][k] = _mm256_add_pd(acc[2][k], _mm256_andnot_pd(_mm256_set1_pd(-0.0), d));
                }
            }
        }
        for (int s = 0; s < 3; s++)
            for (int j = 0; j < 4; j++) lane[s][j] = _mm256_add_pd(lane[s][j], acc[s][j]);
    }
    for (int s = 0; s < 3; s++) {
        double stored[16];
        for (int j = 0; j < 4; j++) _mm256_storeu_pd(stored + 4 * j, lane[s][j]);
        wg_fold_lanes(stored, partials + s);
    }
    return top;
}

ALWAYS_INLINE uint32_t sums(const float *x, const float *residual, uint64_t n, double *partials, const int count) {
    I8 top = _mm256_setzero_si256();
    uint64_t i = 0;
    for (; i + WG_BLOCK <= n; i += WG_BLOCK, partials += 3) top = block_sums(x + i, residual ? residual + i : NULL, top, partials, count);
    const uint32_t body = top8(top);
    if (i == n) return body;
    const uint32_t rest = wg_moments_run(x + i, residual ? residual + i : NULL, n - i, partials);
    return body > rest ? body : rest;
}

uint32_t wg_moments_avx2(const float *x, const float *residual, uint64_t n, int absolute, double *partials) {
    if (absolute) return residual ? sums(x, residual, n, partials, 3) : sums(x, NULL, n, partials, 3);
    return residual ? sums(x, residual, n, partials, 2) : sums(x, NULL, n, partials, 2);
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
