// gemm, sm90 path: tiles in clusters of four and eight, in float16; the kernel is in gemm/sm90/kernel.cuh.
#include "gemm/sm90/large_clusters.cuh"

cuda_ops_status gemm_sm90_large_clusters_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_large_clusters_of<__half>(call, device, plan);
}
