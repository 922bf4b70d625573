#include "cuda_ops/fold_batch_norm.h"

#include "check.h"

/* Channels [begin, end) of `channels`; the others must not be touched. */
static void check_range(int64_t channels, int64_t count, int64_t begin, int64_t end, bool all, cuda_ops_dtype dtype)
{
    void *weight = guarded_numbers(channels * count, 1, dtype), *bias = guarded_numbers(channels, 2, dtype);
    void *norm_weight = guarded_numbers(channels, 3, dtype), *norm_bias = guarded_numbers(channels, 4, dtype);
    void *mean = guarded_numbers(channels, 5, dtype), *variance = guarded_numbers(channels, 6, dtype);
    for (int64_t o = 0; o < channels; o++)
        set(variance, o, fabs(get(variance, o, dtype)), dtype);
    void *folded_weight = guarded_new(channels * count, dtype), *folded_bias = guarded_new(channels, dtype);
    const cuda_ops_fold fold = {weight,
                                all ? bias : NULL,
                                all ? norm_weight : NULL,
                                all ? norm_bias : NULL,
                                mean,
                                variance,
                                channels,
                                count,
                                0.25,
                                dtype,
                                dtype,
                                dtype};
    CHECK_OK(cuda_ops_fold_batch_norm_cpu(folded_weight, folded_bias, &fold, begin, end));
    for (int64_t o = 0; o < channels; o++) {
        const bool inside = begin <= o && o < end;
        const double scale = (all ? get(norm_weight, o, dtype) : 1.0) / sqrt(get(variance, o, dtype) + 0.25);
        const double before = (all ? get(bias, o, dtype) : 0.0) - get(mean, o, dtype);
        const double expected = before * scale + (all ? get(norm_bias, o, dtype) : 0.0);
        if (inside)
            CHECK_NEAR(folded_bias, o, expected, rounding(dtype), dtype);
        else
            CHECK_UNWRITTEN(folded_bias, o, dtype);
        for (int64_t i = o * count; i < (o + 1) * count; i++)
            if (inside)
                CHECK_NEAR(folded_weight, i, get(weight, i, dtype) * scale, rounding(dtype), dtype);
            else
                CHECK_UNWRITTEN(folded_weight, i, dtype);
    }
    void *const of_channels[] = {bias, norm_weight, norm_bias, mean, variance, folded_bias};
    for (size_t i = 0; i < sizeof(of_channels) / sizeof(of_channels[0]); i++)
        guarded_free(of_channels[i], channels, dtype);
    guarded_free(weight, channels * count, dtype);
    guarded_free(folded_weight, channels * count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int all = 0; all < 2; all++) {
            check_range(1, 1, 0, 1, all, dtype);
            check_range(7, 27, 0, 7, all, dtype);
            check_range(9, 64, 2, 5, all, dtype);
            check_range(3, 5, 1, 1, all, dtype);
        }
    }
    const cuda_ops_fold halves = {.channels = 1, .count = 1, .weight_dtype = CUDA_OPS_FLOAT16};
    CHECK_STATUS(cuda_ops_fold_batch_norm_cpu(NULL, NULL, &halves, 0, 1), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
