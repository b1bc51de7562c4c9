// y = (x @ weight[:F]^T + bias[:F]) * gelu(x @ weight[F:]^T + bias[F:]), x: [M, K], weight: [2F, K], y: [M, F]; the
// [M, 2F] between product and gate is never in memory. Accumulation, bias and GELU are float32, with one rounding.
//
// Half of a tile's columns are values, and the other half are the gates of the same columns of y: to the main loop it
// is one product of block_n columns, and value and gate meet where the sums come back from LDS as rows.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; wide: 1 where K, F and all strides are multiples of eight and all pointers of 16
// bytes, else 0; has_bias: 1 or 0.
#include "rocm_sd/gelu.hpp"
#include "rocm_sd/gemm.hpp"

namespace rocm_sd {

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

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;
using epilogue = gate_values<element, config::wide, ROCM_SD_HAS_BIAS>;

/// Grid: ceil(M / block_m) * ceil(F / (block_n / 2)) workgroups in x. Strides count values.
ROCM_SD_KERNEL(product::threads)
linear_geglu(const element* x, const element* weight, const element* bias, element* y, int M, int F, int K,
             int x_stride, int weight_stride, int y_stride, int group_m) {
    constexpr int half_n = config::block_n / 2;
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(F, half_n), group_m);
    const int thread = thread_index(), first_row = tile.row * config::block_m, first_column = tile.column * half_n;
    using rows = product::rows_of<product::tile_a>;
    using pairs = product::rows_of<product::tile_b>;
    product::run_steps<2>(
        rows(factor<element>{x, x_stride, M}, K, first_row, thread),
        pairs(weight + static_cast<int64>(first_column) * weight_stride, K, thread,
              [&](int row) {
                  // Beyond the last column it is computed again, and not stored.
                  const unsigned column = smaller(row % half_n, F - 1 - first_column);
                  return (column + (row < half_n ? 0u : static_cast<unsigned>(F))) *
                         static_cast<unsigned>(weight_stride) * static_cast<unsigned>(sizeof(element));
              }),
        ceil_div(K, config::block_k), M, F, first_row, first_column, lds, epilogue{bias, y, F, y_stride});
}

}  // namespace rocm_sd
