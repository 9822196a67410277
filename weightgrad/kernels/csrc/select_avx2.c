/* AVX2 unit of select.c. A block is advanced in one loop that keeps a copy of what it
 * overwrites; if the block then turns out to hold a NaN or Inf, the copy goes back. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

typedef struct {
    float held[WG_SCAN_BLOCK], velocity[WG_SCAN_BLOCK];
    uint32_t kept[WG_SCAN_BLOCK / 32]; /* a bit for each entry beyond the thresholds */
} block_notes;

/* Advances a whole block and notes what is kept. Returns the bits of the largest |h|. */
ALWAYS_INLINE uint32_t advance(const float *x, float *held, float *velocity, const wg_selection *s, block_notes *notes,
                               const int symmetric) {
    const F8 momentum = _mm256_set1_ps(s->momentum), above = _mm256_set1_ps(s->above), below = _mm256_set1_ps(s->below);
    const I8 limit = same(wg_bits(s->above) - 1u);
    I8 top = _mm256_setzero_si256();
    for (size_t i = 0; i < WG_SCAN_BLOCK; i += 32) {
        uint32_t mask = 0;
        for (size_t j = 0; j < 4; j++) {
            const size_t at = i + 8 * j;
            if (!x && j % 2 == 0) _mm_prefetch((const char *)(held + at + PREFETCH_FLOATS), _MM_HINT_T0);
            F8 h = _mm256_loadu_ps(held + at);
            if (x) {
                F8 speed = _mm256_loadu_ps(x + at);
                if (velocity) {
                    F8 old = _mm256_loadu_ps(velocity + at);
                    speed = _mm256_add_ps(_mm256_mul_ps(momentum, old), speed);
                    _mm256_storeu_ps(notes->velocity + at, old);
                    _mm256_storeu_ps(velocity + at, speed);
                }
                _mm256_storeu_ps(notes->held + at, h);
                h = _mm256_add_ps(h, speed);
                _mm256_storeu_ps(held + at, h);
            }
            I8 size = magnitude8(h);
            top = _mm256_max_epu32(top, size);
            F8 kept = symmetric ? _mm256_castsi256_ps(_mm256_cmpgt_epi32(size, limit))
                                : _mm256_or_ps(_mm256_cmp_ps(h, above, _CMP_GE_OQ), _mm256_cmp_ps(h, below, _CMP_LE_OQ));
            mask |= (uint32_t)_mm256_movemask_ps(kept) << 8 * j;
        }
        notes->kept[i / 32] = mask;
    }
    return top8(top);
}

ALWAYS_INLINE uint64_t list(const float *held, const block_notes *notes, const wg_selection *s, uint64_t first, uint64_t count,
                            int64_t *indices, float *values) {
    for (size_t i = 0; i < WG_SCAN_BLOCK; i += 64) {
        uint64_t mask = notes->kept[i / 32] | (uint64_t)notes->kept[i / 32 + 1] << 32;
        if (count + 64 <= s->capacity) {
            for (; mask; mask &= mask - 1) {
                const size_t at = i + (size_t)__builtin_ctzll(mask);
                indices[count] = (int64_t)(first + at);
                values[count++] = held[at];
            }
        } else {
            for (; mask; mask &= mask - 1, count++) {
                const size_t at = i + (size_t)__builtin_ctzll(mask);
                if (count >= s->capacity) continue;
                indices[count] = (int64_t)(first + at);
                values[count] = held[at];
            }
        }
    }
    return count;
}

ALWAYS_INLINE uint64_t scan(const float *x, float *held, float *velocity, uint64_t n, const wg_selection *s, int64_t *indices,
                            float *values, uint64_t *done, const int symmetric) {
    block_notes notes;
    uint64_t count = 0, i = 0;
    for (; i + WG_SCAN_BLOCK <= n; i += WG_SCAN_BLOCK) {
        float *speed = velocity ? velocity + i : NULL;
        if (advance(x ? x + i : NULL, held + i, speed, s, &notes, symmetric) >= WG_INFINITY) {
            if (x) memcpy(held + i, notes.held, sizeof notes.held);
            if (velocity) memcpy(speed, notes.velocity, sizeof notes.velocity);
            *done = i;
            return count;
        }
        count = list(held + i, &notes, s, s->first + i, count, indices, values);
    }
    *done = i;
    return wg_scan_rest(x, held, velocity, n, s, count, indices, values, done);
}

ALWAYS_INLINE uint64_t scan_either(const float *x, float *held, float *velocity, uint64_t n, const wg_selection *s,
                                   int64_t *indices, float *values, uint64_t *done) {
    if (s->above > 0 && s->below == -s->above) return scan(x, held, velocity, n, s, indices, values, done, 1);
    return scan(x, held, velocity, n, s, indices, values, done, 0);
}

uint64_t wg_scan_avx2(const float *x, float *held, float *velocity, uint64_t n, const wg_selection *s, int64_t *indices,
                      float *values, uint64_t *done) {
    if (!x) return scan_either(NULL, held, NULL, n, s, indices, values, done);
    if (!velocity) return scan_either(x, held, NULL, n, s, indices, values, done);
    return scan_either(x, held, velocity, n, s, indices, values, done);
}
#endif
