// Rows of a matrix in registers, each shared by neighbouring threads.
#pragma once

#include "wave.hpp"

namespace rocm_sd {

// S says how: lanes, chunks of n values for each of them, and even: the chunks of all lanes are the row, none is idle.
//
// A lane's part of one row. Loads never part a wave: a lane beyond the end of the row reads the row's last vector.
template <typename T, typename S>
struct row_part {
    vector_of<T, S::n> chunk[S::chunks];

    ROCM_SD_DEVICE static int column(int i) { return (i * S::lanes + thread_index() % S::lanes) * S::n; }
    ROCM_SD_DEVICE static bool inside(int i, int C) { return S::even || column(i) < C; }

    ROCM_SD_DEVICE void load(const T* row, int C) {
#pragma unroll
        for (int i = 0; i < S::chunks; ++i)
            chunk[i] = rocm_sd::load<S::n>(row + (S::even ? column(i) : smaller(column(i), C - S::n)));
    }

    ROCM_SD_DEVICE void store(T* row, int C) const {
#pragma unroll
        for (int i = 0; i < S::chunks; ++i) store_if<S::n>(inside(i, C), row + column(i), chunk[i]);
    }

    ROCM_SD_DEVICE void stay_packed() {
#pragma unroll
        for (int i = 0; i < S::chunks; ++i) forget_origin(chunk[i]);
    }

    ROCM_SD_DEVICE vector_of<float, S::n> wide(int i) const { return convert<float>(chunk[i]); }
};

}  // namespace rocm_sd
