/* AVX-512 unit of digest.c: as the AVX2 unit, sixteen elements at a time in two vectors of eight. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes512.h"

ALWAYS_INLINE I16 term8(I16 mixed, I16 key) {
    const I16 t = _mm512_mul_epu32(mixed, _mm512_set1_epi64(WG_DIGEST_FACTOR));
    const I16 folded = _mm512_xor_si512(t, _mm512_srli_epi64(t, 32));
    const I16 q = _mm512_add_epi64(_mm512_mul_epu32(folded, key), _mm512_slli_epi64(t, 32));
    return _mm512_xor_si512(q, _mm512_srli_epi64(q, 32));
}

uint64_t wg_digest_run_avx512(const float *x, size_t m, uint64_t key) {
    const uint64_t step = WG_DIGEST_STEP;
    const I16 one = _mm512_set1_epi64((long long)step), sixteen = _mm512_set1_epi64((long long)(16 * step));
    const I16 places = _mm512_setr_epi64(0, (long long)(2 * step), (long long)(4 * step), (long long)(6 * step), (long long)(8 * step),
                                         (long long)(10 * step), (long long)(12 * step), (long long)(14 * step));
    I16 even = _mm512_add_epi64(_mm512_set1_epi64((long long)key), places);
    I16 sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = 0;
    for (; i + 16 <= m; i += 16) {
        const I16 v = _mm512_loadu_si512(x + i), odd = _mm512_add_epi64(even, one);
        _mm_prefetch((const char *)(x + i + PREFETCH_FLOATS), _MM_HINT_T0);
        sum[0] = _mm512_add_epi64(sum[0], term8(_mm512_xor_si512(v, _mm512_srli_epi64(even, 32)), even));
        sum[1] = _mm512_add_epi64(sum[1], term8(_mm512_srli_epi64(_mm512_xor_si512(v, odd), 32), odd));
        even = _mm512_add_epi64(even, sixteen);
    }
    const uint64_t whole = (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(sum[0], sum[1]));
    return whole + wg_digest_run(x + i, m - i, key + i * step);
}
#endif
