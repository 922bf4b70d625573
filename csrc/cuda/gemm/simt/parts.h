// The parts of rung 10, a file each.
#ifndef CUDA_OPS_GEMM_SIMT_PARTS_H
#define CUDA_OPS_GEMM_SIMT_PARTS_H

#include "gemm/paths.h"

int64_t gemm_simt_float64_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_simt_float64(const GemmCall &call, GemmDevice device);
int64_t gemm_simt_halves_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_simt_halves(const GemmCall &call, GemmDevice device);
// Tiles of 128 x 256 with k whole, on Hopper, in float32. Of what is not stored along k, rows come 16 bytes at a time.
bool gemm_simt_has_sm90(GemmDevice device);
cuda_ops_status gemm_simt_sm90(const GemmCall &call, GemmDevice device);

#endif
