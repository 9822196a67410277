/* NEON unit of select.c. A run is read once to see that all of it is finite, which brings it into the first-level cache,
 * and then advanced. What was sent last is taken out by the portable run. */
#include "units.h"

#if WG_HAS_NEON_UNIT
#include "lanes_neon.h"

ALWAYS_INLINE float32x4_t next(const float *x, const float *residual, const float *velocity, size_t i, float32x4_t momentum,
                               float32x4_t *speed) {
    float32x4_t h = vld1q_f32(residual + i);
    if (!x) return h;
    *speed = vld1q_f32(x + i);
    if (velocity) *speed = vaddq_f32(vmulq_f32(momentum, vld1q_f32(velocity + i)), *speed);
    return vaddq_f32(h, *speed);
}

/* Lists what has passed among four elements from `first` on. */
static void list(wg_pass *p, uint64_t first, float32x4_t h, const wg_selection *s) {
    float value[4];
    vst1q_f32(value, h);
    for (uint64_t i = 0; i < 4; i++)
        if (value[i] >= s->above || value[i] <= s->below) {
            if (p->count < s->capacity) {
                p->indices[p->count] = (int64_t)(first + i);
                p->values[p->count] = value[i];
                if (s->clear) p->residual[first + i] = 0.0f;
            }
            p->count++;
        }
}

ALWAYS_INLINE int select_run(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const int with_x, const int with_velocity) {
    const float *x = with_x ? p->x + first : NULL;
    float *residual = p->residual + first, *velocity = with_velocity ? p->velocity + first : NULL;
    const float32x4_t momentum = vdupq_n_f32(s->momentum), above = vdupq_n_f32(s->above), below = vdupq_n_f32(s->below);
    float32x4_t speed = momentum;
    uint32x4_t top = vdupq_n_u32(0);
    for (size_t i = 0; i < m; i += 4) top = vmaxq_u32(top, magnitude4(next(x, residual, velocity, i, momentum, &speed)));
    if (vmaxvq_u32(top) >= WG_INFINITY) return 0;
    for (size_t i = 0; i < m; i += 4) {
        const float32x4_t h = next(x, residual, velocity, i, momentum, &speed);
        if (x) vst1q_f32(residual + i, h);
        if (velocity) vst1q_f32(velocity + i, speed);
        if (vmaxvq_u32(vorrq_u32(vcgeq_f32(h, above), vcleq_f32(h, below)))) list(p, first + i, h, s);
    }
    return 1;
}

int wg_select_run_neon(wg_pass *p, uint64_t first, size_t m, const wg_selection *s, const wg_old *old) {
    if (old) return wg_select_run(p, first, m, s, old);
    if (!p->x) return select_run(p, first, m, s, 0, 0);
    return p->velocity ? select_run(p, first, m, s, 1, 1) : select_run(p, first, m, s, 1, 0);
}
#endif
