// The transformer block out of the founding names alone, each kernel as its own source has it; step: one of them.
#include "ck_sd_templates.hpp"

using rocm_sd::half;

#if defined(__gfx942__)
using transformer = cdna3::OptimizedFusedTransformer<half, 40>;
#else
using transformer = rdna3::OptimizedFusedTransformer<half, 40>;
#endif

#define LDS(step) ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[step::lds_bytes]

#if ROCM_SD_STEP == 0
using projection = transformer::projection<>;
ROCM_SD_KERNEL(projection::threads)
norm_linear(const half* x, const float* moments, const half* norm_weight, const half* norm_bias, const half* weight,
            const half* bias, half* y, int M, int N, int K, int x_stride, int weight_stride, int y_stride, int parts,
            int span, float share, float eps, int group_m) {
    LDS(projection);
    projection::run(x, moments, norm_weight, norm_bias, weight, bias, y, M, N, K, x_stride, weight_stride, y_stride,
                    parts, span, share, eps, group_m, lds);
}
#endif

#if ROCM_SD_STEP == 1
using attention = transformer::attention;
ROCM_SD_KERNEL(attention::threads)
attend(const half* q, const half* k, const half* v, half* out, int S, int T, int H, int q_b, int q_s, int q_h, int k_b,
       int k_s, int k_h, int v_b, int v_s, int v_h, float scale) {
    LDS(attention);
    attention::run(q, k, v, out, S, T, H, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, scale, lds);
}
#endif

#if ROCM_SD_STEP == 2
using output = transformer::output<>;
ROCM_SD_KERNEL(output::threads)
linear_moments(const half* x, const half* weight, const half* bias, const half* residual, half* y, float* moments,
               int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride, int group_m) {
    LDS(output);
    output::run(x, weight, bias, residual, y, moments, M, N, K, x_stride, weight_stride, residual_stride, y_stride,
                group_m, lds);
}
#endif

#if ROCM_SD_STEP == 3
using feed_forward = transformer::feed_forward<>;
ROCM_SD_KERNEL(feed_forward::threads)
norm_geglu(const half* x, const float* moments, const half* norm_weight, const half* norm_bias, const half* weight,
           const half* bias, half* y, int M, int F, int K, int x_stride, int weight_stride, int y_stride, int parts,
           int span, float share, float eps, int group_m) {
    LDS(feed_forward);
    feed_forward::run(x, moments, norm_weight, norm_bias, weight, bias, y, M, F, K, x_stride, weight_stride, y_stride,
                      parts, span, share, eps, group_m, lds);
}
#endif
