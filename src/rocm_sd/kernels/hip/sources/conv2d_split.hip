// conv2d whose depth is cut into parts, for maps of 8x8 and 16x16, which have too few tiles to fill a large GPU.
//
// Sums of one part of the depth go, in float32, to parts: [splits, pixels, Cout]; conv2d_finish.hip adds them up.
//
// Parameters: those of conv2d.hip but for what is added.
#include "rocm_sd/conv.hpp"
#include "rocm_sd/epilogue.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE_OUT>;
using product = gemm<this_arch, element, config>;
constexpr int kernel = ROCM_SD_KERNEL_SIZE;

/// Grid: (ceil(pixels / block_m) * ceil(Cout / block_n), splits); each part has `steps` steps, the last what is left.
ROCM_SD_KERNEL(product::threads)
conv2d_split(const element* x, const element* weight, float* parts, int pixels, int Cout, int H, int W, int Cin, int Ho,
             int Wo, int stride, int padding, int steps, int group_m) {
    using whole = convolution<product, element, kernel, ROCM_SD_PADDED, ROCM_SD_WIDE>;
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile =
        tile_of(block_x(), ceil_div(pixels, config::block_m), ceil_div(Cout, config::block_n), group_m);
    const int first = block_y() * steps;
    whole::run_part(x, windows{H, W, Cin, Ho, Wo, stride, padding, padding}, pixels,
                    factor<element>{weight, kernel * kernel * Cin, Cout}, tile.row * config::block_m,
                    tile.column * config::block_n, {first, smaller(steps, whole::steps(Cin) - first)}, lds,
                    store_sums<config::wide>{parts + static_cast<int64>(block_y()) * pixels * Cout, Cout});
}

}  // namespace rocm_sd
