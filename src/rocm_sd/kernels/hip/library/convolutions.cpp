// Which variant runs with which grid: convolutions. What a kernel's arguments are is told in its source.
#include <algorithm>

#include "choose.hpp"

using namespace rocm_sd;

namespace {

constexpr int parts = 4;         // of the depth, where it is cut: as in variants.cmake
constexpr int fewest_steps = 4;  // of a part: fewer are not worth the second pass
constexpr int finish_threads = 256, finish_width = 4;

// A tile's pixels lie within `lines` lines of x, which are not further apart than window_reach in conv.hpp.
int check_reach(const char* name, long long lines, int W, int Cin) {
    if (lines * W * Cin * 2 < (1ll << 30)) return 0;
    return fail(rocm_sd_unsupported, text(name, ": lines of ", W, " pixels of ", Cin, " channels"));
}

struct conv_shape {
    int Ho, Wo, pixels;
    const char* size_and_padded;

    conv_shape(int N, int H, int W, int size, int stride, int padding)
        : Ho((H + 2 * padding - size) / stride + 1),
          Wo((W + 2 * padding - size) / stride + 1),
          pixels(N * Ho * Wo),
          size_and_padded(size == 1 ? "kernel_size=1 padded=0" : "kernel_size=3 padded=1") {}
};

int check_conv(int N, int Cin, int H, int W, int Cout, int size, int stride, int padding, rocm_sd_dtype dtype) {
    const bool positive = N > 0 && Cin > 0 && H > 0 && W > 0 && Cout > 0 && stride > 0;
    if (const int code = check_halves("conv2d", positive, dtype)) return code;
    if (!(size == 1 && padding == 0) && !(size == 3 && (padding == 0 || padding == 1)))
        return fail(rocm_sd_unsupported, text("conv2d of ", size, "x", size, " with padding ", padding,
                                              ": there are 1x1, 3x3 and 3x3 padded by 1"));
    if (H + 2 * padding < size || W + 2 * padding < size) return fail(rocm_sd_unsupported, "sizes must be positive");
    return 0;
}

// How many steps a part has, and the tile, where small tiles would leave half of the compute units idle; else 0.
int steps_of_part(const conv_shape& shape, int Cin, int Cout, int size, rocm_sd_dtype dtype, tile& small) {
    if (Cin % 8 != 0 || Cout % 8 != 0) return 0;
    if (choose_tile("conv2d_split", dtype, shape.size_and_padded, false, shape.pixels, Cout, 1, small)) return 0;
    if (2 * small.count(shape.pixels, Cout) > small.variant.compute_units) return 0;
    const int steps = size * size * ceil_div(Cin, small.variant.parameter("block_k")), of_part = ceil_div(steps, parts);
    return of_part >= fewest_steps && ceil_div(steps, of_part) == parts ? of_part : 0;
}

}  // namespace

size_t rocm_sd_conv2d_workspace(int N, int Cin, int H, int W, int Cout, int size, int stride, int padding,
                                rocm_sd_dtype dtype) {
    if (check_conv(N, Cin, H, W, Cout, size, stride, padding, dtype)) return 0;
    const conv_shape shape(N, H, W, size, stride, padding);
    tile small;
    if (!steps_of_part(shape, Cin, Cout, size, dtype, small)) return 0;
    return sizeof(float) * parts * static_cast<size_t>(shape.pixels) * Cout;
}

int rocm_sd_conv2d(const void* x, const void* weight, const void* bias, const void* add, const void* residual, void* y,
                   int N, int Cin, int H, int W, int Cout, int size, int stride, int padding, void* workspace,
                   rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_conv(N, Cin, H, W, Cout, size, stride, padding, dtype)) return code;
    if (bias == nullptr) return fail(rocm_sd_unsupported, "conv2d needs a bias");
    if (add != nullptr && residual != nullptr)
        return fail(rocm_sd_unsupported, "conv2d adds one of add and residual, not both");
    const conv_shape shape(N, H, W, size, stride, padding);
    bool wide = access_width(2, {Cin}, {x, weight}) > 1;
    bool wide_out = access_width(2, {Cout}, {bias, add, residual, y}) > 1;
    const std::string added =
        text("has_add=", add == nullptr ? 0 : 1, " has_residual=", residual == nullptr ? 0 : 1);
    // From the last line of one picture to the first of the next it may be further than a stride.
    const long long apart = std::max(stride, H - (shape.Ho - 1) * stride);
    const auto lines = [&](const tile& of) { return (ceil_div(of.rows(), shape.Wo) + 1) * apart + size; };
    tile chosen;
    device_kernel kernel;
    const bool may_split = workspace != nullptr && wide && wide_out && access_width(2, {}, {workspace}) > 1;
    if (const int steps = may_split ? steps_of_part(shape, Cin, Cout, size, dtype, chosen) : 0) {
        if (const int code = check_reach("conv2d", lines(chosen), W, Cin)) return code;
        const std::string finish = text("conv2d_finish element=", elements[dtype].name, " splits=", parts,
                                        " width=", finish_width, " has_bias=1 ", added);
        device_kernel last;
        if (const int code = find_kernel(finish, "conv2d_finish", last)) return code;
        if (const int code = find_kernel(chosen.variant, "conv2d_split", kernel)) return code;
        if (const int code = launch(kernel, {chosen.count(shape.pixels, Cout), parts, 1}, chosen.threads(), stream, x,
                                    weight, workspace, shape.pixels, Cout, H, W, Cin, shape.Ho, shape.Wo, stride,
                                    padding, steps, group_m))
            return code;
        const int of_picture = shape.Ho * shape.Wo;
        return launch(last, {ceil_div(of_picture * Cout, finish_threads * finish_width), N, 1}, finish_threads, stream,
                      workspace, bias, add, residual, y, of_picture, shape.pixels, Cout);
    }
    // Where one side alone goes by 16 bytes there is code for a plain 3x3 only; one by one anything goes.
    if (wide != wide_out && (size == 1 || add != nullptr || residual != nullptr)) wide = wide_out = false;
    const std::string rest = text(shape.size_and_padded, " wide=", wide, " wide_out=", wide_out, " ", added);
    if (const int code = choose_tile("conv2d", dtype, rest, wide && wide_out, shape.pixels, Cout, 1, chosen))
        return code;
    if (const int code = check_reach("conv2d", lines(chosen), W, Cin)) return code;
    if (const int code = find_kernel(chosen.variant, "conv2d", kernel)) return code;
    return launch(kernel, {chosen.count(shape.pixels, Cout), 1, 1}, chosen.threads(), stream, x, weight, bias, add,
                  residual, y, shape.pixels, Cout, H, W, Cin, shape.Ho, shape.Wo, stride, padding, group_m);
}

void rocm_sd_parity_weights(const float* weight, float* sums, int Cout, int Cin) {
    // Of three lines of the filter, which of the two lines of x an output line of even and of odd number sees them in.
    static const int line_of[2][3] = {{0, 1, 1}, {0, 0, 1}};
    std::fill(sums, sums + static_cast<size_t>(16) * Cout * Cin, 0.0f);
    for (int parity = 0; parity < 4; ++parity) {
        for (int o = 0; o < Cout; ++o) {
            for (int tap = 0; tap < 9; ++tap) {
                const int line = line_of[parity / 2][tap / 3], column = line_of[parity % 2][tap % 3];
                const float* from = weight + (static_cast<size_t>(o) * 9 + tap) * Cin;
                float* to = sums + ((static_cast<size_t>(parity) * Cout + o) * 4 + line * 2 + column) * Cin;
                for (int i = 0; i < Cin; ++i) to[i] += from[i];
            }
        }
    }
}

int rocm_sd_upsample_conv2d(const void* x, const void* sums, const void* bias, void* y, int N, int Cin, int H, int W,
                            int Cout, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code =
            check_halves("upsample_conv2d", N > 0 && Cin > 0 && H > 0 && W > 0 && Cout > 0, dtype))
        return code;
    if (bias == nullptr) return fail(rocm_sd_unsupported, "upsample_conv2d needs a bias");
    const bool wide = access_width(2, {Cin, Cout}, {x, sums, bias, y}) > 1;
    const int pixels = N * H * W;
    tile chosen;
    device_kernel kernel;
    // The four parities of a tile are workgroups of their own.
    if (const int code = choose_tile("upsample_conv2d", dtype, text("wide=", wide, " wide_out=", wide), wide, pixels,
                                     Cout, 4, chosen))
        return code;
    if (const int code = check_reach("upsample_conv2d", ceil_div(chosen.rows(), W) + 3, W, Cin)) return code;
    if (const int code = find_kernel(chosen.variant, "upsample_conv2d", kernel)) return code;
    return launch(kernel, {chosen.count(pixels, Cout) * 4, 1, 1}, chosen.threads(), stream, x, sums, bias, y, pixels,
                  Cout, H, W, Cin, group_m);
}
