// 16-bit tiles of the sm90 path without gelu (gemm/sm90/lean.cuh).
#ifndef CUDA_OPS_GEMM_SM90_LEAN_H
#define CUDA_OPS_GEMM_SM90_LEAN_H

#include "gemm/paths.h"

cuda_ops_status gemm_sm90_lean_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_lean_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
