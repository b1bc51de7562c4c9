// What stock torch does by itself between the products of a transformer block: one value a thread, all through memory.
#include <rocm_sd/gelu.hpp>

using namespace rocm_sd;

ROCM_SD_KERNEL(256) add(const half* a, const half* b, half* y) {
    const int i = block_x() * 256 + thread_index();
    y[i] = a[i] + b[i];
}

/// Of h, [M, 2F]: gelu of the second half of each row.
ROCM_SD_KERNEL(256) gelu_of(const half* h, half* y, int F) {
    const int i = block_x() * 256 + thread_index();
    const float gate = h[i / F * 2 * F + F + i % F];
    y[i] = gelu(gate);
}

ROCM_SD_KERNEL(256) times(const half* h, const half* gates, half* y, int F) {
    const int i = block_x() * 256 + thread_index();
    y[i] = h[i / F * 2 * F + i % F] * gates[i];
}
