/* AVX2 unit of select.c. A run is advanced in one loop that keeps a copy of what it
 * overwrites; if the run then turns out to hold a NaN or Inf, the copy goes back. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

#define NEAR 512 /* floats ahead in a pass that writes; twice as far is slower */

typedef struct {
    float held[WG_SCAN_BLOCK], velocity[WG_SCAN_BLOCK];
    uint8_t kept[WG_SCAN_BLOCK / 8 + 8]; /* a bit for each entry beyond the thresholds */
} notes;

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

/* Advances m elements, a multiple of 8, and notes what is kept. Returns the bits of the largest |h|. */
ALWAYS_INLINE uint32_t advance(const float *x, float *held, float *velocity, size_t m, const wg_selection *s,
                               const wg_old *old, notes *n, const int symmetric, const int columns) {
    const taken before = load_old(old);
    const F8 momentum = _mm256_set1_ps(s->momentum), above = _mm256_set1_ps(s->above), below = _mm256_set1_ps(s->below);
    const I8 limit = same(wg_bits(s->above) - 1u);
    I8 top = _mm256_setzero_si256();
    for (size_t i = 0; i < m; i += 8) {
        if (i % 16 == 0) {
            _mm_prefetch((const char *)(held + i + (x ? NEAR : PREFETCH_FLOATS)), _MM_HINT_T0);
            if (x) _mm_prefetch((const char *)(x + i + NEAR), _MM_HINT_T0);
            if (velocity) _mm_prefetch((const char *)(velocity + i + NEAR), _MM_HINT_T0);
        }
        F8 h = _mm256_loadu_ps(held + i);
        if (x) {
            F8 speed = _mm256_loadu_ps(x + i);
            if (velocity) {
                F8 slower = _mm256_loadu_ps(velocity + i);
                speed = _mm256_add_ps(_mm256_mul_ps(momentum, slower), speed);
                _mm256_storeu_ps(n->velocity + i, slower);
                _mm256_storeu_ps(velocity + i, speed);
            }
            _mm256_storeu_ps(n->held + i, h);
            if (old) h = take_out(h, &before, i, columns);
            h = _mm256_add_ps(h, speed);
            _mm256_storeu_ps(held + i, h);
        }
        I8 size = magnitude8(h);
        top = _mm256_max_epu32(top, size);
        F8 kept = symmetric ? _mm256_castsi256_ps(_mm256_cmpgt_epi32(size, limit))
                            : _mm256_or_ps(_mm256_cmp_ps(h, above, _CMP_GE_OQ), _mm256_cmp_ps(h, below, _CMP_LE_OQ));
        n->kept[i / 8] = (uint8_t)_mm256_movemask_ps(kept);
    }
    return top8(top);
}

/* `stays` is all ones when there is no entry to clear, else zero: arithmetic instead of a branch. */
ALWAYS_INLINE void list_one(wg_pass *p, uint64_t first, float *held, size_t at, uint64_t place, const int clear,
                            uint32_t stays) {
    const uint32_t h = wg_bits(held[at]);
    p->indices[place] = (int64_t)(first + at);
    p->values[place] = wg_float(h);
    if (clear) held[at] = wg_float(h & stays);
}

/* Most words of 64 elements hold no more than two entries: two are written without asking whether
 * they are there, because a wrong guess costs more than the writing. */
ALWAYS_INLINE void list(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const notes *n, const int clear) {
    float *held = p->held + first;
    uint64_t count = p->count;
    for (size_t i = 0; i < m; i += 64) {
        uint64_t mask;
        memcpy(&mask, n->kept + i / 8, 8);
        const uint64_t found = (uint64_t)__builtin_popcountll(mask);
        if (count + 64 > s->capacity) {
            for (; mask; mask &= mask - 1, count++)
                if (count < s->capacity) list_one(p, first, held, i + (size_t)__builtin_ctzll(mask), count, clear, 0);
            continue;
        }
        const size_t last = m - i < 64 ? m - i - 1 : 63; /* looked at when there is no entry */
        for (uint64_t k = 0; k < 2; k++, mask &= mask - 1) {
            const size_t at = i + (size_t)__builtin_ctzll(mask | 1ull << last);
            list_one(p, first, held, at, count + k, clear, (uint32_t) - (int32_t)(mask == 0));
        }
        for (uint64_t k = 2; k < found; k++, mask &= mask - 1)
            list_one(p, first, held, i + (size_t)__builtin_ctzll(mask), count + k, clear, 0);
        count += found;
    }
    p->count = count;
}

ALWAYS_INLINE int select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old,
                             const int with_x, const int with_velocity) {
    notes n;
    const float *x = with_x ? p->x + first : NULL;
    float *held = p->held + first, *velocity = with_velocity ? p->velocity + first : NULL;
    memset(n.kept + m / 8, 0, 8);
    const int symmetric = s->above > 0 && s->below == -s->above;
    const uint32_t top = old && old->step ? advance(x, held, velocity, m, s, old, &n, 0, 1)
                         : symmetric      ? advance(x, held, velocity, m, s, old, &n, 1, 0)
                                          : advance(x, held, velocity, m, s, old, &n, 0, 0);
    if (top >= WG_INFINITY) {
        if (x) memcpy(held, n.held, m * sizeof(float));
        if (velocity) memcpy(velocity, n.velocity, m * sizeof(float));
        return 0;
    }
    if (s->clear) list(p, first, m, s, &n, 1);
    else list(p, first, m, s, &n, 0);
    return 1;
}

int wg_select_run_avx2(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    if (!p->x) return select_run(p, first, m, s, NULL, 0, 0);
    if (p->velocity) return select_run(p, first, m, s, NULL, 1, 1);
    return old ? select_run(p, first, m, s, old, 1, 0) : select_run(p, first, m, s, NULL, 1, 0);
}
#endif
