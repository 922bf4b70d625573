// gemm, sm90 path: float16, tiles of 192 rows (gemm/sm90/triple.cuh).
#include "gemm/sm90/triple.cuh"

cuda_ops_status gemm_sm90_triple_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_triples_of<__half>(call, device, plan);
}
