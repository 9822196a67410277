/* AVX2 unit of select.c. A run is advanced in one loop that keeps a copy of what it
 * overwrites; if the run then turns out to hold a NaN or Inf, the copy goes back. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "select_list.h"

/* What the last call sent, taken out: see wg_old. In registers, as stores to floats might change it. */
typedef struct {
    F8 above, below, positive, negative;
    const float *positives, *negatives;
} taken;

ALWAYS_INLINE taken load_old(const wg_old *old) {
    taken t;
    if (old) {
        t.above = _mm256_set1_ps(old->above), t.below = _mm256_set1_ps(old->below);
        t.positives = old->step ? old->positive : NULL, t.negatives = old->negative;
        t.positive = _mm256_set1_ps(*old->positive), t.negative = _mm256_set1_ps(*old->negative);
    }
    return t;
}

ALWAYS_INLINE F8 take_out(F8 h, const taken *t, size_t c, const int columns) {
    const F8 up = _mm256_cmp_ps(h, t->above, _CMP_GE_OQ), down = _mm256_cmp_ps(h, t->below, _CMP_LE_OQ);
    const F8 positive = columns ? _mm256_loadu_ps(t->positives + c) : t->positive;
    const F8 negative = columns ? _mm256_loadu_ps(t->negatives + c) : t->negative;
    return _mm256_sub_ps(h, _mm256_or_ps(_mm256_and_ps(up, positive), _mm256_andnot_ps(up, _mm256_and_ps(down, negative))));
}

/* Loads, advances and stores eight elements; what it overwrites goes to the copy. */
ALWAYS_INLINE F8 advance(const float *x, float *residual, float *velocity, size_t i, F8 momentum, const taken *before, copy *kept,
                         const int sent, const int columns) {
    F8 h = _mm256_loadu_ps(residual + i);
    if (!x) return h;
    F8 speed = _mm256_loadu_ps(x + i);
    if (velocity) {
        const F8 slower = _mm256_loadu_ps(velocity + i);
        speed = _mm256_add_ps(_mm256_mul_ps(momentum, slower), speed);
        _mm256_storeu_ps(kept->velocity + i, slower);
        _mm256_storeu_ps(velocity + i, speed);
    }
    _mm256_storeu_ps(kept->residual + i, h);
    if (sent) h = take_out(h, before, i, columns);
    h = _mm256_add_ps(h, speed);
    _mm256_storeu_ps(residual + i, h);
    return h;
}

/* Advances and lists m elements, a multiple of 8. The list is written between the loads of the next
 * elements, which hide it. */
ALWAYS_INLINE int select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old, const int with_x,
                             const int with_velocity, const int symmetric, const int columns, const int clear) {
    copy overwritten;
    wg_pass pass = *p;
    const float *x = with_x ? pass.x + first : NULL;
    float *residual = pass.residual + first, *velocity = with_velocity ? pass.velocity + first : NULL;
    const taken before = load_old(old);
    const F8 momentum = _mm256_set1_ps(s->momentum), above = _mm256_set1_ps(s->above), below = _mm256_set1_ps(s->below);
    const I8 limit = same(wg_bits(s->above) - 1u);
    I8 top = _mm256_setzero_si256();
    uint64_t count = pass.count;
    for (size_t word = 0; word < m; word += 64) {
        const size_t end = m - word < 64 ? m - word : 64;
        uint64_t mask = 0;
        for (size_t j = 0; j < end; j += 8) {
            const size_t i = word + j;
            if (j % 16 == 0) {
                _mm_prefetch((const char *)(residual + i + (x ? NEAR : PREFETCH_FLOATS)), _MM_HINT_T0);
                if (x) _mm_prefetch((const char *)(x + i + NEAR), _MM_HINT_T0);
                if (velocity) _mm_prefetch((const char *)(velocity + i + NEAR), _MM_HINT_T0);
            }
            const F8 h = advance(x, residual, velocity, i, momentum, &before, &overwritten, old != NULL, columns);
            const I8 size = magnitude8(h);
            top = _mm256_max_epu32(top, size);
            const F8 kept = symmetric ? _mm256_castsi256_ps(_mm256_cmpgt_epi32(size, limit))
                                      : _mm256_or_ps(_mm256_cmp_ps(h, above, _CMP_GE_OQ), _mm256_cmp_ps(h, below, _CMP_LE_OQ));
            mask |= (uint64_t)(uint32_t)_mm256_movemask_ps(kept) << j;
        }
        count = list(&pass, first + word, end - 1, mask, count, s, clear);
    }
    if (top8(top) >= WG_INFINITY) {
        if (x) memcpy(residual, overwritten.residual, m * sizeof(float));
        if (velocity) memcpy(velocity, overwritten.velocity, m * sizeof(float));
        return 0;
    }
    p->count = count;
    return 1;
}

/* One copy of the loop for each job: what does not change in it is decided outside. */
int wg_select_run_avx2(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    const int symmetric = s->above > 0 && s->below == -s->above;
    if (!p->x) return symmetric ? select_run(p, first, m, s, NULL, 0, 0, 1, 0, 0) : select_run(p, first, m, s, NULL, 0, 0, 0, 0, 0);
    if (old) return old->step ? select_run(p, first, m, s, old, 1, 0, 0, 1, 0) : select_run(p, first, m, s, old, 1, 0, 0, 0, 0);
    if (p->velocity) return select_run(p, first, m, s, NULL, 1, 1, symmetric, 0, s->clear);
    return s->clear && symmetric ? select_run(p, first, m, s, NULL, 1, 0, 1, 0, 1)
                                 : select_run(p, first, m, s, NULL, 1, 0, symmetric, 0, s->clear);
}
#endif
