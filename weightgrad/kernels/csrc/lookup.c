/* Shared values: an element is the index of its value in a short table. */
#include "units.h"

/* code = how many of the ascending `borders` lie below x, packed in `bits` bits. */
void wg_assign_run(const float *x, uint64_t n, const float *borders, int count, int bits, uint8_t *codes) {
    for (uint64_t start = 0; start < n; start += 256) {
        size_t m = n - start < 256 ? n - start : 256;
        int32_t code[256] = {0};
        uint8_t narrow[256];
        for (int b = 0; b < count; b++)
            for (size_t i = 0; i < m; i++) code[i] += x[start + i] > borders[b];
        for (size_t i = 0; i < m; i++) narrow[i] = (uint8_t)code[i];
        wg_pack_codes(narrow, m, bits, codes + start / 8 * (uint64_t)bits);
    }
}

WG_API void wg_assign(const float *x, uint64_t n, const float *borders, int count, int bits, uint8_t *codes) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() && (bits == 2 || bits == 3 || bits == 4) && count <= 15) {
        wg_assign_avx2(x, n, borders, count, bits, codes);
        return;
    }
#endif
    wg_assign_run(x, n, borders, count, bits, codes);
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
