#include "cuda_ops/conv_block.h"
#include "cuda_ops/cpu_isa.h"

#include "check.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;

/* Of all arrays the sizes, and what the block computes, in double and step by step. */
typedef struct reference {
    double *y, *mean, *variance; /* the convolution: batch x channels x height x width */
} reference;

static int64_t input_at(const cuda_ops_conv_block_sizes *s, int64_t n, int64_t c, int64_t y, int64_t x)
{
    return s->input_channels_last ? ((n * s->height + y) * s->width + x) * s->in_channels + c
                                  : ((n * s->in_channels + c) * s->height + y) * s->width + x;
}

static int64_t output_at(const cuda_ops_conv_block_sizes *s, int64_t n, int64_t k, int64_t y, int64_t x)
{
    const int64_t height = s->height / 2, width = s->width / 2;
    return s->output_channels_last ? ((n * height + y) * width + x) * s->out_channels + k
                                   : ((n * s->out_channels + k) * height + y) * width + x;
}

static double *doubles(int64_t count)
{
    double *array = calloc((size_t)count, sizeof(double));
    CHECK(array != NULL, "out of memory");
    return array;
}

static void *poisoned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    CHECK(memory != NULL, "out of memory");
    memset(memory, 0xff, (bytes + 64) / 64 * 64);
    return memory;
}

/* weight[k][c] of tap (r, s) times the input there, or zero outside. */
static double term(const void *input, const cuda_ops_conv_block_sizes *s, int64_t n, int64_t c, int64_t y, int64_t x,
                   int tap)
{
    const int64_t row = y + tap / 3 - 1, column = x + tap % 3 - 1;
    if (row < 0 || row >= s->height || column < 0 || column >= s->width)
        return 0;
    return get(input, input_at(s, n, c, row, column), s->dtype);
}

static reference convolve(const void *input, const float *weight, const float *bias, const cuda_ops_conv_block_sizes *s)
{
    const int64_t pixels = s->height * s->width, K = s->out_channels, C = s->in_channels;
    reference r = {doubles(s->batch * K * pixels), doubles(K), doubles(K)};
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t p = 0; p < pixels; p++) {
                double sum = bias ? (double)bias[k] : 0;
                for (int64_t c = 0; c < C; c++)
                    for (int tap = 0; tap < 9; tap++)
                        sum += (double)weight[(k * C + c) * 9 + tap] *
                               term(input, s, n, c, p / s->width, p % s->width, tap);
                r.y[(n * K + k) * pixels + p] = sum;
                r.mean[k] += sum / (double)(s->batch * pixels);
            }
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t p = 0; p < pixels; p++) {
                const double distance = r.y[(n * K + k) * pixels + p] - r.mean[k];
                r.variance[k] += distance * distance / (double)(s->batch * pixels);
            }
    return r;
}

/* The gradient of y, from the windows that the block says are active. */
static double *grad_of_y(double *grad_norm_weight, double *grad_norm_bias, const reference *r, const void *grad_output,
                         const uint8_t *argmax, const float *norm_weight, double eps,
                         const cuda_ops_conv_block_sizes *s)
{
    const int64_t pixels = s->height * s->width, K = s->out_channels, columns = s->width / 2;
    const int64_t windows = pixels / 4;
    const double count = (double)(s->batch * pixels);
    double *grad = doubles(s->batch * K * pixels);
    for (int64_t k = 0; k < K; k++) {
        const double rstd = 1 / sqrt(r->variance[k] + eps), gamma = norm_weight ? (double)norm_weight[k] : 1;
        grad_norm_weight[k] = grad_norm_bias[k] = 0;
        for (int64_t n = 0; n < s->batch; n++)
            for (int64_t t = 0; t < windows; t++) {
                const int index = argmax[(n * windows + t) * K + k];
                if (index == 255)
                    continue;
                const int64_t y = t / columns * 2 + index / 2, x = t % columns * 2 + index % 2;
                const int64_t at = (n * K + k) * pixels + y * s->width + x;
                const double dz = get(grad_output, output_at(s, n, k, t / columns, t % columns), s->dtype);
                grad[at] = dz;
                grad_norm_bias[k] += dz;
                grad_norm_weight[k] += dz * (r->y[at] - r->mean[k]) * rstd;
            }
        for (int64_t n = 0; n < s->batch; n++)
            for (int64_t p = 0; p < pixels; p++) {
                const int64_t at = (n * K + k) * pixels + p;
                const double normalised = (r->y[at] - r->mean[k]) * rstd;
                grad[at] =
                    gamma * rstd * (grad[at] - grad_norm_bias[k] / count - normalised * grad_norm_weight[k] / count);
            }
    }
    return grad;
}

static void check_output(const void *output, const uint8_t *argmax, const reference *r, const float *norm_weight,
                         const float *norm_bias, double eps, double tolerance, const cuda_ops_conv_block_sizes *s)
{
    const int64_t pixels = s->height * s->width, K = s->out_channels, columns = s->width / 2, windows = pixels / 4;
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t t = 0; t < windows; t++) {
                double best = -INFINITY, chosen = 0;
                const int index = argmax[(n * windows + t) * K + k];
                CHECK(index < 4 || index == 255, "argmax %d", index);
                for (int i = 0; i < 4; i++) {
                    const int64_t p = (t / columns * 2 + i / 2) * s->width + t % columns * 2 + i % 2;
                    const double z = (r->y[(n * K + k) * pixels + p] - r->mean[k]) / sqrt(r->variance[k] + eps) *
                                         (norm_weight ? (double)norm_weight[k] : 1) +
                                     (norm_bias ? (double)norm_bias[k] : 0);
                    best = fmax(best, z);
                    if (i == index)
                        chosen = z;
                }
                const double expected = best > 0 ? best : 0;
                CHECK_NEAR(output, output_at(s, n, k, t / columns, t % columns), expected, tolerance, s->dtype);
                /* Where two are nearly the same either may be taken. */
                CHECK(fabs(chosen - expected) <= tolerance * (1 + expected), "window %lld: value %g at %d, expected %g",
                      (long long)t, chosen, index, expected);
            }
}

static void check_grad_input(const void *grad_input, const double *grad, const float *weight, double tolerance,
                             const cuda_ops_conv_block_sizes *s)
{
    const int64_t K = s->out_channels, C = s->in_channels;
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t y = 0; y < s->height; y++)
                for (int64_t x = 0; x < s->width; x++) {
                    double sum = 0;
                    for (int tap = 0; tap < 9; tap++) {
                        const int64_t row = y - tap / 3 + 1, column = x - tap % 3 + 1;
                        if (row >= 0 && row < s->height && column >= 0 && column < s->width)
                            for (int64_t k = 0; k < K; k++)
                                sum += (double)weight[(k * C + c) * 9 + tap] *
                                       grad[(n * K + k) * s->height * s->width + row * s->width + column];
                    }
                    CHECK_NEAR(grad_input, input_at(s, n, c, y, x), sum, tolerance, s->dtype);
                }
}

static void check_grad_weight(const float *grad_weight, const double *grad, const void *input, double tolerance,
                              const cuda_ops_conv_block_sizes *s)
{
    const int64_t K = s->out_channels, C = s->in_channels, pixels = s->height * s->width;
    for (int64_t k = 0; k < K; k++)
        for (int64_t c = 0; c < C; c++)
            for (int tap = 0; tap < 9; tap++) {
                double sum = 0, magnitude = 0;
                for (int64_t n = 0; n < s->batch; n++)
                    for (int64_t p = 0; p < pixels; p++) {
                        const double product =
                            grad[(n * K + k) * pixels + p] * term(input, s, n, c, p / s->width, p % s->width, tap);
                        sum += product;
                        magnitude += fabs(product);
                    }
                CHECK_NEAR(grad_weight, (k * C + c) * 9 + tap, sum, tolerance * (1 + 0.1 * magnitude), F32);
            }
}

/* Everything, in two ranges as two threads would do it, with the input's values about `middle`. In bfloat16 input and
 * weight are whole numbers, whose convolution is exact, so that the maximum of a window does not depend on how it is
 * computed. */
static void check_block(cuda_ops_conv_block_sizes s, bool with_parameters, double middle)
{
    /* Winograd's transforms add up to 16 numbers before and after the products; a middle far from zero is a part of
     * every product that the normalisation takes off again. bfloat16: the gradient of the convolution is rounded. */
    const bool half = s.dtype == CUDA_OPS_BFLOAT16;
    const double tolerance = half ? 2 * rounding(s.dtype) : 3e-5 * (1 + fabs(middle)), eps = 1e-5;
    const int64_t pixels = s.height * s.width, K = s.out_channels, C = s.in_channels, windows = pixels / 4;
    cuda_ops_conv_block_plan plan;
    CHECK_OK(cuda_ops_conv_block_plan_cpu(&plan, &s));
    const int64_t inputs = s.batch * C * pixels, outputs = s.batch * K * windows, weights = K * C * 9;
    void *input = guarded_numbers(inputs, 1, s.dtype);
    float *weight = guarded_numbers(weights, 2, F32);
    for (int64_t i = 0; i < inputs; i++)
        set(input, i, half ? round(2 * number((uint64_t)i)) : get(input, i, F32) + middle, s.dtype);
    for (int64_t i = 0; half && i < weights; i++)
        weight[i] = roundf(weight[i]);
    float *bias = guarded_numbers(K, 3, F32), *norm_weight = guarded_numbers(K, 4, F32);
    float *norm_bias = guarded_numbers(K, 5, F32);
    void *grad_output = guarded_numbers(outputs, 6, s.dtype);
    for (int64_t k = 0; half && k < K; k++)
        bias[k] = roundf(bias[k]);
    const float *const b = with_parameters ? bias : NULL, *const gamma = with_parameters ? norm_weight : NULL;
    const float *const beta = with_parameters ? norm_bias : NULL;
    void *output = guarded_new(outputs, s.dtype), *grad_input = guarded_new(inputs, s.dtype);
    float *grad_weight = guarded_new(weights, F32), *grad_gamma = guarded_new(K, F32), *grad_beta = guarded_new(K, F32);
    uint8_t *argmax = guarded_bytes(outputs, 1);
    double *mean = doubles(K), *variance = doubles(K), *grad_gamma_expected = doubles(K),
           *grad_beta_expected = doubles(K);
    void *prepared = poisoned(plan.prepared_bytes), *conv_output = poisoned(plan.conv_output_bytes);
    void *maximum = plan.maximum_bytes ? poisoned(plan.maximum_bytes) : NULL, *moments = poisoned(plan.moments_bytes);
    void *partials = poisoned(plan.partials_bytes), *parts = poisoned(plan.weights_bytes);
    float *coefficients = poisoned((size_t)(4 * K) * sizeof(float));
    void *work = poisoned(plan.workspace_bytes);

    IN_TWO_PIECES(K / 16, begin, end, cuda_ops_conv_block_prepare_cpu(prepared, weight, 0, &s, begin, end));
    IN_TWO_PIECES(plan.chunks, begin, end,
                  cuda_ops_conv_block_convolve_cpu(conv_output, moments, input, prepared, b, &s, begin, end, work));
    CHECK_OK(cuda_ops_conv_block_statistics_cpu(mean, variance, moments, weight, b, &s));
    IN_TWO_PIECES(plan.chunks, begin, end,
                  cuda_ops_conv_block_pool_cpu(output, argmax, maximum, conv_output, input, prepared, b, mean, variance,
                                               gamma, beta, eps, &s, begin, end, work));
    reference r = convolve(input, weight, b, &s);
    for (int64_t k = 0; k < K; k++) {
        CHECK_NEAR(mean, k, r.mean[k], tolerance, CUDA_OPS_FLOAT64);
        CHECK_NEAR(variance, k, r.variance[k], tolerance, CUDA_OPS_FLOAT64);
    }
    check_output(output, argmax, &r, gamma, beta, eps, tolerance, &s);

    IN_TWO_PIECES(
        plan.chunks, begin, end,
        cuda_ops_conv_block_sums_cpu(partials, grad_output, argmax, maximum, input, mean, &s, begin, end, work));
    CHECK_OK(cuda_ops_conv_block_prepare_backward_cpu(coefficients, grad_gamma, grad_beta, grad_weight, partials,
                                                      moments, weight, b, mean, variance, gamma, eps, &s));
    memset(prepared, 0xff, plan.prepared_bytes);
    IN_TWO_PIECES(K / 16, begin, end, cuda_ops_conv_block_prepare_cpu(prepared, weight, 1, &s, begin, end));
    IN_TWO_PIECES(plan.chunks, begin, end,
                  cuda_ops_conv_block_gradients_cpu(grad_input, parts, grad_output, argmax, conv_output, input,
                                                    prepared, b, coefficients, &s, begin, end, work));
    if (C > 1)
        IN_TWO_PIECES(C, begin, end, cuda_ops_conv_block_reduce_weight_cpu(grad_weight, parts, &s, begin, end));
    double *grad = grad_of_y(grad_gamma_expected, grad_beta_expected, &r, grad_output, argmax, gamma, eps, &s);
    for (int64_t k = 0; k < K; k++) {
        CHECK_NEAR(grad_gamma, k, grad_gamma_expected[k], 4 * tolerance, F32);
        CHECK_NEAR(grad_beta, k, grad_beta_expected[k], 4 * tolerance, F32);
    }
    check_grad_weight(grad_weight, grad, input, tolerance, &s);
    check_grad_input(grad_input, grad, weight, tolerance, &s);
    if (C > 1) {
        /* Without grad_input the weight's gradient has the same bits. */
        float *again = guarded_new(weights, F32);
        CHECK_OK(cuda_ops_conv_block_gradients_cpu(NULL, parts, grad_output, argmax, conv_output, input, NULL, b,
                                                   coefficients, &s, 0, plan.chunks, work));
        CHECK_OK(cuda_ops_conv_block_reduce_weight_cpu(again, parts, &s, 0, C));
        CHECK(memcmp(again, grad_weight, (size_t)weights * sizeof(float)) == 0, "other bits");
        guarded_free(again, weights, F32);
    }
    void *const raw[] = {
        prepared, conv_output, maximum, moments, partials,   parts, coefficients,        work,
        mean,     variance,    r.y,     r.mean,  r.variance, grad,  grad_gamma_expected, grad_beta_expected};
    for (size_t i = 0; i < sizeof raw / sizeof *raw; i++)
        free(raw[i]);
    guarded_free(input, inputs, s.dtype);
    guarded_free(weight, weights, F32);
    guarded_free(bias, K, F32);
    guarded_free(norm_weight, K, F32);
    guarded_free(norm_bias, K, F32);
    guarded_free(grad_output, outputs, s.dtype);
    guarded_free(output, outputs, s.dtype);
    guarded_free(grad_input, inputs, s.dtype);
    guarded_free(grad_weight, weights, F32);
    guarded_free(grad_gamma, K, F32);
    guarded_free(grad_beta, K, F32);
    guarded_free_bytes(argmax, outputs, 1);
}

/* NaN passes on to the output, of equal values the first is taken, and zero passes no gradient. */
static void check_special_values(void)
{
    const cuda_ops_conv_block_sizes s = {1, 1, 16, 2, 2, 0, 1, CUDA_OPS_FLOAT32};
    cuda_ops_conv_block_plan plan;
    CHECK_OK(cuda_ops_conv_block_plan_cpu(&plan, &s));
    float *prepared = poisoned(plan.prepared_bytes);
    void *work = poisoned(plan.workspace_bytes);
    float weight[16 * 9] = {0}, output[16];
    double mean[16] = {0}, variance[16];
    uint8_t argmax[16];
    for (int k = 0; k < 16; k++) {
        weight[9 * k + 4] = 1; /* the middle tap: y is the input */
        variance[k] = 1;
    }
    CHECK_OK(cuda_ops_conv_block_prepare_cpu(prepared, weight, 0, &s, 0, 1));
    const struct {
        float input[4];
        int index;
        float expected;
    } cases[] = {
        {{1, 3, 3, 2}, 1, 3},     {{0, 0, 0, 0}, 255, 0},     {{-1, -2, -3, -4}, 255, 0},   {{-1, 0, -3, 0}, 255, 0},
        {{5, NAN, 7, 1}, 1, NAN}, {{NAN, 1, NAN, 2}, 2, NAN}, {{-INFINITY, 1, 0, 0}, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* With the weight's zeros, an infinity or NaN beside the middle is NaN too: those cases check the index
         * alone. */
        CHECK_OK(cuda_ops_conv_block_pool_cpu(output, argmax, NULL, NULL, cases[i].input, prepared, NULL, mean,
                                              variance, NULL, NULL, 0, &s, 0, 1, work));
        for (int k = 0; k < 16; k++) {
            if (isfinite(cases[i].input[0] + cases[i].input[1] + cases[i].input[2])) {
                CHECK(argmax[k] == cases[i].index, "case %zu: index %d", i, argmax[k]);
                CHECK_NEAR(output, k, (double)cases[i].expected, 0, F32);
            } else {
                CHECK(isnan(output[k]) && argmax[k] == 3, "case %zu: %g at %d", i, (double)output[k], argmax[k]);
            }
        }
    }
    free(prepared);
    free(work);
}

int main(void)
{
    static const cuda_ops_conv_block_sizes sizes[] = {
        {3, 1, 32, 28, 28, 0, 0, CUDA_OPS_FLOAT32},  /* the MNIST network's blocks */
        {2, 32, 64, 14, 14, 0, 0, CUDA_OPS_FLOAT32}, /* one image in each chunk */
        {1, 1, 16, 2, 2, 0, 0, CUDA_OPS_FLOAT32},    /* the smallest */
        {1, 16, 16, 2, 2, 0, 0, CUDA_OPS_FLOAT32},   /* and of several channels */
        {17, 16, 16, 4, 6, 0, 0, CUDA_OPS_FLOAT32},  /* a chunk of two images */
        {3, 48, 16, 6, 4, 0, 0, CUDA_OPS_FLOAT32},   /* an odd number of vectors */
        {2, 16, 80, 2, 10, 0, 0, CUDA_OPS_FLOAT32},  {35, 1, 48, 4, 2, 0, 0, CUDA_OPS_FLOAT32},
        {19, 64, 32, 4, 6, 0, 0, CUDA_OPS_FLOAT32}, /* two steps of depth; panels of pixels that end within a row */
        {2, 32, 96, 8, 8, 0, 0, CUDA_OPS_FLOAT32},   {3, 32, 32, 2, 2, 0, 0, CUDA_OPS_FLOAT32},
    };
    /* Each instruction set: those that the processor has not are refused. */
    static const char *const names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx", NULL};
    for (size_t isa = 0; isa < sizeof names / sizeof *names; isa++)
        for (size_t i = 0; cuda_ops_cpu_isa_select(names[isa]) == CUDA_OPS_SUCCESS && i < sizeof sizes / sizeof *sizes;
             i++)
            for (int layout = 0; layout < 8; layout++) {
                cuda_ops_conv_block_sizes s = sizes[i];
                s.input_channels_last = layout & 1;
                s.output_channels_last = layout >> 1 & 1;
                s.dtype = layout < 4 ? F32 : CUDA_OPS_BFLOAT16;
                check_block(s, layout % 4 != 1, layout == 3 ? 8 : 0);
            }
    check_special_values();

    cuda_ops_conv_block_plan plan;
    static const cuda_ops_conv_block_sizes wrong[] = {
        {0, 16, 16, 4, 4, 0, 0, CUDA_OPS_FLOAT32},         {1, 0, 16, 4, 4, 0, 0, CUDA_OPS_FLOAT32},
        {1, 8, 16, 4, 4, 0, 0, CUDA_OPS_FLOAT32},          {1, 16, 8, 4, 4, 0, 0, CUDA_OPS_FLOAT32},
        {1, 16, 0, 4, 4, 0, 0, CUDA_OPS_FLOAT32},          {1, 16, 16, 5, 4, 0, 0, CUDA_OPS_FLOAT32},
        {1, 16, 16, 4, 3, 0, 0, CUDA_OPS_FLOAT32},         {1, 16, 16, 0, 4, 0, 0, CUDA_OPS_FLOAT32},
        {1, 1, 16, 1024, 512, 0, 0, CUDA_OPS_FLOAT32},     {1, 1024, 1024, 2, 2, 0, 0, CUDA_OPS_FLOAT32},
        {INT64_MAX, 16, 16, 4, 4, 0, 0, CUDA_OPS_FLOAT32},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_STATUS(cuda_ops_conv_block_plan_cpu(&plan, &wrong[i]), CUDA_OPS_INVALID_ARGUMENT);
    cuda_ops_conv_block_sizes doubles_too = sizes[0];
    doubles_too.dtype = CUDA_OPS_FLOAT64;
    CHECK_STATUS(cuda_ops_conv_block_plan_cpu(&plan, &doubles_too), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(
        cuda_ops_conv_block_gradients_cpu(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &sizes[0], 0, 1, NULL),
        CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_conv_block_prepare_cpu(NULL, NULL, 0, &sizes[1], 0, 5), CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
