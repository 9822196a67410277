/* AVX2 unit of elias.c: 64 codes are compared at a time, and only those that are not zero are looked at. */
#include "elias.h"
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

uint8_t *wg_elias_bucket_avx2(const uint8_t *codes, uint64_t m, int levels, const wg_elias_table *t, uint8_t *out) {
    const I8 zero = _mm256_set1_epi8((char)levels);
    wg_elias_writer w = {out, 0, 0};
    uint64_t next = 0, i = 0; /* `next` is one past the last level that was written */
    for (; i + 64 <= m; i += 64) {
        const I8 low = _mm256_loadu_si256((const I8 *)(codes + i)), high = _mm256_loadu_si256((const I8 *)(codes + i + 32));
        const uint32_t first = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, zero));
        const uint32_t second = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, zero));
        for (uint64_t mask = first | (uint64_t)second << 32; mask; mask &= mask - 1) {
            const uint64_t at = i + (uint64_t)__builtin_ctzll(mask);
            wg_elias_put(&w, (uint32_t)(at + 1 - next), codes[at], t);
            next = at + 1;
        }
    }
    for (; i < m; i++)
        if (codes[i] != levels) {
            wg_elias_put(&w, (uint32_t)(i + 1 - next), codes[i], t);
            next = i + 1;
        }
    return wg_elias_end(&w);
}
#endif
