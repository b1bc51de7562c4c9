// Which tile a product or an attention is cut into on which architecture, for the device's compiler and for the host's.
// The numbers are those of the Python launchers (tile_table.hpp).
#pragma once

#include "arch_tags.hpp"

namespace rocm_sd {

/// Numbers of gemm_config in gemm.hpp.
struct product_tile {
    int block_m, block_n, block_k, waves_m, waves_n, stages, fragment;

    constexpr int workgroups(int M, int N) const {
        return (M + block_m - 1) / block_m * ((N + block_n - 1) / block_n);
    }
    constexpr int threads(int wave_size) const { return waves_m * waves_n * wave_size; }
};

/// Numbers of attention_config in attention.hpp.
struct attention_tile {
    int block_m, block_n, waves_m, waves_d, fragment, chunk;
    bool queries_in_lds, values_ahead;

    constexpr int threads(int wave_size) const { return waves_m * waves_d * wave_size; }
};

/// The large one is for what gives every compute unit such a tile, the small one for the rest.
struct tiles_of_product {
    matrix_kind unit;
    int wave_size;
    const char* family;
    product_tile large, small;
};

struct tile_of_attention {
    matrix_kind unit;
    int wave_size, head;
    attention_tile tile;
};

/// compute_units: of the product that the architecture's table describes.
struct architecture {
    const char* gfx;
    matrix_kind unit;
    int wave_size, compute_units;
};

}  // namespace rocm_sd

#include "tile_table.hpp"

namespace rocm_sd {

constexpr bool same_text(const char* a, const char* b) {
    while (*a && *a == *b) {
        ++a;
        ++b;
    }
    return *a == *b;
}

/// What is not in the table has tiles of no rows.
constexpr tiles_of_product find_product(matrix_kind unit, int wave_size, const char* family) {
    for (const tiles_of_product& each : product_table) {
        if (each.unit == unit && each.wave_size == wave_size && same_text(each.family, family)) return each;
    }
    return {unit, wave_size, family, {}, {}};
}

constexpr attention_tile find_attention(matrix_kind unit, int wave_size, int head) {
    for (const tile_of_attention& each : attention_table) {
        if (each.unit == unit && each.wave_size == wave_size && each.head == head) return each.tile;
    }
    return {};
}

constexpr architecture find_architecture(const char* gfx) {
    for (const architecture& each : architecture_table) {
        if (same_text(each.gfx, gfx)) return each;
    }
    return {gfx, matrix_kind::none, 0, 0};
}

/// Whether every compute unit has a tile, where `batch` products run at once.
constexpr bool fills(int workgroups, int batch, int compute_units) {
    return static_cast<long long>(workgroups) * batch >= compute_units;
}

}  // namespace rocm_sd
