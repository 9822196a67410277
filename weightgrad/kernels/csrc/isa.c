/* Which instruction set the kernels use. */
#include "wg.h"

static int chosen = -1;

static int best(void) {
#if WG_HAS_AVX2_UNIT
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return 0;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? 2 : 1;
#else
    return WG_HAS_NEON_UNIT; /* every aarch64 has it */
#endif
}

int wg_isa(void) {
    int isa = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (isa < 0) {
        isa = best();
        __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    }
    return isa;
}

int wg_force_isa(int isa) {
    int top = best();
    isa = isa < 0 || isa > top ? top : isa;
    __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    return isa;
}
