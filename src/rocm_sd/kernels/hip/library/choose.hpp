// What every launcher asks before it chooses a variant.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>

#include "code_objects.hpp"
#include "rocm_sd/tiles.hpp"
#include "rocm_sd_kernels.h"

namespace rocm_sd {

struct element {
    const char* name;
    const char* bits;  // for kernels that move values and never look at them
    int size;
};

inline const element elements[] = {{"half", "bits16", 2}, {"bfloat", "bits16", 2}, {"float", "bits32", 4}};

inline int check(bool sizes_are_positive, rocm_sd_dtype dtype) {
    if (!sizes_are_positive) return fail(rocm_sd_unsupported, "sizes must be positive");
    if (dtype < rocm_sd_float16 || dtype > rocm_sd_float32) return fail(rocm_sd_unsupported, "an unknown dtype");
    return 0;
}

inline int check_halves(const char* name, bool sizes_are_positive, rocm_sd_dtype dtype) {
    if (const int code = check(sizes_are_positive, dtype)) return code;
    if (dtype == rocm_sd_float32) return fail(rocm_sd_unsupported, std::string(name) + " takes float16 or bfloat16");
    return 0;
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 16 bytes at once where every row and every pointer is a multiple of them, else one value.
inline int access_width(int size, std::initializer_list<int> strides, std::initializer_list<const void*> pointers) {
    const int widest = 16 / size;
    for (const int stride : strides) {
        if (stride % widest != 0) return 1;
    }
    for (const void* pointer : pointers) {
        if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return 1;
    }
    return widest;
}

// text("upsample element=", name, " width=", 8)
template <typename... Parts>
std::string text(Parts... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

// The tile of a product, one of the two that its family has, and the grid that it makes.
struct tile {
    device_variant variant;

    int rows() const { return variant.parameter("block_m"); }
    int columns() const { return variant.parameter("block_n"); }
    int threads() const { return variant.parameter("waves_m") * variant.parameter("waves_n") * variant.wave_size; }
    int count(int M, int N) const { return ceil_div(M, rows()) * ceil_div(N, columns()); }
};

constexpr int group_m = 8;  // tiles that share columns and run side by side

// The large tile where every compute unit then has one, else the small one. `batch` products are launched at once.
inline int choose_tile(const char* family, rocm_sd_dtype dtype, const std::string& rest, bool may_be_large, int M,
                       int N, int batch, tile& found) {
    const std::string name = text(family, " element=", elements[dtype].name, " tile=");
    if (may_be_large && find_variant(name + "large " + rest, found.variant) == 0 &&
        fills(found.count(M, N), batch, found.variant.compute_units))
        return 0;
    return find_variant(name + "small " + rest, found.variant);
}

}  // namespace rocm_sd
