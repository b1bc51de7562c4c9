// What a kernel may ask about the architecture it is compiled for, as types: kernels are templates over a tag and
// contain no #if. The figures are those of rocm_sd/arch/table_amd.py, which a test holds them to.
//
// Everything stands on compiler builtins alone, so that clang compiles it with no ROCm installed; hipcc and hiprtc
// compile the same text. All names are in the namespace rocm_sd, and all macros begin with ROCM_SD_: a ROCm machine's
// own headers may be in sight.
#pragma once

#if defined(__CUDA_ARCH__)
#include "nvidia.hpp"
#else
#define ROCM_SD_DEVICE __attribute__((device, always_inline)) inline
#define ROCM_SD_SHARED __attribute__((shared))
#define ROCM_SD_HALF _Float16
#define ROCM_SD_BFLOAT __bf16
#define ROCM_SD_VECTOR(T, n) T __attribute__((ext_vector_type(n)))
// The exact number of threads is part of a kernel: the compiler may then use all the registers that so many leave it.
#define ROCM_SD_KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

namespace rocm_sd {

// The compiler forgets where the value, a vector of 32-bit words, came from.
template <typename Words>
ROCM_SD_DEVICE void forget_words(Words& words) {
    if constexpr (sizeof(words) == 4) {
        // A vector of one word has no register class of its own.
        unsigned word = words[0];
        asm volatile("" : "+v"(word));
        words[0] = word;
    } else {
        asm volatile("" : "+v"(words));
    }
}

}  // namespace rocm_sd
#endif

namespace rocm_sd {

// none: matrix kernels are refused.
// buffer_word: the last of a buffer descriptor's four, as LLVM's MLIR (AMDGPUToROCDL) and Triton write it: a format that
// untyped loads ignore and that must not be 0; on RDNA besides bit 24, and that offsets are held to the size in bytes.
enum class matrix_kind { none, dot, wmma_gfx11, wmma_gfx12, mfma };

struct gcn5 {  // gfx906
    static constexpr int wave_size = 64;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::dot;
    static constexpr int buffer_word = 0x00027000;
};

struct rdna2 {  // gfx1030
    static constexpr int wave_size = 32;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::dot;
    static constexpr int buffer_word = 0x31027000;
};

struct rdna3 {  // gfx11
    static constexpr int wave_size = 32;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::wmma_gfx11;
    static constexpr int buffer_word = 0x31027000;
};

struct rdna4 {  // gfx1200, gfx1201
    static constexpr int wave_size = 32;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::wmma_gfx12;
    static constexpr int buffer_word = 0x31027000;
};

struct cdna2 {  // gfx90a
    static constexpr int wave_size = 64;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::mfma;
    static constexpr int buffer_word = 0x00027000;
};

struct cdna3 {  // gfx942
    static constexpr int wave_size = 64;
    static constexpr int lds_bytes = 64 * 1024;
    static constexpr matrix_kind matrix = matrix_kind::mfma;
    static constexpr int buffer_word = 0x00027000;
};

struct nvidia {  // through nvidia.hpp
    static constexpr int wave_size = 32;
    static constexpr int lds_bytes = 48 * 1024;  // without asking for more at each launch
    static constexpr matrix_kind matrix = matrix_kind::none;
};

// Each gfx by name: one that nobody has looked at inherits nothing.
#if defined(__CUDA_ARCH__)
using this_arch = nvidia;
#elif defined(__gfx906__)
using this_arch = gcn5;
#elif defined(__gfx1030__)
using this_arch = rdna2;
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || \
    defined(__gfx1150__) || defined(__gfx1151__)
using this_arch = rdna3;
#elif defined(__gfx1200__) || defined(__gfx1201__)
using this_arch = rdna4;
#elif defined(__gfx90a__)
using this_arch = cdna2;
#elif defined(__gfx942__)
using this_arch = cdna3;
#else
#error "rocm_sd has no tag for this gfx: add it to rocm_sd/arch.hpp, and compile for the device only"
#endif

#if !defined(__CUDA_ARCH__)
static_assert(this_arch::wave_size == __AMDGCN_WAVEFRONT_SIZE__, "compile without -mwavefrontsize64");
#endif

ROCM_SD_DEVICE int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
ROCM_SD_DEVICE int block_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
ROCM_SD_DEVICE int block_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
ROCM_SD_DEVICE int block_z() { return static_cast<int>(__builtin_amdgcn_workgroup_id_z()); }

// Every thread of the workgroup has come here, and sees what the others wrote to LDS before.
ROCM_SD_DEVICE void barrier() {
    // Only LDS is shared through barriers here: a plain fence would also wait for stores to global memory.
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

}  // namespace rocm_sd
