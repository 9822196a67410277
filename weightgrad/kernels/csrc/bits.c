/* Bit streams: small codes, and the gaps between sorted indices; gaps.c reads those.
 *
 * A gap is index - previous index - 1. Its low `width` bits go to one stream; with
 * Rice coding the rest goes to a second stream in unary: that many zeros, then a
 * one. Both streams are little-endian, bit 0 of byte 0 first.
 */
#include "scalar.h"

WG_API void wg_pack(const uint8_t *codes, uint64_t n, int bits, uint8_t *out) { wg_pack_codes(codes, n, bits, out); }

WG_API void wg_unpack(const uint8_t *in, uint64_t n, int bits, uint8_t *codes) { wg_unpack_codes(in, n, bits, codes); }

/* Unary lengths, without the ones, for width, width+1 and width+2; returns the largest gap. */
WG_API uint64_t wg_gap_costs(const int64_t *indices, uint64_t k, int width, uint64_t costs[3]) {
    uint64_t largest = 0, c0 = 0, c1 = 0, c2 = 0;
    int64_t before = -1;
    for (uint64_t i = 0; i < k; i++) {
        uint64_t gap = (uint64_t)(indices[i] - before - 1);
        before = indices[i];
        largest = gap > largest ? gap : largest;
        c0 += gap >> width;
        c1 += gap >> (width + 1);
        c2 += gap >> (width + 2);
    }
    costs[0] = c0;
    costs[1] = c1;
    costs[2] = c2;
    return largest;
}

/* `unary` may be NULL (fixed width); otherwise it must hold zeros. Returns the unary bits written. Both streams
 * are gathered in registers: adding to a byte in memory waits for the last addition to it. */
WG_API uint64_t wg_pack_gaps(const int64_t *indices, uint64_t k, int width, uint8_t *low, uint8_t *unary) {
    const uint64_t mask = width ? ~0ull >> (64 - width) : 0;
    unsigned __int128 word = 0;
    uint64_t place = 0, ones = 0, at = 0; /* ones: bits 64*at and on of the unary stream */
    int held = 0;
    int64_t before = -1;
    for (uint64_t i = 0; i < k; i++) {
        const uint64_t gap = (uint64_t)(indices[i] - before - 1);
        before = indices[i];
        word |= (unsigned __int128)(gap & mask) << held;
        held += width;
        if (held >= 64) {
            const uint64_t full = (uint64_t)word;
            memcpy(low, &full, 8);
            low += 8, word >>= 64, held -= 64;
        }
        if (unary) {
            place += gap >> width;
            if (place / 64 != at) {
                memcpy(unary + 8 * at, &ones, 8);
                ones = 0, at = place / 64;
            }
            ones |= 1ull << place % 64;
            place++;
        }
    }
    for (; held > 0; held -= 8, word >>= 8) *low++ = (uint8_t)word;
    if (unary && ones) memcpy(unary + 8 * at, &ones, (place + 7) / 8 - 8 * at);
    return place;
}
