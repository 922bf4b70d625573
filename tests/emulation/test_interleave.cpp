// interleave and its backward: rows of whole vectors and not, inputs that are columns of larger matrices.
#include "cases.h"
#include "cuda_ops/interleave.h"

using namespace emulation;

static void interleave(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const int64_t cols = random_size(300), rows = random_size(4000 / cols + 1);
    const int64_t strides[] = {cols + (one_in(2) ? random_in(0, 9) : 0), cols + (one_in(2) ? cols : 0)};
    const Array input = Array((rows - 1) * strides[0] + cols, dtype).random();
    const Array other = Array((rows - 1) * strides[1] + cols, dtype).random();
    const Array output(2 * rows * cols, dtype), grad = Array(2 * rows * cols, dtype).random();
    const Array of_input(rows * cols, dtype), of_other(rows * cols, dtype);
    describe("case %lld: %lld rows of %lld, strides %lld and %lld, dtype %d", (long long)number, (long long)rows,
             (long long)cols, (long long)strides[0], (long long)strides[1], dtype);
    expect_success(cuda_ops_interleave_forward_cuda(output.data, input.data, other.data, strides[0], strides[1], rows,
                                                    cols, bytes_of(dtype), nullptr));
    expect_success(cuda_ops_interleave_backward_cuda(of_input.data, of_other.data, grad.data, rows, cols,
                                                     bytes_of(dtype), nullptr));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = r * cols + c;
            expect_near("output", 2 * at, output[2 * at], input[r * strides[0] + c], 0);
            expect_near("output", 2 * at + 1, output[2 * at + 1], other[r * strides[1] + c], 0);
            expect_near("grad_input", at, of_input[at], grad[2 * at], 0);
            expect_near("grad_other", at, of_other[at], grad[2 * at + 1], 0);
        }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "interleave", interleave);
}
