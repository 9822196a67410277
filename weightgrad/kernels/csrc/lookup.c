/* Shared values: an element is the index of its value in a short table. */
#include "units.h"

/* code = how many of the ascending `borders` lie below x. */
WG_API void wg_assign(const float *x, uint64_t n, const float *borders, int count, uint8_t *codes) {
    for (uint64_t start = 0; start < n; start += 256) {
        size_t m = n - start < 256 ? n - start : 256;
        int32_t code[256] = {0};
        for (int b = 0; b < count; b++)
            for (size_t i = 0; i < m; i++) code[i] += x[start + i] > borders[b];
        for (size_t i = 0; i < m; i++) codes[start + i] = (uint8_t)code[i];
    }
}

void wg_lookup_run(const uint8_t *codes, uint64_t n, int bits, const float *table, int mode, float *out) {
    uint8_t code[256];
    for (uint64_t start = 0; start < n; start += 256) {
        size_t m = n - start < 256 ? n - start : 256;
        wg_unpack_codes(codes + start / 8 * (uint64_t)bits, m, bits, code);
        for (size_t i = 0; i < m; i++) wg_put(out + start + i, table[code[i]], mode);
    }
}

WG_API void wg_lookup(const uint8_t *codes, uint64_t n, int bits, const float *table, int mode, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_lookup_avx2(codes, n, bits, table, mode, out);
        return;
    }
#endif
    wg_lookup_run(codes, n, bits, table, mode, out);
}
