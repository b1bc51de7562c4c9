// Pieces of matrices in the registers of one wave: c += a * b^T with one interface over every matrix unit.
//
//   fragment<Arch, use::a, 16, 16, 16, half> a;            a.load(tile_a, row, k, lane);     // rows of a
//   fragment<Arch, use::b, 16, 16, 16, half> b;            b.load(tile_b, column, k, lane);  // columns of b
//   fragment<Arch, use::accumulator, 16, 16, 16, half> c;  c.clear(); c.mma(a, b); c.store(tile_c, row, column, lane);
//
// Both factors lie in LDS with K side by side (b is stored as its transpose, as the weight of a linear is), and are
// read in chunks of 16 bytes. The sum over K has no order of its own, so a lane may hold any eight values of K as long
// as the same lane of the other factor holds the same eight: every load is 16 bytes wide on every architecture.
//
// A layout says, for one architecture and one element type:
//   m, n, k                  the product that one mma does
//   chunks_a, chunks_b       chunks of eight values that a lane holds of each factor
//   a(lane, i), b(lane, i)   which row (or column) and which chunk of K the i-th of them is
//   elements                 float32 sums that a lane holds
//   c(lane, e)               the row and column of the e-th of them
//   multiply_add(a, b, c)    the instructions
#pragma once

#include "tile.hpp"

namespace rocm_sd {

enum class use { a, b, accumulator };

/// Row (or column) base + row of a factor and a chunk of K in it; `base` is a multiple of eight, the same in all lanes.
struct factor_place {
    int base, row, chunk;
};

/// A row and a column of the product.
struct sum_place {
    int row, column;
};

/// The layout of one product; only the combinations below exist, and any other does not compile.
template <typename Arch, int M, int N, int K, typename T>
struct layout;

namespace detail {

using short4 = vector_of<short, 4>;
using short8 = vector_of<short, 8>;
using short16 = vector_of<short, 16>;
using half4 = vector_of<half, 4>;
using half16 = vector_of<half, 16>;
using float4 = vector_of<float, 4>;
using float8 = vector_of<float, 8>;
using float16 = vector_of<float, 16>;

template <int Part, typename T>
ROCM_SD_DEVICE vector_of<T, 4> four_of(chunk_of<T> chunk) {
    if constexpr (Part == 0) {
        return chunk.lo;
    } else {
        return chunk.hi;
    }
}

template <typename T>
ROCM_SD_DEVICE vector_of<T, 16> join(chunk_of<T> low, chunk_of<T> high) {
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// The builtins take bfloat16 as shorts.
ROCM_SD_DEVICE float8 wmma_gfx11(half16 a, half16 b, float8 c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}
ROCM_SD_DEVICE float8 wmma_gfx11(vector_of<bfloat, 16> a, vector_of<bfloat, 16> b, float8 c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
        __builtin_bit_cast(short16, a), __builtin_bit_cast(short16, b), c);
}

ROCM_SD_DEVICE float8 wmma_gfx12(chunk_of<half> a, chunk_of<half> b, float8 c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}
ROCM_SD_DEVICE float8 wmma_gfx12(chunk_of<bfloat> a, chunk_of<bfloat> b, float8 c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(
        __builtin_bit_cast(short8, a), __builtin_bit_cast(short8, b), c);
}

// The accumulator's type tells the two shapes of MFMA apart: 4 sums a lane in 16x16, 16 in 32x32.
ROCM_SD_DEVICE float4 mfma(half4 a, half4 b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
ROCM_SD_DEVICE float4 mfma(vector_of<bfloat, 4> a, vector_of<bfloat, 4> b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
        __builtin_bit_cast(short4, a), __builtin_bit_cast(short4, b), c, 0, 0, 0);
}
ROCM_SD_DEVICE float16 mfma(half4 a, half4 b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}
ROCM_SD_DEVICE float16 mfma(vector_of<bfloat, 4> a, vector_of<bfloat, 4> b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(
        __builtin_bit_cast(short4, a), __builtin_bit_cast(short4, b), c, 0, 0, 0);
}

// v_dot2_f32_f16: two products and the addend, in float32.
ROCM_SD_DEVICE float dot2(vector_of<half, 2> a, vector_of<half, 2> b, float c) {
    return __builtin_amdgcn_fdot2(a, b, c, false);
}
// gfx1030 has no bfloat16 arithmetic; widening is a shift, and the products are exact in float32.
ROCM_SD_DEVICE float dot2(vector_of<bfloat, 2> a, vector_of<bfloat, 2> b, float c) {
    const unsigned pair_a = __builtin_bit_cast(unsigned, a), pair_b = __builtin_bit_cast(unsigned, b);
    const float low = __builtin_fmaf(
        __builtin_bit_cast(float, pair_a << 16), __builtin_bit_cast(float, pair_b << 16), c);
    return __builtin_fmaf(
        __builtin_bit_cast(float, pair_a & 0xffff0000u), __builtin_bit_cast(float, pair_b & 0xffff0000u), low);
}

/// MFMA: two instructions on the two halves of a chunk; the lanes beyond the rows hold the next chunks of K.
template <int Rows, typename T>
struct mfma_layout {
    static constexpr int groups = 64 / Rows;  // lanes that share a row
    static constexpr int m = Rows, n = Rows, k = 8 * groups;
    static constexpr int chunks_a = 1, chunks_b = 1, elements = Rows * Rows / 64;
    using sums = vector_of<float, elements>;

    ROCM_SD_DEVICE static factor_place a(int lane, int) { return {0, lane % Rows, lane / Rows}; }
    ROCM_SD_DEVICE static factor_place b(int lane, int i) { return a(lane, i); }
    // Four rows that follow one another stand in four registers; the next four belong to the next group of lanes.
    ROCM_SD_DEVICE static sum_place c(int lane, int e) {
        return {e % 4 + 4 * (lane / Rows) + 4 * groups * (e / 4), lane % Rows};
    }
    ROCM_SD_DEVICE static sums multiply_add(const chunk_of<T>* a, const chunk_of<T>* b, sums c) {
        c = mfma(four_of<0, T>(a[0]), four_of<0, T>(b[0]), c);
        return mfma(four_of<1, T>(a[0]), four_of<1, T>(b[0]), c);
    }
};

}  // namespace detail

/// gfx11: a lane holds a whole row of 16, and lanes 16 to 31 repeat lanes 0 to 15.
template <typename T>
struct layout<rdna3, 16, 16, 16, T> {
    static constexpr int m = 16, n = 16, k = 16, chunks_a = 2, chunks_b = 2, elements = 8;
    using sums = vector_of<float, 8>;

    ROCM_SD_DEVICE static factor_place a(int lane, int i) { return {0, lane % 16, i}; }
    ROCM_SD_DEVICE static factor_place b(int lane, int i) { return a(lane, i); }
    ROCM_SD_DEVICE static sum_place c(int lane, int e) { return {2 * e + lane / 16, lane % 16}; }
    ROCM_SD_DEVICE static sums multiply_add(const chunk_of<T>* a, const chunk_of<T>* b, sums c) {
        return detail::wmma_gfx11(detail::join<T>(a[0], a[1]), detail::join<T>(b[0], b[1]), c);
    }
};

/// gfx12: a lane holds half a row, and lanes 16 to 31 hold the other half.
template <typename T>
struct layout<rdna4, 16, 16, 16, T> {
    static constexpr int m = 16, n = 16, k = 16, chunks_a = 1, chunks_b = 1, elements = 8;
    using sums = vector_of<float, 8>;

    ROCM_SD_DEVICE static factor_place a(int lane, int) { return {0, lane % 16, lane / 16}; }
    ROCM_SD_DEVICE static factor_place b(int lane, int i) { return a(lane, i); }
    ROCM_SD_DEVICE static sum_place c(int lane, int e) { return {e + 8 * (lane / 16), lane % 16}; }
    ROCM_SD_DEVICE static sums multiply_add(const chunk_of<T>* a, const chunk_of<T>* b, sums c) {
        return detail::wmma_gfx12(a[0], b[0], c);
    }
};

template <typename T>
struct layout<cdna2, 16, 16, 32, T> : detail::mfma_layout<16, T> {};
template <typename T>
struct layout<cdna2, 32, 32, 16, T> : detail::mfma_layout<32, T> {};
template <typename T>
struct layout<cdna3, 16, 16, 32, T> : detail::mfma_layout<16, T> {};
template <typename T>
struct layout<cdna3, 32, 32, 16, T> : detail::mfma_layout<32, T> {};

namespace detail {

/// No matrix unit: a wave is a grid of lanes, eight wide, and a lane computes its rows of 2 columns by dot products.
template <int wave_size, typename T>
struct dot_layout {
    static constexpr int lane_rows = wave_size / 8;
    static constexpr int m = 16, n = 16, k = 8;
    static constexpr int chunks_a = 16 / lane_rows, chunks_b = 2, elements = chunks_a * chunks_b;
    using sums = vector_of<float, elements>;

    // Eight lanes that are served together read one row of a, which is a broadcast, and eight columns of b.
    ROCM_SD_DEVICE static factor_place a(int lane, int i) {
        const int row = lane_rows * i;
        return {row / 8 * 8, lane / 8 + row % 8, 0};
    }
    ROCM_SD_DEVICE static factor_place b(int lane, int i) { return {8 * i, lane % 8, 0}; }
    ROCM_SD_DEVICE static sum_place c(int lane, int e) {
        return {lane / 8 + lane_rows * (e / 2), lane % 8 + 8 * (e % 2)};
    }
    ROCM_SD_DEVICE static sums multiply_add(const chunk_of<T>* a, const chunk_of<T>* b, sums c) {
#pragma unroll
        for (int e = 0; e < elements; ++e) {
            const chunk_of<T> left = a[e / 2], right = b[e % 2];
            float sum = c[e];
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                sum = dot2(vector_of<T, 2>{left[i], left[i + 1]}, vector_of<T, 2>{right[i], right[i + 1]}, sum);
            }
            c[e] = sum;
        }
        return c;
    }
};

}  // namespace detail

template <typename T>
struct layout<gcn5, 16, 16, 8, T> : detail::dot_layout<gcn5::wave_size, T> {};
template <typename T>
struct layout<rdna2, 16, 16, 8, T> : detail::dot_layout<rdna2::wave_size, T> {};

/// The K that an architecture's layout has for products of M x M.
template <typename Arch, int M>
constexpr int fragment_k() {
    switch (Arch::matrix) {
        case matrix_kind::dot: return 8;
        case matrix_kind::mfma: return 512 / M;
        default: return 16;
    }
}

template <typename Arch, use Use, int M, int N, int K, typename T>
struct fragment;

/// Rows of the left factor.
template <typename Arch, int M, int N, int K, typename T>
struct fragment<Arch, use::a, M, N, K, T> {
    using places = layout<Arch, M, N, K, T>;
    chunk_of<T> chunks[places::chunks_a];

    /// From `tile` (see tile.hpp), M rows from `row` on and K values from `k` on, both multiples of eight.
    template <typename Tile>
    ROCM_SD_DEVICE void load(const Tile& tile, int row, int k, int lane) {
#pragma unroll
        for (int i = 0; i < places::chunks_a; ++i) {
            const factor_place at = places::a(lane, i);
            chunks[i] = tile.load(row + at.base, at.row, k / 8 + at.chunk);
        }
    }
};

/// Columns of the right factor; its tile holds them as rows.
template <typename Arch, int M, int N, int K, typename T>
struct fragment<Arch, use::b, M, N, K, T> {
    using places = layout<Arch, M, N, K, T>;
    chunk_of<T> chunks[places::chunks_b];

    template <typename Tile>
    ROCM_SD_DEVICE void load(const Tile& tile, int column, int k, int lane) {
#pragma unroll
        for (int i = 0; i < places::chunks_b; ++i) {
            const factor_place at = places::b(lane, i);
            chunks[i] = tile.load(column + at.base, at.row, k / 8 + at.chunk);
        }
    }
};

/// Sums in float32, whatever the factors are.
template <typename Arch, int M, int N, int K, typename T>
struct fragment<Arch, use::accumulator, M, N, K, T> {
    using places = layout<Arch, M, N, K, T>;
    typename places::sums sums;

    ROCM_SD_DEVICE void clear() { sums = 0.0f; }

    ROCM_SD_DEVICE void mma(
        const fragment<Arch, use::a, M, N, K, T>& a, const fragment<Arch, use::b, M, N, K, T>& b) {
        sums = places::multiply_add(a.chunks, b.chunks, sums);
    }

    /// tile.store(row, column, value) for each sum that the lane holds, counted from `row` and `column` on.
    template <typename Tile>
    ROCM_SD_DEVICE void store(const Tile& tile, int row, int column, int lane) const {
        for_each(lane, [&](int r, int c, float value) { tile.store(row + r, column + c, value); });
    }

    /// visit(row, column, value) for each sum that the lane holds.
    template <typename Visit>
    ROCM_SD_DEVICE void for_each(int lane, Visit visit) const {
#pragma unroll
        for (int e = 0; e < places::elements; ++e) {
            const sum_place at = places::c(lane, e);
            visit(at.row, at.column, sums[e]);
        }
    }
};

}  // namespace rocm_sd
