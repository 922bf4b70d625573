#include "cuda_ops/layer_scale_add.h"

#include "check.h"

/* Elements [begin, end) of rows * cols; the others must not be touched. channels: 0 for weights of columns. */
static void check_range(int64_t rows, int64_t cols, int64_t channels, int64_t image_rows, int64_t begin, int64_t end,
                        cuda_ops_dtype dtype)
{
    const int64_t count = rows * cols, weights = channels > 0 ? channels : cols;
    void *input = guarded_numbers(count, 1, dtype), *residual = guarded_numbers(count, 2, dtype);
    const cuda_ops_dtype computed = computed_dtype(dtype);
    void *weight = guarded_numbers(weights, 3, computed), *scale = guarded_numbers(rows, 4, computed);
    void *sum = guarded_new(count, dtype), *grad = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_layer_scale_add_forward_cpu(sum, input, residual, weight, scale, cols, channels, image_rows,
                                                  begin, end, dtype));
    CHECK_OK(cuda_ops_layer_scale_add_backward_cpu(grad, input, weight, scale, cols, channels, image_rows, begin, end,
                                                   dtype));
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = i / cols;
        if (begin <= i && i < end) {
            const double factor = get(weight, channels > 0 ? row % channels : i % cols, computed) *
                                  get(scale, row / image_rows, computed);
            const double scaled = factor * get(input, i, dtype);
            CHECK_NEAR(sum, i, get(residual, i, dtype) + scaled, 4 * rounding(dtype), dtype);
            CHECK_NEAR(grad, i, scaled, 4 * rounding(dtype), dtype);
        } else {
            CHECK_UNWRITTEN(sum, i, dtype);
            CHECK_UNWRITTEN(grad, i, dtype);
        }
    }
    CHECK_OK(cuda_ops_layer_scale_add_forward_cpu(sum, input, residual, NULL, NULL, cols, 0, 1, begin, end, dtype));
    for (int64_t i = begin; i < end; i++)
        CHECK_NEAR(sum, i, get(residual, i, dtype) + get(input, i, dtype), rounding(dtype), dtype);
    guarded_free(input, count, dtype);
    guarded_free(residual, count, dtype);
    guarded_free(weight, weights, computed);
    guarded_free(scale, rows, computed);
    guarded_free(sum, count, dtype);
    guarded_free(grad, count, dtype);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    {
        check_range(1, 1, 0, 1, 0, 1, dtype);
        check_range(6, 5, 0, 3, 0, 30, dtype);
        check_range(6, 5, 0, 3, 7, 22, dtype);
        check_range(12, 9, 4, 4, 0, 108, dtype);
        check_range(12, 9, 4, 4, 10, 11, dtype);
        check_range(12, 33, 4, 6, 40, 40, dtype);
        CHECK_OK(cuda_ops_layer_scale_add_forward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 0, 1, 0, 0, dtype));
    }
    CHECK_STATUS(cuda_ops_layer_scale_add_forward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 0, 1, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_layer_scale_add_backward_cpu(NULL, NULL, NULL, NULL, 1, 0, 1, 0, 1, (cuda_ops_dtype)17),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
