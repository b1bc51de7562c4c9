// y = conv2d(nearest 2x of x, weight, padding 1) + bias, x: [N, H, W, Cin], y: [N, 2H, 2W, Cout], all dense; the
// enlarged picture is never in memory. float32 accumulation, one rounding.
//
// An output pixel (2i + a, 2j + b) sees 2x2 pixels of x only: rows i - 1 + a and i + a, columns likewise. For each
// parity (a, b) the nine weights fall together into four sums, so the work is four convolutions of 2x2: 4/9 of the
// products. sums: [4, Cout, 2, 2, Cin], entry 2a + b for the pixels of that parity.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; wide: 1 where Cin is a multiple of eight and x and sums begin at multiples of 16
// bytes, else 0; wide_out: the same of Cout, bias and y; has_bias: 1 or 0.
#include "rocm_sd/conv.hpp"

namespace rocm_sd {

template <typename T, bool wide, bool has_bias>
struct store_parity {
    const T* bias;  // [Cout]
    T* y;           // the first pixel of this parity
    int W, Cout;

    struct fetched {
        chunk_of<T> bias;
    };

    ROCM_SD_DEVICE fetched fetch(run_of_sums at) const {
        fetched ahead;
        if constexpr (has_bias) ahead.bias = load_chunk<wide>(bias + at.column, at.count);
        return ahead;
    }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> sums, const fetched& ahead) const {
        if constexpr (has_bias) sums += convert<float>(ahead.bias);
        // Line i of x becomes lines 2i and 2i + 1 of y, also from one picture to the next.
        const unsigned line = static_cast<unsigned>(at.row) / static_cast<unsigned>(W);
        const int64 pixel = 2 * static_cast<int64>(at.row) + 2 * static_cast<int64>(line) * W;
        store_chunk<wide>(y + pixel * Cout + at.column, convert<T>(sums), at.count);
    }
};

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE_OUT>;
using product = gemm<this_arch, element, config>;
using epilogue = store_parity<element, config::wide, ROCM_SD_HAS_BIAS>;

/// Grid: ceil(pixels / block_m) * ceil(Cout / block_n) * 4 workgroups in x; pixels are those of x, over all pictures.
ROCM_SD_KERNEL(product::threads)
upsample_conv2d(const element* x, const element* sums, const element* bias, element* y, int pixels, int Cout, int H,
                int W, int Cin, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    // The four parities of a tile read the same pixels of x, so they are neighbours, as columns of one wide matrix.
    const sum_place tile =
        tile_of(block_x(), ceil_div(pixels, config::block_m), ceil_div(Cout, config::block_n) * 4, group_m);
    const int parity = tile.column % 4, a = parity / 2, b = parity % 2, depth = 4 * Cin;
    convolution<product, element, 2, true, ROCM_SD_WIDE>::run(
        x, windows{H, W, Cin, H, W, 1, 1 - a, 1 - b}, pixels,
        factor<element>{sums + static_cast<int64>(parity) * Cout * depth, depth, Cout}, tile.row * config::block_m,
        tile.column / 4 * config::block_n, lds,
        epilogue{bias, y + static_cast<int64>(2 * a * W + b) * Cout, W, Cout});
}

}  // namespace rocm_sd
