/* Selection of the entries beyond two thresholds, with what error feedback and momentum
 * correction need done in the same pass over memory.
 *
 *   velocity given:  velocity = momentum*velocity + x;  h = residual + velocity
 *   x given:         h = residual + x
 *   neither:         h = residual
 *
 * `residual` becomes h. Indices and values of the entries with h >= above or h <= below are
 * listed in order, as many as fit; the return value counts all. A run of WG_SCAN_BLOCK
 * elements or fewer with a NaN or Inf in h stops the pass: `done` says where, and nothing of
 * that run has been written.
 *
 * wg_scan_columns is the same for a matrix whose last selection was sent as column means and
 * not yet taken out of `residual` (lazy error feedback: no second trip to the entries):
 * h = (residual - mean it was sent as) + x.
 */
#include "units.h"

static float lost(float residual, const wg_old *old, uint64_t c) {
    if (!old) return residual;
    float mean = residual >= old->above ? old->positive[c * old->step] : residual <= old->below ? old->negative[c * old->step] : 0.0f;
    return residual - mean;
}

static float next(const wg_pass *p, uint64_t i, uint64_t c, const wg_selection *s, const wg_old *old, float *speed) {
    float h = lost(p->residual[i], old, c);
    if (!p->x) return h;
    *speed = p->velocity ? s->momentum * p->velocity[i] + p->x[i] : p->x[i];
    return h + *speed;
}

int wg_select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    float speed = 0.0f;
    for (size_t c = 0; c < m; c++)
        if (wg_magnitude(next(p, first + c, c, s, old, &speed)) >= WG_INFINITY) return 0;
    for (size_t c = 0; c < m; c++) {
        const uint64_t i = first + c;
        float h = next(p, i, c, s, old, &speed);
        if (p->x) p->residual[i] = h;
        if (p->velocity) p->velocity[i] = speed;
        if (h >= s->above || h <= s->below) {
            if (p->count < s->capacity) {
                p->indices[p->count] = (int64_t)i;
                p->values[p->count] = h;
                if (s->clear) p->residual[i] = 0.0f;
            }
            p->count++;
        }
    }
    return 1;
}

typedef int run_kernel(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old);

/* What advances a run of a multiple of eight elements, or NULL. */
static run_kernel *vectors(void) {
    const int isa = wg_isa();
#if WG_HAS_AVX2_UNIT
    if (isa) return isa == 2 ? wg_select_run_avx512 : wg_select_run_avx2;
#elif WG_HAS_NEON_UNIT
    if (isa) return wg_select_run_neon;
#endif
    (void)isa;
    return NULL;
}

static int run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    run_kernel *kernel = vectors();
    if (!kernel) return wg_select_run(p, first, m, s, old);
    const size_t whole = m / 8 * 8;
    float speed; /* the rest is looked at first: nothing of a bad run may be written */
    for (size_t c = whole; c < m; c++)
        if (wg_magnitude(next(p, first + c, c, s, old, &speed)) >= WG_INFINITY) return 0;
    if (whole && !kernel(p, first, whole, s, old)) return 0;
    if (whole == m) return 1;
    wg_old rest;
    if (old) {
        rest = *old;
        rest.positive += whole * old->step;
        rest.negative += whole * old->step;
    }
    return wg_select_run(p, first + whole, m - whole, s, old ? &rest : NULL);
}

WG_API uint64_t wg_scan(const float *x, float *residual, float *velocity, uint64_t n, const wg_selection *s, int64_t *indices,
                        float *values, uint64_t *done) {
    wg_pass p = {x, residual, velocity, indices, values, 0};
    for (*done = 0; *done < n;) {
        size_t m = n - *done < WG_SCAN_BLOCK ? n - *done : WG_SCAN_BLOCK;
        if (!run(&p, *done, m, s, NULL)) break;
        *done += m;
    }
    return p.count;
}

WG_API uint64_t wg_scan_columns(const float *x, float *residual, const wg_sent *sent, const wg_selection *s, int64_t *indices,
                                float *values, uint64_t *done) {
    wg_pass p = {x, residual, NULL, indices, values, 0};
    *done = 0;
    for (uint64_t row = 0; row < sent->rows;) {
        const uint64_t tile = row / sent->tile;
        const float *positive = sent->means + 2 * tile * sent->cols, *negative = positive + sent->cols;
        const uint64_t tile_end = (tile + 1) * sent->tile < sent->rows ? (tile + 1) * sent->tile : sent->rows;
        const uint64_t next_row = sent->cols == 1 ? tile_end : row + 1, length = (next_row - row) * sent->cols;
        for (uint64_t c = 0; c < length; c += WG_SCAN_BLOCK) {
            const size_t m = length - c < WG_SCAN_BLOCK ? length - c : WG_SCAN_BLOCK;
            const uint64_t step = sent->cols > 1;
            const wg_old old = {sent->above, sent->below, positive + c * step, negative + c * step, step};
            if (!run(&p, *done, m, s, &old)) return p.count;
            *done += m;
        }
        row = next_row;
    }
    return p.count;
}

/* Keep, in order, the k entries of a list of largest magnitude, given the bits of the k-th; of equals
 * the first. The n - k others are listed too: without branches, as they come at random. */
WG_API void wg_keep_largest(int64_t *indices, float *values, uint64_t n, uint64_t k, uint32_t limit, int64_t *other_indices,
                            float *other_values) {
    uint64_t kept = 0, others = 0, larger = 0;
    for (uint64_t i = 0; i < n; i++) larger += wg_magnitude(values[i]) > limit;
    uint64_t equals = k - larger;
    for (uint64_t i = 0; i < n; i++) {
        const int64_t index = indices[i];
        const float value = values[i];
        const uint32_t u = wg_magnitude(value);
        uint64_t take = u > limit;
        if (u == limit && equals > 0) {
            take = 1;
            equals--;
        }
        other_indices[others] = index;
        other_values[others] = value;
        others += 1 - take;
        indices[kept] = index;
        values[kept] = value;
        kept += take;
    }
}

/* out[index] = value, or + or -; with no values, zeros are stored. */
WG_API void wg_scatter(const int64_t *indices, const float *values, uint64_t k, int mode, float *out) {
    for (uint64_t i = 0; i < k; i++) {
        if (i + 16 < k) __builtin_prefetch(out + indices[i + 16], 1);
        if (values) wg_put(out + indices[i], values[i], mode);
        else out[indices[i]] = 0.0f;
    }
}
