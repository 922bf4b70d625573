/* Geometries that test_max_pool2d.c and test_avg_pool2d.c share, and how an element is addressed in either order. */
#ifndef CUDA_OPS_TEST_POOL_CASES_H
#define CUDA_OPS_TEST_POOL_CASES_H

#include "check.h"
#include "cuda_ops/pool2d.h"

/* input, kernel, stride, padding, dilation, ceil_mode of one axis */
typedef struct pool_case {
    int32_t input, kernel, stride, padding, dilation;
    bool ceil_mode;
} pool_case;

/* Windows that tile, overlap, leave gaps, hang over the end, are the whole axis, and one element. */
static const pool_case POOL_CASES[] = {
    {8, 2, 2, 0, 1, false}, {7, 3, 2, 1, 1, false}, {9, 2, 3, 0, 1, false},
    {7, 2, 2, 1, 1, true},  {5, 5, 1, 2, 1, true},  {1, 1, 1, 0, 1, false},
};
enum { POOL_CASE_COUNT = sizeof(POOL_CASES) / sizeof(POOL_CASES[0]) };

static inline cuda_ops_pool_axis pool_axis(pool_case c)
{
    const int64_t output = cuda_ops_pool_output_size(c.input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    return (cuda_ops_pool_axis){c.input, (int32_t)output, c.kernel, c.stride, c.padding, c.dilation};
}

static inline cuda_ops_pool2d pool_of(int64_t batch, int64_t channels, pool_case height, pool_case width, bool last)
{
    return (cuda_ops_pool2d){batch, channels, pool_axis(height), pool_axis(width), last};
}

static inline int64_t pool_index(const cuda_ops_pool2d *pool, int64_t plane, int64_t h, int64_t w, int64_t height,
                                 int64_t width)
{
    const int64_t n = plane / pool->channels, c = plane % pool->channels;
    return pool->channels_last ? ((n * height + h) * width + w) * pool->channels + c : (plane * height + h) * width + w;
}

/* How many ranges there are to cut: planes, or rows of `height` in channels_last. */
static inline int64_t pool_ranges(const cuda_ops_pool2d *pool, int64_t height)
{
    return pool->channels_last ? pool->batch * height : pool->batch * pool->channels;
}

/* Whether the range [begin, end) holds row `h` of the plane. */
static inline bool pool_in_range(const cuda_ops_pool2d *pool, int64_t plane, int64_t h, int64_t height, int64_t begin,
                                 int64_t end)
{
    const int64_t range = pool->channels_last ? plane / pool->channels * height + h : plane;
    return begin <= range && range < end;
}

#endif
