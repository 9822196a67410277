/* How a tensor is quantized bucket by bucket, for the units of bucket.c: each has a file of its own with `max_norm` and
 * `encode_run` in its width, and includes this behind them. */
#ifndef WG_BUCKET_LOOPS_H
#define WG_BUCKET_LOOPS_H

/* The norm of x cut to +-limit, which is finite: where one element lies beyond it, the others need not be looked at. */
ALWAYS_INLINE uint32_t cut_norm(const float *x, size_t m, float limit) {
    const uint32_t most = wg_bits(limit);
    uint32_t top = 0;
    for (size_t i = 0; i < m && top <= most; i += 128) {
        const uint32_t own = max_norm(x + i, NULL, m - i < 128 ? m - i : 128);
        top = own > top ? own : top;
    }
    return top < most ? top : most;
}

ALWAYS_INLINE uint64_t encode_all(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes,
                                  float *scales, const int bits, const int stochastic, const int clips) {
    for (uint64_t i = 0, b = 0; i < n; i += q->bucket, b++) {
        const size_t m = n - i < q->bucket ? n - i : q->bucket;
        float *r = residual ? residual + i : NULL;
        const int given = q->norm == WG_NORM_GIVEN;
        float norm = given                    ? scales[b] * (float)q->levels
                     : q->norm == WG_NORM_MAX ? wg_float(clips ? cut_norm(x + i, m, q->limit) : max_norm(x + i, r, m))
                                              : l2_norm(x + i, r, m, q->limit, clips);
        if (wg_magnitude(norm) >= WG_INFINITY) return i;
        wg_ruler ruler = wg_make_ruler(norm, q->levels);
        if (given) ruler.scale = scales[b];
        scales[b] = ruler.scale;
        uint8_t *to = codes + i / 8 * (uint64_t)bits;
        if (ruler.before != 1.0f) wg_quantize_run(x + i, r, m, q, ruler, q->first + i, to);
        else if (given) encode_run(x + i, r, m, q, ruler, q->first + i, to, bits, stochastic, 1, clips);
        else encode_run(x + i, r, m, q, ruler, q->first + i, to, bits, stochastic, 0, clips);
    }
    return n;
}

ALWAYS_INLINE uint64_t encode_noise(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes,
                                    float *scales, const int bits) {
    if (residual)
        return q->stochastic ? encode_all(x, residual, n, q, codes, scales, bits, 1, 0)
                             : encode_all(x, residual, n, q, codes, scales, bits, 0, 0);
    if (q->limit < INFINITY)
        return q->stochastic ? encode_all(x, NULL, n, q, codes, scales, bits, 1, 1)
                             : encode_all(x, NULL, n, q, codes, scales, bits, 0, 1);
    return q->stochastic ? encode_all(x, NULL, n, q, codes, scales, bits, 1, 0)
                         : encode_all(x, NULL, n, q, codes, scales, bits, 0, 0);
}

ALWAYS_INLINE uint64_t quantize_in(const float *x, float *residual, uint64_t n, const wg_quantizer *q, uint8_t *codes, float *scales) {
    switch (q->bits) {
    case 2: return encode_noise(x, residual, n, q, codes, scales, 2);
    case 3: return encode_noise(x, residual, n, q, codes, scales, 3);
    case 4: return encode_noise(x, residual, n, q, codes, scales, 4);
    default: return encode_noise(x, residual, n, q, codes, scales, 8);
    }
}

#endif
