// sm90_unaligned's plans, and its launchers by dtype.
#ifndef CUDA_OPS_GEMM_SM90_UNALIGNED_SM90_UNALIGNED_H
#define CUDA_OPS_GEMM_SM90_UNALIGNED_SM90_UNALIGNED_H

#include "gemm/paths.h"

// The path's number, after those of gemm/paths.h.
static constexpr int GEMM_SM90_UNALIGNED = GEMM_SM90_3XTF32 + 1;
static constexpr int MOST_SM90_UNALIGNED_SPLITS = 264;

// The bytes that one copy takes of an operand, since its rows and its address are multiples of as many: 4, 8 or 16, or
// less, which cp.async does not copy.
struct CopyWidths {
    int a, b;
};
CopyWidths gemm_copy_widths(const GemmCall &call);

// The number of splits of k to look at next: of many, a few more make little difference; and the most.
static inline int64_t next_splits(int64_t splits, int64_t most)
{
    const int64_t next = splits + 1 + splits / 4;
    return splits < most && next > most ? most : next;
}

Answer gemm_sm90_unaligned_supports(const GemmCall &call, GemmDevice device);
// Whether there is anything for it that sm90 does not do better: rows of A, B or D of no whole 16 bytes.
bool gemm_sm90_unaligned_is_for(const cuda_ops_gemm_problem &problem);
// The fastest by the path's model of times, and how long it takes.
GemmPlan gemm_sm90_unaligned_plan(const cuda_ops_gemm_problem &problem, GemmDevice device, double *microseconds);
int64_t gemm_sm90_unaligned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_unaligned(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_sm90_unaligned_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_unaligned_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_unaligned_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
