// The gated product: half of a tile's columns are values, and the other half are the gates of the same columns of y.
#pragma once

#include "gelu.hpp"
#include "gemm.hpp"

namespace rocm_sd {

/// The rows of weight, [2F, K], that a tile needs: those of block_n / 2 values from `first` on, then those of their
/// gates.
template <typename Product, typename T>
ROCM_SD_DEVICE auto gate_pairs(const T* weight, int stride, int F, int K, int first, int thread) {
    constexpr int half_n = Product::tile_b::rows / 2;
    using pairs = typename Product::template rows_of<typename Product::tile_b>;
    return pairs(weight + static_cast<int64>(first) * stride, K, thread, [&](int row) {
        // Beyond the last column it is computed again, and not stored.
        const unsigned column = smaller(row % half_n, F - 1 - first);
        return (column + (row < half_n ? 0u : static_cast<unsigned>(F))) * static_cast<unsigned>(stride) *
               static_cast<unsigned>(sizeof(T));
    });
}

/// y = (values + bias) * gelu(gates + bias), rounded once.
template <typename T, bool wide, bool has_bias>
struct gate_values {
    const T* bias;  // [2F]
    T* y;
    int F, y_stride;

    struct fetched {
        chunk_of<T> value, gate;
    };

    ROCM_SD_DEVICE fetched fetch(run_of_sums at) const {
        fetched ahead;
        if constexpr (has_bias) {
            ahead.value = load_chunk<wide>(bias + at.column, at.count);
            ahead.gate = load_chunk<wide>(bias + F + at.column, at.count);
        }
        return ahead;
    }

    ROCM_SD_DEVICE void store(
        run_of_sums at, vector_of<float, 8> value, vector_of<float, 8> gate, const fetched& ahead) const {
        if constexpr (has_bias) {
            value += convert<float>(ahead.value);
            gate += convert<float>(ahead.gate);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] *= gelu(gate[i]);
        store_chunk<wide>(y + static_cast<int64>(at.row) * y_stride + at.column, convert<T>(value), at.count);
    }
};

}  // namespace rocm_sd
