#include "cuda_ops/random_fill.h"

#include "check.h"

enum { COUNT = 333 };

/* From any place on the numbers are those of the whole, and each is that of its words. */
static void check_fill(uint64_t seed, uint64_t offset, cuda_ops_dtype dtype)
{
    const cuda_ops_philox_state philox = {seed, offset, NULL, NULL};
    void *uniform = guarded_new(COUNT, dtype), *normal = guarded_new(COUNT, dtype), *part = guarded_new(COUNT, dtype);
    IN_TWO_PIECES(COUNT, begin, end,
                  cuda_ops_random_fill_cpu(uniform, begin, end, CUDA_OPS_UNIFORM, -1, 3, philox, dtype));
    IN_TWO_PIECES(COUNT, begin, end,
                  cuda_ops_random_fill_cpu(normal, begin, end, CUDA_OPS_NORMAL, 1, 2, philox, dtype));
    CHECK_OK(cuda_ops_random_fill_cpu(part, 100, 200, CUDA_OPS_UNIFORM, -1, 3, philox, dtype));
    const int64_t of_counter = dtype == CUDA_OPS_FLOAT64 ? 2 : 4;
    for (int64_t i = 0; i < COUNT; i++) {
        const uint64_t counter = (uint64_t)(i / of_counter), low = offset / 4;
        uint32_t words[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)counter, (uint32_t)(counter >> 32)};
        cuda_ops_philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
        const int64_t k = i % of_counter, pair = k / 2 * 2;
        const bool is_float = dtype == CUDA_OPS_FLOAT32;
        const double unit =
            is_float ? cuda_ops_unit_float(words[k]) : cuda_ops_unit_double(words[2 * k], words[2 * k + 1]);
        const double first =
            is_float ? cuda_ops_positive_unit_float(words[pair]) : cuda_ops_positive_unit_double(words[0], words[1]);
        const double second =
            is_float ? cuda_ops_unit_float(words[pair + 1]) : cuda_ops_unit_double(words[2], words[3]);
        const double angle = 6.283185307179586 * second, turned = k % 2 == 0 ? cos(angle) : sin(angle);
        CHECK_NEAR(uniform, i, -1 + 4 * unit, rounding(dtype), dtype);
        CHECK_NEAR(normal, i, 1 + 2 * sqrt(-2 * log(first)) * turned, 10 * rounding(dtype), dtype);
        if (100 <= i && i < 200)
            CHECK_NEAR(part, i, get(uniform, i, dtype), 0, dtype);
        else
            CHECK_UNWRITTEN(part, i, dtype);
    }
    CHECK_STATUS(cuda_ops_random_fill_cpu(part, 0, 1, CUDA_OPS_UNIFORM, 1, 0, philox, dtype),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_random_fill_cpu(part, 0, 1, CUDA_OPS_NORMAL, 0, -1, philox, dtype),
                 CUDA_OPS_INVALID_ARGUMENT);
    guarded_free(uniform, COUNT, dtype);
    guarded_free(normal, COUNT, dtype);
    guarded_free(part, COUNT, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        check_fill(0, 0, dtype);
        check_fill(0x299f31d0a4093822u, 4 * 0x0103707344u, dtype);
    }
    const cuda_ops_philox_state philox = {0, 0, NULL, NULL};
    CHECK_STATUS(cuda_ops_random_fill_cpu(NULL, 0, 0, CUDA_OPS_NORMAL, 0, 1, philox, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
