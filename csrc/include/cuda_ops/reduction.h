/* Reductions over any dimensions: sum, mean, prod, norm, var, std, amax, amin, argmax, argmin. Input is seen as
 * [batch, outer, cols, inner], of which batch and cols are reduced:
 *
 *     output[outer, inner] = finish(of all input[batch, outer, cols, inner])
 *
 *   input: dense; of `dtype`
 *   output: [outer, inner] of `output_dtype`, which is dtype, or float32 beside float16 and bfloat16; of int64 for
 *       argmax and argmin, which take batch = 1 and give the index in cols
 *   workspace: of cuda_ops_reduction_workspace_* bytes, aligned to 16
 *
 * NaN travels: amax and amin of a NaN are NaN, and it is the largest and the smallest for argmax and argmin. Of equal
 * elements these give the first. var and std divide by max(count - correction, 0). Without elements (batch or cols 0) the
 * sum is 0, the product 1, mean and variance NaN; amax and argmax have no value then, and are CUDA_OPS_INVALID_ARGUMENT,
 * unless output is empty too. How sums are cut depends on the sizes alone: results repeat bitwise, on the CPU for any
 * number of threads.
 */
#ifndef CUDA_OPS_REDUCTION_H
#define CUDA_OPS_REDUCTION_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_reduction_kind {
    CUDA_OPS_SUM = 0,
    CUDA_OPS_MEAN = 1,
    CUDA_OPS_PROD = 2,
    CUDA_OPS_NORM = 3, /* of any parameter: the p-th root of the sum of |x|^p; p = 0 counts what is not 0, infinite p
                          are the largest and the smallest |x| */
    CUDA_OPS_AMAX = 4,
    CUDA_OPS_AMIN = 5,
    CUDA_OPS_ARGMAX = 6,
    CUDA_OPS_ARGMIN = 7,
    CUDA_OPS_VAR = 8, /* parameter: the correction */
    CUDA_OPS_STD = 9
} cuda_ops_reduction_kind;

typedef struct cuda_ops_reduction_sizes {
    int64_t batch, outer, cols, inner;
} cuda_ops_reduction_sizes;

/* The CPU takes it in two steps, each of which may be spread over threads: accumulate over units [begin, end), of any
 * dtype, then finish over outputs, outer * inner, into float32 or float64 (float32 beside halves). */
int64_t cuda_ops_reduction_units_cpu(cuda_ops_reduction_sizes sizes);
int64_t cuda_ops_reduction_workspace_cpu(cuda_ops_reduction_sizes sizes);
cuda_ops_status cuda_ops_reduction_accumulate_cpu(void *workspace, const void *input, cuda_ops_reduction_sizes sizes,
                                                  cuda_ops_reduction_kind kind, double parameter, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_reduction_finish_cpu(void *output, const void *workspace, cuda_ops_reduction_sizes sizes,
                                              cuda_ops_reduction_kind kind, double parameter, int64_t begin,
                                              int64_t end, cuda_ops_dtype dtype);

/* Gradients on the CPU, of var, std, the norm of p = 2, and, where the rows of one batch are reduced, of amax, amin and prod.
 * First `factors`, 3 * outer * inner doubles, of outputs [begin, end); then elements [begin, end) of grad_input, in the order
 * of memory. Halves are given as float32.
 *   mean: of var and std, [outer, inner]
 *   input: of the first function, looked at for amax, amin and prod
 * prod: if one of the last outer * inner factors is not finite, an infinity or a NaN is among the elements of its row, and
 * the gradient is not right. */
int cuda_ops_reduction_has_backward_cpu(cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind, double parameter);
cuda_ops_status cuda_ops_reduction_backward_factors_cpu(double *factors, const void *grad_output, const void *output,
                                                        const void *mean, const void *input,
                                                        cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind,
                                                        double parameter, int64_t begin, int64_t end,
                                                        cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_reduction_backward_cpu(void *grad_input, const void *input, const double *factors,
                                                cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype);

int64_t cuda_ops_reduction_workspace_cuda(cuda_ops_reduction_sizes sizes, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_reduction_cuda(void *output, void *workspace, const void *input,
                                        cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind, double parameter,
                                        cuda_ops_dtype dtype, cuda_ops_dtype output_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
