// Loads through a buffer descriptor: what lies beyond its end reads as zeros, and memory is not asked.
//
// Rows beyond the last and columns beyond the head cost neither a mask, which would make each load wait for the one
// before, nor a second loop for the last block. The descriptor stands in scalar registers.
#pragma once

#include "tile.hpp"

namespace rocm_sd {

/// Any offset from here on lies beyond every buffer: launchers refuse what is larger.
inline constexpr unsigned beyond = 0x80000000u;

/// `bytes` bytes from `data` on; the same in all lanes.
template <typename Arch, typename T>
struct buffer {
    const T* data;
    int bytes;

    /// Eight values at `offset` bytes, or zeros.
    ROCM_SD_DEVICE chunk_of<T> load(unsigned offset) const {
        const auto descriptor = __builtin_amdgcn_make_buffer_rsrc(
            const_cast<T*>(data), 0, bytes, Arch::buffer_word);
        return __builtin_bit_cast(
            chunk_of<T>, __builtin_amdgcn_raw_buffer_load_b128(descriptor, static_cast<int>(offset), 0, 0));
    }

    ROCM_SD_DEVICE void advance(int by) {
        data = reinterpret_cast<const T*>(reinterpret_cast<const char*>(data) + by);
        bytes -= by;
    }

    /// The same, where that may be the end or beyond it.
    ROCM_SD_DEVICE void skip(int by) {
        advance(by);
        bytes = larger(bytes, 0);
    }
};

}  // namespace rocm_sd
