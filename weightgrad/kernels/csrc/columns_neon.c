/* NEON unit of columns.c: sign bits. */
#include "units.h"

#if WG_HAS_NEON_UNIT
#include "lanes_neon.h"

void wg_signs_neon(const float *x, uint64_t n, uint8_t *bits) {
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) bits[i / 8] = signs8(vld1q_f32(x + i), vld1q_f32(x + i + 4));
    if (i < n) wg_signs_run(x + i, n - i, bits + i / 8);
}
#endif
