/* AVX2 unit of columns.c: a single column of any length, or columns in eights. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

/* h = x + (residual - old mean of its sign) */
ALWAYS_INLINE F8 next_h(const float *x, const float *residual, F8 old_positive, F8 old_negative) {
    F8 v = _mm256_loadu_ps(x);
    if (!residual) return v;
    F8 h = _mm256_loadu_ps(residual);
    return _mm256_add_ps(v, _mm256_sub_ps(h, _mm256_blendv_ps(old_positive, old_negative, h)));
}

/* Adds h to the sum of its sign: the other sum gets +0. */
ALWAYS_INLINE void add_by_sign(F8 h, F8 *positive, F8 *negative) {
    F8 sign = _mm256_castsi256_ps(_mm256_srai_epi32(_mm256_castps_si256(h), 31));
    *positive = _mm256_add_ps(*positive, _mm256_andnot_ps(sign, h));
    *negative = _mm256_add_ps(*negative, _mm256_and_ps(sign, h));
}

ALWAYS_INLINE int all_finite(I8 top) {
    return _mm256_testz_si256(_mm256_cmpgt_epi32(top, same(WG_INFINITY - 1u)), same(~0u));
}

/* ---- a single column: lines of 32 lanes ---- */

ALWAYS_INLINE int add_line(const float *x, float *residual, F8 old_positive, F8 old_negative, F8 acc[2][4], uint32_t *mask) {
    F8 h[4];
    I8 top = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        h[j] = next_h(x + 8 * j, residual ? residual + 8 * j : NULL, old_positive, old_negative);
        top = _mm256_max_epu32(top, magnitude8(h[j]));
    }
    if (!all_finite(top)) return 0;
    *mask = 0;
    for (int j = 0; j < 4; j++) {
        if (residual) _mm256_storeu_ps(residual + 8 * j, h[j]);
        add_by_sign(h[j], &acc[0][j], &acc[1][j]);
        *mask |= (uint32_t)_mm256_movemask_ps(h[j]) << 8 * j;
    }
    return 1;
}

/* The last, short line. Padding is made so that h is +0 there, which adds nothing. */
static int add_rest(const float *x, float *residual, F8 old_positive, F8 old_negative, uint64_t some, F8 acc[2][4], uint32_t *mask) {
    float rest_x[32] = {0}, rest_residual[32];
    for (int i = 0; i < 32; i++) rest_residual[i] = _mm256_cvtss_f32(old_positive);
    memcpy(rest_x, x, some * sizeof(float));
    if (residual) memcpy(rest_residual, residual, some * sizeof(float));
    if (!add_line(rest_x, residual ? rest_residual : NULL, old_positive, old_negative, acc, mask)) return 0;
    if (residual) memcpy(residual, rest_residual, some * sizeof(float));
    return 1;
}

/* Returns the elements done: fewer than `height` when one is not finite. */
ALWAYS_INLINE uint64_t thin_tile(const float *x, float *residual, F8 old_positive, F8 old_negative, uint64_t height, uint8_t *bits,
                                 wg_tree *t) {
    const uint64_t lines = (height + 31) / 32;
    for (uint64_t line = 0; line < lines;) {
        const uint64_t stop = line + WG_TREE < lines ? line + WG_TREE : lines;
        F8 acc[2][4];
        for (int j = 0; j < 4; j++) acc[0][j] = acc[1][j] = _mm256_setzero_ps();
        for (; line < stop; line++) {
            const uint64_t i = line * 32, left = height - i;
            float *to = residual ? residual + i : NULL;
            uint32_t mask;
            if (left >= 32) {
                if (!add_line(x + i, to, old_positive, old_negative, acc, &mask)) return i;
                memcpy(bits + i / 8, &mask, 4);
            } else {
                if (!add_rest(x + i, to, old_positive, old_negative, left, acc, &mask)) return i;
                memcpy(bits + i / 8, &mask, (left + 7) / 8);
            }
            t->negatives[0] += (uint32_t)__builtin_popcount(mask);
        }
        for (int s = 0; s < 2; s++)
            for (int j = 0; j < 4; j++) _mm256_storeu_ps(t->level0 + 32 * s + 8 * j, acc[s][j]);
        wg_grow(t, line, line == lines);
    }
    return height;
}

ALWAYS_INLINE int thin(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    const float *old = old_means;
    for (uint64_t start = 0; start < g.rows; start += g.tile, means += 2, old += 2) {
        const uint64_t height = g.rows - start < g.tile ? g.rows - start : g.tile;
        const F8 positive = _mm256_set1_ps(residual ? old[0] : 0.0f), negative = _mm256_set1_ps(residual ? old[1] : 0.0f);
        wg_tree t = wg_plant(scratch, 32);
        float *to = residual ? residual + start : NULL;
        const uint64_t done = thin_tile(x + start, to, positive, negative, height, bits + start / 8, &t);
        if (done < height) {
            if (residual) wg_onebit_roll_back(x, residual, old_means, g, start + done, 0, 0);
            return 0;
        }
        wg_fold_column(&t);
        wg_column_means(&t, 1, height, means, means + 1);
    }
    return 1;
}

/* ---- columns in eights, four rows at a time: fewer trips to the running sums ---- */

ALWAYS_INLINE int cell(const float *x, float *residual, F8 old_positive, F8 old_negative, uint64_t cols, const uint64_t rows,
                       float *positive, float *negative, uint32_t *negatives, uint8_t *bits) {
    F8 h[4];
    I8 top = _mm256_setzero_si256();
    for (uint64_t k = 0; k < rows; k++) {
        h[k] = next_h(x + k * cols, residual ? residual + k * cols : NULL, old_positive, old_negative);
        top = _mm256_max_epu32(top, magnitude8(h[k]));
    }
    if (!all_finite(top)) return 0;
    F8 p = _mm256_loadu_ps(positive), q = _mm256_loadu_ps(negative);
    I8 count = _mm256_loadu_si256((const I8 *)negatives);
    for (uint64_t k = 0; k < rows; k++) {
        if (residual) _mm256_storeu_ps(residual + k * cols, h[k]);
        add_by_sign(h[k], &p, &q);
        count = _mm256_sub_epi32(count, _mm256_srai_epi32(_mm256_castps_si256(h[k]), 31));
        bits[k * cols / 8] = (uint8_t)_mm256_movemask_ps(h[k]);
    }
    _mm256_storeu_ps(positive, p);
    _mm256_storeu_ps(negative, q);
    _mm256_storeu_si256((I8 *)negatives, count);
    return 1;
}

ALWAYS_INLINE int wide(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    for (uint64_t r0 = 0; r0 < g.rows; r0 += g.tile, means += 2 * g.cols) {
        const uint64_t height = g.rows - r0 < g.tile ? g.rows - r0 : g.tile;
        const float *old = residual ? old_means + r0 / g.tile * 2 * g.cols : NULL;
        wg_tree t = wg_plant(scratch, g.cols);
        for (uint64_t r = 0; r < height;) {
            const uint64_t some = height - r < 4 ? 1 : 4;
            for (uint64_t c = 0; c < g.cols; c += 8) {
                const uint64_t i = (r0 + r) * g.cols + c;
                const F8 positive = residual ? _mm256_loadu_ps(old + c) : _mm256_setzero_ps();
                const F8 negative = residual ? _mm256_loadu_ps(old + g.cols + c) : _mm256_setzero_ps();
                float *to = residual ? residual + i : NULL, *sums = t.level0 + c;
                const int good = some == 4 ? cell(x + i, to, positive, negative, g.cols, 4, sums, sums + g.cols, t.negatives + c, bits + i / 8)
                                           : cell(x + i, to, positive, negative, g.cols, 1, sums, sums + g.cols, t.negatives + c, bits + i / 8);
                if (!good) {
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

int wg_onebit_avx2(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    if (g.cols == 1)
        return residual ? thin(x, residual, old_means, g, bits, means, scratch) : thin(x, NULL, NULL, g, bits, means, scratch);
    return residual ? wide(x, residual, old_means, g, bits, means, scratch) : wide(x, NULL, NULL, g, bits, means, scratch);
}

/* ---- decoding ---- */

/* Eight bits -> the sign positions of eight lanes. */
ALWAYS_INLINE F8 spread8(uint32_t byte) {
    return _mm256_castsi256_ps(_mm256_sllv_epi32(same(byte), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24)));
}

ALWAYS_INLINE void decode(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, const int mode,
                          float *out) {
    if (cols == 1)
        for (uint64_t start = 0; start < rows; start += tile, means += 2) {
            const uint64_t stop = rows - start < tile ? rows : start + tile;
            const F8 positive = _mm256_set1_ps(means[0]), negative = _mm256_set1_ps(means[1]);
            uint64_t i = start;
            for (; i + 8 <= stop; i += 8) put8(out + i, _mm256_blendv_ps(positive, negative, spread8(bits[i / 8])), mode);
            if (i < stop) wg_onebit_decode_run(bits + i / 8, means, stop - i, 1, tile, mode == STREAM ? WG_STORE : mode, out + i);
        }
    else
        for (uint64_t r = 0; r < rows; r++) {
            const float *positive = means + r / tile * 2 * cols, *negative = positive + cols;
            for (uint64_t c = 0; c < cols; c += 8) {
                const uint64_t i = r * cols + c;
                F8 v = _mm256_blendv_ps(_mm256_loadu_ps(positive + c), _mm256_loadu_ps(negative + c), spread8(bits[i / 8]));
                put8(out + i, v, mode);
            }
        }
    if (mode == STREAM) _mm_sfence();
}

void wg_onebit_decode_avx2(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, int mode,
                           float *out) {
    switch (how_to_put(mode, out, rows * cols)) {
    case STREAM: decode(bits, means, rows, cols, tile, STREAM, out); return;
    case WG_STORE: decode(bits, means, rows, cols, tile, WG_STORE, out); return;
    case WG_ADD: decode(bits, means, rows, cols, tile, WG_ADD, out); return;
    default: decode(bits, means, rows, cols, tile, WG_SUBTRACT, out); return;
    }
}

void wg_signs_avx2(const float *x, uint64_t n, uint8_t *bits) {
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint32_t mask = 0;
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS + 16), _MM_HINT_T0);
        for (int j = 0; j < 4; j++) mask |= (uint32_t)_mm256_movemask_ps(_mm256_loadu_ps(x + i + 8 * (size_t)j)) << 8 * j;
        memcpy(bits + i / 8, &mask, 4);
    }
    if (i < n) wg_signs_run(x + i, n - i, bits + i / 8);
}
#endif
