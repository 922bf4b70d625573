#include "cuda_ops/conv_transpose2d.h"

#include "check.h"

typedef cuda_ops_conv2d_sizes sizes;

static void *aligned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes / 64 + 1) * 64);
    CHECK(memory != NULL, "out of memory");
    memset(memory, 0xff, (bytes / 64 + 1) * 64);
    return memory;
}

static int64_t at4(int64_t channels, int64_t height, int64_t width, int channels_last, int64_t n, int64_t c, int64_t h,
                   int64_t w)
{
    return channels_last ? ((n * height + h) * width + w) * channels + c
                         : ((n * channels + c) * height + h) * width + w;
}

/* The names are the transposed convolution's: input has the sizes that the convolution calls out. */
static void check_transposed(sizes s, bool with_bias, cuda_ops_dtype dtype)
{
    const int64_t C = s.in_channels / s.groups, K = s.out_channels / s.groups; /* of a group */
    const int64_t input_count = s.batch * s.out_channels * s.out_height * s.out_width;
    const int64_t output_count = s.batch * s.in_channels * s.in_height * s.in_width;
    const int64_t weight_count = s.out_channels * C * s.kernel_height * s.kernel_width;
    void *input = guarded_numbers(input_count, 1, dtype), *weight = guarded_numbers(weight_count, 2, dtype);
    void *bias = guarded_numbers(s.in_channels, 3, dtype), *output = guarded_new(output_count, dtype);

    cuda_ops_conv2d_plan plan;
    CHECK_OK(cuda_ops_conv2d_plan_cpu(&plan, CUDA_OPS_CONV2D_BACKWARD_INPUT, &s, dtype));
    void *prepared = aligned(plan.prepared_bytes), *workspace = aligned(plan.workspace_bytes);
    CHECK_OK(cuda_ops_conv2d_prepare_cpu(prepared, weight, CUDA_OPS_CONV2D_BACKWARD_INPUT, &s, 0, plan.prepare_count,
                                         dtype));
    for (int64_t i = 0; i < plan.count; i++)
        CHECK_OK(cuda_ops_conv_transpose2d_forward_cpu(output, input, weight, prepared, with_bias ? bias : NULL, &s, i,
                                                       i + 1, workspace, dtype));

    double *expected = calloc((size_t)output_count, sizeof(double));
    CHECK(expected, "out of memory");
    const int64_t taps = s.kernel_height * s.kernel_width;
    for (int64_t n = 0; n < s.batch; n++) {
        for (int64_t c = 0; c < s.in_channels; c++)
            for (int64_t p = 0; p < s.in_height * s.in_width; p++)
                expected[at4(s.in_channels, s.in_height, s.in_width, s.input_channels_last, n, c, p / s.in_width,
                             p % s.in_width)] = with_bias ? get(bias, c, dtype) : 0;
        for (int64_t o = 0; o < s.out_channels; o++)
            for (int64_t p = 0; p < s.out_height * s.out_width; p++)
                for (int64_t k = 0; k < C * taps; k++) {
                    const int64_t row = p / s.out_width, column = p % s.out_width;
                    const int64_t c = k / taps, r = k / s.kernel_width % s.kernel_height, t = k % s.kernel_width;
                    const int64_t h = row * s.stride_height - s.padding_top + r * s.dilation_height;
                    const int64_t w = column * s.stride_width - s.padding_left + t * s.dilation_width;
                    if (h < 0 || h >= s.in_height || w < 0 || w >= s.in_width)
                        continue;
                    const int64_t from =
                        at4(s.out_channels, s.out_height, s.out_width, s.output_channels_last, n, o, row, column);
                    const int64_t by = at4(C, s.kernel_height, s.kernel_width, s.weight_channels_last, o, c, r, t);
                    expected[at4(s.in_channels, s.in_height, s.in_width, s.input_channels_last, n, o / K * C + c, h,
                                 w)] += get(input, from, dtype) * get(weight, by, dtype);
                }
    }
    const double tolerance = rounding(dtype) * (1 + 0.1 * (double)(K * taps));
    for (int64_t i = 0; i < output_count; i++)
        CHECK_NEAR(output, i, expected[i], tolerance, dtype);
    free(expected);
    free(prepared);
    free(workspace);
    guarded_free(input, input_count, dtype);
    guarded_free(weight, weight_count, dtype);
    guarded_free(bias, s.in_channels, dtype);
    guarded_free(output, output_count, dtype);
}

int main(void)
{
    /* A DCGAN's layer of stride 2; a stride greater than the kernel, with rows and columns of bias alone between and
     * after; groups, with dilation and padding. */
    const sizes cases[] = {
        {.batch = 2,
         .groups = 1,
         .out_channels = 5,
         .out_height = 4,
         .out_width = 3,
         .in_channels = 3,
         .in_height = 8,
         .in_width = 6,
         .kernel_height = 4,
         .kernel_width = 4,
         .stride_height = 2,
         .stride_width = 2,
         .padding_top = 1,
         .padding_left = 1,
         .dilation_height = 1,
         .dilation_width = 1},
        {.batch = 1,
         .groups = 1,
         .out_channels = 2,
         .out_height = 3,
         .out_width = 2,
         .in_channels = 9,
         .in_height = 3 * 4,
         .in_width = 2 * 5,
         .kernel_height = 2,
         .kernel_width = 1,
         .stride_height = 4,
         .stride_width = 5,
         .dilation_height = 1,
         .dilation_width = 1},
        {.batch = 2,
         .groups = 2,
         .out_channels = 4,
         .out_height = 5,
         .out_width = 4,
         .in_channels = 6,
         .in_height = 7,
         .in_width = 9,
         .kernel_height = 3,
         .kernel_width = 2,
         .stride_height = 1,
         .stride_width = 2,
         .padding_top = 1,
         .padding_left = 0,
         .dilation_height = 2,
         .dilation_width = 1},
    };
    FOR_CPU_DTYPES(dtype)
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int formats = 0; formats < 8; formats++) {
            sizes s = cases[i];
            s.input_channels_last = formats & 1;
            s.weight_channels_last = formats >> 1 & 1;
            s.output_channels_last = formats >> 2;
            check_transposed(s, i != 2 || formats & 1, dtype);
        }
    return 0;
}
