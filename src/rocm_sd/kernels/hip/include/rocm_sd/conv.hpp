// Convolution as a product of matrices (gemm.hpp) whose left factor is never in memory: a row of it is one place of the
// filter, and its columns are the taps of the filter and, within a tap, the channels of x: [N, height, width,
// channels].
//
// window_steps: 16 bytes at a time, channels in multiples of eight. Steps go through the taps, and in a tap through its
//   channels, so that where a step stands is the same for all lanes.
// window_fours: 8 bytes at a time, channels in multiples of four. Steps go through taps and channels as one run of
//   values, so that a picture of 4 channels fills them.
// window_values: the same value by value, for any number of channels.
// filter_steps, filter_fours: the right factors for window_steps and window_fours, [Cout, taps, channels]; that of
//   window_values is a row_steps.
//
// Which taps of a row lie inside the picture is worked out once, as one bit for each: the loops have no division and
// compare no coordinates.
#pragma once

#include "gemm.hpp"

namespace rocm_sd {

/// A filter has rows x columns places on each picture, `stride` pixels apart; the first stands `above` pixels above the
/// picture and `before` pixels before it.
struct windows {
    int height, width, channels;
    int rows, columns;
    int stride, above, before;
};

/// Bytes within which a tile's pixels lie from the first of them on: the launcher sees to it. Twice as far is outside,
/// even with a row before the first pixel added to it.
constexpr int window_reach = 1 << 30;
constexpr unsigned nowhere = 2u << 30;

/// The rows of the left factor that a thread carries. Padded: some taps may lie outside the picture.
template <typename Tile, typename T, int Threads, int Kernel, bool Padded>
struct window_rows {
    static constexpr int taps = Kernel * Kernel;
    static constexpr int held_rows = Tile::rows * Tile::chunks / Threads;
    static constexpr int bits_together = 32 / taps;  // rows whose bits share a register
    static_assert(held_rows * Threads == Tile::rows * Tile::chunks, "every thread carries the same number of chunks");
    static_assert(Threads % Tile::chunks == 0, "a thread's chunks stand in one column");

    const T* base;              // a pixel of x at or before all that the rows read
    unsigned bytes[held_rows];  // from there to the first tap, which may lie before it: sums of them wrap around
    unsigned bits[ceil_div(held_rows, bits_together)];
    unsigned pixel_bytes, line_bytes;
    int first_row, chunk;

    /// The tile begins with place `first` of `places`, which are counted through all pictures.
    ROCM_SD_DEVICE window_rows(const T* x, const windows& of, int places, int first, int thread)
        : pixel_bytes(of.channels * static_cast<int>(sizeof(T))),
          line_bytes(of.width * pixel_bytes),
          first_row(thread / Tile::chunks),
          chunk(thread % Tile::chunks) {
        const unsigned per_picture = of.rows * of.columns, columns = of.columns;
        const unsigned picture = static_cast<unsigned>(first) / per_picture;
        const int first_line = static_cast<int>((first - picture * per_picture) / columns) * of.stride - of.above;
        // 64 bits only here: it is the same for all lanes.
        const int64 line = static_cast<int64>(picture) * of.height + smaller(larger(first_line, 0), of.height - 1);
        base = x + line * of.width * of.channels;
        for (auto& some : bits) some = 0;
#pragma unroll
        for (int held = 0; held < held_rows; ++held) {
            // Beyond the last place it is computed again, and not stored.
            const unsigned place = smaller(first + row(held), places - 1);
            const unsigned its_picture = place / per_picture, within = place - its_picture * per_picture;
            const unsigned down = within / columns;
            const int y = static_cast<int>(down) * of.stride - of.above;
            const int x_of_first = static_cast<int>(within - down * columns) * of.stride - of.before;
            const int lines = static_cast<int>(its_picture) * of.height + y - static_cast<int>(line);
            bytes[held] = static_cast<unsigned>(lines) * line_bytes + static_cast<unsigned>(x_of_first) * pixel_bytes;
            if constexpr (Padded) {
                unsigned found = 0;
#pragma unroll
                for (int tap = 0; tap < taps; ++tap) {
                    const bool in_height = static_cast<unsigned>(y + tap / Kernel) < static_cast<unsigned>(of.height);
                    const bool in_width =
                        static_cast<unsigned>(x_of_first + tap % Kernel) < static_cast<unsigned>(of.width);
                    found |= in_height && in_width ? 1u << tap : 0u;
                }
                bits[held / bits_together] |= found << (held % bits_together * taps);
            }
        }
    }

    ROCM_SD_DEVICE int row(int held) const { return first_row + held * (Threads / Tile::chunks); }
    ROCM_SD_DEVICE bool inside(int held, int tap) const {
        return !Padded || (bits[held / bits_together] >> (held % bits_together * taps + tap) & 1u) != 0;
    }
};

/// Sixteen bytes at a time; the number of channels is a multiple of eight.
template <typename Tile, typename T, int Threads, int Kernel, bool Padded>
struct window_steps {
    using rows_type = window_rows<Tile, T, Threads, Kernel, Padded>;

    rows_type rows;
    chunk_of<T> held[rows_type::held_rows];
    int channels, left;       // of a pixel; from this step on
    int tap = 0, across = 0;  // the tap, and how many of its line stand before it
    unsigned tap_bytes = 0;   // from the first tap to this one

    ROCM_SD_DEVICE window_steps(const T* x, const windows& of, int places, int first, int thread)
        : rows(x, of, places, first, thread), channels(of.channels), left(of.channels) {}

    /// Stands at step `number`, counted from the first tap on.
    ROCM_SD_DEVICE void begin_at(int number) {
        const int of_tap = ceil_div(channels, Tile::columns);
        tap = number / of_tap;
        across = tap % Kernel;
        tap_bytes = across * rows.pixel_bytes + tap / Kernel * rows.line_bytes;
        left -= number % of_tap * Tile::columns;
    }

    /// Through a buffer descriptor: what lies beyond its end reads as zeros, with no mask and nothing to clear. That is
    /// where the taps outside the picture are sent, and the columns beyond the channels.
    ROCM_SD_DEVICE void fetch() {
        const auto memory = __builtin_amdgcn_make_buffer_rsrc(
            const_cast<T*>(rows.base), 0, window_reach, this_arch::buffer_word);
        const int before = (channels - left) * static_cast<int>(sizeof(T));
        const unsigned of_tap =
            8 * rows.chunk < left ? tap_bytes + 8 * rows.chunk * static_cast<unsigned>(sizeof(T)) : nowhere;
#pragma unroll
        for (int i = 0; i < rows_type::held_rows; ++i) {
            const unsigned bytes = rows.inside(i, tap) ? rows.bytes[i] + of_tap : nowhere;
            held[i] = __builtin_bit_cast(chunk_of<T>, __builtin_amdgcn_raw_buffer_load_b128(memory, bytes, before, 0));
        }
    }

    ROCM_SD_DEVICE void advance() {
        left -= Tile::columns;
        if (left > 0) return;
        left = channels;
        ++tap;
        ++across;
        tap_bytes += rows.pixel_bytes;
        if (across == Kernel) {
            across = 0;
            tap_bytes += rows.line_bytes - Kernel * rows.pixel_bytes;
        }
    }

    ROCM_SD_DEVICE void clear() {}

    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int i = 0; i < rows_type::held_rows; ++i) tile.store(rows.row(i), rows.chunk, held[i]);
    }
};

/// The filters for window_steps: rows of [taps, channels], in which each tap ends with a step of its own.
template <typename Tile, typename T, int Threads>
struct filter_steps {
    stage<Tile, T, Threads, true> next;
    const T* from;
    int channels, left;  // of a tap; from `from` on

    ROCM_SD_DEVICE filter_steps(const factor<T>& of, int channels_of_tap, int first_row, int thread)
        : next(of.stride, of.rows - first_row, thread),
          from(of.data + first_row * of.stride),
          channels(channels_of_tap),
          left(channels_of_tap) {}

    ROCM_SD_DEVICE void begin_at(int number) {
        const int of_tap = ceil_div(channels, Tile::columns), done = number % of_tap * Tile::columns;
        from += number / of_tap * channels + done;
        left -= done;
    }
    ROCM_SD_DEVICE void fetch() { next.fetch(from, left); }
    ROCM_SD_DEVICE void advance() {
        from += smaller(Tile::columns, left);
        left -= Tile::columns;
        if (left <= 0) left = channels;
    }
    ROCM_SD_DEVICE void clear() {
        if (left < Tile::columns) next.clear_from(left);
    }
    ROCM_SD_DEVICE void commit(const Tile& tile) const { next.commit(tile); }
};

/// Two runs of four values, 8 bytes each, of which either may lie beyond the buffer and reads as zeros.
template <typename T>
ROCM_SD_DEVICE chunk_of<T> load_fours(const T* base, unsigned first, unsigned second) {
    const auto memory = __builtin_amdgcn_make_buffer_rsrc(
        const_cast<T*>(base), 0, window_reach, this_arch::buffer_word);
    const auto low = __builtin_amdgcn_raw_buffer_load_b64(memory, first, 0, 0);
    const auto high = __builtin_amdgcn_raw_buffer_load_b64(memory, second, 0, 0);
    return __builtin_bit_cast(chunk_of<T>, __builtin_shufflevector(low, high, 0, 1, 2, 3));
}

/// Eight bytes at a time; the number of channels is a multiple of four, so that four values are of one pixel. Sixteen
/// bytes of a pixel of four channels would be two pixels, and each may lie outside the picture by itself.
template <typename Tile, typename T, int Threads, int Kernel, bool Padded>
struct window_fours {
    using rows_type = window_rows<Tile, T, Threads, Kernel, Padded>;

    rows_type rows;
    chunk_of<T> held[rows_type::held_rows];
    int channels, done = 0;  // of a pixel; values of the depth before this step

    ROCM_SD_DEVICE window_fours(const T* x, const windows& of, int places, int first, int thread)
        : rows(x, of, places, first, thread), channels(of.channels) {}

    ROCM_SD_DEVICE void fetch() {
        unsigned offset[2];
        int tap[2];
        const int depth = channels * rows_type::taps;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = done + 8 * rows.chunk + 4 * half;
            const unsigned within = static_cast<unsigned>(smaller(at, depth - 4));
            tap[half] = static_cast<int>(within / static_cast<unsigned>(channels));
            // The pixels of a line of taps follow one another, channels and all.
            const unsigned lines = static_cast<unsigned>(tap[half]) / Kernel;
            const unsigned bytes = static_cast<unsigned>(at) * static_cast<unsigned>(sizeof(T)) +
                                   lines * (rows.line_bytes - Kernel * rows.pixel_bytes);
            offset[half] = at < depth ? bytes : nowhere;
        }
#pragma unroll
        for (int row = 0; row < rows_type::held_rows; ++row) {
            const auto place = [&](int half) {
                const bool there = rows.inside(row, tap[half]) && offset[half] != nowhere;
                return there ? rows.bytes[row] + offset[half] : nowhere;
            };
            held[row] = load_fours(rows.base, place(0), place(1));
        }
    }

    ROCM_SD_DEVICE void advance() { done += Tile::columns; }
    ROCM_SD_DEVICE void clear() {}
    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int row = 0; row < rows_type::held_rows; ++row) tile.store(rows.row(row), rows.chunk, held[row]);
    }
};

/// The filters for window_fours: rows of any multiple of four values, and zeros beyond them.
template <typename Tile, typename T, int Threads>
struct filter_fours {
    static constexpr int held_rows = Tile::rows * Tile::chunks / Threads;

    chunk_of<T> held[held_rows];
    const T* base;
    int row_bytes, rows, depth, thread, done = 0;  // values of the depth before this step

    ROCM_SD_DEVICE filter_fours(const factor<T>& of, int depth, int first_row, int thread)
        : base(of.data + first_row * of.stride),
          row_bytes(static_cast<int>(of.stride) * static_cast<int>(sizeof(T))),
          rows(of.rows - first_row),
          depth(depth),
          thread(thread) {}

    ROCM_SD_DEVICE void fetch() {
        const int at = done + thread % Tile::chunks * 8;
#pragma unroll
        for (int i = 0; i < held_rows; ++i) {
            // Beyond the last row it is read again, and its products are not stored.
            const int bytes = smaller(row(i), rows - 1) * row_bytes + at * static_cast<int>(sizeof(T));
            const auto place = [&](int four) {
                return at + four < depth ? static_cast<unsigned>(bytes + four * static_cast<int>(sizeof(T))) : nowhere;
            };
            held[i] = load_fours(base, place(0), place(4));
        }
    }

    ROCM_SD_DEVICE void advance() { done += Tile::columns; }
    ROCM_SD_DEVICE void clear() {}
    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int i = 0; i < held_rows; ++i) tile.store(row(i), thread % Tile::chunks, held[i]);
    }

  private:
    ROCM_SD_DEVICE int row(int i) const { return thread / Tile::chunks + i * (Threads / Tile::chunks); }
};

/// Value by value; any number of channels.
template <typename Tile, typename T, int Threads, int Kernel, bool Padded>
struct window_values {
    using rows_type = window_rows<Tile, T, Threads, Kernel, Padded>;

    rows_type rows;
    chunk_of<T> held[rows_type::held_rows];
    int channels, done = 0;  // of a pixel; values of the depth before this step

    ROCM_SD_DEVICE window_values(const T* x, const windows& of, int places, int first, int thread)
        : rows(x, of, places, first, thread), channels(of.channels) {}

    ROCM_SD_DEVICE void fetch() {
        unsigned offset[8];
        int tap[8];
        const int depth = channels * rows_type::taps;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned at = smaller(done + 8 * rows.chunk + i, depth - 1);
            tap[i] = static_cast<int>(at / static_cast<unsigned>(channels));
            const unsigned line = static_cast<unsigned>(tap[i]) / Kernel;
            // The pixels of a line of taps follow one another, channels and all.
            offset[i] = at * static_cast<unsigned>(sizeof(T)) + line * (rows.line_bytes - Kernel * rows.pixel_bytes);
        }
#pragma unroll
        for (int row = 0; row < rows_type::held_rows; ++row) {
            held[row] = gather_chunk<T>([&](int i) {
                const bool inside = rows.inside(row, tap[i]);
                // No load has a mask: what lies outside reads `base`, which is a pixel of x.
                const unsigned bytes = inside ? rows.bytes[row] + offset[i] : 0u;
                const char* from = reinterpret_cast<const char*>(rows.base) + bytes;
                const unsigned value = bits_at(reinterpret_cast<const T*>(from));
                return inside && done + 8 * rows.chunk + i < depth ? value : 0u;
            });
        }
    }

    ROCM_SD_DEVICE void advance() { done += Tile::columns; }
    ROCM_SD_DEVICE void clear() {}
    ROCM_SD_DEVICE void commit(const Tile& tile) const {
#pragma unroll
        for (int row = 0; row < rows_type::held_rows; ++row) tile.store(rows.row(row), rows.chunk, held[row]);
    }
};

/// Which steps of the depth a workgroup does: all of them, or one part of several.
struct step_range {
    int first, count;
};

/// One tile of a convolution: Product is a gemm. Loads: of a chunk, 1 where the channels of x are a multiple of eight,
/// and x and the filters begin at multiples of 16 bytes; 2 where it is four, and 8 bytes; else 0, value by value.
/// Product's own `wide` says the first of what the epilogue reads and writes.
template <typename Product, typename T, int Kernel, bool Padded, int Loads>
struct convolution {
    using tile_a = typename Product::tile_a;
    using tile_b = typename Product::tile_b;
    static constexpr int threads = Product::threads, block_k = tile_a::columns, taps = Kernel * Kernel;

    ROCM_SD_DEVICE static int steps(int channels) {
        return Loads == 1 ? taps * ceil_div(channels, block_k) : ceil_div(taps * channels, block_k);
    }

    /// filters: rows of [Kernel, Kernel, channels].
    template <typename Epilogue>
    ROCM_SD_DEVICE static void run(
        const T* x, const windows& of, int places, const factor<T>& filters, int first_place, int first_filter,
        void* lds, Epilogue epilogue) {
        run_part(x, of, places, filters, first_place, first_filter, {0, steps(of.channels)}, lds, epilogue);
    }

    template <typename Epilogue>
    ROCM_SD_DEVICE static void run_part(
        const T* x, const windows& of, int places, const factor<T>& filters, int first_place, int first_filter,
        step_range range, void* lds, Epilogue epilogue) {
        const int thread = thread_index();
        const auto multiply = [&](auto left, auto right) {
            Product::template run_steps<1>(
                left, right, range.count, places, filters.rows, first_place, first_filter, lds, epilogue);
        };
        if constexpr (Loads == 1) {
            window_steps<tile_a, T, threads, Kernel, Padded> left(x, of, places, first_place, thread);
            filter_steps<tile_b, T, threads> right(filters, of.channels, first_filter, thread);
            left.begin_at(range.first);
            right.begin_at(range.first);
            multiply(left, right);
        } else if constexpr (Loads == 2) {
            window_fours<tile_a, T, threads, Kernel, Padded> left(x, of, places, first_place, thread);
            filter_fours<tile_b, T, threads> right(filters, taps * of.channels, first_filter, thread);
            left.done = right.done = range.first * block_k;
            multiply(left, right);
        } else {
            window_values<tile_a, T, threads, Kernel, Padded> left(x, of, places, first_place, thread);
            row_steps<tile_b, T, threads, false> right(filters, taps * of.channels, first_filter, thread);
            left.done += range.first * block_k;
            right.from += range.first * block_k;
            right.columns -= range.first * block_k;
            multiply(left, right);
        }
    }
};

}  // namespace rocm_sd
