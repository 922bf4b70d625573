/* Convolution on the CPU, and its gradients, and the choice between three ways to make them: depthwise.c, gathered.c
 * (products of matrices, for most), and this file's for what is left: few input channels, and tensors of mixed formats.
 * They are direct, without an im2col buffer. A block of rows is staged such that
 * every tap becomes one offset (conv2d/plan.h); the innermost loops (conv2d/kernel.h) keep a micro-tile of sums in
 * vector registers: 8 channels x 2 vectors of pixels in forward and backward_input, 9 taps x 2 vectors of channels in
 * backward_weight. Bound by arithmetic except with a few input channels. conv2d/kernel.h is compiled once per
 * instruction set and element type, and the widest that the processor has is picked at run time. */
#ifndef REAL

#include "common/half.h"
#include "conv2d/paths.h"
#include "conv2d/plan.h"
#include "cuda_ops/conv_transpose2d.h"
#include "cuda_ops/cpu_isa.h"
#include "gemm/tiles.h"

#define VECTOR_BYTES 16 /* any x86-64 or 64-bit Arm has 16 registers of 16 bytes: 8 or 9 accumulators */
#define VECTORS 1
#define TARGET(name) name##_any
#include "conv2d/passes.h"

#if CUDA_OPS_WITH_TARGETS

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VECTOR_BYTES 32
#define VECTORS 1
#define TARGET(name) name##_avx2
#include "conv2d/passes.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,fma")
#define VECTOR_BYTES 64 /* 32 registers: 16 or 18 accumulators */
#define VECTORS 2
#define TARGET(name) name##_avx512
#include "conv2d/passes.h"
#pragma GCC pop_options
#endif

enum {
    BLOCK_BYTES = 1 << 18, /* of a staged block of rows: less than a second-level cache, which holds the weights too */
    FEWEST_UNITS = 16,     /* blocks of rows that a small batch is split into, so that several threads have work */
    MOST_SPLITS = 16,      /* of backward_weight: how many can run at once, each with its copy of the sums */
    SPLITS_BYTES = 64 << 20
};
static const int64_t SIZE_LIMIT = (int64_t)1 << 30;

static int vector_bytes(void)
{
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    return isa >= CUDA_OPS_CPU_AVX512 ? 64 : isa == CUDA_OPS_CPU_AVX2 ? 32 : 16;
}

static size_t size_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
}

static struct image_layout image_layout(int64_t channels, int64_t height, int64_t width, int channels_last)
{
    if (channels_last)
        return (struct image_layout){channels * height * width, 1, width * channels, channels};
    return (struct image_layout){channels * height * width, height * width, width, 1};
}

static bool valid_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation)
{
    return in >= 0 && out >= 0 && kernel > 0 && stride > 0 && padding >= 0 && dilation > 0 && in < SIZE_LIMIT &&
           out < SIZE_LIMIT && stride < SIZE_LIMIT && padding < SIZE_LIMIT && dilation < SIZE_LIMIT &&
           kernel < SIZE_LIMIT && (kernel - 1) * dilation < SIZE_LIMIT;
}

cuda_ops_status cuda_ops_conv2d_check_sizes(const cuda_ops_conv2d_sizes *s)
{
    const bool valid =
        valid_axis(s->in_height, s->out_height, s->kernel_height, s->stride_height, s->padding_top,
                   s->dilation_height) &&
        valid_axis(s->in_width, s->out_width, s->kernel_width, s->stride_width, s->padding_left, s->dilation_width) &&
        s->batch >= 0 && s->groups > 0 && s->in_channels >= 0 && s->out_channels >= 0 &&
        s->in_channels % s->groups == 0 && s->out_channels % s->groups == 0;
    return valid ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
}

/* Each channel for itself. */
static bool is_depthwise(const cuda_ops_conv2d_sizes *sizes)
{
    return sizes->groups > 1 && sizes->in_channels == sizes->groups && sizes->out_channels == sizes->groups;
}

/* Whether depthwise.c does not take halves that are: then nothing does. */
static bool is_left_out(const struct product *p, cuda_ops_dtype dtype)
{
    return is_half(dtype) && !cuda_ops_conv2d_depthwise_takes(p, dtype);
}

static cuda_ops_status check_sizes(const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64 &&
        !(is_half(dtype) && (cuda_ops_has_tiles(dtype) || is_depthwise(sizes))))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return cuda_ops_conv2d_check_sizes(sizes);
}

/* Halves that have been checked: tiled.c takes them, or depthwise.c, or nothing does. */
static bool is_tiled(const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype)
{
    return is_half(dtype) && !is_depthwise(sizes);
}

/* The least distance from a row of target to the row of source that a tap reads, and the distance between taps. */
static void tap_extent(const struct product *p, int64_t *first_y, int64_t *extent_y, int64_t *first_x,
                       int64_t *extent_x)
{
    int64_t low = 4 * SIZE_LIMIT, high = -low, distance;
    for (int64_t y = 0; y < p->phases_y; y++)
        for (int64_t r = 0; r < p->kernel_height; r++)
            if (tap_row(p, y, r, &distance)) {
                low = min_i64(low, distance);
                high = max_i64(high, distance);
            }
    /* No tap at all: with a large stride all of them may fall into the padding. */
    *first_y = low <= high ? low : 0;
    *extent_y = max_i64(1, high - low + 1);
    low = 4 * SIZE_LIMIT, high = -low;
    for (int64_t x = 0; x < p->phases_x; x++)
        for (int64_t s = 0; s < p->kernel_width; s++)
            if (tap_column(p, x, s, &distance)) {
                low = min_i64(low, distance);
                high = max_i64(high, distance);
            }
    *first_x = low <= high ? low : 0;
    *extent_x = max_i64(1, high - low + 1);
}

/* A convolution of single pixels is in both formats, and as channels_last a product of rows. */
static bool single_pixels(const cuda_ops_conv2d_sizes *s)
{
    return s->in_height * s->in_width == 1 && s->out_height * s->out_width == 1 &&
           s->kernel_height * s->kernel_width == 1;
}

static bool channels_last(const cuda_ops_conv2d_sizes *s)
{
    return s->input_channels_last || single_pixels(s);
}

/* Whether this file's kernels are faster than gathered.c's: gathering an element pays if many channels read it. */
static bool is_thin(const cuda_ops_conv2d_sizes *s, cuda_ops_conv2d_pass pass)
{
    const int64_t channels = s->in_channels / s->groups;
    const bool overlap = s->stride_height < s->kernel_height && s->stride_width < s->kernel_width;
    if (s->groups == 1)
        return channels <= 4 && overlap && !(pass == CUDA_OPS_CONV2D_FORWARD && s->input_channels_last);
    if (channels <= 4)
        return true;
    if (channels > 8)
        return false;
    switch (pass) {
    case CUDA_OPS_CONV2D_FORWARD:
        return s->stride_height * s->stride_width == 1;
    case CUDA_OPS_CONV2D_BACKWARD_INPUT:
        return true;
    default:
        return false;
    }
}

/* Whether gathered.c makes the product: of three tensors of one format. (A 1x1 weight is in both.) */
static bool takes_gathered(const cuda_ops_conv2d_sizes *s, cuda_ops_conv2d_pass pass)
{
    const bool same_weight =
        s->kernel_height * s->kernel_width == 1 || !s->weight_channels_last == !s->input_channels_last;
    return single_pixels(s) ||
           (same_weight && !s->input_channels_last == !s->output_channels_last && !is_thin(s, pass));
}

/* Images one above the other: 1x1 kernels of stride 1 in channels_last do not see where one ends. */
static bool is_one_image(const cuda_ops_conv2d_sizes *s)
{
    return s->kernel_height * s->kernel_width * s->stride_height * s->stride_width == 1 && s->padding_top == 0 &&
           s->padding_left == 0 && s->in_height == s->out_height && s->in_width == s->out_width &&
           ((s->input_channels_last && s->output_channels_last) || single_pixels(s));
}

static struct product make_product(const cuda_ops_conv2d_sizes *s, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    cuda_ops_conv2d_sizes stacked = *s;
    if (is_tiled(s, dtype) && is_one_image(s)) { /* whose tiles of pixels end with images */
        stacked.batch = 1;
        stacked.in_height = stacked.out_height = s->batch * s->in_height;
        stacked.input_channels_last = stacked.output_channels_last = 1;
        s = &stacked;
    }
    const bool backward = pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    const int64_t in_channels = s->in_channels / s->groups, out_channels = s->out_channels / s->groups;
    const bool single = single_pixels(s);
    const struct image_layout input =
        image_layout(s->in_channels, s->in_height, s->in_width, s->input_channels_last || single);
    const struct image_layout output =
        image_layout(s->out_channels, s->out_height, s->out_width, s->output_channels_last || single);
    const struct image_layout weight =
        image_layout(in_channels, s->kernel_height, s->kernel_width, s->weight_channels_last);
    struct product p = {
        .groups = s->groups,
        .images = s->batch,
        .source_channels = backward ? out_channels : in_channels,
        .source_height = backward ? s->out_height : s->in_height,
        .source_width = backward ? s->out_width : s->in_width,
        .source = backward ? output : input,
        .step_y = backward ? 1 : s->stride_height,
        .step_x = backward ? 1 : s->stride_width,
        .target_channels = backward ? in_channels : out_channels,
        .target_height = backward ? s->in_height : s->out_height,
        .target_width = backward ? s->in_width : s->out_width,
        .target = backward ? input : output,
        .target_step_y = backward ? s->stride_height : 1,
        .target_step_x = backward ? s->stride_width : 1,
        .phases_y = backward ? min_i64(s->stride_height, s->in_height) : 1,
        .phases_x = backward ? min_i64(s->stride_width, s->in_width) : 1,
        .kernel_height = s->kernel_height,
        .kernel_width = s->kernel_width,
        .weight = {.group = out_channels * weight.image,
                   .target_channel = backward ? weight.channel : weight.image,
                   .source_channel = backward ? weight.image : weight.channel,
                   .row = weight.row,
                   .column = weight.column},
        .tap_y = backward ? s->padding_top : -s->padding_top,
        .tap_x = backward ? s->padding_left : -s->padding_left,
        .tap_step_y = backward ? -s->dilation_height : s->dilation_height,
        .tap_step_x = backward ? -s->dilation_width : s->dilation_width,
    };
    p.depth = p.source_channels * p.kernel_height * p.kernel_width;

    int64_t extent_y, extent_x;
    tap_extent(&p, &p.first_y, &extent_y, &p.first_x, &extent_x);
    p.remainders_y = min_i64(p.step_y, extent_y);
    p.remainders_x = min_i64(p.step_x, extent_x);
    const int64_t rows = max_i64(1, ceil_div_i64(p.target_height, p.target_step_y));
    p.pitch = max_i64(1, ceil_div_i64(p.target_width, p.target_step_x)) + (extent_x - 1) / p.step_x;

    const int64_t halo = (extent_y - 1) / p.step_y;
    const int64_t channels = max_i64(p.source_channels * p.remainders_y * p.remainders_x,
                                     pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? 2 * MAX_LANES : TILE_ROWS);
    const int64_t most_rows = BLOCK_BYTES / (int64_t)size_of(dtype) / p.pitch / channels;
    const int64_t wanted_blocks = ceil_div_i64(FEWEST_UNITS, max_i64(1, p.images));
    /* Each block stages its own halo, so that blocks of few rows do not pay. */
    const int64_t fewest_rows = min_i64(rows, 4 * (halo + 1));
    p.block_rows = max_i64(fewest_rows, min_i64(most_rows, ceil_div_i64(rows, wanted_blocks)));
    p.blocks = ceil_div_i64(rows, p.block_rows);
    p.block_rows = ceil_div_i64(rows, p.blocks);
    p.plane = (p.block_rows + halo) * p.pitch;
    return p;
}

/* offsets[k] of every tap, in the order of the packed weights: by phase, kernel row, kernel column, channel. */
static void fill_offsets(const struct product *p, int64_t *offsets)
{
    const int64_t planes = p->remainders_y * p->remainders_x;
    for (int64_t y = 0; y < p->phases_y; y++)
        for (int64_t x = 0; x < p->phases_x; x++)
            for (int64_t r = 0, dy, dx; r < p->kernel_height; r++) {
                if (!tap_row(p, y, r, &dy))
                    continue;
                for (int64_t s = 0; s < p->kernel_width; s++) {
                    if (!tap_column(p, x, s, &dx))
                        continue;
                    const int64_t row = dy - p->first_y, column = dx - p->first_x;
                    const int64_t plane = row % p->step_y * p->remainders_x + column % p->step_x;
                    const int64_t offset = plane * p->plane + row / p->step_y * p->pitch + column / p->step_x;
                    for (int64_t c = 0; c < p->source_channels; c++)
                        *offsets++ = c * planes * p->plane + offset;
                }
            }
}

/* Elements of one split's sums in backward_weight. */
static int64_t partial_size(const struct product *p, cuda_ops_dtype dtype)
{
    const int64_t lanes = vector_bytes() / (int64_t)size_of(dtype);
    return round_up_i64(p->groups * p->depth * round_up_i64(p->target_channels, lanes), MAX_LANES);
}

static int64_t split_count(const struct product *p, cuda_ops_dtype dtype)
{
    const int64_t bytes = max_i64(1, partial_size(p, dtype) * (int64_t)size_of(dtype));
    return max_i64(1, min_i64(min_i64(p->images * p->blocks, MOST_SPLITS), max_i64(4, SPLITS_BYTES / bytes)));
}

cuda_ops_status cuda_ops_conv2d_plan_cpu(cuda_ops_conv2d_plan *plan, cuda_ops_conv2d_pass pass,
                                         const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_sizes(sizes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const struct product p = make_product(sizes, pass, dtype);
    if (is_tiled(sizes, dtype)) {
        if (!cuda_ops_conv2d_tiled_takes(&p, pass, dtype))
            return CUDA_OPS_UNSUPPORTED_DTYPE;
        cuda_ops_conv2d_tiled_plan(plan, &p, pass, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (is_left_out(&p, dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (cuda_ops_conv2d_depthwise_takes(&p, dtype)) {
        cuda_ops_conv2d_depthwise_plan(plan, &p, pass, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (takes_gathered(sizes, pass)) {
        cuda_ops_conv2d_gathered_plan(plan, &p, pass, channels_last(sizes), dtype);
        return CUDA_OPS_SUCCESS;
    }
    const size_t element = size_of(dtype);
    if (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        const int64_t splits = split_count(&p, dtype);
        plan->prepare_count = 0;
        plan->count = splits;
        plan->reduce_count = sizes->out_channels;
        plan->prepared_bytes = (size_t)(splits * partial_size(&p, dtype)) * element;
        plan->workspace_bytes =
            offsets_bytes(&p) + (size_t)(staged_size(&p) + p.block_rows * p.target_width * 2 * MAX_LANES) * element;
    } else {
        plan->prepare_count = p.groups * p.target_channels;
        plan->count = p.images * p.blocks;
        plan->reduce_count = 0;
        plan->prepared_bytes = offsets_bytes(&p) + (size_t)(p.groups * p.target_channels * p.depth) * element;
        plan->workspace_bytes = (size_t)(staged_size(&p) + TILE_ROWS * panel_pitch(&p)) * element;
    }
    return CUDA_OPS_SUCCESS;
}

#define REAL float
#define FN(name) name##_f32
#define FN_FOR(set, name) name##_f32_##set
#include "conv2d/conv2d.c"

#include "common/undef_real.h"
#undef FN_FOR
#define REAL double
#define FN(name) name##_f64
#define FN_FOR(set, name) name##_f64_##set
#include "conv2d/conv2d.c"

#include "common/undef_real.h"
#undef FN_FOR

int cuda_ops_conv2d_needs_finite_cpu(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                     cuda_ops_dtype dtype)
{
    if (!is_tiled(sizes, dtype) || check_sizes(sizes, dtype) != CUDA_OPS_SUCCESS)
        return 0;
    const struct product p = make_product(sizes, pass, dtype);
    return cuda_ops_conv2d_tiled_needs_finite(&p, pass, dtype);
}

cuda_ops_status cuda_ops_conv2d_prepare_cpu(void *prepared, const void *weight, cuda_ops_conv2d_pass pass,
                                            const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                            cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_sizes(sizes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const struct product p = make_product(sizes, pass, dtype);
    if (is_tiled(sizes, dtype)) {
        cuda_ops_conv2d_tiled_prepare(prepared, weight, &p, pass, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (is_left_out(&p, dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (cuda_ops_conv2d_depthwise_takes(&p, dtype)) {
        cuda_ops_conv2d_depthwise_prepare(prepared, weight, &p, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (takes_gathered(sizes, pass)) {
        cuda_ops_conv2d_gathered_prepare(prepared, weight, &p, pass, channels_last(sizes), begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (begin == 0)
        fill_offsets(&p, prepared);
    void *const packed = (char *)prepared + offsets_bytes(&p);
    if (dtype == CUDA_OPS_FLOAT32)
        pack_weight_f32(&p, packed, weight, begin, end);
    else
        pack_weight_f64(&p, packed, weight, begin, end);
    return CUDA_OPS_SUCCESS;
}

static cuda_ops_status run_product(void *target, const void *source, const void *weight, const void *prepared,
                                   const void *bias, cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                   int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_sizes(sizes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const struct product p = make_product(sizes, pass, dtype);
    if (is_tiled(sizes, dtype)) {
        cuda_ops_conv2d_tiled_run(target, source, prepared, bias, &p, pass, begin, end, workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (is_left_out(&p, dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (cuda_ops_conv2d_depthwise_takes(&p, dtype)) {
        cuda_ops_conv2d_depthwise_run(target, source, prepared, bias, &p, begin, end, workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (takes_gathered(sizes, pass)) {
        cuda_ops_conv2d_gathered_run(target, source, weight, prepared, bias, &p, pass, channels_last(sizes), begin, end,
                                     workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    const void *const packed = (const char *)prepared + offsets_bytes(&p);
    if (dtype == CUDA_OPS_FLOAT32)
        run_f32(&p, target, source, prepared, packed, bias, begin, end, workspace);
    else
        run_f64(&p, target, source, prepared, packed, bias, begin, end, workspace);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv2d_forward_cpu(void *output, const void *input, const void *weight, const void *prepared,
                                            const void *bias, const cuda_ops_conv2d_sizes *sizes, int64_t begin,
                                            int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    return run_product(output, input, weight, prepared, bias, CUDA_OPS_CONV2D_FORWARD, sizes, begin, end, workspace,
                       dtype);
}

cuda_ops_status cuda_ops_conv2d_backward_input_cpu(void *grad_input, const void *grad_output, const void *weight,
                                                   const void *prepared, const cuda_ops_conv2d_sizes *sizes,
                                                   int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    return run_product(grad_input, grad_output, weight, prepared, NULL, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, begin,
                       end, workspace, dtype);
}

cuda_ops_status cuda_ops_conv_transpose2d_forward_cpu(void *output, const void *input, const void *weight,
                                                      const void *prepared, const void *bias,
                                                      const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                                      void *workspace, cuda_ops_dtype dtype)
{
    return run_product(output, input, weight, prepared, bias, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, begin, end,
                       workspace, dtype);
}

cuda_ops_status cuda_ops_conv2d_backward_weight_cpu(void *grad_weight, void *prepared, const void *grad_output,
                                                    const void *input, const cuda_ops_conv2d_sizes *sizes,
                                                    int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_sizes(sizes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const struct product p = make_product(sizes, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, dtype);
    if (is_tiled(sizes, dtype)) {
        cuda_ops_conv2d_tiled_weight(prepared, grad_output, input, &p, begin, end, workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (is_left_out(&p, dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (cuda_ops_conv2d_depthwise_takes(&p, dtype)) {
        cuda_ops_conv2d_depthwise_weight(prepared, grad_output, input, &p, begin, end, workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    if (takes_gathered(sizes, CUDA_OPS_CONV2D_BACKWARD_WEIGHT)) {
        cuda_ops_conv2d_gathered_weight(grad_weight, prepared, grad_output, input, &p, channels_last(sizes), begin, end,
                                        workspace, dtype);
        return CUDA_OPS_SUCCESS;
    }
    fill_offsets(&p, workspace);
    void *const rest = (char *)workspace + offsets_bytes(&p);
    if (dtype == CUDA_OPS_FLOAT32)
        run_weight_f32(&p, prepared, partial_size(&p, dtype), split_count(&p, dtype), workspace, grad_output, input,
                       begin, end, rest);
    else
        run_weight_f64(&p, prepared, partial_size(&p, dtype), split_count(&p, dtype), workspace, grad_output, input,
                       begin, end, rest);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv2d_reduce_weight_cpu(void *grad_weight, const void *prepared,
                                                  const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_sizes(sizes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const struct product p = make_product(sizes, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, dtype);
    if (is_tiled(sizes, dtype))
        cuda_ops_conv2d_tiled_reduce(grad_weight, prepared, &p, begin, end, dtype);
    else if (is_left_out(&p, dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    else if (cuda_ops_conv2d_depthwise_takes(&p, dtype))
        cuda_ops_conv2d_depthwise_reduce(grad_weight, prepared, &p, begin, end, dtype);
    else if (takes_gathered(sizes, CUDA_OPS_CONV2D_BACKWARD_WEIGHT))
        cuda_ops_conv2d_gathered_reduce(grad_weight, prepared, &p, channels_last(sizes), begin, end, dtype);
    else if (dtype == CUDA_OPS_FLOAT32)
        reduce_weight_f32(&p, grad_weight, prepared, begin, end);
    else
        reduce_weight_f64(&p, grad_weight, prepared, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv2d_backward_bias_cpu(void *grad_bias, const void *grad_output, int64_t batch,
                                                  int64_t channels, int64_t pixels, int channels_last, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        backward_bias_f32(grad_bias, grad_output, batch, channels, pixels, channels_last, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        backward_bias_f64(grad_bias, grad_output, batch, channels, pixels, channels_last, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* Target channels [begin, end) of all groups: each goes to its row of its tile, for all phases. */
static void FN(pack_weight)(const struct product *p, REAL *packed, const REAL *weight, int64_t begin, int64_t end)
{
    for (int64_t channel = begin; channel < end; channel++) {
        const int64_t group = channel / p->target_channels, m = channel % p->target_channels;
        int64_t tile = 0;
        int rows = tile_rows(p->target_channels);
        while (tile + rows <= m) {
            tile += rows;
            rows = tile_rows(p->target_channels - tile);
        }
        const REAL *const from = weight + group * p->weight.group + m * p->weight.target_channel;
        int64_t first_tap = 0;
        for (int64_t y = 0; y < p->phases_y; y++)
            for (int64_t x = 0; x < p->phases_x; x++) {
                const int64_t depth = phase_depth(p, y, x);
                REAL *to =
                    packed + p->target_channels * (p->groups * first_tap + group * depth) + tile * depth + m - tile;
                for (int64_t r = 0, dy, dx; r < p->kernel_height; r++) {
                    if (!tap_row(p, y, r, &dy))
                        continue;
                    for (int64_t s = 0; s < p->kernel_width; s++) {
                        if (!tap_column(p, x, s, &dx))
                            continue;
                        for (int64_t c = 0; c < p->source_channels; c++, to += rows)
                            *to = from[c * p->weight.source_channel + r * p->weight.row + s * p->weight.column];
                    }
                }
                first_tap += depth;
            }
    }
}

static void FN(run)(const struct product *p, REAL *target, const REAL *source, const int64_t *offsets,
                    const REAL *weight, const REAL *bias, int64_t begin, int64_t end, REAL *workspace)
{
    switch (vector_bytes()) {
#if CUDA_OPS_WITH_TARGETS
    case 64:
        FN_FOR(avx512, run)(p, target, source, offsets, weight, bias, begin, end, workspace);
        break;
    case 32:
        FN_FOR(avx2, run)(p, target, source, offsets, weight, bias, begin, end, workspace);
        break;
#endif
    default:
        FN_FOR(any, run)(p, target, source, offsets, weight, bias, begin, end, workspace);
    }
}

static void FN(run_weight)(const struct product *p, REAL *partial, int64_t size, int64_t splits, const int64_t *offsets,
                           const REAL *grad_output, const REAL *input, int64_t begin, int64_t end, REAL *workspace)
{
    switch (vector_bytes()) {
#if CUDA_OPS_WITH_TARGETS
    case 64:
        FN_FOR(avx512, run_weight)(p, partial, size, splits, offsets, grad_output, input, begin, end, workspace);
        break;
    case 32:
        FN_FOR(avx2, run_weight)(p, partial, size, splits, offsets, grad_output, input, begin, end, workspace);
        break;
#endif
    default:
        FN_FOR(any, run_weight)(p, partial, size, splits, offsets, grad_output, input, begin, end, workspace);
    }
}

/* Output channels [begin, end): adds the splits' sums in order. */
static void FN(reduce_weight)(const struct product *p, REAL *grad_weight, const REAL *partial, int64_t begin,
                              int64_t end)
{
    const cuda_ops_dtype dtype = sizeof(REAL) == sizeof(double) ? CUDA_OPS_FLOAT64 : CUDA_OPS_FLOAT32;
    const int64_t lanes = vector_bytes() / (int64_t)sizeof(REAL),
                  block = (lanes == 64 / (int64_t)sizeof(REAL) ? 2 : 1) * lanes;
    const int64_t size = partial_size(p, dtype), splits = split_count(p, dtype);
    for (int64_t channel = begin; channel < end; channel++) {
        const int64_t group = channel / p->target_channels, m = channel % p->target_channels;
        const int64_t first = m / block * block;
        const int64_t width = round_up_i64(min_i64(block, p->target_channels - first), lanes);
        const REAL *from = partial + p->depth * (group * round_up_i64(p->target_channels, lanes) + first) + m - first;
        REAL *const to = grad_weight + group * p->weight.group + m * p->weight.target_channel;
        for (int64_t r = 0; r < p->kernel_height; r++)
            for (int64_t s = 0; s < p->kernel_width; s++)
                for (int64_t c = 0; c < p->source_channels; c++, from += width) {
                    REAL sum = 0;
                    for (int64_t split = 0; split < splits; split++)
                        sum += from[split * size];
                    to[c * p->weight.source_channel + r * p->weight.row + s * p->weight.column] = sum;
                }
    }
}

enum { FN(SUM_LANES) = 32, FN(SUM_RUN) = 4096 };

/* The sum of `count` contiguous elements, in independent lanes: faster, and with less rounding. */
CUDA_OPS_SIMD static REAL FN(sum_run)(const REAL *values, int64_t count)
{
    REAL lanes[FN(SUM_LANES)] = {0};
    int64_t i = 0;
    for (; i + FN(SUM_LANES) <= count; i += FN(SUM_LANES))
        for (int l = 0; l < FN(SUM_LANES); l++)
            lanes[l] += values[i + l];
    for (int l = 0; i < count; i++, l++)
        lanes[l] += values[i];
    for (int half = FN(SUM_LANES) / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}

/* sums[l] += the sum over `rows` rows of values[row * pitch + l]. */
CUDA_OPS_SIMD static void FN(sum_rows)(REAL *restrict sums, const REAL *restrict values, int64_t rows, int64_t pitch,
                                       int64_t count)
{
    REAL lanes[FN(SUM_LANES)] = {0};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t l = 0; l < count; l++)
            lanes[l] += values[row * pitch + l];
    for (int64_t l = 0; l < count; l++)
        sums[l] += lanes[l];
}

static void FN(backward_bias)(REAL *grad_bias, const REAL *grad_output, int64_t batch, int64_t channels, int64_t pixels,
                              bool channels_last, int64_t begin, int64_t end)
{
    for (int64_t channel = begin; channel < end; channel++)
        grad_bias[channel] = 0;
    if (channels_last) {
        /* Lanes are channels; each run of rows is summed apart, which keeps the rounding small. */
        for (int64_t channel = begin; channel < end; channel += FN(SUM_LANES))
            for (int64_t row = 0; row < batch * pixels; row += FN(SUM_RUN))
                FN(sum_rows)(grad_bias + channel, grad_output + row * channels + channel,
                             min_i64(FN(SUM_RUN), batch * pixels - row), channels,
                             min_i64(FN(SUM_LANES), end - channel));
        return;
    }
    for (int64_t image = 0; image < batch; image++)
        for (int64_t channel = begin; channel < end; channel++)
            for (int64_t i = 0; i < pixels; i += FN(SUM_RUN))
                grad_bias[channel] += FN(sum_run)(grad_output + (image * channels + channel) * pixels + i,
                                                  min_i64(FN(SUM_RUN), pixels - i));
}

#endif
