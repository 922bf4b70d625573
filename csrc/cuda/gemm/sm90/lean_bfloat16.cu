// gemm, sm90 path: bfloat16, tiles without gelu (gemm/sm90/lean.cuh).
#include "gemm/sm90/lean.cuh"

cuda_ops_status gemm_sm90_lean_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_lean_halves<__nv_bfloat16>(call, device, plan);
}
