// gemm, sm90 path: bfloat16, tiles in clusters of eight (gemm/sm90/large_clusters.cuh).
#include "gemm/sm90/large_clusters.cuh"

cuda_ops_status gemm_sm90_large_clusters_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_large_clusters<__nv_bfloat16>(call, device, plan);
}
