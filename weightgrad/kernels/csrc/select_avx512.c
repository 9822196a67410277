/* AVX-512 unit of select.c: as the AVX2 unit, sixteen elements at a time. What does not fill a vector is masked. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"
#include "select_list.h"

/* What the last call sent, taken out: see wg_old. */
typedef struct {
    F16 above, below, positive, negative;
    const float *positives, *negatives;
} taken;

ALWAYS_INLINE taken load_old(const wg_old *old) {
    taken t;
    if (old) {
        t.above = _mm512_set1_ps(old->above), t.below = _mm512_set1_ps(old->below);
        t.positives = old->step ? old->positive : NULL, t.negatives = old->negative;
        t.positive = _mm512_set1_ps(*old->positive), t.negative = _mm512_set1_ps(*old->negative);
    }
    return t;
}

ALWAYS_INLINE F16 take_out(F16 h, const taken *t, size_t c, __mmask16 some, const int columns) {
    const __mmask16 up = _mm512_cmp_ps_mask(h, t->above, _CMP_GE_OQ), down = _mm512_cmp_ps_mask(h, t->below, _CMP_LE_OQ);
    if (!columns) return _mm512_mask_sub_ps(_mm512_mask_sub_ps(h, down & ~up, h, t->negative), up, h, t->positive);
    const F16 positive = _mm512_maskz_loadu_ps(some, t->positives + c), negative = _mm512_maskz_loadu_ps(some, t->negatives + c);
    return _mm512_mask_sub_ps(_mm512_mask_sub_ps(h, down & ~up, h, negative), up, h, positive);
}

/* Loads, advances and stores sixteen elements, or those in `some`; what it overwrites goes to the copy. */
ALWAYS_INLINE F16 advance(const float *x, float *residual, float *velocity, size_t i, F16 momentum, const taken *before, copy *kept,
                          __mmask16 some, const int sent, const int columns) {
    F16 h = _mm512_maskz_loadu_ps(some, residual + i);
    if (!x) return h;
    F16 speed = _mm512_maskz_loadu_ps(some, x + i);
    if (velocity) {
        const F16 slower = _mm512_maskz_loadu_ps(some, velocity + i);
        speed = _mm512_add_ps(_mm512_mul_ps(momentum, slower), speed);
        _mm512_mask_storeu_ps(kept->velocity + i, some, slower);
        _mm512_mask_storeu_ps(velocity + i, some, speed);
    }
    _mm512_mask_storeu_ps(kept->residual + i, some, h);
    if (sent) h = take_out(h, before, i, some, columns);
    h = _mm512_add_ps(h, speed);
    _mm512_mask_storeu_ps(residual + i, some, h);
    return h;
}

/* Advances and lists m elements, a multiple of 8. */
ALWAYS_INLINE int select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old, const int with_x,
                             const int with_velocity, const int symmetric, const int columns, const int clear) {
    copy overwritten;
    wg_pass pass = *p;
    const float *x = with_x ? pass.x + first : NULL;
    float *residual = pass.residual + first, *velocity = with_velocity ? pass.velocity + first : NULL;
    const taken before = load_old(old);
    const F16 momentum = _mm512_set1_ps(s->momentum), above = _mm512_set1_ps(s->above), below = _mm512_set1_ps(s->below);
    const I16 limit = same16(wg_bits(s->above) - 1u);
    I16 top = _mm512_setzero_si512();
    uint64_t count = pass.count;
    for (size_t word = 0; word < m; word += 64) {
        const size_t end = m - word < 64 ? m - word : 64;
        uint64_t mask = 0;
        for (size_t j = 0; j < end; j += 16) {
            const size_t i = word + j;
            const __mmask16 some = (__mmask16)(end - j < 16 ? 0xffu : 0xffffu);
            _mm_prefetch((const char *)(residual + i + PREFETCH_FLOATS), _MM_HINT_T0);
            if (x) _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
            if (velocity) _mm_prefetch((const char *)(velocity + i + PREFETCH_FLOATS), _MM_HINT_T0);
            const F16 h = advance(x, residual, velocity, i, momentum, &before, &overwritten, some, old != NULL, columns);
            const I16 size = magnitude16(h);
            top = _mm512_max_epu32(top, _mm512_maskz_mov_epi32(some, size));
            const __mmask16 kept = symmetric ? _mm512_mask_cmpgt_epi32_mask(some, size, limit)
                                             : (__mmask16)(_mm512_mask_cmp_ps_mask(some, h, above, _CMP_GE_OQ) |
                                                           _mm512_mask_cmp_ps_mask(some, h, below, _CMP_LE_OQ));
            mask |= (uint64_t)kept << j;
        }
        count = list(&pass, first + word, end - 1, mask, count, s, clear);
    }
    if (top16(top) >= WG_INFINITY) {
        if (x) memcpy(residual, overwritten.residual, m * sizeof(float));
        if (velocity) memcpy(velocity, overwritten.velocity, m * sizeof(float));
        return 0;
    }
    p->count = count;
    return 1;
}

int wg_select_run_avx512(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    const int symmetric = s->above > 0 && s->below == -s->above;
    if (!p->x) return symmetric ? select_run(p, first, m, s, NULL, 0, 0, 1, 0, 0) : select_run(p, first, m, s, NULL, 0, 0, 0, 0, 0);
    if (old) return old->step ? select_run(p, first, m, s, old, 1, 0, 0, 1, 0) : select_run(p, first, m, s, old, 1, 0, 0, 0, 0);
    if (p->velocity) return select_run(p, first, m, s, NULL, 1, 1, symmetric, 0, s->clear);
    return s->clear && symmetric ? select_run(p, first, m, s, NULL, 1, 0, 1, 0, 1)
                                 : select_run(p, first, m, s, NULL, 1, 0, symmetric, 0, s->clear);
}
#endif
