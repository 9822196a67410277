/* AVX-512 unit of bucket.c: encodes 64 elements at a time in four vectors, with a residual 32 in two, the rest through the
 * portable run. Decoding waits for memory, so the AVX2 unit does it. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "bucket_lanes.h"
#include "lanes512.h"

#define AHEAD 2048 /* floats, in a pass that only reads: with a residual PREFETCH_FLOATS are better */

ALWAYS_INLINE F16 load_sum16(const float *x, const float *residual) {
    F16 h = _mm512_loadu_ps(x);
    return residual ? _mm512_add_ps(h, _mm512_loadu_ps(residual)) : h;
}

/* Cut to +-limit, where h is finite: the smaller magnitude (2), with the sign of h (0). */
ALWAYS_INLINE F16 cut16(F16 h, F16 limit, const int clips) { return clips ? _mm512_range_ps(h, limit, 2) : h; }

ALWAYS_INLINE uint32_t max_norm(const float *x, const float *residual, size_t m) {
    I16 top[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = 0;
    for (; i + 32 <= m; i += 32)
        for (size_t j = 0; j < 2; j++) {
            const size_t at = i + 16 * j;
            _mm_prefetch((const char *)(x + at + (residual ? PREFETCH_FLOATS : AHEAD)), _MM_HINT_T0);
            if (residual) _mm_prefetch((const char *)(residual + at + PREFETCH_FLOATS), _MM_HINT_T0);
            top[j] = _mm512_max_epu32(top[j], magnitude16(load_sum16(x + at, residual ? residual + at : NULL)));
        }
    uint32_t result = top16(_mm512_max_epu32(top[0], top[1]));
    for (; i < m; i++) {
        uint32_t u = wg_magnitude(residual ? x[i] + residual[i] : x[i]);
        result = u > result ? u : result;
    }
    return result;
}

/* The squares of eight elements are a row; eight rows are a group, and two groups are summed side by side. */
ALWAYS_INLINE __m512d squares(const float *x, const float *residual, size_t i, F8 cut, const int clips) {
    const __m512d h = _mm512_cvtps_pd(cut8(load_sum(x + i, residual ? residual + i : NULL), cut, clips));
    return _mm512_mul_pd(h, h);
}

ALWAYS_INLINE float l2_norm(const float *x, const float *residual, size_t m, float limit, const int clips) {
    const F8 cut = _mm256_set1_ps(limit);
    __m512d sum = _mm512_setzero_pd();
    double lane[8], rest[8] = {0};
    size_t i = 0;
    for (; i + 128 <= m; i += 128) {
        __m512d a = _mm512_setzero_pd(), b = a;
        for (size_t r = 0; r < 64; r += 8) {
            a = _mm512_add_pd(a, squares(x, residual, i + r, cut, clips));
            b = _mm512_add_pd(b, squares(x, residual, i + 64 + r, cut, clips));
        }
        sum = _mm512_add_pd(_mm512_add_pd(sum, a), b);
    }
    if (i + 64 <= m) {
        __m512d a = _mm512_setzero_pd();
        for (size_t r = 0; r < 64; r += 8) a = _mm512_add_pd(a, squares(x, residual, i + r, cut, clips));
        sum = _mm512_add_pd(sum, a);
        i += 64;
    }
    _mm512_storeu_pd(lane, sum);
    if (i < m) { /* the last, short group */
        for (size_t k = i; k < m; k++) {
            double h = residual ? x[k] + residual[k] : wg_clamp(x[k], limit);
            rest[k & 7] += h * h;
        }
        for (int k = 0; k < 8; k++) lane[k] += rest[k];
    }
    for (int half = 4; half; half /= 2)
        for (int k = 0; k < half; k++) lane[k] += lane[k + half];
    return (float)sqrt(lane[0]);
}

/* Noise of 32 elements in order: a hash serves two elements that lie eight apart, so sixteen hashes hold the first half
 * of the noise of both vectors in their lower eight lanes and the second half in the upper ones. The keys are xored with
 * their own shifts, which wg_noise does to their sum with the counter. */
typedef struct {
    I16 counter, k0, k1;
} noise16;

#define XOR3 0x96    /* a ^ b ^ c */
#define XOR_AND 0x28 /* (a ^ b) & c */

ALWAYS_INLINE noise16 noise16_at(uint64_t key, uint64_t index) {
    const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    const I16 lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    noise16 s = {_mm512_add_epi32(same16((uint32_t)((index >> 4) << 3)), lanes), same16(low ^ low >> 16), same16(high ^ high >> 15)};
    return s;
}

ALWAYS_INLINE void noise16_next(noise16 *s, I16 out[2]) {
    const I16 first = _mm512_srli_epi32(s->counter, 16);
    I16 x = _mm512_mullo_epi32(_mm512_ternarylogic_epi32(s->counter, first, s->k0, XOR3), same16(0x7feb352du));
    x = _mm512_mullo_epi32(_mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), s->k1, XOR3), same16(0x846ca68bu));
    s->counter = _mm512_add_epi32(s->counter, same16(16));
    const I16 high = _mm512_srli_epi32(x, 16), low = _mm512_ternarylogic_epi32(x, high, same16(0xffffu), XOR_AND);
    out[0] = _mm512_shuffle_i64x2(low, high, 0x44);
    out[1] = _mm512_shuffle_i64x2(low, high, 0xee);
}

/* Codes of sixteen elements, in the upper half of each lane; the error goes to the residual. */
typedef struct {
    F16 cut, inverse, scale, limit, negative;
    I16 levels, offset;
} constants;

ALWAYS_INLINE I16 code16(const float *x, float *residual, const constants *c, I16 noise, const int given, const int clips) {
    const F16 h = cut16(load_sum16(x, residual), c->cut, clips);
    F16 y = _mm512_mul_ps(h, c->inverse);
    if (given) y = _mm512_max_ps(_mm512_min_ps(y, c->limit), c->negative);
    const I16 fixed = _mm512_add_epi32(_mm512_cvtps_epi32(y), c->offset), code = _mm512_srli_epi32(_mm512_add_epi32(fixed, noise), 16);
    if (residual) {
        const F16 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(code, c->levels)), c->scale);
        _mm512_storeu_ps(residual, _mm512_sub_ps(h, value));
    }
    return code;
}

/* 64 codes, sixteen a vector -> 8*bits bytes. */
ALWAYS_INLINE void pack64(const I16 v[4], const int bits, uint8_t *out) {
    const I16 lanes = _mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]));
    const I16 order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I16 codes = _mm512_permutexvar_epi32(order, lanes);
    if (bits == 8) {
        _mm512_storeu_si512(out, codes);
    } else if (bits == 3) {
        pack32(_mm512_castsi512_si256(codes), bits, out);
        pack32(_mm512_extracti64x4_epi64(codes, 1), bits, out + 12);
    } else {
        const I16 pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16((short)(1 | 1 << (bits + 8))));
        if (bits == 4) _mm256_storeu_si256((I8 *)out, _mm512_cvtepi16_epi8(pairs));
        else _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(_mm512_madd_epi16(pairs, same16(1u | 1u << 20))));
    }
}

ALWAYS_INLINE void encode_run(const float *x, float *residual, size_t m, const wg_quantizer *q, wg_ruler ruler,
                              uint64_t index, uint8_t *codes, const int bits, const int stochastic, const int given,
                              const int clips) {
    const F16 limit = _mm512_set1_ps((float)(q->levels * 65536));
    const constants c = {_mm512_set1_ps(q->limit), _mm512_set1_ps(ruler.inverse), _mm512_set1_ps(ruler.scale), limit,
                         _mm512_sub_ps(_mm512_setzero_ps(), limit), same16((uint32_t)q->levels), same16((uint32_t)q->levels << 16)};
    I16 noise[4] = {same16(0x8000), same16(0x8000), same16(0x8000), same16(0x8000)}, code[4];
    noise16 source = noise16_at(q->key, index);
    size_t i = 0;
    for (; !residual && i + 64 <= m; i += 64) {
        if (stochastic) noise16_next(&source, noise), noise16_next(&source, noise + 2);
        for (size_t j = 0; j < 4; j++) {
            const size_t at = i + 16 * j;
            if (clips) _mm_prefetch((const char *)(x + at + AHEAD), _MM_HINT_T0); /* cut_norm has not looked at all */
            code[j] = code16(x + at, NULL, &c, noise[j], given, clips);
        }
        pack64(code, bits, codes + i / 8 * (size_t)bits);
    }
    for (; i + 32 <= m; i += 32) {
        if (stochastic) noise16_next(&source, noise);
        for (size_t j = 0; j < 2; j++)
            code[j] = code16(x + i + 16 * j, residual ? residual + i + 16 * j : NULL, &c, noise[j], given, clips);
        pack32(_mm256_set_m128i(_mm512_cvtepi32_epi8(code[1]), _mm512_cvtepi32_epi8(code[0])), bits, codes + i / 8 * (size_t)bits);
    }
    if (i < m) wg_quantize_run(x + i, residual ? residual + i : NULL, m - i, q, ruler, index + i, codes + i / 8 * (size_t)bits);
}

#include "bucket_loops.h"

uint64_t wg_quantize_avx512(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales) {
    return quantize_in(x, residual, n, q, codes, scales);
}
#endif
