#include "cuda_ops/cumsum.h"
#include "cuda_ops/halves_cpu.h"

#include "check.h"

static void check_sums(int64_t outer, int64_t cols, int64_t inner, int reverse, cuda_ops_dtype dtype)
{
    const int64_t count = outer * cols * inner;
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(count, dtype);
    const int64_t units = cuda_ops_cumsum_units_cpu(outer, inner);
    IN_TWO_PIECES(units, begin, end, cuda_ops_cumsum_cpu(output, input, cols, inner, reverse, begin, end, dtype));
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) {
            double sum = 0;
            for (int64_t c = 0; c < cols; c++) {
                const int64_t at = (o * cols + (reverse ? cols - 1 - c : c)) * inner + i;
                sum += get(input, at, dtype);
                CHECK_NEAR(output, at, sum, rounding(dtype), dtype);
            }
        }
    guarded_free(input, count, dtype);
    guarded_free(output, count, dtype);
}

/* The second unit alone leaves the others as they were. */
static void check_range(cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(15, 2, dtype), *output = guarded_new(15, dtype);
    CHECK_OK(cuda_ops_cumsum_cpu(output, input, 5, 1, 0, 1, 2, dtype));
    for (int64_t i = 0; i < 5; i++) {
        CHECK_UNWRITTEN(output, i, dtype);
        CHECK_UNWRITTEN(output, 10 + i, dtype);
    }
    CHECK_NEAR(output, 5, get(input, 5, dtype), 0, dtype);
    guarded_free(input, 15, dtype);
    guarded_free(output, 15, dtype);
}

/* Halves give what their values give as floats, rounded. */
static void check_halves(int reverse)
{
    enum { MOST = 3 * 1100 };
    static uint16_t x[MOST], y[MOST], expected[MOST];
    static float wide[MOST], sums[MOST];
    const int64_t sizes[][3] = {{3, 1100, 1}, {2, 9, 131}, {1, 1, 1}};
    const cuda_ops_dtype dtypes[] = {CUDA_OPS_FLOAT16, CUDA_OPS_BFLOAT16};
    for (int i = 0; i < 6; i++) {
        const int64_t outer = sizes[i / 2][0], cols = sizes[i / 2][1], inner = sizes[i / 2][2];
        const int64_t count = outer * cols * inner, units = cuda_ops_cumsum_units_cpu(outer, inner);
        const cuda_ops_dtype dtype = dtypes[i % 2];
        for (int64_t k = 0; k < count; k++)
            wide[k] = (float)number((uint64_t)k);
        CHECK_OK(cuda_ops_round_cpu(x, wide, count, dtype));
        CHECK_OK(cuda_ops_widen_cpu(wide, x, count, dtype));
        CHECK_OK(cuda_ops_cumsum_cpu(sums, wide, cols, inner, reverse, 0, units, CUDA_OPS_FLOAT32));
        CHECK_OK(cuda_ops_round_cpu(expected, sums, count, dtype));
        CHECK_OK(cuda_ops_cumsum_cpu(y, x, cols, inner, reverse, 0, units, dtype));
        for (int64_t k = 0; k < count; k++)
            CHECK(y[k] == expected[k], "element %lld is %04x, expected %04x", (long long)k, y[k], expected[k]);
    }
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int reverse = 0; reverse < 2; reverse++) {
            /* Rows; columns of less than a tile of 64, of one, and of more */
            check_sums(1, 1, 1, reverse, dtype);
            check_sums(5, 33, 1, reverse, dtype);
            check_sums(2, 1100, 1, reverse, dtype); /* eight runs of 64, twice, and a rest */
            if (dtype == CUDA_OPS_FLOAT32)
                check_halves(reverse);
            check_sums(1, 17, 7, reverse, dtype);
            check_sums(3, 5, 64, reverse, dtype);
            check_sums(2, 9, 131, reverse, dtype);
        }
        check_range(dtype);
    }
    CHECK_OK(cuda_ops_cumsum_cpu(NULL, NULL, 5, 1, 0, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_cumsum_cpu(NULL, NULL, 5, 1, 0, 0, 1, (cuda_ops_dtype)99), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
