// What a workgroup does in each kernel of the transformer block: layer norm and product, attention, product with its
// residual, layer norm and gated feed-forward. The sources of these names are the kernels around them.
//
// Each has `threads`, the size of a workgroup; `lds_bytes`, aligned to 16; and `run`, which takes the kernel's arguments
// and that memory. K, N and all strides are multiples of eight and all pointers of 16 bytes.
#pragma once

#include "attention.hpp"
#include "geglu.hpp"
#include "norm.hpp"

namespace rocm_sd {

/// y = layer_norm(x) @ weight^T + bias, x: [M, K], weight: [N, K], y: [M, N]; moments: [M, parts, 2].
/// Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x. Strides count values.
template <typename Arch, typename T, typename Config, bool has_bias>
struct norm_linear_step {
    using product = gemm<Arch, T, Config>;
    static constexpr int threads = product::threads, lds_bytes = product::lds_bytes;

    ROCM_SD_DEVICE static void run(
        const T* x, const float* moments, const T* norm_weight, const T* norm_bias, const T* weight, const T* bias,
        T* y, int M, int N, int K, int x_stride, int weight_stride, int y_stride, int parts, int span, float share,
        float eps, int group_m, char* lds) {
        using columns = typename product::template rows_of<typename product::tile_b>;
        using normed_rows = normed_steps<typename product::tile_a, T, threads>;
        using epilogue = add_bias_and_residual<T, true, has_bias, false>;
        const sum_place tile = tile_of(block_x(), ceil_div(M, Config::block_m), ceil_div(N, Config::block_n), group_m);
        const int thread = thread_index();
        const int first_row = tile.row * Config::block_m, first_column = tile.column * Config::block_n;
        product::template run_steps<1>(
            normed_rows(factor<T>{x, x_stride, M}, K, first_row, thread, norm_weight, norm_bias,
                        row_moments{moments, parts, span, K, share, eps}),
            columns(factor<T>{weight, weight_stride, N}, K, first_column, thread), ceil_div(K, Config::block_k), M, N,
            first_row, first_column, lds, epilogue{bias, nullptr, y, 0, y_stride});
    }
};

/// h = layer_norm(x); y = (h @ weight[:F]^T + bias[:F]) * gelu(h @ weight[F:]^T + bias[F:]), weight: [2F, K], y: [M, F].
/// Grid: ceil(M / block_m) * ceil(F / (block_n / 2)) workgroups in x.
template <typename Arch, typename T, typename Config, bool has_bias>
struct norm_geglu_step {
    using product = gemm<Arch, T, Config>;
    static constexpr int threads = product::threads, lds_bytes = product::lds_bytes;

    ROCM_SD_DEVICE static void run(
        const T* x, const float* moments, const T* norm_weight, const T* norm_bias, const T* weight, const T* bias,
        T* y, int M, int F, int K, int x_stride, int weight_stride, int y_stride, int parts, int span, float share,
        float eps, int group_m, char* lds) {
        constexpr int half_n = Config::block_n / 2;
        using normed_rows = normed_steps<typename product::tile_a, T, threads>;
        using epilogue = gate_values<T, true, has_bias>;
        const sum_place tile = tile_of(block_x(), ceil_div(M, Config::block_m), ceil_div(F, half_n), group_m);
        const int thread = thread_index(), first_row = tile.row * Config::block_m, first_column = tile.column * half_n;
        product::template run_steps<2>(
            normed_rows(factor<T>{x, x_stride, M}, K, first_row, thread, norm_weight, norm_bias,
                        row_moments{moments, parts, span, K, share, eps}),
            gate_pairs<product>(weight, weight_stride, F, K, first_column, thread), ceil_div(K, Config::block_k), M, F,
            first_row, first_column, lds, epilogue{bias, y, F, y_stride});
    }
};

/// y = x @ weight^T + bias + residual, and the moments of its rows in parts of block_n columns: [M, parts, 2], with parts
/// the second factor. y may be the residual. Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x.
template <typename Arch, typename T, typename Config, bool has_bias, bool has_residual>
struct linear_moments_step {
    using product = gemm<Arch, T, Config>;
    static constexpr int threads = product::threads, lds_bytes = product::lds_bytes;

    ROCM_SD_DEVICE static void run(
        const T* x, const T* weight, const T* bias, const T* residual, T* y, float* moments, int M, int N, int K,
        int x_stride, int weight_stride, int residual_stride, int y_stride, int group_m, char* lds) {
        using epilogue = add_and_measure<T, Config::block_n, has_bias, has_residual>;
        const int parts = ceil_div(N, Config::block_n);
        const sum_place tile = tile_of(block_x(), ceil_div(M, Config::block_m), parts, group_m);
        product::run(factor<T>{x, x_stride, M}, factor<T>{weight, weight_stride, N}, K, tile.row * Config::block_m,
                     tile.column * Config::block_n, lds,
                     epilogue{{bias, residual, y, residual_stride, y_stride}, moments, N, parts});
    }
};

/// out = softmax(scale * q k^T) v, q: [B, S, H, D], k, v: [B, T, H, D], out: dense [B, S, H, D].
/// Grid: (ceil(S / block_m), H, B): workgroups of one head follow one another, so that its keys and values are read from
/// memory once. Strides count values; scale is in powers of two and above zero.
template <typename Arch, typename T, typename Config>
struct attention_step {
    using block = attention<Arch, T, Config>;
    static constexpr int threads = block::threads, lds_bytes = block::lds_bytes;

    ROCM_SD_DEVICE static void run(
        const T* q, const T* k, const T* v, T* out, int S, int keys, int H, int q_b, int q_s, int q_h, int k_b, int k_s,
        int k_h, int v_b, int v_s, int v_h, float scale, char* lds) {
        const int64 out_stride = static_cast<int64>(H) * Config::head;
        T* first = out + block_z() * (S * out_stride) + block_y() * Config::head;
        block::run(rows_of(q, q_b, q_s, q_h, S), rows_of(k, k_b, k_s, k_h, keys), rows_of(v, v_b, v_s, v_h, keys),
                   first, out_stride, block_x() * Config::block_m, scale, lds);
    }

  private:
    /// Rows of head h of item b.
    ROCM_SD_DEVICE static head_rows<T> rows_of(
        const T* data, int batch_stride, int row_stride, int head_stride, int rows) {
        const int64 b = block_z(), h = block_y();
        return {data + b * batch_stride + h * head_stride, row_stride * static_cast<int>(sizeof(T)), rows};
    }
};

}  // namespace rocm_sd
