/* AVX-512 unit of ternary.c: the two sums of a least squares scale. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

/* What two sums are made of: entries above a threshold, or levels on a ruler. */
typedef struct {
    F16 above, inverse, limit;
    I16 levels, offset;
} summed;

/* Of sixteen elements, what each adds to the two sums. */
ALWAYS_INLINE void add_to(F16 w, F16 weight, summed s, const int by_level, F16 *first, F16 *second) {
    if (!by_level) {
        F16 a = _mm512_castsi512_ps(magnitude16(w));
        *second = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, s.above, _CMP_GT_OQ), weight);
        *first = _mm512_mul_ps(*second, a);
        return;
    }
    F16 y = _mm512_mul_ps(w, s.inverse);
    y = _mm512_max_ps(_mm512_min_ps(y, s.limit), _mm512_sub_ps(_mm512_setzero_ps(), s.limit));
    I16 code = _mm512_srli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(y), s.offset), 16);
    F16 b = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, s.levels)), db = _mm512_mul_ps(weight, b);
    *first = _mm512_mul_ps(db, w);
    *second = _mm512_mul_ps(db, b);
}

/* A whole block, sixteen lanes at a time. */
ALWAYS_INLINE I16 block_sums(const float *w, const float *d, summed how, const int by_level, I16 top, double *partials) {
    const F16 ones = _mm512_set1_ps(1.0f);
    __m512d lane[2][2];
    for (int s = 0; s < 2; s++) lane[s][0] = lane[s][1] = _mm512_setzero_pd();
    for (size_t c = 0; c < WG_LANES; c += 16) {
        __m512d acc[2][2];
        for (int s = 0; s < 2; s++) acc[s][0] = acc[s][1] = _mm512_setzero_pd();
        for (size_t r = 0; r < WG_BLOCK; r += WG_LANES) {
            _mm_prefetch((const char *)(w + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            if (d) _mm_prefetch((const char *)(d + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            F16 own = _mm512_loadu_ps(w + r + c), all = d ? _mm512_loadu_ps(d + r + c) : ones, product, weight;
            top = _mm512_max_epu32(top, _mm512_max_epu32(magnitude16(own), _mm512_castps_si512(all)));
            add_to(own, all, how, by_level, &product, &weight);
            acc[0][0] = _mm512_add_pd(acc[0][0], low_half(product));
            acc[0][1] = _mm512_add_pd(acc[0][1], high_half(product));
            acc[1][0] = _mm512_add_pd(acc[1][0], low_half(weight));
            acc[1][1] = _mm512_add_pd(acc[1][1], high_half(weight));
        }
        for (int s = 0; s < 2; s++)
            for (int half = 0; half < 2; half++) lane[s][half] = _mm512_add_pd(lane[s][half], acc[s][half]);
    }
    for (int s = 0; s < 2; s++) fold16(lane[s][0], lane[s][1], partials + s);
    return top;
}

/* The whole blocks. */
ALWAYS_INLINE uint32_t all_sums(const float *w, const float *d, uint64_t n, summed how, const int by_level, double *partials) {
    I16 top = _mm512_setzero_si512();
    for (uint64_t i = 0; i + WG_BLOCK <= n; i += WG_BLOCK, partials += 2)
        top = block_sums(w + i, d ? d + i : NULL, how, by_level, top, partials);
    return top16(top);
}

ALWAYS_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

uint32_t wg_level_sums_avx512(const float *w, const float *d, uint64_t n, wg_ruler ruler, int levels, double *partials) {
    const summed how = {
        .inverse = _mm512_set1_ps(ruler.inverse),
        .limit = _mm512_set1_ps((float)(levels * 65536)),
        .levels = same16((uint32_t)levels),
        .offset = same16(((uint32_t)levels << 16) + 0x8000u), /* rounded to nearest */
    };
    const uint32_t body = d ? all_sums(w, d, n, how, 1, partials) : all_sums(w, NULL, n, how, 1, partials);
    const uint64_t i = n / WG_BLOCK * WG_BLOCK;
    if (i == n) return body;
    return larger(body, wg_level_sums_run(w + i, d ? d + i : NULL, n - i, ruler, levels, partials + i / WG_BLOCK * 2));
}

uint32_t wg_ternary_sums_avx512(const float *w, const float *d, uint64_t n, float threshold, double *partials) {
    const summed how = {.above = _mm512_set1_ps(threshold)};
    const uint32_t body = d ? all_sums(w, d, n, how, 0, partials) : all_sums(w, NULL, n, how, 0, partials);
    const uint64_t i = n / WG_BLOCK * WG_BLOCK;
    if (i == n) return body;
    return larger(body, wg_ternary_sums_run(w + i, d ? d + i : NULL, n - i, threshold, partials + i / WG_BLOCK * 2));
}
#endif
