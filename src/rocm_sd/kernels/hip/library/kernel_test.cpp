// Every family of kernels on this machine's GPU, against references computed here: right, and how fast.
#include <algorithm>
#include <functional>
#include <iomanip>
#include <memory>
#include <sstream>
#include <string>

#include "host_values.hpp"

namespace rocm_sd_test {

namespace {

const char* const help =
    R"(rocm_sd_kernel_test [--kernel NAME] [--dtype NAME] [--repeats N] [--small] [--help]

Runs rocm_sd's HIP kernels on the current GPU. Each line has the kernel, its dtype and shape, the average time, how
much it moved or computed in that time, its largest error with the share of what is allowed, and PASSED or FAILED; the
line below has the variant that was launched.

--kernel NAME  this family only: layout_copy, upsample, layer_norm_residual, group_norm_silu, linear_residual
--dtype NAME   this dtype only: float16, bfloat16, float32
--repeats N    launches that the time is the average of (100)
--small        odd small shapes only

The exit code is 0 where all passed, 1 where one failed, 2 where nothing could be run.
)";

constexpr double float_step = 5.9604644775390625e-8;  // the largest relative error of one float32 operation

// One call: what it is to give, and the launch. `work` is bytes, or operations where `is_flops`.
struct test_case {
    std::string kernel, shape;
    rocm_sd_dtype dtype;
    double work;
    bool is_flops;
    std::function<int()> launch;
    std::vector<std::pair<device_values*, expected>> results;
    std::vector<std::unique_ptr<device_values>> memory;

    device_values* give(const values& from) {
        memory.push_back(std::make_unique<device_values>(from, dtype));
        return memory.back().get();
    }
    device_values* take(expected right) {
        memory.push_back(std::make_unique<device_values>(right.exact.size(), dtype));
        results.emplace_back(memory.back().get(), std::move(right));
        return memory.back().get();
    }
};

using cases = std::vector<std::unique_ptr<test_case>>;

std::string shape_of(std::initializer_list<int> sizes) {
    std::string text;
    for (const int size : sizes) text += (text.empty() ? "" : "x") + std::to_string(size);
    return text;
}

test_case& add(cases& all, const char* kernel, std::string shape, rocm_sd_dtype dtype) {
    all.push_back(std::make_unique<test_case>());
    test_case& made = *all.back();
    made.kernel = kernel;
    made.shape = std::move(shape);
    made.dtype = dtype;
    made.is_flops = false;
    return made;
}

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
    void *from = test.give(x)->data(), *to = test.take(std::move(right))->data();
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
    void *from = test.give(x)->data(), *to = test.take(std::move(right))->data();
    test.work = 5.0 * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] { return rocm_sd_upsample_2x(from, to, N, C, H, W, bilinear, dtype, nullptr); };
}

// (value - mean) * scale * weight + bias, and how far float32 may be from it: `depth` additions stand in the mean, and
// the norm divides what is off by the spread.
struct normalised {
    double value, slack;
};

normalised normalise(double value, double mean, double scale, double weight, double bias, double largest, int depth) {
    const double centred = (value - mean) * scale * weight;
    const double of_mean = depth * largest * scale * std::fabs(weight);
    return {centred + bias, float_step * (of_mean + (depth + 8) * std::fabs(centred) + std::fabs(bias))};
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
    const void *in = test.give(x)->data(), *added = has_residual ? test.give(residual)->data() : nullptr;
    const void *w = test.give(weight)->data(), *b = test.give(bias)->data();
    void *out = test.take(std::move(y))->data(), *sums = has_residual ? test.take(std::move(total))->data() : nullptr;
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
    const void *in = test.give(x)->data(), *w = test.give(weight)->data(), *b = test.give(bias)->data();
    const void* more = has_add ? test.give(extra)->data() : nullptr;
    void* out = test.take(std::move(y))->data();
    const size_t floats = rocm_sd_group_norm_silu_workspace(N, C, HW, dtype) / sizeof(float);
    test.memory.push_back(std::make_unique<device_values>(floats, rocm_sd_float32));
    void* workspace = test.memory.back()->data();
    test.work = 2.0 * static_cast<double>(count) * size_of(dtype);
    test.launch = [=] {
        return rocm_sd_group_norm_silu(in, out, w, b, more, N, C, HW, groups, 1e-5f, silu, workspace, dtype, nullptr);
    };
}

void linear_residual(cases& all, int M, int N, int K, bool has_bias, bool has_residual, rocm_sd_dtype dtype) {
    test_case& test = add(all, "linear_residual", shape_of({M, N, K}) + (has_bias ? "" : ", no bias") +
                                                     (has_residual ? "" : ", no residual"), dtype);
    const values x = random_values(static_cast<size_t>(M) * K, dtype, 11);
    const values weight = random_values(static_cast<size_t>(N) * K, dtype, 12);
    const values bias = random_values(static_cast<size_t>(N), dtype, 13);
    const values residual = random_values(static_cast<size_t>(M) * N, dtype, 14);
    expected y{values(residual.size()), values(residual.size())};
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) {
            const double *row = &x[static_cast<size_t>(m) * K], *column = &weight[static_cast<size_t>(n) * K];
            const size_t at = static_cast<size_t>(m) * N + n;
            double sum = (has_bias ? bias[n] : 0.0) + (has_residual ? residual[at] : 0.0), sizes = 2.0;
            for (int k = 0; k < K; ++k) {
                sum += row[k] * column[k];
                sizes += std::fabs(row[k] * column[k]);
            }
            y.exact[at] = sum;
            // K additions in some order: their errors, which go either way, grow with the root of their number.
            y.slack[at] = 4 * std::sqrt(static_cast<double>(K) + 2) * float_step * sizes;
        }
    }
    const void *in = test.give(x)->data(), *w = test.give(weight)->data();
    const void* b = has_bias ? test.give(bias)->data() : nullptr;
    const void* r = has_residual ? test.give(residual)->data() : nullptr;
    void* out = test.take(std::move(y))->data();
    test.work = 2.0 * M * N * K;
    test.is_flops = true;
    test.launch = [=] { return rocm_sd_linear_residual(in, w, b, r, out, M, N, K, dtype, nullptr); };
}

struct family {
    const char* name;
    std::function<void(cases&, rocm_sd_dtype)> small;
    std::function<void(cases&)> real;  // shapes of Stable Diffusion 1.5 at 512x512, with guidance
};

const std::vector<family>& families() {
    static const std::vector<family> all = {
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
        {"linear_residual",
         [](cases& to, rocm_sd_dtype dtype) {
             if (dtype == rocm_sd_float32) return;
             linear_residual(to, 70, 72, 80, true, true, dtype);
             linear_residual(to, 33, 35, 77, false, true, dtype);
         },
         [](cases& to) { linear_residual(to, 8192, 320, 320, true, true, rocm_sd_float16); }},
    };
    return all;
}

double average_seconds(const test_case& test, int repeats) {
    hipEvent_t before, after;
    must(hipEventCreate(&before), "making an event");
    must(hipEventCreate(&after), "making an event");
    must(hipEventRecord(before, nullptr), "recording an event");
    for (int i = 0; i < repeats; ++i) test.launch();
    must(hipEventRecord(after, nullptr), "recording an event");
    must(hipEventSynchronize(after), "waiting for the device");
    float milliseconds = 0.0f;
    must(hipEventElapsedTime(&milliseconds, before, after), "reading the time");
    must(hipEventDestroy(before), "freeing an event");
    must(hipEventDestroy(after), "freeing an event");
    return static_cast<double>(milliseconds) / 1e3 / repeats;
}

// Prints the line; whether it passed.
bool run(const test_case& test, int repeats) {
    std::cout << std::left << std::setw(20) << test.kernel << " " << std::setw(8) << name_of(test.dtype) << " "
              << std::setw(34) << test.shape << std::right << std::flush;
    if (test.launch() != 0) {
        std::cout << " FAILED: " << rocm_sd_last_error() << std::endl;
        return false;
    }
    const std::string variant = rocm_sd_last_variant();
    must(hipDeviceSynchronize(), "waiting for the device");
    difference worst;
    bool guards = true;
    for (const auto& result : test.results) {
        bool whole;
        const difference one = compare(result.first->read(whole), result.second, test.dtype);
        guards = guards && whole;
        worst.wrong += one.wrong;
        worst.largest = std::max(worst.largest, one.largest);
        worst.of_allowed = std::max(worst.of_allowed, one.of_allowed);
    }
    const double seconds = average_seconds(test, repeats);
    const bool ok = worst.wrong == 0 && guards;
    std::string trouble = guards ? "" : ", wrote beyond the end";
    if (worst.wrong) trouble += ", " + std::to_string(worst.wrong) + " values wrong";
    std::cout << std::fixed << std::setprecision(1) << std::setw(9) << seconds * 1e6 << " us " << std::setw(9)
              << test.work / 1e9 / std::max(seconds, 1e-12) << (test.is_flops ? " GFLOP/s" : " GB/s   ")
              << std::scientific << std::setprecision(2) << "  error " << worst.largest << std::fixed << " ("
              << std::setprecision(0) << worst.of_allowed * 100 << "% of allowed)"
              << trouble << (ok ? "  PASSED" : "  FAILED") << "\n    " << variant << std::endl;
    return ok;
}

}  // namespace

}  // namespace rocm_sd_test

int main(int count, char** words) {
    using namespace rocm_sd_test;
    std::string only, only_dtype;
    int repeats = 100;
    bool small = false;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--help") {
            std::cout << help;
            return 0;
        } else if (word == "--small") {
            small = true;
        } else if (word == "--kernel" && i + 1 < count) {
            only = words[++i];
        } else if (word == "--dtype" && i + 1 < count) {
            only_dtype = words[++i];
        } else if (word == "--repeats" && i + 1 < count) {
            repeats = std::atoi(words[++i]);
        } else {
            std::cerr << "What is \"" << word << "\"?\n\n" << help;
            return 2;
        }
    }
    const bool known = only.empty() || std::any_of(families().begin(), families().end(),
                                                   [&](const family& each) { return only == each.name; });
    if (!known || repeats < 1) {
        std::cerr << (known ? "--repeats must be 1 or more.\n" : "There is no kernel " + only + ".\n") << "\n" << help;
        return 2;
    }

    int devices = 0;
    const hipError_t error = hipGetDeviceCount(&devices);
    if (error != hipSuccess || devices == 0) {
        std::cerr << "HIP sees no GPU here (" << hipGetErrorString(error == hipSuccess ? hipErrorNoDevice : error)
                  << ").\nIs the card listed by rocminfo? "
                  << "May you open /dev/kfd and /dev/dri (groups render and video)?\n"
                  << "This build has code for: " << rocm_sd_architectures() << "\n";
        return 2;
    }
    int number = 0;
    hipDeviceProp_t device;
    must(hipGetDevice(&number), "asking for the device");
    must(hipGetDeviceProperties(&device, number), "asking for the device's properties");
    std::cout << "device " << number << ": " << device.name << ", " << device.gcnArchName << ", "
              << device.multiProcessorCount << " compute units, waves of " << device.warpSize
              << "\nbuilt for: " << rocm_sd_architectures() << "\n" << std::endl;

    int ran = 0, failed = 0;
    for (const family& each : families()) {
        if (!only.empty() && only != each.name) continue;
        cases all;
        for (const rocm_sd_dtype dtype : {rocm_sd_float16, rocm_sd_bfloat16, rocm_sd_float32}) each.small(all, dtype);
        if (!small) each.real(all);
        for (const auto& test : all) {
            if (!only_dtype.empty() && only_dtype != name_of(test->dtype)) continue;
            ++ran;
            if (!run(*test, repeats)) ++failed;
        }
    }
    must(static_cast<hipError_t>(std::max(0, rocm_sd_unload())), "unloading");
    std::cout << "\n" << ran - failed << " of " << ran << " passed" << std::endl;
    if (ran == 0) std::cerr << "There is no test for these options.\n";
    return ran == 0 ? 2 : failed ? 1 : 0;
}
