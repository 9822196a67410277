/* AVX-512 unit of moments.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

/* A whole block, sixteen lanes at a time. */
ALWAYS_INLINE I16 block_sums(const float *x, const float *residual, I16 top, double *partials, const int count) {
    __m512d lane[3][2];
    for (int s = 0; s < 3; s++) lane[s][0] = lane[s][1] = _mm512_setzero_pd();
    for (size_t c = 0; c < WG_LANES; c += 16) {
        __m512d acc[3][2];
        for (int s = 0; s < 3; s++) acc[s][0] = acc[s][1] = _mm512_setzero_pd();
        for (size_t r = 0; r < WG_BLOCK; r += WG_LANES) {
            _mm_prefetch((const char *)(x + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            if (residual) _mm_prefetch((const char *)(residual + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            F16 h = _mm512_loadu_ps(x + r + c);
            if (residual) h = _mm512_add_ps(h, _mm512_loadu_ps(residual + r + c));
            top = _mm512_max_epu32(top, magnitude16(h));
            for (int half = 0; half < 2; half++) {
                const __m512d d = half ? high_half(h) : low_half(h);
                acc[0][half] = _mm512_add_pd(acc[0][half], d);
                acc[1][half] = _mm512_add_pd(acc[1][half], _mm512_mul_pd(d, d));
                if (count == 3) acc[2][half] = _mm512_add_pd(acc[2][half], _mm512_abs_pd(d));
            }
        }
        for (int s = 0; s < 3; s++)
            for (int half = 0; half < 2; half++) lane[s][half] = _mm512_add_pd(lane[s][half], acc[s][half]);
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
