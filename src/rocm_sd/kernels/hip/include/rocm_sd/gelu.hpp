// GELU, exact (erf) and not the tanh one.
#pragma once

#include "types.hpp"

namespace rocm_sd {

/// gelu(g) = max(g, 0) - |g| * Phi(-|g|), and Phi(-a) = 2^-Q(a) with Q a polynomial: one exponential, no cancellation
/// and no branch. Q is the fit that the Triton kernel of `geglu` has, of degree 11 over 0 <= a <= 9: within 4e-8 of the
/// exact value, and within 4e-5 of it relatively, down to g = -9 (-1e-18).
ROCM_SD_DEVICE float gelu(float g) {
    constexpr float of_power[] = {
        1.1511086565261195f,     0.45918590149636507f,   0.05254035240035663f,    -0.0070851572204361285f,
        0.00010663146580159469f, 0.0002322398761623642f, -6.450466393232702e-05f, 9.474427464301255e-06f,
        -8.279569295664051e-07f, 4.0425198768253275e-08f, -8.493062110628992e-10f,
    };
    // The clamp keeps the fit in its range, and infinity from meeting zero.
    const float a = __builtin_fminf(__builtin_fabsf(g), 9.0f);
    float q = of_power[10];
#pragma unroll
    for (int i = 9; i >= 0; --i) q = __builtin_fmaf(q, a, of_power[i]);
    // 1 is taken off last, so that 2^-Q(0) is 0.5 to the bit.
    const float tail = __builtin_amdgcn_exp2f(-1.0f - q * a);
    // Not the larger of g and 0, which drops NaN.
    return (g < 0.0f ? 0.0f : g) - a * tail;
}

}  // namespace rocm_sd
