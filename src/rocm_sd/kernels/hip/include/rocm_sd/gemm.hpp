// The block-tiled product c = a @ b^T with an epilogue, a: [m, k], b: [n, k], rows of both with k side by side.
//
// 1. Each step of block_k values goes from global memory to registers while the step before is multiplied, then to LDS.
// 2. Each wave multiplies its own part of the tile, fragment by fragment, with float32 sums in registers.
// 3. The sums go through LDS into rows, so that the epilogue reads and writes global memory in whole cache lines, and
//    the epilogue gets eight neighbours of a row at once.
#pragma once

#include "fragment.hpp"
#include "tile.hpp"

namespace rocm_sd {

/// A workgroup computes block_m x block_n with waves_m x waves_n waves, in fragments of fragment_m x fragment_m.
/// stages: 2 keeps two steps in LDS and needs one barrier a step; 1 needs half the LDS and two barriers.
/// wide: every row of every operand begins at a multiple of 16 bytes, and k and n are multiples of eight.
template <int BlockM, int BlockN, int BlockK, int WavesM, int WavesN, int Stages, int FragmentM, bool Wide>
struct gemm_config {
    static constexpr int block_m = BlockM, block_n = BlockN, block_k = BlockK;
    static constexpr int waves_m = WavesM, waves_n = WavesN, stages = Stages, fragment_m = FragmentM;
    static constexpr bool wide = Wide;
    static_assert(Stages == 1 || Stages == 2, "one or two steps in LDS");
};

/// One factor: `rows` rows that begin `stride` values apart.
template <typename T>
struct factor {
    const T* data;
    int64 stride;
    int rows;
};

/// Eight sums of one row of c from `column` on, of which the first `count` are inside c. With gemm_config::wide, count
/// is 8 or 0, and where it is 0, row and column are those of another run, so that loads need no mask; stores do.
struct run_of_sums {
    int row, column, count;
};

/// Whether an epilogue takes its sums four by four: those that it writes as float32 are 16 bytes then, and lanes that
/// stand side by side fill whole cache lines. It says so by `static constexpr bool by_fours = true`.
template <typename Epilogue>
constexpr auto takes_fours(int) -> decltype(Epilogue::by_fours) {
    return Epilogue::by_fours;
}
template <typename Epilogue>
constexpr bool takes_fours(long) {
    return false;
}

/// The steps of a factor that lies in memory as rows. Another may come from elsewhere (conv.hpp) by the same four:
///     fetch()         starts the loads of the step that it stands at
///     advance()       stands at the next step
///     clear()         zeros where the fetched step has no values
///     commit(tile)    waits for the loads, and writes them to LDS
template <typename Tile, typename T, int Threads, bool Wide>
struct row_steps {
    stage<Tile, T, Threads, Wide> next;
    const T* from;
    int columns;  // from `from` on

    ROCM_SD_DEVICE row_steps(const factor<T>& of, int k, int first_row, int thread)
        : next(of.stride, of.rows - first_row, thread), from(of.data + first_row * of.stride), columns(k) {}

    /// Rows that stand anywhere: bytes_of(row of the tile) from `origin` on.
    template <typename BytesOf>
    ROCM_SD_DEVICE row_steps(const T* origin, int k, int thread, BytesOf bytes_of)
        : next(thread, bytes_of), from(origin), columns(k) {}

    ROCM_SD_DEVICE void fetch() { next.fetch(from, columns); }
    ROCM_SD_DEVICE void advance() {
        from += Tile::columns;
        columns -= Tile::columns;
    }
    ROCM_SD_DEVICE void clear() {
        if (columns < Tile::columns) next.clear_from(columns);
    }
    ROCM_SD_DEVICE void commit(const Tile& tile) const { next.commit(tile); }
};

/// Which tile a workgroup computes. Workgroups go down bands of `group_m` tiles: those that run at once share rows of a
/// and of b in the L2 cache.
ROCM_SD_DEVICE sum_place tile_of(int workgroup, int m_tiles, int n_tiles, int group_m) {
    const int band = workgroup / (group_m * n_tiles);
    const int height = smaller(m_tiles - band * group_m, group_m);
    const int within = workgroup % (group_m * n_tiles);
    return {band * group_m + within % height, within / height};
}

template <typename Arch, typename T, typename Config>
struct gemm {
    static constexpr int waves = Config::waves_m * Config::waves_n;
    static constexpr int threads = waves * Arch::wave_size;
    static constexpr int fragment_m = Config::fragment_m, step_k = fragment_k<Arch, fragment_m>();
    static constexpr int wave_m = Config::block_m / Config::waves_m, wave_n = Config::block_n / Config::waves_n;
    static constexpr int fragments_m = wave_m / fragment_m, fragments_n = wave_n / fragment_m;
    static_assert(fragments_m * fragment_m * Config::waves_m == Config::block_m, "block_m is made of fragments");
    static_assert(fragments_n * fragment_m * Config::waves_n == Config::block_n, "block_n is made of fragments");
    static_assert(Config::block_k % step_k == 0, "block_k is made of fragments");

    using tile_a = lds_tile<T, Config::block_m, Config::block_k>;
    using tile_b = lds_tile<T, Config::block_n, Config::block_k>;
    // The sums leave one row of fragments at a time, of all waves together.
    static constexpr int sums_rows = Config::waves_m * fragment_m;
    using tile_sums = sums_tile<sums_rows, Config::block_n>;

    static constexpr int stage_bytes = tile_a::bytes + tile_b::bytes;
    static constexpr int lds_bytes = larger(Config::stages * stage_bytes, tile_sums::bytes);
    static_assert(lds_bytes <= Arch::lds_bytes, "the tiles do not fit in LDS");

    using fragment_a = fragment<Arch, use::a, fragment_m, fragment_m, step_k, T>;
    using fragment_b = fragment<Arch, use::b, fragment_m, fragment_m, step_k, T>;
    using accumulator = fragment<Arch, use::accumulator, fragment_m, fragment_m, step_k, T>;

    template <typename Tile>
    using rows_of = row_steps<Tile, T, threads, Config::wide>;

    /// Computes the tile whose first row and column are given. For each run of eight sums of a row it calls
    ///     auto ahead = epilogue.fetch(at);     which reads what the epilogue needs, early, so that the wait is hidden
    ///     epilogue.store(at, sums, ahead);     with at: run_of_sums
    /// An epilogue that takes_fours gets runs of four instead.
    /// lds: `lds_bytes` bytes, aligned to 16.
    template <typename Epilogue>
    ROCM_SD_DEVICE static void run(
        const factor<T>& a, const factor<T>& b, int k, int first_row, int first_column, void* lds, Epilogue epilogue) {
        const int thread = thread_index();
        run_steps<1>(rows_of<tile_a>(a, k, first_row, thread), rows_of<tile_b>(b, k, first_column, thread),
                     ceil_div(k, Config::block_k), a.rows, b.rows, first_row, first_column, lds, epilogue);
    }

    /// The same of factors that come in `steps` steps of block_k values (see row_steps); c is [m, n].
    /// parts: 2 where the second half of the tile's columns belongs to the same n columns of c as the first half: then
    /// `first_column` counts columns of c, of which the tile has block_n / 2, and it is
    ///     epilogue.store(at, sums of the first half, sums of the second half, ahead)
    template <int parts, typename A, typename B, typename Epilogue>
    ROCM_SD_DEVICE static void run_steps(
        A a, B b, int steps, int m, int n, int first_row, int first_column, void* lds, Epilogue epilogue) {
        const int thread = thread_index();
        // The same for all lanes: said so, it and all that follows from it stay in scalar registers.
        const int wave = __builtin_amdgcn_readfirstlane(thread / Arch::wave_size);
        const position at{wave / Config::waves_n, wave % Config::waves_n, thread % Arch::wave_size};

        accumulator sums[fragments_m][fragments_n];
        for (auto& row : sums) {
            for (auto& sum : row) sum.clear();
        }
        accumulate(a, b, steps, static_cast<char*>(lds), at, sums);

        // The last products still read what the sums are going to overwrite.
        if (Config::stages == 2) barrier();
        constexpr int together = takes_fours<Epilogue>(0) ? 4 : 8;
        const auto inside = [&](int row, int column) {
            const int r = first_row + row, c = first_column + column;
            const int count = r < m ? larger(smaller(n - c, together), 0) : 0;
            return run_of_sums{smaller(r, m - 1), Config::wide ? smaller(c, n - together) : c, count};
        };
        finish<parts>(sums, tile_sums{static_cast<float*>(lds)}, at, thread, inside, epilogue);
    }

  private:
    struct position {
        int wave_row, wave_column, lane;
    };

    template <typename A, typename B>
    ROCM_SD_DEVICE static void accumulate(
        A& next_a, B& next_b, int steps, char* lds, position at, accumulator (&sums)[fragments_m][fragments_n]) {
        next_a.fetch();
        next_b.fetch();
        char* place = lds;
        for (int left_over = steps; left_over > 0; --left_over) {
            const tile_a left{reinterpret_cast<chunk_of<T>*>(place)};
            const tile_b right{reinterpret_cast<chunk_of<T>*>(place + tile_a::bytes)};
            next_a.clear();
            next_b.clear();
            next_a.commit(left);
            next_b.commit(right);
            barrier();
            if (left_over > 1) {
                next_a.advance();
                next_b.advance();
                next_a.fetch();
                next_b.fetch();
            }
            multiply(left.from(at.wave_row * wave_m), right.from(at.wave_column * wave_n), at.lane, sums);
            // Nobody may write where others still read. With two stages the next step writes the other buffer, and its
            // barrier stands before the step after it.
            if (Config::stages == 1) barrier();
            if (Config::stages == 2) place = place == lds ? lds + stage_bytes : lds;
        }
    }

    ROCM_SD_DEVICE static void multiply(
        const tile_a& left, const tile_b& right, int lane, accumulator (&sums)[fragments_m][fragments_n]) {
#pragma unroll
        for (int step = 0; step < Config::block_k; step += step_k) {
            fragment_a rows[fragments_m];
            fragment_b columns[fragments_n];
#pragma unroll
            for (int i = 0; i < fragments_m; ++i) {
                rows[i].load(left, i * fragment_m, step, lane);
            }
#pragma unroll
            for (int j = 0; j < fragments_n; ++j) {
                columns[j].load(right, j * fragment_m, step, lane);
            }
#pragma unroll
            for (int i = 0; i < fragments_m; ++i) {
#pragma unroll
                for (int j = 0; j < fragments_n; ++j) sums[i][j].mma(rows[i], columns[j]);
            }
            // Otherwise the compiler moves the loads of all steps to the front, and has no registers left.
            __builtin_amdgcn_sched_barrier(0);
        }
    }

    /// `inside(row, column)` is the run of sums at a row and column of the workgroup's tile.
    template <int parts, typename Inside, typename Epilogue>
    ROCM_SD_DEVICE static void finish(
        const accumulator (&sums)[fragments_m][fragments_n], const tile_sums& tile, position at, int thread,
        Inside inside, Epilogue epilogue) {
        constexpr int together = takes_fours<Epilogue>(0) ? 4 : 8;
        constexpr int runs = Config::block_n / parts / together, passes = sums_rows * runs / threads;
        static_assert(passes * threads == sums_rows * runs, "every thread takes the same number of runs");
#pragma unroll
        for (int i = 0; i < fragments_m; ++i) {
            const auto run = [&](int pass) {
                const int number = pass * threads + thread, row = number / runs;
                return inside(row / fragment_m * wave_m + i * fragment_m + row % fragment_m, number % runs * together);
            };
            typename Epilogue::fetched ahead[passes];
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) ahead[pass] = epilogue.fetch(run(pass));

            if (i > 0) barrier();
#pragma unroll
            for (int j = 0; j < fragments_n; ++j) {
                const int column = at.wave_column * wave_n + j * fragment_m;
                sums[i][j].store(tile, at.wave_row * fragment_m, column, at.lane);
            }
            barrier();
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
                const int number = pass * threads + thread, row = number / runs, column = number % runs * together;
                if constexpr (together == 4) {
                    static_assert(parts == 1, "two parts are taken eight by eight");
                    epilogue.store(run(pass), tile.load4(row, column), ahead[pass]);
                } else if constexpr (parts == 1) {
                    epilogue.store(run(pass), tile.load8(row, column), ahead[pass]);
                } else {
                    static_assert(parts == 2, "one or two parts");
                    epilogue.store(
                        run(pass), tile.load8(row, column), tile.load8(row, Config::block_n / 2 + column), ahead[pass]);
                }
            }
        }
    }
};

}  // namespace rocm_sd
