// The path sm90_3xtf32 as gemm.cu sees it.
#ifndef CUDA_OPS_GEMM_SM90_3XTF32_H
#define CUDA_OPS_GEMM_SM90_3XTF32_H

#include "gemm/paths.h"

bool gemm_sm90_3xtf32_is_allowed(); // by the environment
Answer gemm_sm90_3xtf32_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_sm90_3xtf32_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_3xtf32(const GemmCall &call, GemmDevice device);

// Whether the kernel makes D^T, the bytes of the copies of the operand that is split, and of the other one's where TMA can
// read neither.
bool gemm_sm90_3xtf32_swaps(const cuda_ops_gemm_problem &problem);
int64_t gemm_sm90_3xtf32_split_bytes(const cuda_ops_gemm_problem &problem);
int64_t gemm_sm90_3xtf32_copied_bytes(const cuda_ops_gemm_problem &problem);

GemmPlan gemm_sm90_3xtf32_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
int64_t gemm_sm90_3xtf32_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan);
cuda_ops_status gemm_sm90_3xtf32_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
