#include "cuda_ops/concat.h"

#include "check.h"

static void check_concat(int64_t outer, int64_t inner, int64_t count, const int64_t *cols, cuda_ops_dtype dtype)
{
    void *inputs[8];
    int64_t all = 0;
    for (int64_t i = 0; i < count; i++) {
        inputs[i] = guarded_numbers(outer * cols[i] * inner, (uint64_t)i + 1, dtype);
        all += cols[i];
    }
    const int64_t elements = outer * all * inner;
    void *output = guarded_new(elements, dtype);
    IN_TWO_PIECES(elements, begin, end,
                  cuda_ops_concat_cpu(output, (const void *const *)inputs, cols, count, outer, inner, begin, end,
                                      (int)size_of(dtype)));
    for (int64_t o = 0; o < outer; o++) {
        int64_t first = 0;
        for (int64_t i = 0; i < count; first += cols[i++])
            for (int64_t k = 0; k < cols[i] * inner; k++) {
                const int64_t at = (o * all + first) * inner + k;
                CHECK(get(output, at, dtype) == get(inputs[i], o * cols[i] * inner + k, dtype), "element %lld is %g",
                      (long long)at, get(output, at, dtype));
            }
    }
    for (int64_t i = 0; i < count; i++)
        guarded_free(inputs[i], outer * cols[i] * inner, dtype);
    guarded_free(output, elements, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        check_concat(1, 1, 1, (int64_t[]){5}, dtype);
        check_concat(1, 3, 3, (int64_t[]){2, 0, 4}, dtype);
        check_concat(4, 1, 2, (int64_t[]){3, 5}, dtype);
        check_concat(3, 7, 4, (int64_t[]){1, 2, 0, 3}, dtype);
    }
    CHECK_OK(cuda_ops_concat_cpu(NULL, NULL, NULL, 0, 3, 4, 0, 0, 4));
    CHECK_STATUS(cuda_ops_concat_cpu(NULL, NULL, NULL, 0, 3, 4, 0, 0, 3), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
