/* The uniform quantizer over buckets (QSGD), with optional error feedback.
 *
 * For each bucket: norm = max|h| or ||h||_2 where h = x, or x + residual;
 * code = floor(L*h/norm + L + noise); value = (code - L) * (norm / L).
 * With a residual: residual = h - value. Without one, x may be cut to +-limit on the way (clip(...) > qsgd(...)).
 *
 * The L2 norm is summed in double over eight interleaved lanes (lane i takes elements i, i+8,
 * ..); eight rows of lanes make a group, the groups are added in order, and the lanes are halved:
 * ((0+4)+(2+6)) + ((1+5)+(3+7)).
 *
 * Returns how many elements were encoded: n, or, when a bucket holds a NaN, an
 * Inf or a sum that overflows, the index at which that bucket starts. Nothing of
 * that bucket is written.
 */
#include "units.h"

/* An element before it is quantized. */
static inline float given_h(const float *x, const float *residual, size_t i, float limit) {
    return residual ? x[i] + residual[i] : wg_clamp(x[i], limit);
}

float wg_bucket_norm(const float *x, const float *residual, size_t m, int kind, float limit) {
    if (kind == WG_NORM_MAX) {
        uint32_t top = 0;
        for (size_t i = 0; i < m; i++) {
            uint32_t u = wg_magnitude(given_h(x, residual, i, limit));
            top = u > top ? u : top;
        }
        return wg_float(top);
    }
    double lane[8] = {0}, group[8] = {0};
    for (size_t i = 0; i < m; i++) {
        double h = given_h(x, residual, i, limit);
        group[i & 7] += h * h;
        if ((i + 1) % 64 == 0 || i + 1 == m)
            for (int k = 0; k < 8; k++) {
                lane[k] += group[k];
                group[k] = 0.0;
            }
    }
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return (float)sqrt(lane[0]);
}

/* Quantize a run that starts on a byte of `codes`; shared with the AVX2 tail. */
void wg_quantize_run(const float *x, float *residual, size_t m, const wg_quantizer *q, wg_ruler ruler,
                     uint64_t index, uint8_t *codes) {
    const int clamp = q->norm == WG_NORM_GIVEN;
    uint8_t level[256];
    for (size_t i = 0; i < m;) {
        size_t part = m - i < sizeof level ? m - i : sizeof level;
        for (size_t j = 0; j < part; j++) {
            float h = given_h(x, residual, i + j, q->limit);
            uint32_t noise = q->stochastic ? wg_noise(q->key, index + i + j) : 0x8000u;
            uint32_t code = wg_level(h, ruler, q->levels, noise, clamp);
            if (residual) residual[i + j] = h - wg_value(code, q->levels, ruler.scale);
            level[j] = (uint8_t)code;
        }
        wg_pack_codes(level, part, q->bits, codes + i * (size_t)q->bits / 8);
        i += part;
    }
}

static uint64_t quantize(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes,
                         float *scales) {
    for (uint64_t i = 0, b = 0; i < n; i += q->bucket, b++) {
        size_t m = n - i < q->bucket ? n - i : q->bucket;
        float *r = residual ? residual + i : NULL;
        float norm = q->norm == WG_NORM_GIVEN ? scales[b] * (float)q->levels : wg_bucket_norm(x + i, r, m, q->norm, q->limit);
        if (wg_magnitude(norm) >= WG_INFINITY) return i;
        wg_ruler ruler = wg_make_ruler(norm, q->levels);
        if (q->norm == WG_NORM_GIVEN) ruler.scale = scales[b];
        scales[b] = ruler.scale;
        wg_quantize_run(x + i, r, m, q, ruler, q->first + i, codes + i / 8 * (uint64_t)q->bits);
    }
    return n;
}

void wg_dequantize_run(const uint8_t *codes, size_t m, int bits, int levels, float scale, int mode, float *out) {
    uint8_t level[256];
    for (size_t i = 0; i < m;) {
        size_t part = m - i < sizeof level ? m - i : sizeof level;
        wg_unpack_codes(codes + i * (size_t)bits / 8, part, bits, level);
        for (size_t j = 0; j < part; j++) wg_put(out + i + j, wg_value(level[j], levels, scale), mode);
        i += part;
    }
}

static void dequantize(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels,
                       int mode, float *out) {
    for (uint64_t i = 0, b = 0; i < n; i += bucket, b++) {
        size_t m = n - i < bucket ? n - i : bucket;
        wg_dequantize_run(codes + i / 8 * (uint64_t)bits, m, bits, levels, scales[b], mode, out + i);
    }
}

WG_API uint64_t wg_quantize(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes,
                            float *scales) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() == 2 && q->bucket % 32 == 0) return wg_quantize_avx512(x, residual, n, q, codes, scales);
    if (wg_isa() && q->bucket % 32 == 0) return wg_quantize_avx2(x, residual, n, q, codes, scales);
#endif
#if WG_HAS_NEON_UNIT
    if (wg_isa() && q->bucket % 32 == 0) return wg_quantize_neon(x, residual, n, q, codes, scales);
#endif
    return quantize(x, residual, n, q, codes, scales);
}

WG_API void wg_dequantize(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels,
                          int mode, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() && bucket % 32 == 0) {
        wg_dequantize_avx2(codes, scales, n, bucket, bits, levels, mode, out);
        return;
    }
#endif
#if WG_HAS_NEON_UNIT
    if (wg_isa() && bucket % 32 == 0) {
        wg_dequantize_neon(codes, scales, n, bucket, bits, levels, mode, out);
        return;
    }
#endif
    dequantize(codes, scales, n, bucket, bits, levels, mode, out);
}
