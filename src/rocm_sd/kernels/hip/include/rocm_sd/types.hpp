// Element types, vectors of them, conversions, and memory accesses of a stated width.
#pragma once

#include "arch.hpp"

namespace rocm_sd {

using int64 = long long;
// For kernels that move values and never look at them.
using bits16 = unsigned short;
using bits32 = unsigned int;

template <typename T, int n>
using vector_of = ROCM_SD_VECTOR(T, n);

// A lane's widest access to memory is 16 bytes: eight halves, four floats.
template <typename T>
inline constexpr int widest = 16 / static_cast<int>(sizeof(T));

template <typename To, typename T, int n>
ROCM_SD_DEVICE vector_of<To, n> convert(vector_of<T, n> value) {
    return __builtin_convertvector(value, vector_of<To, n>);
}

// The address must be a multiple of the access: the launcher chooses n so that it is.
template <int n, typename T>
ROCM_SD_DEVICE vector_of<T, n> load(const T* from) {
    return *reinterpret_cast<const vector_of<T, n>*>(from);
}

template <int n, typename T>
ROCM_SD_DEVICE void store(T* to, vector_of<T, n> value) {
    *reinterpret_cast<vector_of<T, n>*>(to) = value;
}

// Zeros where `inside` is false: nothing is read there.
template <int n, typename T>
ROCM_SD_DEVICE vector_of<T, n> load_if(bool inside, const T* from) {
    vector_of<T, n> value = static_cast<T>(0.0f);
    if (inside) value = load<n>(from);
    return value;
}

template <int n, typename T>
ROCM_SD_DEVICE void store_if(bool inside, T* to, vector_of<T, n> value) {
    if (inside) store<n>(to, value);
}

// out[j][i] = in[i][j], in registers: for 16-bit types one byte permutation for each pair of values.
template <int n, typename T>
ROCM_SD_DEVICE void transpose(const vector_of<T, n> (&in)[n], vector_of<T, n> (&out)[n]) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int i = 0; i < n; ++i) out[j][i] = in[i][j];
    }
}

// The compiler forgets where the value came from: it will not keep a converted copy of it in more registers.
template <typename T, int n>
ROCM_SD_DEVICE void forget_origin(vector_of<T, n>& value) {
    if constexpr (sizeof(value) % 4 == 0) {
        auto words = __builtin_bit_cast(vector_of<bits32, sizeof(value) / 4>, value);
        forget_words(words);
        value = __builtin_bit_cast(vector_of<T, n>, words);
    }
}

// The values of a vector, added in order of their places.
template <typename T, int n>
ROCM_SD_DEVICE T sum(vector_of<T, n> value) {
    T total = value[0];
#pragma unroll
    for (int i = 1; i < n; ++i) total += value[i];
    return total;
}

// One instruction each, right to one unit in the last place of a float.
ROCM_SD_DEVICE float reciprocal(float value) { return __builtin_amdgcn_rcpf(value); }
ROCM_SD_DEVICE float reciprocal_sqrt(float value) { return __builtin_amdgcn_rsqf(value); }

// total / count, where `share` is 1 / count. What a product misses is put right: where the quotient is a float, the
// result is that float. A division would take ten instructions and more registers than a long row leaves.
ROCM_SD_DEVICE float quotient(float total, float count, float share) {
    const float near = total * share;
    return __builtin_fmaf(__builtin_fmaf(-near, count, total), share, near);
}

// x * sigmoid(x). Far below zero the exponential is infinite, and its reciprocal the right limit.
ROCM_SD_DEVICE float silu(float value) {
    constexpr float log2_e = 1.44269504088896341f;
    return value * reciprocal(1.0f + __builtin_amdgcn_exp2f(-log2_e * value));
}

ROCM_SD_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
ROCM_SD_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
ROCM_SD_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

}  // namespace rocm_sd
