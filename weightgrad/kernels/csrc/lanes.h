/* Shared by the AVX2 units only. */
#ifndef WG_LANES_H
#define WG_LANES_H

#include "scalar.h"

#include <immintrin.h>

typedef __m256i I8;
typedef __m256 F8;

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define PREFETCH_FLOATS 1024 /* how far ahead: 4 KB */
#define STREAM_ELEMENTS (1u << 20) /* from here on, stores bypass the cache */

ALWAYS_INLINE I8 same(uint32_t v) { return _mm256_set1_epi32((int)v); }
ALWAYS_INLINE I8 magnitude8(F8 x) { return _mm256_and_si256(_mm256_castps_si256(x), same(WG_ABS_MASK)); }

ALWAYS_INLINE uint32_t top8(I8 v) {
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(a);
}

/* Noise of sixteen elements in order: `low` for the first eight, `high` for the rest. */
typedef struct {
    I8 counter, k0, k1;
} noise8;

ALWAYS_INLINE noise8 noise_at(uint64_t key, uint64_t index) {
    I8 counter = _mm256_add_epi32(same((uint32_t)((index >> 4) << 3)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    noise8 s = {counter, same((uint32_t)key), same((uint32_t)(key >> 32))};
    return s;
}

ALWAYS_INLINE I8 noise_next(noise8 *s) {
    I8 x = _mm256_xor_si256(s->counter, s->k0);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, same(0x7feb352du));
    x = _mm256_xor_si256(x, s->k1);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, same(0x846ca68bu));
    s->counter = _mm256_add_epi32(s->counter, same(8));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

ALWAYS_INLINE void noise32(noise8 *s, I8 out[4]) {
    I8 a = noise_next(s), b = noise_next(s), low = same(0xffffu);
    out[0] = _mm256_and_si256(a, low);
    out[1] = _mm256_srli_epi32(a, 16);
    out[2] = _mm256_and_si256(b, low);
    out[3] = _mm256_srli_epi32(b, 16);
}

/* Four vectors of small integers -> 32 bytes in order. */
ALWAYS_INLINE I8 bytes32(const I8 v[4]) {
    I8 packed = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* 32 bytes in order -> four vectors of integers. */
ALWAYS_INLINE void widen32(I8 b, I8 v[4]) {
    __m128i low = _mm256_castsi256_si128(b), high = _mm256_extracti128_si256(b, 1);
    v[0] = _mm256_cvtepu8_epi32(low);
    v[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(low, 8));
    v[2] = _mm256_cvtepu8_epi32(high);
    v[3] = _mm256_cvtepu8_epi32(_mm_srli_si128(high, 8));
}

/* 4*bits bytes -> 32 codes of 2, 3, 4 or 8 bits, one a byte. */
ALWAYS_INLINE I8 unpack32(const uint8_t *in, const int bits) {
    if (bits == 8) return _mm256_loadu_si256((const I8 *)in);
    if (bits == 4) {
        I8 v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)in));
        return _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
    }
    I8 v;
    if (bits == 2) {
        v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in));
        v = _mm256_or_si256(_mm256_or_si256(v, _mm256_slli_epi32(v, 6)),
                            _mm256_or_si256(_mm256_slli_epi32(v, 12), _mm256_slli_epi32(v, 18)));
        return _mm256_and_si256(v, _mm256_set1_epi8(3));
    }
    /* 12 bytes -> four 64-bit lanes of 24 bits */
    int32_t last;
    memcpy(&last, in + 8, 4);
    const I8 scatter = _mm256_setr_epi8(0, 1, 2, -1, -1, -1, -1, -1, 3, 4, 5, -1, -1, -1, -1, -1, 6, 7, 8, -1, -1, -1, -1, -1, 9,
                                        10, 11, -1, -1, -1, -1, -1);
    __m128i twelve = _mm_insert_epi32(_mm_loadl_epi64((const __m128i *)in), last, 2);
    v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(twelve), scatter);
    v = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi64x(0xfff)),
                        _mm256_slli_epi64(_mm256_and_si256(v, _mm256_set1_epi64x(0xfff000)), 20));
    I8 even = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi32(v, 10)), same(0x00070007u));
    I8 odd = _mm256_and_si256(_mm256_or_si256(_mm256_slli_epi32(v, 5), _mm256_slli_epi32(v, 15)), same(0x07000700u));
    return _mm256_or_si256(even, odd);
}

/* 32 codes of `bits` bits each -> 4*bits bytes. */
ALWAYS_INLINE void pack32(I8 codes, const int bits, uint8_t *out) {
    if (bits == 8) {
        _mm256_storeu_si256((I8 *)out, codes);
        return;
    }
    I8 pair = _mm256_maddubs_epi16(codes, _mm256_set1_epi16((short)(1 | 1 << (bits + 8))));
    if (bits == 4) {
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
        _mm_storeu_si128((__m128i *)out, bytes);
        return;
    }
    I8 quad = _mm256_madd_epi16(pair, same(1u | 1u << (2 * bits + 16)));
    if (bits == 2) {
        __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(quad), _mm256_extracti128_si256(quad, 1));
        _mm_storel_epi64((__m128i *)out, _mm_packus_epi16(words, words));
        return;
    }
    /* 3 bits: two 12-bit lanes -> 24 bits in each 64-bit lane, then gather the bytes */
    I8 triple = _mm256_or_si256(_mm256_and_si256(quad, _mm256_set1_epi64x(0xfff)), _mm256_srli_epi64(quad, 20));
    const I8 gather = _mm256_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 8, 9, 10, -1, -1, -1,
                                       -1, -1, -1, -1, -1, -1, -1);
    I8 tight = _mm256_shuffle_epi8(triple, gather);
    uint64_t low = (uint64_t)_mm256_extract_epi64(tight, 0), high = (uint64_t)_mm256_extract_epi64(tight, 2);
    memcpy(out, &low, 6);
    memcpy(out + 6, &high, 6);
}

/* How a decoded vector reaches memory: STREAM is WG_STORE past the cache. */
enum { STREAM = 2 };

ALWAYS_INLINE void put8(float *out, F8 v, const int mode) {
    if (mode == STREAM) _mm256_stream_ps(out, v);
    else if (mode == WG_STORE) _mm256_storeu_ps(out, v);
    else if (mode == WG_ADD) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), v));
    else _mm256_storeu_ps(out, _mm256_sub_ps(_mm256_loadu_ps(out), v));
}

ALWAYS_INLINE int how_to_put(int mode, const float *out, uint64_t n) {
    return mode == WG_STORE && n >= STREAM_ELEMENTS && ((uintptr_t)out & 31) == 0 ? STREAM : mode;
}

ALWAYS_INLINE F8 value8(I8 code, I8 levels, F8 scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(code, levels)), scale);
}

#endif
