/* AVX2 unit of ternary.c: groups of 5 x 32 trits. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

/* digit[0] + 3*(digit[1] + 3*(digit[2] + ..)), 32 bytes at a time */
ALWAYS_INLINE I8 horner3(const I8 digit[5]) {
    I8 v = digit[4];
    for (int k = 3; k >= 0; k--) v = _mm256_add_epi8(_mm256_add_epi8(v, _mm256_add_epi8(v, v)), digit[k]);
    return v;
}

ALWAYS_INLINE void encode(const float *x, float *residual, uint64_t n, float scale, wg_ruler ruler, uint64_t key,
                          uint64_t first, uint8_t *codes) {
    const F8 inverse = _mm256_set1_ps(ruler.inverse), limit = _mm256_set1_ps(scale), negative = _mm256_set1_ps(-scale);
    const I8 one = same(1), offset = same(1u << 16);
    noise8 source = noise_at(key, first);
    uint64_t i = 0;
    for (; i + WG_TRIT_GROUP <= n; i += WG_TRIT_GROUP) {
        I8 digit[5];
        for (size_t k = 0; k < 5; k++) {
            const uint64_t row = i + 32 * k;
            I8 noise[4], code[4];
            _mm_prefetch((const char *)(x + row + PREFETCH_FLOATS), _MM_HINT_T0);
            _mm_prefetch((const char *)(x + row + PREFETCH_FLOATS + 16), _MM_HINT_T0);
            noise32(&source, noise);
            for (size_t j = 0; j < 4; j++) {
                const uint64_t at = row + 8 * j;
                F8 h = _mm256_loadu_ps(x + at);
                if (residual) h = _mm256_add_ps(h, _mm256_loadu_ps(residual + at));
                F8 y = _mm256_mul_ps(_mm256_max_ps(_mm256_min_ps(h, limit), negative), inverse);
                I8 fixed = _mm256_add_epi32(_mm256_cvtps_epi32(y), offset);
                code[j] = _mm256_srli_epi32(_mm256_add_epi32(fixed, noise[j]), 16);
                if (residual) _mm256_storeu_ps(residual + at, _mm256_sub_ps(h, value8(code[j], one, limit)));
            }
            digit[k] = bytes32(code);
        }
        _mm256_storeu_si256((I8 *)(codes + i / 5), horner3(digit));
    }
    if (i < n) wg_ternary_run(x + i, residual ? residual + i : NULL, n - i, scale, ruler, key, first + i, codes + i / 5);
}

void wg_ternary_avx2(const float *x, float *residual, uint64_t n, float scale, wg_ruler ruler, uint64_t key, uint64_t first,
                     uint8_t *codes) {
    if (residual) encode(x, residual, n, scale, ruler, key, first, codes);
    else encode(x, NULL, n, scale, ruler, key, first, codes);
}

ALWAYS_INLINE void decode(const uint8_t *codes, uint64_t n, float scale, const int mode, float *out) {
    const F8 s = _mm256_set1_ps(scale);
    const I8 one = same(1), zero = _mm256_setzero_si256(), third = _mm256_set1_epi16(21846);
    uint64_t i = 0;
    for (; i + WG_TRIT_GROUP <= n; i += WG_TRIT_GROUP) {
        I8 v = _mm256_loadu_si256((const I8 *)(codes + i / 5));
        I8 half[2] = {_mm256_unpacklo_epi8(v, zero), _mm256_unpackhi_epi8(v, zero)};
        for (size_t k = 0; k < 5; k++) {
            I8 digit[2];
            for (int h = 0; h < 2; h++) { /* exact division of 16-bit lanes by three */
                I8 quotient = _mm256_mulhi_epu16(half[h], third);
                digit[h] = _mm256_sub_epi16(half[h], _mm256_add_epi16(quotient, _mm256_add_epi16(quotient, quotient)));
                half[h] = quotient;
            }
            I8 wide[4];
            widen32(_mm256_packus_epi16(digit[0], digit[1]), wide);
            for (size_t j = 0; j < 4; j++) put8(out + i + 32 * k + 8 * j, value8(wide[j], one, s), mode);
        }
    }
    if (i < n) wg_ternary_decode_run(codes + i / 5, n - i, scale, mode == STREAM ? WG_STORE : mode, out + i);
    if (mode == STREAM) _mm_sfence();
}

void wg_ternary_decode_avx2(const uint8_t *codes, uint64_t n, float scale, int mode, float *out) {
    switch (how_to_put(mode, out, n)) {
    case STREAM: decode(codes, n, scale, STREAM, out); return;
    case WG_STORE: decode(codes, n, scale, WG_STORE, out); return;
    case WG_ADD: decode(codes, n, scale, WG_ADD, out); return;
    default: decode(codes, n, scale, WG_SUBTRACT, out); return;
    }
}

/* What two sums are made of: entries above a threshold, or levels on a ruler. */
typedef struct {
    F8 above, inverse, limit;
    I8 levels, offset;
} summed;

/* Of eight elements, what each adds to the two sums. */
ALWAYS_INLINE void add_to(F8 w, F8 weight, summed s, const int by_level, F8 *first, F8 *second) {
    if (!by_level) {
        F8 a = _mm256_castsi256_ps(magnitude8(w));
        *second = _mm256_and_ps(_mm256_cmp_ps(a, s.above, _CMP_GT_OQ), weight);
        *first = _mm256_mul_ps(*second, a);
        return;
    }
    F8 y = _mm256_mul_ps(w, s.inverse);
    y = _mm256_max_ps(_mm256_min_ps(y, s.limit), _mm256_sub_ps(_mm256_setzero_ps(), s.limit));
    I8 code = _mm256_srli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(y), s.offset), 16);
    F8 b = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, s.levels)), db = _mm256_mul_ps(weight, b);
    *first = _mm256_mul_ps(db, w);
    *second = _mm256_mul_ps(db, b);
}

/* A whole block, sixteen lanes at a time. */
ALWAYS_INLINE I8 block_sums(const float *w, const float *d, summed how, const int by_level, I8 top, double *partials) {
    const F8 ones = _mm256_set1_ps(1.0f);
    __m256d lane[2][4];
    for (int s = 0; s < 2; s++)
        for (int j = 0; j < 4; j++) lane[s][j] = _mm256_setzero_pd();
    for (size_t c = 0; c < WG_LANES; c += 16) {
        __m256d acc[2][4];
        for (int s = 0; s < 2; s++)
            for (int j = 0; j < 4; j++) acc[s][j] = _mm256_setzero_pd();
        for (size_t r = 0; r < WG_BLOCK; r += WG_LANES) {
            _mm_prefetch((const char *)(w + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            if (d) _mm_prefetch((const char *)(d + WG_BLOCK + c * 16 + r / 16), _MM_HINT_T0);
            for (size_t j = 0; j < 2; j++) {
                const size_t at = r + c + 8 * j;
                F8 own = _mm256_loadu_ps(w + at), all = d ? _mm256_loadu_ps(d + at) : ones, product, weight;
                top = _mm256_max_epu32(top, _mm256_max_epu32(magnitude8(own), _mm256_castps_si256(all)));
                add_to(own, all, how, by_level, &product, &weight);
                acc[0][2 * j] = _mm256_add_pd(acc[0][2 * j], _mm256_cvtps_pd(_mm256_castps256_ps128(product)));
                acc[0][2 * j + 1] = _mm256_add_pd(acc[0][2 * j + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(product, 1)));
                acc[1][2 * j] = _mm256_add_pd(acc[1][2 * j], _mm256_cvtps_pd(_mm256_castps256_ps128(weight)));
                acc[1][2 * j + 1] = _mm256_add_pd(acc[1][2 * j + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(weight, 1)));
            }
        }
        for (int s = 0; s < 2; s++)
            for (int j = 0; j < 4; j++) lane[s][j] = _mm256_add_pd(lane[s][j], acc[s][j]);
    }
    for (int s = 0; s < 2; s++) {
        double stored[16];
        for (int j = 0; j < 4; j++) _mm256_storeu_pd(stored + 4 * j, lane[s][j]);
        wg_fold_lanes(stored, partials + s);
    }
    return top;
}

ALWAYS_INLINE uint32_t kept_sums(const float *w, const float *d, uint64_t n, float threshold, double *partials) {
    summed how = {.above = _mm256_set1_ps(threshold)};
    I8 top = _mm256_setzero_si256();
    uint64_t i = 0;
    for (; i + WG_BLOCK <= n; i += WG_BLOCK, partials += 2) top = block_sums(w + i, d ? d + i : NULL, how, 0, top, partials);
    const uint32_t body = top8(top);
    if (i == n) return body;
    const uint32_t rest = wg_ternary_sums_run(w + i, d ? d + i : NULL, n - i, threshold, partials);
    return body > rest ? body : rest;
}

ALWAYS_INLINE uint32_t level_sums(const float *w, const float *d, uint64_t n, wg_ruler ruler, int levels, double *partials) {
    summed how = {
        .inverse = _mm256_set1_ps(ruler.inverse),
        .limit = _mm256_set1_ps((float)(levels * 65536)),
        .levels = same((uint32_t)levels),
        .offset = same(((uint32_t)levels << 16) + 0x8000u), /* rounded to nearest */
    };
    I8 top = _mm256_setzero_si256();
    uint64_t i = 0;
    for (; i + WG_BLOCK <= n; i += WG_BLOCK, partials += 2) top = block_sums(w + i, d ? d + i : NULL, how, 1, top, partials);
    const uint32_t body = top8(top);
    if (i == n) return body;
    const uint32_t rest = wg_level_sums_run(w + i, d ? d + i : NULL, n - i, ruler, levels, partials);
    return body > rest ? body : rest;
}

uint32_t wg_level_sums_avx2(const float *w, const float *d, uint64_t n, wg_ruler ruler, int levels, double *partials) {
    return d ? level_sums(w, d, n, ruler, levels, partials) : level_sums(w, NULL, n, ruler, levels, partials);
}

uint32_t wg_ternary_sums_avx2(const float *w, const float *d, uint64_t n, float threshold, double *partials) {
    return d ? kept_sums(w, d, n, threshold, partials) : kept_sums(w, NULL, n, threshold, partials);
}

void wg_ternary_threshold_avx2(const float *w, uint64_t n, float threshold, uint8_t *codes) {
    const F8 above = _mm256_set1_ps(threshold), below = _mm256_set1_ps(-threshold);
    const I8 one = same(1);
    uint64_t i = 0;
    for (; i + WG_TRIT_GROUP <= n; i += WG_TRIT_GROUP) {
        I8 digit[5];
        for (size_t k = 0; k < 5; k++) {
            I8 code[4];
            _mm_prefetch((const char *)(w + i + 32 * k + PREFETCH_FLOATS), _MM_HINT_T0);
            _mm_prefetch((const char *)(w + i + 32 * k + PREFETCH_FLOATS + 16), _MM_HINT_T0);
            for (size_t j = 0; j < 4; j++) { /* a true comparison is the integer -1 */
                F8 v = _mm256_loadu_ps(w + i + 32 * k + 8 * j);
                I8 up = _mm256_castps_si256(_mm256_cmp_ps(v, above, _CMP_GT_OQ));
                I8 down = _mm256_castps_si256(_mm256_cmp_ps(v, below, _CMP_LT_OQ));
                code[j] = _mm256_add_epi32(_mm256_sub_epi32(one, up), down);
            }
            digit[k] = bytes32(code);
        }
        _mm256_storeu_si256((I8 *)(codes + i / 5), horner3(digit));
    }
    if (i < n) wg_ternary_threshold_run(w + i, n - i, threshold, codes + i / 5);
}
#endif
