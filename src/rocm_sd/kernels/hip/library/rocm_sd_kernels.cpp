// Which variant runs with which grid: kernels without products. The Python launchers beside the sources have more
// variants to choose from, since they compile what they need when they need it; what a kernel's arguments are is told
// in its source.
#include "rocm_sd_kernels.h"

#include <algorithm>

#include "choose.hpp"

using namespace rocm_sd;

int rocm_sd_layout_copy(const void* x, void* y, int N, int C, int HW, int channels_last, rocm_sd_dtype dtype,
                        hipStream_t stream) {
    if (const int code = check(N > 0 && C > 0 && HW > 0, dtype)) return code;
    const element type = elements[dtype];
    const int P = channels_last ? C : HW, Q = channels_last ? HW : C;
    const bool wide = access_width(type.size, {P, Q}, {x, y}) > 1;
    device_kernel kernel;
    const std::string variant = text("layout_copy element=", type.bits, " channels=1 last=0");
    if (const int code = find_kernel(variant, wide ? "layout_copy_wide" : "layout_copy_plain", kernel)) return code;
    const int tile = wide ? 8 * 16 / type.size : 32;
    return launch(kernel, {ceil_div(P, tile) * ceil_div(Q, tile), N, 1}, wide ? 64 : 256, stream, x, y, P, Q);
}

int rocm_sd_upsample_2x(const void* x, void* y, int N, int C, int H, int W, int bilinear, rocm_sd_dtype dtype,
                        hipStream_t stream) {
    if (const int code = check(N > 0 && C > 0 && H > 0 && W > 0, dtype)) return code;
    const element type = elements[dtype];
    const int width = access_width(type.size, {C}, {x, y});
    device_kernel kernel;
    const std::string variant = text("upsample element=", bilinear ? type.name : type.bits, " width=", width,
                                     " scale=2 bilinear=", bilinear ? 1 : 0);
    if (const int code = find_kernel(variant, "upsample", kernel)) return code;
    const int threads = 128;
    return launch(kernel, {ceil_div(W * (C / width), threads), H, N}, threads, stream, x, y, C, H, W);
}

namespace {

// How threads share a row.
struct row_split {
    bool wide;
    int lanes, chunks, threads;

    std::string words() const { return text(" lanes=", lanes, " chunks=", chunks, " threads=", threads); }
};

// As in variants.cmake; the first that a row fits into, or none.
const row_split* split_of(int C, int width) {
    static const row_split splits[] = {
        {true, 64, 1, 128}, {true, 64, 5, 128}, {true, 256, 5, 256}, {false, 64, 5, 128}, {false, 1024, 8, 1024}};
    for (const row_split& each : splits) {
        if (each.wide == (width > 1) && each.lanes * each.chunks * width >= C) return &each;
    }
    return nullptr;
}

int too_long(int C) {
    return fail(rocm_sd_unsupported, text("rows of ", C, " values: they do not stay in registers"));
}

}  // namespace

int rocm_sd_layer_norm_residual(const void* x, const void* residual, const void* weight, const void* bias, void* y,
                                void* total, int M, int C, float eps, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check(M > 0 && C > 0, dtype)) return code;
    const element type = elements[dtype];
    const int width = access_width(type.size, {C}, {x, residual, weight, bias, y, total});
    const row_split* split = split_of(C, width);
    if (split == nullptr) return too_long(C);
    device_kernel kernel;
    const std::string variant = text("layer_norm_residual element=", type.name, " width=", width, split->words(),
                                     " even=0 has_residual=", residual == nullptr ? 0 : 1, " has_weight=1 has_bias=1");
    if (const int code = find_kernel(variant, "layer_norm_residual", kernel)) return code;
    const int x_stride = C, residual_stride = residual == nullptr ? 0 : C;
    return launch(kernel, {ceil_div(M, split->threads / split->lanes), 1, 1}, split->threads, stream, x, residual,
                  weight, bias, y, total, M, C, x_stride, residual_stride, 1.0f / static_cast<float>(C), eps);
}

int rocm_sd_row_moments(const void* x, void* moments, int M, int C, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("row_moments", M > 0 && C > 0, dtype)) return code;
    const int width = access_width(elements[dtype].size, {C}, {x});
    const row_split* split = split_of(C, width);
    if (split == nullptr) return too_long(C);
    device_kernel kernel;
    const std::string variant =
        text("row_moments element=", elements[dtype].name, " width=", width, split->words(), " even=0");
    if (const int code = find_kernel(variant, "row_moments", kernel)) return code;
    return launch(kernel, {ceil_div(M, split->threads / split->lanes), 1, 1}, split->threads, stream, x, moments, M, C,
                  C, 1.0f / static_cast<float>(C));
}

namespace {

constexpr int line = 128;             // bytes; threads side by side along the channels read one
constexpr int wanted_slices = 1024;   // workgroups of `moments`: several for each compute unit of a large card
constexpr int norm_threads = 256;
constexpr int apply_rows = 4;  // that one thread takes

struct norm_shape {
    int c_blocks, rows, rows_per_slice, slices;

    norm_shape(int N, int C, int HW, int width, int size) {
        const int columns = line / (width * size);
        c_blocks = ceil_div(C, columns * width);
        rows = norm_threads / columns;
        const int wanted = std::max(1, wanted_slices / (N * c_blocks));
        rows_per_slice = std::max(rows, ceil_div(HW, wanted));
        slices = ceil_div(HW, rows_per_slice);
    }
};

}  // namespace

size_t rocm_sd_group_norm_silu_workspace(int N, int C, int HW, rocm_sd_dtype dtype) {
    if (check(N > 0 && C > 0 && HW > 0, dtype)) return 0;
    const int size = elements[dtype].size;
    // Whether 16 bytes move at once is not known before the pointers are.
    const int slices =
        std::max(norm_shape(N, C, HW, 1, size).slices, norm_shape(N, C, HW, 16 / size, size).slices);
    return sizeof(float) * 2 * static_cast<size_t>(N) * C * (static_cast<size_t>(slices) + 1);
}

int rocm_sd_group_norm_silu(const void* x, void* y, const void* weight, const void* bias, const void* add, int N, int C,
                            int HW, int groups, float eps, int silu, void* workspace, rocm_sd_dtype dtype,
                            hipStream_t stream) {
    if (const int code = check(N > 0 && C > 0 && HW > 0 && groups > 0, dtype)) return code;
    if (C % groups != 0) return fail(rocm_sd_unsupported, text(C, " channels are not ", groups, " equal groups"));
    const element type = elements[dtype];
    const int width = access_width(type.size, {C}, {x, y, weight, bias, add, workspace});
    const norm_shape shape(N, C, HW, width, type.size);
    const std::string variant =
        text("group_norm_silu element=", type.name, " width=", width, " columns=", line / (width * type.size),
             " threads=64 chunks=1 group_width=", width, " has_weight=1 has_bias=1 has_add=", add == nullptr ? 0 : 1,
             " silu=", silu ? 1 : 0);
    device_kernel moments, fold, apply;
    if (const int code = find_kernel(variant, "group_norm_silu_moments", moments)) return code;
    if (const int code = find_kernel(variant, "group_norm_silu_fold", fold)) return code;
    if (const int code = find_kernel(variant, "group_norm_silu_apply", apply)) return code;

    // Those that are read 16 bytes at once stand first: C is then a multiple of 16 bytes.
    const size_t of_item = static_cast<size_t>(N) * C;
    float* const group_means = static_cast<float*>(workspace);
    float* const scales = group_means + of_item;
    float* const means = scales + of_item;
    float* const m2s = means + of_item * static_cast<size_t>(shape.slices);
    const int group_width = C / groups;
    const float share = 1.0f / (static_cast<float>(HW) * static_cast<float>(group_width));
    if (const int code = launch(moments, {shape.slices, shape.c_blocks, N}, norm_threads, stream, x, means, m2s, C, HW,
                                shape.rows_per_slice, shape.slices))
        return code;
    if (const int code = launch(fold, {groups, N, 1}, norm_threads, stream, means, m2s, weight, add, group_means,
                                scales, C, HW, group_width, shape.slices, shape.rows_per_slice, share, eps))
        return code;
    const int blocks = ceil_div(HW, shape.rows * apply_rows);
    return launch(apply, {blocks, shape.c_blocks, N}, norm_threads, stream, x, y, group_means, scales, bias, add, C,
                  HW, blocks);
}
