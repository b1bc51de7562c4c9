// Sums and maxima over neighbouring lanes, over a wave of either size, and over the waves of a workgroup.
//
// All of them are butterflies: every lane ends with the result, lanes of one group with the same bits, and the order of
// the additions never changes.
#pragma once

#include "types.hpp"

namespace rocm_sd {

ROCM_SD_DEVICE int lane_index() { return thread_index() % this_arch::wave_size; }
ROCM_SD_DEVICE int wave_index() { return thread_index() / this_arch::wave_size; }

struct plus {
    ROCM_SD_DEVICE static float of(float a, float b) { return a + b; }
};

struct maximum {
    ROCM_SD_DEVICE static float of(float a, float b) { return __builtin_fmaxf(a, b); }
};

namespace detail {

// Moves within a row of 16 lanes ride along with the next vector instruction and cost nothing of LDS's time.
enum dpp : int { quad_swap_1 = 0xB1, quad_swap_2 = 0x4E, row_half_mirror = 0x141, row_mirror = 0x140 };

template <int control>
ROCM_SD_DEVICE float dpp_move(float value) {
    const int bits = __builtin_bit_cast(int, value);
    return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(bits, bits, control, 0xF, 0xF, true));
}

// Between the two rows of 32 lanes: bit mode, lane ^ 16.
ROCM_SD_DEVICE float swap_rows(float value) {
    return __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, value), 0x401F));
}

// One lane's value, in a scalar register.
ROCM_SD_DEVICE float read_lane(float value, int lane) {
    return __builtin_bit_cast(float, __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), lane));
}

}  // namespace detail

// Over each aligned group of `lanes` lanes, a power of two. Every lane of the wave must take part.
template <typename Operation, int lanes>
ROCM_SD_DEVICE float reduce_lanes(float value) {
    static_assert(lanes >= 1 && lanes <= this_arch::wave_size && (lanes & (lanes - 1)) == 0);
    if constexpr (lanes >= 2) value = Operation::of(value, detail::dpp_move<detail::quad_swap_1>(value));
    if constexpr (lanes >= 4) value = Operation::of(value, detail::dpp_move<detail::quad_swap_2>(value));
    // The lanes of a quad are equal by now, so that the mirror image of a half row is as good as its other quad.
    if constexpr (lanes >= 8) value = Operation::of(value, detail::dpp_move<detail::row_half_mirror>(value));
    if constexpr (lanes >= 16) value = Operation::of(value, detail::dpp_move<detail::row_mirror>(value));
    if constexpr (lanes >= 32) value = Operation::of(value, detail::swap_rows(value));
    // Each half of a wave of 64 is equal by now: one lane speaks for it.
    if constexpr (lanes >= 64) value = Operation::of(detail::read_lane(value, 0), detail::read_lane(value, 32));
    return value;
}

// LDS for `reduce_threads`: one value for each wave of the workgroup.
template <int threads>
struct reduction_space {
    float of_wave[larger(threads / this_arch::wave_size, 1)];
};

// Over each aligned group of `lanes` threads of a workgroup of `threads`; it may be part of a wave or several waves.
// Every thread of the workgroup must come here. The space may be used again at once.
template <typename Operation, int lanes, int threads>
ROCM_SD_DEVICE float reduce_threads(float value, reduction_space<threads>& space) {
    constexpr int wave = this_arch::wave_size;
    if constexpr (lanes <= wave) {
        return reduce_lanes<Operation, lanes>(value);
    } else {
        static_assert(lanes % wave == 0 && threads % lanes == 0);
        constexpr int waves = lanes / wave;
        value = reduce_lanes<Operation, wave>(value);
        if (lane_index() == 0) space.of_wave[wave_index()] = value;
        barrier();
        const int first = wave_index() / waves * waves;
        value = space.of_wave[first];
#pragma unroll
        for (int other = 1; other < waves; ++other) value = Operation::of(value, space.of_wave[first + other]);
        barrier();
        return value;
    }
}

}  // namespace rocm_sd
