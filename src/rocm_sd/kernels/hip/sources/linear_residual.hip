// y = x @ weight^T + bias + residual, x: [M, K], weight: [N, K], y: [M, N]; float32 accumulation, one rounding.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; wide: 1 where K, N and all strides are multiples of eight and all pointers of 16
// bytes, else 0;
// has_bias, has_residual: 1 or 0.
#include "rocm_sd/gemm.hpp"

namespace rocm_sd {

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

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> sums, const fetched& ahead) const {
        if constexpr (has_bias) sums += convert<float>(ahead.bias);
        if constexpr (has_residual) sums += convert<float>(ahead.residual);
        store_chunk<wide>(y + static_cast<int64>(at.row) * y_stride + at.column, convert<T>(sums), at.count);
    }
};

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;
using epilogue = add_bias_and_residual<element, config::wide, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_RESIDUAL>;

/// Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x. Strides count values.
ROCM_SD_KERNEL(product::threads)
linear_residual(const element* x, const element* weight, const element* bias, const element* residual, element* y,
                int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride,
                int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(N, config::block_n), group_m);
    product::run(factor<element>{x, x_stride, M}, factor<element>{weight, weight_stride, N}, K,
                 tile.row * config::block_m, tile.column * config::block_n, lds,
                 epilogue{bias, residual, y, residual_stride, y_stride});
}

}  // namespace rocm_sd
