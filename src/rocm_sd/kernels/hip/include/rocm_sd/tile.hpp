// Tiles of 16-bit matrices in LDS, and the way there from global memory: in chunks of 16 bytes at every step.
#pragma once

#include "types.hpp"

namespace rocm_sd {

static_assert(this_arch::matrix != matrix_kind::none, "rocm_sd has no matrix kernels for this architecture");

/// Eight 16-bit values: what a lane moves at once.
template <typename T>
using chunk_of = vector_of<T, 8>;

template <typename T>
ROCM_SD_DEVICE unsigned bits_at(const T* from) {
    return *reinterpret_cast<const unsigned short*>(from);
}

/// Eight values, loaded one by one as their bits: read(i).
///
/// They stand in registers of their own until all are there. Left to itself the compiler loads the second half of a
/// register while the first is still on its way: hardware allows that, as loads arrive in order; the emulator does not.
/// It costs a wait for each chunk, which odd shapes can afford: their loads are narrow anyway.
template <typename T, typename Read>
ROCM_SD_DEVICE chunk_of<T> gather_chunk(Read read) {
    unsigned values[8];
    chunk_of<T> chunk;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = read(i);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        asm volatile("" : "+v"(values[i]));
        chunk[i] = __builtin_bit_cast(T, static_cast<unsigned short>(values[i]));
    }
    return chunk;
}

/// Eight values from `from` on, or the first `count` of them and zeros. Wide: `from` is aligned to 16 bytes, and all
/// eight are read whatever `count` is: a load without a mask waits for nothing. Otherwise one by one, at any address.
template <bool wide, typename T>
ROCM_SD_DEVICE chunk_of<T> load_chunk(const T* from, int count) {
    static_assert(sizeof(T) == 2, "a chunk is eight values of 16 bits");
    if constexpr (wide) {
        return load<8>(from);
    } else {
        return gather_chunk<T>([&](int i) { return i < count ? bits_at(from + i) : 0u; });
    }
}

/// The chunk, known to be complete at this place. Without it the compiler moves the work on a value into the branch
/// that stores it: each branch then waits for its own loads, and a wave that skips it loads into registers that are
/// still being filled. Hardware allows that, as loads arrive in order; the emulator does not.
template <typename T>
ROCM_SD_DEVICE chunk_of<T> settled(chunk_of<T> chunk) {
    auto bits = __builtin_bit_cast(vector_of<unsigned, 4>, chunk);
    asm volatile("" : "+v"(bits));
    return __builtin_bit_cast(chunk_of<T>, bits);
}

/// The first `count` values of a chunk. Wide: all eight, or none where `count` is 0.
template <bool wide, typename T>
ROCM_SD_DEVICE void store_chunk(T* to, chunk_of<T> chunk, int count) {
    chunk = settled<T>(chunk);
    if constexpr (wide) {
        store_if<8>(count > 0, to, chunk);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count) to[i] = chunk[i];
        }
    }
}

/// [Rows, Columns] in LDS. Chunk c of row r stands at c ^ (r / rows_per_line) within its row.
///
/// LDS has 32 banks of 4 bytes, so eight lanes of 16 bytes are served at once if they meet all eight places of a line
/// of 128 bytes. Fragments read one chunk of eight rows that follow one another; staging writes whole rows. In plain
/// rows the eight reads meet one place (or two, or four); exchanged like this, both meet all eight. Where the number of
/// chunks is no power of two, it is within the largest power of two that divides it that they are exchanged.
template <typename T, int Rows, int Columns>
struct lds_tile {
    static constexpr int rows = Rows, columns = Columns;
    static constexpr int chunks = Columns / 8;
    static constexpr int exchanged = smaller(chunks & -chunks, 8);
    static constexpr int rows_per_line = 8 / exchanged;
    static constexpr int bytes = Rows * Columns * static_cast<int>(sizeof(T));
    static_assert(Columns % 8 == 0, "a tile is made of chunks");

    chunk_of<T>* data;

    ROCM_SD_DEVICE static int place(int row, int chunk) {
        return row * chunks + (chunk ^ (row / rows_per_line % exchanged));
    }
    ROCM_SD_DEVICE void store(int row, int chunk, chunk_of<T> value) const { data[place(row, chunk)] = value; }

    /// Chunk of row base + row, where `base` is a multiple of eight and the same for all lanes. The exchange repeats
    /// after eight rows, so a constant base becomes an offset of the instruction: without that, every load of an
    /// unrolled loop keeps an address of its own in a register (96 of them in 64x64x64 on gfx1030).
    ROCM_SD_DEVICE chunk_of<T> load(int base, int row, int chunk) const {
        return (data + place(row, chunk))[base * chunks];
    }

    /// The same tile seen from row `base` on, a multiple of eight.
    ROCM_SD_DEVICE lds_tile from(int base) const { return {data + base * chunks}; }
};

/// Carries a tile from global memory to LDS in two steps, so that the products of one tile hide the loads of the next:
/// `fetch` starts the loads into registers, `commit` waits for them and writes them to LDS.
///
/// No load has a mask: under a mask each would wait for the one before. Beyond the edges the last row and the last
/// columns are read again. Products of such rows are not stored; such columns are cleared by `clear_from`.
template <typename Tile, typename T, int Threads, bool Wide>
struct stage {
    static constexpr int steps = Tile::rows * Tile::chunks / Threads;
    static_assert(steps * Threads == Tile::rows * Tile::chunks, "every thread carries the same number of chunks");
    static_assert(Threads % Tile::chunks == 0, "a thread's chunks stand in one column");

    chunk_of<T> held[steps];
    unsigned row_bytes[steps];  // 32 bits beside a base that all lanes share: one register and not two
    int first_row, chunk;

    /// The matrix has `rows` rows from the tile's first row on, `stride` values apart.
    ROCM_SD_DEVICE stage(int64 stride, int rows, int thread)
        : first_row(thread / Tile::chunks), chunk(thread % Tile::chunks) {
        const unsigned apart = static_cast<unsigned>(stride) * static_cast<unsigned>(sizeof(T));
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            row_bytes[step] = static_cast<unsigned>(smaller(row(step), rows - 1)) * apart;
        }
    }

    /// The rows of the tile stand anywhere: bytes_of(row) from the origin on.
    template <typename BytesOf>
    ROCM_SD_DEVICE stage(int thread, BytesOf bytes_of)
        : first_row(thread / Tile::chunks), chunk(thread % Tile::chunks) {
#pragma unroll
        for (int step = 0; step < steps; ++step) row_bytes[step] = bytes_of(row(step));
    }

    /// The matrix has `columns` columns from `origin` on, one at least (with Wide, eight).
    ROCM_SD_DEVICE void fetch(const T* origin, int columns) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            if constexpr (Wide) {
                held[step] = load<8>(at(origin, step, smaller(8 * chunk, columns - 8)));
            } else {
                held[step] = gather_chunk<T>(
                    [&](int i) { return bits_at(at(origin, step, smaller(8 * chunk + i, columns - 1))); });
            }
        }
    }

    /// Zeros from column `columns` on.
    ROCM_SD_DEVICE void clear_from(int columns) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                // With Wide, `columns` is a multiple of eight: one comparison for a chunk.
                if (8 * chunk + (Wide ? 0 : i) >= columns) held[step][i] = static_cast<T>(0.0f);
            }
        }
    }

    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int step = 0; step < steps; ++step) tile.store(row(step), chunk, held[step]);
    }

    /// Of the tile, which held[step] is a chunk of.
    ROCM_SD_DEVICE int row(int step) const { return first_row + step * (Threads / Tile::chunks); }

  private:
    ROCM_SD_DEVICE const T* at(const T* origin, int step, int column) const {
        const unsigned bytes = row_bytes[step] + static_cast<unsigned>(column) * static_cast<unsigned>(sizeof(T));
        return reinterpret_cast<const T*>(reinterpret_cast<const char*>(origin) + bytes);
    }
};

/// [Rows, Columns] of float32 sums in LDS, on their way from the layout of accumulators to rows.
///
/// A wave writes one value a lane, in 16 columns of 2 rows or 8 columns of 4; which rows depends on the architecture.
/// Exchanging runs of 8 columns by bits of the row keeps those rows in different banks: rows 2e and 2e + 1 (gfx11), e
/// and e + 8 (gfx12), e and e + 4 (MFMA 16x16), 4e to 4e + 3 (dot products). Lanes read eight columns each in two loads
/// of four; every other 32 columns, of every other row the others, exchange fours, so that eight lanes meet all banks
/// in either load, whether they read 64 columns of a row or 32 of two.
template <int Rows, int Columns>
struct sums_tile {
    static constexpr int bytes = Rows * Columns * 4;
    static_assert(Columns % 32 == 0 || Columns == 16, "fours are exchanged within 32 columns");

    float* data;

    ROCM_SD_DEVICE static int place(int row, int column) {
        // Two rows of 16 stand where one of 32 would.
        if constexpr (Columns == 16) return sums_tile<Rows / 2, 32>::place(row / 2, row % 2 * 16 + column);
        const int sixteen = (row ^ (row >> 2) ^ (row >> 3)) & 1, eight = (row >> 1) & 1;
        const int four = ((column >> 5) ^ row) & 1;
        return row * Columns + (column ^ (16 * sixteen + 8 * eight + 4 * four));
    }
    ROCM_SD_DEVICE void store(int row, int column, float value) const { data[place(row, column)] = value; }

    /// Four sums; the column is a multiple of four.
    ROCM_SD_DEVICE vector_of<float, 4> load4(int row, int column) const { return load<4>(data + place(row, column)); }

    /// Eight sums; the column is a multiple of eight.
    ROCM_SD_DEVICE vector_of<float, 8> load8(int row, int column) const {
        const vector_of<float, 4> low = load<4>(data + place(row, column));
        const vector_of<float, 4> high = load<4>(data + place(row, column + 4));
        return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    }
};

}  // namespace rocm_sd
