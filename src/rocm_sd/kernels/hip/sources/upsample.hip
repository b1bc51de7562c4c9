// y: [N, SCALE * H, SCALE * W, C] from x: [N, H, W, C], both dense: nearest, or bilinear with the border's own pixels
// beyond the border.
//
// A thread takes WIDTH channels of one pixel of x and makes all of its SCALE * SCALE children: x is read once, and with
// bilinear its neighbours come from the cache.
//
// Parameters: ELEMENT (bits16 or bits32 for nearest); WIDTH, which divides C; SCALE; BILINEAR. Grid: (blocks of a row,
// H, N).
#include <rocm_sd/types.hpp>

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
constexpr int threads = 128;

struct position {
    int w, c;
};

template <int n>
ROCM_SD_DEVICE position position_in_row(int C) {
    const unsigned at = block_x() * threads + thread_index(), vectors = C / n;
    return {static_cast<int>(at / vectors), static_cast<int>(at % vectors) * n};
}

template <typename T, int n, int scale>
ROCM_SD_DEVICE void nearest(const T* x, T* y, int C, int H, int W) {
    const position at = position_in_row<n>(C);
    if (at.w >= W) return;
    // 64 bits only in the bases, which are the same for all threads.
    const int64 row = static_cast<int64>(block_z()) * H + block_y();
    const vector_of<T, n> value = load<n>(x + row * W * C + (at.w * C + at.c));
    T* child = y + row * scale * scale * W * C;
#pragma unroll
    for (int i = 0; i < scale; ++i) {
#pragma unroll
        for (int j = 0; j < scale; ++j)
            store<n>(child + (i * scale * W * C + (at.w * scale + j) * C + at.c), value);
    }
}

// Child i of a pixel stands (i + 0.5) / scale - 0.5 away from it, between -0.5 and 0.5: it mixes two neighbours, of
// which the second counts `weight`.
template <int scale>
struct child_of {
    int i;
    ROCM_SD_DEVICE constexpr bool before() const { return 2 * i + 1 < scale; }
    ROCM_SD_DEVICE constexpr float weight() const {
        return static_cast<float>(2 * i + 1 + (before() ? scale : -scale)) / (2 * scale);
    }
};

template <int n>
ROCM_SD_DEVICE vector_of<float, n> mix(vector_of<float, n> a, vector_of<float, n> b, float weight) {
    return a * (1.0f - weight) + b * weight;
}

template <typename T, int n, int scale>
ROCM_SD_DEVICE void bilinear(const T* x, T* y, int C, int H, int W) {
    using floats = vector_of<float, n>;
    const position at = position_in_row<n>(C);
    if (at.w >= W) return;
    const int h = block_y();
    const int64 item = static_cast<int64>(block_z()) * H;
    const int rows[3] = {larger(h - 1, 0), h, smaller(h + 1, H - 1)};
    const int columns[3] = {larger(at.w - 1, 0), at.w, smaller(at.w + 1, W - 1)};
    vector_of<T, n> around[3][3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
        for (int j = 0; j < 3; ++j) around[i][j] = load<n>(x + (item + rows[i]) * W * C + (columns[j] * C + at.c));
    }
    T* child = y + (item + h) * scale * scale * W * C;
#pragma unroll
    for (int i = 0; i < scale; ++i) {
        const child_of<scale> down{i};
        const int upper = down.before() ? 0 : 1;
        floats mixed[3];
#pragma unroll
        for (int j = 0; j < 3; ++j)
            mixed[j] = mix<n>(convert<float>(around[upper][j]), convert<float>(around[upper + 1][j]), down.weight());
#pragma unroll
        for (int j = 0; j < scale; ++j) {
            const child_of<scale> across{j};
            const int left = across.before() ? 0 : 1;
            const floats value = mix<n>(mixed[left], mixed[left + 1], across.weight());
            store<n>(child + (i * scale * W * C + (at.w * scale + j) * C + at.c), convert<T>(value));
        }
    }
}

ROCM_SD_KERNEL(threads)
upsample(const element* x, element* y, int C, int H, int W) {
    if constexpr (ROCM_SD_BILINEAR) {
        bilinear<element, ROCM_SD_WIDTH, ROCM_SD_SCALE>(x, y, C, H, W);
    } else {
        nearest<element, ROCM_SD_WIDTH, ROCM_SD_SCALE>(x, y, C, H, W);
    }
}

}  // namespace rocm_sd
