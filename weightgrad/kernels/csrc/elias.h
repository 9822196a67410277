/* What the portable unit and the AVX2 unit of elias.c share: how the codes of a bucket are written. */
#ifndef WG_ELIAS_H
#define WG_ELIAS_H

#include "scalar.h"

/* What is written for a level: its sign and gamma(size), at most 14 bits. */
typedef struct {
    uint16_t value[256];
    uint8_t bits[256];
} wg_elias_table;

typedef struct {
    uint8_t *out;
    uint64_t word;
    int held; /* bits in `word`, fewer than eight between two calls */
} wg_elias_writer;

/* gamma(gap), at most 29 bits, and the level behind it, in one store of eight bytes: the room is larger than the stream. */
static inline void wg_elias_put(wg_elias_writer *w, uint32_t gap, uint8_t code, const wg_elias_table *t) {
    const int extra = 31 - __builtin_clz(gap), before = 2 * extra + 1;
    const uint64_t gamma = (1ull | (uint64_t)(gap & ((1u << extra) - 1u)) << 1) << extra;
    w->word |= (gamma | (uint64_t)t->value[code] << before) << w->held;
    w->held += before + t->bits[code];
    memcpy(w->out, &w->word, 8);
    w->out += w->held / 8;
    w->word >>= w->held & ~7;
    w->held &= 7;
}

static inline uint8_t *wg_elias_end(wg_elias_writer *w) {
    if (w->held) *w->out++ = (uint8_t)w->word;
    return w->out;
}

/* One bucket; returns the end of its stream. */
uint8_t *wg_elias_bucket_avx2(const uint8_t *codes, uint64_t m, int levels, const wg_elias_table *t, uint8_t *out);

#endif
