// out = softmax(scale * q k^T) v for a block of queries of one head; no score goes to global memory.
//
// 1. k q^T: keys from LDS, queries from registers (or LDS, where the head is large), sums with a key a row.
// 2. The softmax of the block, within lanes as far as it goes (softmax.hpp).
// 3. v^T p^T: values from LDS, turned on the way there, weights straight from the registers of step 2 where the layout
//    allows; older sums shrink by a factor that each lane has for its own queries.
//
// Keys and values come in tiles that alternate between two places in LDS: while one is multiplied the next is on its
// way into registers, and one barrier a tile is enough. A large head is cut into pieces, each a tile of its own.
//
// Waves stand in waves_m rows of queries by waves_d. Those that share queries part the keys in step 1 and the columns
// of the head in step 3, and hand each other their weights through LDS: no product is computed twice.
#pragma once

#include "attention_stage.hpp"

namespace rocm_sd {

/// A workgroup computes block_m queries of heads of `Head` columns, block_n keys at a time. chunk: columns of a piece,
/// 0 for the whole head. queries_in_lds: 1 keeps the queries there and not in registers. values_ahead: 1 has values on
/// their way while keys are multiplied, in registers; 0 waits for them, and other waves hide that.
template <int Head, int BlockM, int BlockN, int WavesM, int WavesD, int Fragment, int Chunk, bool QueriesInLds,
          bool ValuesAhead>
struct attention_config {
    static constexpr int head = Head, block_m = BlockM, block_n = BlockN, waves_m = WavesM, waves_d = WavesD;
    static constexpr int fragment = Fragment, chunk = Chunk;
    static constexpr bool queries_in_lds = QueriesInLds, values_ahead = ValuesAhead;
    static_assert(Head % 8 == 0, "a row is made of chunks");
    static_assert(Chunk == 0 || Head % Chunk == 0, "a head is made of pieces");
};

/// Rows of one head: `rows` of them, `stride` bytes apart.
template <typename T>
struct head_rows {
    const T* data;
    int stride, rows;
};

template <typename Arch, typename T, typename Config>
struct attention {
    static constexpr int M = Config::fragment, K = fragment_k<Arch, M>();
    using held = sums_as_chunks<Arch, M, T>;
    using fragment_a = fragment<Arch, use::a, M, M, K, T>;
    using fragment_b = fragment<Arch, use::b, M, M, K, T>;
    using accumulator = fragment<Arch, use::accumulator, M, M, K, T>;

    static constexpr int value_bytes = static_cast<int>(sizeof(T));
    static constexpr int block_m = Config::block_m, block_n = Config::block_n, waves_d = Config::waves_d;
    static constexpr int threads = Config::waves_m * waves_d * Arch::wave_size;
    static constexpr int pieces = Config::chunk ? Config::head / Config::chunk : 1;
    static constexpr int piece = Config::chunk ? Config::chunk : Config::head;
    static constexpr int piece_k = ceil_div(piece, K) * K;  // columns of the keys, with zeros for what is not there
    static constexpr int piece_v = ceil_div(piece, held::span * waves_d) * held::span * waves_d;
    static constexpr int steps_k = piece_k / K, steps_n = block_n / K;

    static constexpr int wave_m = block_m / Config::waves_m, wave_n = block_n / waves_d, wave_v = piece_v / waves_d;
    static constexpr int fragments_m = wave_m / M, fragments_n = wave_n / M, fragments_v = wave_v / M;
    static constexpr int groups_n = wave_n / held::span;
    static_assert(fragments_m * M * Config::waves_m == block_m, "block_m is made of fragments");
    static_assert(waves_d == 1 || (wave_v & (wave_v - 1)) == 0, "bits of a row tell whose it is");
    static_assert(groups_n * held::span * waves_d == block_n, "block_n is made of fragments");

    // The lanes that multiply are the lanes that hold the weights, unless waves share them or there is no matrix unit.
    static constexpr bool weights_in_lds = waves_d > 1 || Arch::matrix == matrix_kind::dot;

    // Dot products are many instructions. With all steps unrolled the loops over pieces would be too long for it, and
    // sums that are named after pieces would stand in memory.
    static constexpr bool one_step = Arch::matrix == matrix_kind::dot && pieces > 1;
    static constexpr int steps_k_at_once = one_step && Config::queries_in_lds ? 1 : steps_k;
    static constexpr int steps_n_at_once = one_step ? 1 : steps_n;

    // Queries and results pass through the place of two tiles, so many rows at once.
    static constexpr bool in_passes = block_m % (2 * block_n) == 0 && 2 * block_n % wave_m == 0;
    static constexpr int rows_at_once = in_passes ? 2 * block_n : block_m;
    static constexpr int passes = block_m / rows_at_once;

    using tile_q = lds_tile<T, Config::queries_in_lds ? block_m : rows_at_once, piece_k>;
    using tile_k = lds_tile<T, block_n, piece_k>;
    using tile_v = turned_tile<Arch, M, T, piece_v, block_n>;
    using tile_p = lds_tile<T, block_m, block_n>;
    using tile_o = lds_tile<T, rows_at_once, piece_v>;

    static constexpr int slot_bytes = larger(tile_k::bytes, tile_v::bytes);
    static constexpr int passing_bytes = larger(2 * slot_bytes, tile_o::bytes);
    static constexpr int shared_bytes = Config::queries_in_lds ? passing_bytes : larger(passing_bytes, tile_q::bytes);
    static constexpr int p_at = shared_bytes, p_bytes = weights_in_lds ? tile_p::bytes : 0;
    static constexpr int q_at = p_at + p_bytes, q_bytes = Config::queries_in_lds ? pieces * tile_q::bytes : 0;
    static constexpr int largest_at = q_at + q_bytes, largest_bytes = waves_d > 1 ? waves_d * block_m * 4 : 0;
    static constexpr int lds_bytes = largest_at + largest_bytes;
    static_assert(lds_bytes <= Arch::lds_bytes, "the tiles do not fit in LDS");

    /// Queries from first_row on; out has rows of its own stride. scale is in powers of two. lds: `lds_bytes`, aligned
    /// to 16.
    ROCM_SD_DEVICE static void run(
        const head_rows<T>& q, const head_rows<T>& k, const head_rows<T>& v, T* out, int64 out_stride, int first_row,
        float scale, char* lds) {
        const int thread = thread_index();
        // The same for all lanes: said so, it and all that follows from it stay in scalar registers.
        const int wave = __builtin_amdgcn_readfirstlane(thread / Arch::wave_size);
        const int lane = thread % Arch::wave_size, wave_row = wave / waves_d, wave_column = wave % waves_d;
        const auto left = [&](int i) { return held::places::a(lane, i); };
        const auto left_v = [&](int i) {
            const factor_place at = left(i);
            return factor_place{at.base, at.row + wave_column * wave_v, at.chunk};
        };
        const auto right = [&](int i) { return held::places::b(lane, i); };
        attention self{
            lds, thread, lane, wave_row, wave_column,
            {wave_column * wave_n * piece_k * value_bytes, left},
            {0, left_v},
            {q_at + wave_row * wave_m * piece_k * value_bytes, right},
            {p_at + wave_row * wave_m * block_n * value_bytes, right},
        };

        self.fetch_queries(q, first_row);
        self.softmax.clear();
        self.each_sum([](accumulator& sum, int) { sum.clear(); });
        self.over_keys(k, v, scale);
        self.finish(out, out_stride, q.rows - first_row, first_row);
    }

    using softmax_of_wave = online_softmax<Arch, M, T, fragments_m>;

    char* lds;
    int thread, lane, wave_row, wave_column;
    factor_reader<fragment_a, tile_k> keys;
    factor_reader<fragment_a, tile_v> values;
    factor_reader<fragment_b, tile_q> queries_there;
    factor_reader<fragment_b, tile_p> weights_there;
    fragment_b queries[Config::queries_in_lds ? 1 : pieces * steps_k][fragments_m];
    softmax_of_wave softmax;
    accumulator sums[pieces][fragments_v][fragments_m];

  private:
    static constexpr int at_once = 2;  // factors whose loads are under way together

    template <typename Tile>
    ROCM_SD_DEVICE Tile at(int byte) const {
        return Tile{reinterpret_cast<chunk_of<T>*>(lds + byte)};
    }

    ROCM_SD_DEVICE static buffer<Arch, T> buffer_of(const head_rows<T>& rows, int first_row) {
        const int64 skipped = static_cast<int64>(first_row) * rows.stride;
        const char* data = reinterpret_cast<const char*>(rows.data) + skipped;
        const int bytes = (rows.rows - first_row - 1) * rows.stride + Config::head * value_bytes;
        return {reinterpret_cast<const T*>(data), bytes};
    }

    /// visit(sum, fragment of queries)
    template <typename Visit>
    ROCM_SD_DEVICE void each_sum(Visit visit) {
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
#pragma unroll
            for (int i = 0; i < fragments_v; ++i) {
#pragma unroll
                for (int j = 0; j < fragments_m; ++j) visit(sums[p][i][j], j);
            }
        }
    }

    ROCM_SD_DEVICE void fetch_queries(const head_rows<T>& q, int first_row) {
        row_stage<Arch, T, tile_q, piece, threads> stage(q.stride, thread);
        buffer<Arch, T> from = buffer_of(q, first_row);
#pragma unroll
        for (int pass = 0; pass < block_m / tile_q::rows; ++pass) {
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                const tile_q tile = at<tile_q>(Config::queries_in_lds ? q_at + p * tile_q::bytes : 0);
                stage.fetch(from, q.stride, p * piece * value_bytes);
                stage.commit(tile);
                if constexpr (!Config::queries_in_lds) {
                    barrier();
                    if (passes == 1 || wave_row * wave_m / rows_at_once == pass) read_queries(tile, p);
                    barrier();
                }
            }
            from.skip(tile_q::rows * q.stride);
        }
    }

    ROCM_SD_DEVICE void read_queries(const tile_q& tile, int p) {
        const tile_q own = tile.from(wave_row * wave_m % tile_q::rows);
#pragma unroll
        for (int step = 0; step < steps_k; ++step) {
#pragma unroll
            for (int j = 0; j < fragments_m; ++j) queries[p * steps_k + step][j].load(own, j * M, step * K, lane);
        }
    }

    ROCM_SD_DEVICE void over_keys(const head_rows<T>& k, const head_rows<T>& v, float scale) {
        row_stage<Arch, T, tile_k, piece, threads> next_k(k.stride, thread);
        turning_stage<Arch, T, tile_v, piece, threads> next_v(v.data, v.stride, thread);
        buffer<Arch, T> from_k = buffer_of(k, 0), from_v = buffer_of(v, 0);
        next_k.fetch(from_k, k.stride, 0);
        for (int keys = k.rows; keys > 0; keys -= block_n) {
            typename decltype(next_v)::pairs coming[pieces];
            accumulator scores[fragments_n][fragments_m];
            for (auto& row : scores) {
                for (auto& score : row) {
                    score.clear();
                    // Else gfx11 keeps zeros for them in registers of their own.
                    if constexpr (Arch::matrix == matrix_kind::wmma_gfx11) asm volatile("" : "+v"(score.sums));
                }
            }
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                next_k.commit(at<tile_k>(p % 2 * slot_bytes));
                barrier();
                if (p + 1 < pieces) {
                    next_k.fetch(from_k, k.stride, (p + 1) * piece * value_bytes);
                } else if (Config::values_ahead) {
                    next_v.fetch(from_v, v.stride, 0, coming[0]);
                }
                __builtin_amdgcn_sched_barrier(0);
                score(p, scores);
            }
            if (keys < block_n) mask(scores, keys);
            chunk_of<T> weights[groups_n * held::chunks][fragments_m];
            weigh(scores, scale, weights);
            from_k.advance(block_n * k.stride);
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                const int slot = (pieces + p) % 2 * slot_bytes;
                if (!Config::values_ahead) next_v.fetch(from_v, v.stride, p * piece * value_bytes, coming[p]);
                next_v.commit(lds, slot, coming[p]);
                barrier();
                if (p + 1 < pieces) {
                    const int first = (p + 1) * piece * value_bytes;
                    if (Config::values_ahead) next_v.fetch(from_v, v.stride, first, coming[p + 1]);
                } else if (keys > block_n) {
                    next_k.fetch(from_k, k.stride, 0);
                }
                __builtin_amdgcn_sched_barrier(0);
                add_values(slot, weights, sums[p]);
            }
            from_v.advance(block_n * v.stride);
        }
    }

    ROCM_SD_DEVICE static void settle_if(bool last_step, int i, accumulator (&products)[fragments_m]) {
        if (Arch::matrix == matrix_kind::dot || (pieces > 1 && last_step)) settle(products);
        if (i % at_once == at_once - 1 || Arch::matrix == matrix_kind::dot) __builtin_amdgcn_sched_barrier(0);
    }

    /// The products are done at this place. Otherwise the compiler, which sees one long run of instructions, loads the
    /// factors of all steps and pieces first, and has no registers left. A matrix instruction makes all sums at once;
    /// dot products are one instruction for each.
    ROCM_SD_DEVICE static void settle(accumulator (&products)[fragments_m]) {
        constexpr int apart = Arch::matrix == matrix_kind::dot ? held::places::elements : 1;
#pragma unroll
        for (int j = 0; j < fragments_m; ++j) {
#pragma unroll
            for (int e = 0; e < apart; ++e) {
                float one = products[j].sums[e];
                asm volatile("" : "+v"(one));
                products[j].sums[e] = one;
            }
        }
    }

    ROCM_SD_DEVICE void score(int p, accumulator (&scores)[fragments_n][fragments_m]) const {
        const auto from_k = keys.again();
        const auto from_q = queries_there.again();
#pragma unroll steps_k_at_once
        for (int step = 0; step < steps_k; ++step) {
            fragment_b columns[fragments_m];
#pragma unroll
            for (int j = 0; j < fragments_m; ++j) {
                if constexpr (Config::queries_in_lds) {
                    columns[j] = from_q.load(lds, p * tile_q::bytes, j * M, step * K);
                } else {
                    columns[j] = queries[p * steps_k + step][j];
                }
            }
#pragma unroll
            for (int i = 0; i < fragments_n; ++i) {
                const fragment_a row = from_k.load(lds, p % 2 * slot_bytes, i * M, step * K);
#pragma unroll
                for (int j = 0; j < fragments_m; ++j) scores[i][j].mma(row, columns[j]);
                settle_if(step + 1 == steps_k, i, scores[i]);
            }
        }
    }

    /// Nobody attends to keys that are not there.
    ROCM_SD_DEVICE void mask(accumulator (&scores)[fragments_n][fragments_m], int keys) const {
        // From the lane's first row on: the other rows of a lane are as far from its first in every lane.
        const int left = keys - wave_column * wave_n - held::places::c(lane, 0).row;
#pragma unroll
        for (int i = 0; i < fragments_n; ++i) {
#pragma unroll
            for (int e = 0; e < held::places::elements; ++e) {
                const bool inside = i * M + held::places::c(0, e).row < left;
#pragma unroll
                for (int j = 0; j < fragments_m; ++j) {
                    if (!inside) scores[i][j].sums[e] = -__builtin_huge_valf();
                }
            }
        }
    }

    /// Scores become weights, here or in LDS, and all older sums shrink.
    ROCM_SD_DEVICE void weigh(
        accumulator (&scores)[fragments_n][fragments_m], float scale,
        chunk_of<T> (&weights)[groups_n * held::chunks][fragments_m]) {
        float block[fragments_m][held::columns], shrink[fragments_m][held::columns];
        softmax.each([&](int j, int which) { block[j][which] = softmax.largest(scores, j, which); });
        share(block, [](float a, float b) { return __builtin_fmaxf(a, b); });
        softmax.each([&](int j, int which) {
            shrink[j][which] = softmax.weigh(scores, j, which, block[j][which], scale);
        });
        each_sum([&](accumulator& sum, int j) {
#pragma unroll
            for (int e = 0; e < held::places::elements; ++e) sum.sums[e] *= shrink[j][e % held::columns];
        });
        const tile_p tile = at<tile_p>(p_at).from(wave_row * wave_m);
#pragma unroll
        for (int g = 0; g < groups_n; ++g) {
#pragma unroll
            for (int n = 0; n < held::chunks; ++n) {
                const int chunk = (wave_column * wave_n + g * held::span) / 8 + held::number(lane, n);
                softmax.each([&](int j, int which) {
                    const chunk_of<T> found =
                        held::chunk(n, which, [&](int f) { return scores[g * held::fragments + f][j].sums; });
                    if constexpr (weights_in_lds) {
                        // The barrier of the next tile of values stands before the reads.
                        tile.store(j * M + held::column(lane, which), chunk, found);
                    } else {
                        // Settled: the softmax hides the way of the values, and must not move behind the wait for them.
                        weights[g * held::chunks + n][j] = settled<T>(found);
                    }
                });
            }
        }
    }

    /// One value for each query, joined over the waves that share it.
    template <typename Join>
    ROCM_SD_DEVICE void share(float (&values)[fragments_m][held::columns], Join join) const {
        if constexpr (waves_d > 1) {
            float* all = reinterpret_cast<float*>(lds + largest_at) + wave_row * wave_m;
            softmax.each([&](int j, int which) {
                const int row = j * M + held::column(lane, which);
                if (lane < held::lanes) all[wave_column * block_m + row] = values[j][which];
            });
            barrier();
            softmax.each([&](int j, int which) {
                const int row = j * M + held::column(lane, which);
                values[j][which] = all[row];
#pragma unroll
                for (int other = 1; other < waves_d; ++other) {
                    values[j][which] = join(values[j][which], all[other * block_m + row]);
                }
            });
        }
    }

    /// The weights of K keys as the right factor. A wave's keys are in the order of `held`, as the tile of values is.
    ROCM_SD_DEVICE fragment_b weights_of(
        const chunk_of<T> (&weights)[groups_n * held::chunks][fragments_m], int step, int j) const {
        fragment_b factor;
        if constexpr (weights_in_lds) {
            factor = weights_there.load(lds, 0, j * M, step * K);
        } else {
            const chunk_of<T> own = weights[step][j];
            factor.chunks[0] = own;
            if constexpr (held::places::chunks_b == 2) {
                // gfx11 wants the keys of both rows of lanes in each: the first row's, then the second's.
                auto words = __builtin_bit_cast(vector_of<unsigned, 4>, own), others = words;
#pragma unroll
                for (int i = 0; i < 4; ++i) others[i] = detail::from_other_row<Arch>(words[i]);
                const auto other = __builtin_bit_cast(chunk_of<T>, others);
                factor.chunks[0] = lane < 16 ? own : other;
                factor.chunks[1] = lane < 16 ? other : own;
            }
        }
        return factor;
    }

    ROCM_SD_DEVICE void add_values(
        int slot, const chunk_of<T> (&weights)[groups_n * held::chunks][fragments_m],
        accumulator (&into)[fragments_v][fragments_m]) const {
        const auto from_v = values.again();
#pragma unroll steps_n_at_once
        for (int step = 0; step < steps_n; ++step) {
            fragment_b columns[fragments_m];
#pragma unroll
            for (int j = 0; j < fragments_m; ++j) columns[j] = weights_of(weights, step, j);
#pragma unroll
            for (int i = 0; i < fragments_v; ++i) {
                const fragment_a row = from_v.load(lds, slot, i * M, step * K);
#pragma unroll
                for (int j = 0; j < fragments_m; ++j) into[i][j].mma(row, columns[j]);
                settle_if(step + 1 == steps_n, i, into[i]);
            }
        }
    }

    /// Divides by the sums of weights, and writes whole rows by way of LDS.
    ROCM_SD_DEVICE void finish(T* out, int64 out_stride, int rows, int first_row) {
        softmax.sum_lanes();
        // The last products still read what is going to be overwritten.
        barrier();
        share(softmax.total, [](float a, float b) { return a + b; });
        softmax.each([&](int j, int which) { softmax.total[j][which] = reciprocal(softmax.total[j][which]); });
        each_sum([&](accumulator& sum, int j) {
#pragma unroll
            for (int e = 0; e < held::places::elements; ++e) sum.sums[e] *= softmax.total[j][e % held::columns];
        });
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
            rounded results;
            round(sums[p], results);
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
                if (p + pass > 0) barrier();
                if (passes == 1 || wave_row * wave_m / rows_at_once == pass) write_tile(results);
                barrier();
                write_rows(out, out_stride, rows, first_row, p, pass);
            }
        }
    }

    /// Chunks of neighbouring columns of the lane's queries.
    struct rounded {
        chunk_of<T> chunk[fragments_v / held::fragments][held::chunks][fragments_m][held::columns];
    };

    ROCM_SD_DEVICE static void round(const accumulator (&from)[fragments_v][fragments_m], rounded& into) {
        each_chunk([&](int i, int n, int j, int which) {
            into.chunk[i][n][j][which] = settled<T>(
                held::chunk(n, which, [&](int f) { return from[i * held::fragments + f][j].sums; }));
            // Rounding to bfloat16 is many instructions: those of one chunk at a time.
            __builtin_amdgcn_sched_barrier(0);
        });
    }

    ROCM_SD_DEVICE void write_tile(const rounded& results) const {
        const tile_o tile = at<tile_o>(0).from(wave_row * wave_m % rows_at_once);
        each_chunk([&](int i, int n, int j, int which) {
            const int chunk = (wave_column * wave_v + i * held::span) / 8 + held::number(lane, n);
            tile.store(j * M + held::column(lane, which), chunk, results.chunk[i][n][j][which]);
        });
    }

    /// visit(group of fragments, which chunk, fragment of queries, which of the lane's columns)
    template <typename Visit>
    ROCM_SD_DEVICE static void each_chunk(Visit visit) {
#pragma unroll
        for (int i = 0; i < fragments_v / held::fragments; ++i) {
#pragma unroll
            for (int n = 0; n < held::chunks; ++n) {
                softmax_of_wave::each([&](int j, int which) { visit(i, n, j, which); });
            }
        }
    }

    ROCM_SD_DEVICE void write_rows(T* out, int64 out_stride, int rows, int first_row, int p, int pass) const {
        const tile_o tile = at<tile_o>(0);
        for (int number = thread; number < rows_at_once * tile_o::chunks; number += threads) {
            const int within = number / tile_o::chunks, chunk = number % tile_o::chunks;
            const int row = pass * rows_at_once + within;
            if (row < rows && 8 * chunk < piece) {
                T* to = out + (first_row + row) * out_stride + p * piece + 8 * chunk;
                store<8>(to, tile.load(0, within, chunk));
            }
        }
    }
};

}  // namespace rocm_sd
