// All reductions, of rows and of columns, against sums in the order of the elements.
#include "cases.h"
#include "cuda_ops/reduction.h"

using namespace emulation;

static void reduce(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const cuda_ops_reduction_kind kind = (cuda_ops_reduction_kind)random_below(10);
    const bool by_index = kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
    const bool whole = kind >= CUDA_OPS_AMAX && kind <= CUDA_OPS_ARGMIN;
    cuda_ops_reduction_sizes s = {by_index || one_in(2) ? 1 : random_in(1, 4), one_in(3) ? 1 : random_size(30),
                                  random_size(5000), one_in(2) ? 1 : random_size(60)};
    while (s.batch * s.outer * s.cols * s.inner > 60000)
        s.cols = (s.cols + 1) / 2;
    const int64_t count = s.batch * s.outer * s.cols * s.inner, results = s.outer * s.inner;
    const double parameter = kind == CUDA_OPS_NORM ? (double)random_in(0, 3) : 1.0;
    Array input(count, dtype);
    input.random();
    if (kind == CUDA_OPS_PROD)
        for (int64_t i = 0; i < count; i++)
            set(input.data, i, one_in(2) ? -1.0 : one_in(200) ? 2.0 : 1.0, dtype);
    const bool with_nan = whole && one_in(5);
    for (int i = 0; with_nan && i < 3; i++)
        set(input.data, random_in(0, count - 1), NAN, dtype);
    describe("case %lld: kind %d, batch %lld, outer %lld, cols %lld, inner %lld, dtype %d", (long long)number, kind,
             (long long)s.batch, (long long)s.outer, (long long)s.cols, (long long)s.inner, dtype);
    const bool wide = !whole && bytes_of(dtype) == 2 && one_in(2);
    const Array output(by_index ? 0 : results, wide ? CUDA_OPS_FLOAT32 : dtype);
    int64_t *const indices = (int64_t *)device_memory((size_t)(by_index ? 8 * results : 0), 0);
    void *const workspace = device_memory((size_t)cuda_ops_reduction_workspace_cuda(s, dtype), 0);
    expect_success(cuda_ops_reduction_cuda(by_index ? (void *)indices : output.data, workspace, input.data, s, kind,
                                           parameter, dtype, output.dtype, nullptr));
    for (int64_t r = 0; r < results; r++) {
        double sum = 0, size = 0, product = 1, mean = 0, squares = 0, extreme = 0;
        int64_t index = -1;
        const double n = (double)(s.batch * s.cols);
        const auto each = [&](auto function) {
            for (int64_t b = 0; b < s.batch; b++)
                for (int64_t c = 0; c < s.cols; c++)
                    function(input[((b * s.outer + r / s.inner) * s.cols + c) * s.inner + r % s.inner], c);
        };
        each([&](double x, int64_t c) {
            const double magnitude = parameter == 0 ? x != 0 : pow(fabs(x), parameter);
            sum += kind == CUDA_OPS_NORM ? magnitude : x;
            size += kind == CUDA_OPS_NORM ? magnitude : fabs(x);
            product *= x;
            mean += x / n;
            const bool less = kind == CUDA_OPS_AMIN || kind == CUDA_OPS_ARGMIN;
            if (index < 0 || (extreme == extreme && (x != x || (less ? x < extreme : x > extreme))))
                extreme = x, index = c;
        });
        each([&](double x, int64_t) { squares += (x - mean) * (x - mean); });
        if (by_index) {
            if (indices[r] != index)
                fail("index %lld of result %lld, not %lld", (long long)indices[r], (long long)r, (long long)index);
            continue;
        }
        const double variance = n > parameter ? squares / (n - parameter) : NAN;
        const double expected = kind == CUDA_OPS_SUM    ? sum
                                : kind == CUDA_OPS_MEAN ? sum / n
                                : kind == CUDA_OPS_PROD ? product
                                : kind == CUDA_OPS_NORM ? (parameter == 0 ? sum : pow(sum, 1 / parameter))
                                : kind == CUDA_OPS_VAR  ? variance
                                : kind == CUDA_OPS_STD  ? sqrt(variance)
                                                        : extreme;
        if (kind == CUDA_OPS_PROD && fabs(expected) > 60000)
            continue;
        const double unit = dtype == CUDA_OPS_FLOAT64 ? 1e-12 : 2e-5;
        if (expected != expected && output[r] - output[r] != 0)
            continue; // of one element NaN or infinity
        expect_near("output", r, output[r], expected,
                    rounding_of(output.dtype) * fabs(expected) + unit * (kind == CUDA_OPS_MEAN  ? size / n
                                                                         : kind == CUDA_OPS_SUM ? size
                                                                                                : fabs(expected)));
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "reduction", reduce);
}
