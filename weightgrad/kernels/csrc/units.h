/* What the portable units and the vector units share of each other. */
#ifndef WG_UNITS_H
#define WG_UNITS_H

#include "scalar.h"

/* A block sum. A block is 16 rows of 256 lanes: the rows are added in order, then the 256 lanes as
 * 16 groups of 16, in order, then the 16 lanes are halved: 16 -> 8 -> 4 -> 2 -> 1. Long rows suit a
 * vectorising reference implementation, short groups suit registers. */
#define WG_LANES 256u

static inline void wg_fold_lanes(double *lane, double *sum) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    *sum = lane[0];
}

static inline void wg_fold_block(const double wide[WG_LANES], double *sum) {
    double lane[16] = {0};
    for (size_t i = 0; i < WG_LANES; i++) lane[i % 16] += wide[i];
    wg_fold_lanes(lane, sum);
}

/* One level of a sum tree up: add and clear. */
static inline void wg_climb(float *from, float *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        to[i] += from[i];
        from[i] = 0.0f;
    }
}

/* bucket */
float wg_bucket_norm(const float *x, const float *residual, size_t m, int kind, float limit);
void wg_quantize_run(const float *x, float *residual, size_t m, const wg_quantizer *q, wg_ruler ruler, uint64_t index,
                     uint8_t *codes);
void wg_dequantize_run(const uint8_t *codes, size_t m, int bits, int levels, float scale, int mode, float *out);
uint64_t wg_quantize_avx2(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales);
uint64_t wg_quantize_avx512(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales);
uint64_t wg_quantize_neon(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales);
void wg_dequantize_neon(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels, int mode,
                        float *out);
void wg_dequantize_avx2(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels, int mode,
                        float *out);

/* moments: the run is one block or less */
uint32_t wg_moments_run(const float *x, const float *residual, size_t m, double *partials);
uint32_t wg_moments_avx2(const float *x, const float *residual, uint64_t n, int absolute, double *partials);
uint32_t wg_moments_avx512(const float *x, const float *residual, uint64_t n, int absolute, double *partials);

uint32_t wg_largest_avx2(const float *x, uint64_t n);

/* digest: the sum of the terms of m elements of one block, from the one with `key` on */
uint64_t wg_digest_run(const float *x, size_t m, uint64_t key);
uint64_t wg_digest_run_avx2(const float *x, size_t m, uint64_t key);
uint64_t wg_digest_run_avx512(const float *x, size_t m, uint64_t key);

/* halves */
uint32_t wg_narrow_avx2(const float *x, uint64_t n, int kind, void *out);
void wg_widen_avx2(const void *in, uint64_t n, int kind, int mode, float *out);
void wg_clear_avx2(float *out, uint64_t n);

/* lowrank */
void wg_lowrank_avx2(const float *p, const float *q, uint64_t rows, uint64_t cols, uint64_t rank, int mode, float *out);

/* lookup: codes are packed, a run starts on a byte; at most 15 borders in the AVX2 unit */
void wg_assign_run(const float *x, uint64_t n, const float *borders, int count, int bits, uint8_t *codes);
void wg_assign_avx2(const float *x, uint64_t n, const float *borders, int count, int bits, uint8_t *codes);
void wg_lookup_run(const uint8_t *codes, uint64_t n, int bits, const float *table, int mode, float *out);
void wg_lookup_avx2(const uint8_t *codes, uint64_t n, int bits, const float *table, int mode, float *out);

/* ternary */
void wg_ternary_run(const float *x, float *residual, size_t m, float scale, wg_ruler ruler, uint64_t key, uint64_t index,
                    uint8_t *codes);
void wg_ternary_decode_run(const uint8_t *codes, size_t m, float scale, int mode, float *out);
uint32_t wg_ternary_sums_run(const float *w, const float *d, size_t m, float threshold, double *partials);
void wg_ternary_threshold_run(const float *w, size_t m, float threshold, uint8_t *codes);
void wg_ternary_avx2(const float *x, float *residual, uint64_t n, float scale, wg_ruler ruler, uint64_t key, uint64_t first,
                     uint8_t *codes);
void wg_ternary_decode_avx2(const uint8_t *codes, uint64_t n, float scale, int mode, float *out);
uint32_t wg_ternary_sums_avx2(const float *w, const float *d, uint64_t n, float threshold, double *partials);
uint32_t wg_level_sums_run(const float *w, const float *d, size_t m, wg_ruler ruler, int levels, double *partials);
uint32_t wg_level_sums_avx2(const float *w, const float *d, uint64_t n, wg_ruler ruler, int levels, double *partials);
uint32_t wg_ternary_sums_avx512(const float *w, const float *d, uint64_t n, float threshold, double *partials);
uint32_t wg_level_sums_avx512(const float *w, const float *d, uint64_t n, wg_ruler ruler, int levels, double *partials);
void wg_ternary_threshold_avx2(const float *w, uint64_t n, float threshold, uint8_t *codes);

/* gaps: how far the streams have been read. The AVX2 unit reads runs of WG_GAP_RUN, the last may be shorter. */
#define WG_GAP_RUN 128u
#define WG_NARROW_GAP 12 /* bits: eight gaps in sixteen bytes */
typedef struct {
    const uint8_t *low, *unary;
    uint64_t low_bytes, unary_bytes, k;
    int width, rice;
    uint64_t at, sum;    /* indices read, and the sum of their low bits */
    uint64_t word, byte; /* the rest of a word of the unary stream, and the byte behind it */
    uint64_t have;
    uint32_t ones[WG_GAP_RUN + 80]; /* places that were found beyond those that were asked for */
} wg_gaps;

uint64_t wg_gaps_low_sum_avx2(const wg_gaps *g);
void wg_gaps_read_avx2(wg_gaps *g, uint64_t m, int32_t *indices);

/* gaps: entries that are added to a vector from its beginning to its end, one stretch after the other. */
typedef struct {
    wg_gaps gaps;
    const wg_entries *entries;
    int narrow;
    uint64_t next, have; /* of the run that has been read */
    int64_t indices[WG_GAP_RUN];
    float values[WG_GAP_RUN];
} wg_entry_cursor;

int wg_entries_good(const wg_entries *e);
void wg_entry_cursor_begin(wg_entry_cursor *c, const wg_entries *e);
/* Adds what lies below `end` and has not been added; `out` is where element 0 would be. */
void wg_entry_cursor_add(wg_entry_cursor *c, uint64_t end, float *out);
/* Reads a run if the last one is used up; returns 0 at the end, otherwise entry `next` of the run has not been used. */
int wg_entry_cursor_more(wg_entry_cursor *c);

/* reference */
void wg_reference_avx2(const float *weights, const float *residual, float share, uint64_t n, float *out);
void wg_distance_avx2(const float *local, const float *weights, const float *residual, float share, uint64_t n, float *out);
void wg_difference_avx2(const float *local, uint64_t n, float *out);
uint32_t wg_advance_avx2(const float *local, const float *residual, uint64_t n, float *out);

/* columns */
typedef struct {
    uint64_t rows, cols, tile;
} wg_grid;

/* The sum tree of a tile: two sums (by sign bit) for each of `width` columns on three levels. */
typedef struct {
    uint64_t width;
    float *level0, *level1, *sum;
    uint32_t *negatives;
} wg_tree;

static inline wg_tree wg_plant(float *scratch, uint64_t width) {
    wg_tree t = {width, scratch, scratch + 2 * width, scratch + 4 * width, (uint32_t *)(void *)(scratch + 6 * width)};
    memset(scratch, 0, 7 * width * sizeof(float));
    return t;
}

/* After `lines` lines have been added to level 0. */
static inline void wg_grow(wg_tree *t, uint64_t lines, int last) {
    if (last || lines % WG_TREE == 0) wg_climb(t->level0, t->level1, 2 * t->width);
    if (last || lines % (WG_TREE * WG_TREE) == 0) wg_climb(t->level1, t->sum, 2 * t->width);
}

void wg_column_means(const wg_tree *t, uint64_t width, uint64_t rows, float *positive, float *negative);
void wg_fold_column(wg_tree *t);
void wg_onebit_roll_back(const float *x, float *residual, float *old_means, wg_grid g, uint64_t rows_done, uint64_t group,
                         uint64_t cols_done);
void wg_onebit_decode_run(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, int mode,
                          float *out);
void wg_signs_run(const float *x, uint64_t n, uint8_t *bits);
int wg_onebit_avx2(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch);
int wg_onebit_avx512(const float *x, float *residual, float *old_means, wg_grid g, uint8_t *bits, float *means, float *scratch);
void wg_onebit_decode_avx2(const uint8_t *bits, const float *means, uint64_t rows, uint64_t cols, uint64_t tile, int mode,
                           float *out);
void wg_signs_avx2(const float *x, uint64_t n, uint8_t *bits);
void wg_signs_neon(const float *x, uint64_t n, uint8_t *bits);

/* select */
typedef struct {
    float above, below;
    const float *positive, *negative; /* the column means of this run, or one of each */
    uint64_t step;                    /* 1 for columns, 0 for one mean */
} wg_old;

typedef struct {
    const float *x;
    float *residual, *velocity;
    int64_t *indices;
    float *values;
    uint64_t count;
} wg_pass;

/* m elements from index `first` on; 0 when one is not finite: then nothing was written. */
int wg_select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old);
int wg_select_run_avx2(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old);
int wg_select_run_avx512(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old);
int wg_select_run_neon(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old);

#endif
