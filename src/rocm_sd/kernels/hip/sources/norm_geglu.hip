// h = layer_norm(x); y = (h @ weight[:F]^T + bias[:F]) * gelu(h @ weight[F:]^T + bias[F:]), x: [M, K], weight: [2F, K],
// y: [M, F]. Neither h nor the [M, 2F] between product and gate is in memory: linear_geglu.hip with the norm of
// norm_linear.hip.
//
// Parameters: as norm_linear.hip; F is a multiple of eight too.
#include "rocm_sd/geglu.hpp"
#include "rocm_sd/norm.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using product = gemm<this_arch, element, config>;
using epilogue = gate_values<element, true, ROCM_SD_HAS_BIAS>;
using normed_rows = normed_steps<product::tile_a, element, product::threads>;

/// Grid: ceil(M / block_m) * ceil(F / (block_n / 2)) workgroups in x. Strides count values; moments: [M, parts, 2].
ROCM_SD_KERNEL(product::threads)
norm_geglu(const element* x, const float* moments, const element* norm_weight, const element* norm_bias,
           const element* weight, const element* bias, element* y, int M, int F, int K, int x_stride, int weight_stride,
           int y_stride, int parts, int span, float share, float eps, int group_m) {
    constexpr int half_n = config::block_n / 2;
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(F, half_n), group_m);
    const int thread = thread_index(), first_row = tile.row * config::block_m, first_column = tile.column * half_n;
    product::run_steps<2>(
        normed_rows(factor<element>{x, x_stride, M}, K, first_row, thread, norm_weight, norm_bias,
                    row_moments{moments, parts, span, K, share, eps}),
        gate_pairs<product>(weight, weight_stride, F, K, first_column, thread), ceil_div(K, config::block_k), M, F,
        first_row, first_column, lds, epilogue{bias, y, F, y_stride});
}

}  // namespace rocm_sd
