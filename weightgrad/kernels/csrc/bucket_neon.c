/* NEON unit of bucket.c: 32 elements at a time, the rest through the portable run. */
#include "units.h"

#if WG_HAS_NEON_UNIT
#include "lanes_neon.h"

ALWAYS_INLINE float32x4_t load_sum(const float *x, const float *residual) {
    float32x4_t h = vld1q_f32(x);
    return residual ? vaddq_f32(h, vld1q_f32(residual)) : h;
}

/* Cut to +-limit; where neither is larger, as with a NaN, h stays. */
ALWAYS_INLINE float32x4_t cut4(float32x4_t h, float32x4_t limit, const int clips) {
    if (!clips) return h;
    const float32x4_t negative = vnegq_f32(limit);
    h = vbslq_f32(vcgtq_f32(h, limit), limit, h);
    return vbslq_f32(vcltq_f32(h, negative), negative, h);
}

ALWAYS_INLINE uint32_t max_norm(const float *x, const float *residual, size_t m) {
    uint32x4_t top[4];
    for (int j = 0; j < 4; j++) top[j] = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 16 <= m; i += 16)
        for (size_t j = 0; j < 4; j++) {
            const size_t at = i + 4 * j;
            top[j] = vmaxq_u32(top[j], magnitude4(load_sum(x + at, residual ? residual + at : NULL)));
        }
    uint32_t result = vmaxvq_u32(vmaxq_u32(vmaxq_u32(top[0], top[1]), vmaxq_u32(top[2], top[3])));
    for (; i < m; i++) {
        uint32_t u = wg_magnitude(residual ? x[i] + residual[i] : x[i]);
        result = u > result ? u : result;
    }
    return result;
}

static float l2_norm(const float *x, const float *residual, size_t m, float limit, const int clips) {
    (void)clips;
    return wg_bucket_norm(x, residual, m, WG_NORM_L2, limit);
}

ALWAYS_INLINE void encode_run(const float *x, float *residual, size_t m, const wg_quantizer *q, wg_ruler ruler,
                              uint64_t index, uint8_t *codes, const int bits, const int stochastic, const int given,
                              const int clips) {
    const float32x4_t cut = vdupq_n_f32(q->limit), inverse = vdupq_n_f32(ruler.inverse), scale = vdupq_n_f32(ruler.scale);
    const float32x4_t limit = vdupq_n_f32((float)(q->levels * 65536));
    const int32x4_t levels = vdupq_n_s32(q->levels), offset = vdupq_n_s32(q->levels << 16);
    size_t i = 0;
    for (; i + 32 <= m; i += 32) {
        uint8x16_t bytes[2];
        for (size_t half = 0; half < 2; half++) {
            uint32x4_t noise[4], code[4];
            for (int j = 0; j < 4; j++) noise[j] = vdupq_n_u32(0x8000);
            if (stochastic) noise16(q->key, index + i + 16 * half, noise);
            for (size_t j = 0; j < 4; j++) {
                const size_t at = i + 16 * half + 4 * j;
                const float32x4_t h = cut4(load_sum(x + at, residual ? residual + at : NULL), cut, clips);
                const float32x4_t y = cut4(vmulq_f32(h, inverse), limit, given);
                const uint32x4_t fixed = vreinterpretq_u32_s32(vaddq_s32(vcvtnq_s32_f32(y), offset));
                code[j] = vshrq_n_u32(vaddq_u32(fixed, noise[j]), 16);
                if (residual) {
                    const float32x4_t value = vmulq_f32(vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(code[j]), levels)), scale);
                    vst1q_f32(residual + at, vsubq_f32(h, value));
                }
            }
            bytes[half] = bytes16(code);
        }
        pack32(bytes, bits, codes + i / 8 * (size_t)bits);
    }
    if (i < m) wg_quantize_run(x + i, residual ? residual + i : NULL, m - i, q, ruler, index + i, codes + i / 8 * (size_t)bits);
}

#include "bucket_loops.h"

uint64_t wg_quantize_neon(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales) {
    return quantize_in(x, residual, n, q, codes, scales);
}

ALWAYS_INLINE void decode_all(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, const int bits,
                              int levels, int mode, float *out) {
    const int32x4_t zero_level = vdupq_n_s32(levels);
    for (uint64_t start = 0, b = 0; start < n; start += bucket, b++) {
        const size_t m = n - start < bucket ? n - start : bucket;
        const uint8_t *from = codes + start / 8 * (uint64_t)bits;
        const float32x4_t scale = vdupq_n_f32(scales[b]);
        size_t i = 0;
        for (; i + 32 <= m; i += 32) {
            uint8x16_t level[2];
            unpack32(from + i / 8 * (size_t)bits, bits, level);
            for (size_t half = 0; half < 2; half++) {
                float32x4_t value[4];
                values16(level[half], zero_level, scale, value);
                for (size_t j = 0; j < 4; j++) put4(out + start + i + 16 * half + 4 * j, value[j], mode);
            }
        }
        if (i < m) wg_dequantize_run(from + i / 8 * (size_t)bits, m - i, bits, levels, scales[b], mode, out + start + i);
    }
}

void wg_dequantize_neon(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels, int mode,
                        float *out) {
    switch (bits) {
    case 2: decode_all(codes, scales, n, bucket, 2, levels, mode, out); return;
    case 3: decode_all(codes, scales, n, bucket, 3, levels, mode, out); return;
    case 4: decode_all(codes, scales, n, bucket, 4, levels, mode, out); return;
    default: decode_all(codes, scales, n, bucket, 8, levels, mode, out); return;
    }
}
#endif
