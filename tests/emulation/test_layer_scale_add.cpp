// layer_scale_add and its backward: weights of columns and of rows or none, of one dtype and of halves beside float32,
// with a rounded copy of the sum and its gradient.
#include "cases.h"
#include "cuda_ops/layer_scale_add.h"

using namespace emulation;

static void layer_scale_add(int64_t number)
{
    const bool mixed = one_in(2);
    const cuda_ops_dtype half = one_in(2) ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    const cuda_ops_dtype type = mixed ? CUDA_OPS_FLOAT32 : DTYPES[random_below(4)];
    const cuda_ops_dtype input_type = mixed ? half : type, residual_type = mixed && one_in(2) ? half : type;
    const int64_t cols = one_in(4) ? random_size(6000) : random_size(300);
    const bool by_row = one_in(3), has_weight = !one_in(4), has_scale = one_in(2);
    const int64_t channels = by_row ? random_size(9) : 0, image_rows = (by_row ? channels : 1) * random_size(20);
    const int64_t images = random_size(30000 / (cols * image_rows) + 1), rows = images * image_rows;
    const int64_t count = rows * cols, weights = by_row ? channels : cols;
    const cuda_ops_dtype scale_type = type == CUDA_OPS_FLOAT64 ? type : CUDA_OPS_FLOAT32;
    const Array input = Array(count, input_type).random(), residual = Array(count, residual_type).random();
    const Array weight = Array(weights, type).random(), scale = Array(images, scale_type).random();
    const bool copies = mixed && one_in(2);
    const Array sum(count, type), copy(copies ? count : 0, input_type);
    const void *const w = has_weight ? weight.data : nullptr, *const s = has_scale ? scale.data : nullptr;
    describe("case %lld: %lld rows of %lld, channels %lld, image rows %lld, dtypes %d, %d, %d%s", (long long)number,
             (long long)rows, (long long)cols, (long long)channels, (long long)image_rows, type, input_type,
             residual_type, copies ? ", copy" : "");
    expect_success(cuda_ops_layer_scale_add_forward_cuda(sum.data, copies ? copy.data : nullptr, input.data,
                                                         residual.data, w, s, rows, cols, channels, image_rows, type,
                                                         input_type, residual_type, nullptr));
    const bool has_sum = !copies || !one_in(3), wants_input = !one_in(5), wants_residual = one_in(2);
    const bool wants_weight = has_weight && !by_row && !one_in(4);
    const Array grad_sum = Array(count, type).random(), grad_copy = Array(copies ? count : 0, input_type).random();
    const Array grad_input(count, input_type), grad_residual(count, residual_type), grad_weight(weights, type);
    void *const workspace = device_memory((size_t)cuda_ops_layer_scale_add_workspace_cuda(rows, cols, type), 0);
    expect_success(cuda_ops_layer_scale_add_backward_cuda(
        wants_input ? grad_input.data : nullptr, wants_residual ? grad_residual.data : nullptr,
        wants_weight ? grad_weight.data : nullptr, workspace, has_sum ? grad_sum.data : nullptr,
        copies ? grad_copy.data : nullptr, wants_weight ? input.data : nullptr, w, s, rows, cols, channels, image_rows,
        type, input_type, residual_type, nullptr));
    std::vector<double> sums((size_t)weights), sizes((size_t)weights);
    const double inner = 4 * rounding_of(scale_type);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = i / cols, at = by_row ? row % channels : i % cols;
        const double rows_scale = s ? scale[row / image_rows] : 1, factor = rows_scale * (w ? weight[at] : 1);
        const double expected = residual[i] + factor * input[i];
        const double size = fabs(residual[i]) + fabs(factor * input[i]);
        expect_near("sum", i, sum[i], expected, rounding_of(type) * fabs(expected) + inner * size);
        if (copies)
            expect_near("copy", i, copy[i], expected, rounding_of(input_type) * fabs(expected) + inner * size);
        const double g = (has_sum ? grad_sum[i] : 0) + (copies ? grad_copy[i] : 0);
        if (wants_input)
            expect_near("grad_input", i, grad_input[i], g * factor,
                        (rounding_of(input_type) + inner) * fabs(g * factor));
        if (wants_residual)
            expect_near("grad_residual", i, grad_residual[i], g, rounding_of(residual_type) * fabs(g));
        if (wants_weight) {
            sums[(size_t)at] += g * rows_scale * input[i];
            sizes[(size_t)at] += fabs(g * rows_scale * input[i]);
        }
    }
    for (int64_t c = 0; c < weights && wants_weight; c++)
        expect_near("grad_weight", c, grad_weight[c], sums[(size_t)c],
                    rounding_of(type) * fabs(sums[(size_t)c]) + 20 * inner * sizes[(size_t)c]);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "layer_scale_add", layer_scale_add);
}
