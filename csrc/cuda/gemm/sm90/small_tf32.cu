// gemm, sm90 path: TF32, tiles for batches of small matrices; see gemm/sm90/tf32.cu. The problem is as the kernel sees
// it; A K-major with B MN-major never comes.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_small_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const bool a_mn_major = call.problem.transpose_a, b_mn_major = !call.problem.transpose_b;
    // clang-format off
    if (!a_mn_major && !b_mn_major)
        switch (plan.tile) {
        //                                          M   N   cluster ping-pong stages     TMA gelu blocks an SM
        case 4: return launch<Tile<float, 128, 64, 1, 1, false, 3, false, false, true, false, 2>>(call, device, plan);
        case 5: return launch<Tile<float, 64, 128, 1, 1, true, 3, false, false, true, false, 2>>(call, device, plan);
        }
    if (a_mn_major && !b_mn_major)
        switch (plan.tile) {
        case 4: return launch<Tile<float, 128, 64, 1, 1, false, 3, true, false, true, false, 2>>(call, device, plan);
        case 5: return launch<Tile<float, 64, 64, 1, 1, true, 4, true, false, true, false, 2>>(call, device, plan);
        }
    if (a_mn_major && b_mn_major)
        switch (plan.tile) {
        case 4: return launch<Tile<float, 128, 64, 1, 1, false, 3, true, true, false, false, 2>>(call, device, plan);
        case 6: return launch<Tile<float, 128, 64, 1, 2, false, 3, true, true, false, false, 2>>(call, device, plan);
        }
    // clang-format on
#endif
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
