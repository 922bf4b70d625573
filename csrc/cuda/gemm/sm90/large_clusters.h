// The 16-bit tiles of the sm90 path in clusters of eight (gemm/sm90/large_clusters.cuh).
#ifndef CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_H
#define CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_H

#include "gemm/paths.h"

cuda_ops_status gemm_sm90_large_clusters_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_large_clusters_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

#endif
