/* Elias coding of quantized levels (QSGD's second idea): for each level that is not
 * zero, its distance from the one before, its sign, its size. A bucket starts on a
 * byte and `lengths` has its bytes, so buckets can be decoded side by side.
 *
 * gamma(v), v >= 1: as many zeros as v has bits after its first, a one, those bits;
 * everything little-endian, bit 0 of byte 0 first.
 */
#include "elias.h"

static wg_elias_table table_of(int levels) {
    wg_elias_table t = {{0}, {0}};
    for (int size = 1; size <= levels; size++) {
        const int extra = 31 - __builtin_clz((uint32_t)size);
        const uint32_t gamma = (1u | ((uint32_t)size & ((1u << extra) - 1u)) << 1) << extra;
        t.value[levels + size] = (uint16_t)(gamma << 1);
        t.value[levels - size] = (uint16_t)(gamma << 1 | 1u);
        t.bits[levels + size] = t.bits[levels - size] = (uint8_t)(2 * extra + 2);
    }
    return t;
}

static uint8_t *put_bucket(const uint8_t *codes, uint64_t m, int levels, const wg_elias_table *t, uint8_t *out) {
    wg_elias_writer w = {out, 0, 0};
    uint64_t next = 0; /* one past the last level that was written */
    for (uint64_t i = 0; i < m; i++)
        if (codes[i] != levels) {
            wg_elias_put(&w, (uint32_t)(i + 1 - next), codes[i], t);
            next = i + 1;
        }
    return wg_elias_end(&w);
}

/* `codes` holds level + levels, one a byte. `out` has room for two bytes a code and eight a bucket. Returns the bytes
 * written. */
WG_API uint64_t wg_elias(const uint8_t *codes, uint64_t n, uint64_t bucket, int levels, uint8_t *out, uint16_t *lengths) {
    const wg_elias_table t = table_of(levels);
    uint8_t *begin = out;
    for (uint64_t start = 0; start < n; start += bucket) {
        const uint64_t m = n - start < bucket ? n - start : bucket;
#if WG_HAS_AVX2_UNIT
        uint8_t *end = wg_isa() ? wg_elias_bucket_avx2(codes + start, m, levels, &t, out) : put_bucket(codes + start, m, levels, &t, out);
#else
        uint8_t *end = put_bucket(codes + start, m, levels, &t, out);
#endif
        *lengths++ = (uint16_t)(end - out);
        out = end;
    }
    return (uint64_t)(out - begin);
}

typedef struct {
    const uint8_t *in;
    uint64_t bits, at;
} reader;

/* The next bits, zero past the end. */
static uint64_t peek(const reader *r) {
    uint64_t window = 0, byte = r->at / 8, left = (r->bits + 7) / 8 - byte;
    memcpy(&window, r->in + byte, left < 8 ? left : 8);
    return window >> r->at % 8;
}

/* 0 when there is no whole code left. */
static uint32_t get_gamma(reader *r) {
    uint64_t window = peek(r);
    if (!window) return 0;
    int extra = __builtin_ctzll(window);
    if (extra > 16 || r->at + 2 * (uint64_t)extra + 1 > r->bits) return 0;
    r->at += 2 * (uint64_t)extra + 1;
    return 1u << extra | (uint32_t)(window >> (extra + 1) & ((1u << extra) - 1u));
}

/* Returns 0, or 1 when a bucket is not what wg_elias writes. */
WG_API int wg_elias_decode(const uint8_t *in, const uint16_t *lengths, uint64_t n, uint64_t bucket, int levels, uint8_t *codes) {
    memset(codes, levels, n);
    for (uint64_t start = 0; start < n; start += bucket, in += *lengths++) {
        uint64_t stop = n - start < bucket ? n : start + bucket, next = start - 1;
        reader r = {in, 8 * (uint64_t)*lengths, 0};
        while (r.bits - r.at >= 8 || (r.at < r.bits && peek(&r))) {
            uint32_t gap = get_gamma(&r);
            if (!gap || r.at >= r.bits) return 1;
            uint32_t sign = (uint32_t)peek(&r) & 1u;
            r.at++;
            uint32_t size = get_gamma(&r);
            next += gap;
            if (!size || size > (uint32_t)levels || next >= stop) return 1;
            codes[next] = (uint8_t)(sign ? levels - (int)size : levels + (int)size);
        }
    }
    return 0;
}
