/* AVX-512 unit of moments.c: a row of a block is sixteen lanes at a time, in two vectors of eight doubles. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

#define AT_ONCE 4 /* groups of sixteen lanes: their lines are next to each other in memory */

/* A whole block. */
ALWAYS_INLINE I16 block_sums(const float *x, const float *residual, I16 top, double *partials, const int count) {
    __m512d lane[3][2];
    for (int s = 0; s < 3; s++) lane[s][0] = lane[s][1] = _mm512_setzero_pd();
    for (size_t c = 0; c < WG_LANES; c += 16 * AT_ONCE) {
        __m512d acc[AT_ONCE][3][2];
        for (int g = 0; g < AT_ONCE; g++)
            for (int s = 0; s < 3; s++) acc[g][s][0] = acc[g][s][1] = _mm512_setzero_pd();
        for (size_t r = 0; r < WG_BLOCK; r += WG_LANES)
            for (size_t g = 0; g < AT_ONCE; g++) {
                const size_t at = r + c + 16 * g, ahead = WG_BLOCK + c * 16 + r / 16 * AT_ONCE + 16 * g;
                _mm_prefetch((const char *)(x + ahead), _MM_HINT_T0);
                if (residual) _mm_prefetch((const char *)(residual + ahead), _MM_HINT_T0);
                F16 h = _mm512_loadu_ps(x + at);
                if (residual) h = _mm512_add_ps(h, _mm512_loadu_ps(residual + at));
                top = _mm512_max_epu32(top, magnitude16(h));
                const __m512d half[2] = {low_half(h), high_half(h)};
                for (int k = 0; k < 2; k++) {
                    acc[g][0][k] = _mm512_add_pd(acc[g][0][k], half[k]);
                    acc[g][1][k] = _mm512_add_pd(acc[g][1][k], _mm512_mul_pd(half[k], half[k]));
                    if (count == 3) acc[g][2][k] = _mm512_add_pd(acc[g][2][k], _mm512_abs_pd(half[k]));
                }
            }
        for (int g = 0; g < AT_ONCE; g++)
            for (int s = 0; s < count; s++)
                for (int k = 0; k < 2; k++) lane[s][k] = _mm512_add_pd(lane[s][k], acc[g][s][k]);
    }
    for (int s = 0; s < 3; s++) fold16(lane[s][0], lane[s][1], partials + s);
    return top;
}

ALWAYS_INLINE uint32_t sums(const float *x, const float *residual, uint64_t n, double *partials, const int count) {
    I16 top = _mm512_setzero_si512();
    uint64_t i = 0;
    for (; i + WG_BLOCK <= n; i += WG_BLOCK, partials += 3) top = block_sums(x + i, residual ? residual + i : NULL, top, partials, count);
    const uint32_t body = top16(top);
    if (i == n) return body;
    const uint32_t rest = wg_moments_run(x + i, residual ? residual + i : NULL, n - i, partials);
    return body > rest ? body : rest;
}

uint32_t wg_moments_avx512(const float *x, const float *residual, uint64_t n, int absolute, double *partials) {
    if (absolute) return residual ? sums(x, residual, n, partials, 3) : sums(x, NULL, n, partials, 3);
    return residual ? sums(x, residual, n, partials, 2) : sums(x, NULL, n, partials, 2);
}
#endif
