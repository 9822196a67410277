/* AVX-512 unit of select.c: as the AVX2 unit, sixteen lanes at a time, the last eight by a mask. */
#include "listing.h"
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

#define NEAR 512 /* floats ahead in a pass that writes; twice as far is slower */

typedef struct {
    float residual[WG_SCAN_BLOCK], velocity[WG_SCAN_BLOCK];
} copy;

/* What the last call sent, taken out: see wg_old. */
typedef struct {
    F16 above, below, positive, negative;
    const float *positives, *negatives;
} taken;

ALWAYS_INLINE taken load_old(const wg_old *old) {
    taken t;
    if (old) {
        t.above = _mm512_set1_ps(old->above), t.below = _mm512_set1_ps(old->below);
        t.positives = old->positive, t.negatives = old->negative;
        t.positive = _mm512_set1_ps(*old->positive), t.negative = _mm512_set1_ps(*old->negative);
    }
    return t;
}

ALWAYS_INLINE F16 take_out(F16 h, const taken *t, size_t c, __mmask16 lanes, const int columns) {
    const __mmask16 up = _mm512_mask_cmp_ps_mask(lanes, h, t->above, _CMP_GE_OQ);
    const __mmask16 down = _mm512_mask_cmp_ps_mask(lanes, h, t->below, _CMP_LE_OQ) & (__mmask16)~up;
    F16 mean;
    if (columns) mean = _mm512_mask_loadu_ps(_mm512_maskz_loadu_ps(up, t->positives + c), down, t->negatives + c);
    else mean = _mm512_mask_mov_ps(_mm512_maskz_mov_ps(up, t->positive), down, t->negative);
    return _mm512_sub_ps(h, mean);
}

/* Loads, advances and stores up to sixteen elements; what it overwrites goes to the copy. */
ALWAYS_INLINE F16 advance(const float *x, float *residual, float *velocity, size_t i, __mmask16 lanes, F16 momentum,
                          const taken *before, copy *kept, const int sent, const int columns) {
    F16 h = _mm512_maskz_loadu_ps(lanes, residual + i);
    if (!x) return h;
    F16 speed = _mm512_maskz_loadu_ps(lanes, x + i);
    if (velocity) {
        const F16 slower = _mm512_maskz_loadu_ps(lanes, velocity + i);
        speed = _mm512_add_ps(_mm512_mul_ps(momentum, slower), speed);
        _mm512_mask_storeu_ps(kept->velocity + i, lanes, slower);
        _mm512_mask_storeu_ps(velocity + i, lanes, speed);
    }
    _mm512_mask_storeu_ps(kept->residual + i, lanes, h);
    if (sent) h = take_out(h, before, i, lanes, columns);
    h = _mm512_add_ps(h, speed);
    _mm512_mask_storeu_ps(residual + i, lanes, h);
    return h;
}

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
            const __mmask16 lanes = end - j < 16 ? 0xff : 0xffff;
            _mm_prefetch((const char *)(residual + i + (x ? NEAR : PREFETCH_FLOATS)), _MM_HINT_T0);
            if (x) _mm_prefetch((const char *)(x + i + NEAR), _MM_HINT_T0);
            if (velocity) _mm_prefetch((const char *)(velocity + i + NEAR), _MM_HINT_T0);
            const F16 h = advance(x, residual, velocity, i, lanes, momentum, &before, &overwritten, old != NULL, columns);
            const I16 size = _mm512_maskz_mov_epi32(lanes, magnitude16(h));
            top = _mm512_max_epu32(top, size);
            const __mmask16 kept = symmetric ? _mm512_mask_cmpgt_epi32_mask(lanes, size, limit)
                                             : _mm512_mask_cmp_ps_mask(lanes, h, above, _CMP_GE_OQ) |
                                                   _mm512_mask_cmp_ps_mask(lanes, h, below, _CMP_LE_OQ);
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

/* One copy of the loop for each job: what does not change in it is decided outside. */
int wg_select_run_avx512(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    const int symmetric = s->above > 0 && s->below == -s->above;
    if (!p->x) return symmetric ? select_run(p, first, m, s, NULL, 0, 0, 1, 0, 0) : select_run(p, first, m, s, NULL, 0, 0, 0, 0, 0);
    if (old) return old->step ? select_run(p, first, m, s, old, 1, 0, 0, 1, 0) : select_run(p, first, m, s, old, 1, 0, 0, 0, 0);
    if (p->velocity) return select_run(p, first, m, s, NULL, 1, 1, symmetric, 0, s->clear);
    return s->clear && symmetric ? select_run(p, first, m, s, NULL, 1, 0, 1, 0, 1)
                                 : select_run(p, first, m, s, NULL, 1, 0, symmetric, 0, s->clear);
}
#endif
