/* AVX2 unit of bucket.c: 32 elements at a time, the rest through the portable run. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "bucket_lanes.h"

ALWAYS_INLINE uint32_t max_norm(const float *x, const float *residual, size_t m) {
    I8 top[4];
    for (int j = 0; j < 4; j++) top[j] = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= m; i += 32)
        for (int j = 0; j < 4; j++) {
            const size_t at = i + 8 * (size_t)j;
            top[j] = _mm256_max_epu32(top[j], magnitude8(load_sum(x + at, residual ? residual + at : NULL)));
        }
    uint32_t result = top8(_mm256_max_epu32(_mm256_max_epu32(top[0], top[1]), _mm256_max_epu32(top[2], top[3])));
    for (; i < m; i++) {
        uint32_t u = wg_magnitude(residual ? x[i] + residual[i] : x[i]);
        result = u > result ? u : result;
    }
    return result;
}

ALWAYS_INLINE float l2_norm(const float *x, const float *residual, size_t m, float limit, const int clips) {
    const F8 cut = _mm256_set1_ps(limit);
    __m256d low = _mm256_setzero_pd(), high = low;
    double lane[8], rest[8] = {0};
    size_t i = 0;
    while (i + 8 <= m) {
        const size_t stop = i + 64 <= m ? i + 64 : m / 8 * 8;
        __m256d a = _mm256_setzero_pd(), b = a;
        for (; i < stop; i += 8) {
            F8 h = cut8(load_sum(x + i, residual ? residual + i : NULL), cut, clips);
            __m256d first = _mm256_cvtps_pd(_mm256_castps256_ps128(h)), second = _mm256_cvtps_pd(_mm256_extractf128_ps(h, 1));
            a = _mm256_add_pd(a, _mm256_mul_pd(first, first));
            b = _mm256_add_pd(b, _mm256_mul_pd(second, second));
        }
        if (i % 64 && i < m) { /* the last, short row belongs to this group */
            _mm256_storeu_pd(rest, a);
            _mm256_storeu_pd(rest + 4, b);
            break;
        }
        low = _mm256_add_pd(low, a);
        high = _mm256_add_pd(high, b);
    }
    _mm256_storeu_pd(lane, low);
    _mm256_storeu_pd(lane + 4, high);
    if (i < m) {
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

ALWAYS_INLINE void encode_run(const float *x, float *residual, size_t m, const wg_quantizer *q, wg_ruler ruler,
                              uint64_t index, uint8_t *codes, const int bits, const int stochastic, const int given,
                              const int clips) {
    const F8 cut = _mm256_set1_ps(q->limit);
    const F8 inverse = _mm256_set1_ps(ruler.inverse), scale = _mm256_set1_ps(ruler.scale);
    const F8 limit = _mm256_set1_ps((float)(q->levels * 65536)), negative = _mm256_set1_ps(-(float)(q->levels * 65536));
    const I8 levels = same((uint32_t)q->levels), offset = same((uint32_t)q->levels << 16);
    I8 noise[4] = {same(0x8000), same(0x8000), same(0x8000), same(0x8000)}, code[4];
    noise8 source = noise_at(q->key, index);
    size_t i = 0;
    for (; i + 32 <= m; i += 32) {
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS + 16), _MM_HINT_T0);
        if (residual) {
            _mm_prefetch((const char *)(residual + i + PREFETCH_FLOATS), _MM_HINT_T0);
            _mm_prefetch((const char *)(residual + i + PREFETCH_FLOATS + 16), _MM_HINT_T0);
        }
        if (stochastic) noise32(&source, noise);
        for (int j = 0; j < 4; j++) {
            const size_t at = i + 8 * (size_t)j;
            F8 h = cut8(load_sum(x + at, residual ? residual + at : NULL), cut, clips);
            F8 y = _mm256_mul_ps(h, inverse);
            if (given) y = _mm256_max_ps(_mm256_min_ps(y, limit), negative);
            I8 fixed = _mm256_add_epi32(_mm256_cvtps_epi32(y), offset);
            code[j] = _mm256_srli_epi32(_mm256_add_epi32(fixed, noise[j]), 16);
            if (residual) _mm256_storeu_ps(residual + at, _mm256_sub_ps(h, value8(code[j], levels, scale)));
        }
        pack32(bytes32(code), bits, codes + i / 8 * (size_t)bits);
    }
    if (i < m) wg_quantize_run(x + i, residual ? residual + i : NULL, m - i, q, ruler, index + i, codes + i / 8 * (size_t)bits);
}

#include "bucket_loops.h"

uint64_t wg_quantize_avx2(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales) {
    return quantize_in(x, residual, n, q, codes, scales);
}

ALWAYS_INLINE void decode_all(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, const int bits,
                              int levels, const int mode, float *out) {
    const I8 zero_level = same((uint32_t)levels);
    for (uint64_t start = 0, b = 0; start < n; start += bucket, b++) {
        const size_t m = n - start < bucket ? n - start : bucket;
        const uint8_t *from = codes + start / 8 * (uint64_t)bits;
        const F8 scale = _mm256_set1_ps(scales[b]);
        float *to = out + start;
        size_t i = 0;
        for (; i + 32 <= m; i += 32) {
            I8 v[4];
            widen32(unpack32(from + i / 8 * (size_t)bits, bits), v);
            for (int j = 0; j < 4; j++) put8(to + i + 8 * (size_t)j, value8(v[j], zero_level, scale), mode);
        }
        if (i < m)
            wg_dequantize_run(from + i / 8 * (size_t)bits, m - i, bits, levels, scales[b], mode == STREAM ? WG_STORE : mode, to + i);
    }
    if (mode == STREAM) _mm_sfence();
}

ALWAYS_INLINE void decode_mode(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, const int bits,
                               int levels, int mode, float *out) {
    switch (how_to_put(mode, out, n)) {
    case STREAM: decode_all(codes, scales, n, bucket, bits, levels, STREAM, out); return;
    case WG_STORE: decode_all(codes, scales, n, bucket, bits, levels, WG_STORE, out); return;
    case WG_ADD: decode_all(codes, scales, n, bucket, bits, levels, WG_ADD, out); return;
    default: decode_all(codes, scales, n, bucket, bits, levels, WG_SUBTRACT, out); return;
    }
}

void wg_dequantize_avx2(const uint8_t *codes, const float *scales, uint64_t n, uint64_t bucket, int bits, int levels, int mode,
                        float *out) {
    switch (bits) {
    case 2: decode_mode(codes, scales, n, bucket, 2, levels, mode, out); return;
    case 3: decode_mode(codes, scales, n, bucket, 3, levels, mode, out); return;
    case 4: decode_mode(codes, scales, n, bucket, 4, levels, mode, out); return;
    default: decode_mode(codes, scales, n, bucket, 8, levels, mode, out); return;
    }
}
#endif
