// conv2d whose depth is cut into parts, for maps of 8x8 and 16x16, which have too few tiles to fill a large GPU.
//
//   conv2d_split   sums of one part of the depth, in float32, to parts: [splits, pixels, Cout]
//   conv2d_finish  y = the parts in their order + bias + add + residual, rounded once
// No atomics: the same input gives the same bits.
//
// Parameters: as conv2d.hip; splits, which conv2d_finish adds; width, values that a thread of it takes: 4, or 1 where
// Cout is no multiple of 4 or a tensor begins in between.
#include "rocm_sd/conv.hpp"

namespace rocm_sd {

template <bool wide>
struct store_sums {
    float* sums;
    int Cout;

    struct fetched {};
    ROCM_SD_DEVICE fetched fetch(run_of_sums) const { return {}; }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> values, const fetched&) const {
        float* to = sums + static_cast<int64>(at.row) * Cout + at.column;
        if constexpr (wide) {
            store_if<4>(at.count > 0, to, values.lo);
            store_if<4>(at.count > 0, to + 4, values.hi);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < at.count) to[i] = values[i];
            }
        }
    }
};

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE_OUT>;
using product = gemm<this_arch, element, config>;
constexpr int kernel = ROCM_SD_KERNEL_SIZE;

/// Grid: (ceil(pixels / block_m) * ceil(Cout / block_n), splits); each part has `steps` steps, the last what is left.
ROCM_SD_KERNEL(product::threads)
conv2d_split(const element* x, const element* weight, float* parts, int pixels, int Cout, int H, int W, int Cin, int Ho,
             int Wo, int stride, int padding, int steps, int group_m) {
    using whole = convolution<product, element, kernel, ROCM_SD_PADDED, ROCM_SD_WIDE>;
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile =
        tile_of(block_x(), ceil_div(pixels, config::block_m), ceil_div(Cout, config::block_n), group_m);
    const int first = block_y() * steps;
    whole::run_part(x, windows{H, W, Cin, Ho, Wo, stride, padding, padding}, pixels,
                    factor<element>{weight, kernel * kernel * Cin, Cout}, tile.row * config::block_m,
                    tile.column * config::block_n, {first, smaller(steps, whole::steps(Cin) - first)}, lds,
                    store_sums<config::wide>{parts + static_cast<int64>(block_y()) * pixels * Cout, Cout});
}

constexpr int finish_threads = 256;

template <typename T, int n, int splits, bool has_bias, bool has_add, bool has_residual>
ROCM_SD_DEVICE void finish(const float* parts, const T* bias, const T* add, const T* residual, T* y, int of_picture,
                           int64 of_part, int Cout) {
    const int place = (block_x() * finish_threads + thread_index()) * n;
    // Beyond the end the last values are read again: loads never part a wave.
    const int safe = smaller(place, of_picture - n);
    const int c = static_cast<int>(static_cast<unsigned>(safe) % static_cast<unsigned>(Cout));
    const int64 picture = static_cast<int64>(block_y()) * of_picture;
    vector_of<float, n> part[splits];
#pragma unroll
    for (int i = 0; i < splits; ++i) part[i] = load<n>(parts + i * of_part + picture + safe);
    vector_of<T, n> more[3];
    if constexpr (has_bias) more[0] = load<n>(bias + c);
    if constexpr (has_add) more[1] = load<n>(add + block_y() * Cout + c);
    if constexpr (has_residual) more[2] = load<n>(residual + picture + safe);
    vector_of<float, n> value = part[0];
#pragma unroll
    for (int i = 1; i < splits; ++i) value += part[i];
    if constexpr (has_bias) value += convert<float>(more[0]);
    if constexpr (has_add) value += convert<float>(more[1]);
    if constexpr (has_residual) value += convert<float>(more[2]);
    store_if<n>(place < of_picture, y + picture + safe, convert<T>(value));
}

/// Grid: (blocks of the values of a picture, N).
ROCM_SD_KERNEL(finish_threads)
conv2d_finish(const float* parts, const element* bias, const element* add, const element* residual, element* y,
              int pixels_of_picture, int pixels, int Cout) {
    finish<element, ROCM_SD_WIDTH, ROCM_SD_SPLITS, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_ADD, ROCM_SD_HAS_RESIDUAL>(
        parts, bias, add, residual, y, pixels_of_picture * Cout, static_cast<int64>(pixels) * Cout, Cout);
}

}  // namespace rocm_sd
