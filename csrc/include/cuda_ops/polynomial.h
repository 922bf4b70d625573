/* polynomial: output[i] = p(input[i]) and grad_input[i] = grad_output[i] * p'(input[i]), for
 * p(x) = coefficients[0] + coefficients[1] x + ... + coefficients[coefficient_count - 1] x^(coefficient_count - 1),
 * by Horner's rule. Both functions take the coefficients of p.
 *
 *   input, output, grad_output, grad_input: `count` elements, dense, of the same dtype
 *   coefficients: in host memory, read before the function returns; 1 to CUDA_OPS_POLYNOMIAL_MAX of them
 *   output may be input, and grad_input may be grad_output or input (elementwise in place)
 *   no workspace
 */
#ifndef CUDA_OPS_POLYNOMIAL_H
#define CUDA_OPS_POLYNOMIAL_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* They travel to the GPU as an argument of the kernel. */
#define CUDA_OPS_POLYNOMIAL_MAX 64

/* Elements [begin, end) of the arrays, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_polynomial_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                                const double *coefficients, int64_t coefficient_count,
                                                cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_polynomial_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                 int64_t begin, int64_t end, const double *coefficients,
                                                 int64_t coefficient_count, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_polynomial_forward_cuda(void *output, const void *input, int64_t count,
                                                 const double *coefficients, int64_t coefficient_count,
                                                 cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_polynomial_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                                  int64_t count, const double *coefficients, int64_t coefficient_count,
                                                  cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
