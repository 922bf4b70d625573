// cumsum along rows of any length, both ways; columns wait for each other's sums, which needs blocks that run together.
#include "cases.h"
#include "cuda_ops/cumsum.h"

using namespace emulation;

static void cumsum(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const int reverse = one_in(2);
    const int64_t outer = one_in(2) ? 1 : random_size(40), cols = random_size((one_in(3) ? 100000 : 9000) / outer + 1);
    const int64_t count = outer * cols;
    const Array input = Array(count, dtype).random(), output(count, dtype);
    if (one_in(4)) // travels to what is behind it in its row
        set(input.data, random_in(0, count - 1), one_in(2) ? NAN : INFINITY, dtype);
    describe("case %lld: outer %lld, cols %lld, dtype %d%s", (long long)number, (long long)outer, (long long)cols,
             dtype, reverse ? ", reverse" : "");
    void *const workspace = device_memory((size_t)cuda_ops_cumsum_workspace_cuda(outer, cols, 1, dtype), 0);
    expect_success(cuda_ops_cumsum_cuda(output.data, workspace, input.data, outer, cols, 1, reverse, dtype, nullptr));
    for (int64_t o = 0; o < outer; o++) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = o * cols + (reverse ? cols - 1 - c : c);
            sum += input[at], size += fabs(input[at]);
            expect_near("output", at, output[at], sum,
                        rounding_of(dtype) * fabs(sum) + (dtype == CUDA_OPS_FLOAT64 ? 1e-14 : 1e-6) * size);
        }
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "cumsum", cumsum);
}
