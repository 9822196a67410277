/* AVX2 unit of lookup.c: the table lives in one or two registers, or is gathered from. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

ALWAYS_INLINE F8 pick(I8 code, F8 low, F8 high, const float *table, const int bits) {
    if (bits == 8) return _mm256_i32gather_ps(table, code, 4);
    F8 value = _mm256_permutevar8x32_ps(low, code);
    if (bits < 4) return value;
    /* bit 3 of the code, moved to the sign, chooses the upper half of the table */
    return _mm256_blendv_ps(value, _mm256_permutevar8x32_ps(high, code), _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}

ALWAYS_INLINE void lookup(const uint8_t *codes, uint64_t n, const float *table, const int bits, const int mode, float *out) {
    float padded[16] = {0};
    memcpy(padded, table, (bits < 4 ? 1u << bits : 16u) * sizeof(float));
    const F8 low = _mm256_loadu_ps(padded), high = _mm256_loadu_ps(padded + 8);
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        I8 code[4];
        widen32(unpack32(codes + i / 8 * (size_t)bits, bits), code);
        for (size_t j = 0; j < 4; j++) put8(out + i + 8 * j, pick(code[j], low, high, table, bits), mode);
    }
    if (i < n) wg_lookup_run(codes + i / 8 * (size_t)bits, n - i, bits, table, mode == STREAM ? WG_STORE : mode, out + i);
    if (mode == STREAM) _mm_sfence();
}

ALWAYS_INLINE void lookup_mode(const uint8_t *codes, uint64_t n, const float *table, const int bits, int mode, float *out) {
    switch (how_to_put(mode, out, n)) {
    case STREAM: lookup(codes, n, table, bits, STREAM, out); return;
    case WG_STORE: lookup(codes, n, table, bits, WG_STORE, out); return;
    case WG_ADD: lookup(codes, n, table, bits, WG_ADD, out); return;
    default: lookup(codes, n, table, bits, WG_SUBTRACT, out); return;
    }
}

/* A search in four steps: the code so far says which border is next, and a register is the table of its step. */
ALWAYS_INLINE void assign(const float *x, uint64_t n, const float *borders, int count, const int bits, uint8_t *codes) {
    float step[4][8];
    for (int level = 0; level < 4; level++)
        for (int i = 0; i < 8; i++) {
            const int at = ((2 * (i & ((1 << level) - 1)) + 1) << (3 - level)) - 1;
            step[level][i] = at < count ? borders[at] : INFINITY;
        }
    const F8 first = _mm256_loadu_ps(step[0]), second = _mm256_loadu_ps(step[1]);
    const F8 third = _mm256_loadu_ps(step[2]), fourth = _mm256_loadu_ps(step[3]);
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        I8 code[4];
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS + 16), _MM_HINT_T0);
        for (size_t j = 0; j < 4; j++) { /* a true comparison is the integer -1 */
            F8 v = _mm256_loadu_ps(x + i + 8 * j);
            I8 c = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cmp_ps(v, first, _CMP_GT_OQ)), 31);
            c = _mm256_sub_epi32(_mm256_add_epi32(c, c), _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_permutevar8x32_ps(second, c), _CMP_GT_OQ)));
            c = _mm256_sub_epi32(_mm256_add_epi32(c, c), _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_permutevar8x32_ps(third, c), _CMP_GT_OQ)));
            code[j] = _mm256_sub_epi32(_mm256_add_epi32(c, c), _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_permutevar8x32_ps(fourth, c), _CMP_GT_OQ)));
        }
        pack32(bytes32(code), bits, codes + i / 8 * (size_t)bits);
    }
    if (i < n) wg_assign_run(x + i, n - i, borders, count, bits, codes + i / 8 * (size_t)bits);
}

void wg_assign_avx2(const float *x, uint64_t n, const float *borders, int count, int bits, uint8_t *codes) {
    switch (bits) {
    case 2: assign(x, n, borders, count, 2, codes); return;
    case 3: assign(x, n, borders, count, 3, codes); return;
    default: assign(x, n, borders, count, 4, codes); return;
    }
}

void wg_lookup_avx2(const uint8_t *codes, uint64_t n, int bits, const float *table, int mode, float *out) {
    switch (bits) {
    case 2: lookup_mode(codes, n, table, 2, mode, out); return;
    case 3: lookup_mode(codes, n, table, 3, mode, out); return;
    case 4: lookup_mode(codes, n, table, 4, mode, out); return;
    case 8: lookup_mode(codes, n, table, 8, mode, out); return;
    default: wg_lookup_run(codes, n, bits, table, mode, out); return;
    }
}
#endif
