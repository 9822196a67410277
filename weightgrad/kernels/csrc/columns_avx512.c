/* AVX-512 unit of columns.c: columns in sixteens, the last eight of them by a mask, eight rows at a time. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

#define ROWS 8
#define AHEAD 256 /* floats that are fetched ahead in each of the rows */

/* Where a cell lies, and which of its sixteen lanes are columns. */
typedef struct {
    const float *x;
    float *residual, *positive, *negative;
    uint32_t *negatives;
    uint8_t *bits;
    uint64_t cols;
    __mmask16 lanes;
} place;

/* h = x + (residual - old mean of its sign) */
ALWAYS_INLINE F16 next_h(const float *x, const float *residual, F16 old_positive, F16 old_negative, __mmask16 lanes) {
    F16 v = _mm512_maskz_loadu_ps(lanes, x);
    if (!residual) return v;
    F16 h = _mm512_maskz_loadu_ps(lanes, residual);
    F16 mean = _mm512_mask_mov_ps(old_positive, _mm512_movepi32_mask(_mm512_castps_si512(h)), old_negative);
    return _mm512_add_ps(v, _mm512_sub_ps(h, mean));
}

/* A sum that begins at +0 never becomes -0, so what another sign would add as +0 is left out. */
ALWAYS_INLINE int cell(place p, F16 old_positive, F16 old_negative, const uint64_t rows, const int whole) {
    const __mmask16 lanes = whole ? 0xffff : p.lanes;
    F16 h[ROWS];
    I16 top = _mm512_setzero_si512();
    for (uint64_t k = 0; k < rows; k++) {
        _mm_prefetch((const char *)(p.x + k * p.cols + AHEAD), _MM_HINT_T0);
        if (p.residual) _mm_prefetch((const char *)(p.residual + k * p.cols + AHEAD), _MM_HINT_T0);
        h[k] = next_h(p.x + k * p.cols, p.residual ? p.residual + k * p.cols : NULL, old_positive, old_negative, lanes);
        top = _mm512_max_epu32(top, magnitude16(h[k]));
    }
    if (_mm512_mask_cmpge_epu32_mask(lanes, top, same16(WG_INFINITY))) return 0;
    F16 positive = _mm512_maskz_loadu_ps(lanes, p.positive), negative = _mm512_maskz_loadu_ps(lanes, p.negative);
    I16 count = _mm512_maskz_loadu_epi32(lanes, p.negatives);
    for (uint64_t k = 0; k < rows; k++) {
        const __mmask16 sign = _mm512_movepi32_mask(_mm512_castps_si512(h[k]));
        if (p.residual) _mm512_mask_storeu_ps(p.residual + k * p.cols, lanes, h[k]);
        positive = _mm512_mask_add_ps(positive, (__mmask16)~sign, positive, h[k]);
        negative = _mm512_mask_add_ps(negative, sign, negative, h[k]);
        count = _mm512_mask_add_epi32(count, sign, count, same16(1));
        const uint16_t bits = (uint16_t)sign;
        memcpy(p.bits + k * p.cols / 8, &bits, whole ? 2 : 1);
    }
    _mm512_mask_storeu_ps(p.positive, lanes, positive);
    _mm512_mask_storeu_ps(p.negative, lanes, negative);
    _mm512_mask_storeu_epi32(p.negatives, lanes, count);
    return 1;
}

ALWAYS_INLINE int any_cell(place p, F16 old_positive, F16 old_negative, uint64_t rows) {
    if (rows == ROWS)
        return p.lanes == 0xffff ? cell(p, old_positive, old_negative, ROWS, 1) : cell(p, old_positive, old_negative, ROWS, 0);
    return p.lanes == 0xffff ? cell(p, old_positive, old_negative, 1, 1) : cell(p, old_positive, old_negative, 1, 0);
}

ALWAYS_INLINE int wide(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    for (uint64_t r0 = 0; r0 < g.rows; r0 += g.tile, means += 2 * g.cols) {
        const uint64_t height = g.rows - r0 < g.tile ? g.rows - r0 : g.tile;
        const float *old = residual ? old_means + r0 / g.tile * 2 * g.cols : NULL;
        wg_tree t = wg_plant(scratch, g.cols);
        for (uint64_t r = 0; r < height;) {
            const uint64_t some = height - r < ROWS ? 1 : ROWS;
            for (uint64_t c = 0; c < g.cols; c += 16) {
                const uint64_t i = (r0 + r) * g.cols + c;
                const __mmask16 lanes = g.cols - c < 16 ? 0xff : 0xffff;
                const F16 positive = residual ? _mm512_maskz_loadu_ps(lanes, old + c) : _mm512_setzero_ps();
                const F16 negative = residual ? _mm512_maskz_loadu_ps(lanes, old + g.cols + c) : _mm512_setzero_ps();
                float *sums = t.level0 + c;
                const place p = {x + i, residual ? residual + i : NULL, sums, sums + g.cols, t.negatives + c, bits + i / 8, g.cols, lanes};
                if (!any_cell(p, positive, negative, some)) {
                    if (residual) wg_onebit_roll_back(x, residual, old_means, g, r0 + r, some, c);
                    return 0;
                }
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
