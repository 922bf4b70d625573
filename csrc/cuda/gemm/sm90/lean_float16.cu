// gemm, sm90 path: float16, tiles without gelu (gemm/sm90/lean.cuh).
#include "gemm/sm90/lean.cuh"

cuda_ops_status gemm_sm90_lean_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_lean_halves<__half>(call, device, plan);
}
