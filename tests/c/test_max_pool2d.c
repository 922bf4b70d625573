#include "cuda_ops/max_pool2d.h"

#include "pool_cases.h"

static void check_pool(const cuda_ops_pool2d *pool, bool with_nan, bool half_of_it, cuda_ops_dtype dtype)
{
    const int64_t H = pool->height.input, W = pool->width.input, OH = pool->height.output, OW = pool->width.output;
    const int64_t planes = pool->batch * pool->channels, in_count = planes * H * W, out_count = planes * OH * OW;
    void *input = guarded_numbers(in_count, 1, dtype), *grad_output = guarded_numbers(out_count, 2, dtype);
    void *output = guarded_new(out_count, dtype), *grad_input = guarded_new(in_count, dtype);
    int64_t *indices = guarded_new_i64(out_count);
    double *expected_grad = calloc((size_t)in_count, sizeof(double));
    CHECK(expected_grad != NULL, "out of memory");
    for (int64_t i = 0; i < in_count; i += 5) /* ties: of equal values the first counts */
        set(input, i, 2, dtype);
    if (with_nan)
        set(input, in_count / 2, NAN, dtype);

    const int64_t ranges = pool_ranges(pool, OH);
    const int64_t begin = half_of_it ? ranges / 3 : 0, end = half_of_it ? ranges - ranges / 3 : ranges;
    CHECK_OK(cuda_ops_max_pool2d_forward_cpu(output, indices, input, pool, begin, end, dtype));
    for (int64_t plane = 0; plane < planes; plane++) {
        for (int64_t y = 0; y < OH; y++) {
            for (int64_t x = 0; x < OW; x++) {
                const int64_t o = pool_index(pool, plane, y, x, OH, OW);
                if (!pool_in_range(pool, plane, y, OH, begin, end)) {
                    CHECK_UNWRITTEN(output, o, dtype);
                    continue;
                }
                double best = -INFINITY;
                int64_t where = -1;
                for (int64_t r = 0; r < pool->height.kernel; r++) {
                    for (int64_t s = 0; s < pool->width.kernel; s++) {
                        const int64_t h = y * pool->height.stride - pool->height.padding + r * pool->height.dilation;
                        const int64_t w = x * pool->width.stride - pool->width.padding + s * pool->width.dilation;
                        if (h < 0 || h >= H || w < 0 || w >= W)
                            continue;
                        const double value = get(input, pool_index(pool, plane, h, w, H, W), dtype);
                        if (where < 0 || value > best || isnan(value)) {
                            best = value;
                            where = h * W + w;
                        }
                    }
                }
                CHECK(indices[o] == where, "index %lld, expected %lld", (long long)indices[o], (long long)where);
                const double actual = get(output, o, dtype);
                CHECK(actual == best || (isnan(actual) && isnan(best)), "value %g, expected %g", actual, best);
                if (where >= 0)
                    expected_grad[pool_index(pool, plane, where / W, where % W, H, W)] += get(grad_output, o, dtype);
            }
        }
    }
    if (!half_of_it) {
        const int64_t rows = pool_ranges(pool, H), cut = rows / 2; /* two ranges, as two threads would take them */
        CHECK_OK(cuda_ops_max_pool2d_backward_cpu(grad_input, grad_output, indices, pool, 0, cut, dtype));
        for (int64_t plane = 0; plane < planes; plane++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t w = 0; w < W; w++)
                    if (!pool_in_range(pool, plane, h, H, 0, cut))
                        CHECK_UNWRITTEN(grad_input, pool_index(pool, plane, h, w, H, W), dtype);
        CHECK_OK(cuda_ops_max_pool2d_backward_cpu(grad_input, grad_output, indices, pool, cut, rows, dtype));
        for (int64_t i = 0; i < in_count; i++)
            CHECK_NEAR(grad_input, i, expected_grad[i], rounding(dtype), dtype);
    }
    free(expected_grad);
    guarded_free_i64(indices, out_count);
    guarded_free(input, in_count, dtype);
    guarded_free(output, out_count, dtype);
    guarded_free(grad_output, out_count, dtype);
    guarded_free(grad_input, in_count, dtype);
}

int main(void)
{
    const pool_case dilated = {11, 3, 2, 1, 2, false}, dilated_ceil = {10, 2, 3, 1, 3, true};
    FOR_CPU_DTYPES(dtype)
    {
        for (int last = 0; last < 2; last++) {
            for (int a = 0; a < POOL_CASE_COUNT; a++) {
                for (int b = 0; b < POOL_CASE_COUNT; b++) {
                    const cuda_ops_pool2d pool = pool_of(2, 3, POOL_CASES[a], POOL_CASES[b], last);
                    check_pool(&pool, false, false, dtype);
                    check_pool(&pool, true, (a + b) % 2, dtype);
                }
            }
            const cuda_ops_pool2d wide = pool_of(1, 37, dilated, dilated_ceil, last);
            check_pool(&wide, true, false, dtype);
            check_pool(&wide, false, true, dtype);
        }
    }
    const cuda_ops_pool2d pool = pool_of(1, 1, POOL_CASES[0], POOL_CASES[0], false);
    CHECK_OK(cuda_ops_max_pool2d_forward_cpu(NULL, NULL, NULL, &pool, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_max_pool2d_forward_cpu(NULL, NULL, NULL, &pool, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    cuda_ops_pool2d bad = pool;
    bad.height.stride = 0;
    CHECK_STATUS(cuda_ops_max_pool2d_forward_cpu(NULL, NULL, NULL, &bad, 0, 1, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
