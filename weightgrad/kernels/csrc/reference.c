/* Where a local model is: the reference is the weights of the global model plus a share of the residual, and the
 * distance of the local model from it is what local steps did. Product and sum are rounded one after the other, so that
 * a vector can be cut anywhere. `residual` may be NULL: nothing has stayed behind yet. */
#include "wg.h"

WG_API void wg_reference(const float *weights, const float *residual, float share, uint64_t n, float *out) {
    if (!residual) {
        for (uint64_t i = 0; i < n; i++) out[i] = weights[i];
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        const float part = share * residual[i];
        out[i] = weights[i] + part;
    }
}

WG_API void wg_distance(const float *local, const float *weights, const float *residual, float share, uint64_t n, float *out) {
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
