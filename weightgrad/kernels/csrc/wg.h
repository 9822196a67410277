/* The hot loops of WeightGrad: a plain C library, called through ctypes.
 *
 * Every kernel exists in portable C; the ones that are worth it exist a second
 * time in AVX2 (`*_avx2.c`), and where that is faster a third time in AVX-512 (`*_avx512.c`),
 * chosen at run time; for ARM the hottest exist in NEON (`*_neon.c`). All, and the torch reference implementations in
 * the kernels folder, give the same bytes and the same floats. That is why:
 *   - noise is a hash of (key, element index), never a generator with state;
 *   - a decoded value is one exact integer times one float multiply;
 *   - float sums follow a fixed tree that is written down next to the kernel;
 *   - the build never contracts a*b+c (-ffp-contract=off).
 *
 * A tensor is a dense float array. Nothing here allocates, locks or prints.
 */
#ifndef WG_H
#define WG_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define WG_API __declspec(dllexport)
#else
#define WG_API __attribute__((visibility("default")))
#endif

/* With WG_PORTABLE_ONLY no vector unit is used: for tests that link none. */
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(WG_PORTABLE_ONLY)
#define WG_HAS_AVX2_UNIT 1
#else
#define WG_HAS_AVX2_UNIT 0
#endif

#if defined(__aarch64__)
#define WG_HAS_NEON_UNIT 1
#else
#define WG_HAS_NEON_UNIT 0
#endif

/* 0 portable; on x86 1 AVX2, 2 AVX2 and AVX-512; on ARM 1 NEON. */
WG_API int wg_isa(void);
/* Force an instruction set (tests, benchmarks); returns the one now in force. */
WG_API int wg_force_isa(int isa);

enum { WG_NORM_MAX = 0, WG_NORM_L2 = 1, WG_NORM_GIVEN = 2 };
enum { WG_STORE = 0, WG_ADD = 1, WG_SUBTRACT = -1 };

/* A uniform quantizer over buckets: see bucket.c. */
typedef struct {
    uint64_t bucket;    /* elements that share a scale, a multiple of 32 */
    int32_t bits;       /* storage: 2, 3, 4 or 8 */
    int32_t levels;     /* L: codes are 0 .. 2L, code q means q - L */
    int32_t norm;       /* WG_NORM_* */
    int32_t stochastic; /* 0: nearest */
    uint64_t key;
    uint64_t first;     /* index of x[0] in its tensor: a multiple of 32 */
    float limit;        /* x, which is finite then, is cut to +-limit first; without residual; INFINITY does nothing */
} wg_quantizer;

/* Selection by two thresholds: see select.c. */
typedef struct {
    float above, below; /* keep h >= above or h <= below */
    float momentum;     /* used when velocity is given */
    int32_t clear;      /* zero `residual` at what is listed */
    uint64_t capacity;  /* of indices and values */
} wg_selection;

/* What the last selection sent: h >= above as the positive mean of its column, h <= below as
 * the negative one. Means are tiles x 2 x cols; `cols` may be 1. */
typedef struct {
    float above, below;
    uint64_t rows, cols, tile;
    const float *means;
} wg_sent;

/* The streams of k indices below n: see bits.c. */
typedef struct {
    const uint8_t *low, *unary;
    uint64_t unary_bytes, k, n;
    int32_t width, rice; /* rice: 0 with a fixed width, which has no unary stream */
} wg_gap_streams;

/* What is written to indices: values, or if that is NULL a size with the sign bits of all; each times a share. */
typedef struct {
    const float *values;
    const uint8_t *signs;
    float size, share;
} wg_entry_values;

/* Sparse entries that are added to a vector: their places count from `first` on. */
typedef struct {
    wg_gap_streams streams;
    wg_entry_values values;
    uint64_t first;
} wg_entries;

/* The memory of the elements first .. last-1. */
typedef struct {
    uint64_t first, last;
    float *out;
} wg_area;

#define WG_BLOCK 4096u      /* elements under one partial sum */
#define WG_SCAN_BLOCK 1024u /* elements looked at before any is written: fits the first-level cache */
#define WG_TREE 32u         /* fan-in of a column sum */
#define WG_TRIT_GROUP 160u  /* 5 x 32 trits in 32 bytes */

#endif
