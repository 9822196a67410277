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

/* One pass over a piece whose local model lies in `areas`, which follow each other from element 0 on. Without `out` the
 * local model becomes the reference; otherwise `out` becomes its distance from the reference. Entries are added to a
 * stretch while it is in the cache. Returns 0; 1 if the streams of an entry are bad and 2 if there are too many, and
 * then nothing was written. */
WG_API int wg_local_model(const float *weights, const float *residual, float share, const wg_area *areas, uint64_t count,
                          const wg_entries *entries, uint64_t pushes, float *out) {
    wg_entry_cursor cursors[PUSHES];
    if (pushes > PUSHES) return 2;
    for (uint64_t p = 0; p < pushes; p++) {
        if (!wg_entries_good(entries + p)) return 1;
        wg_entry_cursor_begin(cursors + p, entries + p);
    }
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
