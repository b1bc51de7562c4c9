// What products of matrices do with their sums on the way to memory.
#pragma once

#include "gemm.hpp"

namespace rocm_sd {

/// y = sums + bias + residual, rounded once.
template <typename T, bool wide, bool has_bias, bool has_residual>
struct add_bias_and_residual {
    const T* bias;      // [N]
    const T* residual;  // [M, N]
    T* y;
    int residual_stride, y_stride;

    struct fetched {
        chunk_of<T> bias, residual;
    };

    ROCM_SD_DEVICE fetched fetch(run_of_sums at) const {
        fetched ahead;
        if constexpr (has_bias) ahead.bias = load_chunk<wide>(bias + at.column, at.count);
        if constexpr (has_residual) {
            const T* from = residual + static_cast<int64>(at.row) * residual_stride + at.column;
            ahead.residual = load_chunk<wide>(from, at.count);
        }
        return ahead;
    }

    ROCM_SD_DEVICE chunk_of<T> total(vector_of<float, 8> sums, const fetched& ahead) const {
        if constexpr (has_bias) sums += convert<float>(ahead.bias);
        if constexpr (has_residual) sums += convert<float>(ahead.residual);
        return convert<T>(sums);
    }

    ROCM_SD_DEVICE void store(run_of_sums at, chunk_of<T> values) const {
        store_chunk<wide>(y + static_cast<int64>(at.row) * y_stride + at.column, values, at.count);
    }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> sums, const fetched& ahead) const {
        store(at, total(sums, ahead));
    }
};

/// One of several parts of the sums, as they are, in rows of `columns` values; conv2d_finish.hip adds the parts up.
template <bool wide>
struct store_sums {
    static constexpr bool by_fours = true;

    float* sums;
    int columns;

    struct fetched {};
    ROCM_SD_DEVICE fetched fetch(run_of_sums) const { return {}; }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 4> values, const fetched&) const {
        float* to = sums + static_cast<int64>(at.row) * columns + at.column;
        if constexpr (wide) {
            store_if<4>(at.count > 0, to, values);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i < at.count) to[i] = values[i];
            }
        }
    }
};

}  // namespace rocm_sd
