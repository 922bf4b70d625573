// scatter_add, index_add and their gradients; indices of both sizes, some of them bad, sums by atomics or in order.
#include "cases.h"
#include "cuda_ops/scatter.h"

using namespace emulation;

static void scatter(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const bool of_rows = one_in(2), bad = one_in(4);
    const int deterministic = one_in(2), index_bytes = one_in(2) ? 4 : 8;
    cuda_ops_scatter_sizes s = {one_in(2) ? 1 : random_in(1, 5), random_size(40), random_size(200),
                                one_in(3) ? random_in(1, 3) : random_size(70)};
    const double alpha = of_rows && one_in(2) ? -1.5 : 1.0;
    const int64_t count = s.outer * s.count * s.inner, places = s.outer * s.rows * s.inner;
    const int64_t indices = of_rows ? s.count : count;
    const Array output(places, dtype), input = Array(places, dtype).random(), source = Array(count, dtype).random();
    const Array grad_source(count, dtype);
    void *const index = device_memory((size_t)(indices * index_bytes), random_phase(index_bytes));
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < indices; i++) {
        rows.push_back(bad && one_in(20) ? (one_in(2) ? -1 : s.rows) : random_in(0, one_in(3) ? 0 : s.rows - 1));
        if (index_bytes == 4)
            ((int32_t *)index)[i] = (int32_t)rows.back();
        else
            ((int64_t *)index)[i] = rows.back();
    }
    describe("case %lld: %s, outer %lld, rows %lld, count %lld, inner %lld, dtype %d, alpha %g%s%s", (long long)number,
             of_rows ? "index_add" : "scatter_add", (long long)s.outer, (long long)s.rows, (long long)s.count,
             (long long)s.inner, dtype, alpha, bad ? ", bad indices" : "", deterministic ? ", deterministic" : "");
    cuda_ops_index_error *const error =
        one_in(2) ? nullptr : (cuda_ops_index_error *)device_memory(sizeof(cuda_ops_index_error), 0, 0);
    std::vector<double> sums, sizes;
    for (int64_t i = 0; i < places; i++)
        sums.push_back(input[i]), sizes.push_back(fabs(input[i]));
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = i / s.inner % s.count, row = rows[(size_t)(of_rows ? k : i)];
        const int64_t at = (i / s.inner / s.count * s.rows + row) * s.inner + i % s.inner;
        if (0 <= row && row < s.rows)
            sums[(size_t)at] += alpha * source[i], sizes[(size_t)at] += fabs(alpha * source[i]);
    }
    const bool in_place = !of_rows || one_in(2);
    void *const to = in_place ? input.data : output.data;
    const size_t bytes = of_rows ? cuda_ops_index_add_workspace_cuda(s, dtype, deterministic)
                                 : cuda_ops_scatter_add_workspace_cuda(s, dtype, deterministic);
    void *const workspace = device_memory(bytes, 0);
    if (of_rows)
        expect_success(cuda_ops_index_add_cuda(to, error, workspace, input.data, source.data, index, index_bytes, s,
                                               alpha, dtype, deterministic, nullptr));
    else
        expect_success(cuda_ops_scatter_add_cuda(to, error, workspace, source.data, index, index_bytes, s, dtype,
                                                 deterministic, nullptr));
    for (int64_t i = 0; i < places; i++)
        expect_near("output", i, get(to, i, dtype), sums[(size_t)i],
                    rounding_of(dtype) * fabs(sums[(size_t)i]) +
                        (dtype == CUDA_OPS_FLOAT64 ? 1e-13 : 1e-5) * sizes[(size_t)i]);
    const Array grad_output = Array(places, dtype).random();
    if (of_rows)
        expect_success(cuda_ops_index_add_backward_cuda(grad_source.data, grad_output.data, index, index_bytes, s,
                                                        alpha, dtype, nullptr));
    else
        expect_success(cuda_ops_scatter_add_backward_cuda(grad_source.data, grad_output.data, index, index_bytes, s,
                                                          dtype, nullptr));
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = i / s.inner % s.count, row = rows[(size_t)(of_rows ? k : i)];
        const bool good = 0 <= row && row < s.rows;
        const int64_t at = (i / s.inner / s.count * s.rows + row) * s.inner + i % s.inner;
        const double expected = good ? alpha * grad_output[at] : 0;
        expect_near("grad_source", i, grad_source[i], expected, rounding_of(dtype) * fabs(expected));
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "scatter", scatter);
}
