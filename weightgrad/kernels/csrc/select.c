/* Selection of the entries beyond two thresholds, with what error feedback and
 * momentum correction need done in the same pass over memory.
 *
 *   velocity given:  velocity = momentum*velocity + x;  h = held + velocity
 *   x given:         h = held + x
 *   neither:         h = held
 *
 * `held` becomes h. Indices and values of the entries with h >= above or
 * h <= below are listed in order, as many as fit; the return value counts all.
 * A block of WG_SCAN_BLOCK elements with a NaN or Inf in h stops the pass: `done` says
 * where, and nothing of that block has been written.
 */
#include "units.h"

static float next(const float *x, const float *held, const float *velocity, float momentum, uint64_t i, float *speed) {
    if (!x) return held[i];
    *speed = velocity ? momentum * velocity[i] + x[i] : x[i];
    return held[i] + *speed;
}

static int is_finite(const float *x, const float *held, const float *velocity, float momentum, size_t m) {
    uint32_t top = 0;
    float speed;
    for (size_t i = 0; i < m; i++) {
        uint32_t u = wg_magnitude(next(x, held, velocity, momentum, i, &speed));
        top = u > top ? u : top;
    }
    return top < WG_INFINITY;
}

static uint64_t scan_block(const float *x, float *held, float *velocity, size_t m, const wg_selection *s, uint64_t first,
                           uint64_t count, int64_t *indices, float *values) {
    for (size_t i = 0; i < m; i++) {
        float speed = 0.0f, h = next(x, held, velocity, s->momentum, i, &speed);
        if (x) held[i] = h;
        if (velocity) velocity[i] = speed;
        if (h >= s->above || h <= s->below) {
            if (count < s->capacity) {
                indices[count] = (int64_t)(first + i);
                values[count] = h;
            }
            count++;
        }
    }
    return count;
}

/* From *done to n. */
uint64_t wg_scan_rest(const float *x, float *held, float *velocity, uint64_t n, const wg_selection *s, uint64_t count,
                      int64_t *indices, float *values, uint64_t *done) {
    while (*done < n) {
        uint64_t i = *done;
        size_t m = n - i < WG_SCAN_BLOCK ? n - i : WG_SCAN_BLOCK;
        const float *block = x ? x + i : NULL;
        float *speed = velocity ? velocity + i : NULL;
        if (!is_finite(block, held + i, speed, s->momentum, m)) break;
        count = scan_block(block, held + i, speed, m, s, s->first + i, count, indices, values);
        *done = i + m;
    }
    return count;
}

WG_API uint64_t wg_scan(const float *x, float *held, float *velocity, uint64_t n, const wg_selection *s, int64_t *indices,
                        float *values, uint64_t *done) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) return wg_scan_avx2(x, held, velocity, n, s, indices, values, done);
#endif
    *done = 0;
    return wg_scan_rest(x, held, velocity, n, s, 0, indices, values, done);
}

/* The k-th largest magnitude, by its digits: 11, 11 and 9 bits. */
static uint32_t kth_largest(const float *values, uint64_t n, uint64_t k) {
    static const int shifts[] = {20, 9, 0}, widths[] = {11, 11, 9};
    uint32_t prefix = 0, mask = 0;
    for (int step = 0; step < 3; step++) {
        uint32_t histogram[2048] = {0}, digits = (1u << widths[step]) - 1u, digit = digits;
        for (uint64_t i = 0; i < n; i++) {
            uint32_t u = wg_magnitude(values[i]);
            if ((u & mask) == prefix) histogram[u >> shifts[step] & digits]++;
        }
        for (; digit && histogram[digit] < k; digit--) k -= histogram[digit];
        prefix |= digit << shifts[step];
        mask |= digits << shifts[step];
    }
    return prefix;
}

/* Keep the k largest magnitudes of a list, in order; of equals, the first. k <= n. */
WG_API void wg_keep_largest(int64_t *indices, float *values, uint64_t n, uint64_t k) {
    if (k == 0 || k >= n) return;
    uint32_t limit = kth_largest(values, n, k);
    uint64_t larger = 0, kept = 0;
    for (uint64_t i = 0; i < n; i++) larger += wg_magnitude(values[i]) > limit;
    uint64_t equals = k - larger;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t u = wg_magnitude(values[i]);
        if (u < limit || (u == limit && equals-- == 0)) {
            equals += u == limit;
            continue;
        }
        indices[kept] = indices[i];
        values[kept++] = values[i];
    }
}

/* out[index] = value, or + or -; with no values, zeros are stored. */
WG_API void wg_scatter(const int64_t *indices, const float *values, uint64_t k, int mode, float *out) {
    for (uint64_t i = 0; i < k; i++) {
        if (i + 16 < k) __builtin_prefetch(out + indices[i + 16], 1);
        if (values) wg_put(out + indices[i], values[i], mode);
        else out[indices[i]] = 0.0f;
    }
}
