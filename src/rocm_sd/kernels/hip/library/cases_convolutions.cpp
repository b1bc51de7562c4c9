// Cases of the convolutions.
#include "test_cases.hpp"

namespace rocm_sd_test {

namespace {

enum class added { nothing, item, residual };

// A picture, [N, H, W, C], with zeros around it.
struct picture {
    const values& data;
    int H, W, C;

    const double* at(int n, int h, int w) const {
        if (h < 0 || h >= H || w < 0 || w >= W) return nullptr;
        return &data[((static_cast<size_t>(n) * H + h) * W + w) * C];
    }
};

struct conv {
    int N, Cin, H, W, Cout, size, stride, padding;
};

void conv2d(cases& all, conv of, added what, rocm_sd_dtype dtype) {
    const auto [N, Cin, H, W, Cout, size, stride, padding] = of;
    const int Ho = (H + 2 * padding - size) / stride + 1, Wo = (W + 2 * padding - size) / stride + 1;
    const size_t pixels = static_cast<size_t>(N) * Ho * Wo, workspace_bytes =
        rocm_sd_conv2d_workspace(N, Cin, H, W, Cout, size, stride, padding, dtype);
    const std::string shape = shape_of({N, Cin, H, W}) + " to " + std::to_string(Cout) + ", " + shape_of({size, size}) +
                              (stride > 1 ? "/" + std::to_string(stride) : "") + (padding ? "p" : "") +
                              (what == added::item ? ", add" : what == added::residual ? ", residual" : "");
    test_case& test = add(all, "conv2d", shape, dtype);
    const values x = random_values(static_cast<size_t>(N) * H * W * Cin, dtype, 31);
    const values weight = random_values(static_cast<size_t>(Cout) * size * size * Cin, dtype, 32);
    const values bias = random_values(static_cast<size_t>(Cout), dtype, 33);
    const values item = random_values(static_cast<size_t>(N) * Cout, dtype, 34);
    const values residual = random_values(pixels * Cout, dtype, 35);
    const picture of_x{x, H, W, Cin};
    expected y = nothing_known(pixels * Cout);
    const sampled_rows sampled(static_cast<int>(pixels), static_cast<double>(Cout) * size * size * Cin);
    for (int pixel = 0; pixel < sampled.rows; ++pixel) {
        if (!sampled.has(pixel)) continue;
        const int n = pixel / (Ho * Wo), h = pixel / Wo % Ho, w = pixel % Wo;
        for (int o = 0; o < Cout; ++o) {
            const size_t at = static_cast<size_t>(pixel) * Cout + o;
            sum one;
            one.add(bias[o]);
            if (what == added::item) one.add(item[static_cast<size_t>(n) * Cout + o]);
            if (what == added::residual) one.add(residual[at]);
            for (int tap = 0; tap < size * size; ++tap) {
                const double* from = of_x.at(n, h * stride - padding + tap / size, w * stride - padding + tap % size);
                const double* by = &weight[(static_cast<size_t>(o) * size * size + tap) * Cin];
                for (int c = 0; from && c < Cin; ++c) one.add(from[c] * by[c]);
            }
            y.exact[at] = one.value;
            y.slack[at] = one.slack();
        }
    }
    const void *in = test.give(x), *wt = test.give(weight), *b = test.give(bias);
    const void* i = what == added::item ? test.give(item) : nullptr;
    const void* r = what == added::residual ? test.give(residual) : nullptr;
    void *out = test.take(std::move(y)), *workspace = nullptr;
    if (workspace_bytes) {
        test.memory.push_back(std::make_unique<device_values>(workspace_bytes / sizeof(float), rocm_sd_float32));
        workspace = test.memory.back()->data();
    }
    test.work = 2.0 * static_cast<double>(pixels) * Cout * size * size * Cin;
    test.is_flops = true;
    test.launch = [=] {
        return rocm_sd_conv2d(in, wt, b, i, r, out, of.N, of.Cin, of.H, of.W, of.Cout, of.size, of.stride, of.padding,
                              workspace, dtype, nullptr);
    };
}

void upsample_conv2d(cases& all, int N, int Cin, int H, int W, int Cout, rocm_sd_dtype dtype) {
    test_case& test =
        add(all, "upsample_conv2d", shape_of({N, Cin, H, W}) + " to " + std::to_string(Cout), dtype);
    const values x = random_values(static_cast<size_t>(N) * H * W * Cin, dtype, 36);
    values weight = random_values(static_cast<size_t>(Cout) * 9 * Cin, dtype, 37);
    // Multiples of 1/32: sums of four of them are exact in every dtype, so that the reference can be the plain one.
    for (double& each : weight) each = std::nearbyint(each * 32) / 32;
    const values bias = random_values(static_cast<size_t>(Cout), dtype, 38);
    const std::vector<float> narrow(weight.begin(), weight.end());
    std::vector<float> sums(static_cast<size_t>(16) * Cout * Cin);
    rocm_sd_parity_weights(narrow.data(), sums.data(), Cout, Cin);
    const picture of_x{x, H, W, Cin};
    const int pixels = N * 4 * H * W;
    expected y = nothing_known(static_cast<size_t>(pixels) * Cout);
    const sampled_rows sampled(pixels, 9.0 * Cout * Cin);
    for (int pixel = 0; pixel < pixels; ++pixel) {
        if (!sampled.has(pixel)) continue;
        const int n = pixel / (4 * H * W), h = pixel / (2 * W) % (2 * H), w = pixel % (2 * W);
        for (int o = 0; o < Cout; ++o) {
            sum one;
            one.add(bias[o]);
            for (int tap = 0; tap < 9; ++tap) {
                // In the enlarged picture; a line above the first must not be halved towards it.
                const int row = h - 1 + tap / 3, column = w - 1 + tap % 3;
                const double* from = row < 0 || column < 0 ? nullptr : of_x.at(n, row / 2, column / 2);
                const double* by = &weight[(static_cast<size_t>(o) * 9 + tap) * Cin];
                for (int c = 0; from && c < Cin; ++c) one.add(from[c] * by[c]);
            }
            y.exact[static_cast<size_t>(pixel) * Cout + o] = one.value;
            y.slack[static_cast<size_t>(pixel) * Cout + o] = one.slack();
        }
    }
    const void *in = test.give(x), *s = test.give(values(sums.begin(), sums.end())), *b = test.give(bias);
    void* out = test.take(std::move(y));
    // Four convolutions of 2x2: what is computed, and not what it stands for.
    test.work = 2.0 * pixels * Cout * 4.0 * Cin;
    test.is_flops = true;
    test.launch = [=] { return rocm_sd_upsample_conv2d(in, s, b, out, N, Cin, H, W, Cout, dtype, nullptr); };
}

}  // namespace

std::vector<family> convolution_families() {
    return {
        {"conv2d", halves([](cases& to, rocm_sd_dtype dtype) {
             conv2d(to, {2, 24, 7, 9, 40, 3, 1, 1}, added::residual, dtype);
             conv2d(to, {1, 5, 9, 7, 7, 3, 2, 1}, added::item, dtype);
             conv2d(to, {1, 4, 6, 5, 24, 3, 1, 1}, added::nothing, dtype);
             conv2d(to, {1, 24, 5, 6, 3, 3, 1, 0}, added::nothing, dtype);
             conv2d(to, {2, 72, 5, 5, 40, 1, 1, 0}, added::item, dtype);
             // Few tiles and much depth: in parts.
             conv2d(to, {1, 128, 6, 6, 40, 3, 1, 1}, added::residual, dtype);
             // Four tiles of any kind: on a device of four compute units the large ones.
             conv2d(to, {1, 8, 16, 16, 256, 3, 1, 1}, added::nothing, dtype);
         }),
         [](cases& to) {
             conv2d(to, {2, 320, 64, 64, 320, 3, 1, 1}, added::item, rocm_sd_float16);
             conv2d(to, {2, 1280, 8, 8, 1280, 3, 1, 1}, added::residual, rocm_sd_float16);
         }},
        {"upsample_conv2d", halves([](cases& to, rocm_sd_dtype dtype) {
             upsample_conv2d(to, 2, 24, 5, 3, 40, dtype);
             upsample_conv2d(to, 1, 5, 4, 3, 7, dtype);
         }),
         [](cases& to) { upsample_conv2d(to, 2, 640, 32, 32, 640, rocm_sd_float16); }},
    };
}

}  // namespace rocm_sd_test
