/* layer_norm, rms_norm, and both after an addition (add_layer_norm, add_rms_norm). Of each row, with n = cols:
 *
 *     layer_norm   output = (input - mean) * rstd * weight + bias,   rstd = 1 / sqrt(variance + eps), variance biased
 *     rms_norm     output = input * rstd * weight + bias,            rstd = 1 / sqrt(mean of input^2 + eps)
 *     add_*        the same of sum = residual + dropout(input), which is an output too
 *
 *   input, residual, output, sum, grad_*: [rows, cols], dense, of the same dtype
 *   weight, bias: [cols] or NULL, which stands for 1 and 0
 *   mean: [rows], double whatever the dtype: one that is rounded to float shifts every normalised value of a row whose
 *       mean is far larger than its deviation. rms_norm has none (NULL).
 *   rstd: [rows], double for double, else float
 *   backward: input is what was normalised (the sum, for add_*), and grad_sum, which may be NULL, is added to
 *       grad_input. grad_weight and grad_bias may be NULL. With xhat = (input - mean) * rstd:
 *           grad_bias = sum over rows of grad_output,  grad_weight = sum over rows of grad_output * xhat
 *           h = grad_output * weight,  grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)) + grad_sum
 *       and without mean(h) for rms_norm.
 *   workspace: of cuda_ops_layer_norm_workspace_* bytes, aligned to 16; backward alone, and where grad_weight,
 *       grad_bias or grad_input_sums is not NULL
 *
 * The variance is of two passes over what is kept on chip, and of differences from the mean, whose own rounding is
 * taken out again: rows whose mean is 1e6 times their deviation lose nothing. Results repeat bitwise, on the CPU for any
 * number of threads.
 */
#ifndef CUDA_OPS_LAYER_NORM_H
#define CUDA_OPS_LAYER_NORM_H

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"
#include "cuda_ops/philox.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_norm { CUDA_OPS_LAYER_NORM = 0, CUDA_OPS_RMS_NORM = 1 } cuda_ops_norm;

/* Rows [begin, end), so that the caller spreads ranges over threads. weight and bias are of the dtype of input. */
cuda_ops_status cuda_ops_layer_norm_forward_cpu(void *output, double *mean, void *rstd, const void *input,
                                                const void *weight, const void *bias, int64_t cols, double eps,
                                                cuda_ops_norm norm, int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* The same after sum = residual + dropout(input) (cuda_ops/dropout.h; the values in `philox` count). */
cuda_ops_status cuda_ops_add_layer_norm_forward_cpu(void *output, void *sum, double *mean, void *rstd,
                                                    const void *input, const void *residual, const void *weight,
                                                    const void *bias, int64_t cols, double eps, cuda_ops_norm norm,
                                                    double p, cuda_ops_philox_state philox, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype);

/* Backward in steps: backward over [0, chunks), which may be spread over threads; then, where grad_weight or grad_bias
 * is wanted, their sums over columns [begin, end). Chunks of rows are cut by the sizes alone. */
int64_t cuda_ops_layer_norm_chunks_cpu(int64_t rows, int64_t cols);
/* The rows of a chunk; of the last one those that are left. */
int64_t cuda_ops_layer_norm_chunk_rows_cpu(int64_t rows);
int64_t cuda_ops_layer_norm_workspace_cpu(int64_t rows, int64_t cols);
/* grad_input and workspace may be NULL: not wanted, and nothing for grad_weight and grad_bias. */
cuda_ops_status cuda_ops_layer_norm_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                 const void *grad_sum, const void *input, const void *weight,
                                                 const double *mean, const void *rstd, int64_t rows, int64_t cols,
                                                 cuda_ops_norm norm, int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* Likewise of rows [begin, end): in their order, those of a chunk by one thread. */
cuda_ops_status cuda_ops_layer_norm_backward_rows_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                      const void *grad_sum, const void *input, const void *weight,
                                                      const double *mean, const void *rstd, int64_t rows, int64_t cols,
                                                      cuda_ops_norm norm, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_layer_norm_backward_sums_cpu(void *grad_weight, void *grad_bias, const void *workspace,
                                                      int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);

/* weight, bias and their gradients are of `parameter_dtype`: that of input, or float32 beside float16 and bfloat16. */
cuda_ops_status cuda_ops_layer_norm_forward_cuda(void *output, double *mean, void *rstd, const void *input,
                                                 const void *weight, const void *bias, int64_t rows, int64_t cols,
                                                 double eps, cuda_ops_norm norm, cuda_ops_dtype dtype,
                                                 cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
/* state: NULL where p is 0; else 2 elements, set to the seed and the offset that were used, for dropout's backward. */
cuda_ops_status cuda_ops_add_layer_norm_forward_cuda(void *output, void *sum, double *mean, void *rstd, int64_t *state,
                                                     const void *input, const void *residual, const void *weight,
                                                     const void *bias, int64_t rows, int64_t cols, double eps,
                                                     cuda_ops_norm norm, double p, cuda_ops_philox_state philox,
                                                     cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                     cuda_ops_stream stream);
int64_t cuda_ops_layer_norm_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype);
/* grad_input may be NULL, and so may grad_input_sums: [cols], of parameter_dtype, the sums over rows of grad_input,
 * which are the gradient of a bias that was added to what was normalised. They need grad_input. */
cuda_ops_status cuda_ops_layer_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                  void *grad_input_sums, void *workspace, const void *grad_output,
                                                  const void *grad_sum, const void *input, const void *weight,
                                                  const double *mean, const void *rstd, int64_t rows, int64_t cols,
                                                  cuda_ops_norm norm, cuda_ops_dtype dtype,
                                                  cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);

/* With dropout's mask in memory, so that backward does not draw it again: of halves whose rows are whole vectors of eight
 * in one block's registers (takes_mask), at addresses that are multiples of 16; others are refused.
 *   mask: [rows * cols / 8], bit e of byte i for element 8 * i + e: whether dropout keeps it
 *   grad_dropped: grad_input times the mask over 1 - p, the gradient of what dropout took */
int cuda_ops_layer_norm_takes_mask_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_add_layer_norm_forward_mask_cuda(void *output, void *sum, double *mean, void *rstd,
                                                          int64_t *state, uint8_t *mask, const void *input,
                                                          const void *residual, const void *weight, const void *bias,
                                                          int64_t rows, int64_t cols, double eps, double p,
                                                          cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                                          cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_layer_norm_backward_mask_cuda(void *grad_input, void *grad_dropped, void *grad_weight,
                                                       void *grad_bias, void *workspace, const void *grad_output,
                                                       const void *grad_sum, const void *input, const void *weight,
                                                       const double *mean, const void *rstd, const uint8_t *mask,
                                                       double p, int64_t rows, int64_t cols, cuda_ops_dtype dtype,
                                                       cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);

/* layer_norm of float32 with an output in `half`, float16 or bfloat16, for what computes with halves right behind it:
 * where _rounds_ says so of the sizes, at addresses that are multiples of 16; others are refused. Parameters are
 * float32.
 *   residual: NULL, and input is float32; else input, of the dtype `half`, is added to it, and sum is written
 *   mean: NULL: rms_norm, forward and backward
 *   grad_output: of the dtype `half`
 *   grad_addend: grad_input rounded to `half`, the gradient of what was added; NULL: not wanted */
int cuda_ops_layer_norm_rounds_cuda(int64_t rows, int64_t cols);
cuda_ops_status cuda_ops_layer_norm_rounded_forward_cuda(void *output, float *sum, double *mean, float *rstd,
                                                         const void *input, const float *residual, const float *weight,
                                                         const float *bias, int64_t rows, int64_t cols, double eps,
                                                         cuda_ops_dtype half, cuda_ops_stream stream);
int64_t cuda_ops_layer_norm_rounded_workspace_cuda(int64_t rows, int64_t cols);
cuda_ops_status cuda_ops_layer_norm_rounded_backward_cuda(float *grad_input, void *grad_addend, float *grad_weight,
                                                          float *grad_bias, void *workspace, const void *grad_output,
                                                          const float *grad_sum, const float *input,
                                                          const float *weight, const double *mean, const float *rstd,
                                                          int64_t rows, int64_t cols, cuda_ops_dtype half,
                                                          cuda_ops_stream stream);

/* The table for a call whose tensors are aligned (paths.h): fills in at most `room` reports, and returns how many rows
 * there are. device: NULL for the current one. */
int cuda_ops_layer_norm_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t rows, int64_t cols,
                                   cuda_ops_dtype dtype, const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
