/* Columns of kept entries (Dryden's adaptive quantization): for each tile and
 * column a count and two means; for each entry fifteen bits of row and one of sign.
 *
 * A slot is a tile and a column: slot = row / tile * cols + col. Entries come in
 * row-major order and leave sorted by slot, rows ascending. Sums are integers,
 * value * factor rounded, so that any order gives the same mean; the caller picks
 * the factor, a power of two, so that they cannot overflow.
 */
#include "scalar.h"

#include <string.h>

/* A cursor over ascending indices: divisions are slow, so they are done once a row (once a tile, when
 * there is one column). */
typedef struct {
    uint64_t start, end;  /* elements of the current row, or of the tile of a single column */
    uint64_t slots, row;  /* first slot of its tile; row within it (of `start`) */
} cursor;

static uint64_t slot_of(cursor *at, int64_t index, uint64_t cols, uint64_t tile) {
    const uint64_t i = (uint64_t)index;
    if (i >= at->end) {
        const uint64_t row = i / cols, first = cols == 1 ? row / tile * tile : row;
        at->start = first * cols;
        at->end = cols == 1 ? at->start + tile : at->start + cols;
        at->slots = row / tile * cols;
        at->row = first % tile;
    }
    return cols == 1 ? at->slots : at->slots + (i - at->start);
}

/* What is gathered for each slot, apart and narrow because every entry visits another slot: with the shelves it
 * should fit the second-level cache. */
typedef struct {
    int64_t sum[2]; /* by sign */
} wg_sums;
#define NEGATIVE 16 /* a tally is the count of entries and, from this bit on, of the negative ones: 2^15 at most */
#define COUNT 0xffffu

/* `tallies` is 32 bits a slot; `shelf` is room for `capacity` entries a slot, so that one pass both counts and places
 * them. If a slot overflows it, a second pass places all. With `residual`, what the means do not say stays there:
 * residual[index] = value - mean. */
WG_API void wg_columns_of(const int64_t *indices, const float *values, uint64_t k, uint64_t cols, uint64_t tile, uint64_t slots,
                          double factor, uint16_t *counts, float *means, uint16_t *entries, wg_sums *sums, uint32_t *tallies,
                          uint16_t *shelf, uint64_t capacity, float *residual) {
    memset(sums, 0, slots * sizeof *sums);
    memset(tallies, 0, slots * sizeof *tallies);
    cursor at = {0, 0, 0, 0};
    for (uint64_t i = 0; i < k; i++) {
        const uint64_t slot = slot_of(&at, indices[i], cols, tile), sign = wg_bits(values[i]) >> 31;
        const uint64_t row = cols == 1 ? (uint64_t)indices[i] - at.start : at.row, place = tallies[slot] & COUNT;
        if (place < capacity) shelf[slot * capacity + place] = (uint16_t)(row | sign << 15);
        tallies[slot] += (uint32_t)(1 | sign << NEGATIVE);
        sums[slot].sum[sign] += llrint((double)values[i] * factor);
    }
    uint64_t next = 0;
    int overflow = 0;
    for (uint64_t s = 0; s < slots; s++) {
        const uint64_t count = tallies[s] & COUNT, negative = tallies[s] >> NEGATIVE, positive = count - negative;
        if (count <= capacity) memcpy(entries + next, shelf + s * capacity, count * sizeof *entries);
        else overflow = 1;
        means[2 * s] = (float)((double)sums[s].sum[0] / (double)(positive ? positive : 1) / factor);
        means[2 * s + 1] = (float)((double)sums[s].sum[1] / (double)(negative ? negative : 1) / factor);
        counts[s] = (uint16_t)count;
        sums[s].sum[0] = (int64_t)next; /* from here on: where the next entry goes */
        next += count;
    }
    if (!overflow && !residual) return;
    cursor again = {0, 0, 0, 0};
    for (uint64_t i = 0; i < k; i++) {
        const uint64_t slot = slot_of(&again, indices[i], cols, tile), sign = wg_bits(values[i]) >> 31;
        const uint64_t row = cols == 1 ? (uint64_t)indices[i] - again.start : again.row;
        entries[sums[slot].sum[0]++] = (uint16_t)(row | sign << 15);
        if (residual) residual[indices[i]] = values[i] - means[2 * slot + sign];
    }
}

/* The opposite: indices in slot order, and the mean of each. Returns 0, or 1 when an
 * entry lies outside its tile or its rows do not ascend. */
WG_API int wg_entries_of(const uint16_t *counts, const float *means, const uint16_t *entries, uint64_t rows, uint64_t cols,
                         uint64_t tile, uint64_t slots, int64_t *indices, float *values) {
    for (uint64_t s = 0; s < slots; s++) {
        uint64_t first = s / cols * tile, height = rows - first < tile ? rows - first : tile;
        int64_t before = -1;
        for (uint32_t i = 0; i < counts[s]; i++) {
            uint16_t entry = *entries++;
            int64_t row = entry & 0x7fff;
            if (row <= before || (uint64_t)row >= height) return 1;
            before = row;
            *indices++ = (int64_t)((first + (uint64_t)row) * cols + s % cols);
            *values++ = means[2 * s + (entry >> 15)];
        }
    }
    return 0;
}
