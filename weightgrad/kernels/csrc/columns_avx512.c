/* AVX-512 unit of columns.c: the sums of columns in eights, sixteen at a time where there are as many. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

#define NEAR 256 /* floats ahead in each of the rows */
#define ROWS 4u /* at a time: fewer trips to the running sums */

/* Up to sixteen columns (`some`) of a few rows; 0 when one is not finite: then nothing was written. */
ALWAYS_INLINE int cell(const float *x, float *residual, const float *old_positive, const float *old_negative, uint64_t cols,
                       const uint64_t rows, __mmask16 some, float *positive, float *negative, uint32_t *negatives, uint8_t *bits) {
    F16 h[8];
    I16 top = _mm512_setzero_si512();
    for (uint64_t k = 0; k < rows; k++) {
        const float *at = x + k * cols;
        _mm_prefetch((const char *)(at + NEAR), _MM_HINT_T0);
        F16 v = _mm512_maskz_loadu_ps(some, at);
        if (residual) {
            const float *kept = residual + k * cols;
            _mm_prefetch((const char *)(kept + NEAR), _MM_HINT_T0);
            F16 before = _mm512_maskz_loadu_ps(some, kept);
            F16 mean = _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(before)), _mm512_maskz_loadu_ps(some, old_positive),
                                            _mm512_maskz_loadu_ps(some, old_negative));
            v = _mm512_add_ps(v, _mm512_sub_ps(before, mean));
        }
        h[k] = v;
        top = _mm512_max_epu32(top, magnitude16(v));
    }
    if (_mm512_cmpgt_epi32_mask(top, same16(WG_INFINITY - 1u)) & some) return 0;
    F16 p = _mm512_maskz_loadu_ps(some, positive), q = _mm512_maskz_loadu_ps(some, negative);
    I16 count = _mm512_maskz_loadu_epi32(some, negatives);
    for (uint64_t k = 0; k < rows; k++) {
        const __mmask16 sign = _mm512_movepi32_mask(_mm512_castps_si512(h[k])) & some;
        if (residual) _mm512_mask_storeu_ps(residual + k * cols, some, h[k]);
        p = _mm512_mask_add_ps(p, (__mmask16)~sign, p, h[k]);
        q = _mm512_mask_add_ps(q, sign, q, h[k]);
        count = _mm512_mask_add_epi32(count, sign, count, same16(1));
        const uint16_t mask = (uint16_t)sign;
        if (some == 0xffffu) memcpy(bits + k * cols / 8, &mask, 2);
        else bits[k * cols / 8] = (uint8_t)mask;
    }
    _mm512_mask_storeu_ps(positive, some, p);
    _mm512_mask_storeu_ps(negative, some, q);
    _mm512_mask_storeu_epi32(negatives, some, count);
    return 1;
}

/* A few rows; returns the columns done. */
ALWAYS_INLINE uint64_t band(const float *x, float *residual, const float *old, uint64_t cols, const uint64_t rows, wg_tree *t,
                            uint8_t *bits) {
    uint64_t c = 0;
    for (; c + 16 <= cols; c += 16)
        if (!cell(x + c, residual ? residual + c : NULL, old + c, old + cols + c, cols, rows, 0xffffu, t->level0 + c,
                  t->level0 + cols + c, t->negatives + c, bits + c / 8))
            return c;
    if (c < cols && !cell(x + c, residual ? residual + c : NULL, old + c, old + cols + c, cols, rows, 0xffu, t->level0 + c,
                          t->level0 + cols + c, t->negatives + c, bits + c / 8))
        return c;
    return cols;
}

ALWAYS_INLINE int wide(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    for (uint64_t r0 = 0; r0 < g.rows; r0 += g.tile, means += 2 * g.cols) {
        const uint64_t height = g.rows - r0 < g.tile ? g.rows - r0 : g.tile;
        const float *old = residual ? old_means + r0 / g.tile * 2 * g.cols : x;
        wg_tree t = wg_plant(scratch, g.cols);
        for (uint64_t r = 0; r < height;) {
            const uint64_t some = height - r < ROWS ? 1 : ROWS, i = (r0 + r) * g.cols;
            float *to = residual ? residual + i : NULL;
            const uint64_t done = some == 1 ? band(x + i, to, old, g.cols, 1, &t, bits + i / 8) : band(x + i, to, old, g.cols, ROWS, &t, bits + i / 8);
            if (done < g.cols) {
                if (residual) wg_onebit_roll_back(x, residual, old_means, g, r0 + r, some, done);
                return 0;
            }
            r += some;
            wg_grow(&t, r, r == height);
        }
        wg_column_means(&t, g.cols, height, means, means + g.cols);
    }
    return 1;
}

int wg_onebit_avx512(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    return residual ? wide(x, residual, old_means, g, bits, means, scratch) : wide(x, NULL, NULL, g, bits, means, scratch);
}
#endif
