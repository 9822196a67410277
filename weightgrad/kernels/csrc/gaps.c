/* Sorted indices from the streams that bits.c writes.
 *
 * The i-th index is the sum of the first i + 1 gaps, plus i. The unary parts of those gaps are the zeros before the i-th
 * one of the unary stream: so ones are looked for a word or a byte at a time, and an index needs nothing of the one before
 * it but the sum of the low bits.
 */
#include "units.h"

/* The eight bytes from `byte` on; zeros behind the end. */
static inline uint64_t word_at(const uint8_t *stream, uint64_t bytes, uint64_t byte) {
    uint64_t word = 0;
    if (byte + 8 <= bytes) memcpy(&word, stream + byte, 8);
    else if (byte < bytes) memcpy(&word, stream + byte, bytes - byte);
    return word;
}

static inline uint64_t low_at(const wg_gaps *g, uint64_t i) {
    const uint64_t bit = i * (uint64_t)g->width, mask = g->width ? ~0ull >> (64 - g->width) : 0;
    return word_at(g->low, g->low_bytes, bit / 8) >> bit % 8 & mask;
}

static void begin(wg_gaps *g, const wg_gap_streams *s) {
    g->low = s->low, g->unary = s->unary, g->unary_bytes = s->unary_bytes, g->k = s->k, g->width = s->width, g->rice = s->rice;
    g->low_bytes = (s->k * (uint64_t)s->width + 7) / 8;
    g->at = g->sum = g->byte = g->have = g->word = 0;
}

static int narrow(const wg_gap_streams *s) {
#if WG_HAS_AVX2_UNIT
    return wg_isa() && s->width <= WG_NARROW_GAP && s->n < 1u << 31;
#else
    (void)s;
    return 0;
#endif
}

static unsigned __int128 low_sum(const wg_gaps *g) {
    unsigned __int128 total = 0;
    for (uint64_t i = 0; i < g->k;) { /* 64 of at most 56 bits: no overflow */
        uint64_t sum = 0;
        for (const uint64_t end = i + 64; i < g->k && i < end; i++) sum += low_at(g, i);
        total += sum;
    }
    return total;
}

/* Whether the streams hold exactly k ascending indices below n, and nothing behind them. No index is computed: gaps
 * are not negative, so the last one tells, and that is a sum. */
static int good(const wg_gap_streams *s) {
    wg_gaps g;
    begin(&g, s);
    const uint64_t used = s->k * (uint64_t)s->width;
    if (used % 8 && s->low[used / 8] >> used % 8) return 0;
    uint64_t ones = 0, end = 0; /* end: one past the last one */
    for (uint64_t byte = 0; byte < s->unary_bytes; byte += 8) {
        const uint64_t word = word_at(s->unary, s->unary_bytes, byte);
        ones += (uint64_t)__builtin_popcountll(word);
        if (word) end = 8 * byte + 64 - (uint64_t)__builtin_clzll(word);
    }
    if (s->rice && (ones != s->k || (end + 7) / 8 != s->unary_bytes)) return 0;
    unsigned __int128 last = s->k; /* becomes one past the last index */
    if (s->rice) last += (unsigned __int128)(end - s->k) << s->width;
#if WG_HAS_AVX2_UNIT
    if (narrow(s)) return last + wg_gaps_low_sum_avx2(&g) <= s->n;
#endif
    return last + low_sum(&g) <= s->n;
}

/* The next m indices of streams that are good. */
static void read_wide(wg_gaps *g, uint64_t m, int64_t *indices) {
    for (uint64_t i = 0; i < m; i++, g->at++) {
        g->sum += low_at(g, g->at);
        uint64_t zeros = 0;
        if (g->rice) {
            for (; !g->word; g->byte += 8) g->word = word_at(g->unary, g->unary_bytes, g->byte);
            zeros = 8 * g->byte - 64 + (uint64_t)__builtin_ctzll(g->word) - g->at;
            g->word &= g->word - 1;
        }
        indices[i] = (int64_t)((zeros << g->width) + g->sum + g->at);
    }
}

/* Returns 0, or 1 when the streams do not hold exactly k ascending indices below n. */
WG_API int wg_check_gaps(const wg_gap_streams *s) { return !good(s); }

/* The same, and the indices. */
WG_API int wg_unpack_gaps(const wg_gap_streams *s, int64_t *indices) {
    if (!good(s)) return 1;
    wg_gaps g;
    begin(&g, s);
    if (!narrow(s)) {
        read_wide(&g, s->k, indices);
        return 0;
    }
#if WG_HAS_AVX2_UNIT
    int32_t some[WG_GAP_RUN];
    for (uint64_t first = 0; first < s->k; first += WG_GAP_RUN) {
        const uint64_t m = s->k - first < WG_GAP_RUN ? s->k - first : WG_GAP_RUN;
        wg_gaps_read_avx2(&g, m, some);
        for (uint64_t i = 0; i < m; i++) indices[first + i] = some[i];
    }
#endif
    return 0;
}

/* What is written: values, or one size with the sign bits of all; each times a share. */
static void values_of(const wg_entry_values *v, uint64_t first, uint64_t m, float *out) {
    if (v->values) {
        for (uint64_t i = 0; i < m; i++) out[i] = v->values[first + i] * v->share;
        return;
    }
    const uint32_t size = wg_bits(v->size * v->share);
    for (uint64_t i = 0; i < m; i += 8) { /* a run begins on a byte, and there is room behind its end */
        const uint32_t byte = v->signs[(first + i) / 8];
        for (uint32_t j = 0; j < 8; j++) out[i + j] = wg_float(size ^ (byte & 1u << j ? 0x80000000u : 0u));
    }
}

/* Puts a run of ascending indices into the areas from `area` on; returns the area of the last. Often that is the first. */
#define PUT_RUN(name, index_type)                                                                                    \
    static const wg_area *name(const index_type *indices, const float *own, uint64_t m, int mode, const wg_area *area, \
                               const wg_area *end) {                                                                 \
        while (area < end && (uint64_t)indices[0] >= area->last) area++;                                             \
        if (area < end && (uint64_t)indices[0] >= area->first && (uint64_t)indices[m - 1] < area->last) {             \
            float *out = area->out - area->first;                                                                    \
            for (uint64_t i = 0; i < m; i++) __builtin_prefetch(out + indices[i], 1);                                \
            for (uint64_t i = 0; i < m; i++) wg_put(out + indices[i], own[i], mode);                                 \
            return area;                                                                                             \
        }                                                                                                            \
        for (uint64_t i = 0; i < m; i++) {                                                                           \
            while (area < end && (uint64_t)indices[i] >= area->last) area++;                                         \
            if (area == end) break;                                                                                  \
            if ((uint64_t)indices[i] >= area->first) wg_put(area->out + (indices[i] - area->first), own[i], mode);    \
        }                                                                                                            \
        return area;                                                                                                 \
    }
PUT_RUN(put_wide, int64_t)
#if WG_HAS_AVX2_UNIT
PUT_RUN(put_narrow, int32_t)
#endif

/* Stores, adds or subtracts at the indices that lie in one of the ascending areas, without a list of all indices.
 * Nothing is written if the streams are bad. */
WG_API int wg_scatter_gaps(const wg_gap_streams *s, const wg_entry_values *values, int mode, const wg_area *areas,
                           uint64_t count) {
    if (!good(s)) return 1;
    wg_gaps g;
    begin(&g, s);
    const int fast = narrow(s);
    const wg_area *area = areas, *end = areas + count;
    float own[WG_GAP_RUN];
    for (uint64_t first = 0; first < s->k; first += WG_GAP_RUN) {
        const uint64_t m = s->k - first < WG_GAP_RUN ? s->k - first : WG_GAP_RUN;
        values_of(values, first, m, own);
#if WG_HAS_AVX2_UNIT
        if (fast) {
            int32_t some[WG_GAP_RUN];
            wg_gaps_read_avx2(&g, m, some);
            area = put_narrow(some, own, m, mode, area, end);
            continue;
        }
#endif
        (void)fast;
        int64_t some[WG_GAP_RUN];
        read_wide(&g, m, some);
        area = put_wide(some, own, m, mode, area, end);
    }
    return 0;
}

int wg_entries_good(const wg_entries *e) { return good(&e->streams); }

void wg_entry_cursor_begin(wg_entry_cursor *c, const wg_entries *e) {
    begin(&c->gaps, &e->streams);
    c->entries = e, c->narrow = narrow(&e->streams), c->next = c->have = 0;
}

static void next_run(wg_entry_cursor *c) {
    const uint64_t first = c->gaps.at, left = c->gaps.k - first, m = left < WG_GAP_RUN ? left : WG_GAP_RUN;
    c->next = 0, c->have = m;
    if (!m) return;
    values_of(&c->entries->values, first, m, c->values);
#if WG_HAS_AVX2_UNIT
    if (c->narrow) {
        int32_t some[WG_GAP_RUN];
        wg_gaps_read_avx2(&c->gaps, m, some);
        for (uint64_t i = 0; i < m; i++) c->indices[i] = some[i];
        return;
    }
#endif
    read_wide(&c->gaps, m, c->indices);
}

int wg_entry_cursor_more(wg_entry_cursor *c) {
    if (c->next < c->have) return 1;
    if (c->gaps.at == c->gaps.k) return 0;
    next_run(c);
    return 1;
}

void wg_entry_cursor_add(wg_entry_cursor *c, uint64_t end, float *out) {
    const int64_t below = (int64_t)end - (int64_t)c->entries->first;
    float *own = out + c->entries->first;
    while (wg_entry_cursor_more(c)) {
        uint64_t i = c->next;
        for (; i < c->have && c->indices[i] < below; i++) own[c->indices[i]] += c->values[i];
        c->next = i;
        if (i < c->have) return;
    }
}
