// gemm, sm90 path: bfloat16, tiles for batches of small matrices.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_small_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_small_halves<__nv_bfloat16>(call, device, plan);
}
