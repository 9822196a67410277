/* The loops of reference.c, which its AVX2 unit compiles once more. Product and sum are rounded one after the other. */
#ifndef WG_REFERENCE_LOOPS_H
#define WG_REFERENCE_LOOPS_H

#include "units.h"

static inline void reference_loop(const float *weights, const float *residual, float share, uint64_t n, float *out) {
    if (!residual) {
        for (uint64_t i = 0; i < n; i++) out[i] = weights[i];
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        const float part = share * residual[i];
        out[i] = weights[i] + part;
    }
}

static inline void distance_loop(const float *local, const float *weights, const float *residual, float share, uint64_t n,
                                 float *out) {
    if (!residual) {
        for (uint64_t i = 0; i < n; i++) out[i] = local[i] - weights[i];
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        const float part = share * residual[i];
        const float reference = weights[i] + part;
        out[i] = local[i] - reference;
    }
}

/* out = residual + (local - out); returns the bits of the largest magnitude of it. */
static inline uint32_t advance_loop(const float *local, const float *residual, uint64_t n, float *out) {
    uint32_t top = 0;
    for (uint64_t i = 0; i < n; i++) {
        const float fresh = local[i] - out[i];
        out[i] = residual[i] + fresh;
        const uint32_t size = wg_bits(out[i]) & 0x7FFFFFFFu;
        top = size > top ? size : top;
    }
    return top;
}

static inline void difference_loop(const float *local, uint64_t n, float *out) {
    for (uint64_t i = 0; i < n; i++) out[i] = local[i] - out[i];
}

#endif
