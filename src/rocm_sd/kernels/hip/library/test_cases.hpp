// What the test program calls: each case has its memory, what the kernel is to give, and the launch.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

#include "host_values.hpp"

namespace rocm_sd_test {

constexpr double float_step = 5.9604644775390625e-8;  // the largest relative error of one float32 operation

// One call: what it is to give, and the launch. `work` is bytes, or operations where `is_flops`.
struct test_case {
    std::string kernel, shape;
    rocm_sd_dtype dtype;
    double work;
    bool is_flops;
    std::function<int()> launch;
    struct result {
        device_values* found;
        expected right;
        rocm_sd_dtype dtype;
    };
    std::vector<result> results;
    std::vector<std::unique_ptr<device_values>> memory;

    // Memory with these values, or for a result that must be these; of the dtype of the call unless said otherwise.
    void* give(const values& from) { return give(from, dtype); }
    void* give(const values& from, rocm_sd_dtype of) {
        memory.push_back(std::make_unique<device_values>(from, of));
        return memory.back()->data();
    }
    void* take(expected right) { return take(std::move(right), dtype); }
    void* take(expected right, rocm_sd_dtype of) {
        memory.push_back(std::make_unique<device_values>(right.exact.size(), of));
        results.push_back({memory.back().get(), std::move(right), of});
        return memory.back()->data();
    }
};

using cases = std::vector<std::unique_ptr<test_case>>;

inline std::string shape_of(std::initializer_list<int> sizes) {
    std::string text;
    for (const int size : sizes) text += (text.empty() ? "" : "x") + std::to_string(size);
    return text;
}

inline test_case& add(cases& all, const char* kernel, std::string shape, rocm_sd_dtype dtype) {
    all.push_back(std::make_unique<test_case>());
    test_case& made = *all.back();
    made.kernel = kernel;
    made.shape = std::move(shape);
    made.dtype = dtype;
    made.is_flops = false;
    return made;
}

// (value - mean) * scale * weight + bias, and how far float32 may be from it: `depth` additions stand in the mean, and
// the norm divides what is off by the spread.
struct normalised {
    double value, slack;
};

inline normalised normalise(double value, double mean, double scale, double weight, double bias, double largest,
                            int depth) {
    const double centred = (value - mean) * scale * weight;
    const double of_mean = depth * largest * scale * std::fabs(weight);
    return {centred + bias, float_step * (of_mean + (depth + 8) * std::fabs(centred) + std::fabs(bias))};
}

// A sum of K products with what it starts from, and how far float32 may be from it: K additions in some order, whose
// errors, which go either way, grow with the root of their number.
struct sum {
    double value = 0.0, sizes = 0.0;
    int terms = 2;

    void add(double term) {
        value += term;
        sizes += std::fabs(term);
        ++terms;
    }
    double slack() const { return 4 * std::sqrt(static_cast<double>(terms)) * float_step * sizes; }
};

// Which rows of a result are computed here: all, or so many that it does not take minutes. Of the others the kernel
// must have written numbers.
struct sampled_rows {
    int rows, step;

    // `work`: products for one row.
    sampled_rows(int rows, double work)
        : rows(rows), step(static_cast<int>(rows * work / 1e8) | 1) {}
    bool has(int row) const { return row % step == 0 || row == rows - 1; }
};

inline expected nothing_known(size_t count) { return {values(count, 0.0), values(count, HUGE_VAL)}; }

// A value that the kernel has rounded before it went on with it: float32's error may have brought it to a neighbour.
struct rounded_value {
    double value, off;

    rounded_value(double exact, double slack, rocm_sd_dtype dtype) : value(rounded(exact, dtype)) {
        off = std::fmax(rounded(exact + slack, dtype) - value, value - rounded(exact - slack, dtype));
    }
};

struct family {
    const char* name;
    std::function<void(cases&, rocm_sd_dtype)> small;
    std::function<void(cases&)> real;  // shapes of Stable Diffusion 1.5 at 512x512, with guidance
};

// For kernels of 16 bits only.
inline std::function<void(cases&, rocm_sd_dtype)> halves(std::function<void(cases&, rocm_sd_dtype)> small) {
    return [small](cases& to, rocm_sd_dtype dtype) {
        if (dtype != rocm_sd_float32) small(to, dtype);
    };
}

std::vector<family> plain_families();
std::vector<family> product_families();
std::vector<family> convolution_families();

}  // namespace rocm_sd_test
