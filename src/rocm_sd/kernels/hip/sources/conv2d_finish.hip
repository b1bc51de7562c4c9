// y = the parts of a convolution's depth in their order + bias + add + residual, rounded once; parts: [splits, pixels,
// Cout] in float32, as conv2d_split.hip leaves them. No atomics: the same input gives the same bits.
//
// Parameters: element; splits; width, values that a thread takes: 4, or 1 where Cout is no multiple of 4 or a tensor
// begins in between; has_bias, has_add and has_residual.
#include <rocm_sd/types.hpp>

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
constexpr int threads = 256;

template <typename T, int n, int splits, bool has_bias, bool has_add, bool has_residual>
ROCM_SD_DEVICE void finish(const float* parts, const T* bias, const T* add, const T* residual, T* y, int of_picture,
                           int64 of_part, int Cout) {
    const int place = (block_x() * threads + thread_index()) * n;
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
ROCM_SD_KERNEL(threads)
conv2d_finish(const float* parts, const element* bias, const element* add, const element* residual, element* y,
              int pixels_of_picture, int pixels, int Cout) {
    finish<element, ROCM_SD_WIDTH, ROCM_SD_SPLITS, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_ADD, ROCM_SD_HAS_RESIDUAL>(
        parts, bias, add, residual, y, pixels_of_picture * Cout, static_cast<int64>(pixels) * Cout, Cout);
}

}  // namespace rocm_sd
