/* AVX2 unit of gaps.c: eight indices at a time, in 32 bits. */
#include "units.h"

#if WG_HAS_AVX2_UNIT
#include "lanes.h"

static uint8_t places[256][8]; /* of the ones in a byte */
static uint8_t counts[256];

__attribute__((constructor)) static void fill(void) {
    for (unsigned byte = 0; byte < 256; byte++)
        for (unsigned bit = 0; bit < 8; bit++)
            if (byte >> bit & 1) places[byte][counts[byte]++] = (uint8_t)bit;
}

/* Eight codes of `width` bits lie in `width` bytes: a shuffle brings the four bytes in which a code begins to its lane. */
typedef struct {
    I8 bytes, shifts, mask;
} lows;

ALWAYS_INLINE lows lows_of(int width) {
    uint8_t bytes[32];
    int32_t shifts[8];
    for (int j = 0; j < 8; j++) {
        shifts[j] = j * width % 8;
        for (int b = 0; b < 4; b++) bytes[4 * j + b] = (uint8_t)(j * width / 8 + b);
    }
    lows l = {_mm256_loadu_si256((const I8 *)bytes), _mm256_loadu_si256((const I8 *)shifts), same((1u << width) - 1u)};
    return l;
}

ALWAYS_INLINE I8 lows8(const lows *l, const wg_gaps *g, uint64_t i) {
    const uint64_t at = i / 8 * (uint64_t)g->width;
    __m128i some = _mm_setzero_si128();
    if (__builtin_expect(at + 16 <= g->low_bytes, 1)) some = _mm_loadu_si128((const __m128i *)(g->low + at));
    else if (at < g->low_bytes) memcpy(&some, g->low + at, g->low_bytes - at);
    const I8 words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(some), l->bytes);
    return _mm256_and_si256(_mm256_srlv_epi32(words, l->shifts), l->mask);
}

uint64_t wg_gaps_low_sum_avx2(const wg_gaps *g) {
    const lows l = lows_of(g->width);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < g->k;) {
        I8 total = _mm256_setzero_si256();
        for (uint64_t end = i + (1u << 19); i < g->k && i < end; i += 8) /* 2^16 of at most 12 bits a lane */
            total = _mm256_add_epi32(total, lows8(&l, g, i));
        uint32_t lane[8];
        _mm256_storeu_si256((I8 *)lane, total);
        for (int j = 0; j < 8; j++) sum += lane[j];
    }
    return sum;
}

ALWAYS_INLINE I8 running_sums(I8 v) {
    v = _mm256_add_epi32(v, _mm256_slli_si256(v, 4));
    v = _mm256_add_epi32(v, _mm256_slli_si256(v, 8));
    const I8 lower = _mm256_permutevar8x32_epi32(v, same(3)); /* what the lower half comes to, for the upper half */
    return _mm256_add_epi32(v, _mm256_blend_epi32(_mm256_setzero_si256(), lower, 0xf0));
}

/* Fills `ones` with the places of at least m ones of the unary stream. */
ALWAYS_INLINE void find_ones(wg_gaps *g, uint64_t m) {
    while (g->have < m) {
        uint64_t word = 0;
        const uint64_t left = g->unary_bytes - g->byte;
        memcpy(&word, g->unary + g->byte, left < 8 ? left : 8);
        uint32_t *out = g->ones + g->have, first = (uint32_t)(8 * g->byte);
        for (int b = 0; b < 8; b++, word >>= 8, first += 8) {
            const uint64_t byte = word & 255;
            const I8 here = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)places[byte]));
            _mm256_storeu_si256((I8 *)out, _mm256_add_epi32(here, same(first)));
            out += counts[byte];
        }
        g->have = (uint64_t)(out - g->ones);
        g->byte += 8;
    }
}

void wg_gaps_read_avx2(wg_gaps *g, uint64_t m, int32_t *indices) {
    const lows l = lows_of(g->width);
    const I8 eight = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = same(7);
    const __m128i width = _mm_cvtsi32_si128(g->width);
    I8 sum = same((uint32_t)g->sum);
    if (g->rice) find_ones(g, m);
    for (uint64_t i = 0; i < m; i += 8) {
        const I8 at = _mm256_add_epi32(same((uint32_t)(g->at + i)), eight);
        const I8 low = _mm256_add_epi32(running_sums(lows8(&l, g, g->at + i)), sum);
        I8 index = _mm256_add_epi32(low, at);
        if (g->rice) {
            const I8 zeros = _mm256_sub_epi32(_mm256_loadu_si256((const I8 *)(g->ones + i)), at);
            index = _mm256_add_epi32(index, _mm256_sll_epi32(zeros, width));
        }
        _mm256_storeu_si256((I8 *)(indices + i), index);
        sum = _mm256_permutevar8x32_epi32(low, last);
    }
    g->sum = (uint32_t)_mm256_extract_epi32(sum, 0);
    g->at += m;
    if (g->rice) {
        g->have -= m;
        memmove(g->ones, g->ones + m, g->have * sizeof *g->ones);
    }
}
#endif
