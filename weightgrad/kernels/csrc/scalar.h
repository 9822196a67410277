/* What each operation means, one element at a time. The portable kernels loop
 * over these; the AVX2 kernels use them for tails; the torch reference implementations mirror them. */
#ifndef WG_SCALAR_H
#define WG_SCALAR_H

#include "wg.h"

#include <math.h>
#include <string.h>

static inline uint32_t wg_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float wg_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Magnitudes compare as integers, and NaN and Inf are the largest of them. */
#define WG_ABS_MASK 0x7fffffffu
#define WG_INFINITY 0x7f800000u

static inline uint32_t wg_magnitude(float x) { return wg_bits(x) & WG_ABS_MASK; }

/* 16 uniform bits for an element. One hash serves two elements that lie eight
 * apart, so that eight lanes of hashes cover sixteen elements in order. The counter is
 * 32 bits wide: a tensor has at most 2^33 elements (the codecs see to that). */
static inline uint32_t wg_noise(uint64_t key, uint64_t index) {
    uint32_t x = (uint32_t)((index >> 4) << 3 | (index & 7)) ^ (uint32_t)key;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= (uint32_t)(key >> 32);
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return index & 8 ? x >> 16 : x & 0xffffu;
}

/* Spreads a key over all 64 bits: SplitMix64's finalizer, as `mix` of noise.py. */
static inline uint64_t wg_mix(uint64_t key) {
    key += 0x9e3779b97f4a7c15u;
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
    key = (key ^ key >> 27) * 0x94d049bb133111ebu;
    return key ^ key >> 31;
}

/* What one element adds to a digest: digest.py says why. Keys are unrelated between blocks and
 * WG_DIGEST_STEP apart in a block; the step is even, so that their low halves stay odd. */
#define WG_DIGEST_BLOCK (1u << 18)
#define WG_DIGEST_STEP 0x9e3779b96a09e666u
#define WG_DIGEST_FACTOR 0x9e3779b1u
#define WG_DIGEST_SPREAD 0x9e3779b185ebca87u

static inline uint64_t wg_digest_key(uint64_t index) {
    return (wg_mix(index / WG_DIGEST_BLOCK) | 1u) + index % WG_DIGEST_BLOCK * WG_DIGEST_STEP;
}

static inline uint64_t wg_digest_term(uint32_t bits, uint64_t key) {
    uint64_t t = (uint64_t)(bits ^ (uint32_t)(key >> 32)) * WG_DIGEST_FACTOR;
    uint64_t q = (uint64_t)(uint32_t)(t ^ t >> 32) * (uint32_t)key + (t << 32);
    return q ^ q >> 32;
}

/* The map from floats to 16.16 fixed point levels. `inverse` is one step below
 * levels * 65536 / norm, so that |x| <= norm never exceeds the top level; norms
 * too small to invert are first multiplied by 2^64, which is exact. */
typedef struct {
    float before, inverse, scale;
} wg_ruler;

static inline wg_ruler wg_make_ruler(float norm, int levels) {
    wg_ruler r = {1.0f, 0.0f, norm / (float)levels};
    if (norm > 0.0f) {
        if (norm < 0x1p-100f) r.before = 0x1p64f;
        r.inverse = wg_float(wg_bits((float)(levels * 65536) / (norm * r.before)) - 1u);
    }
    return r;
}

static inline int32_t wg_round(float x) { return (int32_t)lrintf(x); }

static inline float wg_clamp(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

/* Level index 0 .. 2L of h; `noise` is 0x8000 for rounding to nearest. */
static inline uint32_t wg_level(float h, wg_ruler r, int levels, uint32_t noise, int clamp) {
    float y = h * r.before * r.inverse;
    if (clamp) y = wg_clamp(y, (float)(levels * 65536));
    return ((uint32_t)(wg_round(y) + levels * 65536) + noise) >> 16;
}

static inline float wg_value(uint32_t code, int levels, float scale) {
    return (float)((int32_t)code - levels) * scale;
}

static inline void wg_put(float *out, float value, int mode) {
    *out = mode == WG_STORE ? value : mode == WG_ADD ? *out + value : *out - value;
}

/* Codes are a little-endian bit stream: element i has bits [i*b, (i+1)*b). */
static inline void wg_pack_codes(const uint8_t *codes, size_t n, int bits, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, codes, n);
        return;
    }
    uint32_t word = 0;
    int held = 0;
    for (size_t i = 0; i < n; i++) {
        word |= (uint32_t)codes[i] << held;
        held += bits;
        if (held >= 8) {
            *out++ = (uint8_t)word;
            word >>= 8;
            held -= 8;
        }
    }
    if (held) *out = (uint8_t)word;
}

static inline void wg_unpack_codes(const uint8_t *in, size_t n, int bits, uint8_t *codes) {
    if (bits == 8) {
        memcpy(codes, in, n);
        return;
    }
    uint32_t word = 0, mask = (1u << bits) - 1u;
    int held = 0;
    for (size_t i = 0; i < n; i++) {
        if (held < bits) {
            word |= (uint32_t)*in++ << held;
            held += 8;
        }
        codes[i] = (uint8_t)(word & mask);
        word >>= bits;
        held -= bits;
    }
}

/* Five trits a byte. A group of m elements takes w = ceil(m/5) bytes and byte j
 * holds elements j, j+w, .. j+4w, the first in the lowest place. */
static inline void wg_pack_trits(const uint8_t *trits, size_t m, uint8_t *out) {
    size_t w = (m + 4) / 5;
    for (size_t j = 0; j < w; j++) {
        uint32_t byte = 0, place = 1;
        for (size_t k = 0; k < 5; k++, place *= 3)
            if (j + k * w < m) byte += place * trits[j + k * w];
        out[j] = (uint8_t)byte;
    }
}

static inline void wg_unpack_trits(const uint8_t *in, size_t m, uint8_t *trits) {
    size_t w = (m + 4) / 5;
    for (size_t j = 0; j < w; j++) {
        uint32_t byte = in[j];
        for (size_t k = 0; k < 5; k++, byte /= 3)
            if (j + k * w < m) trits[j + k * w] = (uint8_t)(byte % 3);
    }
}

#endif
