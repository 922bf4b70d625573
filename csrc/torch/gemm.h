// The GEMM of the C API for the glue of ops: how a matrix is stored, and a product on the current device by the path
// that the table or CUDA_OPS_GEMM_PATH chooses.
#pragma once

#include "checks.h"
#include "cuda_ops/gemm.h"

namespace cuda_ops
{

// A matrix, or a batch of them ([batch, rows, columns]): itself if the C API can describe it (row by row, or as its
// transpose, with any distance between rows and between matrices), else a contiguous copy.
Tensor with_layout(const Tensor &matrix);

// D = A B for operands that have a layout, both of two or both of three dimensions; D is contiguous. TF32 as
// torch.backends.cuda.matmul.allow_tf32 has it.
cuda_ops_gemm_problem problem_of(const Tensor &a, const Tensor &b, cuda_ops_dtype dtype);

// D = op(A) op(B), all dense.
cuda_ops_gemm_problem dense_problem(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b,
                                    cuda_ops_dtype dtype);

#ifdef CUDA_OPS_WITH_CUDA
// The number of the path that the environment's CUDA_OPS_GEMM_PATH names, read at each call; CUDA_OPS_GEMM_FASTEST
// without it.
int forced_gemm_path(const char *op);

// Throws NotImplementedError where a product's status is that the forced path cannot do it. d: the product's result.
void check_forced_gemm(const char *op, int path, cuda_ops_status status, const Tensor &d,
                       const cuda_ops_gemm_problem &problem);

// The problem needs no unaligned_a and unaligned_b. Throws NotImplementedError where the forced path cannot do it.
cuda_ops_status gemm_cuda(const char *op, const Tensor &d, const void *a, const void *b, const void *bias,
                          const cuda_ops_gemm_problem &of_sizes);
#endif

} // namespace cuda_ops
