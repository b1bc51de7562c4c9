// y = silu(group_norm(x + add)), x: [N, HW, C] dense.
//
// Where a group fits the registers of one workgroup, `whole` does it in one pass over x. Else there are two:
//   `moments`  mean and sum of squared differences of each channel over a slice of rows (Welford: no cancellation)
//   `fold`     merges the slices and the channels of a group into one mean and one scale for each channel
//   `apply`    silu((x + add - mean) * scale + bias): the difference first, since a spread far below the mean would
//              drown in the rounding of x * scale + shift
// `add` moves a channel's mean and leaves its spread alone, so `moments` need not read it. y may be x. No atomics: the
// same input gives the same bits.
//
// Parameters: ELEMENT; WIDTH, which divides C, and for `whole` the channels of a group; HAS_WEIGHT, HAS_BIAS, HAS_ADD,
// SILU; for `whole` THREADS, CHUNKS and GROUP_WIDTH, the channels of a group; for the others COLUMNS, threads along C.
#include <rocm_sd/wave.hpp>

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
constexpr int n = ROCM_SD_WIDTH;
constexpr bool has_weight = ROCM_SD_HAS_WEIGHT;
constexpr bool has_bias = ROCM_SD_HAS_BIAS;
constexpr bool has_add = ROCM_SD_HAS_ADD;
using floats = vector_of<float, n>;
// Halves of one value have an exact sum, and then their mean is that value. Other sums are rounded: in a group of one
// value that would be all of the result, so what is left of the sum is taken off again.
constexpr bool sums_are_rounded = sizeof(element) == sizeof(float);

ROCM_SD_DEVICE floats finish(floats value) {
    if constexpr (ROCM_SD_SILU) {
#pragma unroll
        for (int i = 0; i < n; ++i) value[i] = silu(value[i]);
    }
    return value;
}

ROCM_SD_DEVICE floats load_wide(const element* from) { return convert<float>(load<n>(from)); }

// Grid: (groups, N). A thread holds `chunks` vectors of the group, `threads` vectors apart.
template <int threads, int chunks, int group_width>
ROCM_SD_DEVICE void whole(const element* x, element* y, const element* weight, const element* bias, const element* add,
                          int C, int HW, float share, float eps) {
    constexpr int vectors = group_width / n;  // of one pixel
    ROCM_SD_SHARED static reduction_space<threads> space;
    const int64 item = static_cast<int64>(block_y()) * HW * C;
    const int first = block_x() * group_width;
    int channel[chunks], at[chunks];
    bool inside[chunks];
    vector_of<element, n> raw[chunks];
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        const int place = i * threads + thread_index();
        inside[i] = place < HW * vectors;
        // Beyond the end the last vector is read again: loads never part a wave.
        const int safe = smaller(place, HW * vectors - 1);
        channel[i] = first + safe % vectors * n;
        at[i] = safe / vectors * C + channel[i];
        raw[i] = load<n>(x + item + at[i]);
    }

    floats value[chunks], sums = 0.0f;
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        value[i] = convert<float>(raw[i]);
        if constexpr (has_add) value[i] += load_wide(add + block_y() * C + channel[i]);
        sums += inside[i] ? value[i] : floats(0.0f);
    }
    const float count = static_cast<float>(HW) * static_cast<float>(group_width);
    const float mean = quotient(reduce_threads<plus, threads, threads>(sum(sums), space), count, share);
    float shift = 0.0f;
    if constexpr (has_add || sums_are_rounded) {
        floats left = 0.0f;
#pragma unroll
        for (int i = 0; i < chunks; ++i) left += inside[i] ? value[i] - mean : floats(0.0f);
        shift = reduce_threads<plus, threads, threads>(sum(left), space) * share;
    }

    floats squares = 0.0f;
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        value[i] = value[i] - mean - shift;
        squares += inside[i] ? value[i] * value[i] : floats(0.0f);
    }
    const float variance = reduce_threads<plus, threads, threads>(sum(squares), space) * share;
    const float scale = reciprocal_sqrt(variance + eps);

#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        floats out = value[i] * scale;
        if constexpr (has_weight) out *= load_wide(weight + channel[i]);
        if constexpr (has_bias) out += load_wide(bias + channel[i]);
        store_if<n>(inside[i], y + item + at[i], convert<element>(finish(out)));
    }
}

// The passes over large maps: `columns` threads side by side along the channels, `rows` rows of them.
template <int side_by_side>
struct sheet {
    static constexpr int columns = side_by_side;
    static constexpr int threads = 256;
    static constexpr int rows = threads / columns;
    static constexpr int channels = columns * n;

    ROCM_SD_DEVICE static int row() { return thread_index() / columns; }
    ROCM_SD_DEVICE static int column() { return thread_index() % columns * n; }
    // The first of this thread's channels; threads beyond the last channel read the last ones and store nothing.
    ROCM_SD_DEVICE static int channel(int C) { return smaller(block_y() * channels + column(), C - n); }
    ROCM_SD_DEVICE static bool inside(int C) { return block_y() * channels + column() < C; }
};

// Mean and sum of squared differences of the values seen so far, for each of a thread's channels.
struct running {
    floats mean = 0.0f, m2 = 0.0f;

    ROCM_SD_DEVICE void see(vector_of<element, n> raw, float share) {
        const floats value = convert<float>(raw);
        const floats delta = value - mean;
        mean += delta * share;
        m2 += delta * (value - mean);
    }
};

// Vectors of floats in LDS, kept in pieces of 16 bytes, one array for each piece: neighbours write and read whole
// vectors side by side. The gap puts the pieces of one vector into different banks for those who read value by value.
template <int vectors>
struct pieces {
    static constexpr int piece = smaller(n, 4), gap = 16;
    alignas(16) float values[n / piece][vectors * piece + gap];

    ROCM_SD_DEVICE float& at(int vector, int i) { return values[i / piece][vector * piece + i % piece]; }

    ROCM_SD_DEVICE void put(int vector, floats value) {
#pragma unroll
        for (int i = 0; i < n; ++i) at(vector, i) = value[i];
    }

    ROCM_SD_DEVICE floats get(int vector) {
        floats value;
#pragma unroll
        for (int i = 0; i < n; ++i) value[i] = at(vector, i);
        return value;
    }
};

// Over the rows of a sheet, for one of its channels.
template <typename S>
ROCM_SD_DEVICE float sum_of_rows(pieces<S::threads>& of_thread, int channel) {
    float total = 0.0f;
    for (int row = 0; row < S::rows; ++row) total += of_thread.at(row * S::columns + channel / n, channel % n);
    return total;
}

// Grid: (slices, blocks of channels, N).
template <typename S>
ROCM_SD_DEVICE void moments(const element* x, float* means, float* m2s, int C, int HW, int rows_per_slice, int slices) {
    const int first = block_x() * rows_per_slice;
    const int count = smaller(rows_per_slice, HW - first);
    const int whole_steps = count / S::rows;
    x += (static_cast<int64>(block_z()) * HW + first) * C;
    const int step = S::rows * C;
    unsigned at = S::row() * C + S::channel(C);

    // Each thread keeps its own running values, so that threads meet only once, after the loop.
    running seen;
    int done = 0;
    constexpr int at_once = 128 / this_arch::wave_size;  // loads in flight: 2 KiB a wave
    for (; done + at_once <= whole_steps; done += at_once) {
        vector_of<element, n> raw[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) raw[i] = load<n>(x + (at + i * step));
#pragma unroll
        for (int i = 0; i < at_once; ++i) seen.see(raw[i], reciprocal(static_cast<float>(done + i + 1)));
        at += at_once * step;
    }
    for (; done < ceil_div(count - S::row(), S::rows); ++done) {
        seen.see(load<n>(x + at), reciprocal(static_cast<float>(done + 1)));
        at += step;
    }

    ROCM_SD_SHARED static pieces<S::threads> of_thread;
    ROCM_SD_SHARED static pieces<S::columns> means_of_slice;
    const float seen_rows = static_cast<float>(done);
    of_thread.put(thread_index(), seen.mean * seen_rows);
    barrier();
    for (int channel = thread_index(); channel < S::channels; channel += S::threads)
        means_of_slice.at(channel / n, channel % n) = sum_of_rows<S>(of_thread, channel) / static_cast<float>(count);
    barrier();
    if constexpr (sums_are_rounded) {
        of_thread.put(thread_index(), (seen.mean - means_of_slice.get(thread_index() % S::columns)) * seen_rows);
        barrier();
        for (int channel = thread_index(); channel < S::channels; channel += S::threads)
            means_of_slice.at(channel / n, channel % n) +=
                sum_of_rows<S>(of_thread, channel) / static_cast<float>(count);
        barrier();
    }
    const floats distance = seen.mean - means_of_slice.get(thread_index() % S::columns);
    of_thread.put(thread_index(), seen.m2 + distance * distance * seen_rows);
    barrier();
    const int64 out = (static_cast<int64>(block_z()) * slices + block_x()) * C;
    for (int channel = thread_index(); channel < S::channels; channel += S::threads) {
        const int c = block_y() * S::channels + channel;
        if (c < C) {
            means[out + c] = means_of_slice.at(channel / n, channel % n);
            m2s[out + c] = sum_of_rows<S>(of_thread, channel);
        }
    }
}

constexpr int fold_threads = 256;

// Grid: (groups, N).
ROCM_SD_DEVICE void fold(const float* means, const float* m2s, const element* weight, const element* add,
                         float* group_means, float* scales, int C, int HW, int width, int slices,
                         int rows_per_slice, float share, float eps) {
    ROCM_SD_SHARED static reduction_space<fold_threads> space;
    const int first = block_x() * width;
    means += static_cast<int64>(block_y()) * slices * C + first;
    m2s += static_cast<int64>(block_y()) * slices * C + first;
    const int channels = block_y() * C + first;  // in what has one value for each channel of an item

    // f(mean, m2, rows) over every channel of every slice, added up over the workgroup.
    const auto over_slices = [&](auto f) {
        float total = 0.0f;
        for (unsigned i = thread_index(); i < static_cast<unsigned>(slices * width); i += fold_threads) {
            const int slice = i / width, c = i % width;
            float mean = means[slice * C + c];
            if constexpr (has_add) mean += static_cast<float>(add[channels + c]);
            const int rows = smaller(rows_per_slice, HW - slice * rows_per_slice);
            total += f(mean, m2s[slice * C + c], static_cast<float>(rows));
        }
        return reduce_threads<plus, fold_threads, fold_threads>(total, space);
    };
    const float count = static_cast<float>(HW) * static_cast<float>(width);
    float mean = over_slices([](float channel_mean, float, float rows) { return channel_mean * rows; }) / count;
    mean += over_slices([mean](float channel_mean, float, float rows) { return (channel_mean - mean) * rows; }) / count;
    const float variance = over_slices([mean](float channel_mean, float m2, float rows) {
        const float distance = channel_mean - mean;
        return m2 + distance * distance * rows;
    }) * share;
    const float scale = reciprocal_sqrt(variance + eps);
    for (int c = thread_index(); c < width; c += fold_threads) {
        group_means[channels + c] = mean;
        scales[channels + c] = has_weight ? scale * static_cast<float>(weight[first + c]) : scale;
    }
}

// Grid: (blocks of rows, blocks of channels, N).
template <typename S>
ROCM_SD_DEVICE void apply(const element* x, element* y, const float* group_means, const float* scales,
                          const element* bias, const element* add, int C, int HW, int blocks) {
    constexpr int at_once = 4;  // rows a thread takes
    // Backwards: what `moments` read last is still in the cache.
    const int first = (blocks - 1 - block_x()) * S::rows * at_once;
    const int64 item = (static_cast<int64>(block_z()) * HW + first) * C;
    const int c = S::channel(C), of_item = block_z() * C + c;
    vector_of<element, n> raw[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i)
        raw[i] = load<n>(x + item + (smaller(i * S::rows + S::row(), HW - 1 - first) * C + c));
    const floats scale = load<n>(scales + of_item);
    floats mean = load<n>(group_means + of_item), extra = 0.0f, shift = 0.0f;
    if constexpr (has_add) extra = load_wide(add + of_item);
    if constexpr (has_bias) shift = load_wide(bias + c);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
        const int row = i * S::rows + S::row();
        const floats value = (convert<float>(raw[i]) + extra - mean) * scale + shift;
        store_if<n>(S::inside(C) && first + row < HW, y + item + (row * C + c), convert<element>(finish(value)));
    }
}

constexpr int whole_threads = ROCM_SD_THREADS;
using S = sheet<ROCM_SD_COLUMNS>;

ROCM_SD_KERNEL(whole_threads)
group_norm_silu_whole(const element* x, element* y, const element* weight, const element* bias, const element* add,
                      int C, int HW, float share, float eps) {
    whole<whole_threads, ROCM_SD_CHUNKS, ROCM_SD_GROUP_WIDTH>(x, y, weight, bias, add, C, HW, share, eps);
}

ROCM_SD_KERNEL(S::threads)
group_norm_silu_moments(const element* x, float* means, float* m2s, int C, int HW, int rows_per_slice, int slices) {
    moments<S>(x, means, m2s, C, HW, rows_per_slice, slices);
}

ROCM_SD_KERNEL(fold_threads)
group_norm_silu_fold(const float* means, const float* m2s, const element* weight, const element* add,
                     float* group_means, float* scales, int C, int HW, int width, int slices, int rows_per_slice,
                     float share, float eps) {
    fold(means, m2s, weight, add, group_means, scales, C, HW, width, slices, rows_per_slice, share, eps);
}

ROCM_SD_KERNEL(S::threads)
group_norm_silu_apply(const element* x, element* y, const float* group_means, const float* scales, const element* bias,
                      const element* add, int C, int HW, int blocks) {
    apply<S>(x, y, group_means, scales, bias, add, C, HW, blocks);
}

}  // namespace rocm_sd
