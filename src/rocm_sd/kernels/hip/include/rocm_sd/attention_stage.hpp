// The way of queries, keys and values from global memory to LDS, the values turned on the way, and from there into
// fragments.
#pragma once

#include "buffer.hpp"
#include "softmax.hpp"

namespace rocm_sd {

namespace detail {

/// The value, but the compiler does not know it for the same in every block, nor may it move what follows to the front:
/// it would keep each address of an unrolled loop in a register, and all that was loaded.
ROCM_SD_DEVICE unsigned unknown(unsigned value) {
    asm volatile("" : "+v"(value));
    return value;
}

}  // namespace detail

/// Where a lane finds its chunks of a factor in LDS: `first`, in bytes, for the first rows and the first K values.
///
/// The chunks of a row are exchanged by bits of the row alone, so those of other rows and another step of K stand at
/// the first address with some bits turned over, and whole lines further on: one exclusive-or, or none, for each load.
template <typename Fragment, typename Tile>
struct factor_reader {
    static constexpr int count = sizeof(Fragment) / 16;
    unsigned first[count];

    /// The tile begins `byte` bytes into LDS, a multiple of 128.
    template <typename Place>
    ROCM_SD_DEVICE factor_reader(int byte, Place place) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const factor_place at = place(i);
            first[i] = static_cast<unsigned>(byte + 16 * Tile::place(at.base + at.row, at.chunk));
        }
    }

    /// Not known to be the same as before: see `unknown`.
    ROCM_SD_DEVICE factor_reader again() const {
        factor_reader other = *this;
#pragma unroll
        for (int i = 0; i < count; ++i) other.first[i] = detail::unknown(first[i]);
        return other;
    }

    /// From `row` rows and `k` values further on, and `skipped` bytes: multiples of 16, of the layout's K and of 128,
    /// and the same for all lanes.
    ROCM_SD_DEVICE Fragment load(const char* lds, int skipped, int row, int k) const {
        Fragment found;
        const int further = Tile::place(row, k / 8), turned_over = further % Tile::exchanged;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const unsigned turned = first[i] ^ static_cast<unsigned>(turned_over * 16);
            const char* at = lds + turned + (skipped + 16 * (further - turned_over));
            __builtin_memcpy(&found.chunks[i], __builtin_assume_aligned(at, 16), 16);
        }
        return found;
    }
};

/// The first `Columns` columns of rows of one head, to a tile that may have more: those become zeros, as do the rows
/// beyond the buffer. `fetch` starts the loads, `commit` waits for them and writes to LDS.
template <typename Arch, typename T, typename Tile, int Columns, int Threads>
struct row_stage {
    static constexpr int all = Tile::rows * Tile::chunks, steps = ceil_div(all, Threads);
    // A thread's chunks stand in one column, whole eights of rows apart: one address for all of them.
    static constexpr int rows_apart = Threads / Tile::chunks;
    static constexpr bool regular =
        Threads % Tile::chunks == 0 && rows_apart % 8 == 0 && all % Threads == 0 && Columns == Tile::columns;

    chunk_of<T> held[steps];
    unsigned offset[regular ? 1 : steps];
    int thread;

    ROCM_SD_DEVICE row_stage(int row_bytes, int thread) : thread(thread) {
#pragma unroll
        for (int step = 0; step < (regular ? 1 : steps); ++step) {
            const int number = step * Threads + thread, row = number / Tile::chunks, chunk = number % Tile::chunks;
            const bool inside = 8 * chunk < Columns && number < all;
            offset[step] = inside ? static_cast<unsigned>(row * row_bytes + chunk * 16) : beyond;
        }
    }

    ROCM_SD_DEVICE void fetch(const buffer<Arch, T>& from, int row_bytes, int first_byte) {
        const unsigned first = regular ? detail::unknown(offset[0]) : 0;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const unsigned at = regular ? first + static_cast<unsigned>(step * rows_apart * row_bytes) : offset[step];
            held[step] = from.load(at + static_cast<unsigned>(first_byte));
        }
    }

    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            if constexpr (regular) {
                tile.from(step * rows_apart).store(thread / Tile::chunks, thread % Tile::chunks, held[step]);
            } else {
                const int number = step * Threads + thread;
                const chunk_of<T> chunk = settled<T>(held[step]);
                if (all % Threads == 0 || number < all) {
                    tile.store(number / Tile::chunks, number % Tile::chunks, chunk);
                }
            }
        }
    }
};

/// Values turned: [Rows columns of the head, Keys] in LDS, for the left factor of v^T p^T.
///
/// Rows stand in the order in which the lanes' sums become chunks of neighbouring columns (sums_as_chunks::row), and
/// the keys of a chunk are those whose weights a lane holds.
///
/// Eight lanes read a chunk of eight rows that follow one another. Thirty-two lanes write the four pairs of keys of one
/// chunk of eight rows whose columns are eight apart, which differ in three bits of the row. Each bit of either kind
/// turns over one of the three bits of a place within a line, no two of a kind the same: all banks are met, both ways.
template <typename Arch, int M, typename T, int Rows, int Keys>
struct turned_tile {
    using held = sums_as_chunks<Arch, M, T>;
    static constexpr int rows = Rows, chunks = Keys / 8, exchanged = 8;
    static constexpr int bytes = Rows * Keys * static_cast<int>(sizeof(T));
    static_assert(chunks == 4 || chunks == 8, "a line is one row or two");
    static_assert(Rows % held::span == 0, "rows become whole chunks");

    chunk_of<T>* data;

    /// The row of the first of eight columns.
    ROCM_SD_DEVICE static int row_of(int eight) {
        constexpr int group = held::span / 8;
        return eight / group * held::span + held::row(eight % group, 0);
    }

    ROCM_SD_DEVICE static int place(int row, int chunk) {
        const int lowest[3] = {chunks == 8 ? 1 : 4, chunks == 8 ? 2 : 1, chunks == 8 ? 4 : 2};  // of bits 0, 1, 2
        int found = row * chunks + chunk, left = 7;
        found ^= row / 2 % 2 * lowest[1] ^ row / 4 % 2 * lowest[2];
        if (chunks == 8) found ^= row % 2;  // two rows in a line are parted by this bit as it is
#pragma unroll
        for (int i = 0; i < 3; ++i) {
#pragma unroll
            for (int low = 0; low < 3; ++low) left ^= row_of(1 << i) == 1 << low ? lowest[low] : 0;
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const int bit = row_of(1 << i), taken = bit >= 8 ? left & -left : 0;
            found ^= row / bit % 2 * taken;
            left ^= taken;
        }
        return found;
    }
};

/// A thread loads two keys of eight columns, and turns them in registers.
///
/// Eight lanes load one cache line, wherever in a line the row begins: rows of 160 bytes begin at any quarter of one.
/// If they counted from the row's first column, most rows would have a line that is asked for twice, for the end of one
/// eight and the begin of the next. They count in a circle: lanes before the first column take the last ones, so that
/// each column has its lane wherever the row begins. Of the bits that part the banks nothing changes: eight columns
/// that follow one another are still eight different ones, modulo eight.
template <typename Arch, typename T, typename Tile, int Columns, int Threads>
struct turning_stage {
    using held_rows = typename Tile::held;
    static constexpr int lines = ceil_div(Tile::rows, 64);  // eight lanes load 128 bytes of a row
    static constexpr int all = 32 * lines * Tile::chunks, steps = ceil_div(all, Threads);
    // One line is one instruction's in any order, and whole lines begin at a line.
    static constexpr bool circled = lines > 1 && Columns % 64 != 0;

    /// Keys on their way. They are no part of the stage: what a loop carries from one block to the next keeps its
    /// registers all the way.
    struct pairs {
        chunk_of<T> key[steps][2];
    };

    unsigned offset[steps], place[steps];

    /// `first` is the first value of the first row.
    ROCM_SD_DEVICE turning_stage(const T* first, int row_bytes, int thread) {
        const unsigned begin = static_cast<unsigned>(reinterpret_cast<__UINTPTR_TYPE__>(first));
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            constexpr int group = held_rows::span / 8;
            const int number = step * Threads + thread;
            const int pair = number / 8 % 4, chunk = number / (32 * lines);
            const int key = chunk / group * held_rows::span + held_rows::row(chunk % group, 2 * pair);
            int column = number % 8 + number / 32 % lines * 8;
            if constexpr (circled) {
                column -= static_cast<int>((begin + static_cast<unsigned>(key * row_bytes)) / 16 % 8);
                column += column < 0 ? 8 * lines : 0;
            }
            const bool inside = number < all && 8 * column < Tile::rows;
            const int to = 16 * Tile::place(Tile::row_of(column), chunk) + 4 * pair;
            const bool there = inside && 8 * column < Columns;
            offset[step] = there ? static_cast<unsigned>(key * row_bytes + column * 16) : beyond;
            place[step] = inside ? static_cast<unsigned>(to) : beyond;
        }
    }

    ROCM_SD_DEVICE void fetch(const buffer<Arch, T>& from, int row_bytes, int first_byte, pairs& into) const {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const unsigned first = detail::unknown(offset[step]) + static_cast<unsigned>(first_byte);
            into.key[step][0] = from.load(first);
            into.key[step][1] = from.load(first + static_cast<unsigned>(held_rows::row(0, 1) * row_bytes));
        }
    }

    /// The tile begins `byte` bytes into LDS.
    ROCM_SD_DEVICE void commit(char* lds, int byte, const pairs& keys) const {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const auto first = __builtin_bit_cast(words, settled<T>(keys.key[step][0]));
            const auto second = __builtin_bit_cast(words, settled<T>(keys.key[step][1]));
            const unsigned from = detail::unknown(place[step]);
            constexpr bool everybody = all % Threads == 0 && Tile::rows % 64 == 0;
            if (everybody || from != beyond) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    store_pair(lds, byte, from, 2 * i, (first[i] & 0xffffu) | (second[i] << 16));
                    store_pair(lds, byte, from, 2 * i + 1, (first[i] >> 16) | (second[i] & 0xffff0000u));
                }
            }
        }
    }

  private:
    using words = vector_of<unsigned, 4>;

    /// Column i of the eight. The bits of its row that i makes are none of those that the thread makes, so that each
    /// part of the row exchanges chunks by itself.
    ROCM_SD_DEVICE static void store_pair(char* lds, int byte, unsigned from, int i, unsigned pair) {
        const int further = Tile::place(held_rows::row(0, i), 0), turned_over = further % Tile::exchanged;
        char* to = lds + (from ^ static_cast<unsigned>(turned_over * 16)) + (byte + 16 * (further - turned_over));
        *reinterpret_cast<unsigned*>(to) = pair;
    }
};

}  // namespace rocm_sd
