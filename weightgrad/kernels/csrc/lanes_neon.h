/* Shared by the NEON units only. */
#ifndef WG_LANES_NEON_H
#define WG_LANES_NEON_H

#include "scalar.h"

#include <arm_neon.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE uint32x4_t magnitude4(float32x4_t x) { return vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(WG_ABS_MASK)); }

/* Noise of sixteen elements in order, four vectors: the hashes of lanes 0 .. 7 serve elements 0 .. 7 with their lower
 * half and 8 .. 15 with their upper one. */
ALWAYS_INLINE uint32x4_t noise_hash(uint32x4_t x, uint32x4_t k0, uint32x4_t k1) {
    x = veorq_u32(x, k0);
    x = veorq_u32(x, vshrq_n_u32(x, 16));
    x = vmulq_u32(x, vdupq_n_u32(0x7feb352du));
    x = veorq_u32(x, k1);
    x = veorq_u32(x, vshrq_n_u32(x, 15));
    x = vmulq_u32(x, vdupq_n_u32(0x846ca68bu));
    return veorq_u32(x, vshrq_n_u32(x, 16));
}

ALWAYS_INLINE void noise16(uint64_t key, uint64_t index, uint32x4_t out[4]) {
    const uint32_t lanes[4] = {0, 1, 2, 3};
    const uint32x4_t counter = vaddq_u32(vdupq_n_u32((uint32_t)((index >> 4) << 3)), vld1q_u32(lanes));
    const uint32x4_t k0 = vdupq_n_u32((uint32_t)key), k1 = vdupq_n_u32((uint32_t)(key >> 32)), low = vdupq_n_u32(0xffffu);
    const uint32x4_t a = noise_hash(counter, k0, k1), b = noise_hash(vaddq_u32(counter, vdupq_n_u32(4)), k0, k1);
    out[0] = vandq_u32(a, low);
    out[1] = vandq_u32(b, low);
    out[2] = vshrq_n_u32(a, 16);
    out[3] = vshrq_n_u32(b, 16);
}

/* Four vectors of small integers -> 16 bytes in order. */
ALWAYS_INLINE uint8x16_t bytes16(const uint32x4_t v[4]) {
    const uint16x8_t low = vcombine_u16(vmovn_u32(v[0]), vmovn_u32(v[1])), high = vcombine_u16(vmovn_u32(v[2]), vmovn_u32(v[3]));
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
}

/* 16 bytes in order -> four vectors of floats: (code - levels) * scale. */
ALWAYS_INLINE void values16(uint8x16_t codes, int32x4_t levels, float32x4_t scale, float32x4_t out[4]) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(codes)), high = vmovl_u8(vget_high_u8(codes));
    const uint32x4_t v[4] = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
                             vmovl_u16(vget_high_u16(high))};
    for (int j = 0; j < 4; j++) out[j] = vmulq_f32(vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(v[j]), levels)), scale);
}

/* 32 codes of 2, 3, 4 or 8 bits, one a byte -> 4*bits bytes. */
ALWAYS_INLINE void pack32(const uint8x16_t codes[2], const int bits, uint8_t *out) {
    if (bits == 8) {
        vst1q_u8(out, codes[0]);
        vst1q_u8(out + 16, codes[1]);
        return;
    }
    if (bits == 3) {
        uint8_t level[32];
        vst1q_u8(level, codes[0]);
        vst1q_u8(level + 16, codes[1]);
        wg_pack_codes(level, 32, bits, out);
        return;
    }
    const uint8x16_t even = vuzp1q_u8(codes[0], codes[1]), odd = vuzp2q_u8(codes[0], codes[1]);
    if (bits == 4) {
        vst1q_u8(out, vorrq_u8(even, vshlq_n_u8(odd, 4)));
        return;
    }
    const uint8x16_t pair = vorrq_u8(even, vshlq_n_u8(odd, 2));
    vst1_u8(out, vorr_u8(vget_low_u8(vuzp1q_u8(pair, pair)), vshl_n_u8(vget_low_u8(vuzp2q_u8(pair, pair)), 4)));
}

ALWAYS_INLINE void unpack32(const uint8_t *in, const int bits, uint8x16_t codes[2]) {
    if (bits == 8) {
        codes[0] = vld1q_u8(in);
        codes[1] = vld1q_u8(in + 16);
        return;
    }
    if (bits == 3) {
        uint8_t level[32];
        wg_unpack_codes(in, 32, bits, level);
        codes[0] = vld1q_u8(level);
        codes[1] = vld1q_u8(level + 16);
        return;
    }
    uint8x16_t v; /* a nibble a byte for 2 bits, two of them for 4 */
    if (bits == 4) v = vld1q_u8(in);
    else {
        const uint8x8_t bytes = vld1_u8(in), low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
        v = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
    }
    const uint8x16_t first = vandq_u8(v, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    const uint8x16_t second = bits == 4 ? vshrq_n_u8(v, 4) : vshrq_n_u8(v, 2);
    codes[0] = vzip1q_u8(first, second);
    codes[1] = vzip2q_u8(first, second);
}

ALWAYS_INLINE void put4(float *out, float32x4_t v, const int mode) {
    if (mode == WG_STORE) vst1q_f32(out, v);
    else if (mode == WG_ADD) vst1q_f32(out, vaddq_f32(vld1q_f32(out), v));
    else vst1q_f32(out, vsubq_f32(vld1q_f32(out), v));
}

/* The sign bits of eight floats, the first lowest. */
ALWAYS_INLINE uint8_t signs8(float32x4_t a, float32x4_t b) {
    static const uint8_t place[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t both = vcombine_u16(vshrn_n_u32(vreinterpretq_u32_f32(a), 16), vshrn_n_u32(vreinterpretq_u32_f32(b), 16));
    const uint8x8_t sign = vreinterpret_u8_s8(vshr_n_s8(vreinterpret_s8_u8(vshrn_n_u16(both, 8)), 7));
    return vaddv_u8(vand_u8(sign, vld1_u8(place)));
}

#endif
