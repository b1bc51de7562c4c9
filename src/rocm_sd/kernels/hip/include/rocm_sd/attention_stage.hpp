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
/// The chunks of a row are exchanged by bits of the row alone, so those of another step of K stand at the first address
/// with some bits turned over, and whole lines further on: one exclusive-or, or none, for each load.
template <typename Fragment, typename Tile>
struct factor_reader {
    static constexpr int count = sizeof(Fragment) / 16;
    static constexpr int exchanged = smaller(Tile::chunks & -Tile::chunks, 8);
    unsigned first[count];

    /// The tile begins `byte` bytes into LDS, a multiple of 128.
    template <typename Place>
    ROCM_SD_DEVICE factor_reader(int byte, Place place) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const factor_place at = place(i);
            first[i] = static_cast<unsigned>(byte + 16 * (Tile::place(at.row, at.chunk) + at.base * Tile::chunks));
        }
    }

    /// Not known to be the same as before: see `unknown`.
    ROCM_SD_DEVICE factor_reader again() const {
        factor_reader other = *this;
#pragma unroll
        for (int i = 0; i < count; ++i) other.first[i] = detail::unknown(first[i]);
        return other;
    }

    /// From `row` rows and `k` values further on, and `skipped` bytes: multiples of 16, of the layout's K and of 128, and
    /// the same for all lanes.
    ROCM_SD_DEVICE Fragment load(const char* lds, int skipped, int row, int k) const {
        Fragment found;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const unsigned turned = first[i] ^ static_cast<unsigned>(k / 8 % exchanged * 16);
            const char* at = lds + turned + (skipped + 16 * (row * Tile::chunks + k / 8 / exchanged * exchanged));
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
/// Rows stand in the order in which the lanes' sums become chunks of neighbouring columns (sums_as_chunks::row), and the
/// keys of a chunk are those whose weights a lane holds.
///
/// Eight lanes read a chunk of eight rows, as in lds_tile. They write chunks of four (of keys) by two (of rows, whose
/// numbers differ in one bit): that bit must part the two halves of a line, and does so by itself or by exchange.
template <typename Arch, int M, typename T, int Rows, int Keys>
struct turned_tile {
    using held = sums_as_chunks<Arch, M, T>;
    static constexpr int rows = Rows, chunks = Keys / 8;
    static constexpr int rows_per_line = chunks < 8 ? 8 / chunks : 1;
    static constexpr int bytes = Rows * Keys * static_cast<int>(sizeof(T));
    static_assert(chunks == 4 || chunks % 8 == 0, "four chunks of keys are written at once");
    static_assert(Rows % held::span == 0, "rows become whole chunks");

    chunk_of<T>* data;

    ROCM_SD_DEVICE static int place(int row, int chunk) {
        const int apart = held::row(1, 0), parts = chunks < 8 ? 1 : 4;  // bits, as powers of two
        const int half = apart == parts ? 0 : 4 * (row / apart % 2);
        return (row * chunks + chunk) ^ (row / rows_per_line % (8 / rows_per_line)) ^ half;
    }
    ROCM_SD_DEVICE void store(int row, int chunk, chunk_of<T> value) const { data[place(row, chunk)] = value; }
    /// As in lds_tile; with the exchange of halves by rows of eight, `base` is a multiple of sixteen.
    ROCM_SD_DEVICE chunk_of<T> load(int base, int row, int chunk) const {
        return (data + place(row, chunk))[base * chunks];
    }
    ROCM_SD_DEVICE turned_tile from(int base) const { return {data + base * chunks}; }
};

/// A thread loads eight keys of eight columns, and turns them in registers.
template <typename Arch, typename T, typename Tile, int Columns, int Threads>
struct turning_stage {
    using held_rows = typename Tile::held;
    static constexpr int columns = Tile::rows / 8, all = columns * Tile::chunks;
    static_assert(all <= Threads, "a thread turns one block");

    /// Eight keys on their way. They are no part of the stage: what a loop carries from one block to the next keeps its
    /// registers all the way.
    struct eight_keys {
        chunk_of<T> key[8];
    };

    unsigned offset;
    int place;
    bool works, wave_works;

    ROCM_SD_DEVICE turning_stage(int row_bytes, int thread, int wave) {
        const int column = thread / 4 % columns;
        constexpr int group = held_rows::span / 8;
        const int chunk = thread % 4 + thread / (4 * columns) * 4;
        works = thread < all;
        wave_works = wave * Arch::wave_size < all;
        const int row = column / group * held_rows::span + held_rows::row(column % group, 0);
        place = Tile::place(row, chunk);
        const int key = chunk / group * held_rows::span + held_rows::row(chunk % group, 0);
        offset = works && 8 * column < Columns ? static_cast<unsigned>(key * row_bytes + column * 16) : beyond;
    }

    ROCM_SD_DEVICE void fetch(const buffer<Arch, T>& from, int row_bytes, int first_byte, eight_keys& into) const {
        const unsigned first = detail::unknown(offset) + static_cast<unsigned>(first_byte);
#pragma unroll
        for (int i = 0; i < 8; ++i) into.key[i] = anything();
        if (!wave_works) return;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            into.key[i] = from.load(first + static_cast<unsigned>(held_rows::row(0, i) * row_bytes));
        }
    }

    ROCM_SD_DEVICE void commit(const Tile& tile, const eight_keys& keys) const {
        if (!wave_works) return;
        const unsigned first = detail::unknown(static_cast<unsigned>(place));
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            // Two columns of the head at a time, and no sooner: the registers of those before are free again.
            unsigned both[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                both[i] = detail::unknown(__builtin_bit_cast(vector_of<unsigned, 4>, keys.key[i])[pair]);
            }
            vector_of<unsigned, 4> even, odd;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                even[i] = (both[2 * i] & 0xffffu) | (both[2 * i + 1] << 16);
                odd[i] = (both[2 * i] >> 16) | (both[2 * i + 1] & 0xffff0000u);
            }
            if (all % Arch::wave_size == 0 || works) {
                tile.data[at(first, 2 * pair)] = __builtin_bit_cast(chunk_of<T>, even);
                tile.data[at(first, 2 * pair + 1)] = __builtin_bit_cast(chunk_of<T>, odd);
            }
        }
    }

  private:
    /// The place of column i of the block. The bits of its row that i makes are none of those that the thread makes, so
    /// that each part of the row exchanges chunks by itself.
    ROCM_SD_DEVICE static unsigned at(unsigned first, int i) {
        return first ^ static_cast<unsigned>(Tile::place(held_rows::row(0, i), 0));
    }

    /// What happens to stand in registers: a value that costs no instruction, and is not that of the block before.
    ROCM_SD_DEVICE static chunk_of<T> anything() {
        vector_of<unsigned, 4> bits;
        asm volatile("" : "=v"(bits));
        return __builtin_bit_cast(chunk_of<T>, bits);
    }
};

}  // namespace rocm_sd
