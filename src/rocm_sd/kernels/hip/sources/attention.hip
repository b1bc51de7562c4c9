// out = softmax(scale * q k^T) v, q: [B, S, H, D], k, v: [B, T, H, D], out: dense [B, S, H, D]; scores and sums are
// float32.
//
// Parameters: element (half or bfloat); head, block_m, block_n, waves_m, waves_d, fragment, chunk, queries_in_lds and
// values_ahead, as attention_config in attention.hpp has them.
#include "rocm_sd/transformer_block.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = attention_config<ROCM_SD_HEAD, ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_WAVES_M, ROCM_SD_WAVES_D,
                                ROCM_SD_FRAGMENT, ROCM_SD_CHUNK, ROCM_SD_QUERIES_IN_LDS, ROCM_SD_VALUES_AHEAD>;
using step = attention_step<this_arch, element, config>;

ROCM_SD_KERNEL(step::threads)
attend(const element* q, const element* k, const element* v, element* out, int S, int T, int H, int q_b, int q_s,
       int q_h, int k_b, int k_s, int k_h, int v_b, int v_s, int v_h, float scale) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[step::lds_bytes];
    step::run(q, k, v, out, S, T, H, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, scale, lds);
}

}  // namespace rocm_sd
