/* excitation: what a squeeze-and-excitation block makes of an image's pooled channels, two small products:
 *
 *     hidden[n][s] = f(bias1[s] + sum over c of input[n][c] * weight1[s][c])
 *     output[n][o] =   bias2[o] + sum over s of hidden[n][s] * weight2[o][s]
 *
 *   input: [images, channels]; weight1: [squeezed, channels]; weight2: [outputs, squeezed]; output: [images, outputs]
 *   hidden: [images, squeezed], of the dtype of input, which is scratch
 *   bias1, bias2: may be NULL
 *   f: relu, silu or hardswish
 *
 * On CUDA weights and biases are of `parameter_dtype`: the dtype of input, or float32 beside float16 and bfloat16, which
 * are summed in float32. Results repeat bit by bit.
 */
#ifndef CUDA_OPS_EXCITATION_H
#define CUDA_OPS_EXCITATION_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_excitation_activation {
    CUDA_OPS_EXCITATION_RELU = 0,
    CUDA_OPS_EXCITATION_SILU = 1,
    CUDA_OPS_EXCITATION_HARDSWISH = 2
} cuda_ops_excitation_activation;

typedef struct cuda_ops_excitation {
    const void *input, *weight1, *bias1, *weight2, *bias2;
    int64_t images, channels, squeezed, outputs;
    cuda_ops_excitation_activation activation;
} cuda_ops_excitation;

/* Images [begin, end), so that the caller spreads ranges over threads; all of one dtype. */
cuda_ops_status cuda_ops_excitation_forward_cpu(void *output, void *hidden, const cuda_ops_excitation *call,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_excitation_forward_cuda(void *output, void *hidden, const cuda_ops_excitation *call,
                                                 cuda_ops_dtype parameter_dtype, cuda_ops_dtype dtype,
                                                 cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
