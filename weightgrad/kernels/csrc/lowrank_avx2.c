/* AVX2 unit of lowrank.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

ALWAYS_INLINE void lowrank(const float *p, const float *q, uint64_t rows, uint64_t cols, uint64_t rank, const int mode,
                           float *out) {
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < cols; j += 8) {
            F8 sum = _mm256_mul_ps(_mm256_set1_ps(p[i * rank]), _mm256_loadu_ps(q + j));
            for (uint64_t k = 1; k < rank; k++)
                sum = _mm256_add_ps(sum, _mm256_mul_ps(_mm256_set1_ps(p[i * rank + k]), _mm256_loadu_ps(q + k * cols + j)));
            put8(out + i * cols + j, sum, mode);
        }
    if (mode == STREAM) _mm_sfence();
}

void wg_lowrank_avx2(const float *p, const float *q, uint64_t rows, uint64_t cols, uint64_t rank, int mode, float *out) {
    switch (how_to_put(mode, out, rows * cols)) {
    case STREAM: lowrank(p, q, rows, cols, rank, STREAM, out); return;
    case WG_STORE: lowrank(p, q, rows, cols, rank, WG_STORE, out); return;
    case WG_ADD: lowrank(p, q, rows, cols, rank, WG_ADD, out); return;
    default: lowrank(p, q, rows, cols, rank, WG_SUBTRACT, out); return;
    }
}
#endif
