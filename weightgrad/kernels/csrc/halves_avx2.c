/* AVX2 unit of halves.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

ALWAYS_INLINE __m128i narrow8(F8 x, const int kind) {
    if (kind == 16) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    I8 u = _mm256_castps_si256(x);
    I8 odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), same(1));
    I8 rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, same(0x7fff))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

ALWAYS_INLINE F8 widen8(const void *in, uint64_t i, const int kind) {
    if (kind == 32) return _mm256_loadu_ps((const float *)in + i);
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)in + i));
    return kind == 16 ? _mm256_cvtph_ps(half) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

ALWAYS_INLINE void narrow_store(void *out, uint64_t i, F8 x, const int kind, const int stream) {
    if (kind == 32) {
        if (stream) _mm256_stream_ps((float *)out + i, x);
        else _mm256_storeu_ps((float *)out + i, x);
        return;
    }
    __m128i half = narrow8(x, kind);
    if (stream) _mm_stream_si128((__m128i *)((uint16_t *)out + i), half);
    else _mm_storeu_si128((__m128i *)((uint16_t *)out + i), half);
}

ALWAYS_INLINE uint32_t narrow(const float *x, uint64_t n, const int kind, const int stream, void *out) {
    I8 top[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        for (uint64_t j = 0; j < 2; j++) {
            F8 v = _mm256_loadu_ps(x + i + 8 * j);
            top[j] = _mm256_max_epu32(top[j], magnitude8(v));
            narrow_store(out, i + 8 * j, v, kind, stream);
        }
    }
    uint32_t result = top8(_mm256_max_epu32(top[0], top[1]));
    if (i < n) {
        float from[16] = {0}, to[16];
        memcpy(from, x + i, (n - i) * sizeof(float));
        for (uint64_t j = 0; j < 2; j++) narrow_store(to, 8 * j, _mm256_loadu_ps(from + 8 * j), kind, 0);
        const size_t width = kind == 32 ? 4 : 2;
        memcpy((uint8_t *)out + i * width, to, (n - i) * width);
        for (; i < n; i++) result = wg_magnitude(x[i]) > result ? wg_magnitude(x[i]) : result;
    }
    if (stream) _mm_sfence();
    return result;
}

uint32_t wg_narrow_avx2(const float *x, uint64_t n, int kind, void *out) {
    const int stream = n >= STREAM_ELEMENTS && ((uintptr_t)out & 31) == 0;
    switch (kind) {
    case 32: return stream ? narrow(x, n, 32, 1, out) : narrow(x, n, 32, 0, out);
    case 16: return stream ? narrow(x, n, 16, 1, out) : narrow(x, n, 16, 0, out);
    default: return stream ? narrow(x, n, 17, 1, out) : narrow(x, n, 17, 0, out);
    }
}

ALWAYS_INLINE void widen(const void *in, uint64_t n, const int kind, const int mode, float *out) {
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) put8(out + i, widen8(in, i, kind), mode);
    if (i < n) {
        const size_t width = kind == 32 ? 4 : 2;
        float from[8] = {0}, to[8] = {0};
        memcpy(from, (const uint8_t *)in + i * width, (n - i) * width);
        memcpy(to, out + i, (n - i) * sizeof(float));
        put8(to, widen8(from, 0, kind), mode == STREAM ? WG_STORE : mode);
        memcpy(out + i, to, (n - i) * sizeof(float));
    }
    if (mode == STREAM) _mm_sfence();
}

ALWAYS_INLINE void widen_mode(const void *in, uint64_t n, const int kind, int mode, float *out) {
    switch (how_to_put(mode, out, n)) {
    case STREAM: widen(in, n, kind, STREAM, out); return;
    case WG_STORE: widen(in, n, kind, WG_STORE, out); return;
    case WG_ADD: widen(in, n, kind, WG_ADD, out); return;
    default: widen(in, n, kind, WG_SUBTRACT, out); return;
    }
}

void wg_widen_avx2(const void *in, uint64_t n, int kind, int mode, float *out) {
    switch (kind) {
    case 32: widen_mode(in, n, 32, mode, out); return;
    case 16: widen_mode(in, n, 16, mode, out); return;
    default: widen_mode(in, n, 17, mode, out); return;
    }
}

void wg_clear_avx2(float *out, uint64_t n) {
    uint64_t i = 0;
    if (how_to_put(WG_STORE, out, n) == STREAM) {
        for (; i + 8 <= n; i += 8) _mm256_stream_ps(out + i, _mm256_setzero_ps());
        _mm_sfence();
    }
    memset(out + i, 0, (n - i) * sizeof(float));
}
#endif
