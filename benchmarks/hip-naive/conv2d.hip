// A 3x3 convolution, one thread for one value of y, as the sum is written down: conv2d.hip is compared with it.
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(256) naive(const half* x, const half* w, half* y, int H, int W, int Cin, int Cout) {
    const int i = block_x() * 256 + thread_index(), n = i % Cout, column = i / Cout % W, line = i / Cout / W;
    float sum = 0.0f;
    for (int ky = 0; ky < 3; ++ky) {
        for (int kx = 0; kx < 3; ++kx) {
            const int iy = line + ky - 1, ix = column + kx - 1;
            if (iy < 0 || iy >= H || ix < 0 || ix >= W) continue;
            for (int c = 0; c < Cin; ++c) {
                const float left = x[(iy * W + ix) * Cin + c], right = w[((n * 3 + ky) * 3 + kx) * Cin + c];
                sum += left * right;
            }
        }
    }
    y[i] = sum;
}
