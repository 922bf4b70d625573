/* conv2d: output[n][o][y][x] = bias[o] + sum over c, r, s of
 *             weight[o][c][r][s] * input[n][g * C + c][y * stride - padding_top + r * dilation][... alike in x]
 *
 * with zeros outside of the input, C = in_channels / groups and g the group of o. Its three gradients are here too:
 * each is again a sum of products over one index of the same triple (input, weight, output).
 *
 *   input, grad_input:     batch x in_channels x in_height x in_width
 *   weight, grad_weight:   out_channels x in_channels / groups x kernel_height x kernel_width
 *   output, grad_output:   batch x out_channels x out_height x out_width
 *   bias, grad_bias:       out_channels; bias may be NULL
 *
 * Each of the three tensors is dense in one of two orders, as its flag in the sizes says: the order written above, or
 * channels last (dimensions 0, 2, 3, 1 from the largest stride to the smallest). Any mix of the flags is allowed.
 * padding_bottom and padding_right are not given: they follow from out_height and out_width.
 * in_channels = 0 gives bias alone. Heights, widths, strides, paddings and dilated kernels are below 2^30.
 *
 * Products and sums are taken in float32 (for the halves too) or in float64, in an order that depends on nothing but
 * the sizes: results repeat bit by bit, on the CPU for any number of threads.
 */
#ifndef CUDA_OPS_CONV2D_H
#define CUDA_OPS_CONV2D_H

#include <stddef.h>

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What forward may do to its sums, bias included, before it rounds and stores them. */
typedef enum cuda_ops_conv2d_activation {
    CUDA_OPS_CONV2D_NONE = 0,
    CUDA_OPS_CONV2D_RELU = 1,
    CUDA_OPS_CONV2D_RELU6 = 2,
    CUDA_OPS_CONV2D_HARDSWISH = 3,
    CUDA_OPS_CONV2D_SILU = 4
} cuda_ops_conv2d_activation;

typedef struct cuda_ops_conv2d_sizes {
    int64_t batch, groups;
    int64_t in_channels, in_height, in_width;
    int64_t out_channels, out_height, out_width;
    int64_t kernel_height, kernel_width;
    int64_t stride_height, stride_width;
    int64_t padding_top, padding_left;
    int64_t dilation_height, dilation_width;
    /* On CUDA: the largest tile of output that float32 with 3x3 kernels and stride 1 may be computed in by Winograd's
     * algorithm, 2 or 4. 0: the sums are taken as they stand. The rounding error of F(2x2, 3x3) is about as large as
     * the sums', that of F(4x4, 3x3) about twice as large (at most four times, of the result's norm); and a NaN or an
     * infinity makes NaN of the whole tile. */
    int winograd;
    /* Of forward on CUDA, a cuda_ops_conv2d_activation: only where cuda_ops_conv2d_applies_cuda says that it can. */
    int activation;
    int input_channels_last, weight_channels_last, output_channels_last;
    int allow_tf32; /* on CUDA: float32 tensors may be rounded to TF32; otherwise they are multiplied as they are */
} cuda_ops_conv2d_sizes;

/* Whether the sizes are within the limits; every other function asks it first. */
cuda_ops_status cuda_ops_conv2d_check_sizes(const cuda_ops_conv2d_sizes *sizes);

/* On the CPU each of the three products takes up to three steps, and `plan` tells what they need:
 *
 *   1. prepare (forward, backward_input): packs the weight into `prepared`. Ranges of [0, prepare_count).
 *   2. run: ranges of [0, count), any of them at the same time, each with a workspace of its own.
 *   3. reduce (backward_weight): sums the partial results that `run` left in `prepared`. Ranges of [0, reduce_count),
 *      which may be empty: then `run` has written grad_weight.
 *
 * A step follows when all of the one before is done. Both buffers are aligned to 64 bytes and need not be initialised. */
typedef enum cuda_ops_conv2d_pass {
    CUDA_OPS_CONV2D_FORWARD = 0,
    CUDA_OPS_CONV2D_BACKWARD_INPUT = 1,
    CUDA_OPS_CONV2D_BACKWARD_WEIGHT = 2
} cuda_ops_conv2d_pass;

typedef struct cuda_ops_conv2d_plan {
    int64_t prepare_count, count, reduce_count;
    size_t prepared_bytes;  /* shared by all ranges */
    size_t workspace_bytes; /* for each range that runs at the same time; a multiple of 64 */
} cuda_ops_conv2d_plan;

/* Halves: where the processor has AMX, bfloat16 also with AVX512-BF16, if the sizes suit its tiles; else CUDA_OPS_UNSUPPORTED_DTYPE. */
cuda_ops_status cuda_ops_conv2d_plan_cpu(cuda_ops_conv2d_plan *plan, cuda_ops_conv2d_pass pass,
                                         const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype);

/* Not 0: the product of these halves is made on the CPU for finite numbers alone. Others are
 * taken as float32 by the caller. */
int cuda_ops_conv2d_needs_finite_cpu(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                     cuda_ops_dtype dtype);

/* pass is FORWARD or BACKWARD_INPUT, as in the plan. */
cuda_ops_status cuda_ops_conv2d_prepare_cpu(void *prepared, const void *weight, cuda_ops_conv2d_pass pass,
                                            const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                            cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv2d_forward_cpu(void *output, const void *input, const void *weight, const void *prepared,
                                            const void *bias, const cuda_ops_conv2d_sizes *sizes, int64_t begin,
                                            int64_t end, void *workspace, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv2d_backward_input_cpu(void *grad_input, const void *grad_output, const void *weight,
                                                   const void *prepared, const cuda_ops_conv2d_sizes *sizes,
                                                   int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv2d_backward_weight_cpu(void *grad_weight, void *prepared, const void *grad_output,
                                                    const void *input, const cuda_ops_conv2d_sizes *sizes,
                                                    int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv2d_reduce_weight_cpu(void *grad_weight, const void *prepared,
                                                  const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype);
/* Channels [begin, end) of grad_bias[o] = sum of grad_output[:, o, :, :], which has `pixels` = height * width. */
cuda_ops_status cuda_ops_conv2d_backward_bias_cpu(void *grad_bias, const void *grad_output, int64_t batch,
                                                  int64_t channels, int64_t pixels, int channels_last, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype);

/* On CUDA each product has several kernels, here called paths. Zero stands for the fastest known for the product on the
 * current device; all others do what they can. */
typedef enum cuda_ops_conv2d_path {
    CUDA_OPS_CONV2D_FASTEST = 0,
    CUDA_OPS_CONV2D_SIMT = 1,         /* implicit GEMM on CUDA cores: everything */
    CUDA_OPS_CONV2D_SM90 = 2,         /* implicit GEMM on Hopper's tensor cores: halves and TF32, channels_last */
    CUDA_OPS_CONV2D_GEMM_1X1 = 3,     /* 1x1 kernels as a product of matrices: channels_last, one group */
    CUDA_OPS_CONV2D_SM90_HALO = 4,    /* as SM90, for few channels: a tile with its halo serves all taps; stride 1 */
    CUDA_OPS_CONV2D_FEW_CHANNELS = 5, /* one to four input channels, one group; all dtypes but float64 */
    CUDA_OPS_CONV2D_DEPTHWISE = 6,    /* a group for each input channel */
    CUDA_OPS_CONV2D_MMA =
        7, /* implicit GEMM on the tensor cores of capability 8.0 on: halves and TF32, channels_last */
    CUDA_OPS_CONV2D_WINOGRAD = 8, /* float32 with 3x3 kernels, stride 1, where the sizes allow it */
    CUDA_OPS_CONV2D_PADDED = 9,   /* SM90_HALO, GROUPED, SM90 or MMA of copies: channels are no vectors of 16 bytes */
    CUDA_OPS_CONV2D_IM2COL = 10,  /* as a product of matrices, one of them in columns: float32, and the gradient of the
                                   * input in 16 bits; channels_last, one group */
    CUDA_OPS_CONV2D_GROUPED = 11, /* groups of few channels, from 8.0 on: all dtypes but float64, channels_last */
    CUDA_OPS_CONV2D_PATCHES = 12  /* as a product of matrices, one of which has the input's patches: halves; and the
                                   * gradient of few input channels under a stride by rectangles of pixels; one group */
} cuda_ops_conv2d_path;

/* A path's name, such as "sm90_halo", which CUDA_OPS_CONV2D_PATH takes; NULL for a number without one. */
const char *cuda_ops_conv2d_path_name_cuda(int path);

/* The path that a call with `path` would take on the current device: `path` itself if that can make the product, for
 * CUDA_OPS_CONV2D_FASTEST the choice, and -1 if the path cannot. Tensors are taken to be aligned to 16 bytes. */
int cuda_ops_conv2d_path_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype,
                              int path);

/* Whether the product of tensors that are not all channels_last is made faster by copying them to that order and back,
 * for the fastest path's sake; the copies are the caller's. Only for CUDA_OPS_CONV2D_FASTEST. */
int cuda_ops_conv2d_wants_channels_last_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                             cuda_ops_dtype dtype, int path, const cuda_ops_device_facts *device);

/* The table for a call with `path` whose tensors are aligned (paths.h): fills in at most `room` reports, and returns
 * how many rows there are, or -1 for sizes beyond the limits. device: NULL for the current one. */
int cuda_ops_conv2d_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_conv2d_pass pass,
                               const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path,
                               const cuda_ops_device_facts *device);

/* Whether forward by the path that the call would take without its sizes' activation applies that too, in its epilogue.
 * If not, a forward with it is CUDA_OPS_INVALID_ARGUMENT, or takes another path. */
int cuda_ops_conv2d_applies_cuda(const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path);

/* Bytes of `workspace` for that call, aligned to 256; 0: may be NULL. */
size_t cuda_ops_conv2d_workspace_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                      cuda_ops_dtype dtype, int path);

/* CUDA_OPS_INVALID_ARGUMENT where the path cannot. */
cuda_ops_status cuda_ops_conv2d_forward_cuda(void *output, const void *input, const void *weight, const void *bias,
                                             const cuda_ops_conv2d_sizes *sizes, void *workspace, int path,
                                             cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_conv2d_backward_input_cuda(void *grad_input, const void *grad_output, const void *weight,
                                                    const cuda_ops_conv2d_sizes *sizes, void *workspace, int path,
                                                    cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_conv2d_backward_weight_cuda(void *grad_weight, const void *grad_output, const void *input,
                                                     const cuda_ops_conv2d_sizes *sizes, void *workspace, int path,
                                                     cuda_ops_dtype dtype, cuda_ops_stream stream);
size_t cuda_ops_conv2d_backward_bias_workspace_cuda(int64_t batch, int64_t channels, int64_t pixels, int channels_last,
                                                    cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv2d_backward_bias_cuda(void *grad_bias, const void *grad_output, int64_t batch,
                                                   int64_t channels, int64_t pixels, int channels_last, void *workspace,
                                                   cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
