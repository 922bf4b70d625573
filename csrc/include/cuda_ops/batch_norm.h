/* batch_norm: output = (input - mean) / sqrt(variance + eps) * weight + bias, by channel;
 * batch_norm_act: output = f(that + residual), f an activation, in the same passes over memory.
 *
 *   input, output, grad_output, grad_input: dense [outer, channels, inner], of the same dtype. A contiguous tensor
 *       (N, C, ...) is outer = N, inner = the rest; a channels_last one is outer = N * the rest, inner = 1.
 *   mean, variance: [channels]. In training those of the batch, over outer and inner, the variance biased: outputs of
 *       the forward pass, in double whatever the dtype, since a mean that is rounded to float shifts every normalised
 *       value of a channel whose mean is far larger than its deviation. Else the running statistics.
 *   weight, bias: [channels] or NULL, which stands for 1 and 0
 *   workspace: of cuda_ops_batch_norm_workspace_* bytes, aligned to 8; of no value between calls of different passes
 *   outer, channels and inner are at least 1, or nothing is done
 *
 * A channel's reduction is split as the sizes alone say, and the splits are merged in a fixed order: results repeat
 * bitwise, on the CPU for any number of threads.
 */
#ifndef CUDA_OPS_BATCH_NORM_H
#define CUDA_OPS_BATCH_NORM_H

#include "cuda_ops/activation.h"
#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What batch_norm_act does with the normalised values. */
typedef struct cuda_ops_batch_norm_epilogue {
    const void *residual;         /* dense like input, or NULL */
    cuda_ops_activation function; /* SILU, HARDSWISH or HARDTANH */
    double first, second;         /* HARDTANH's min_val and max_val; one that is NaN bounds nothing: (0, NaN) is relu */
} cuda_ops_batch_norm_epilogue;

/* What training does to the running statistics, in place: running = (1 - momentum) * running + momentum * (mean, or
 * variance made unbiased), and one more batch. */
typedef struct cuda_ops_running_statistics {
    void *mean, *variance; /* of `dtype`; both or neither NULL */
    cuda_ops_dtype dtype;
    int64_t *batches; /* NULL, or one number */
    double momentum;
} cuda_ops_running_statistics;

/* The CPU backend takes each pass in steps. Those with [begin, end) may be spread over threads, and the others belong
 * between them:
 *     training: moments over blocks, prepare_training, normalize over rows
 *     else:     prepare_inference, normalize over rows
 *     backward: sums over blocks (where they are asked for), prepare_backward, grad_input over rows
 *     batch_norm_act: act_normalize in place of normalize; its backward is act_prepare_gate, act_gate over rows, and then
 *               backward with grad_sum for grad_output
 * Rows are the outer * channels runs of `inner` elements, or for inner = 1 the `outer` runs of `channels` elements.
 * weight, bias and their gradients have the dtype of input; running statistics too. moments and sums take halves, beside
 * which all others are called with float32. */
int64_t cuda_ops_batch_norm_blocks_cpu(int64_t outer, int64_t channels, int64_t inner);
int64_t cuda_ops_batch_norm_rows_cpu(int64_t outer, int64_t channels, int64_t inner);
int64_t cuda_ops_batch_norm_workspace_cpu(int64_t outer, int64_t channels, int64_t inner);

cuda_ops_status cuda_ops_batch_norm_moments_cpu(void *workspace, const void *input, int64_t outer, int64_t channels,
                                                int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_training_cpu(double *mean, double *variance, void *workspace,
                                                         const void *weight, const void *bias, int64_t outer,
                                                         int64_t channels, int64_t inner, double eps,
                                                         cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_inference_cpu(void *workspace, const void *weight, const void *bias,
                                                          const void *running_mean, const void *running_var,
                                                          int64_t outer, int64_t channels, int64_t inner, double eps,
                                                          cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_normalize_cpu(void *output, const void *workspace, const void *input, int64_t outer,
                                                  int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype);

/* mean and variance: double in training, else of the dtype of input.
 * grad_weight and grad_bias: both or neither NULL. The sums are needed in training, or when these are not NULL. */
cuda_ops_status cuda_ops_batch_norm_sums_cpu(void *workspace, const void *grad_output, const void *input,
                                             const void *mean, int64_t outer, int64_t channels, int64_t inner,
                                             int training, int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_backward_cpu(void *grad_weight, void *grad_bias, void *workspace,
                                                         const void *weight, const void *mean, const void *variance,
                                                         int64_t outer, int64_t channels, int64_t inner, double eps,
                                                         int training, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_grad_input_cpu(void *grad_input, const void *workspace, const void *grad_output,
                                                   const void *input, int64_t outer, int64_t channels, int64_t inner,
                                                   int training, int64_t begin, int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_batch_norm_act_normalize_cpu(void *output, const void *workspace, const void *input,
                                                      const cuda_ops_batch_norm_epilogue *epilogue, int64_t outer,
                                                      int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);
/* grad_sum = grad_output * f'(normalised * weight + bias + residual), which is the residual's gradient too; may be
 * grad_output. mean and variance as in sums. */
cuda_ops_status cuda_ops_batch_norm_act_prepare_gate_cpu(void *workspace, const void *weight, const void *bias,
                                                         const void *mean, const void *variance, int64_t outer,
                                                         int64_t channels, int64_t inner, double eps, int training,
                                                         cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_act_gate_cpu(void *grad_sum, const void *workspace, const void *grad_output,
                                                 const void *input, const cuda_ops_batch_norm_epilogue *epilogue,
                                                 int64_t outer, int64_t channels, int64_t inner, int64_t begin,
                                                 int64_t end, cuda_ops_dtype dtype);

/* running = (1 - momentum) * running + momentum * (mean, variance of `count` values made unbiased). In place; nothing
 * for count = 0. running_mean and running_var are of `statistics_dtype`. */
cuda_ops_status cuda_ops_batch_norm_update_cpu(void *running_mean, void *running_var, const double *mean,
                                               const double *variance, int64_t channels, int64_t count, double momentum,
                                               cuda_ops_dtype statistics_dtype);

typedef enum cuda_ops_batch_norm_pass {
    CUDA_OPS_BATCH_NORM_TRAINING = 0,  /* forward */
    CUDA_OPS_BATCH_NORM_INFERENCE = 1, /* forward with running statistics */
    CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD = 2,
    CUDA_OPS_BATCH_NORM_INFERENCE_BACKWARD = 3
} cuda_ops_batch_norm_pass;

/* On CUDA by one of the paths of csrc/cuda/batch_norm/batch_norm.cu: groups, resident, cluster, rows or split. The
 * table for a call that wants output or grad_input (paths.h), of batch_norm_act if `act`: fills in at most `room`
 * reports, and returns how many rows there are. device: NULL for the current one. */
int cuda_ops_batch_norm_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_batch_norm_pass pass, int act,
                                   int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype,
                                   const cuda_ops_device_facts *device);

/* weight, bias and their gradients are of `parameter_dtype`, running statistics of `statistics_dtype` (in the backward
 * pass of training: float64, which mean and variance are). channels < 2^31. */
int64_t cuda_ops_batch_norm_workspace_cuda(int64_t outer, int64_t channels, int64_t inner);

/* output may be NULL: mean and variance alone are wanted. running: NULL where there are none to be kept. */
cuda_ops_status cuda_ops_batch_norm_forward_training_cuda(void *output, double *mean, double *variance, void *workspace,
                                                          const cuda_ops_running_statistics *running, const void *input,
                                                          const void *weight, const void *bias, int64_t outer,
                                                          int64_t channels, int64_t inner, double eps,
                                                          cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                          cuda_ops_stream stream);
cuda_ops_status cuda_ops_batch_norm_forward_inference_cuda(void *output, void *workspace, const void *input,
                                                           const void *weight, const void *bias,
                                                           const void *running_mean, const void *running_var,
                                                           int64_t outer, int64_t channels, int64_t inner, double eps,
                                                           cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                           cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

/* grad_input may be NULL; grad_weight and grad_bias, both or neither, too. */
cuda_ops_status cuda_ops_batch_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias, void *workspace,
                                                  const void *grad_output, const void *input, const void *weight,
                                                  const void *mean, const void *variance, int64_t outer,
                                                  int64_t channels, int64_t inner, double eps, int training,
                                                  cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                  cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

/* The same of batch_norm_act. grad_sum, of the size of input: the gradient of normalised * weight + bias + residual, and
 * so the residual's; written where there is a residual, and else scratch. It may be grad_input, but for a residual whose
 * gradient is wanted. grad_added: NULL, or one more gradient of output, dense as grad_output, to which it is added; where
 * cuda_ops_batch_norm_act_adds_gradients_cuda says yes, there is a residual, and tensors are aligned to 16 bytes. */
cuda_ops_status cuda_ops_batch_norm_act_forward_training_cuda(
    void *output, double *mean, double *variance, void *workspace, const cuda_ops_running_statistics *running,
    const void *input, const void *weight, const void *bias, const cuda_ops_batch_norm_epilogue *epilogue,
    int64_t outer, int64_t channels, int64_t inner, double eps, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
    cuda_ops_stream stream);
cuda_ops_status cuda_ops_batch_norm_act_forward_inference_cuda(
    void *output, void *workspace, const void *input, const void *weight, const void *bias, const void *running_mean,
    const void *running_var, const cuda_ops_batch_norm_epilogue *epilogue, int64_t outer, int64_t channels,
    int64_t inner, double eps, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
    cuda_ops_stream stream);
cuda_ops_status cuda_ops_batch_norm_act_backward_cuda(void *grad_input, void *grad_sum, void *grad_weight,
                                                      void *grad_bias, void *workspace, const void *grad_output,
                                                      const void *grad_added, const void *input, const void *weight,
                                                      const void *bias, const void *mean, const void *variance,
                                                      const cuda_ops_batch_norm_epilogue *epilogue, int64_t outer,
                                                      int64_t channels, int64_t inner, double eps, int training,
                                                      cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                      cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);
int cuda_ops_batch_norm_act_adds_gradients_cuda(int64_t outer, int64_t channels, int64_t inner, int training,
                                                cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
