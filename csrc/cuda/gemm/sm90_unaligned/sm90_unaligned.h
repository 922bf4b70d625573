// sm90_unaligned's plans, and its launchers by dtype.
#ifndef CUDA_OPS_GEMM_SM90_UNALIGNED_SM90_UNALIGNED_H
#define CUDA_OPS_GEMM_SM90_UNALIGNED_SM90_UNALIGNED_H

#include "gemm/paths.h"

// The path's number, after those of gemm/paths.h.
static constexpr int GEMM_SM90_UNALIGNED = GEMM_NARROW + 1;
static constexpr int MOST_SM90_UNALIGNED_SPLITS = 264;

// The bytes that one copy takes of an operand, since its rows and its address are multiples of as many: 4, 8 or 16, or
// less, which cp.async does not copy.
struct CopyWidths {
    int a, b;
};
CopyWidths gemm_copy_widths(const GemmCall &call);

Answer gemm_sm90_unaligned_supports(const GemmCall &call, GemmDevice device);
// Whether there is anything for it that sm90 does not do better: rows of A, B or D of no whole 16 bytes.
bool gemm_sm90_unaligned_is_for(const cuda_ops_gemm_problem &problem);
GemmPlan gemm_sm90_unaligned_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
double gemm_sm90_unaligned_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device);
int64_t gemm_sm90_unaligned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_unaligned(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_sm90_unaligned_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_unaligned_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_unaligned_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
