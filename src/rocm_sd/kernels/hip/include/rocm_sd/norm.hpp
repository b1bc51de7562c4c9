// LayerNorm on the way into a product, and the moments that it needs on the way out of the product before.
//
// A row's mean and spread are known before the product begins, as the moments of its parts; what remains of the norm is
// done to the values while they stand in registers between global memory and LDS. The normalised matrix, rounded as
// stock torch rounds it, is in LDS only.
#pragma once

#include "epilogue.hpp"
#include "wave.hpp"

namespace rocm_sd {

/// Of each row `parts` pairs: the mean of `span` neighbours (the last part may have fewer), and the sum of their centred
/// squares. No part's squares cancel, whatever the mean of the row.
struct row_moments {
    const float* data;  // [rows, parts, 2]
    int parts, span, width;
    float share, eps;  // share: 1 / width
};

/// Mean and 1 / sqrt(variance + eps) of `rows` rows, row_of(i). `lanes` neighbours, who ask for the same rows, share the
/// work. Every lane of the wave must take part.
template <int rows, int lanes, typename RowOf>
ROCM_SD_DEVICE void merge(const row_moments& of, RowOf row_of, float (&mean)[rows], float (&scale)[rows]) {
    const int lane = thread_index() % lanes;
    float sum[rows] = {}, squares[rows] = {};
    // visit(row, how many columns, its pair)
    const auto each = [&](auto visit) {
        for (int first = 0; first < of.parts; first += lanes) {
            const int part = first + lane, here = smaller(part, of.parts - 1);
            const int count = part < of.parts ? smaller(of.span, of.width - part * of.span) : 0;
            const float weight = static_cast<float>(count);
#pragma unroll
            for (int i = 0; i < rows; ++i) visit(i, weight, of.data + 2 * (row_of(i) * of.parts + here));
        }
    };
    each([&](int i, float weight, const float* pair) { sum[i] += weight * pair[0]; });
#pragma unroll
    for (int i = 0; i < rows; ++i) mean[i] = reduce_lanes<plus, lanes>(sum[i]) * of.share;
    each([&](int i, float weight, const float* at) {
        const vector_of<float, 2> pair = load<2>(at);
        const float apart = pair[0] - mean[i];
        squares[i] += (weight > 0.0f ? pair[1] : 0.0f) + weight * apart * apart;
    });
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        scale[i] = reciprocal_sqrt(reduce_lanes<plus, lanes>(squares[i]) * of.share + of.eps);
    }
}

/// Steps of a factor (see row_steps in gemm.hpp) that is layer_norm(rows) * weight + bias. All of gemm_config::wide.
template <typename Tile, typename T, int Threads>
struct normed_steps {
    using row_stage = stage<Tile, T, Threads, true>;

    row_steps<Tile, T, Threads, true> rows;
    const T *weight, *bias;  // from the step on
    chunk_of<T> weights, biases;
    float mean[row_stage::steps], scale[row_stage::steps];

    ROCM_SD_DEVICE normed_steps(const factor<T>& of, int k, int first_row, int thread, const T* weight, const T* bias,
                                const row_moments& moments)
        : rows(of, k, first_row, thread), weight(weight), bias(bias) {
        const auto row_of = [&](int step) { return smaller(first_row + rows.next.row(step), of.rows - 1); };
        merge<row_stage::steps, Tile::chunks>(moments, row_of, mean, scale);
    }

    ROCM_SD_DEVICE void fetch() {
        rows.fetch();
        // A thread's chunks stand in one column: one chunk of each serves all of them. 32 bits beside a base that all
        // lanes share, as in `stage`.
        const unsigned column = smaller(8 * rows.next.chunk, rows.columns - 8);
        weights = load<8>(weight + column);
        biases = load<8>(bias + column);
    }

    ROCM_SD_DEVICE void advance() {
        rows.advance();
        weight += Tile::columns;
        bias += Tile::columns;
    }

    /// Values beyond the last are those of the row's last columns, so that whatever is finite there is finite here.
    ROCM_SD_DEVICE void clear() {
        if (rows.columns < Tile::columns && 8 * rows.next.chunk >= rows.columns) weights = biases = static_cast<T>(0.0f);
    }

    ROCM_SD_DEVICE void commit(const Tile& tile) const {
        // Settled: the compiler would convert them where they were loaded, and keep them in twice the registers.
        const auto factors = convert<float>(settled<T>(weights)), added = convert<float>(settled<T>(biases));
#pragma unroll
        for (int step = 0; step < row_stage::steps; ++step) {
            const auto values = convert<float>(settled<T>(rows.next.held[step]));
            chunk_of<T> normed;
            // One by one: a vector of eight equal means would be eight registers, kept over the whole product.
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                normed[i] = static_cast<T>((values[i] - mean[step]) * scale[step] * factors[i] + added[i]);
            }
            tile.store(rows.next.row(step), rows.next.chunk, settled<T>(normed));
            // One chunk at a time: all of them in float32 at once are registers that no product has left.
            __builtin_amdgcn_sched_barrier(0);
        }
    }
};

/// y = sums + bias + residual, rounded once, and the moments of the rounded rows in parts of block_n columns.
template <typename T, int block_n, bool has_bias, bool has_residual>
struct add_and_measure {
    using sum = add_bias_and_residual<T, true, has_bias, has_residual>;
    using fetched = typename sum::fetched;

    sum add;
    float* moments;  // [M, parts, 2]
    int columns, parts;

    ROCM_SD_DEVICE fetched fetch(run_of_sums at) const { return add.fetch(at); }

    ROCM_SD_DEVICE void store(run_of_sums at, vector_of<float, 8> sums, const fetched& ahead) const {
        // Runs of a tile's row are held by neighbouring lanes.
        constexpr int lanes = block_n / 8;
        const chunk_of<T> values = add.total(sums, ahead);
        add.store(at, values);
        const auto floats = convert<float>(values);
        const bool inside = at.count > 0;
        const int part = at.column / block_n;
        const float share = reciprocal(static_cast<float>(smaller(block_n, columns - part * block_n)));
        const float mean = reduce_lanes<plus, lanes>(inside ? rocm_sd::sum(floats) : 0.0f) * share;
        const auto apart = floats - mean;
        const float squares = reduce_lanes<plus, lanes>(inside ? rocm_sd::sum(apart * apart) : 0.0f);
        float* to = moments + 2 * (at.row * parts + part);
        store_if<2>(inside && thread_index() % lanes == 0, to, vector_of<float, 2>{mean, squares});
    }
};

}  // namespace rocm_sd
