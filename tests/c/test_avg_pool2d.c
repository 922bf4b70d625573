#include "cuda_ops/avg_pool2d.h"

#include "pool_cases.h"

/* Positions of a window along an axis that the divisor counts, one by one. */
static int64_t counted(cuda_ops_pool_axis axis, int64_t window, bool count_include_pad)
{
    int64_t count = 0;
    for (int64_t k = 0; k < axis.kernel; k++) {
        const int64_t position = window * axis.stride - axis.padding + k;
        count += count_include_pad ? position < axis.input + axis.padding : position >= 0 && position < axis.input;
    }
    return count;
}

static void check_pool(const cuda_ops_pool2d *pool, bool include_pad, int64_t divisor, bool half_of_it,
                       cuda_ops_dtype dtype)
{
    const int64_t H = pool->height.input, W = pool->width.input, OH = pool->height.output, OW = pool->width.output;
    const int64_t planes = pool->batch * pool->channels, in_count = planes * H * W, out_count = planes * OH * OW;
    void *input = guarded_numbers(in_count, 1, dtype), *grad_output = guarded_numbers(out_count, 2, dtype);
    void *output = guarded_new(out_count, dtype), *grad_input = guarded_new(in_count, dtype);
    double *expected_grad = calloc((size_t)in_count, sizeof(double));
    CHECK(expected_grad != NULL, "out of memory");

    const int64_t ranges = pool_ranges(pool, OH);
    const int64_t begin = half_of_it ? ranges / 3 : 0, end = half_of_it ? ranges - ranges / 3 : ranges;
    CHECK_OK(cuda_ops_avg_pool2d_forward_cpu(output, input, pool, include_pad, divisor, begin, end, dtype));
    for (int64_t plane = 0; plane < planes; plane++) {
        for (int64_t y = 0; y < OH; y++) {
            for (int64_t x = 0; x < OW; x++) {
                const int64_t o = pool_index(pool, plane, y, x, OH, OW);
                if (!pool_in_range(pool, plane, y, OH, begin, end)) {
                    CHECK_UNWRITTEN(output, o, dtype);
                    continue;
                }
                const double count =
                    (double)(counted(pool->height, y, include_pad) * counted(pool->width, x, include_pad));
                double sum = 0;
                for (int64_t r = 0; r < pool->height.kernel; r++) {
                    for (int64_t s = 0; s < pool->width.kernel; s++) {
                        const int64_t h = y * pool->height.stride - pool->height.padding + r;
                        const int64_t w = x * pool->width.stride - pool->width.padding + s;
                        if (h < 0 || h >= H || w < 0 || w >= W)
                            continue;
                        const int64_t i = pool_index(pool, plane, h, w, H, W);
                        sum += get(input, i, dtype);
                        expected_grad[i] += get(grad_output, o, dtype) / (divisor ? (double)divisor : count);
                    }
                }
                CHECK_NEAR(output, o, sum / (divisor ? (double)divisor : count), rounding(dtype), dtype);
            }
        }
    }
    if (!half_of_it) {
        const int64_t rows = pool_ranges(pool, H), cut = rows / 2; /* two ranges, as two threads would take them */
        CHECK_OK(cuda_ops_avg_pool2d_backward_cpu(grad_input, grad_output, pool, include_pad, divisor, 0, cut, dtype));
        for (int64_t plane = 0; plane < planes; plane++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t w = 0; w < W; w++)
                    if (!pool_in_range(pool, plane, h, H, 0, cut))
                        CHECK_UNWRITTEN(grad_input, pool_index(pool, plane, h, w, H, W), dtype);
        CHECK_OK(
            cuda_ops_avg_pool2d_backward_cpu(grad_input, grad_output, pool, include_pad, divisor, cut, rows, dtype));
        for (int64_t i = 0; i < in_count; i++)
            CHECK_NEAR(grad_input, i, expected_grad[i], rounding(dtype), dtype);
    }
    free(expected_grad);
    guarded_free(input, in_count, dtype);
    guarded_free(output, out_count, dtype);
    guarded_free(grad_output, out_count, dtype);
    guarded_free(grad_input, in_count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int last = 0; last < 2; last++) {
            for (int a = 0; a < POOL_CASE_COUNT; a++) {
                for (int b = 0; b < POOL_CASE_COUNT; b++) {
                    const cuda_ops_pool2d pool = pool_of(2, 3, POOL_CASES[a], POOL_CASES[b], last);
                    for (int include = 0; include < 2; include++) {
                        check_pool(&pool, include, 0, false, dtype);
                        check_pool(&pool, include, 0, true, dtype);
                    }
                    check_pool(&pool, true, 7, (a + b) % 2, dtype);
                }
            }
            const cuda_ops_pool2d wide = pool_of(1, 37, POOL_CASES[1], POOL_CASES[3], last);
            check_pool(&wide, false, 0, false, dtype);
        }
    }
    const cuda_ops_pool2d pool = pool_of(1, 1, POOL_CASES[0], POOL_CASES[0], false);
    CHECK_OK(cuda_ops_avg_pool2d_forward_cpu(NULL, NULL, &pool, true, 0, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_avg_pool2d_forward_cpu(NULL, NULL, &pool, true, 0, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    cuda_ops_pool2d bad = pool;
    bad.width.kernel = 0;
    CHECK_STATUS(cuda_ops_avg_pool2d_forward_cpu(NULL, NULL, &bad, true, 0, 0, 1, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
