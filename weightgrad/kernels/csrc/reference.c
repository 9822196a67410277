/* Where a local model is: the reference is the weights of the global model plus a share of the residual plus sparse
 * pushes in flight, and the distance of the local model from it is what local steps did. Every product and sum is
 * rounded by itself, pushes one after the other, so that a vector can be cut anywhere. `residual` may be NULL: nothing
 * has stayed behind yet. */
#include "reference_loops.h"

#define STRETCH 2048u /* elements: three vectors of them fit the first-level cache */
#define PUSHES 16u    /* in flight at a time, at most */

WG_API void wg_reference(const float *weights, const float *residual, float share, uint64_t n, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_reference_avx2(weights, residual, share, n, out);
        return;
    }
#endif
    reference_loop(weights, residual, share, n, out);
}

WG_API void wg_distance(const float *local, const float *weights, const float *residual, float share, uint64_t n, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_distance_avx2(local, weights, residual, share, n, out);
        return;
    }
#endif
    distance_loop(local, weights, residual, share, n, out);
}

static void difference(const float *local, uint64_t n, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_difference_avx2(local, n, out);
        return;
    }
#endif
    difference_loop(local, n, out);
}

static uint32_t advance(const float *local, const float *residual, uint64_t n, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) return wg_advance_avx2(local, residual, n, out);
#endif
    return advance_loop(local, residual, n, out);
}

static int begin_all(wg_entry_cursor *cursors, const wg_entries *entries, uint64_t pushes) {
    if (pushes > PUSHES) return 2;
    for (uint64_t p = 0; p < pushes; p++) {
        if (!wg_entries_good(entries + p)) return 1;
        wg_entry_cursor_begin(cursors + p, entries + p);
    }
    return 0;
}

/* One pass over a piece whose local model lies in `areas`, which follow each other from element 0 on. Without `out` the
 * local model becomes the reference; otherwise `out` becomes its distance from the reference. Entries are added to a
 * stretch while it is in the cache. Returns 0; 1 if the streams of an entry are bad and 2 if there are too many, and
 * then nothing was written. */
WG_API int wg_local_model(const float *weights, const float *residual, float share, const wg_area *areas, uint64_t count,
                          const wg_entries *entries, uint64_t pushes, float *out) {
    wg_entry_cursor cursors[PUSHES];
    const int bad = begin_all(cursors, entries, pushes);
    if (bad) return bad;
    for (const wg_area *area = areas; area < areas + count; area++) {
        for (uint64_t at = area->first; at < area->last; at += STRETCH) {
            const uint64_t m = area->last - at < STRETCH ? area->last - at : STRETCH;
            float *local = area->out + (at - area->first), *here = out ? out + at : local;
            if (out && !pushes) {
                wg_distance(local, weights + at, residual ? residual + at : NULL, share, m, here);
                continue;
            }
            wg_reference(weights + at, residual ? residual + at : NULL, share, m, here);
            for (uint64_t p = 0; p < pushes; p++) wg_entry_cursor_add(cursors + p, at + m, here - at);
            if (out) difference(local, m, here);
        }
    }
    return 0;
}

/* One pass over a piece at a push: the residual takes what local steps did, which is the distance of the local model from
 * the reference with the entries of `before`. With `after`, which has as many, the local model then becomes the
 * reference that the new residual leads to. `shared` says whether the residual is part of a reference. Returns as
 * wg_local_model; `done` is how many elements it took: fewer than all before a stretch with a NaN or an Inf. */
WG_API int wg_take_update(const float *weights, float *residual, int shared, float share, const wg_area *areas, uint64_t count,
                          const wg_entries *before, const wg_entries *after, uint64_t pushes, uint64_t *done) {
    wg_entry_cursor old[PUSHES], new[PUSHES];
    int bad = begin_all(old, before, pushes);
    if (!bad && after) bad = begin_all(new, after, pushes);
    if (bad) return bad;
    float h[STRETCH];
    *done = 0;
    for (const wg_area *area = areas; area < areas + count; area++) {
        for (uint64_t at = area->first; at < area->last; at += STRETCH) {
            const uint64_t m = area->last - at < STRETCH ? area->last - at : STRETCH;
            float *local = area->out + (at - area->first);
            wg_reference(weights + at, shared ? residual + at : NULL, share, m, h);
            for (uint64_t p = 0; p < pushes; p++) wg_entry_cursor_add(old + p, at + m, h - at);
            if (advance(local, residual + at, m, h) >= WG_INFINITY) return 0;
            memcpy(residual + at, h, m * sizeof *h);
            if (after) {
                wg_reference(weights + at, shared ? h : NULL, share, m, local);
                for (uint64_t p = 0; p < pushes; p++) wg_entry_cursor_add(new + p, at + m, local - at);
            }
            *done = at + m;
        }
    }
    return 0;
}

/* Adds what the entries of a list have at these ascending places. */
static void add_at(wg_entry_cursor *c, const uint64_t *places, uint64_t m, float *out) {
    for (uint64_t i = 0; i < m && wg_entry_cursor_more(c); i++) {
        const int64_t place = (int64_t)(places[i] - c->entries->first);
        while (wg_entry_cursor_more(c) && c->indices[c->next] < place) c->next++;
        if (c->next < c->have && c->indices[c->next] == place) out[i] += c->values[c->next];
    }
}

/* The local model at the entries of the last of `pushes` lists becomes the reference; the others are added there, in
 * their order, and then the last. What these entries left in the residual is in it. Everything that a run of entries
 * touches is fetched ahead: on its own, each entry would wait for three cache lines. Returns as wg_local_model. */
WG_API int wg_place_entries(const float *weights, const float *residual, float share, const wg_area *areas, uint64_t count,
                            const wg_entries *entries, uint64_t pushes) {
    wg_entry_cursor cursors[PUSHES], *last = cursors + pushes - 1;
    const int bad = begin_all(cursors, entries, pushes);
    if (bad) return bad;
    const wg_area *area = areas, *end = areas + count;
    for (; wg_entry_cursor_more(last); last->next = last->have) {
        uint64_t places[WG_GAP_RUN], m = 0;
        float *targets[WG_GAP_RUN], own[WG_GAP_RUN], left[WG_GAP_RUN], h[WG_GAP_RUN];
        for (; m < last->have; m++) {
            const uint64_t at = places[m] = last->entries->first + (uint64_t)last->indices[m];
            while (area < end && at >= area->last) area++;
            if (area == end) break;
            targets[m] = area->out + (at - area->first);
            __builtin_prefetch(targets[m], 1);
            __builtin_prefetch(weights + at);
            if (residual) __builtin_prefetch(residual + at);
        }
        for (uint64_t i = 0; i < m; i++) own[i] = weights[places[i]];
        for (uint64_t i = 0; residual && i < m; i++) left[i] = residual[places[i]];
        wg_reference(own, residual ? left : NULL, share, m, h);
        for (wg_entry_cursor *c = cursors; c < last; c++) add_at(c, places, m, h);
        for (uint64_t i = 0; i < m; i++) *targets[i] = h[i] + last->values[i];
    }
    return 0;
}
