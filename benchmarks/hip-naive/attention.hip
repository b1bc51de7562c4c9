// out = softmax(scale * q k^T) v, one query a thread, scores through global memory: attention.hip is compared with it.
// q, k, v, out: dense [rows, D] of one head; scores: [S, T].
#include "rocm_sd/types.hpp"

namespace rocm_sd {

ROCM_SD_KERNEL(64)
naive(const half* q, const half* k, const half* v, half* out, float* scores, int S, int T, int D, float scale) {
    const int row = block_x() * 64 + thread_index();
    if (row >= S) return;
    float* mine = scores + row * T;
    float top = -__builtin_huge_valf(), total = 0.0f;
    for (int key = 0; key < T; ++key) {
        float score = 0.0f;
#pragma clang loop unroll(disable)
        for (int d = 0; d < D; ++d) {
            score += static_cast<float>(q[row * D + d]) * static_cast<float>(k[key * D + d]);
        }
        mine[key] = score;
        top = __builtin_fmaxf(top, score);
    }
    for (int key = 0; key < T; ++key) {
        const float weight = __builtin_amdgcn_exp2f((mine[key] - top) * scale);
        mine[key] = weight;
        total += weight;
    }
    for (int d = 0; d < D; ++d) {
        float sum = 0.0f;
#pragma clang loop unroll(disable)
        for (int key = 0; key < T; ++key) sum += mine[key] * static_cast<float>(v[key * D + d]);
        out[row * D + d] = static_cast<half>(sum / total);
    }
}

}  // namespace rocm_sd
