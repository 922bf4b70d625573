// The parts of rung 10, a file each.
#ifndef CUDA_OPS_GEMM_CP_ASYNC_CUH
#define CUDA_OPS_GEMM_CP_ASYNC_CUH

#include "gemm/rungs.h"

int64_t gemm_cp_async_float64_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_cp_async_float64(const GemmCall &call, GemmDevice device);
int64_t gemm_cp_async_halves_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_cp_async_halves(const GemmCall &call, GemmDevice device);

#endif
