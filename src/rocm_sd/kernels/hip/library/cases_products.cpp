// Cases of the matrix products, of attention, and of what the transformer block is made of.
#include "test_cases.hpp"

namespace rocm_sd_test {

namespace {

sum dot(const double* a, const double* b, int K, double bias = 0.0, double residual = 0.0) {
    sum all;
    all.add(bias);
    all.add(residual);
    for (int k = 0; k < K; ++k) all.add(a[k] * b[k]);
    return all;
}

double gelu(double gate) { return 0.5 * gate * std::erfc(-gate * std::sqrt(0.5)); }

// value * gelu(gate); the kernel's gelu is within 1e-7 of it, and its slope is below 1.13.
void gate_into(expected& y, size_t at, double value, double value_slack, double gate, double gate_slack) {
    const double gated = gelu(gate);
    y.exact[at] = value * gated;
    y.slack[at] = value_slack * std::fabs(gated) +
                  std::fabs(value) * (1.13 * gate_slack + 1e-7 + 4 * float_step * std::fabs(gate));
}

void linear(cases& all, int B, int M, int N, int K, bool has_bias, bool has_residual, rocm_sd_dtype dtype) {
    const std::string shape = (B ? shape_of({B, M, N, K}) : shape_of({M, N, K})) + (has_bias ? "" : ", no bias") +
                              (has_residual ? "" : ", no residual");
    test_case& test = add(all, B ? "batched_linear" : "linear_residual", shape, dtype);
    const int batch = std::max(B, 1);
    const size_t rows = static_cast<size_t>(batch) * M, columns = static_cast<size_t>(batch) * N;
    const values x = random_values(rows * K, dtype, 11), weight = random_values(columns * K, dtype, 12);
    const values bias = random_values(columns, dtype, 13), residual = random_values(rows * N, dtype, 14);
    expected y = nothing_known(rows * N);
    const sampled_rows sampled(static_cast<int>(rows), static_cast<double>(N) * K);
    for (int row = 0; row < sampled.rows; ++row) {
        if (!sampled.has(row)) continue;
        for (int n = 0; n < N; ++n) {
            const size_t at = static_cast<size_t>(row) * N + n, column = static_cast<size_t>(row / M) * N + n;
            const sum one = dot(&x[static_cast<size_t>(row) * K], &weight[column * K], K,
                                has_bias ? bias[column] : 0.0, has_residual ? residual[at] : 0.0);
            y.exact[at] = one.value;
            y.slack[at] = one.slack();
        }
    }
    const void *in = test.give(x), *w = test.give(weight), *b = has_bias ? test.give(bias) : nullptr;
    const void* r = has_residual ? test.give(residual) : nullptr;
    void* out = test.take(std::move(y));
    test.work = 2.0 * static_cast<double>(rows) * N * K;
    test.is_flops = true;
    if (B) {
        test.launch = [=] { return rocm_sd_batched_linear(in, w, b, r, out, B, M, N, K, dtype, nullptr); };
    } else {
        test.launch = [=] { return rocm_sd_linear_residual(in, w, b, r, out, M, N, K, dtype, nullptr); };
    }
}

void linear_geglu(cases& all, int M, int F, int K, bool has_bias, rocm_sd_dtype dtype) {
    test_case& test = add(all, "linear_geglu", shape_of({M, F, K}) + (has_bias ? "" : ", no bias"), dtype);
    const values x = random_values(static_cast<size_t>(M) * K, dtype, 15);
    const values weight = random_values(static_cast<size_t>(2) * F * K, dtype, 16, 0.5);
    const values bias = random_values(static_cast<size_t>(2) * F, dtype, 17);
    expected y = nothing_known(static_cast<size_t>(M) * F);
    const sampled_rows sampled(M, 2.0 * F * K);
    for (int m = 0; m < M; ++m) {
        if (!sampled.has(m)) continue;
        for (int f = 0; f < F; ++f) {
            const double* row = &x[static_cast<size_t>(m) * K];
            const sum value = dot(row, &weight[static_cast<size_t>(f) * K], K, has_bias ? bias[f] : 0.0);
            const sum gate = dot(row, &weight[static_cast<size_t>(F + f) * K], K, has_bias ? bias[F + f] : 0.0);
            gate_into(y, static_cast<size_t>(m) * F + f, value.value, value.slack(), gate.value, gate.slack());
        }
    }
    const void *in = test.give(x), *w = test.give(weight), *b = has_bias ? test.give(bias) : nullptr;
    void* out = test.take(std::move(y));
    test.work = 4.0 * M * F * K;
    test.is_flops = true;
    test.launch = [=] { return rocm_sd_linear_geglu(in, w, b, out, M, F, K, dtype, nullptr); };
}

// T = 0: to itself, with queries, keys and values of one packed product, [B, S, 3, H, D]. known_as: the shape in other
// words.
void attention(cases& all, int B, int S, int T, int H, int D, rocm_sd_dtype dtype, const std::string& known_as = "") {
    const bool itself = T == 0;
    if (itself) T = S;
    const std::string shape = shape_of({B, S, T}) + " " + std::to_string(H) + " of head " + std::to_string(D);
    test_case& test = add(all, "attention", (known_as.empty() ? shape : known_as) + (itself ? ", itself" : ""), dtype);
    const int C = H * D, q_stride = itself ? 3 * C : C, kv_stride = itself ? 3 * C : C;
    // Queries are large enough for some keys to count more than others.
    const values q = random_values(static_cast<size_t>(B) * S * q_stride, dtype, 18, 4.0);
    const values apart = random_values(static_cast<size_t>(2) * B * T * C, dtype, 19);
    const double* const keys = itself ? &q[static_cast<size_t>(C)] : apart.data();
    const double* const value_rows = itself ? &q[static_cast<size_t>(2) * C] : &apart[static_cast<size_t>(B) * T * C];
    const double scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(D)));
    expected out = nothing_known(static_cast<size_t>(B) * S * C);
    const sampled_rows sampled(B * S, 2.0 * T * C);
    values scores(static_cast<size_t>(T)), slacks(static_cast<size_t>(T));
    for (int row = 0; row < sampled.rows; ++row) {
        if (!sampled.has(row)) continue;
        for (int h = 0; h < H; ++h) {
            const auto of_key = [&](const double* data, int t) {
                return data + (static_cast<size_t>(row / S) * T + t) * kv_stride + h * D;
            };
            double largest = -HUGE_VAL, total = 0.0;
            for (int t = 0; t < T; ++t) {
                const sum one = dot(&q[static_cast<size_t>(row) * q_stride + h * D], of_key(keys, t), D);
                scores[t] = one.value * scale;
                // The difference to the largest is rounded, and so is its power of two.
                slacks[t] = one.slack() * scale + 4 * float_step * (1.0 + std::fabs(scores[t]));
                largest = std::fmax(largest, scores[t]);
            }
            for (int t = 0; t < T; ++t) total += scores[t] = std::exp(scores[t] - largest);
            for (int d = 0; d < D; ++d) {
                sum one;
                double slack = 0.0;
                for (int t = 0; t < T; ++t) {
                    const double value = of_key(value_rows, t)[d], weight = scores[t] / total;
                    one.add(weight * value);
                    // A weight is rounded to the dtype before it is multiplied; the smallest of float16 absolutely.
                    const double least = dtype == rocm_sd_float16 ? std::ldexp(1.0, -25) / total : 0.0;
                    slack += (weight * (rounding(dtype) + 2 * slacks[t]) + least) * std::fabs(value);
                }
                const size_t at = static_cast<size_t>(row) * C + h * D + d;
                out.exact[at] = one.value;
                out.slack[at] = slack + one.slack() + 8 * float_step * std::fabs(one.value);
            }
        }
    }
    const char* first = static_cast<const char*>(test.give(q));
    const char* other = itself ? first + static_cast<size_t>(C) * 2 : static_cast<const char*>(test.give(apart));
    const void* v = other + (itself ? static_cast<size_t>(C) * 2 : static_cast<size_t>(B) * T * C * 2);
    void* to = test.take(std::move(out));
    test.work = 4.0 * B * S * static_cast<double>(T) * C;
    test.is_flops = true;
    test.launch = [=] {
        return rocm_sd_attention(first, other, v, to, B, S, T, H, D, q_stride, kv_stride, static_cast<float>(scale),
                                 dtype, nullptr);
    };
}

// Pairs of each `span` neighbours of a row: their mean, and the sum of their centred squares. `off` is how far the
// values themselves may be, or nullptr.
void moments_of(const double* row, const double* off, int C, int span, expected& pairs, size_t at) {
    for (int first = 0; first < C; first += span, at += 2) {
        const int end = std::min(first + span, C), count = end - first;
        double mean = 0.0, squares = 0.0, largest = 0.0, moved = 0.0, slack = 0.0;
        for (int c = first; c < end; ++c) {
            mean += row[c] / count;
            largest = std::fmax(largest, std::fabs(row[c]));
            if (off) moved += off[c] / count;
        }
        const double mean_slack = 32 * float_step * largest + moved;
        for (int c = first; c < end; ++c) {
            const double apart = row[c] - mean, wrong = off ? off[c] : 0.0;
            squares += apart * apart;
            slack += 2 * std::fabs(apart) * wrong + wrong * wrong;
        }
        pairs.exact[at] = mean;
        pairs.slack[at] = mean_slack;
        pairs.exact[at + 1] = squares;
        pairs.slack[at + 1] = slack + 64 * float_step * squares + count * mean_slack * mean_slack;
    }
}

void row_moments(cases& all, int M, int C, rocm_sd_dtype dtype) {
    test_case& test = add(all, "row_moments", shape_of({M, C}), dtype);
    const values x = random_values(static_cast<size_t>(M) * C, dtype, 20, 2.0, 0.5);
    expected pairs{values(static_cast<size_t>(M) * 2), values(static_cast<size_t>(M) * 2)};
    for (int m = 0; m < M; ++m)
        moments_of(&x[static_cast<size_t>(m) * C], nullptr, C, C, pairs, static_cast<size_t>(m) * 2);
    const void* in = test.give(x);
    void* out = test.take(std::move(pairs), rocm_sd_float32);
    test.work = static_cast<double>(M) * C * size_of(dtype);
    test.launch = [=] { return rocm_sd_row_moments(in, out, M, C, dtype, nullptr); };
}

void linear_moments(cases& all, int M, int N, int K, bool has_bias, rocm_sd_dtype dtype) {
    test_case& test = add(all, "linear_moments", shape_of({M, N, K}) + (has_bias ? "" : ", no bias"), dtype);
    const values x = random_values(static_cast<size_t>(M) * K, dtype, 21);
    const values weight = random_values(static_cast<size_t>(N) * K, dtype, 22);
    const values bias = random_values(static_cast<size_t>(N), dtype, 23);
    const values residual = random_values(static_cast<size_t>(M) * N, dtype, 24);
    // Without code there is no span, and the launch says why.
    const int span = std::max(1, rocm_sd_linear_moments_span(M, N, dtype)), parts = (N + span - 1) / span;
    expected y = nothing_known(residual.size()), pairs = nothing_known(static_cast<size_t>(M) * parts * 2);
    const sampled_rows sampled(M, static_cast<double>(N) * K);
    values row(static_cast<size_t>(N)), off(static_cast<size_t>(N));
    for (int m = 0; m < M; ++m) {
        if (!sampled.has(m)) continue;
        for (int n = 0; n < N; ++n) {
            const size_t at = static_cast<size_t>(m) * N + n;
            const sum one = dot(&x[static_cast<size_t>(m) * K], &weight[static_cast<size_t>(n) * K], K,
                                has_bias ? bias[n] : 0.0, residual[at]);
            y.exact[at] = one.value;
            y.slack[at] = one.slack();
            const rounded_value stored(one.value, one.slack(), dtype);
            row[n] = stored.value;
            off[n] = stored.off;
        }
        moments_of(row.data(), off.data(), N, span, pairs, static_cast<size_t>(m) * parts * 2);
    }
    const void *in = test.give(x), *w = test.give(weight), *b = has_bias ? test.give(bias) : nullptr;
    const void* r = test.give(residual);
    void *out = test.take(std::move(y)), *moments = test.take(std::move(pairs), rocm_sd_float32);
    test.work = 2.0 * M * N * K;
    test.is_flops = true;
    test.launch = [=] { return rocm_sd_linear_moments(in, w, b, r, out, moments, M, N, K, dtype, nullptr); };
}

// `gated`: norm_geglu, of N columns; else norm_linear.
void normed(cases& all, int M, int N, int K, bool gated, bool has_bias, rocm_sd_dtype dtype) {
    test_case& test =
        add(all, gated ? "norm_geglu" : "norm_linear", shape_of({M, N, K}) + (has_bias ? "" : ", no bias"), dtype);
    const int columns = gated ? 2 * N : N, span = 64, parts = (K + span - 1) / span;
    const values x = random_values(static_cast<size_t>(M) * K, dtype, 25, 2.0, 0.5);
    const values norm_weight = random_values(static_cast<size_t>(K), dtype, 26);
    const values norm_bias = random_values(static_cast<size_t>(K), dtype, 27);
    const values weight = random_values(static_cast<size_t>(columns) * K, dtype, 28, 0.5);
    const values bias = random_values(static_cast<size_t>(columns), dtype, 29);
    expected pairs{values(static_cast<size_t>(M) * parts * 2), values(static_cast<size_t>(M) * parts * 2)};
    expected y = nothing_known(static_cast<size_t>(M) * N);
    const sampled_rows sampled(M, static_cast<double>(columns) * K);
    const double eps = static_cast<double>(1e-5f);
    values h(static_cast<size_t>(K)), off(static_cast<size_t>(K));
    for (int m = 0; m < M; ++m) {
        const double* row = &x[static_cast<size_t>(m) * K];
        moments_of(row, nullptr, K, span, pairs, static_cast<size_t>(m) * parts * 2);
        if (!sampled.has(m)) continue;
        double mean = 0.0, variance = 0.0, largest = 0.0;
        for (int k = 0; k < K; ++k) {
            mean += row[k] / K;
            largest = std::fmax(largest, std::fabs(row[k]));
        }
        for (int k = 0; k < K; ++k) variance += (row[k] - mean) * (row[k] - mean) / K;
        for (int k = 0; k < K; ++k) {
            const normalised one = normalise(row[k], mean, 1.0 / std::sqrt(variance + eps), norm_weight[k],
                                             norm_bias[k], largest, 32);
            const rounded_value there(one.value, one.slack, dtype);
            h[k] = there.value;
            off[k] = there.off;
        }
        const auto column = [&](int n, double& slack) {
            const double* w = &weight[static_cast<size_t>(n) * K];
            const sum one = dot(h.data(), w, K, has_bias ? bias[n] : 0.0);
            slack = one.slack();
            for (int k = 0; k < K; ++k) slack += std::fabs(w[k]) * off[k];
            return one.value;
        };
        for (int n = 0; n < N; ++n) {
            const size_t at = static_cast<size_t>(m) * N + n;
            double slack, gate_slack;
            const double value = column(n, slack);
            if (gated) {
                const double gate = column(N + n, gate_slack);
                gate_into(y, at, value, slack, gate, gate_slack);
            } else {
                y.exact[at] = value;
                y.slack[at] = slack;
            }
        }
    }
    for (double& each : pairs.exact) each = rounded(each, rocm_sd_float32);
    const void *in = test.give(x), *moments = test.give(pairs.exact, rocm_sd_float32);
    const void *nw = test.give(norm_weight), *nb = test.give(norm_bias);
    const void *w = test.give(weight), *b = has_bias ? test.give(bias) : nullptr;
    void* out = test.take(std::move(y));
    test.work = 2.0 * M * columns * K;
    test.is_flops = true;
    const auto call = gated ? rocm_sd_norm_geglu : rocm_sd_norm_linear;
    test.launch = [=] { return call(in, moments, span, nw, nb, 1e-5f, w, b, out, M, N, K, dtype, nullptr); };
}

}  // namespace

std::vector<family> product_families() {
    return {
        {"linear_residual", halves([](cases& to, rocm_sd_dtype dtype) {
             linear(to, 0, 70, 72, 80, true, true, dtype);
             linear(to, 0, 33, 35, 77, false, true, dtype);
             // Four tiles of any kind: on a device of four compute units the large ones.
             linear(to, 0, 256, 256, 72, true, false, dtype);
         }),
         [](cases& to) {
             linear(to, 0, 8192, 320, 320, true, true, rocm_sd_float16);
             // The founding documents' product of matrices.
             linear(to, 0, 512, 512, 512, false, false, rocm_sd_float16);
         }},
        {"batched_linear", halves([](cases& to, rocm_sd_dtype dtype) {
             linear(to, 3, 40, 72, 80, true, true, dtype);
             linear(to, 2, 33, 35, 21, false, false, dtype);
         }),
         [](cases& to) { linear(to, 16, 1024, 1024, 64, false, false, rocm_sd_float16); }},
        {"linear_geglu", halves([](cases& to, rocm_sd_dtype dtype) {
             linear_geglu(to, 70, 72, 80, true, dtype);
             linear_geglu(to, 33, 35, 77, false, dtype);
             linear_geglu(to, 256, 256, 72, true, dtype);
         }),
         [](cases& to) { linear_geglu(to, 8192, 1280, 320, true, rocm_sd_float16); }},
        {"attention", halves([](cases& to, rocm_sd_dtype dtype) {
             for (const int head : {40, 64, 80, 128, 160, 512}) {
                 attention(to, 1, 71, 0, 2, head, dtype);
                 attention(to, 2, 35, 77, 1, head, dtype);
             }
         }),
         [](cases& to) {
             attention(to, 2, 4096, 0, 8, 40, rocm_sd_float16);
             attention(to, 2, 4096, 77, 8, 40, rocm_sd_float16);
             // The founding documents' sizes: batch, tokens, columns of all heads.
             attention(to, 1, 64, 0, 8, 64, rocm_sd_float16, "1x64x512 with 8 heads");
         }},
        {"row_moments", halves([](cases& to, rocm_sd_dtype dtype) {
             row_moments(to, 5, 320, dtype);
             row_moments(to, 3, 77, dtype);
         }),
         [](cases& to) { row_moments(to, 8192, 320, rocm_sd_float16); }},
        {"linear_moments", halves([](cases& to, rocm_sd_dtype dtype) {
             linear_moments(to, 70, 72, 80, true, dtype);
             linear_moments(to, 33, 136, 72, false, dtype);
         }),
         [](cases& to) { linear_moments(to, 8192, 320, 320, true, rocm_sd_float16); }},
        {"norm_linear", halves([](cases& to, rocm_sd_dtype dtype) {
             normed(to, 70, 72, 200, false, false, dtype);
             normed(to, 33, 136, 80, false, true, dtype);
         }),
         [](cases& to) { normed(to, 8192, 960, 320, false, false, rocm_sd_float16); }},
        {"norm_geglu", halves([](cases& to, rocm_sd_dtype dtype) {
             normed(to, 70, 72, 200, true, true, dtype);
             normed(to, 33, 40, 80, true, false, dtype);
         }),
         [](cases& to) { normed(to, 8192, 1280, 320, true, true, rocm_sd_float16); }},
    };
}

}  // namespace rocm_sd_test
