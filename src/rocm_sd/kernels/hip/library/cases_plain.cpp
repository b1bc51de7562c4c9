// Cases of the kernels without products.
#include "test_cases.hpp"

namespace rocm_sd_test {

namespace {

void layout_copy(cases& all, int N, int C, int HW, bool last, rocm_sd_dtype dtype) {
    test_case& test = add(all, "layout_copy", shape_of({N, C, HW}) + (last ? " to last" : " from last"), dtype);
    const size_t count = static_cast<size_t>(N) * C * HW;
    const values x = random_values(count, dtype, 1);
    expected right{values(count), values(count, 0.0)};
    const int P = last ? C : HW, Q = last ? HW : C;
    for (int n = 0; n < N; ++n) {
        for (int p = 0; p < P; ++p) {
            for (int q = 0; q < Q; ++q) {
                const size_t item = static_cast<size_t>(n) * P * Q;
                right.exact[item + static_cast<size_t>(q) * P + p] = x[item + static_cast<size_t>(p) * Q + q];
            }
        }
    }
    void *from = test.give(x), *to = test.take(std::move(right));
    test.work = 2.0 * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] { return rocm_sd_layout_copy(from, to, N, C, HW, last, dtype, nullptr); };
}

void upsample(cases& all, int N, int C, int H, int W, bool bilinear, rocm_sd_dtype dtype) {
    test_case& test =
        add(all, "upsample", shape_of({N, C, H, W}) + (bilinear ? " bilinear" : " nearest"), dtype);
    const size_t count = static_cast<size_t>(N) * C * H * W;
    const values x = random_values(count, dtype, 2);
    expected right{values(4 * count), values(4 * count, bilinear ? 8 * float_step : 0.0)};
    const auto at = [&](int n, int h, int w, int c) {
        h = std::clamp(h, 0, H - 1);
        w = std::clamp(w, 0, W - 1);
        return x[((static_cast<size_t>(n) * H + h) * W + w) * C + c];
    };
    for (int n = 0; n < N; ++n) {
        for (int h = 0; h < 2 * H; ++h) {
            for (int w = 0; w < 2 * W; ++w) {
                for (int c = 0; c < C; ++c) {
                    double& value = right.exact[((static_cast<size_t>(n) * 2 * H + h) * 2 * W + w) * C + c];
                    // A child stands a quarter of a pixel away from its parent: three parts parent, one neighbour.
                    const int down = h % 2 ? 1 : -1, across = w % 2 ? 1 : -1;
                    value = bilinear ? 0.5625 * at(n, h / 2, w / 2, c) + 0.1875 * at(n, h / 2 + down, w / 2, c) +
                                           0.1875 * at(n, h / 2, w / 2 + across, c) +
                                           0.0625 * at(n, h / 2 + down, w / 2 + across, c)
                                     : at(n, h / 2, w / 2, c);
                }
            }
        }
    }
    void *from = test.give(x), *to = test.take(std::move(right));
    test.work = 5.0 * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] { return rocm_sd_upsample_2x(from, to, N, C, H, W, bilinear, dtype, nullptr); };
}

void layer_norm_residual(cases& all, int M, int C, bool has_residual, rocm_sd_dtype dtype) {
    test_case& test =
        add(all, "layer_norm_residual", shape_of({M, C}) + (has_residual ? "" : ", no residual"), dtype);
    const size_t count = static_cast<size_t>(M) * C;
    const values x = random_values(count, dtype, 3, 2.0, 0.5), residual = random_values(count, dtype, 4);
    const values weight = random_values(static_cast<size_t>(C), dtype, 5);
    const values bias = random_values(static_cast<size_t>(C), dtype, 6);
    expected total{x, values(count, 0.0)}, y{values(count), values(count)};
    const double eps = static_cast<double>(1e-5f);
    for (int m = 0; m < M; ++m) {
        double* const row = &total.exact[static_cast<size_t>(m) * C];
        double mean = 0.0, variance = 0.0, largest = 0.0;
        for (int c = 0; c < C; ++c) {
            // The norm is that of the rounded total.
            const double added = residual[static_cast<size_t>(m) * C + c];
            if (has_residual) row[c] = rounded(static_cast<float>(row[c] + added), dtype);
            mean += row[c] / C;
            largest = std::fmax(largest, std::fabs(row[c]));
        }
        for (int c = 0; c < C; ++c) variance += (row[c] - mean) * (row[c] - mean) / C;
        for (int c = 0; c < C; ++c) {
            const size_t at = static_cast<size_t>(m) * C + c;
            const normalised one =
                normalise(row[c], mean, 1.0 / std::sqrt(variance + eps), weight[c], bias[c], largest, 32);
            y.exact[at] = one.value;
            y.slack[at] = one.slack;
        }
    }
    const void *in = test.give(x), *added = has_residual ? test.give(residual) : nullptr;
    const void *w = test.give(weight), *b = test.give(bias);
    void *out = test.take(std::move(y)), *sums = has_residual ? test.take(std::move(total)) : nullptr;
    test.work = (has_residual ? 4.0 : 2.0) * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] { return rocm_sd_layer_norm_residual(in, added, w, b, out, sums, M, C, 1e-5f, dtype, nullptr); };
}

void group_norm_silu(cases& all, int N, int C, int HW, int groups, bool has_add, bool silu, rocm_sd_dtype dtype) {
    test_case& test = add(all, "group_norm_silu", shape_of({N, C, HW}) + " in " + std::to_string(groups) + " groups" +
                                                     (has_add ? ", add" : "") + (silu ? "" : ", no silu"), dtype);
    const size_t count = static_cast<size_t>(N) * C * HW;
    const values x = random_values(count, dtype, 7, 2.0, 0.5);
    const values extra = random_values(static_cast<size_t>(N) * C, dtype, 8);
    const values weight = random_values(static_cast<size_t>(C), dtype, 9);
    const values bias = random_values(static_cast<size_t>(C), dtype, 10);
    expected y{values(count), values(count)};
    const int width = C / groups;
    const double eps = static_cast<double>(1e-5f), share = 1.0 / (static_cast<double>(HW) * width);
    for (int n = 0; n < N; ++n) {
        for (int g = 0; g < groups; ++g) {
            double mean = 0.0, variance = 0.0, largest = 0.0;
            const auto each = [&](auto f) {
                for (int i = 0; i < HW; ++i) {
                    for (int c = g * width; c < (g + 1) * width; ++c) {
                        const size_t at = (static_cast<size_t>(n) * HW + i) * C + c;
                        f(at, c, x[at] + (has_add ? extra[static_cast<size_t>(n) * C + c] : 0.0));
                    }
                }
            };
            each([&](size_t, int, double value) {
                mean += value * share;
                largest = std::fmax(largest, std::fabs(value));
            });
            each([&](size_t, int, double value) { variance += (value - mean) * (value - mean) * share; });
            const double scale = 1.0 / std::sqrt(variance + eps);
            each([&](size_t at, int c, double value) {
                const normalised one = normalise(value, mean, scale, weight[c], bias[c], largest, 64);
                const double sigmoid = 1.0 / (1.0 + std::exp(-one.value));
                y.exact[at] = silu ? one.value * sigmoid : one.value;
                // The slope of silu is below 1.1; its exponential is off by its argument's error.
                y.slack[at] = silu ? 1.1 * one.slack + 16 * float_step * std::fabs(one.value) : one.slack;
            });
        }
    }
    const void *in = test.give(x), *w = test.give(weight), *b = test.give(bias);
    const void* more = has_add ? test.give(extra) : nullptr;
    void* out = test.take(std::move(y));
    const size_t floats = rocm_sd_group_norm_silu_workspace(N, C, HW, dtype) / sizeof(float);
    test.memory.push_back(std::make_unique<device_values>(floats, rocm_sd_float32));
    void* workspace = test.memory.back()->data();
    test.work = 2.0 * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] {
        return rocm_sd_group_norm_silu(in, out, w, b, more, N, C, HW, groups, 1e-5f, silu, workspace, dtype, nullptr);
    };
}

}  // namespace

std::vector<family> plain_families() {
    return {
        {"layout_copy",
         [](cases& to, rocm_sd_dtype dtype) {
             layout_copy(to, 2, 48, 40, true, dtype);
             layout_copy(to, 1, 33, 35, false, dtype);
         },
         [](cases& to) { layout_copy(to, 2, 320, 4096, true, rocm_sd_float16); }},
        {"upsample",
         [](cases& to, rocm_sd_dtype dtype) {
             for (const bool bilinear : {false, true}) {
                 upsample(to, 2, 24, 3, 5, bilinear, dtype);
                 upsample(to, 1, 9, 4, 3, bilinear, dtype);
             }
         },
         [](cases& to) { upsample(to, 2, 640, 32, 32, false, rocm_sd_float16); }},
        {"layer_norm_residual",
         [](cases& to, rocm_sd_dtype dtype) {
             layer_norm_residual(to, 5, 320, true, dtype);
             layer_norm_residual(to, 3, 77, true, dtype);
             layer_norm_residual(to, 3, 1280, false, dtype);
         },
         [](cases& to) { layer_norm_residual(to, 8192, 320, true, rocm_sd_float16); }},
        {"group_norm_silu",
         [](cases& to, rocm_sd_dtype dtype) {
             group_norm_silu(to, 2, 48, 70, 4, true, true, dtype);
             group_norm_silu(to, 1, 30, 67, 3, false, false, dtype);
         },
         [](cases& to) { group_norm_silu(to, 2, 320, 4096, 32, true, true, rocm_sd_float16); }},
    };
}

}  // namespace rocm_sd_test
