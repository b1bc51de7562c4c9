// The architecture that a kernel is compiled for, as a tag (arch_tags.hpp): kernels are templates over it and contain no
// #if.
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

#include "arch_tags.hpp"

namespace rocm_sd {

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
