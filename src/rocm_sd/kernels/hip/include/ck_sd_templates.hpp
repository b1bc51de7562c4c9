// The templates of level 2 under the founding documents' names. docs/level-2-templates.md tells what they are.
//
//   FusedTransformerBlockTemplate<Arch, T, Head, Tiles>     the transformer block, cut into tiles
//   rdna3::OptimizedFusedTransformer<T, Head>, cdna3::...   the same with the tiles of that architecture
//   FindOptimalConfig(family, {m, n, k}, gfx)               the tile that the library would launch
//
// On the device (clang or hipcc, for one gfx at a time) a block has its kernels' bodies; on the host their tiles,
// workgroups and grids, for whoever launches them. It stands on this project's own headers, and needs no Composable
// Kernel.
#pragma once

#if defined(__AMDGCN__)
#include "rocm_sd/transformer_block.hpp"
#endif
#include "rocm_sd/tiles.hpp"

namespace rocm_sd {

/// A product of [m, k] and [n, k], `batch` times at once. linear_geglu and norm_geglu have values and gates in n.
struct Problem {
    int m, n, k, batch = 1;
};

struct AutotuningConfig {
    product_tile tile;
    int wave_size;

    /// False where nothing was searched for this family on this architecture: nothing is inherited from another.
    constexpr bool known() const { return tile.block_m > 0; }
    constexpr int block_size() const { return tile.threads(wave_size); }
    constexpr int workgroups(const Problem& of) const { return tile.workgroups(of.m, of.n) * of.batch; }
};

/// The tile for this call of a family ("linear_residual", "norm_linear", ...) by the library's own rule: the large one
/// where every compute unit then has one, else the small one. compute_units: 0 stands for the card that the table of
/// architectures describes.
constexpr AutotuningConfig FindOptimalConfig(
    const char* family, const Problem& problem, const char* gfx, int compute_units = 0) {
    const architecture arch = find_architecture(gfx);
    const tiles_of_product tiles = find_product(arch.unit, arch.wave_size, family);
    if (tiles.large.block_m == 0) return {{}, arch.wave_size};
    const int units = compute_units > 0 ? compute_units : arch.compute_units;
    const bool large = fills(tiles.large.workgroups(problem.m, problem.n), problem.batch, units);
    return {large ? tiles.large : tiles.small, arch.wave_size};
}

/// The tiles of a block on an architecture: the large ones, or the small ones for few rows.
template <typename Arch, int Head, bool Large = true>
struct BlockTiles {
    static constexpr product_tile of(const char* family) {
        const tiles_of_product found = find_product(Arch::matrix, Arch::wave_size, family);
        return Large ? found.large : found.small;
    }
    static constexpr product_tile projection = of("norm_linear"), output = of("linear_moments"),
                                  feed_forward = of("norm_geglu");
    static constexpr attention_tile attention = find_attention(Arch::matrix, Arch::wave_size, Head);
};

#if defined(__AMDGCN__)
template <const product_tile& tile>
using config_of_product = gemm_config<tile.block_m, tile.block_n, tile.block_k, tile.waves_m, tile.waves_n, tile.stages,
                                      tile.fragment, true>;
template <int head, const attention_tile& tile>
using config_of_attention = attention_config<head, tile.block_m, tile.block_n, tile.waves_m, tile.waves_d,
                                             tile.fragment, tile.chunk, tile.queries_in_lds, tile.values_ahead>;
#endif

/// x + out(attention(norm(x))), once or, with a text, twice; then x + out(value * gelu(gate)) of norm(x). Head: columns
/// of a head. T: half or bfloat. Tiles: as BlockTiles has them.
template <typename Arch, typename T, int Head, typename Tiles = BlockTiles<Arch, Head>>
struct FusedTransformerBlockTemplate {
    static_assert(sizeof(T) == 2, "half or bfloat");
    static_assert(Tiles::projection.block_m > 0, "nothing is known of the products of this architecture");
    static_assert(Tiles::attention.block_m > 0, "there is no attention for heads of this size");

    using tiles = Tiles;
    static constexpr int head = Head, wave_size = Arch::wave_size;

    /// Workgroups in x, y and z, and threads of one.
    struct grid {
        int x, y, z, threads;
    };

    static constexpr grid projection_grid(int M, int N) { return product_grid(Tiles::projection, M, N); }
    static constexpr grid attention_grid(int batch, int queries, int heads) {
        return {(queries + Tiles::attention.block_m - 1) / Tiles::attention.block_m, heads, batch,
                Tiles::attention.threads(wave_size)};
    }
    static constexpr grid output_grid(int M, int N) { return product_grid(Tiles::output, M, N); }
    /// F: columns of the result; as many gates are computed beside them.
    static constexpr grid feed_forward_grid(int M, int F) { return product_grid(Tiles::feed_forward, M, 2 * F); }

#if defined(__AMDGCN__)
    /// norm(x) times the weights of queries, keys and values, or of queries alone.
    template <bool has_bias = false>
    using projection = norm_linear_step<Arch, T, config_of_product<Tiles::projection>, has_bias>;
    using attention = attention_step<Arch, T, config_of_attention<Head, Tiles::attention>>;
    /// The product after attention, and the last of the feed-forward.
    template <bool has_bias = true>
    using output = linear_moments_step<Arch, T, config_of_product<Tiles::output>, has_bias, true>;
    template <bool has_bias = true>
    using feed_forward = norm_geglu_step<Arch, T, config_of_product<Tiles::feed_forward>, has_bias>;
#endif

  private:
    static constexpr grid product_grid(const product_tile& tile, int M, int N) {
        return {tile.workgroups(M, N), 1, 1, tile.threads(wave_size)};
    }
};

template <typename T, int Head>
struct rdna3::OptimizedFusedTransformer : FusedTransformerBlockTemplate<rdna3, T, Head> {};

template <typename T, int Head>
struct cdna3::OptimizedFusedTransformer : FusedTransformerBlockTemplate<cdna3, T, Head> {};

}  // namespace rocm_sd

// The founding documents write them without a namespace.
using rocm_sd::cdna3;
using rocm_sd::FindOptimalConfig;
using rocm_sd::FusedTransformerBlockTemplate;
using rocm_sd::rdna3;
