/* Shared by the AVX2 and the AVX-512 unit of select.c: a run is advanced in one loop that keeps a copy of what it
 * overwrites, and what passes is listed from a word of 64 elements. */
#ifndef WG_SELECT_LIST_H
#define WG_SELECT_LIST_H

#include "lanes.h"

#define NEAR 512 /* floats ahead in a pass that writes; twice as far is slower */

typedef struct {
    float residual[WG_SCAN_BLOCK], velocity[WG_SCAN_BLOCK];
} copy;

/* `stays` is all ones when there is no entry to clear, else zero: arithmetic instead of a branch. */
ALWAYS_INLINE void list_one(wg_pass *p, uint64_t index, uint64_t place, const int clear, uint32_t stays) {
    const uint32_t h = wg_bits(p->residual[index]);
    p->indices[place] = (int64_t)index;
    p->values[place] = wg_float(h);
    if (clear) p->residual[index] = wg_float(h & stays);
}

/* Lists the entries of a word of at most 64 elements from `first` to `last`. Most hold no more than two:
 * two are written without asking whether they are there, because a wrong guess costs more than the writing. */
ALWAYS_INLINE uint64_t list(wg_pass *p, uint64_t first, size_t last, uint64_t mask, uint64_t count, const wg_selection *s,
                            const int clear) {
    const uint64_t found = (uint64_t)__builtin_popcountll(mask);
    if (__builtin_expect(count + 64 > s->capacity, 0)) {
        for (; mask; mask &= mask - 1, count++)
            if (count < s->capacity) list_one(p, first + (size_t)__builtin_ctzll(mask), count, clear, 0);
        return count;
    }
    for (uint64_t k = 0; k < 2; k++, mask &= mask - 1) {
        const size_t at = (size_t)__builtin_ctzll(mask | 1ull << last); /* `last` is looked at when there is no entry */
        list_one(p, first + at, count + k, clear, (uint32_t) - (int32_t)(mask == 0));
    }
    for (uint64_t k = 2; k < found; k++, mask &= mask - 1)
        list_one(p, first + (size_t)__builtin_ctzll(mask), count + k, clear, 0);
    return count + found;
}

#endif
