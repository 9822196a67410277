/* A matrix from two thin ones: out[i][j] = sum over k of p[i][k] * q[k][j], each product rounded
 * and added in the order of k, so that every machine gets the same floats. */
#include "units.h"

static void lowrank(const float *p, const float *q, uint64_t rows, uint64_t cols, uint64_t rank, int mode, float *out) {
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < cols; j++) {
            float sum = p[i * rank] * q[j];
            for (uint64_t k = 1; k < rank; k++) sum += p[i * rank + k] * q[k * cols + j];
            wg_put(out + i * cols + j, sum, mode);
        }
}

/* p is rows x rank, q is rank x cols. */
WG_API void wg_lowrank(const float *p, const float *q, uint64_t rows, uint64_t cols, uint64_t rank, int mode, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() && cols % 8 == 0) {
        wg_lowrank_avx2(p, q, rows, cols, rank, mode, out);
        return;
    }
#endif
    lowrank(p, q, rows, cols, rank, mode, out);
}
