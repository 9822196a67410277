/* One step of an outer optimizer with Nesterov momentum, from the sum of the updates:
 *
 *   mean = total / weight;  velocity = momentum * velocity + mean;  total = lr * (mean + momentum * velocity)
 *
 * Every product and sum is rounded by itself, so that a vector can be cut anywhere. */
#include "wg.h"

WG_API void wg_nesterov(float *total, float weight, float *velocity, float momentum, float lr, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        const float mean = total[i] / weight, kept = velocity[i] * momentum, speed = kept + mean, ahead = speed * momentum;
        velocity[i] = speed;
        total[i] = (mean + ahead) * lr;
    }
}
