#include "cuda_ops/permute_contiguous.h"

#include "check.h"

/* `order`: the dimensions of a dense input of these sizes in the order of output. */
static void check_permutation(int dims, const int64_t *sizes, const int *order, cuda_ops_dtype dtype)
{
    int64_t strides[CUDA_OPS_PERMUTE_DIMS], to_sizes[CUDA_OPS_PERMUTE_DIMS], to_strides[CUDA_OPS_PERMUTE_DIMS];
    int64_t count = 1;
    for (int d = dims - 1; d >= 0; d--) {
        strides[d] = count;
        count *= sizes[d];
    }
    for (int d = 0; d < dims; d++) {
        to_sizes[d] = sizes[order[d]];
        to_strides[d] = strides[order[d]];
    }
    cuda_ops_permutation p;
    CHECK(cuda_ops_permute_collapse(&p, dims, to_sizes, to_strides), "%d dimensions are too many", dims);
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(count, dtype);
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_permute_contiguous_cpu(output, input, &p, begin, end, (int)size_of(dtype)));
    for (int64_t at = 0; at < count; at++) {
        int64_t index = at, offset = 0;
        for (int d = dims - 1; d >= 0; d--) {
            offset += index % to_sizes[d] * to_strides[d];
            index /= to_sizes[d];
        }
        CHECK(get(output, at, dtype) == get(input, offset, dtype), "element %lld is %g, expected %g", (long long)at,
              get(output, at, dtype), get(input, offset, dtype));
    }
    guarded_free(input, count, dtype);
    guarded_free(output, count, dtype);
}

/* A transposed matrix of 2 bytes each. */
static void check_halves(void)
{
    enum { ROWS = 33, COLS = 65 };
    uint16_t input[ROWS * COLS], output[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        input[i] = (uint16_t)i;
    cuda_ops_permutation p;
    CHECK(cuda_ops_permute_collapse(&p, 2, (int64_t[]){COLS, ROWS}, (int64_t[]){1, COLS}), "a matrix does not fit");
    CHECK_OK(cuda_ops_permute_contiguous_cpu(output, input, &p, 0, ROWS * COLS, 2));
    for (int c = 0; c < COLS; c++)
        for (int r = 0; r < ROWS; r++)
            CHECK(output[c * ROWS + r] == r * COLS + c, "element %d, %d is another", c, r);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        /* No dimensions; one; matrices below a block of 16, of blocks and more; rows that stay; batches */
        check_permutation(0, NULL, NULL, dtype);
        check_permutation(1, (int64_t[]){7}, (int[]){0}, dtype);
        check_permutation(2, (int64_t[]){3, 5}, (int[]){1, 0}, dtype);
        check_permutation(2, (int64_t[]){32, 48}, (int[]){1, 0}, dtype);
        check_permutation(2, (int64_t[]){33, 65}, (int[]){1, 0}, dtype);
        check_permutation(3, (int64_t[]){3, 17, 5}, (int[]){1, 0, 2}, dtype);
        check_permutation(3, (int64_t[]){3, 17, 35}, (int[]){0, 2, 1}, dtype);
        check_permutation(4, (int64_t[]){2, 3, 5, 7}, (int[]){0, 2, 3, 1}, dtype);
        check_permutation(4, (int64_t[]){2, 1, 5, 7}, (int[]){3, 1, 2, 0}, dtype);
        check_permutation(5, (int64_t[]){2, 3, 2, 3, 2}, (int[]){4, 2, 0, 3, 1}, dtype);
    }
    check_halves();
    cuda_ops_permutation p;
    const int64_t sizes[] = {2, 2, 2, 2, 2, 2, 2, 2, 2}, apart[] = {1, 3, 9, 27, 81, 243, 729, 2187, 6561};
    CHECK(!cuda_ops_permute_collapse(&p, 9, sizes, apart), "nine dimensions fit");
    CHECK(cuda_ops_permute_collapse(&p, 3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1}) && p.dims == 1 &&
              p.sizes[0] == 24,
          "a contiguous tensor has %d dimensions", p.dims);
    CHECK_STATUS(cuda_ops_permute_contiguous_cpu(NULL, NULL, &p, 0, 0, 3), CUDA_OPS_UNSUPPORTED_DTYPE);
    p.dims = 9;
    CHECK_STATUS(cuda_ops_permute_contiguous_cpu(NULL, NULL, &p, 0, 0, 4), CUDA_OPS_INVALID_ARGUMENT);
    p.dims = 1, p.sizes[0] = 0;
    CHECK_STATUS(cuda_ops_permute_contiguous_cpu(NULL, NULL, &p, 0, 3, 4), CUDA_OPS_SUCCESS);
    return 0;
}
