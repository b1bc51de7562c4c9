// Loads through a buffer descriptor: what lies beyond its end reads as zeros, and memory is not asked.
//
// Rows beyond the last and columns beyond the head cost neither a mask, which would make each load wait for the one
// before, nor a second loop for the last block. The descriptor stands in scalar registers.
#pragma once

#include "tile.hpp"

namespace rocm_sd {

/// Any offset from here on lies beyond every buffer: launchers refuse what is larger.
inline constexpr unsigned beyond = 0x80000000u;

namespace detail {

/// The last word of a descriptor of bytes with no stride, as Composable Kernel has it for each family: format, and
/// (where there is a choice) that offsets are compared with the size in bytes.
template <typename Arch>
constexpr int descriptor_word() {
    switch (Arch::matrix) {
        case matrix_kind::dot: return Arch::wave_size == 64 ? 0x00020000 : 0x31014000;
        case matrix_kind::mfma: return 0x00020000;
        default: return 0x31004000;
    }
}

}  // namespace detail

/// `bytes` bytes from `data` on; the same in all lanes.
template <typename Arch, typename T>
struct buffer {
    const T* data;
    int bytes;

    /// Eight values at `offset` bytes, or zeros.
    ROCM_SD_DEVICE chunk_of<T> load(unsigned offset) const {
        const auto descriptor = __builtin_amdgcn_make_buffer_rsrc(
            const_cast<T*>(data), 0, bytes, detail::descriptor_word<Arch>());
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
