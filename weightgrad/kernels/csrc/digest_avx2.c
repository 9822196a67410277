/* AVX2 unit of digest.c. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

/* wg_digest_term of four elements. The low halves of `mixed` are bits ^ key >> 32; the high ones do not count. */
ALWAYS_INLINE I8 term4(I8 mixed, I8 key) {
    const I8 t = _mm256_mul_epu32(mixed, _mm256_set1_epi64x(WG_DIGEST_FACTOR));
    const I8 folded = _mm256_xor_si256(t, _mm256_srli_epi64(t, 32));
    const I8 q = _mm256_add_epi64(_mm256_mul_epu32(folded, key), _mm256_slli_epi64(t, 32));
    return _mm256_xor_si256(q, _mm256_srli_epi64(q, 32));
}

uint64_t wg_digest_run_avx2(const float *x, size_t m, uint64_t key) {
    const uint64_t step = WG_DIGEST_STEP;
    const I8 one = _mm256_set1_epi64x((long long)step), eight = _mm256_set1_epi64x((long long)(8 * step));
    I8 even = _mm256_add_epi64(_mm256_set1_epi64x((long long)key),
                               _mm256_setr_epi64x(0, (long long)(2 * step), (long long)(4 * step), (long long)(6 * step)));
    I8 sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + 16 <= m; i += 16)
        for (size_t j = 0; j < 16; j += 8) {
            const I8 v = _mm256_loadu_si256((const I8 *)(x + i + j)), odd = _mm256_add_epi64(even, one);
            sum[0] = _mm256_add_epi64(sum[0], term4(_mm256_xor_si256(v, _mm256_srli_epi64(even, 32)), even));
            sum[1] = _mm256_add_epi64(sum[1], term4(_mm256_srli_epi64(_mm256_xor_si256(v, odd), 32), odd));
            even = _mm256_add_epi64(even, eight);
        }
    uint64_t lane[4];
    _mm256_storeu_si256((I8 *)lane, _mm256_add_epi64(sum[0], sum[1]));
    return lane[0] + lane[1] + lane[2] + lane[3] + wg_digest_run(x + i, m - i, key + i * step);
}
#endif
