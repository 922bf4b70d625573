#include "cuda_ops/histogram.h"

#include "check.h"

enum { COUNT = 1000, BINS = 7 };

static void check_histc(double low, double high, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(COUNT, 1, dtype); /* in [-2, 2) */
    set(input, 3, NAN, dtype);
    set(input, 4, high, dtype);
    set(input, 5, low, dtype);
    int64_t *counts = guarded_new_i64(BINS), expected[BINS] = {0};
    memset(counts, 0, BINS * sizeof(int64_t));
    IN_TWO_PIECES(COUNT, begin, end, cuda_ops_histc_cpu(counts, input, begin, end, BINS, low, high, dtype));
    for (int64_t i = 0; i < COUNT; i++) {
        const double value = get(input, i, dtype);
        if (!(value >= low && value <= high))
            continue;
        const double place = dtype == CUDA_OPS_FLOAT32
                                 ? ((float)value - (float)low) * (float)BINS / ((float)high - (float)low)
                                 : (value - low) * BINS / (high - low);
        expected[place >= BINS ? BINS - 1 : (int)place]++;
    }
    for (int bin = 0; bin < BINS; bin++)
        CHECK(counts[bin] == expected[bin], "bin %d has %lld, expected %lld", bin, (long long)counts[bin],
              (long long)expected[bin]);
    CHECK_STATUS(cuda_ops_histc_cpu(counts, input, 0, COUNT, BINS, high, low, dtype), CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_histc_cpu(counts, input, 0, COUNT, BINS, low, INFINITY, dtype), CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_histc_cpu(counts, input, 0, COUNT, 0, low, high, dtype), CUDA_OPS_INVALID_ARGUMENT);
    guarded_free_i64(counts, BINS);
    guarded_free(input, COUNT, dtype);
}

/* Keys up to BINS + 1, of which the last two have no bin; one negative where there is a sign. */
static void check_bincount(int key_bytes)
{
    uint8_t small[COUNT];
    int32_t narrow[COUNT];
    int64_t wide[COUNT], expected[BINS] = {0}, range[2];
    double expected_sums[BINS] = {0};
    for (int64_t i = 0; i < COUNT; i++) {
        wide[i] = key_bytes > 1 && i == 17 ? -5 : i * i % (BINS + 2);
        narrow[i] = (int32_t)wide[i];
        small[i] = (uint8_t)wide[i];
    }
    const void *input = key_bytes == 1   ? (const void *)small
                        : key_bytes == 4 ? (const void *)narrow
                                         : (const void *)wide;
    int64_t *counts = guarded_new_i64(BINS);
    memset(counts, 0, BINS * sizeof(int64_t));
    IN_TWO_PIECES(COUNT, begin, end, cuda_ops_bincount_cpu(counts, input, key_bytes, begin, end, BINS));
    CHECK_OK(cuda_ops_bincount_range_cpu(range, input, key_bytes, 0, COUNT));
    int64_t largest = 0;
    for (int64_t i = 0; i < COUNT; i++)
        largest = wide[i] > largest ? wide[i] : largest;
    CHECK(range[0] == (key_bytes > 1 ? -5 : 0) && range[1] == largest, "range %lld to %lld", (long long)range[0],
          (long long)range[1]);
    FOR_CPU_DTYPES(dtype)
    {
        void *weights = guarded_numbers(COUNT, 2, dtype);
        double *sums = guarded_bytes(BINS, sizeof(double));
        memset(sums, 0, BINS * sizeof(double));
        memset(expected, 0, sizeof(expected));
        memset(expected_sums, 0, sizeof(expected_sums));
        for (int64_t i = 0; i < COUNT; i++)
            if (0 <= wide[i] && wide[i] < BINS) {
                expected[wide[i]]++;
                expected_sums[wide[i]] += get(weights, i, dtype);
            }
        IN_TWO_PIECES(COUNT, begin, end,
                      cuda_ops_bincount_weights_cpu(sums, input, key_bytes, weights, begin, end, BINS, dtype));
        for (int bin = 0; bin < BINS; bin++) {
            CHECK(counts[bin] == expected[bin], "bin %d", bin);
            CHECK(sums[bin] == expected_sums[bin], "sum %d", bin);
        }
        guarded_free_bytes(sums, BINS, sizeof(double));
        guarded_free(weights, COUNT, dtype);
    }
    guarded_free_i64(counts, BINS);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        check_histc(-1, 1, dtype);
        check_histc(-2, 2, dtype);
        check_histc(0.25, 0.75, dtype);
        CHECK_OK(cuda_ops_histc_cpu(NULL, NULL, 0, 0, BINS, 0, 1, dtype));
    }
    check_bincount(1);
    check_bincount(4);
    check_bincount(8);
    CHECK_STATUS(cuda_ops_bincount_cpu(NULL, NULL, 2, 0, 0, BINS), CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_histc_cpu(NULL, NULL, 0, 0, BINS, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
