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

/* What a slot gathers: half a cache line. */
typedef struct {
    uint64_t count, negative; /* entries; of these, negative ones. Then: where the next one goes */
    int64_t sum[2];
} wg_slot;

/* `work` is room for a wg_slot (32 bytes) a slot; `shelf` for `capacity` entries a slot, so that one pass
 * both counts and places them. If a slot overflows it, a second pass places all. With `held`, what the means do not say stays there:
 * held[index] = value - mean. */
WG_API void wg_columns_of(const int64_t *indices, const float *values, uint64_t k, uint64_t cols, uint64_t tile, uint64_t slots,
                          double factor, uint16_t *counts, float *means, uint16_t *entries, wg_slot *work, uint16_t *shelf, uint64_t capacity,
                          float *held) {
    memset(work, 0, slots * sizeof *work);
    cursor at = {0, 0, 0, 0};
    for (uint64_t i = 0; i < k; i++) {
        const uint64_t place = slot_of(&at, indices[i], cols, tile), sign = wg_bits(values[i]) >> 31;
        const uint64_t row = cols == 1 ? (uint64_t)indices[i] - at.start : at.row;
        wg_slot *slot = work + place;
        if (slot->count < capacity) shelf[place * capacity + slot->count] = (uint16_t)(row | sign << 15);
        slot->count++;
        slot->negative += sign;
        slot->sum[sign] += llrint((double)values[i] * factor);
    }
    uint64_t next = 0;
    int overflow = 0;
    for (uint64_t s = 0; s < slots; s++) {
        wg_slot *slot = work + s;
        if (slot->count <= capacity) memcpy(entries + next, shelf + s * capacity, slot->count * sizeof *entries);
        else overflow = 1;
        const uint64_t negative = slot->negative, positive = slot->count - negative;
        means[2 * s] = (float)((double)slot->sum[0] / (double)(positive ? positive : 1) / factor);
        means[2 * s + 1] = (float)((double)slot->sum[1] / (double)(negative ? negative : 1) / factor);
        counts[s] = (uint16_t)slot->count;
        next += slot->count;
        slot->count = next - slot->count;
    }
    if (!overflow && !held) return;
    cursor again = {0, 0, 0, 0};
    for (uint64_t i = 0; i < k; i++) {
        const uint64_t slot = slot_of(&again, indices[i], cols, tile), sign = wg_bits(values[i]) >> 31;
        const uint64_t row = cols == 1 ? (uint64_t)indices[i] - again.start : again.row;
        entries[work[slot].count++] = (uint16_t)(row | sign << 15);
        if (held) held[indices[i]] = values[i] - means[2 * slot + sign];
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
