/* A digest that adds up: the sum over the elements of a function of (index, bits), mod 2^64.
 *
 * `first` is the index of x[0]. The digest of a vector is the sum of the digests of its parts, so
 * neither threads nor chunks can be seen in it.
 */
#include "units.h"

uint64_t wg_digest_run(const float *x, size_t m, uint64_t key) {
    uint64_t sum = 0;
    for (size_t i = 0; i < m; i++, key += WG_DIGEST_STEP) sum += wg_digest_term(wg_bits(x[i]), key);
    return sum;
}

WG_API uint64_t wg_digest(const float *x, uint64_t n, uint64_t first) {
    uint64_t sum = 0;
    for (uint64_t i = 0, m; i < n; i += m) {
        const uint64_t left = WG_DIGEST_BLOCK - (first + i) % WG_DIGEST_BLOCK, key = wg_digest_key(first + i);
        m = n - i < left ? n - i : left;
#if WG_HAS_AVX2_UNIT
        if (wg_isa()) {
            sum += wg_isa() == 2 ? wg_digest_run_avx512(x + i, m, key) : wg_digest_run_avx2(x + i, m, key);
            continue;
        }
#endif
        sum += wg_digest_run(x + i, m, key);
    }
    return WG_DIGEST_SPREAD * sum;
}
