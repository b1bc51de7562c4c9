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

/* What was launched last on this thread: a source and its parameters. */
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

#ifdef __cplusplus
}
#endif

#endif
