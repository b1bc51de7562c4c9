// y = x @ weight^T whose K is cut into parts, for few rows of a long K, which have too few tiles to fill a large GPU.
//
// Sums of one part of K go, in float32, to parts: [splits, M, N]; conv2d_finish.hip adds them up, with bias and residual:
// to it rows are the pixels of one picture.
//
// Parameters: those of linear_residual.hip but for what is added.
#include "rocm_sd/epilogue.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;

/// Grid: (ceil(M / block_m) * ceil(N / block_n), splits); each part has `steps` steps, the last what is left. Strides
/// count values.
ROCM_SD_KERNEL(product::threads)
linear_split(const element* x, const element* weight, float* parts, int M, int N, int K, int x_stride,
             int weight_stride, int steps, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(N, config::block_n), group_m);
    const int of_part = steps * config::block_k, first = block_y() * of_part;
    product::run(factor<element>{x + first, x_stride, M}, factor<element>{weight + first, weight_stride, N},
                 smaller(of_part, K - first), tile.row * config::block_m, tile.column * config::block_n, lds,
                 store_sums<config::wide>{parts + static_cast<int64>(block_y()) * M * N, N});
}

}  // namespace rocm_sd
