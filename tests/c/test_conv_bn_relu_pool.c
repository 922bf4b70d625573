#include "cuda_ops/conv_bn_relu_pool.h"

#include "pool_cases.h"

static const double EPS = 1e-5;

typedef struct arrays {
    int64_t in_count, out_count, channels;
    void *y, *grad_output, *weight, *bias, *output, *maximum, *grad, *coefficients, *grad_weight, *grad_bias;
    unsigned char *argmax;
    double *mean, *variance, *sums;
} arrays;

static arrays new_arrays(const cuda_ops_pool2d *pool, cuda_ops_dtype dtype)
{
    const int64_t planes = pool->batch * pool->channels, c = pool->channels;
    const int64_t in = planes * pool->height.input * pool->width.input;
    const int64_t out = planes * pool->height.output * pool->width.output;
    const int64_t coefficients = CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS * c;
    arrays a = {in,
                out,
                c,
                guarded_numbers(in, 1, dtype),
                guarded_numbers(out, 2, dtype),
                guarded_numbers(c, 3, dtype),
                guarded_numbers(c, 4, dtype),
                guarded_new(out, dtype),
                guarded_new(out, dtype),
                guarded_new(in, dtype),
                guarded_new(coefficients, dtype),
                guarded_new(c, dtype),
                guarded_new(c, dtype),
                guarded_bytes(out, 1),
                guarded_new(c, CUDA_OPS_FLOAT64),
                guarded_new(c, CUDA_OPS_FLOAT64),
                guarded_new(2 * c, CUDA_OPS_FLOAT64)};
    for (int64_t i = 0; i < in; i += 5) /* ties: of equal values the first counts */
        set(a.y, i, 1.5, dtype);
    return a;
}

static void free_arrays(arrays a, cuda_ops_dtype dtype)
{
    void *const of_dtype[] = {a.y,       a.grad_output, a.weight,       a.bias,        a.output,
                              a.maximum, a.grad,        a.coefficients, a.grad_weight, a.grad_bias};
    const int64_t counts[] = {
        a.in_count,  a.out_count, a.channels, a.channels,
        a.out_count, a.out_count, a.in_count, CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS * a.channels,
        a.channels,  a.channels};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        guarded_free(of_dtype[i], counts[i], dtype);
    guarded_free_bytes(a.argmax, a.out_count, 1);
    guarded_free(a.mean, a.channels, CUDA_OPS_FLOAT64);
    guarded_free(a.variance, a.channels, CUDA_OPS_FLOAT64);
    guarded_free(a.sums, 2 * a.channels, CUDA_OPS_FLOAT64);
}

/* Mean and biased variance of each channel, in plain double. */
static void fill_statistics(const arrays *a, const cuda_ops_pool2d *pool, cuda_ops_dtype dtype)
{
    const int64_t H = pool->height.input, W = pool->width.input, count = pool->batch * H * W;
    for (int64_t c = 0; c < pool->channels; c++)
        for (int pass = 0; pass < 2; pass++) {
            double sum = 0;
            for (int64_t n = 0; n < pool->batch; n++)
                for (int64_t i = 0; i < H * W; i++) {
                    const int64_t plane = n * pool->channels + c;
                    const double value = get(a->y, pool_index(pool, plane, i / W, i % W, H, W), dtype);
                    sum += pass == 0 ? value : (value - a->mean[c]) * (value - a->mean[c]);
                }
            (pass == 0 ? a->mean : a->variance)[c] = sum / (double)count;
        }
}

/* Forward and backward against the formulas of the header, with or without batch_norm's parameters. */
static void check_block(const cuda_ops_pool2d *pool, bool affine, bool half_of_it, cuda_ops_dtype dtype)
{
    const int64_t H = pool->height.input, W = pool->width.input, OH = pool->height.output, OW = pool->width.output;
    const int64_t channels = pool->channels, planes = pool->batch * channels;
    const double tolerance = 20 * rounding(dtype);
    arrays a = new_arrays(pool, dtype);
    fill_statistics(&a, pool, dtype);
    const void *weight = affine ? a.weight : NULL, *bias = affine ? a.bias : NULL;
    double *dz = calloc((size_t)a.in_count, sizeof(double)), *sums = calloc((size_t)(2 * channels), sizeof(double));
    CHECK(dz != NULL && sums != NULL, "out of memory");

    CHECK_OK(cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(a.coefficients, a.mean, a.variance, weight, bias, channels,
                                                            EPS, dtype, CUDA_OPS_FLOAT64));
    const int64_t ranges = pool_ranges(pool, OH);
    const int64_t begin = half_of_it ? ranges / 3 : 0, end = half_of_it ? ranges - ranges / 3 : ranges;
    CHECK_OK(cuda_ops_conv_bn_relu_pool_pool_cpu(a.output, a.argmax, a.maximum, a.y, a.coefficients, pool, begin, end,
                                                 dtype));
    for (int64_t plane = 0; plane < planes; plane++) {
        const int64_t c = plane % channels;
        const double rstd = 1 / sqrt(a.variance[c] + EPS), gamma = affine ? get(a.weight, c, dtype) : 1;
        const double beta = affine ? get(a.bias, c, dtype) : 0;
        for (int64_t y = 0; y < OH; y++)
            for (int64_t x = 0; x < OW; x++) {
                const int64_t o = pool_index(pool, plane, y, x, OH, OW);
                if (!pool_in_range(pool, plane, y, OH, begin, end)) {
                    CHECK_UNWRITTEN(a.output, o, dtype);
                    CHECK_UNWRITTEN(a.maximum, o, dtype);
                    CHECK(a.argmax[o] == GUARD_BYTE, "argmax %lld was written", (long long)o);
                    continue;
                }
                double best = -INFINITY;
                int64_t where = -1, index = -1;
                for (int64_t r = 0; r < pool->height.kernel; r++)
                    for (int64_t s = 0; s < pool->width.kernel; s++) {
                        const int64_t h = y * pool->height.stride - pool->height.padding + r;
                        const int64_t w = x * pool->width.stride - pool->width.padding + s;
                        if (h < 0 || h >= H || w < 0 || w >= W)
                            continue;
                        const int64_t i = pool_index(pool, plane, h, w, H, W);
                        const double z = (get(a.y, i, dtype) - a.mean[c]) * rstd * gamma + beta;
                        if (z > best) {
                            best = z;
                            where = i;
                            index = r * pool->width.kernel + s;
                        }
                    }
                CHECK_NEAR(a.output, o, best > 0 ? best : 0, tolerance, dtype);
                if (best <= 0) {
                    CHECK(a.argmax[o] == CUDA_OPS_POOL_INACTIVE, "argmax %d of an inactive window", a.argmax[o]);
                    continue;
                }
                CHECK(a.argmax[o] == index, "argmax %d, expected %lld", a.argmax[o], (long long)index);
                CHECK(get(a.maximum, o, dtype) == get(a.y, where, dtype), "maximum is not the value at argmax");
                const double g = get(a.grad_output, o, dtype);
                dz[where] += g;
                sums[c] += g;
                sums[channels + c] += g * (get(a.y, where, dtype) - a.mean[c]) * rstd;
            }
    }
    if (!half_of_it) {
        IN_TWO_PIECES(channels, first, last,
                      cuda_ops_conv_bn_relu_pool_sums_cpu(a.sums, a.grad_output, a.argmax, a.maximum, a.mean, pool,
                                                          first, last, dtype));
        CHECK_OK(cuda_ops_conv_bn_relu_pool_prepare_backward_cpu(a.grad_weight, a.grad_bias, a.coefficients, a.sums,
                                                                 a.mean, a.variance, weight, pool, EPS, dtype));
        for (int64_t c = 0; c < channels; c++) {
            CHECK_NEAR(a.grad_bias, c, sums[c], tolerance, dtype);
            CHECK_NEAR(a.grad_weight, c, sums[channels + c], tolerance, dtype);
        }
        IN_TWO_PIECES(pool_ranges(pool, H), first, last,
                      cuda_ops_conv_bn_relu_pool_grad_conv_cpu(a.grad, a.grad_output, a.argmax, a.y, a.coefficients,
                                                               pool, first, last, dtype));
        const double count = (double)(pool->batch * H * W);
        for (int64_t plane = 0; plane < planes; plane++) {
            const int64_t c = plane % channels;
            const double rstd = 1 / sqrt(a.variance[c] + EPS), gamma = affine ? get(a.weight, c, dtype) : 1;
            for (int64_t h = 0; h < H; h++)
                for (int64_t w = 0; w < W; w++) {
                    const int64_t i = pool_index(pool, plane, h, w, H, W);
                    const double normalised = (get(a.y, i, dtype) - a.mean[c]) * rstd;
                    const double mean_terms = sums[c] / count + normalised * sums[channels + c] / count;
                    CHECK_NEAR(a.grad, i, gamma * rstd * (dz[i] - mean_terms), tolerance, dtype);
                }
        }
    }
    free(dz);
    free(sums);
    free_arrays(a, dtype);
}

/* One NaN makes its window NaN, which counts as active; without argmax and maximum the output is the same. */
static void check_nan(cuda_ops_dtype dtype)
{
    const cuda_ops_pool2d pool = pool_of(1, 1, POOL_CASES[0], POOL_CASES[0], false);
    arrays a = new_arrays(&pool, dtype);
    a.mean[0] = 0;
    a.variance[0] = 1;
    set(a.y, 3, NAN, dtype); /* row 0, column 3: window 1, index 1 */
    CHECK_OK(cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(a.coefficients, a.mean, a.variance, NULL, NULL, 1, EPS,
                                                            dtype, CUDA_OPS_FLOAT64));
    CHECK_OK(
        cuda_ops_conv_bn_relu_pool_pool_cpu(a.output, a.argmax, a.maximum, a.y, a.coefficients, &pool, 0, 1, dtype));
    CHECK(isnan(get(a.output, 1, dtype)) && a.argmax[1] == 1, "the NaN did not pass, argmax %d", a.argmax[1]);
    void *alone = guarded_new(a.out_count, dtype);
    CHECK_OK(cuda_ops_conv_bn_relu_pool_pool_cpu(alone, NULL, NULL, a.y, a.coefficients, &pool, 0, 1, dtype));
    for (int64_t i = 0; i < a.out_count; i++) {
        const double with = get(a.output, i, dtype), without = get(alone, i, dtype);
        CHECK(with == without || (isnan(with) && isnan(without)), "%g and %g", with, without);
    }
    guarded_free(alone, a.out_count, dtype);
    free_arrays(a, dtype);
}

int main(void)
{
    const pool_case cases[] = {
        {8, 2, 2, 0, 1, false}, {7, 3, 2, 1, 1, false}, {9, 2, 3, 0, 1, false},
        {6, 5, 1, 2, 1, false}, {3, 1, 1, 0, 1, false},
    };
    const int count = sizeof(cases) / sizeof(cases[0]);
    FOR_CPU_DTYPES(dtype)
    {
        for (int last = 0; last < 2; last++) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < count; j++) {
                    const cuda_ops_pool2d pool = pool_of(2, 3, cases[i], cases[j], last);
                    check_block(&pool, true, false, dtype);
                    check_block(&pool, (i + j) % 2, (i + j) % 3 == 0, dtype);
                }
            const cuda_ops_pool2d wide = pool_of(3, 37, cases[1], cases[0], last); /* more channels than lanes */
            check_block(&wide, true, false, dtype);
            const pool_case long_row = {90, 2, 2, 0, 1, false}; /* more windows in a plane than lanes */
            const cuda_ops_pool2d long_plane = pool_of(1, 2, cases[0], long_row, last);
            check_block(&long_plane, true, false, dtype);
        }
        check_nan(dtype);
    }
    cuda_ops_pool2d pool = pool_of(1, 1, cases[0], cases[0], false);
    CHECK_OK(cuda_ops_conv_bn_relu_pool_pool_cpu(NULL, NULL, NULL, NULL, NULL, &pool, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_conv_bn_relu_pool_pool_cpu(NULL, NULL, NULL, NULL, NULL, &pool, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(NULL, NULL, NULL, NULL, NULL, 0, EPS, CUDA_OPS_FLOAT32,
                                                                CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    const pool_case large = {20, 16, 1, 0, 1, false}; /* 256 indices do not fit a byte beside INACTIVE */
    pool = pool_of(1, 1, large, large, false);
    CHECK_STATUS(cuda_ops_conv_bn_relu_pool_pool_cpu(NULL, NULL, NULL, NULL, NULL, &pool, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
