// What the tests of ops share: random sizes, arrays, and comparison.
#ifndef EMULATION_CASES_H
#define EMULATION_CASES_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "cuda_ops/core.h"
#include "emulator.h"

namespace emulation
{
static inline int64_t random_in(int64_t low, int64_t high)
{
    return low + (int64_t)random_below((uint64_t)(high - low + 1));
}
static inline bool one_in(int n)
{
    return random_below((uint64_t)n) == 0;
}
// Between 1 and `most`, small ones as often as large ones; often a multiple of 8 or next to one.
static inline int64_t random_size(int64_t most)
{
    int64_t high = 1;
    while (high < most && !one_in(6))
        high *= 2;
    int64_t size = random_in(1, high < most ? high : most);
    if (one_in(2) && size >= 8)
        size = size / 8 * 8 + (one_in(3) ? random_in(-1, 1) : 0);
    return size;
}
// Bytes behind a multiple of 16: 0 in every other case, and half of the time in the others.
static bool all_aligned;
static inline size_t random_phase(int element_bytes)
{
    return all_aligned || one_in(2) ? 0 : (size_t)(random_in(0, 16 / element_bytes - 1) * element_bytes);
}

static constexpr cuda_ops_dtype DTYPES[] = {CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT64, CUDA_OPS_FLOAT16, CUDA_OPS_BFLOAT16};
static inline int bytes_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? 8 : dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}
static inline double rounding_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64   ? 1e-15
           : dtype == CUDA_OPS_FLOAT32 ? 1.2e-7
           : dtype == CUDA_OPS_FLOAT16 ? 1e-3
                                       : 8e-3;
}
// Element i of an array of such elements.
double get(const void *array, int64_t i, cuda_ops_dtype dtype);
void set(void *array, int64_t i, double value, cuda_ops_dtype dtype);

// An array of device memory, with random values that every dtype has.
struct Array {
    cuda_ops_dtype dtype = CUDA_OPS_FLOAT32;
    int64_t count = 0;
    void *data = nullptr;

    Array() = default;
    Array(int64_t count, cuda_ops_dtype dtype) : dtype(dtype), count(count)
    {
        data = device_memory((size_t)count * (size_t)bytes_of(dtype), random_phase(bytes_of(dtype)));
    }
    Array &random()
    {
        for (int64_t i = 0; i < count; i++)
            set(data, i, (double)random_in(-128, 128) / 64, dtype);
        return *this;
    }
    Array &copy(const Array &other)
    {
        memcpy(data, other.data, (size_t)(count * bytes_of(dtype)));
        return *this;
    }
    double operator[](int64_t i) const
    {
        return get(data, i, dtype);
    }
};

// |actual - expected| <= tolerance, or both the same NaN or infinity.
static inline void expect_near(const char *what, int64_t i, double actual, double expected, double tolerance)
{
    if (!(fabs(actual - expected) <= tolerance) && !(actual == expected || (actual != actual && expected != expected)))
        fail("%s[%lld] is %.9g, not %.9g (tolerance %.3g)", what, (long long)i, actual, expected, tolerance);
}
static inline void expect_success(cuda_ops_status status)
{
    if (status != CUDA_OPS_SUCCESS)
        fail("status %d", status);
}

// Calls `one_case` with the case's number: main(argc, argv) of a test, whose arguments are the first case and how many.
template <typename Case>
static int run_cases(int argc, char **argv, const char *op, Case one_case)
{
    const int64_t first = argc > 1 ? atoll(argv[1]) : 0, count = argc > 2 ? atoll(argv[2]) : 100;
    for (int64_t number = first; number < first + count; number++) {
        seed_random((uint64_t)number * 7919 + 1);
        resident_blocks = (int)random_in(1, 4);
        all_aligned = one_in(2);
        one_case(number);
        free_all();
    }
    printf("%s: %lld cases, %lld threads\n", op, (long long)count, (long long)threads_run);
    return 0;
}
} // namespace emulation

#endif
