// Values of the three dtypes on the host, device memory that notices a write beyond its end, and how far a result may
// be from its reference.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "rocm_sd_kernels.h"

namespace rocm_sd_test {

inline void must(hipError_t error, const char* doing) {
    if (error == hipSuccess) return;
    std::cerr << doing << " failed: " << hipGetErrorString(error) << "\n";
    std::exit(2);
}

inline int size_of(rocm_sd_dtype dtype) { return dtype == rocm_sd_float32 ? 4 : 2; }

inline const char* name_of(rocm_sd_dtype dtype) {
    return dtype == rocm_sd_float16 ? "float16" : dtype == rocm_sd_bfloat16 ? "bfloat16" : "float32";
}

// The largest relative error of one rounding.
inline double rounding(rocm_sd_dtype dtype) {
    return std::ldexp(1.0, dtype == rocm_sd_float16 ? -11 : dtype == rocm_sd_bfloat16 ? -8 : -24);
}

// To the nearest value of the dtype, ties to even.
inline double rounded(double value, rocm_sd_dtype dtype) {
    if (dtype == rocm_sd_float32) return static_cast<float>(value);
    if (value == 0.0 || !std::isfinite(value)) return value;
    int exponent;
    std::frexp(value, &exponent);  // value = m * 2^exponent, 0.5 <= |m| < 1
    const int digits = dtype == rocm_sd_float16 ? 11 : 8, smallest = dtype == rocm_sd_float16 ? -13 : -125;
    const double step = std::ldexp(1.0, (exponent > smallest ? exponent : smallest) - digits);
    return std::nearbyint(value / step) * step;
}

// The bits of a value that is one of the dtype's own and not subnormal.
inline std::uint32_t bits_of(double value, rocm_sd_dtype dtype) {
    const float exact = static_cast<float>(value);
    std::uint32_t word;
    std::memcpy(&word, &exact, 4);
    if (dtype == rocm_sd_float32) return word;
    if (dtype == rocm_sd_bfloat16) return word >> 16;
    const std::uint32_t sign = word >> 16 & 0x8000u, exponent = word >> 23 & 0xFFu;
    return exponent < 113 ? sign : sign | (exponent - 112) << 10 | (word >> 13 & 0x3FFu);
}

inline double value_of(std::uint32_t bits, rocm_sd_dtype dtype) {
    if (dtype == rocm_sd_float16) {
        const int exponent = static_cast<int>(bits >> 10 & 0x1F), digits = static_cast<int>(bits & 0x3FF);
        const double sign = bits & 0x8000u ? -1.0 : 1.0;
        if (exponent == 31) return digits ? std::nan("") : sign * HUGE_VAL;
        return sign * (exponent ? std::ldexp(1024 + digits, exponent - 25) : std::ldexp(digits, -24));
    }
    const std::uint32_t word = dtype == rocm_sd_bfloat16 ? bits << 16 : bits;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

using values = std::vector<double>;

// The same numbers on every machine: between -1 and 1, rounded to the dtype, and none so small that it is subnormal.
inline values random_values(size_t count, rocm_sd_dtype dtype, unsigned seed, double scale = 1.0, double mean = 0.0) {
    values made(count);
    std::uint64_t state = 0x9E3779B97F4A7C15ull * (seed + 1);
    for (double& value : made) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const double unit = static_cast<double>(state >> 40) / 8388608.0 - 1.0;
        value = rounded(mean + scale * unit, dtype);
        if (std::fabs(value) < 1e-4) value = 0.0;
    }
    return made;
}

// Device memory for `count` values. Where nobody writes it is NaN, and beyond its end lies a guard.
class device_values {
  public:
    device_values(size_t count, rocm_sd_dtype dtype) : count_(count), dtype_(dtype) {
        must(hipMalloc(&data_, bytes() + guard), "allocating memory");
        must(hipMemset(data_, 0xFF, bytes() + guard), "filling memory");
    }
    device_values(const values& from, rocm_sd_dtype dtype) : device_values(from.size(), dtype) {
        std::vector<unsigned char> raw(bytes());
        for (size_t i = 0; i < count_; ++i) {
            const std::uint32_t bits = bits_of(from[i], dtype);
            std::memcpy(&raw[i * size_of(dtype)], &bits, static_cast<size_t>(size_of(dtype)));
        }
        must(hipMemcpy(data_, raw.data(), raw.size(), hipMemcpyHostToDevice), "copying to the device");
    }
    device_values(const device_values&) = delete;
    device_values& operator=(const device_values&) = delete;
    ~device_values() { must(hipFree(data_), "freeing memory"); }

    void* data() const { return data_; }
    size_t bytes() const { return count_ * static_cast<size_t>(size_of(dtype_)); }

    // What is there now; `guard_is_whole` says whether nobody wrote beyond the end.
    values read(bool& guard_is_whole) const {
        std::vector<unsigned char> raw(bytes() + guard);
        must(hipMemcpy(raw.data(), data_, raw.size(), hipMemcpyDeviceToHost), "copying from the device");
        values found(count_);
        for (size_t i = 0; i < count_; ++i) {
            std::uint32_t bits = 0;
            std::memcpy(&bits, &raw[i * size_of(dtype_)], static_cast<size_t>(size_of(dtype_)));
            found[i] = value_of(bits, dtype_);
        }
        guard_is_whole = true;
        for (size_t i = bytes(); i < raw.size(); ++i) guard_is_whole = guard_is_whole && raw[i] == 0xFF;
        return found;
    }

  private:
    static constexpr size_t guard = 256;
    size_t count_;
    rocm_sd_dtype dtype_;
    void* data_ = nullptr;
};

// Each exact result with the most that float32 arithmetic on the way to it may be off, before the last rounding. Where
// that is infinite nothing is known of the result, and any number will do.
struct expected {
    values exact, slack;
};

struct difference {
    double largest = 0.0, of_allowed = 0.0;  // the largest error that is a number, and its largest share of the allowed
    size_t wrong = 0;
};

// One rounding to the dtype, and the slack. Written so that NaN, which compares false, is wrong.
inline difference compare(const values& found, const expected& right, rocm_sd_dtype dtype) {
    difference all;
    for (size_t i = 0; i < found.size(); ++i) {
        if (std::isinf(right.slack[i])) {
            if (!std::isfinite(found[i])) ++all.wrong;
            continue;
        }
        const double error = std::fabs(found[i] - right.exact[i]);
        // Below the smallest normal float16 a rounding is absolute.
        const double least = dtype == rocm_sd_float16 ? std::ldexp(1.0, -25) : 0.0;
        const double allowed = rounding(dtype) * (std::fabs(right.exact[i]) + right.slack[i]) + right.slack[i] + least;
        if (!(error <= allowed)) ++all.wrong;
        all.largest = std::fmax(all.largest, error);
        if (allowed > 0.0) all.of_allowed = std::fmax(all.of_allowed, error / allowed);
    }
    return all;
}

}  // namespace rocm_sd_test
