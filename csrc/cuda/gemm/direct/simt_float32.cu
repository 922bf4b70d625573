// gemm, direct path on the CUDA cores: float32.
#include "gemm/direct/simt.cuh"

cuda_ops_status gemm_direct_float32(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return cores_launch_tile<float>(call, device, plan);
}
