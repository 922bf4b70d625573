/* gated: output = f(gate) * value, for swiglu and geglu; grad_gate = grad_output * value * f'(gate), and grad_value =
 * grad_output * f(gate), in one pass.
 *
 *   output, grad_output: [rows, cols], dense
 *   gate, value, grad_gate, grad_value: [rows, cols], rows `stride` apart, at least cols: 2 * cols where gate and value
 *     are the halves of one array's rows, and so are their gradients
 *   all of the same dtype; grad_gate may be gate or grad_output, grad_value value or grad_output, of the same stride
 *   no workspace
 * The functions are those of cuda_ops/activation_functions.h, as accurate as activation.h tells.
 */
#ifndef CUDA_OPS_GATED_H
#define CUDA_OPS_GATED_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each function of the gate its name in activation_functions.h. */
#define CUDA_OPS_GATES(X)                                                                                              \
    X(SILU, silu)                                                                                                      \
    X(GELU, gelu)                                                                                                      \
    X(GELU_TANH, gelu_tanh)

typedef enum cuda_ops_gate { CUDA_OPS_GATE_SILU, CUDA_OPS_GATE_GELU, CUDA_OPS_GATE_GELU_TANH } cuda_ops_gate;

/* Elements [begin, end) of output, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_gated_forward_cpu(void *output, const void *gate, const void *value, int64_t cols,
                                           int64_t stride, int64_t begin, int64_t end, cuda_ops_gate function,
                                           cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_gated_backward_cpu(void *grad_gate, void *grad_value, const void *grad_output,
                                            const void *gate, const void *value, int64_t cols, int64_t stride,
                                            int64_t begin, int64_t end, cuda_ops_gate function, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_gated_forward_cuda(void *output, const void *gate, const void *value, int64_t rows,
                                            int64_t cols, int64_t stride, cuda_ops_gate function, cuda_ops_dtype dtype,
                                            cuda_ops_stream stream);
cuda_ops_status cuda_ops_gated_backward_cuda(void *grad_gate, void *grad_value, const void *grad_output,
                                             const void *gate, const void *value, int64_t rows, int64_t cols,
                                             int64_t stride, cuda_ops_gate function, cuda_ops_dtype dtype,
                                             cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
