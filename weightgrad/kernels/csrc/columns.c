/* One bit an element and two means a column (Seide), with optional error feedback.
 *
 * The tensor is rows x cols, cut into tiles of at most `tile` rows. For each tile and
 * column: the mean of the values whose sign bit is clear and of those whose sign bit is
 * set; bit i of the stream is the sign of element i, row by row. Means are tiles x 2 x
 * cols.
 *
 * Error feedback is lazy, so that one pass over memory is enough: `residual` keeps h, and
 * what was lost, h - mean of its sign, is worked out at the next call from the means of
 * this one (`old_means`). With residual: h = x + (residual - old mean); without: h = x.
 *
 * A column sum is a tree of fan-in WG_TREE: 32 rows make a sum, 32 such sums make the
 * next, each added in order from zero, three levels (a tile has at most 32^3 rows). A
 * single column is long and thin: it is summed as if it were 32 columns wide, and the
 * lanes are then halved: 32 -> 16 -> .. -> 1.
 *
 * Returns 1; or 0 when h has a NaN or Inf: then `residual` has become what was lost before,
 * up to rounding, and `old_means` is zero.
 */
#include "units.h"

#include <float.h>

static float lost(const float *residual, const float *old_means, uint64_t cols, uint64_t i, uint64_t c) {
    float h = residual[i];
    return h - old_means[(wg_bits(h) >> 31) * cols + c];
}

void wg_onebit_roll_back(const float *x, float *residual, float *old_means, wg_grid g, uint64_t rows_done, uint64_t group,
                         uint64_t cols_done) {
    const uint64_t tiles = (g.rows + g.tile - 1) / g.tile;
    for (uint64_t r = 0; r < g.rows; r++)
        for (uint64_t c = 0; c < g.cols; c++) {
            const uint64_t i = r * g.cols + c;
            const int advanced = r < rows_done || (r < rows_done + group && c < cols_done);
            residual[i] = advanced ? residual[i] - x[i] : lost(residual, old_means + r / g.tile * 2 * g.cols, g.cols, i, c);
        }
    memset(old_means, 0, tiles * 2 * g.cols * sizeof(float));
}

void wg_column_means(const wg_tree *t, uint64_t width, uint64_t rows, float *positive, float *negative) {
    for (uint64_t c = 0; c < width; c++) {
        uint32_t n1 = t->negatives[c], n0 = (uint32_t)rows - n1;
        positive[c] = wg_clamp(t->sum[c] / (float)(n0 ? n0 : 1), FLT_MAX); /* a sum may overflow */
        negative[c] = wg_clamp(t->sum[t->width + c] / (float)(n1 ? n1 : 1), FLT_MAX);
    }
}

/* Fold the 32 lanes of a single column into lane 0. */
void wg_fold_column(wg_tree *t) {
    for (uint64_t half = 16; half; half /= 2)
        for (uint64_t i = 0; i < half; i++) {
            t->sum[i] += t->sum[i + half];
            t->sum[32 + i] += t->sum[32 + i + half];
            t->negatives[i] += t->negatives[i + half];
        }
}

static int onebit(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch) {
    memset(bits, 0, (g.rows * g.cols + 7) / 8);
    for (uint64_t r0 = 0; r0 < g.rows; r0 += g.tile, means += 2 * g.cols) {
        const uint64_t height = g.rows - r0 < g.tile ? g.rows - r0 : g.tile;
        const uint64_t width = g.cols == 1 ? 32 : g.cols, lines = g.cols == 1 ? (height + 31) / 32 : height;
        const float *old = residual ? old_means + r0 / g.tile * 2 * g.cols : NULL;
        wg_tree t = wg_plant(scratch, width);
        for (uint64_t line = 0; line < lines; line++) {
            const uint64_t left = g.cols == 1 ? height - line * 32 : width, some = left < width ? left : width;
            for (uint64_t c = 0; c < some; c++) {
                const uint64_t i = r0 * g.cols + line * width + c;
                float h = residual ? x[i] + lost(residual, old, g.cols, i, g.cols == 1 ? 0 : c) : x[i];
                uint32_t sign = wg_bits(h) >> 31;
                if (wg_magnitude(h) >= WG_INFINITY) {
                    if (residual) wg_onebit_roll_back(x, residual, old_means, g, i / g.cols, 1, i % g.cols);
                    return 0;
                }
                if (residual) residual[i] = h;
                t.level0[sign * width + c] += h;
                t.negatives[c] += sign;
                bits[i / 8] |= (uint8_t)(sign << i % 8);
            }
            wg_grow(&t, line + 1, line + 1 == lines);
        }
        if (g.cols == 1) wg_fold_column(&t);
        wg_column_means(&t, g.cols, height, means, means + g.cols);
    }
    return 1;
}

void wg_onebit_decode_run(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, int mode,
                          float *out) {
    for (uint64_t r = 0; r < rows; r++) {
        const float *pair = means + r / tile * 2 * cols;
        for (uint64_t c = 0; c < cols; c++) {
            uint64_t i = r * cols + c;
            wg_put(out + i, pair[(bits[i / 8] >> i % 8 & 1) * cols + c], mode);
        }
    }
}

/* `scratch` is room for 7 * max(cols, 32) floats. */
WG_API int wg_onebit(const float *x, float *residual, float *old_means, uint64_t rows, uint64_t cols, uint64_t tile, uint8_t *bits,
                     float *means, float *scratch) {
    wg_grid g = {rows, cols, tile};
#if WG_HAS_AVX2_UNIT
    if (wg_isa() == 2 && cols > 1 && cols % 8 == 0) return wg_onebit_avx512(x, residual, old_means, g, bits, means, scratch);
    if (wg_isa() && (cols == 1 ? tile % 32 == 0 : cols % 8 == 0))
        return wg_onebit_avx2(x, residual, old_means, g, bits, means, scratch);
#endif
    return onebit(x, residual, old_means, g, bits, means, scratch);
}

WG_API void wg_onebit_decode(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, int mode,
                             float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() && (cols == 1 ? tile % 32 == 0 || tile >= rows : cols % 8 == 0)) {
        wg_onebit_decode_avx2(bits, means, rows, cols, tile, mode, out);
        return;
    }
#endif
    wg_onebit_decode_run(bits, means, rows, cols, tile, mode, out);
}

void wg_signs_run(const float *x, uint64_t n, uint8_t *bits) {
    memset(bits, 0, (n + 7) / 8);
    for (uint64_t i = 0; i < n; i++) bits[i / 8] |= (uint8_t)(wg_bits(x[i]) >> 31 << i % 8);
}

/* The sign bits alone. */
WG_API void wg_signs(const float *x, uint64_t n, uint8_t *bits) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_signs_avx2(x, n, bits);
        return;
    }
#endif
#if WG_HAS_NEON_UNIT
    if (wg_isa()) {
        wg_signs_neon(x, n, bits);
        return;
    }
#endif
    wg_signs_run(x, n, bits);
}
