// out = softmax(scale * q k^T) v, q: [B, S, H, D], k, v: [B, T, H, D], out: dense [B, S, H, D]; scores and sums are
// float32.
//
// Parameters: element (half or bfloat); head, block_m, block_n, waves_m, waves_d, fragment, chunk, queries_in_lds and
// values_ahead, as attention_config in attention.hpp has them.
#include "rocm_sd/attention.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = attention_config<ROCM_SD_HEAD, ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_WAVES_M, ROCM_SD_WAVES_D,
                                ROCM_SD_FRAGMENT, ROCM_SD_CHUNK, ROCM_SD_QUERIES_IN_LDS, ROCM_SD_VALUES_AHEAD>;
using block = attention<this_arch, element, config>;

/// Rows of head h of item b.
ROCM_SD_DEVICE head_rows<element> rows_of(
    const element* data, int batch_stride, int row_stride, int head_stride, int rows) {
    const int64 b = block_z(), h = block_y();
    return {data + b * batch_stride + h * head_stride, row_stride * static_cast<int>(sizeof(element)), rows};
}

/// Grid: (ceil(S / block_m), H, B): workgroups of one head follow one another, so that its keys and values are read
/// from memory once. Strides count values, and are multiples of eight; scale is in powers of two and above zero.
ROCM_SD_KERNEL(block::threads)
attend(const element* q, const element* k, const element* v, element* out, int S, int T, int H, int q_b, int q_s,
       int q_h, int k_b, int k_s, int k_h, int v_b, int v_s, int v_h, float scale) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[block::lds_bytes];
    const int64 out_stride = static_cast<int64>(H) * config::head;
    element* first = out + block_z() * (S * out_stride) + block_y() * config::head;
    block::run(rows_of(q, q_b, q_s, q_h, S), rows_of(k, k_b, k_s, k_h, T), rows_of(v, v_b, v_s, v_h, T), first,
               out_stride, block_x() * config::block_m, scale, lds);
}

}  // namespace rocm_sd
