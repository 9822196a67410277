/* Runs the kernels that have a NEON unit on the same values twice, portable and with vectors, and prints a line for each
 * case: its name, and a hash of all that was written, for both. test_neon.py builds and compares it. */
#include "scalar.h"

#include <stdio.h>
#include <stdlib.h>

uint64_t wg_quantize(const float *, float *, uint64_t, const wg_quantizer *, uint8_t *, float *);
void wg_dequantize(const uint8_t *, const float *, uint64_t, uint64_t, int, int, int, float *);
uint64_t wg_scan(const float *, float *, float *, uint64_t, const wg_selection *, int64_t *, float *, uint64_t *);
void wg_signs(const float *, uint64_t, uint8_t *);

#define MOST 6000u
#define GUARD 64u /* bytes behind each result that must stay as they are */

static float x[MOST], residual[MOST], velocity[MOST], out[MOST], found[MOST], scales[MOST];
static uint8_t codes[MOST + GUARD];
static int64_t indices[MOST];
static uint64_t state;

static uint32_t draw(void) {
    state = wg_mix(state);
    return (uint32_t)(state >> 32);
}

/* Floats of many sizes, zeros of both signs, ties and subnormals among them. */
static void fill(float *v, uint64_t seed) {
    state = seed;
    for (uint32_t i = 0; i < MOST; i++) {
        const uint32_t kind = draw() % 40;
        const float digits = (float)(int32_t)draw();
        v[i] = ldexpf(digits, (int)(draw() % 24) - 42);
        if (kind == 0) v[i] = 0.0f;
        if (kind == 1) v[i] = -0.0f;
        if (kind == 2) v[i] = 1.0f;
        if (kind == 3) v[i] = -1.0f;
        if (kind == 4) v[i] = 1e-41f;
    }
}

static uint64_t hash(uint64_t so_far, const void *bytes, size_t n) {
    const uint8_t *b = bytes;
    for (size_t i = 0; i < n; i++) so_far = (so_far ^ b[i]) * 0x100000001b3u;
    return so_far;
}

static void reset(void) {
    fill(x, 1);
    fill(residual, 2);
    fill(velocity, 3);
    fill(out, 4);
    memset(codes, 0xa5, sizeof codes);
    memset(found, 0, sizeof found);
    memset(indices, 0, sizeof indices);
    for (uint32_t i = 0; i < MOST; i++) scales[i] = 0.7f;
}

static uint64_t all(uint64_t result) {
    uint64_t h = hash(0xcbf29ce484222325u, &result, sizeof result);
    h = hash(h, residual, sizeof residual);
    h = hash(h, velocity, sizeof velocity);
    h = hash(h, out, sizeof out);
    h = hash(h, found, sizeof found);
    h = hash(h, scales, sizeof scales);
    h = hash(h, codes, sizeof codes);
    return hash(h, indices, sizeof indices);
}

typedef struct {
    uint64_t n;
    int bits, norm, stochastic, feedback, bad, clear, mode;
    float limit;
} job;

static uint64_t quantized(job j) {
    const int levels = (1 << (j.bits - 1)) - 1;
    const wg_quantizer q = {96, j.bits, levels, j.norm, j.stochastic, 0x0123456789abcdefu, 64, j.limit};
    reset();
    for (uint64_t i = 0; i < 96 && j.n > 300; i++) x[i] *= 1e-38f; /* a bucket of subnormals, one of zeros */
    for (uint64_t i = 96; i < 192 && j.n > 300; i++) x[i] = 0.0f;
    if (j.bad && j.n) x[j.n - 1] = NAN;
    const uint64_t done = wg_quantize(x, j.feedback ? residual : NULL, j.n, &q, codes, scales);
    wg_dequantize(codes, scales, done, 96, j.bits, levels, j.mode, out);
    return all(done);
}

static uint64_t scanned(job j) {
    const wg_selection s = {1.5f, j.stochastic ? -1.5f : -0.5f, 0.9f, j.clear, j.n / 4 + 1};
    uint64_t done = 0;
    reset();
    if (j.bad && j.n) x[j.n / 2] = INFINITY;
    const uint64_t count = wg_scan(j.norm ? x : NULL, residual, j.feedback ? velocity : NULL, j.n, &s, indices, found, &done);
    return all(count << 32 | done);
}

static uint64_t signed_bits(job j) {
    reset();
    wg_signs(x, j.n, codes);
    return all(0);
}

static void compare(const char *name, uint64_t (*work)(job), job j) {
    uint64_t hashes[2];
    for (int vectors = 0; vectors < 2; vectors++) {
        wg_force_isa(vectors ? -1 : 0);
        hashes[vectors] = work(j);
    }
    printf("%s n=%u bits=%d norm=%d stochastic=%d feedback=%d bad=%d clear=%d mode=%d limit=%g %016llx %016llx\n", name, (unsigned)j.n,
           j.bits, j.norm, j.stochastic, j.feedback, j.bad, j.clear, j.mode, (double)j.limit, (unsigned long long)hashes[0],
           (unsigned long long)hashes[1]);
}

int main(void) {
    static const uint64_t sizes[] = {0, 1, 7, 8, 31, 33, 513, 1025, 5003};
    static const int widths[] = {2, 3, 4, 8}, modes[] = {WG_STORE, WG_ADD, WG_SUBTRACT};
    printf("isa %d\n", wg_isa());
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const uint64_t n = sizes[k];
        compare("signs", signed_bits, (job){.n = n});
        for (int flags = 0; flags < 32; flags++) {
            const job j = {.n = n, .stochastic = flags & 1, .feedback = flags >> 1 & 1, .bad = flags >> 2 & 1, .norm = flags >> 3 & 1, .clear = flags >> 4};
            if (j.norm || !j.feedback) compare("scan", scanned, j);
        }
        for (int w = 0; w < 4; w++)
            for (int norm = WG_NORM_MAX; norm <= WG_NORM_GIVEN; norm++)
                for (int flags = 0; flags < 8; flags++) {
                    job j = {.n = n, .bits = widths[w], .norm = norm, .stochastic = flags & 1, .feedback = flags >> 1 & 1, .limit = INFINITY};
                    j.bad = flags >> 2 && norm != WG_NORM_GIVEN; /* given scales do not look for what is not finite */
                    j.mode = modes[(w + flags) % 3];
                    compare("quantize", quantized, j);
                    j.limit = 0.75f;
                    if (!j.feedback && !j.bad) compare("quantize", quantized, j);
                }
    }
    return 0;
}
