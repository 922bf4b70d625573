#include "cuda_ops/dropout.h"

#include "check.h"

/* The known answers of the authors' own implementation, for a counter and key of zeros, and of ones throughout. */
static void check_philox(void)
{
    uint32_t zeros[4] = {0, 0, 0, 0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    const uint32_t of_zeros[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
    const uint32_t of_ones[4] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
    cuda_ops_philox(zeros, 0, 0);
    cuda_ops_philox(ones, ~0u, ~0u);
    CHECK(memcmp(zeros, of_zeros, sizeof(zeros)) == 0, "%08x", zeros[0]);
    CHECK(memcmp(ones, of_ones, sizeof(ones)) == 0, "%08x", ones[0]);
}

/* Whether the contract in the header drops element i. */
static bool is_dropped(int64_t i, double p, cuda_ops_philox_state state)
{
    const uint64_t block = (uint64_t)i / 4, offset = state.offset / 4;
    uint32_t counter[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)block, (uint32_t)(block >> 32)};
    cuda_ops_philox(counter, (uint32_t)state.seed, (uint32_t)(state.seed >> 32));
    return p >= 1 || (double)counter[i % 4] < floor(p * 4294967296.0 + 0.5);
}

static void check_range(int64_t count, int64_t begin, int64_t end, double p, cuda_ops_dtype dtype)
{
    const cuda_ops_philox_state state = {.seed = 0x123456789abcdefu, .offset = (1ull << 35) + 8};
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_dropout_cpu(output, input, begin, end, p, state, dtype));
    for (int64_t i = 0; i < count; i++) {
        if (begin <= i && i < end)
            CHECK_NEAR(output, i, is_dropped(i, p, state) ? 0 : get(input, i, dtype) / (1 - p), rounding(dtype), dtype);
        else
            CHECK_UNWRITTEN(output, i, dtype);
    }
    void *residual = guarded_numbers(count, 2, dtype), *sum = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_dropout_add_cpu(sum, input, residual, begin, end, p, state, dtype));
    for (int64_t i = 0; i < count; i++) {
        if (begin <= i && i < end)
            CHECK_NEAR(sum, i, (is_dropped(i, p, state) ? 0 : get(input, i, dtype) / (1 - p)) + get(residual, i, dtype),
                       rounding(dtype), dtype);
        else
            CHECK_UNWRITTEN(sum, i, dtype);
    }
    guarded_free(input, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(residual, count, dtype);
    guarded_free(sum, count, dtype);
}

/* What is kept says what has been dropped, and is applied again. */
static void check_kept(int64_t count, double p, cuda_ops_dtype dtype)
{
    const cuda_ops_philox_state state = {.seed = 0x123456789abcdefu, .offset = (1ull << 35) + 8};
    const int64_t blocks = (count + CUDA_OPS_DROPOUT_KEPT_BLOCK - 1) / CUDA_OPS_DROPOUT_KEPT_BLOCK;
    const int64_t words = (count + 31) / 32;
    void *input = guarded_numbers(count, 1, dtype), *residual = guarded_numbers(count, 2, dtype);
    void *sum = guarded_new(count, dtype), *output = guarded_new(count, dtype), *again = guarded_new(count, dtype);
    uint32_t *kept = guarded_bytes(words, sizeof(uint32_t));
    IN_TWO_PIECES(blocks, begin, end,
                  cuda_ops_dropout_keep_cpu(sum, kept, input, residual, count, begin, end, p, state, dtype));
    memset(kept, 0, (size_t)words * sizeof(uint32_t));
    IN_TWO_PIECES(blocks, begin, end,
                  cuda_ops_dropout_keep_cpu(output, kept, input, NULL, count, begin, end, p, state, dtype));
    IN_TWO_PIECES(blocks, begin, end, cuda_ops_dropout_kept_cpu(again, input, kept, count, begin, end, p, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double value = is_dropped(i, p, state) ? 0 : get(input, i, dtype) / (1 - p);
        CHECK(p >= 1 || (kept[i / 32] >> (i % 32) & 1) == !is_dropped(i, p, state), "element %d", (int)i);
        CHECK_NEAR(sum, i, value + get(residual, i, dtype), rounding(dtype), dtype);
        CHECK_NEAR(output, i, value, rounding(dtype), dtype);
        CHECK_NEAR(again, i, value, rounding(dtype), dtype);
    }
    guarded_free(input, count, dtype);
    guarded_free(residual, count, dtype);
    guarded_free(sum, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(again, count, dtype);
    guarded_free_bytes(kept, words, sizeof(uint32_t));
}

/* As many as p says: within five standard deviations. */
static void check_frequency(double p)
{
    enum { COUNT = 100000 };
    const cuda_ops_philox_state state = {.seed = 7};
    float *x = guarded_new(COUNT, CUDA_OPS_FLOAT32);
    for (int64_t i = 0; i < COUNT; i++)
        x[i] = 1;
    CHECK_OK(cuda_ops_dropout_cpu(x, x, 0, COUNT, p, state, CUDA_OPS_FLOAT32));
    double dropped = 0;
    for (int64_t i = 0; i < COUNT; i++)
        dropped += x[i] == 0;
    CHECK(fabs(dropped - p * COUNT) <= 5 * sqrt(COUNT * p * (1 - p)), "%g of %d for p = %g", dropped, COUNT, p);
    guarded_free(x, COUNT, CUDA_OPS_FLOAT32);
}

int main(void)
{
    check_philox();
    FOR_STORED_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 3, 31, 33, 1025};
        const double probabilities[] = {0, 0.1, 0.5, 0.999, 1};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (size_t p = 0; p < sizeof(probabilities) / sizeof(probabilities[0]); p++)
                for (int64_t shift = 0; shift < 5; shift++) /* ranges that begin and end within a quadruple */
                    check_range(sizes[s], sizes[s] < shift ? sizes[s] : shift, sizes[s], probabilities[p], dtype);
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (size_t p = 0; p < sizeof(probabilities) / sizeof(probabilities[0]); p++)
                check_kept(sizes[s], probabilities[p], dtype);
        check_range(40, 7, 30, 0.5, dtype);
        check_range(5, 2, 2, 0.5, dtype);
    }
    const double probabilities[] = {0, 0.1, 0.5, 0.9, 1};
    for (size_t p = 0; p < sizeof(probabilities) / sizeof(probabilities[0]); p++)
        check_frequency(probabilities[p]);
    const cuda_ops_philox_state state = {.seed = 7};
    CHECK_STATUS(cuda_ops_dropout_cpu(NULL, NULL, 0, 1, 0.5, state, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_dropout_keep_cpu(NULL, NULL, NULL, NULL, 1, 0, 1, 1.5, state, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_dropout_kept_cpu(NULL, NULL, NULL, 1, 0, 1, 0.5, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
