#include "cuda_ops/adaptive_pool2d.h"

#include "check.h"

/* (input, output) of an axis: windows that tile, overlap, are all, one each, more than there are positions */
static const cuda_ops_adaptive_axis AXES[] = {{8, 4}, {7, 3}, {9, 1}, {5, 5}, {3, 7}, {1, 1}};
enum { AXIS_COUNT = sizeof(AXES) / sizeof(AXES[0]) };

static int64_t index_of(const cuda_ops_adaptive_pool2d *pool, int64_t plane, int64_t h, int64_t w, int64_t height,
                        int64_t width)
{
    const int64_t n = plane / pool->channels, c = plane % pool->channels;
    return pool->channels_last ? ((n * height + h) * width + w) * pool->channels + c : (plane * height + h) * width + w;
}

static int64_t ranges_of(const cuda_ops_adaptive_pool2d *pool, int64_t height)
{
    return pool->channels_last ? pool->batch * height : pool->batch * pool->channels;
}

/* Whether position p belongs to window o, by the definition and not by the functions under test. */
static bool holds(cuda_ops_adaptive_axis axis, int64_t o, int64_t p)
{
    const double first = floor((double)o * axis.input / axis.output);
    const double last = ceil((double)(o + 1) * axis.input / axis.output) - 1;
    return first <= (double)p && (double)p <= last;
}

static void check_pool(const cuda_ops_adaptive_pool2d *pool, cuda_ops_dtype dtype)
{
    const int64_t H = pool->height.input, W = pool->width.input, OH = pool->height.output, OW = pool->width.output;
    const int64_t planes = pool->batch * pool->channels, in_count = planes * H * W, out_count = planes * OH * OW;
    void *input = guarded_numbers(in_count, 1, dtype), *grad_output = guarded_numbers(out_count, 2, dtype);
    void *mean = guarded_new(out_count, dtype), *largest = guarded_new(out_count, dtype);
    void *grad_mean = guarded_new(in_count, dtype), *grad_largest = guarded_new(in_count, dtype);
    int64_t *indices = guarded_new_i64(out_count);
    double *expected_mean = calloc((size_t)in_count, sizeof(double));
    double *expected_largest = calloc((size_t)in_count, sizeof(double));
    CHECK(expected_mean != NULL && expected_largest != NULL, "out of memory");

    IN_TWO_PIECES(ranges_of(pool, OH), begin, end,
                  cuda_ops_adaptive_avg_pool2d_forward_cpu(mean, input, pool, begin, end, dtype));
    IN_TWO_PIECES(ranges_of(pool, OH), begin, end,
                  cuda_ops_adaptive_max_pool2d_forward_cpu(largest, indices, input, pool, begin, end, dtype));
    for (int64_t plane = 0; plane < planes; plane++)
        for (int64_t y = 0; y < OH; y++)
            for (int64_t x = 0; x < OW; x++) {
                const int64_t o = index_of(pool, plane, y, x, OH, OW);
                double sum = 0, best = -INFINITY;
                int64_t count = 0, where = -1;
                for (int64_t h = 0; h < H; h++)
                    for (int64_t w = 0; w < W; w++) {
                        if (!holds(pool->height, y, h) || !holds(pool->width, x, w))
                            continue;
                        const double value = get(input, index_of(pool, plane, h, w, H, W), dtype);
                        sum += value;
                        count++;
                        if (value > best) {
                            best = value;
                            where = h * W + w;
                        }
                    }
                CHECK_NEAR(mean, o, sum / (double)count, rounding(dtype), dtype);
                CHECK_NEAR(largest, o, best, 0, dtype);
                CHECK(indices[o] == where, "index %lld, expected %lld", (long long)indices[o], (long long)where);
                const double grad = get(grad_output, o, dtype);
                expected_largest[index_of(pool, plane, where / W, where % W, H, W)] += grad;
                for (int64_t h = 0; h < H; h++)
                    for (int64_t w = 0; w < W; w++)
                        if (holds(pool->height, y, h) && holds(pool->width, x, w))
                            expected_mean[index_of(pool, plane, h, w, H, W)] += grad / (double)count;
            }
    IN_TWO_PIECES(ranges_of(pool, H), begin, end,
                  cuda_ops_adaptive_avg_pool2d_backward_cpu(grad_mean, grad_output, pool, begin, end, dtype));
    IN_TWO_PIECES(
        ranges_of(pool, H), begin, end,
        cuda_ops_adaptive_max_pool2d_backward_cpu(grad_largest, grad_output, indices, pool, begin, end, dtype));
    for (int64_t i = 0; i < in_count; i++) {
        CHECK_NEAR(grad_mean, i, expected_mean[i], rounding(dtype), dtype);
        CHECK_NEAR(grad_largest, i, expected_largest[i], rounding(dtype), dtype);
    }
    free(expected_mean);
    free(expected_largest);
    guarded_free(input, in_count, dtype);
    guarded_free(grad_output, out_count, dtype);
    guarded_free(mean, out_count, dtype);
    guarded_free(largest, out_count, dtype);
    guarded_free(grad_mean, in_count, dtype);
    guarded_free(grad_largest, in_count, dtype);
    guarded_free_i64(indices, out_count);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int last = 0; last < 2; last++)
            for (int a = 0; a < AXIS_COUNT; a++)
                for (int b = 0; b < AXIS_COUNT; b++) {
                    /* Fewer channels than lanes, and more. */
                    const cuda_ops_adaptive_pool2d few = {2, 3, AXES[a], AXES[b], last};
                    const cuda_ops_adaptive_pool2d many = {1, 70, AXES[a], AXES[b], last};
                    check_pool(&few, dtype);
                    check_pool(&many, dtype);
                }
    }
    cuda_ops_adaptive_pool2d pool = {1, 1, {4, 2}, {4, 2}, 0};
    float values[16] = {0}, out[4];
    CHECK_OK(cuda_ops_adaptive_avg_pool2d_forward_cpu(NULL, NULL, &pool, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_adaptive_avg_pool2d_forward_cpu(out, values, &pool, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    /* Indices from elsewhere: nothing is written outside of the plane. */
    const int64_t indices[4] = {-1, 16, INT64_MAX, 3};
    const float grads[4] = {1, 1, 1, 1};
    void *grad_input = guarded_new(16, CUDA_OPS_FLOAT32);
    CHECK_OK(cuda_ops_adaptive_max_pool2d_backward_cpu(grad_input, grads, indices, &pool, 0, 1, CUDA_OPS_FLOAT32));
    for (int64_t i = 0; i < 16; i++)
        CHECK_NEAR(grad_input, i, i == 3 ? 1.0 : 0.0, 0, CUDA_OPS_FLOAT32);
    guarded_free(grad_input, 16, CUDA_OPS_FLOAT32);
    pool.width.output = 0;
    CHECK_STATUS(cuda_ops_adaptive_max_pool2d_forward_cpu(NULL, NULL, NULL, &pool, 0, 1, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
