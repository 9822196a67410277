/* Ternary values at 1.6 bits: stochastic for gradients (TernGrad), by threshold
 * for weights (loss-aware).
 *
 * Gradients: h = x, or x + residual, clipped to +-scale; P(+-1) = |h|/scale;
 * residual = (x + residual) - value.
 * Weights: code = 1 + sign(w) where |w| > threshold. A pass sums D and
 * D*|w| over what it keeps, in double for each WG_BLOCK elements by the tree of units.h,
 * because that is what the best scale is made of.
 */
#include "units.h"

void wg_ternary_run(const float *x, float *residual, size_t m, float scale, wg_ruler ruler, uint64_t key, uint64_t index,
                    uint8_t *codes) {
    uint8_t trit[WG_TRIT_GROUP];
    for (size_t i = 0; i < m; i += WG_TRIT_GROUP) {
        size_t part = m - i < WG_TRIT_GROUP ? m - i : WG_TRIT_GROUP;
        for (size_t j = 0; j < part; j++) {
            float h = residual ? x[i + j] + residual[i + j] : x[i + j];
            uint32_t code = wg_level(wg_clamp(h, scale), ruler, 1, wg_noise(key, index + i + j), 0);
            if (residual) residual[i + j] = h - wg_value(code, 1, scale);
            trit[j] = (uint8_t)code;
        }
        wg_pack_trits(trit, part, codes + i / 5);
    }
}

void wg_ternary_decode_run(const uint8_t *codes, size_t m, float scale, int mode, float *out) {
    uint8_t trit[WG_TRIT_GROUP];
    for (size_t i = 0; i < m; i += WG_TRIT_GROUP) {
        size_t part = m - i < WG_TRIT_GROUP ? m - i : WG_TRIT_GROUP;
        wg_unpack_trits(codes + i / 5, part, trit);
        for (size_t j = 0; j < part; j++) wg_put(out + i + j, wg_value(trit[j], 1, scale), mode);
    }
}

/* One float of D or, without curvature, one. */
static float weight_of(const float *d, uint64_t i) { return d ? d[i] : 1.0f; }

/* One block or less. */
uint32_t wg_ternary_sums_run(const float *w, const float *d, size_t m, float threshold, double *partials) {
    double wide[2][WG_LANES] = {{0}};
    uint32_t top = 0;
    for (size_t i = 0; i < m; i++) {
        float a = wg_float(wg_magnitude(w[i]));
        top = wg_bits(a) > top ? wg_bits(a) : top;
        if (d) top = wg_bits(d[i]) > top ? wg_bits(d[i]) : top;
        if (a > threshold) {
            float weight = weight_of(d, i);
            wide[0][i % WG_LANES] += (double)(weight * a);
            wide[1][i % WG_LANES] += (double)weight;
        }
    }
    for (int s = 0; s < 2; s++) wg_fold_block(wide[s], partials + s);
    return top;
}

static uint32_t ternary_sums(const float *w, const float *d, uint64_t n, float threshold, double *partials) {
    uint32_t top = 0;
    for (uint64_t i = 0; i < n; i += WG_BLOCK, partials += 2) {
        size_t m = n - i < WG_BLOCK ? n - i : WG_BLOCK;
        uint32_t own = wg_ternary_sums_run(w + i, d ? d + i : NULL, m, threshold, partials);
        top = own > top ? own : top;
    }
    return top;
}

void wg_ternary_threshold_run(const float *w, size_t m, float threshold, uint8_t *codes) {
    uint8_t trit[WG_TRIT_GROUP];
    for (size_t i = 0; i < m; i += WG_TRIT_GROUP) {
        size_t part = m - i < WG_TRIT_GROUP ? m - i : WG_TRIT_GROUP;
        for (size_t j = 0; j < part; j++) trit[j] = (uint8_t)(1 + (w[i + j] > threshold) - (w[i + j] < -threshold));
        wg_pack_trits(trit, part, codes + i / 5);
    }
}

/* Weighted sums for a scale of m-bit weights: b = level of w, S1 = sum D*b*w, S2 = sum D*b*b. One block or less. */
uint32_t wg_level_sums_run(const float *w, const float *d, size_t m, wg_ruler ruler, int levels, double *partials) {
    double wide[2][WG_LANES] = {{0}};
    uint32_t top = 0;
    for (size_t i = 0; i < m; i++) {
        top = wg_magnitude(w[i]) > top ? wg_magnitude(w[i]) : top;
        if (d) top = wg_bits(d[i]) > top ? wg_bits(d[i]) : top;
        float b = (float)((int32_t)wg_level(w[i], ruler, levels, 0x8000u, 1) - levels);
        float db = weight_of(d, i) * b;
        wide[0][i % WG_LANES] += (double)(db * w[i]);
        wide[1][i % WG_LANES] += (double)(db * b);
    }
    for (int s = 0; s < 2; s++) wg_fold_block(wide[s], partials + s);
    return top;
}

WG_API uint32_t wg_level_sums(const float *w, const float *d, uint64_t n, float alpha, int levels, double *partials) {
    wg_ruler ruler = wg_make_ruler(alpha, levels);
#if WG_HAS_AVX2_UNIT
    if (wg_isa() > 1 && ruler.before == 1.0f) return wg_level_sums_avx512(w, d, n, ruler, levels, partials);
    if (wg_isa() && ruler.before == 1.0f) return wg_level_sums_avx2(w, d, n, ruler, levels, partials);
#endif
    uint32_t top = 0;
    for (uint64_t i = 0; i < n; i += WG_BLOCK, partials += 2) {
        size_t m = n - i < WG_BLOCK ? n - i : WG_BLOCK;
        uint32_t own = wg_level_sums_run(w + i, d ? d + i : NULL, m, ruler, levels, partials);
        top = own > top ? own : top;
    }
    return top;
}

WG_API void wg_ternary(const float *x, float *residual, uint64_t n, float scale, uint64_t key, uint64_t first, uint8_t *codes) {
    wg_ruler ruler = wg_make_ruler(scale, 1);
#if WG_HAS_AVX2_UNIT
    if (wg_isa() && ruler.before == 1.0f) {
        wg_ternary_avx2(x, residual, n, scale, ruler, key, first, codes);
        return;
    }
#endif
    wg_ternary_run(x, residual, n, scale, ruler, key, first, codes);
}

WG_API void wg_ternary_decode(const uint8_t *codes, uint64_t n, float scale, int mode, float *out) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_ternary_decode_avx2(codes, n, scale, mode, out);
        return;
    }
#endif
    wg_ternary_decode_run(codes, n, scale, mode, out);
}

/* Returns the largest of the bits of |w| and of D: from WG_INFINITY on, something is not finite or D
 * is negative. */
WG_API uint32_t wg_ternary_sums(const float *w, const float *d, uint64_t n, float threshold, double *partials) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa() > 1) return wg_ternary_sums_avx512(w, d, n, threshold, partials);
    if (wg_isa()) return wg_ternary_sums_avx2(w, d, n, threshold, partials);
#endif
    return ternary_sums(w, d, n, threshold, partials);
}

WG_API void wg_ternary_threshold(const float *w, uint64_t n, float threshold, uint8_t *codes) {
#if WG_HAS_AVX2_UNIT
    if (wg_isa()) {
        wg_ternary_threshold_avx2(w, n, threshold, codes);
        return;
    }
#endif
    wg_ternary_threshold_run(w, n, threshold, codes);
}
