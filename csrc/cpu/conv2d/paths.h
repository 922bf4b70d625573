/* The paths of conv2d that have files of their own, for conv2d.c, which chooses. All functions are as those of
 * cuda_ops/conv2d.h, for sizes that have been checked. The first is the path that multiplies matrices (gathered.c), for
 * three tensors of one format. */
#ifndef CUDA_OPS_CPU_CONV2D_PATHS_H
#define CUDA_OPS_CPU_CONV2D_PATHS_H

#include "conv2d/plan.h"

/* One stride phase of a product, as it is gathered. With pixel = (image * u_count + u) * v_count + v and a tap (i, j),
 * the source's row is u * step_y + first_y + i * tap_y, and its column alike. */
struct lattice {
    struct image_layout source;
    int64_t height, width, channels;
    int64_t step_y, step_x;
    int64_t u_count, v_count;
    int64_t tap_rows, tap_columns;
    int64_t first_y, tap_y, first_x, tap_x;
};

enum { MOST_PIXELS = 512 }; /* of a block */

void cuda_ops_conv2d_gathered_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                   bool channels_last, cuda_ops_dtype dtype);
void cuda_ops_conv2d_gathered_prepare(void *prepared, const void *weight, const struct product *p,
                                      cuda_ops_conv2d_pass pass, bool channels_last, int64_t begin, int64_t end,
                                      cuda_ops_dtype dtype);
/* forward and backward_input */
void cuda_ops_conv2d_gathered_run(void *target, const void *source, const void *weight, const void *prepared,
                                  const void *bias, const struct product *p, cuda_ops_conv2d_pass pass,
                                  bool channels_last, int64_t begin, int64_t end, void *workspace,
                                  cuda_ops_dtype dtype);
void cuda_ops_conv2d_gathered_weight(void *grad_weight, void *prepared, const void *grad_output, const void *input,
                                     const struct product *p, bool channels_last, int64_t begin, int64_t end,
                                     void *workspace, cuda_ops_dtype dtype);
void cuda_ops_conv2d_gathered_reduce(void *grad_weight, const void *prepared, const struct product *p,
                                     bool channels_last, int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* The path for depthwise convolutions (depthwise.c), of tensors in any formats, halves too: as the above. */
bool cuda_ops_conv2d_depthwise_takes(const struct product *p, cuda_ops_dtype dtype);
void cuda_ops_conv2d_depthwise_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                    cuda_ops_dtype dtype);
void cuda_ops_conv2d_depthwise_prepare(void *prepared, const void *weight, const struct product *p, int64_t begin,
                                       int64_t end, cuda_ops_dtype dtype);
void cuda_ops_conv2d_depthwise_run(void *target, const void *source, const void *prepared, const void *bias,
                                   const struct product *p, int64_t begin, int64_t end, void *workspace,
                                   cuda_ops_dtype dtype);
void cuda_ops_conv2d_depthwise_weight(void *prepared, const void *grad_output, const void *input,
                                      const struct product *p, int64_t begin, int64_t end, void *workspace,
                                      cuda_ops_dtype dtype);
void cuda_ops_conv2d_depthwise_reduce(void *grad_weight, const void *prepared, const struct product *p, int64_t begin,
                                      int64_t end, cuda_ops_dtype dtype);

/* The path for halves by AMX (tiled.c), of tensors in any formats: as the above. If it needs finite numbers, others would
 * make NaN of what they are not multiplied with; backward_weight always does. */
bool cuda_ops_conv2d_tiled_takes(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype);
bool cuda_ops_conv2d_tiled_needs_finite(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype);
void cuda_ops_conv2d_tiled_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                cuda_ops_dtype dtype);
void cuda_ops_conv2d_tiled_prepare(uint16_t *prepared, const uint16_t *weight, const struct product *p,
                                   cuda_ops_conv2d_pass pass, int64_t begin, int64_t end, cuda_ops_dtype dtype);
void cuda_ops_conv2d_tiled_run(uint16_t *target, const uint16_t *source, const uint16_t *prepared, const uint16_t *bias,
                               const struct product *p, cuda_ops_conv2d_pass pass, int64_t begin, int64_t end,
                               void *workspace, cuda_ops_dtype dtype);
void cuda_ops_conv2d_tiled_weight(float *partial, const uint16_t *grad_output, const uint16_t *input,
                                  const struct product *p, int64_t begin, int64_t end, void *workspace,
                                  cuda_ops_dtype dtype);
void cuda_ops_conv2d_tiled_reduce(uint16_t *grad_weight, const float *partial, const struct product *p, int64_t begin,
                                  int64_t end, cuda_ops_dtype dtype);

#endif
