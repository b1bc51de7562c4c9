// y: [N, Q, P] from x: [N, P, Q], both contiguous: between contiguous [N, C, H, W] and channels-last.
//
// layout_copy_wide: a thread turns a block of 16-byte rows in registers, 8 x 8 halves or 4 x 4 floats, with one byte
// permutation for two values where going through LDS value by value would take two LDS instructions. 8 x 8 threads
// make a tile, whose rows are whole cache lines of 128 bytes in x and in y. A wave of 64 holds a whole tile, so it
// stores from registers. A wave of 32 holds half of one: its rows of y would be half lines, so blocks change hands in
// LDS, 16 bytes at a time. P and Q are multiples of the block, and the tensors are aligned to 16 bytes.
//
// layout_copy_few: CHANNELS of at most 8, as latents and pictures have. Both sides move in 16-byte accesses one after
// another, and values find their places in LDS. The number of pixels is a multiple of 16 bytes. LAST is 1 towards
// channels-last, and 0 from there.
//
// layout_copy_plain: any size, one value a thread at a time, through LDS.
//
// Parameters: ELEMENT, bits16 or bits32; CHANNELS and LAST, any where the kernel is another. Grid: (tiles of x along Q
// fastest, or blocks of pixels; N).
#include <rocm_sd/types.hpp>

namespace rocm_sd {

constexpr int tile_threads = 64;
constexpr int side = 8;  // threads along each side of a tile

struct place {
    int first_p, first_q;
};

template <int tile>
ROCM_SD_DEVICE place tile_of_block(int Q) {
    // Neighbours read one after another along a row of the source.
    const int across = ceil_div(Q, tile);
    return {block_x() / across * tile, block_x() % across * tile};
}

template <typename Arch, typename T>
ROCM_SD_DEVICE void copy_wide(const T* x, T* y, int P, int Q) {
    constexpr int n = widest<T>;
    constexpr int tile = side * n;
    const place at = tile_of_block<tile>(Q);
    const int64 item = static_cast<int64>(block_y()) * P * Q;
    x += item + static_cast<int64>(at.first_p) * Q + at.first_q;
    y += item + static_cast<int64>(at.first_q) * P + at.first_p;
    const int rows = P - at.first_p, columns = Q - at.first_q;

    // Eight neighbouring threads read one line.
    const int block_q = thread_index() % side, block_p = thread_index() / side;
    const bool inside = block_p * n < rows && block_q * n < columns;
    vector_of<T, n> in[n], turned[n];
#pragma unroll
    for (int i = 0; i < n; ++i) in[i] = load_if<n>(inside, x + (block_p * n + i) * Q + block_q * n);
    transpose<n>(in, turned);

    if constexpr (Arch::wave_size == tile_threads) {
#pragma unroll
        for (int j = 0; j < n; ++j) store_if<n>(inside, y + (block_q * n + j) * P + block_p * n, turned[j]);
    } else {
        // Half of the blocks' rows at a time: the whole tile at once would take LDS from half of the other waves.
        constexpr int rounds = 2, at_once = n / rounds;
        ROCM_SD_SHARED static vector_of<T, n> exchange[side * at_once][side];
        const int out_p = thread_index() % side, out_q = thread_index() / side;
        const bool out_inside = out_p * n < rows && out_q * n < columns;
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            if (round > 0) barrier();
            // Eight neighbours write eight rows: the column turns with the row, so that they meet in no bank.
#pragma unroll
            for (int j = 0; j < at_once; ++j)
                exchange[block_q * at_once + j][block_p ^ block_q] = turned[round * at_once + j];
            barrier();
#pragma unroll
            for (int j = 0; j < at_once; ++j)
                store_if<n>(out_inside, y + (out_q * n + round * at_once + j) * P + out_p * n,
                            exchange[out_q * at_once + j][out_p ^ out_q]);
        }
    }
}

constexpr int few_threads = 128;
constexpr int few_pixels = 512;

// f(place) for every n-th place below `count`, of which there are at most `most`, shared out among the threads.
template <int most, int n, typename F>
ROCM_SD_DEVICE void for_each_vector(int count, F f) {
#pragma unroll
    for (int i = 0; i < ceil_div(most / n, few_threads); ++i) {
        const int place = (i * few_threads + thread_index()) * n;
        if (place < count) f(place);
    }
}

template <typename T, int channels, bool last>
ROCM_SD_DEVICE void copy_few(const T* x, T* y, int HW) {
    constexpr int n = widest<T>, most = few_pixels * channels;
    // Rows begin 16 bytes later in the banks than the row above.
    alignas(16) ROCM_SD_SHARED static T planes[channels][few_pixels + n];
    const int first = block_x() * few_pixels;
    const int pixels = smaller(few_pixels, HW - first);
    const int64 item = static_cast<int64>(block_y()) * HW * channels;
    const T* from = x + item;
    T* to = y + item;

    // Value `place` of the block side by side: channel place % channels of pixel place / channels.
    if constexpr (last) {
        for_each_vector<most, n>(most, [&](int place) {
            const int c = place / few_pixels, pixel = place % few_pixels;
            if (pixel < pixels) store<n>(&planes[c][pixel], load<n>(from + (c * HW + first + pixel)));
        });
        barrier();
        for_each_vector<most, n>(pixels * channels, [&](int place) {
            vector_of<T, n> value;
#pragma unroll
            for (int i = 0; i < n; ++i) value[i] = planes[(place + i) % channels][(place + i) / channels];
            store<n>(to + (first * channels + place), value);
        });
    } else {
        for_each_vector<most, n>(pixels * channels, [&](int place) {
            const vector_of<T, n> value = load<n>(from + (first * channels + place));
#pragma unroll
            for (int i = 0; i < n; ++i) planes[(place + i) % channels][(place + i) / channels] = value[i];
        });
        barrier();
        for_each_vector<most, n>(most, [&](int place) {
            const int c = place / few_pixels, pixel = place % few_pixels;
            if (pixel < pixels) store<n>(to + (c * HW + first + pixel), load<n>(&planes[c][pixel]));
        });
    }
}

constexpr int plain_threads = 256;
constexpr int plain_tile = 32;

template <typename T>
ROCM_SD_DEVICE void copy_plain(const T* x, T* y, int P, int Q) {
    const place at = tile_of_block<plain_tile>(Q);
    const int64 item = static_cast<int64>(block_y()) * P * Q;
    x += item + static_cast<int64>(at.first_p) * Q + at.first_q;
    y += item + static_cast<int64>(at.first_q) * P + at.first_p;
    const int rows = P - at.first_p, columns = Q - at.first_q;
    const int column = thread_index() % plain_tile, first_row = thread_index() / plain_tile;
    constexpr int step = plain_threads / plain_tile;

    // Rows are a bank longer than a tile, so that a column crosses every bank.
    ROCM_SD_SHARED static T exchange[plain_tile][plain_tile + 4 / sizeof(T)];
#pragma unroll
    for (int row = 0; row < plain_tile; row += step) {
        const int p = row + first_row;
        if (p < rows && column < columns) exchange[p][column] = x[p * Q + column];
    }
    barrier();
#pragma unroll
    for (int row = 0; row < plain_tile; row += step) {
        const int q = row + first_row;
        if (q < columns && column < rows) y[q * P + column] = exchange[column][q];
    }
}

using element = ROCM_SD_ELEMENT;

ROCM_SD_KERNEL(tile_threads)
layout_copy_wide(const element* x, element* y, int P, int Q) { copy_wide<this_arch>(x, y, P, Q); }

ROCM_SD_KERNEL(few_threads)
layout_copy_few(const element* x, element* y, int HW) { copy_few<element, ROCM_SD_CHANNELS, ROCM_SD_LAST>(x, y, HW); }

ROCM_SD_KERNEL(plain_threads)
layout_copy_plain(const element* x, element* y, int P, int Q) { copy_plain(x, y, P, Q); }

}  // namespace rocm_sd
