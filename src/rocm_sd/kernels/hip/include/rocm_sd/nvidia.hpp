// NVIDIA in AMD's words: what the sources use of AMD's compiler builtins, for clang and for NVRTC, so that the same
// text runs on a card of theirs. It is there to prove logic on hardware: kernels on a matrix unit are refused.
//
// Only arch.hpp includes this. Instructions are PTX text, which both compilers take; vectors and 16-bit floats are
// classes, since NVRTC has no builtin types for them, and one way for both is one way to test.
#pragma once

#define ROCM_SD_SHARED __attribute__((shared))
#define ROCM_SD_KERNEL(threads) extern "C" __attribute__((global, launch_bounds(threads))) void
#define ROCM_SD_HALF ::rocm_sd::nvidia_half
#define ROCM_SD_BFLOAT ::rocm_sd::nvidia_bfloat
#define ROCM_SD_VECTOR(T, n) ::rocm_sd::nvidia_vector<T, n>

#if defined(__clang__)
#define ROCM_SD_DEVICE __attribute__((device, always_inline)) inline
#else
#define ROCM_SD_DEVICE __attribute__((device)) __forceinline__
#define __builtin_fmaxf(a, b) fmaxf(a, b)
#endif

#define __builtin_amdgcn_workitem_id_x() ::rocm_sd::ptx::thread_x()
#define __builtin_amdgcn_workgroup_id_x() ::rocm_sd::ptx::block_x()
#define __builtin_amdgcn_workgroup_id_y() ::rocm_sd::ptx::block_y()
#define __builtin_amdgcn_workgroup_id_z() ::rocm_sd::ptx::block_z()
// NVIDIA's barrier orders memory by itself.
#define __builtin_amdgcn_fence(order, ...) static_cast<void>(0)
#define __builtin_amdgcn_s_barrier() ::rocm_sd::ptx::barrier()
#define __builtin_amdgcn_update_dpp(old, value, control, rows, banks, bound) \
    ::rocm_sd::ptx::swap_lanes<::rocm_sd::ptx::distance_of_dpp(control)>(value)
#define __builtin_amdgcn_ds_swizzle(value, pattern) \
    ::rocm_sd::ptx::swap_lanes<::rocm_sd::ptx::distance_of_swizzle(pattern)>(value)
#define __builtin_amdgcn_readlane(value, lane) ::rocm_sd::ptx::read_lane(value, lane)
#define __builtin_amdgcn_rcpf(value) ::rocm_sd::ptx::reciprocal(value)
#define __builtin_amdgcn_rsqf(value) ::rocm_sd::ptx::reciprocal_sqrt(value)
#define __builtin_amdgcn_exp2f(value) ::rocm_sd::ptx::exp2(value)
#define __builtin_convertvector(value, ...) ::rocm_sd::ptx::convert<__VA_ARGS__>(value)

namespace rocm_sd {

namespace ptx {

#define ROCM_SD_SPECIAL_REGISTER(name, text)          \
    ROCM_SD_DEVICE unsigned name() {                  \
        unsigned value;                               \
        asm("mov.u32 %0, %%" text ";" : "=r"(value)); \
        return value;                                 \
    }
ROCM_SD_SPECIAL_REGISTER(thread_x, "tid.x")
ROCM_SD_SPECIAL_REGISTER(block_x, "ctaid.x")
ROCM_SD_SPECIAL_REGISTER(block_y, "ctaid.y")
ROCM_SD_SPECIAL_REGISTER(block_z, "ctaid.z")
#undef ROCM_SD_SPECIAL_REGISTER

ROCM_SD_DEVICE void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

// The lane at the other end of a move, as lane ^ distance; 0 for a move that is no such exchange.
ROCM_SD_DEVICE constexpr int distance_of_dpp(int control) {
    return control == 0xB1 ? 1 : control == 0x4E ? 2 : control == 0x141 ? 7 : control == 0x140 ? 15 : 0;
}
ROCM_SD_DEVICE constexpr int distance_of_swizzle(int pattern) { return (pattern & 0x83FF) == 0x1F ? pattern >> 10 : 0; }

template <int distance>
ROCM_SD_DEVICE int swap_lanes(int value) {
    static_assert(distance > 0 && distance < 32, "nvidia.hpp does not know this move between lanes");
    asm volatile("shfl.sync.bfly.b32 %0, %0, %1, 31, -1;" : "+r"(value) : "n"(distance));
    return value;
}

ROCM_SD_DEVICE int read_lane(int value, int lane) {
    asm volatile("shfl.sync.idx.b32 %0, %0, %1, 31, -1;" : "+r"(value) : "r"(lane));
    return value;
}

ROCM_SD_DEVICE float reciprocal(float value) {
    asm("rcp.approx.f32 %0, %0;" : "+f"(value));
    return value;
}
ROCM_SD_DEVICE float reciprocal_sqrt(float value) {
    asm("rsqrt.approx.f32 %0, %0;" : "+f"(value));
    return value;
}
ROCM_SD_DEVICE float exp2(float value) {
    asm("ex2.approx.f32 %0, %0;" : "+f"(value));
    return value;
}

}  // namespace ptx

struct nvidia_half {
    unsigned short bits;

    nvidia_half() = default;
    ROCM_SD_DEVICE explicit nvidia_half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    ROCM_SD_DEVICE operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct nvidia_bfloat {
    unsigned short bits;

    nvidia_bfloat() = default;
    ROCM_SD_DEVICE explicit nvidia_bfloat(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    ROCM_SD_DEVICE operator float() const { return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16); }
};

// As clang's vectors: value by value, and a number stands for a vector of it.
template <typename T, int n>
struct alignas(n * sizeof(T)) nvidia_vector {
    using element = T;
    T values[n];

    nvidia_vector() = default;
    ROCM_SD_DEVICE nvidia_vector(T value) {
#pragma unroll
        for (int i = 0; i < n; ++i) values[i] = value;
    }
    ROCM_SD_DEVICE T& operator[](int i) { return values[i]; }
    ROCM_SD_DEVICE const T& operator[](int i) const { return values[i]; }

#define ROCM_SD_VECTOR_OPERATOR(symbol)                                                               \
    ROCM_SD_DEVICE nvidia_vector& operator symbol##=(const nvidia_vector & other) {                   \
        _Pragma("unroll") for (int i = 0; i < n; ++i) values[i] = values[i] symbol other.values[i];   \
        return *this;                                                                                 \
    }                                                                                                 \
    ROCM_SD_DEVICE friend nvidia_vector operator symbol(nvidia_vector a, const nvidia_vector & b) {   \
        return a symbol##= b;                                                                         \
    }
    ROCM_SD_VECTOR_OPERATOR(+)
    ROCM_SD_VECTOR_OPERATOR(-)
    ROCM_SD_VECTOR_OPERATOR(*)
#undef ROCM_SD_VECTOR_OPERATOR
};

// The compiler forgets where the value came from.
template <int n>
ROCM_SD_DEVICE void forget_words(nvidia_vector<unsigned, n>& words) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+r"(words.values[i]));
}

namespace ptx {

template <typename Vector, typename T, int n>
ROCM_SD_DEVICE Vector convert(const nvidia_vector<T, n>& from) {
    Vector result;
#pragma unroll
    for (int i = 0; i < n; ++i) result[i] = static_cast<typename Vector::element>(from[i]);
    return result;
}

}  // namespace ptx

}  // namespace rocm_sd
