// Which variant runs with which grid: matrix products and attention. What a kernel's arguments are is told in its
// source.
#include <climits>

#include "choose.hpp"

using namespace rocm_sd;

namespace {

int given(const void* pointer) { return pointer == nullptr ? 0 : 1; }

int rows_in_between(const char* name, int K, int N) {
    return fail(rocm_sd_unsupported,
                text(name, ": ", K, " to ", N, " values: rows do not begin at multiples of 16 bytes"));
}

// The gates stand F rows after their values, and the distance in bytes must fit in 32 bits.
int check_gates(const char* name, const tile& chosen, int F, int K) {
    if ((static_cast<long long>(F) + chosen.columns()) * K * 2 < (1ll << 32)) return 0;
    return fail(rocm_sd_unsupported, text(name, ": gates ", F, " rows of ", K, " values after their values"));
}

}  // namespace

int rocm_sd_linear_residual(const void* x, const void* weight, const void* bias, const void* residual, void* y, int M,
                            int N, int K, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("linear_residual", M > 0 && N > 0 && K > 0, dtype)) return code;
    const bool wide = access_width(2, {N, K}, {x, weight, bias, residual, y}) > 1;
    const std::string rest = text("wide=", wide, " has_bias=", given(bias), " has_residual=", given(residual));
    tile chosen;
    device_kernel kernel;
    if (const int code = choose_tile("linear_residual", dtype, rest, wide, M, N, 1, chosen)) return code;
    if (const int code = find_kernel(chosen.variant, "linear_residual", kernel)) return code;
    return launch(kernel, {chosen.count(M, N), 1, 1}, chosen.threads(), stream, x, weight, bias, residual, y, M, N, K,
                  K, K, given(residual) * N, N, group_m);
}

int rocm_sd_batched_linear(const void* x, const void* weight, const void* bias, const void* residual, void* y, int B,
                           int M, int N, int K, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("batched_linear", B > 0 && M > 0 && N > 0 && K > 0, dtype)) return code;
    const long long m = M, n = N, k = K;
    if (m * k > INT_MAX || n * k > INT_MAX || m * n > INT_MAX)
        return fail(rocm_sd_unsupported, "batched_linear: a matrix of more values than an int can count");
    // From one matrix to the next it is a whole number of rows.
    const bool wide = access_width(2, {N, K}, {x, weight, bias, residual, y}) > 1;
    const std::string rest = text("wide=", wide, " has_bias=", given(bias), " has_residual=", given(residual));
    tile chosen;
    device_kernel kernel;
    if (const int code = choose_tile("batched_linear", dtype, rest, wide, M, N, B, chosen)) return code;
    if (const int code = find_kernel(chosen.variant, "batched_linear", kernel)) return code;
    return launch(kernel, {chosen.count(M, N), 1, B}, chosen.threads(), stream, x, weight, bias, residual, y, M, N, K,
                  K, K, given(residual) * N, N, M * K, N * K, given(bias) * N, given(residual) * M * N, M * N, group_m);
}

int rocm_sd_linear_geglu(const void* x, const void* weight, const void* bias, void* y, int M, int F, int K,
                         rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("linear_geglu", M > 0 && F > 0 && K > 0, dtype)) return code;
    const bool wide = access_width(2, {F, K}, {x, weight, bias, y}) > 1;
    const std::string rest = text("wide=", wide, " has_bias=", given(bias));
    tile chosen;
    device_kernel kernel;
    if (const int code = choose_tile("linear_geglu", dtype, rest, wide, M, 2 * F, 1, chosen)) return code;
    if (const int code = check_gates("linear_geglu", chosen, F, K)) return code;
    if (const int code = find_kernel(chosen.variant, "linear_geglu", kernel)) return code;
    return launch(kernel, {chosen.count(M, 2 * F), 1, 1}, chosen.threads(), stream, x, weight, bias, y, M, F, K, K, K,
                  F, group_m);
}

int rocm_sd_attention(const void* q, const void* k, const void* v, void* out, int B, int S, int T, int H, int D,
                      int q_stride, int kv_stride, float scale, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("attention", B > 0 && S > 0 && T > 0 && H > 0 && D > 0, dtype)) return code;
    if (!(scale > 0.0f)) return fail(rocm_sd_unsupported, "attention: the scale must be above zero");
    const long long queries = static_cast<long long>(S) * q_stride, keys = static_cast<long long>(T) * kv_stride;
    if (q_stride < H * D || kv_stride < H * D)
        return fail(rocm_sd_unsupported, text("attention: rows of ", H * D, " values that overlap"));
    // Offsets in bytes have 31 bits.
    if ((queries + D) * 2 > INT_MAX || (keys + D) * 2 > INT_MAX)
        return fail(rocm_sd_unsupported, text("attention: ", S, " queries or ", T, " keys span too many bytes"));
    if (access_width(2, {D, q_stride, kv_stride}, {q, k, v, out}) == 1)
        return fail(rocm_sd_unsupported, "attention: heads do not begin at multiples of 16 bytes");
    device_variant variant;
    device_kernel kernel;
    if (const int code = find_variant(text("attention element=", elements[dtype].name, " head=", D), variant))
        return code;
    if (const int code = find_kernel(variant, "attend", kernel)) return code;
    const int threads = variant.parameter("waves_m") * variant.parameter("waves_d") * variant.wave_size;
    const float log2_e = 1.4426950408889634f;
    return launch(kernel, {ceil_div(S, variant.parameter("block_m")), H, B}, threads, stream, q, k, v, out, S, T, H,
                  static_cast<int>(queries), q_stride, D, static_cast<int>(keys), kv_stride, D,
                  static_cast<int>(keys), kv_stride, D, scale * log2_e);
}

int rocm_sd_linear_moments_span(int M, int N, rocm_sd_dtype dtype) {
    if (check_halves("linear_moments", M > 0 && N > 0, dtype)) return 0;
    tile chosen;
    return choose_tile("linear_moments", dtype, "has_bias=1", true, M, N, 1, chosen) ? 0 : chosen.columns();
}

int rocm_sd_linear_moments(const void* x, const void* weight, const void* bias, const void* residual, void* y,
                           void* moments, int M, int N, int K, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves("linear_moments", M > 0 && N > 0 && K > 0, dtype)) return code;
    if (residual == nullptr) return fail(rocm_sd_unsupported, "linear_moments needs a residual");
    if (access_width(2, {N, K}, {x, weight, bias, residual, y}) == 1) return rows_in_between("linear_moments", K, N);
    tile chosen;
    device_kernel kernel;
    // Bias or none, the tile is the same: rocm_sd_linear_moments_span does not ask for it.
    if (const int code = choose_tile("linear_moments", dtype, text("has_bias=", given(bias)), true, M, N, 1, chosen))
        return code;
    if (const int code = find_kernel(chosen.variant, "linear_moments", kernel)) return code;
    return launch(kernel, {chosen.count(M, N), 1, 1}, chosen.threads(), stream, x, weight, bias, residual, y, moments,
                  M, N, K, K, K, N, N, group_m);
}

namespace {

// Both products with a norm on their way in; `columns` are those that tiles share out, N or 2 * N.
int normed_product(const char* name, const void* x, const void* moments, int span, const void* norm_weight,
                   const void* norm_bias, float eps, const void* weight, const void* bias, void* y, int M, int N, int K,
                   int columns, rocm_sd_dtype dtype, hipStream_t stream) {
    if (const int code = check_halves(name, M > 0 && N > 0 && K > 0 && span > 0, dtype)) return code;
    if (access_width(2, {N, K}, {x, norm_weight, norm_bias, weight, bias, y}) == 1) return rows_in_between(name, K, N);
    tile chosen;
    device_kernel kernel;
    if (const int code = choose_tile(name, dtype, text("has_bias=", given(bias)), true, M, columns, 1, chosen))
        return code;
    if (columns > N) {
        if (const int code = check_gates(name, chosen, N, K)) return code;
    }
    if (const int code = find_kernel(chosen.variant, name, kernel)) return code;
    return launch(kernel, {chosen.count(M, columns), 1, 1}, chosen.threads(), stream, x, moments, norm_weight,
                  norm_bias, weight, bias, y, M, N, K, K, K, N, ceil_div(K, span), span, 1.0f / static_cast<float>(K),
                  eps, group_m);
}

}  // namespace

int rocm_sd_norm_linear(const void* x, const void* moments, int span, const void* norm_weight, const void* norm_bias,
                        float eps, const void* weight, const void* bias, void* y, int M, int N, int K,
                        rocm_sd_dtype dtype, hipStream_t stream) {
    return normed_product("norm_linear", x, moments, span, norm_weight, norm_bias, eps, weight, bias, y, M, N, K, N,
                          dtype, stream);
}

int rocm_sd_norm_geglu(const void* x, const void* moments, int span, const void* norm_weight, const void* norm_bias,
                       float eps, const void* weight, const void* bias, void* y, int M, int F, int K,
                       rocm_sd_dtype dtype, hipStream_t stream) {
    return normed_product("norm_geglu", x, moments, span, norm_weight, norm_bias, eps, weight, bias, y, M, F, K, 2 * F,
                          dtype, stream);
}
