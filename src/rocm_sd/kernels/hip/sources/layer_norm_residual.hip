// total = x + residual; y = layer_norm(total) * weight + bias over rows of C values, in one pass over memory. Or of x
// alone.
//
// LANES threads share a row: part of a wave, or several waves. Each holds CHUNKS vectors of WIDTH values, packed as
// they came, between the passes: the mean, then the centred squares, so that nothing cancels. 320 halves are 5
// chunks of 8 lanes, each a cache line, with no lane idle. No atomics: the same input gives the same bits.
//
// Parameters: ELEMENT; WIDTH; LANES; CHUNKS; THREADS; EVEN; HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS. WIDTH divides C and the
// distances between rows. Grid: (blocks of THREADS / LANES rows).
#include <rocm_sd/row.hpp>

namespace rocm_sd {

struct shape {
    static constexpr int n = ROCM_SD_WIDTH;
    static constexpr int lanes = ROCM_SD_LANES;
    static constexpr int chunks = ROCM_SD_CHUNKS;
    static constexpr int threads = ROCM_SD_THREADS;
    static constexpr int rows = threads / lanes;
    static constexpr bool even = ROCM_SD_EVEN;  // the chunks of all lanes are the row, with no lane idle
    static constexpr bool has_residual = ROCM_SD_HAS_RESIDUAL;
    static constexpr bool has_weight = ROCM_SD_HAS_WEIGHT;
    static constexpr bool has_bias = ROCM_SD_HAS_BIAS;
};

template <typename T, typename S>
ROCM_SD_DEVICE void layer_norm(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* total, int M,
                               int C, int x_stride, int residual_stride, float share, float eps) {
    using part = row_part<T, S>;
    using floats = vector_of<float, S::n>;
    ROCM_SD_SHARED static reduction_space<S::threads> space;
    const int first = block_x() * S::rows;
    const int row = thread_index() / S::lanes;
    const bool here = first + row < M;
    // Rows beyond the last compute it once more, and store nothing.
    const int read_row = smaller(row, M - 1 - first);
    // 64 bits only in the bases, which are the same for all threads.
    x += static_cast<int64>(first) * x_stride;
    y += static_cast<int64>(first) * C;

    // Every load before the first store, which the compiler may not move them across: they wait for memory together.
    part values, weights, biases;
    values.load(x + read_row * x_stride, C);
    if constexpr (S::has_residual) {
        part added;
        added.load(residual + static_cast<int64>(first) * residual_stride + read_row * residual_stride, C);
        // Rounded: the norm is that of the total as stock torch has it.
#pragma unroll
        for (int i = 0; i < S::chunks; ++i) values.chunk[i] = convert<T>(values.wide(i) + added.wide(i));
    }
    if constexpr (S::has_weight) weights.load(weight, C);
    if constexpr (S::has_bias) biases.load(bias, C);
    if constexpr (S::has_residual) {
        if (here) values.store(total + static_cast<int64>(first) * C + row * C, C);
    }

    floats sums = 0.0f;
#pragma unroll
    for (int i = 0; i < S::chunks; ++i) sums += part::inside(i, C) ? values.wide(i) : floats(0.0f);
    // Not times `share`: halves of one value have an exact sum, and then their mean is that value.
    const float count = static_cast<float>(C);
    const float mean = quotient(reduce_threads<plus, S::lanes, S::threads>(sum(sums), space), count, share);
    float shift = 0.0f;
    if constexpr (sizeof(T) == sizeof(float)) {
        // A sum of floats is rounded. In a row of one value that would be all of the result, so it is taken off again.
        floats left = 0.0f;
#pragma unroll
        for (int i = 0; i < S::chunks; ++i) left += part::inside(i, C) ? values.wide(i) - mean : floats(0.0f);
        shift = reduce_threads<plus, S::lanes, S::threads>(sum(left), space) * share;
    }

    values.stay_packed();
    floats squares = 0.0f;
#pragma unroll
    for (int i = 0; i < S::chunks; ++i) {
        const floats centred = values.wide(i) - mean - shift;
        squares += part::inside(i, C) ? centred * centred : floats(0.0f);
    }
    const float variance = reduce_threads<plus, S::lanes, S::threads>(sum(squares), space) * share;
    const float scale = reciprocal_sqrt(variance + eps);

    values.stay_packed();
#pragma unroll
    for (int i = 0; i < S::chunks; ++i) {
        floats out = (values.wide(i) - mean - shift) * scale;
        if constexpr (S::has_weight) out *= weights.wide(i);
        if constexpr (S::has_bias) out += biases.wide(i);
        values.chunk[i] = convert<T>(out);
    }
    if (here) values.store(y + row * C, C);
}

using element = ROCM_SD_ELEMENT;

ROCM_SD_KERNEL(shape::threads)
layer_norm_residual(const element* x, const element* residual, const element* weight, const element* bias, element* y,
                    element* total, int M, int C, int x_stride, int residual_stride, float share, float eps) {
    layer_norm<element, shape>(x, residual, weight, bias, y, total, M, C, x_stride, residual_stride, share, eps);
}

}  // namespace rocm_sd
