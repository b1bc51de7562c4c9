// y = conv2d(x, weight) + bias + add + residual, x: [N, H, W, Cin], weight: [Cout, k, k, Cin], y: [N, Ho, Wo,
// Cout], all dense; float32 accumulation, one rounding.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; kernel_size: k, 1 or 3; padded: 1 where taps may lie outside the picture; wide: 1
// where Cin is a multiple of eight and x and weight begin at multiples of 16 bytes, 2 where it is four and 8 bytes,
// else 0, value by value; wide_out: 1 where Cout and all others are as the first, else 0; has_bias, has_add,
// has_residual: 1 or 0.
#include "rocm_sd/conv.hpp"

namespace rocm_sd {

template <typename T, bool wide, bool has_bias, bool has_add, bool has_residual>
struct add_all {
    const T* bias;      // [Cout]
    const T* add;       // [N, Cout]
    const T* residual;  // as y
    T* y;
    int pixels_of_picture, Cout;

    struct fetched {
        chunk_of<T> bias, add, residual;
    };

    ROCM_SD_DEVICE fetched fetch(run_of_sums at) const {
        fetched ahead;
        if constexpr (has_bias) ahead.bias = load_chunk<wide>(bias + at.column, at.count);
        if constexpr (has_add) {
            const unsigned picture = static_cast<unsigned>(at.row) / static_cast<unsigned>(pixels_of_picture);
            ahead.add = load_chunk<wide>(add + static_cast<int64>(picture) * Cout + at.column, at.count);
        }
        if constexpr (has_residual) ahead.residual = load_chunk<wide>(residual + place(at), at.count);
        return ahead;
    }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> sums, const fetched& ahead) const {
        if constexpr (has_bias) sums += convert<float>(ahead.bias);
        if constexpr (has_add) sums += convert<float>(ahead.add);
        if constexpr (has_residual) sums += convert<float>(ahead.residual);
        store_chunk<wide>(y + place(at), convert<T>(sums), at.count);
    }

  private:
    ROCM_SD_DEVICE int64 place(run_of_sums at) const { return static_cast<int64>(at.row) * Cout + at.column; }
};

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE_OUT>;
using product = gemm<this_arch, element, config>;
using epilogue = add_all<element, config::wide, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_ADD, ROCM_SD_HAS_RESIDUAL>;
constexpr int kernel = ROCM_SD_KERNEL_SIZE;

/// Grid: ceil(pixels / block_m) * ceil(Cout / block_n) workgroups in x; pixels are those of y, over all pictures.
ROCM_SD_KERNEL(product::threads)
conv2d(const element* x, const element* weight, const element* bias, const element* add, const element* residual,
       element* y, int pixels, int Cout, int H, int W, int Cin, int Ho, int Wo, int stride, int padding, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile =
        tile_of(block_x(), ceil_div(pixels, config::block_m), ceil_div(Cout, config::block_n), group_m);
    convolution<product, element, kernel, ROCM_SD_PADDED, ROCM_SD_WIDE>::run(
        x, windows{H, W, Cin, Ho, Wo, stride, padding, padding}, pixels,
        factor<element>{weight, kernel * kernel * Cin, Cout}, tile.row * config::block_m, tile.column * config::block_n,
        lds, epilogue{bias, add, residual, y, Ho * Wo, Cout});
}

}  // namespace rocm_sd
