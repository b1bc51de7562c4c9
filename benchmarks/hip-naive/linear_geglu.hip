// One thread for one value of h, then another pass for value and gate, as the sums are written down: linear_geglu.hip is
// compared with it.
#include <rocm_sd/gelu.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(256) product(const half* x, const half* w, half* h, int N, int K) {
    const int i = block_x() * 256 + thread_index();
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float left = x[i / N * K + k], right = w[i % N * K + k];
        sum += left * right;
    }
    h[i] = sum;
}
ROCM_SD_KERNEL(256) gate(const half* h, half* y, int F) {
    const int i = block_x() * 256 + thread_index(), value = i / F * 2 * F + i % F;
    const float left = h[value], right = h[value + F];
    y[i] = left * gelu(right);
}
