#include "cuda_ops/add2.h"

#include "check.h"

/* Elements [begin, end) of `count`; the others must not be touched. */
static void check_range(int64_t count, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(count, 1, dtype), *other = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_add2_forward_cpu(output, input, other, begin, end, dtype));
    for (int64_t i = 0; i < count; i++) {
        if (begin <= i && i < end)
            CHECK_NEAR(output, i, get(input, i, dtype) + get(other, i, dtype), rounding(dtype), dtype);
        else
            CHECK_UNWRITTEN(output, i, dtype);
    }
    CHECK_OK(cuda_ops_add2_forward_cpu(other, input, other, begin, end, dtype));
    for (int64_t i = begin; i < end; i++)
        CHECK(get(other, i, dtype) == get(output, i, dtype), "in place differs at %lld", (long long)i);
    guarded_free(input, count, dtype);
    guarded_free(other, count, dtype);
    guarded_free(output, count, dtype);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 3, 31, 33, 1025};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            check_range(sizes[s], 0, sizes[s], dtype);
            check_range(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, dtype);
            check_range(sizes[s], sizes[s] / 2, sizes[s] / 2, dtype);
        }
        CHECK_OK(cuda_ops_add2_forward_cpu(NULL, NULL, NULL, 0, 0, dtype));
    }
    CHECK_STATUS(cuda_ops_add2_forward_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_add2_forward_cpu(NULL, NULL, NULL, 0, 1, (cuda_ops_dtype)17), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
