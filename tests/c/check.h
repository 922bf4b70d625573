/* What the C tests share: a check that tells where it failed, guards around arrays, and numbers to test with.
 *
 * A test is a program: main runs everything and returns 0, or the first check that does not hold ends it with 1.
 * Arrays come from guarded_new: exactly the elements asked for are the test's own, the GUARD ones on either side hold
 * a pattern that guarded_free looks at again, so that a write beyond the range is found even where the address
 * sanitizer sees nothing amiss. Elements start as NaN: one that the kernel forgot is seen.
 */
#ifndef CUDA_OPS_TEST_CHECK_H
#define CUDA_OPS_TEST_CHECK_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_ops/core.h"

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition);                              \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_STATUS(call, expected)                                                                                   \
    do {                                                                                                               \
        const cuda_ops_status check_status_ = (call);                                                                  \
        CHECK(check_status_ == (expected), "status %d (%s), expected %d", check_status_,                               \
              cuda_ops_status_string(check_status_), (expected));                                                      \
    } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, CUDA_OPS_SUCCESS)

enum { GUARD = 16 };
#define GUARD_BYTE 0x5a

#define FOR_CPU_DTYPES(dtype) for (cuda_ops_dtype dtype = CUDA_OPS_FLOAT32; dtype <= CUDA_OPS_FLOAT64; dtype++)
/* Of kernels that take bfloat16 as it lies too. */
#define FOR_STORED_DTYPES(dtype)                                                                                       \
    for (cuda_ops_dtype dtype = CUDA_OPS_FLOAT32; (int)dtype >= 0;                                                     \
         dtype = dtype == CUDA_OPS_FLOAT32   ? CUDA_OPS_FLOAT64                                                        \
                 : dtype == CUDA_OPS_FLOAT64 ? CUDA_OPS_BFLOAT16                                                       \
                                             : (cuda_ops_dtype) - 1)

/* In which they take what is beside the elements, such as factors. */
static inline cuda_ops_dtype computed_dtype(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? CUDA_OPS_FLOAT32 : dtype;
}

/* Relative error that rounding in a short sum, or of a result to bfloat16, may leave. */
static inline double rounding(cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_BFLOAT16)
        return 0x1p-8;
    return dtype == CUDA_OPS_FLOAT32 ? 1e-5 : 1e-13;
}

static inline size_t size_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? sizeof(uint16_t) : dtype == CUDA_OPS_FLOAT32 ? sizeof(float) : sizeof(double);
}

static inline double get(const void *array, int64_t index, cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_BFLOAT16) {
        const uint32_t bits = (uint32_t)((const uint16_t *)array)[index] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    return dtype == CUDA_OPS_FLOAT32 ? (double)((const float *)array)[index] : ((const double *)array)[index];
}

static inline void set(void *array, int64_t index, double value, cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_BFLOAT16) { /* rounded to nearest, up where it is a tie */
        const float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        ((uint16_t *)array)[index] = (uint16_t)((bits + (isnan(single) ? 0 : 0x8000)) >> 16);
    } else if (dtype == CUDA_OPS_FLOAT32)
        ((float *)array)[index] = (float)value;
    else
        ((double *)array)[index] = value;
}

static inline void *guarded_bytes(int64_t count, size_t size)
{
    unsigned char *block = malloc(((size_t)count + 2 * GUARD) * size);
    CHECK(block != NULL, "out of memory");
    memset(block, GUARD_BYTE, ((size_t)count + 2 * GUARD) * size);
    return block + GUARD * size;
}

static inline void guarded_check_bytes(const void *array, int64_t count, size_t size)
{
    const unsigned char *before = (const unsigned char *)array - GUARD * size;
    const unsigned char *after = (const unsigned char *)array + (size_t)count * size;
    for (size_t i = 0; i < GUARD * size; i++)
        CHECK(before[i] == GUARD_BYTE && after[i] == GUARD_BYTE, "byte %zu of a guard was overwritten", i);
}

static inline void guarded_free_bytes(void *array, int64_t count, size_t size)
{
    guarded_check_bytes(array, count, size);
    free((unsigned char *)array - GUARD * size);
}

/* `count` elements of NaN between two guards. */
static inline void *guarded_new(int64_t count, cuda_ops_dtype dtype)
{
    void *array = guarded_bytes(count, size_of(dtype));
    for (int64_t i = 0; i < count; i++)
        set(array, i, NAN, dtype);
    return array;
}

static inline void guarded_free(void *array, int64_t count, cuda_ops_dtype dtype)
{
    guarded_free_bytes(array, count, size_of(dtype));
}

static inline int64_t *guarded_new_i64(int64_t count)
{
    return guarded_bytes(count, sizeof(int64_t));
}

static inline void guarded_free_i64(int64_t *array, int64_t count)
{
    guarded_free_bytes(array, count, sizeof(int64_t));
}

/* A number in [-2, 2) that looks random and depends on `seed` alone. A float holds it exactly, so that the double
 * references compute from the very numbers that the kernels see. */
static inline double number(uint64_t seed)
{
    seed = (seed + 1) * 0x9e3779b97f4a7c15u;
    seed ^= seed >> 29;
    seed *= 0xbf58476d1ce4e5b9u;
    seed ^= seed >> 32;
    return (double)(int64_t)(seed >> 42) / (1 << 20) - 2;
}

/* An array of such numbers between two guards. */
static inline void *guarded_numbers(int64_t count, uint64_t seed, cuda_ops_dtype dtype)
{
    void *array = guarded_new(count, dtype);
    for (int64_t i = 0; i < count; i++)
        set(array, i, number(seed * 1000003 + (uint64_t)i), dtype);
    return array;
}

/* Element `index` within `tolerance` of `expected`, relative to 1 + |expected|. NaN is near to nothing. */
#define CHECK_NEAR(array, index, expected, tolerance, dtype)                                                           \
    do {                                                                                                               \
        const double near_actual_ = get(array, index, dtype), near_expected_ = (expected);                             \
        CHECK(fabs(near_actual_ - near_expected_) <= (tolerance) * (1 + fabs(near_expected_)),                         \
              "element %lld is %.17g, expected %.17g", (long long)(index), near_actual_, near_expected_);              \
    } while (0)

/* Element `index` still the NaN that guarded_new put there: nothing wrote to it. */
#define CHECK_UNWRITTEN(array, index, dtype)                                                                           \
    CHECK(isnan(get(array, index, dtype)), "element %lld was written", (long long)(index))

/* The call over ranges [begin, end) of [0, count): two of them, as two threads would take them. */
#define IN_TWO_PIECES(count, begin, end, call)                                                                         \
    do {                                                                                                               \
        const int64_t count_ = (count);                                                                                \
        for (int piece_ = 0; piece_ < 2; piece_++) {                                                                   \
            const int64_t begin = piece_ * (count_ / 2), end = piece_ ? count_ : count_ / 2;                           \
            CHECK_OK(call);                                                                                            \
        }                                                                                                              \
    } while (0)

#endif
