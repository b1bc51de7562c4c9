// Of each row of x, [M, C]: its mean and the sum of its centred squares, in float32: what norm.hpp asks for, in one part.
//
// LANES threads share a row, as in layer_norm_residual.hip, and nothing but two floats a row is written.
//
// Parameters: ELEMENT; WIDTH; LANES; CHUNKS; THREADS; EVEN. Grid: (blocks of THREADS / LANES rows).
#include <rocm_sd/row.hpp>

namespace rocm_sd {

struct shape {
    static constexpr int n = ROCM_SD_WIDTH;
    static constexpr int lanes = ROCM_SD_LANES;
    static constexpr int chunks = ROCM_SD_CHUNKS;
    static constexpr int threads = ROCM_SD_THREADS;
    static constexpr int rows = threads / lanes;
    static constexpr bool even = ROCM_SD_EVEN;
};

template <typename T, typename S>
ROCM_SD_DEVICE void moments_of(const T* x, float* moments, int M, int C, int x_stride, float share) {
    using part = row_part<T, S>;
    using floats = vector_of<float, S::n>;
    ROCM_SD_SHARED static reduction_space<S::threads> space;
    const int first = block_x() * S::rows, row = thread_index() / S::lanes;
    part values;
    // Rows beyond the last compute it once more, and store nothing.
    values.load(x + static_cast<int64>(first) * x_stride + smaller(row, M - 1 - first) * x_stride, C);
    floats sums = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < S::chunks; ++i) sums += part::inside(i, C) ? values.wide(i) : floats(0.0f);
    const float mean = reduce_threads<plus, S::lanes, S::threads>(sum(sums), space) * share;
    values.stay_packed();
#pragma unroll
    for (int i = 0; i < S::chunks; ++i) {
        const floats centred = values.wide(i) - mean;
        squares += part::inside(i, C) ? centred * centred : floats(0.0f);
    }
    const float spread = reduce_threads<plus, S::lanes, S::threads>(sum(squares), space);
    const bool here = first + row < M && thread_index() % S::lanes == 0;
    vector_of<float, 2> pair;
    pair[0] = mean;
    pair[1] = spread;
    store_if<2>(here, moments + 2 * static_cast<int64>(first + row), pair);
}

using element = ROCM_SD_ELEMENT;

ROCM_SD_KERNEL(shape::threads)
row_moments(const element* x, float* moments, int M, int C, int x_stride, float share) {
    moments_of<element, shape>(x, moments, M, C, x_stride, share);
}

}  // namespace rocm_sd
