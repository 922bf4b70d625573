// softmax, log_softmax, masked_softmax and logsumexp, and gradients, by every path: rows of a part of a warp, a block and a cluster,
// in registers, wherever they start; columns that are read twice, and in parts by two kernels.
#include "cases.h"
#include "cuda_ops/log_softmax.h"
#include "cuda_ops/logsumexp.h"
#include "cuda_ops/masked_softmax.h"
#include "cuda_ops/softmax.h"

using namespace emulation;

static const char *const PATHS[] = {"unaligned_row", "row", "split", "cluster", "thread_group"};

// The path that is forced, or where it cannot or the op has none of that name, the one that is chosen.
template <typename Call>
static const char *by_some_path(const char *variable, Call call)
{
    const char *const path = one_in(3) ? nullptr : PATHS[random_below(5)];
    if (path) {
        setenv(variable, path, 1);
        cuda_ops_reload_paths_cuda();
        const cuda_ops_status status = call();
        unsetenv(variable);
        cuda_ops_reload_paths_cuda();
        if (status == CUDA_OPS_SUCCESS)
            return path;
        if (status != CUDA_OPS_PATH_CANNOT && status != CUDA_OPS_UNKNOWN_PATH)
            fail("path %s: status %d", path, status);
    }
    expect_success(call());
    return "chosen";
}

static void softmax(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const bool half = bytes_of(dtype) == 2, log = one_in(2), is_long = one_in(3), strided = one_in(4);
    const int64_t inner = strided ? random_size(40) : 1;
    const int64_t cols = is_long ? random_in(8000, half ? 70000 : 40000) / (strided ? 16 : 1) : random_size(2500);
    const int64_t outer = is_long ? random_in(1, 4) : random_size(30000 / (cols * inner) + 1);
    const int64_t columns = outer * inner, count = columns * cols;
    const double scale = log ? 1 : one_in(2) ? 1 : -0.75;
    const Array input = Array(count, dtype).random(), output(count, dtype);
    const Array grad_output = Array(count, dtype).random(), grad_input(count, dtype);
    const int64_t odd = random_below((uint64_t)columns); // a column with something else in it
    const auto place = [&](int64_t column, int64_t c) { return (column / inner * cols + c) * inner + column % inner; };
    const bool is_odd = one_in(3);
    if (is_odd) {
        const double values[] = {NAN, INFINITY, -INFINITY, 60000};
        const double value = values[random_below(4)];
        const int64_t at = random_in(0, cols - 1);
        for (int64_t c = one_in(2) ? at : 0; c <= at; c++)
            set(input.data, place(odd, c), value, dtype);
    }
    describe("case %lld: %slog_softmax, [%lld, %lld, %lld], dtype %d, %d resident", (long long)number, log ? "" : "no ",
             (long long)outer, (long long)cols, (long long)inner, dtype, resident_blocks);
    const char *const variable = log ? "CUDA_OPS_LOG_SOFTMAX_PATH" : "CUDA_OPS_SOFTMAX_PATH";
    const char *path = by_some_path(variable, [&] {
        const size_t bytes = log ? cuda_ops_log_softmax_workspace_cuda(0, outer, cols, inner, dtype)
                                 : cuda_ops_softmax_workspace_cuda(0, outer, cols, inner, dtype);
        void *const workspace = device_memory(bytes, 0);
        return log ? cuda_ops_log_softmax_forward_cuda(output.data, workspace, input.data, outer, cols, inner, dtype,
                                                       nullptr)
                   : cuda_ops_softmax_forward_cuda(output.data, workspace, input.data, outer, cols, inner, dtype,
                                                   nullptr);
    });
    const double rounding = rounding_of(dtype), exact = dtype == CUDA_OPS_FLOAT64 ? 1e-13 : 4e-6;
    std::vector<double> logs((size_t)columns);
    for (int64_t column = 0; column < columns; column++) {
        double maximum = -INFINITY, sum = 0;
        for (int64_t c = 0; c < cols; c++)
            maximum = fmax(maximum, input[place(column, c)]);
        for (int64_t c = 0; c < cols; c++)
            sum += exp(input[place(column, c)] - maximum);
        bool has_nan = false;
        for (int64_t c = 0; c < cols; c++)
            has_nan = has_nan || input[place(column, c)] != input[place(column, c)];
        logs[(size_t)column] = has_nan ? NAN : isinf(maximum) ? maximum : maximum + ::log(sum);
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = place(column, c);
            const double difference = input[i] - maximum - ::log(sum);
            const double expected = log ? difference : exp(difference);
            const double size = log ? 10 + fabs(input[i]) + fabs(maximum) : expected;
            expect_near(path, i, output[i], expected,
                        rounding * fabs(expected) + exact * size + (half ? 6e-8 : 1e-300));
        }
    }
    // Backward, of what forward has made.
    path = by_some_path(variable, [&] {
        const size_t bytes = log ? cuda_ops_log_softmax_workspace_cuda(1, outer, cols, inner, dtype)
                                 : cuda_ops_softmax_workspace_cuda(1, outer, cols, inner, dtype);
        void *const workspace = device_memory(bytes, 0);
        return log ? cuda_ops_log_softmax_backward_cuda(grad_input.data, workspace, grad_output.data, output.data,
                                                        outer, cols, inner, dtype, nullptr)
                   : cuda_ops_softmax_backward_cuda(grad_input.data, workspace, grad_output.data, output.data, scale,
                                                    outer, cols, inner, dtype, nullptr);
    });
    for (int64_t column = 0; column < columns; column++) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = place(column, c);
            const double summand = log ? grad_output[i] : grad_output[i] * output[i];
            sum += summand, size += fabs(summand);
        }
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = place(column, c);
            const double factor = log ? exp(output[i]) : output[i], g = grad_output[i];
            const double expected = log ? g - factor * sum : factor * (g - sum) * scale;
            const double terms = log ? fabs(g) + factor * size : fabs(factor) * (fabs(g) + size);
            expect_near(path, i, grad_input[i], expected,
                        rounding * fabs(expected) + exact * terms + (half ? 6e-8 : 1e-300));
        }
    }
    // logsumexp of the same.
    const Array sums(columns, dtype), grad_sums = Array(columns, dtype).random(), grad(count, dtype);
    void *const workspace = device_memory(cuda_ops_logsumexp_workspace_cuda(outer, cols, inner, dtype), 0);
    expect_success(
        cuda_ops_logsumexp_forward_cuda(sums.data, workspace, input.data, outer, cols, inner, dtype, nullptr));
    expect_success(cuda_ops_logsumexp_backward_cuda(grad.data, grad_sums.data, input.data, sums.data, outer, cols,
                                                    inner, dtype, nullptr));
    for (int64_t column = 0; column < columns; column++) {
        const double expected = logs[(size_t)column], y = sums[column];
        expect_near("logsumexp", column, y, expected, rounding * fabs(expected) + exact * 10);
        for (int64_t c = 0; c < cols && !(is_odd && column == odd); c++) {
            const int64_t i = place(column, c);
            const double gradient = grad_sums[column] * exp(input[i] - y);
            expect_near("logsumexp's gradient", i, grad[i], gradient,
                        (rounding + exact) * fabs(gradient) + (half ? 6e-8 : 1e-300));
        }
    }
}

static void masked_softmax(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const bool half = bytes_of(dtype) == 2, is_long = one_in(2);
    const int64_t cols = is_long ? random_in(8200, half ? 40000 : 25000) : random_size(2500);
    const int64_t rows = is_long ? random_in(1, 4) : random_size(20000 / cols + 1), count = rows * cols;
    const double scale = 0.5;
    const Array input = Array(count, dtype).random(), output(count, dtype);
    cuda_ops_mask mask = {};
    mask.kind = (cuda_ops_mask_kind)random_below(3);
    mask.dims = 1, mask.sizes[0] = rows, mask.strides[0] = one_in(2) ? cols : 0, mask.col_stride = 1;
    const bool additive = mask.kind == CUDA_OPS_MASK_ADDITIVE;
    const Array summands = Array(count, dtype).random();
    uint8_t *const flags = (uint8_t *)device_memory((size_t)count, one_in(2) ? 0 : 3);
    const bool nothing = one_in(6); // takes part in the last row
    for (int64_t i = 0; i < count; i++)
        flags[i] = !one_in(4) && !(nothing && i >= count - cols);
    mask.values = additive ? summands.data : flags;
    mask.queries = one_in(3) ? random_in(1, rows) : 0;
    std::vector<double> x((size_t)count), expected((size_t)count), added((size_t)count);
    for (int64_t i = 0; i < count; i++)
        x[(size_t)i] = input[i], added[(size_t)i] = summands[i];
    cuda_ops_mask exact_mask = mask;
    exact_mask.values = additive ? (const void *)added.data() : flags;
    expect_success(cuda_ops_masked_softmax_forward_cpu(expected.data(), x.data(), &exact_mask, scale, cols, 0, rows,
                                                       CUDA_OPS_FLOAT64));
    describe("case %lld: masked_softmax, %lld rows of %lld, mask %d, %lld queries, dtype %d, %d resident",
             (long long)number, (long long)rows, (long long)cols, mask.kind, (long long)mask.queries, dtype,
             resident_blocks);
    const char *const path = by_some_path("CUDA_OPS_MASKED_SOFTMAX_PATH", [&] {
        void *const workspace = device_memory(cuda_ops_masked_softmax_workspace_cuda(rows, cols, dtype), 0);
        return cuda_ops_masked_softmax_forward_cuda(output.data, workspace, input.data, &mask, scale, rows, cols, dtype,
                                                    nullptr);
    });
    for (int64_t i = 0; i < count; i++)
        expect_near(path, i, output[i], expected[(size_t)i],
                    (rounding_of(dtype) + (dtype == CUDA_OPS_FLOAT64 ? 1e-13 : 4e-6)) * expected[(size_t)i] +
                        (half ? 6e-8 : 1e-300));
}

static void one_case(int64_t number)
{
    if (one_in(4))
        masked_softmax(number);
    else
        softmax(number);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "softmax", one_case);
}
