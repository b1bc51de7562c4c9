/* rocm_sd's HIP kernels for programs that have no Python: one function for each family of kernels.
 *
 * Every function launches on `stream` and returns at once: 0, an error of HIP (hipError_t, above zero), or one of the
 * reasons below, of which rocm_sd_last_error() tells more. Pointers are to device memory; tensors are dense. Any size
 * and any alignment of whole elements will do; 16 bytes move at once where rows and pointers are multiples of them. */
#ifndef ROCM_SD_KERNELS_H
#define ROCM_SD_KERNELS_H

#include <hip/hip_runtime_api.h>
#include <stddef.h>

#if defined(__GNUC__)
#define ROCM_SD_API __attribute__((visibility("default")))
#else
#define ROCM_SD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { rocm_sd_float16 = 0, rocm_sd_bfloat16 = 1, rocm_sd_float32 = 2 } rocm_sd_dtype;

enum {
    rocm_sd_no_code = -1,      /* the library was built without code for this device or this family */
    rocm_sd_unsupported = -2,  /* a size or a dtype that the kernels do not take */
};

/* The last sentence on this thread, or "". */
ROCM_SD_API const char* rocm_sd_last_error(void);

/* What the last call on this thread launched: a source and its parameters; of several, the one with the products. */
ROCM_SD_API const char* rocm_sd_last_variant(void);

/* The architectures in the library, "gfx1100 gfx1201". */
ROCM_SD_API const char* rocm_sd_architectures(void);

/* Gives back every loaded module; none may be running. The next launch loads again. */
ROCM_SD_API int rocm_sd_unload(void);

/* y: [N, HW, C] from x: [N, C, HW] where `channels_last`, else y: [N, C, HW] from x: [N, HW, C]. */
ROCM_SD_API int rocm_sd_layout_copy(const void* x, void* y, int N, int C, int HW, int channels_last,
                                    rocm_sd_dtype dtype, hipStream_t stream);

/* y: [N, 2 * H, 2 * W, C] from x: [N, H, W, C]; nearest, or bilinear. */
ROCM_SD_API int rocm_sd_upsample_2x(const void* x, void* y, int N, int C, int H, int W, int bilinear,
                                    rocm_sd_dtype dtype, hipStream_t stream);

/* total = x + residual; y = layer_norm(total) * weight + bias over rows of C; all [M, C], weight and bias [C].
 * Without a residual (NULL) total is not written. */
ROCM_SD_API int rocm_sd_layer_norm_residual(const void* x, const void* residual, const void* weight, const void* bias,
                                            void* y, void* total, int M, int C, float eps, rocm_sd_dtype dtype,
                                            hipStream_t stream);

/* y = group_norm(x + add) * weight + bias, then silu where `silu`; x, y: [N, HW, C], add: [N, C] or NULL, weight and
 * bias: [C]. y may be x. `workspace` has rocm_sd_group_norm_silu_workspace(...) bytes, aligned to 16. */
ROCM_SD_API size_t rocm_sd_group_norm_silu_workspace(int N, int C, int HW, rocm_sd_dtype dtype);
ROCM_SD_API int rocm_sd_group_norm_silu(const void* x, void* y, const void* weight, const void* bias, const void* add,
                                        int N, int C, int HW, int groups, float eps, int silu, void* workspace,
                                        rocm_sd_dtype dtype, hipStream_t stream);

/* y = x @ weight^T + bias + residual, x: [M, K], weight: [N, K], bias: [N] or NULL, residual: [M, N] or NULL,
 * y: [M, N]; float16 or bfloat16, summed in float32. */
ROCM_SD_API int rocm_sd_linear_residual(const void* x, const void* weight, const void* bias, const void* residual,
                                        void* y, int M, int N, int K, rocm_sd_dtype dtype, hipStream_t stream);

/* The same for each of B products: x: [B, M, K], weight: [B, N, K], bias: [B, N] or NULL, residual: [B, M, N] or NULL,
 * y: [B, M, N]. */
ROCM_SD_API int rocm_sd_batched_linear(const void* x, const void* weight, const void* bias, const void* residual,
                                       void* y, int B, int M, int N, int K, rocm_sd_dtype dtype, hipStream_t stream);

/* y = (x @ weight[:F]^T + bias[:F]) * gelu(x @ weight[F:]^T + bias[F:]), x: [M, K], weight: [2 * F, K], bias: [2 * F]
 * or NULL, y: [M, F]; float16 or bfloat16. */
ROCM_SD_API int rocm_sd_linear_geglu(const void* x, const void* weight, const void* bias, void* y, int M, int F, int K,
                                     rocm_sd_dtype dtype, hipStream_t stream);

/* out = softmax(scale * q @ k^T) @ v for each of H heads of D values: q: [B, S, H, D], k and v: [B, T, H, D], out:
 * dense [B, S, H, D]; float16 or bfloat16. D is 40, 64, 80, 128, 160 or 512, and scale is above zero. A row of q begins
 * `q_stride` values after the one before, of k and v `kv_stride`: H * D where they are dense, 3 * H * D where they are
 * parts of one packed product. Pointers and strides are multiples of 16 bytes. */
ROCM_SD_API int rocm_sd_attention(const void* q, const void* k, const void* v, void* out, int B, int S, int T, int H,
                                  int D, int q_stride, int kv_stride, float scale, rocm_sd_dtype dtype,
                                  hipStream_t stream);

/* y = conv2d(x, weight) + bias + add + residual, x: [N, H, W, Cin], weight: [Cout, size, size, Cin], bias: [Cout], add:
 * [N, Cout] or NULL, residual: as y, or NULL, y: [N, Ho, Wo, Cout]; float16 or bfloat16. `size` is 1, or 3 with a
 * padding of 0 or 1; one of add and residual at most is given.
 *
 * `workspace` has rocm_sd_conv2d_workspace(...) bytes, aligned to 16, or is NULL: with it the depth of a convolution
 * that has too few tiles for the device is cut into parts, which a second kernel adds up. */
ROCM_SD_API size_t rocm_sd_conv2d_workspace(int N, int Cin, int H, int W, int Cout, int size, int stride, int padding,
                                            rocm_sd_dtype dtype);
ROCM_SD_API int rocm_sd_conv2d(const void* x, const void* weight, const void* bias, const void* add,
                               const void* residual, void* y, int N, int Cin, int H, int W, int Cout, int size,
                               int stride, int padding, void* workspace, rocm_sd_dtype dtype, hipStream_t stream);

/* y = conv2d(nearest 2x of x, weight, padding 1) + bias, x: [N, H, W, Cin], bias: [Cout], y: [N, 2 * H, 2 * W, Cout];
 * float16 or bfloat16. `sums`, [4, Cout, 2, 2, Cin], are those that rocm_sd_parity_weights makes of the weight, rounded
 * to the dtype. */
ROCM_SD_API int rocm_sd_upsample_conv2d(const void* x, const void* sums, const void* bias, void* y, int N, int Cin,
                                        int H, int W, int Cout, rocm_sd_dtype dtype, hipStream_t stream);

/* Of a weight [Cout, 3, 3, Cin]; both in host memory. Once for each weight. */
ROCM_SD_API void rocm_sd_parity_weights(const float* weight, float* sums, int Cout, int Cin);

/* Moments of rows, for the norm that follows: of each `span` neighbours of a row of C values their mean and the sum of
 * their centred squares; float32, [M, ceil(C / span), 2]. The functions below take float16 or bfloat16, and but for
 * rocm_sd_row_moments rows and pointers that are multiples of 16 bytes.
 *
 * moments of x: [M, C], with a span of C. */
ROCM_SD_API int rocm_sd_row_moments(const void* x, void* moments, int M, int C, rocm_sd_dtype dtype,
                                    hipStream_t stream);

/* y = x @ weight^T + bias + residual as rocm_sd_linear_residual, with a residual, which y may be; and the moments of
 * the rows of y, with a span of rocm_sd_linear_moments_span(...) on the current device, which is 0 where there is no
 * code for it. */
ROCM_SD_API int rocm_sd_linear_moments_span(int M, int N, rocm_sd_dtype dtype);
ROCM_SD_API int rocm_sd_linear_moments(const void* x, const void* weight, const void* bias, const void* residual,
                                       void* y, void* moments, int M, int N, int K, rocm_sd_dtype dtype,
                                       hipStream_t stream);

/* h = layer_norm(x) * norm_weight + norm_bias, rounded; y = h @ weight^T + bias, x: [M, K], norm_weight and norm_bias:
 * [K], weight: [N, K], bias: [N] or NULL, y: [M, N]. h is never in memory. `moments` are those of x, with this span. */
ROCM_SD_API int rocm_sd_norm_linear(const void* x, const void* moments, int span, const void* norm_weight,
                                    const void* norm_bias, float eps, const void* weight, const void* bias, void* y,
                                    int M, int N, int K, rocm_sd_dtype dtype, hipStream_t stream);

/* The same h, and then as rocm_sd_linear_geglu: weight: [2 * F, K], bias: [2 * F] or NULL, y: [M, F]. */
ROCM_SD_API int rocm_sd_norm_geglu(const void* x, const void* moments, int span, const void* norm_weight,
                                   const void* norm_bias, float eps, const void* weight, const void* bias, void* y,
                                   int M, int F, int K, rocm_sd_dtype dtype, hipStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
