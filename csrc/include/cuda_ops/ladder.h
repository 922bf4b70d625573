/* ladder: the rungs of the teaching ladders, of ops that memory bounds and of attention: the same result from a naive
 * kernel to the fastest, a rung a file in csrc/cuda/<ladder>/ladder/. (The rungs of matrix multiplication are in gemm.h
 * and gemm_ladder.h.) Production calls none of them.
 *
 * What a ladder computes of which tensors stands in csrc/cuda/<ladder>/ladder/rungs.h. Tensors are dense and row-major;
 * a rung asks the tensors themselves for their sizes, so that a call cannot name sizes that they do not have.
 */
#ifndef CUDA_OPS_LADDER_H
#define CUDA_OPS_LADDER_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element types: those of cuda_ops_dtype, and these. */
enum { CUDA_OPS_LADDER_UINT8 = 16, CUDA_OPS_LADDER_INT32 = 17, CUDA_OPS_LADDER_INT64 = 18 };
enum { CUDA_OPS_LADDER_DIMS = 4 };

typedef struct cuda_ops_ladder_tensor {
    void *data; /* aligned to its elements; of inputs it is only read */
    int64_t sizes[CUDA_OPS_LADDER_DIMS];
    int64_t count; /* of elements, the product of the sizes */
    int dims;
    int dtype; /* as above */
} cuda_ops_ladder_tensor;

typedef struct cuda_ops_ladder_call {
    const cuda_ops_ladder_tensor *outputs, *inputs;
    const double *scalars;
    int output_count, input_count, scalar_count;
    void
        *workspace; /* cuda_ops_ladder_workspace_cuda bytes, aligned to 256, of any contents; zero bytes: may be NULL */
} cuda_ops_ladder_call;

/* Why a rung does not take a call on the current device, a static string; NULL: it does. */
const char *cuda_ops_ladder_refusal_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call);
int64_t cuda_ops_ladder_workspace_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call);
/* CUDA_OPS_INVALID_ARGUMENT where the rung does not take the call. */
cuda_ops_status cuda_ops_ladder_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call,
                                     cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
