// 16-bit tiles of the sm90 path of 192 rows (gemm/sm90/triple.cuh).
#ifndef CUDA_OPS_GEMM_SM90_TRIPLE_H
#define CUDA_OPS_GEMM_SM90_TRIPLE_H

#include "gemm/paths.h"

cuda_ops_status gemm_sm90_triple_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_triple_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
