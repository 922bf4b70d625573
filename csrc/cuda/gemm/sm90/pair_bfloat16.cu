// gemm, sm90 path: tiles that a cluster of two blocks makes, in bfloat16; the kernel is in gemm/sm90/pair.cuh.
#include "gemm/sm90/pair.cuh"

cuda_ops_status gemm_sm90_pair_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_pairs_of<__nv_bfloat16>(call, device, plan);
}
