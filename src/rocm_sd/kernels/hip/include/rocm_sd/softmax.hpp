// Softmax over keys that come in blocks, on scores that stand in accumulators with a key a row and a query a column.
//
// That way round (k q^T and not q k^T) a lane holds scores of one query, or two, so that sums and maxima are first
// taken within the lane, and the weights of a lane are whole chunks of keys: the right factor of the next product.
#pragma once

#include "fragment.hpp"
#include "wave.hpp"

namespace rocm_sd {

/// Which rows of accumulators a lane holds, as chunks of eight: `fragments` of them side by side give each lane
/// `chunks` chunks of every column it has. The rows of a chunk are not neighbours. What is multiplied decides what they
/// mean: the rows of a factor in LDS, or the order of its K, are laid out so that the chunk is what is wanted.
template <typename Arch, int M, typename T>
struct sums_as_chunks {
    using places = layout<Arch, M, M, fragment_k<Arch, M>(), T>;
    static constexpr int columns = Arch::matrix == matrix_kind::dot ? 2 : 1;
    static constexpr int lanes = M / columns;  // side by side, with other columns; lanes further on have other rows
    static constexpr int groups = Arch::wave_size / lanes;
    static constexpr int rows = M / groups;  // that a lane holds of a column of one fragment
    static constexpr int fragments = rows < 8 ? 8 / rows : 1;
    static constexpr int chunks = rows < 8 ? 1 : rows / 8;
    static constexpr int span = M * fragments;

    /// The row, of `span`, of value i of chunk `number`.
    ROCM_SD_DEVICE static int row(int number, int i) {
        const int held = number / groups * 8 + i;
        return M * (held / rows) + places::c(number % groups * lanes, held % rows * columns).row;
    }

    /// The number, of span / 8, of a lane's n-th chunk.
    ROCM_SD_DEVICE static int number(int lane, int n) { return n * groups + lane / lanes; }

    ROCM_SD_DEVICE static int column(int lane, int which) { return places::c(lane, which).column; }

    /// The n-th chunk of the lane's column `which`, from sums(fragment)[element].
    template <typename Sums>
    ROCM_SD_DEVICE static chunk_of<T> chunk(int n, int which, Sums sums) {
        vector_of<float, 8> values;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int held = 8 * n + i;
            values[i] = sums(held / rows)[held % rows * columns + which];
        }
        return convert<T>(values);
    }
};

namespace detail {

/// The value of lane ^ 16.
template <typename Arch>
ROCM_SD_DEVICE unsigned from_other_row(unsigned value) {
    if constexpr (Arch::wave_size == 32) {
        unsigned other = __builtin_amdgcn_permlanex16(value, value, 0x76543210u, 0xfedcba98u, true, false);
        // Here, where all lanes are at work: clang 19 moves the instruction, and what makes its operand, into a branch
        // that only some lanes take, if the result is wanted there alone.
        asm volatile("" : "+v"(other));
        return other;
    } else {
        return static_cast<unsigned>(__builtin_amdgcn_ds_swizzle(static_cast<int>(value), 0x401F));
    }
}

enum dpp_rotation : int { row_rotate_8 = 0x128 };

}  // namespace detail

/// Over the lanes of a wave that are equal modulo `lanes`: 8, 16 or 32.
template <typename Arch, typename Operation, int lanes>
ROCM_SD_DEVICE float reduce_across(float value) {
    static_assert(lanes >= 8 && lanes < Arch::wave_size && (lanes & (lanes - 1)) == 0);
    if constexpr (lanes <= 8) value = Operation::of(value, detail::dpp_move<detail::row_rotate_8>(value));
    if constexpr (lanes <= 16) {
        const unsigned other = detail::from_other_row<Arch>(__builtin_bit_cast(unsigned, value));
        value = Operation::of(value, __builtin_bit_cast(float, other));
    }
    if constexpr (Arch::wave_size == 64) {
        const int from = (thread_index() ^ 32) % 64 * 4;
        const int other = __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, value));
        value = Operation::of(value, __builtin_bit_cast(float, other));
    }
    return value;
}

/// The largest score so far and the sum of weights of each query that a lane has. All lanes of a query have the same
/// largest score; their sums are of their own keys until `sum_lanes`.
template <typename Arch, int M, typename T, int Fragments>
struct online_softmax {
    using held = sums_as_chunks<Arch, M, T>;
    using accumulator = fragment<Arch, use::accumulator, M, M, fragment_k<Arch, M>(), T>;

    float top[Fragments][held::columns], total[Fragments][held::columns];

    ROCM_SD_DEVICE void clear() {
        each([&](int j, int which) {
            top[j][which] = -__builtin_huge_valf();
            total[j][which] = 0.0f;
        });
    }

    /// The largest of a wave's scores of one query, in all lanes that have the query.
    template <int Rows>
    ROCM_SD_DEVICE static float largest(const accumulator (&scores)[Rows][Fragments], int j, int which) {
        float found = scores[0][j].sums[which];
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
#pragma unroll
            for (int e = which; e < held::places::elements; e += held::columns) {
                found = __builtin_fmaxf(found, scores[i][j].sums[e]);
            }
        }
        return reduce_across<Arch, maximum, held::lanes>(found);
    }

    /// Turns scores into weights, given the block's largest, and returns the factor that older sums shrink by.
    ///
    /// The difference comes first: s * scale - top * scale, as one fused step, rounds only one of the two products, and
    /// at scores of 1e10 what is left of the other is an exponent of a thousand.
    template <int Rows>
    ROCM_SD_DEVICE float weigh(accumulator (&scores)[Rows][Fragments], int j, int which, float block, float scale) {
        const float now = __builtin_fmaxf(top[j][which], block);
        const float shrink = __builtin_amdgcn_exp2f((top[j][which] - now) * scale);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
#pragma unroll
            for (int e = which; e < held::places::elements; e += held::columns) {
                const float weight = __builtin_amdgcn_exp2f((scores[i][j].sums[e] - now) * scale);
                scores[i][j].sums[e] = weight;
                sum += weight;
            }
        }
        top[j][which] = now;
        total[j][which] = total[j][which] * shrink + sum;
        // Here and not later: the compiler would keep all weights until it adds them.
        asm volatile("" : "+v"(total[j][which]));
        return shrink;
    }

    ROCM_SD_DEVICE void sum_lanes() {
        each([&](int j, int which) { total[j][which] = reduce_across<Arch, plus, held::lanes>(total[j][which]); });
    }

    /// visit(fragment, which of the lane's columns)
    template <typename Visit>
    ROCM_SD_DEVICE static void each(Visit visit) {
#pragma unroll
        for (int j = 0; j < Fragments; ++j) {
#pragma unroll
            for (int which = 0; which < held::columns; ++which) visit(j, which);
        }
    }
};

}  // namespace rocm_sd
