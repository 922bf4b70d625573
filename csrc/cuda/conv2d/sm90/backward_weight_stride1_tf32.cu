// conv2d's sm90 path: backward_weight of stride 1 in TF32, by shifted copies of the input: wgmma reads both operands
// from shared memory.
#include "conv2d/sm90/launch.cuh"

cuda_ops_status conv2d_sm90_backward_weight_stride1_tf32(const ConvProduct &product, ConvDevice device,
                                                         const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                      M    N   cluster ping-pong stages
    case 0: return conv2d_launch_backward_weight_stride1<Tile<float, 128, 256, 2, 1, false, 4, false, false>>(product, device, plan);
    case 1: return conv2d_launch_backward_weight_stride1<Tile<float, 128, 192, 2, 1, true, 5, false, false>>(product, device, plan);
    case 2: return conv2d_launch_backward_weight_stride1<Tile<float, 64, 192, 1, 1, true, 6, false, false>>(product, device, plan);
    case 3: return conv2d_launch_backward_weight_stride1<Tile<float, 128, 128, 2, 1, true, 6, false, false>>(product, device, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
