// The simt path: plans, and by dtype, a file each.
#ifndef CUDA_OPS_GEMM_SIMT_PARTS_H
#define CUDA_OPS_GEMM_SIMT_PARTS_H

#include "gemm/paths.h"

// A plan of the caller's. Tile 0 leaves all to the path; in float32 the others name its tiles (simt.cu), with their
// splits of k.
bool gemm_simt_takes(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
int64_t gemm_simt_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_simt_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

int64_t gemm_simt_float64_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_simt_float64(const GemmCall &call, GemmDevice device);
int64_t gemm_simt_halves_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_simt_halves(const GemmCall &call, GemmDevice device);
// float32 on Hopper: tiles of 128 x 256, k whole. MN-major operands are copied 16 bytes at a time.
bool gemm_simt_has_sm90(GemmDevice device);
cuda_ops_status gemm_simt_sm90(const GemmCall &call, GemmDevice device);

#endif
