#include "cuda_ops/window_attention.h"

#include "check.h"

/* Element `d` of array 0 (query), 1 (key) or 2 (value) of a pixel. */
static int64_t element(const cuda_ops_windows *w, int64_t pixel, int64_t array, int64_t head, int64_t d)
{
    return ((pixel * 3 + array) * w->heads + head) * w->head_dim + d;
}

static double dot(const cuda_ops_windows *w, const void *x, int64_t x_first, const void *y, int64_t y_first,
                  cuda_ops_dtype dtype)
{
    double sum = 0;
    for (int64_t d = 0; d < w->head_dim; d++)
        sum += get(x, x_first + d, dtype) * get(y, y_first + d, dtype);
    return sum;
}

/* Units [begin, end) of windows and heads; pixels of others must not be touched. chunks: of backward. */
static void check_windows(const cuda_ops_windows *w, int64_t begin, int64_t end, int64_t chunks, cuda_ops_dtype dtype)
{
    const int64_t pixels = w->images * w->height * w->width, channels = w->heads * w->head_dim;
    const int64_t positions = cuda_ops_window_positions(w), squares = positions * positions;
    const int64_t count = cuda_ops_window_count(w);
    void *qkv = guarded_numbers(3 * pixels * channels, 1, dtype), *grad = guarded_numbers(pixels * channels, 2, dtype);
    void *bias = guarded_numbers(w->heads * squares, 3, dtype);
    void *output = guarded_new(pixels * channels, dtype), *grad_qkv = guarded_new(3 * pixels * channels, dtype);
    void *partials = guarded_new(chunks * w->heads * squares, dtype);
    double *weights = malloc((size_t)squares * sizeof(double)), *slopes = malloc((size_t)squares * sizeof(double));
    double *sums = calloc((size_t)(chunks * w->heads * squares), sizeof(double));
    CHECK_OK(cuda_ops_window_attention_forward_cpu(output, qkv, bias, w, begin, end, dtype));
    CHECK_OK(cuda_ops_window_attention_backward_cpu(grad_qkv, partials, grad, qkv, bias, w, chunks, 0,
                                                    chunks * w->heads, dtype));
    for (int64_t unit = 0; unit < count * w->heads; unit++) {
        const int64_t number = unit / w->heads, head = unit % w->heads;
        const cuda_ops_window window = cuda_ops_window_at(w, number);
        int64_t chunk = 0, pixel[16];
        int part[16];
        while ((chunk + 1) * count / chunks <= number)
            chunk++;
        for (int64_t i = 0; i < positions; i++) {
            pixel[i] = cuda_ops_window_pixel(w, &window, i / w->window_width, i % w->window_width);
            part[i] = cuda_ops_window_part(&window, i / w->window_width, i % w->window_width);
            CHECK(pixel[i] >= 0 && pixel[i] < pixels, "%lld", (long long)pixel[i]);
        }
        for (int64_t i = 0; i < positions; i++) {
            double total = 0, mean = 0;
            for (int64_t j = 0; j < positions; j++) {
                double score = w->scale * dot(w, qkv, element(w, pixel[i], 0, head, 0), qkv,
                                              element(w, pixel[j], 1, head, 0), dtype);
                score += get(bias, (head * positions + i) * positions + j, dtype) + (part[i] == part[j] ? 0 : -100);
                total += weights[i * positions + j] = exp(score);
            }
            for (int64_t j = 0; j < positions; j++) {
                weights[i * positions + j] /= total;
                slopes[i * positions + j] = dot(w, grad, (pixel[i] * w->heads + head) * w->head_dim, qkv,
                                                element(w, pixel[j], 2, head, 0), dtype);
                mean += weights[i * positions + j] * slopes[i * positions + j];
            }
            for (int64_t j = 0; j < positions; j++) {
                slopes[i * positions + j] = weights[i * positions + j] * (slopes[i * positions + j] - mean);
                sums[(chunk * w->heads + head) * squares + i * positions + j] += slopes[i * positions + j];
            }
        }
        for (int64_t i = 0; i < positions; i++)
            for (int64_t d = 0; d < w->head_dim; d++) {
                const int64_t at = (pixel[i] * w->heads + head) * w->head_dim + d;
                double expected = 0, of_query = 0, of_key = 0, of_value = 0;
                for (int64_t j = 0; j < positions; j++) {
                    expected += weights[i * positions + j] * get(qkv, element(w, pixel[j], 2, head, d), dtype);
                    of_query += slopes[i * positions + j] * get(qkv, element(w, pixel[j], 1, head, d), dtype);
                    of_key += slopes[j * positions + i] * get(qkv, element(w, pixel[j], 0, head, d), dtype);
                    of_value +=
                        weights[j * positions + i] * get(grad, (pixel[j] * w->heads + head) * w->head_dim + d, dtype);
                }
                if (begin <= unit && unit < end)
                    CHECK_NEAR(output, at, expected, 20 * rounding(dtype), dtype);
                else
                    CHECK_UNWRITTEN(output, at, dtype);
                CHECK_NEAR(grad_qkv, element(w, pixel[i], 0, head, d), w->scale * of_query, 20 * rounding(dtype),
                           dtype);
                CHECK_NEAR(grad_qkv, element(w, pixel[i], 1, head, d), w->scale * of_key, 20 * rounding(dtype), dtype);
                CHECK_NEAR(grad_qkv, element(w, pixel[i], 2, head, d), of_value, 20 * rounding(dtype), dtype);
            }
    }
    for (int64_t i = 0; i < chunks * w->heads * squares; i++)
        CHECK_NEAR(partials, i, sums[i], 20 * rounding(dtype), dtype);
    free(weights);
    free(slopes);
    free(sums);
    guarded_free(qkv, 3 * pixels * channels, dtype);
    guarded_free(grad, pixels * channels, dtype);
    guarded_free(bias, w->heads * squares, dtype);
    guarded_free(output, pixels * channels, dtype);
    guarded_free(grad_qkv, 3 * pixels * channels, dtype);
    guarded_free(partials, chunks * w->heads * squares, dtype);
}

int main(void)
{
    const cuda_ops_windows plain = {2, 4, 6, 2, 3, 2, 3, 0, 0, 0, 0.5}, shifted = {1, 6, 6, 2, 17, 3, 2, 1, 1, 0, 0.3};
    const cuda_ops_windows grid = {1, 4, 6, 1, 4, 2, 3, 0, 0, 1, 1.0}, large = {1, 64, 64, 1, 1, 64, 64, 0, 0, 0, 1.0};
    FOR_CPU_DTYPES(dtype)
    {
        check_windows(&plain, 0, 16, 3, dtype);
        check_windows(&plain, 3, 10, 1, dtype);
        check_windows(&shifted, 0, 12, 6, dtype);
        check_windows(&grid, 1, 4, 2, dtype);
        CHECK_OK(cuda_ops_window_attention_forward_cpu(NULL, NULL, NULL, &plain, 0, 0, dtype));
        CHECK_STATUS(cuda_ops_window_attention_forward_cpu(NULL, NULL, NULL, &large, 0, 1, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
        CHECK_STATUS(cuda_ops_window_attention_backward_cpu(NULL, NULL, NULL, NULL, NULL, &large, 1, 0, 1, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
    }
    CHECK_STATUS(cuda_ops_window_attention_forward_cpu(NULL, NULL, NULL, &plain, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(
        cuda_ops_window_attention_backward_cpu(NULL, NULL, NULL, NULL, NULL, &plain, 1, 0, 1, (cuda_ops_dtype)17),
        CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
