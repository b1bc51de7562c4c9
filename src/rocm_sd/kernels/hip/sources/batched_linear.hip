// y = x @ weight^T + bias + residual for each matrix of a batch, x: [B, M, K], weight: [B, N, K], y: [B, M, N]; float32
// accumulation, one rounding. Any of them may be the same for the whole batch: its distance is then 0.
//
// Parameters: as linear_residual.hip. The batch's distances may be any where `wide` is 0, and are multiples of eight
// where it is 1.
#include "rocm_sd/epilogue.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;
using epilogue = add_bias_and_residual<element, config::wide, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_RESIDUAL>;

/// Grid: (ceil(M / block_m) * ceil(N / block_n), 1, B). Strides count values from row to row, and distances from one
/// matrix of the batch to the next.
ROCM_SD_KERNEL(product::threads)
batched_linear(const element* x, const element* weight, const element* bias, const element* residual, element* y,
               int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride,
               int x_distance, int weight_distance, int bias_distance, int residual_distance, int y_distance,
               int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const int64 number = block_z();
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(N, config::block_n), group_m);
    product::run(factor<element>{x + number * x_distance, x_stride, M},
                 factor<element>{weight + number * weight_distance, weight_stride, N}, K,
                 tile.row * config::block_m, tile.column * config::block_n, lds,
                 epilogue{bias + number * bias_distance, residual + number * residual_distance,
                          y + number * y_distance, residual_stride, y_stride});
}

}  // namespace rocm_sd
