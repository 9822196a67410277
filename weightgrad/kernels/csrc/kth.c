/* The k-th largest of many values, found digit by digit: count the upper digits of all, then the next digits of those
 * that share what was found. Its time does not depend on how many values are equal, as that of a partition does.
 */
#include "wg.h"

#include <string.h>

enum { TABLES = 4, BINS = 1 << 11 }; /* neighbours are often equal: four tables, so that no count waits for the last */

/* Counts of (u >> shift) & (bins - 1) over the values whose bits at `known` are those of `found`. */
static void count(const int32_t *x, uint64_t n, uint32_t known, uint32_t found, int shift, uint64_t (*tables)[BINS]) {
    memset(tables, 0, TABLES * sizeof *tables);
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t u = (uint32_t)x[i] ^ 0x80000000u; /* in the order of the signed values */
        if ((u & known) == found) tables[i % TABLES][u >> shift & (BINS - 1)]++;
    }
}

WG_API int32_t wg_kth_largest(const int32_t *x, uint64_t n, uint64_t k) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint64_t tables[TABLES][BINS];
    uint32_t known = 0, found = 0;
    for (int digit = 0; digit < 3; digit++) {
        const uint32_t bins = 1u << widths[digit];
        count(x, n, known, found, shifts[digit], tables);
        uint32_t bin = bins;
        for (uint64_t larger = 0; bin-- > 0;) {
            uint64_t here = 0;
            for (int t = 0; t < TABLES; t++)
                for (uint32_t upper = bin; upper < BINS; upper += bins) here += tables[t][upper];
            if (larger + here >= k) {
                k -= larger;
                break;
            }
            larger += here;
        }
        known |= (bins - 1) << shifts[digit];
        found |= bin << shifts[digit];
    }
    return (int32_t)(found ^ 0x80000000u);
}
