// gemm, direct path on the CUDA cores: float64.
#include "gemm/direct/simt.cuh"

cuda_ops_status gemm_direct_float64(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return cores_launch_tile<double>(call, device, plan);
}
