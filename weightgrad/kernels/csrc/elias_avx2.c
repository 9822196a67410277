/* AVX2 unit of elias.c: 64 codes are compared at a time, the places of those that are not zero are listed, then written. */
#include "elias.h"
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

#define MOST_LISTED 1024u /* codes of a bucket that are listed at a time */
#define UNASKED 4u         /* places written for each 64 codes, whether they are there or not */

/* Lists the places of the codes that are not zero; `m` is a multiple of 64. A word holds few of them, and how many is
 * the one thing that cannot be predicted, so the first ones are written without asking. */
ALWAYS_INLINE size_t list_places(const uint8_t *codes, size_t m, I8 zero, uint16_t *places) {
    size_t count = 0;
    for (size_t i = 0; i < m; i += 64) {
        const I8 low = _mm256_loadu_si256((const I8 *)(codes + i)), high = _mm256_loadu_si256((const I8 *)(codes + i + 32));
        const uint32_t first = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, zero));
        const uint32_t second = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, zero));
        uint64_t mask = first | (uint64_t)second << 32;
        const size_t found = (size_t)__builtin_popcountll(mask);
        for (size_t k = 0; k < UNASKED; k++, mask &= mask - 1) places[count + k] = (uint16_t)(i + (size_t)__builtin_ctzll(mask | 1ull << 63));
        for (size_t k = UNASKED; k < found; k++, mask &= mask - 1) places[count + k] = (uint16_t)(i + (size_t)__builtin_ctzll(mask));
        count += found;
    }
    return count;
}

uint8_t *wg_elias_bucket_avx2(const uint8_t *codes, uint64_t m, int levels, const wg_elias_table *t, uint8_t *out) {
    const I8 zero = _mm256_set1_epi8((char)levels);
    uint16_t places[MOST_LISTED + UNASKED];
    wg_elias_writer w = {out, 0, 0};
    uint64_t next = 0, i = 0; /* `next` is one past the last level that was written */
    while (i + 64 <= m) {
        const size_t some = m - i < MOST_LISTED ? (m - i) / 64 * 64 : MOST_LISTED, found = list_places(codes + i, some, zero, places);
        for (size_t k = 0; k < found; k++) {
            const uint64_t at = i + places[k];
            wg_elias_put(&w, (uint32_t)(at + 1 - next), codes[at], t);
            next = at + 1;
        }
        i += some;
    }
    for (; i < m; i++)
        if (codes[i] != levels) {
            wg_elias_put(&w, (uint32_t)(i + 1 - next), codes[i], t);
            next = i + 1;
        }
    return wg_elias_end(&w);
}
#endif
