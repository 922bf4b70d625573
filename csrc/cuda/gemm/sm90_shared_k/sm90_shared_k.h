// sm90_shared_k's plans, and its launchers by dtype.
#ifndef CUDA_OPS_GEMM_SM90_SHARED_K_SM90_SHARED_K_H
#define CUDA_OPS_GEMM_SM90_SHARED_K_SM90_SHARED_K_H

#include "gemm/sm90_unaligned/sm90_unaligned.h"

// The path's number, after those of gemm/paths.h and sm90_unaligned's. A plan's tile is the blocks of a cluster, with
// NARROW_SHARED_TILE more where they make 64 columns, not 128; its splits are what k is divided into before.
static constexpr int GEMM_SM90_SHARED_K = GEMM_SM90_UNALIGNED + 1;
static constexpr int LEAST_SHARED_K = 2, MOST_SHARED_K = 8, MOST_SM90_SHARED_K_SPLITS = 64;
static constexpr int NARROW_SHARED_TILE = 16;
static inline bool is_narrow_shared_tile(int tile)
{
    return tile >= NARROW_SHARED_TILE;
}
static inline int shares_of(int tile)
{
    return tile % NARROW_SHARED_TILE;
}

Answer gemm_sm90_shared_k_supports(const GemmCall &call, GemmDevice device);
// The fastest by the path's model of times, and how long it takes.
GemmPlan gemm_sm90_shared_k_plan(const cuda_ops_gemm_problem &problem, GemmDevice device, double *microseconds);
int64_t gemm_sm90_shared_k_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_shared_k(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_sm90_shared_k_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_shared_k_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_shared_k_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
