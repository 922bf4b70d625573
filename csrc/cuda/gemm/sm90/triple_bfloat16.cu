// gemm, sm90 path: bfloat16, tiles of 192 rows (gemm/sm90/triple.cuh).
#include "gemm/sm90/triple.cuh"

cuda_ops_status gemm_sm90_triple_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_triples_of<__nv_bfloat16>(call, device, plan);
}
