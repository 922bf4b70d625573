#include "cuda_ops/conv2d.h"

#include "check.h"

typedef cuda_ops_conv2d_sizes sizes;

static int64_t at4(int64_t channels, int64_t height, int64_t width, int channels_last, int64_t n, int64_t c, int64_t h,
                   int64_t w)
{
    return channels_last ? ((n * height + h) * width + w) * channels + c
                         : ((n * channels + c) * height + h) * width + w;
}

/* As IN_TWO_PIECES, each with a workspace of its own, which holds no numbers. */
#define IN_TWO_PIECES_WITH(count, workspace_bytes, begin, end, workspace, call)                                        \
    do {                                                                                                               \
        const int64_t count_ = (count);                                                                                \
        for (int piece_ = 0; piece_ < 2; piece_++) {                                                                   \
            const int64_t begin = piece_ * (count_ / 2), end = piece_ ? count_ : count_ / 2;                           \
            void *workspace = aligned((workspace_bytes));                                                              \
            CHECK_OK(call);                                                                                            \
            free(workspace);                                                                                           \
        }                                                                                                              \
    } while (0)

static void *aligned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes / 64 + 1) * 64);
    CHECK(memory != NULL, "out of memory");
    memset(memory, 0xff, (bytes / 64 + 1) * 64);
    return memory;
}

static bool is_half(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16;
}

static void check_conv2d(sizes s, bool with_bias, cuda_ops_dtype dtype)
{
    const int64_t C = s.in_channels / s.groups, K = s.out_channels / s.groups; /* of a group */
    const int64_t in_count = s.batch * s.in_channels * s.in_height * s.in_width;
    const int64_t out_count = s.batch * s.out_channels * s.out_height * s.out_width;
    const int64_t weight_count = s.out_channels * C * s.kernel_height * s.kernel_width;
    void *input = guarded_numbers(in_count, 1, dtype), *weight = guarded_numbers(weight_count, 2, dtype);
    void *bias = guarded_numbers(s.out_channels, 3, dtype), *grad_output = guarded_numbers(out_count, 4, dtype);
    void *output = guarded_new(out_count, dtype), *grad_input = guarded_new(in_count, dtype);
    void *grad_weight = guarded_new(weight_count, dtype), *grad_bias = guarded_new(s.out_channels, dtype);
    cuda_ops_conv2d_plan plan;

    CHECK_OK(cuda_ops_conv2d_plan_cpu(&plan, CUDA_OPS_CONV2D_FORWARD, &s, dtype));
    void *prepared = aligned(plan.prepared_bytes);
    IN_TWO_PIECES(plan.prepare_count, begin, end,
                  cuda_ops_conv2d_prepare_cpu(prepared, weight, CUDA_OPS_CONV2D_FORWARD, &s, begin, end, dtype));
    IN_TWO_PIECES_WITH(plan.count, plan.workspace_bytes, begin, end, workspace,
                       cuda_ops_conv2d_forward_cpu(output, input, weight, prepared, with_bias ? bias : NULL, &s, begin,
                                                   end, workspace, dtype));
    free(prepared);

    CHECK_OK(cuda_ops_conv2d_plan_cpu(&plan, CUDA_OPS_CONV2D_BACKWARD_INPUT, &s, dtype));
    prepared = aligned(plan.prepared_bytes);
    IN_TWO_PIECES(plan.prepare_count, begin, end,
                  cuda_ops_conv2d_prepare_cpu(prepared, weight, CUDA_OPS_CONV2D_BACKWARD_INPUT, &s, begin, end, dtype));
    IN_TWO_PIECES_WITH(plan.count, plan.workspace_bytes, begin, end, workspace,
                       cuda_ops_conv2d_backward_input_cpu(grad_input, grad_output, weight, prepared, &s, begin, end,
                                                          workspace, dtype));
    free(prepared);

    CHECK_OK(cuda_ops_conv2d_plan_cpu(&plan, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, &s, dtype));
    prepared = aligned(plan.prepared_bytes);
    IN_TWO_PIECES_WITH(plan.count, plan.workspace_bytes, begin, end, workspace,
                       cuda_ops_conv2d_backward_weight_cpu(grad_weight, prepared, grad_output, input, &s, begin, end,
                                                           workspace, dtype));
    IN_TWO_PIECES(plan.reduce_count, begin, end,
                  cuda_ops_conv2d_reduce_weight_cpu(grad_weight, prepared, &s, begin, end, dtype));
    free(prepared);
    if (is_half(dtype)) /* which are summed in float32 */
        memset(grad_bias, 0, (size_t)s.out_channels * sizeof(uint16_t));
    else
        IN_TWO_PIECES(s.out_channels, begin, end,
                      cuda_ops_conv2d_backward_bias_cpu(grad_bias, grad_output, s.batch, s.out_channels,
                                                        s.out_height * s.out_width, s.output_channels_last, begin, end,
                                                        dtype));

    /* All four by the definition, going once through every product. */
    double *y = calloc((size_t)out_count + 1, sizeof(double)), *gx = calloc((size_t)in_count + 1, sizeof(double));
    double *gw = calloc((size_t)weight_count + 1, sizeof(double)), *gb = calloc((size_t)s.out_channels, sizeof(double));
    CHECK(y && gx && gw && gb, "out of memory");
    for (int64_t n = 0; n < s.batch; n++) {
        for (int64_t o = 0; o < s.out_channels; o++) {
            for (int64_t p = 0; p < s.out_height * s.out_width; p++) {
                const int64_t row = p / s.out_width, column = p % s.out_width;
                const int64_t out =
                    at4(s.out_channels, s.out_height, s.out_width, s.output_channels_last, n, o, row, column);
                const double g = get(grad_output, out, dtype);
                y[out] += with_bias ? get(bias, o, dtype) : 0;
                gb[o] += g;
                for (int64_t k = 0; k < C * s.kernel_height * s.kernel_width; k++) {
                    const int64_t c = k / (s.kernel_height * s.kernel_width);
                    const int64_t r = k / s.kernel_width % s.kernel_height, t = k % s.kernel_width;
                    const int64_t h = row * s.stride_height - s.padding_top + r * s.dilation_height;
                    const int64_t w = column * s.stride_width - s.padding_left + t * s.dilation_width;
                    if (h < 0 || h >= s.in_height || w < 0 || w >= s.in_width)
                        continue;
                    const int64_t in =
                        at4(s.in_channels, s.in_height, s.in_width, s.input_channels_last, n, o / K * C + c, h, w);
                    const int64_t wt = at4(C, s.kernel_height, s.kernel_width, s.weight_channels_last, o, c, r, t);
                    y[out] += get(input, in, dtype) * get(weight, wt, dtype);
                    gx[in] += g * get(weight, wt, dtype);
                    gw[wt] += g * get(input, in, dtype);
                }
            }
        }
    }
    /* Terms are at most 4, and their sums round as many times as there are terms. */
    const double terms = (double)(C * s.kernel_height * s.kernel_width + s.batch * s.out_height * s.out_width);
    const double tolerance = rounding(dtype) * (1 + (is_half(dtype) ? 0 : 0.1 * terms));
    for (int64_t i = 0; i < out_count; i++)
        CHECK_NEAR(output, i, y[i], tolerance, dtype);
    for (int64_t i = 0; i < in_count; i++)
        CHECK_NEAR(grad_input, i, gx[i], tolerance, dtype);
    for (int64_t i = 0; i < weight_count; i++)
        CHECK_NEAR(grad_weight, i, gw[i], tolerance, dtype);
    for (int64_t i = 0; i < s.out_channels && !is_half(dtype); i++)
        CHECK_NEAR(grad_bias, i, gb[i], tolerance, dtype);
    free(y);
    free(gx);
    free(gw);
    free(gb);
    guarded_free(input, in_count, dtype);
    guarded_free(weight, weight_count, dtype);
    guarded_free(bias, s.out_channels, dtype);
    guarded_free(grad_output, out_count, dtype);
    guarded_free(output, out_count, dtype);
    guarded_free(grad_input, in_count, dtype);
    guarded_free(grad_weight, weight_count, dtype);
    guarded_free(grad_bias, s.out_channels, dtype);
}

/* Alike in height and width but for one: the width has one column more, so that the two cannot be mixed up. */
static sizes make_sizes(int64_t batch, int64_t groups, int64_t in, int64_t out, int64_t size, int64_t kernel,
                        int64_t stride, int64_t padding, int64_t dilation)
{
    const int64_t span = (kernel - 1) * dilation + 1;
    return (sizes){
        .batch = batch,
        .groups = groups,
        .in_channels = in,
        .in_height = size,
        .in_width = size + 1,
        .out_channels = out,
        .out_height = (size + 2 * padding - span) / stride + 1,
        .out_width = (size + 1 + 2 * padding - span) / stride + 1,
        .kernel_height = kernel,
        .kernel_width = kernel,
        .stride_height = stride,
        .stride_width = stride,
        .padding_top = padding,
        .padding_left = padding,
        .dilation_height = dilation,
        .dilation_width = dilation,
    };
}

int main(void)
{
    const sizes all[] = {
        make_sizes(1, 1, 1, 1, 1, 1, 1, 0, 1),        /* one product */
        make_sizes(2, 1, 1, 32, 9, 3, 1, 1, 1),       /* the first layer of the MNIST CNN, a smaller image */
        make_sizes(1, 1, 32, 17, 7, 3, 1, 1, 1),      /* its second; channels that no vector divides */
        make_sizes(3, 1, 5, 7, 6, 1, 1, 0, 1),        /* a matrix product */
        make_sizes(2, 2, 6, 4, 9, 3, 2, 1, 1),        /* stride, groups */
        make_sizes(1, 4, 4, 8, 10, 3, 1, 2, 2),       /* dilation, depthwise */
        make_sizes(1, 1, 2, 3, 8, 5, 3, 4, 1),        /* more padding than image at the edge */
        make_sizes(1, 1, 3, 2, 33, 3, 1, 0, 1),       /* wider than a vector */
        make_sizes(2, 1, 0, 3, 4, 3, 1, 1, 1),        /* no channels: bias alone */
        make_sizes(2, 21, 21, 21, 9, 5, 2, 2, 1),     /* depthwise, a vector and a few channels, stride phases */
        make_sizes(1, 16, 16, 16, 70, 3, 1, 1, 1),    /* depthwise in several strips */
        make_sizes(2, 83, 83, 83, 11, 7, 1, 3, 1),    /* depthwise of several vectors; seven rows of a kernel */
        make_sizes(1, 150, 150, 150, 19, 6, 3, 5, 2), /* ... and six, dilated, with stride phases without taps */
        make_sizes(4, 3, 48, 57, 15, 3, 2, 1, 1),     /* groups of a vector of channels: nothing is gathered */
        make_sizes(3, 2, 40, 26, 13, 3, 1, 1, 1),     /* ... of parts of one */
        make_sizes(1, 1, 9, 150, 12, 3, 1, 1, 1),     /* ... with output channels in pieces */
        make_sizes(3, 1, 20, 30, 4, 3, 2, 1, 1),      /* blocks of pixels that go over images */
        make_sizes(1, 1, 12, 70, 18, 3, 1, 2, 2), /* several blocks of pixels in an image, and of what is gathered */
        make_sizes(5, 2, 24, 18, 13, 1, 1, 0, 1), /* multiplied where it lies */
        make_sizes(2, 1, 40, 70, 3, 1, 1, 0, 1),  /* ... of few pixels, a few channels at a time */
        make_sizes(9, 1, 40, 33, 13, 1, 2, 0, 1), /* splits of grad_weight; phases without taps */
    };
    FOR_STORED_DTYPES(dtype)
    {
        for (size_t a = 0; a < sizeof(all) / sizeof(all[0]); a++) {
            /* Halves that every processor takes as they are. */
            if (is_half(dtype) && (all[a].groups < 4 || all[a].in_channels + all[a].out_channels > 2 * all[a].groups))
                continue;
            for (int flags = 0; flags < 8; flags++) {
                sizes s = all[a];
                s.input_channels_last = flags & 1;
                s.weight_channels_last = (flags & 2) != 0;
                s.output_channels_last = (flags & 4) != 0;
                check_conv2d(s, flags % 3 != 0, dtype);
            }
        }
    }
    cuda_ops_conv2d_plan plan;
    /* The tiles that halves are taken by, on a processor that has them, are none for one channel's weights. */
    CHECK_STATUS(cuda_ops_conv2d_plan_cpu(&plan, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, &all[1], CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
