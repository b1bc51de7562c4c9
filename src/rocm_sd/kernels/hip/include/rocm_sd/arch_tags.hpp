// What a kernel may ask about an architecture, as types, for the host's compiler too. The figures are those of
// rocm_sd/arch/table_amd.py, which a test holds them to.
#pragma once

namespace rocm_sd {

#if defined(ROCM_SD_HALF)
using half = ROCM_SD_HALF;
using bfloat = ROCM_SD_BFLOAT;
#else
// On the host they stand for the device's: nothing is computed with them there.
struct half {
    unsigned short bits;
};
struct bfloat {
    unsigned short bits;
};
#endif

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
    // In ck_sd_templates.hpp.
    template <typename T = half, int Head = 64>
    struct OptimizedFusedTransformer;
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
    // In ck_sd_templates.hpp.
    template <typename T = half, int Head = 64>
    struct OptimizedFusedTransformer;
};

struct nvidia {  // through nvidia.hpp
    static constexpr int wave_size = 32;
    static constexpr int lds_bytes = 48 * 1024;  // without asking for more at each launch
    static constexpr matrix_kind matrix = matrix_kind::none;
};

}  // namespace rocm_sd
