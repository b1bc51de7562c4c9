// Bilinear enlarging, one thread for one value of y, which reads its four neighbours: upsample.hip is compared with it.
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(256) naive(const half* x, half* y, int C, int H, int W) {
    const int i = block_x() * 256 + thread_index(), c = i % C, column = i / C % (2 * W), line = i / C / (2 * W);
    const int upper = (line + 1) / 2 - 1, left = (column + 1) / 2 - 1;
    const float down = line % 2 ? 0.25f : 0.75f, across = column % 2 ? 0.25f : 0.75f;
    const auto at = [&](int h, int w) {
        return static_cast<float>(x[(larger(smaller(h, H - 1), 0) * W + larger(smaller(w, W - 1), 0)) * C + c]);
    };
    const float above = at(upper, left) * (1.0f - across) + at(upper, left + 1) * across;
    const float below = at(upper + 1, left) * (1.0f - across) + at(upper + 1, left + 1) * across;
    y[i] = above * (1.0f - down) + below * down;
}
