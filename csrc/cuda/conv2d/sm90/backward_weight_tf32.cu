// conv2d's sm90 path: backward_weight in TF32, with the gathered operand going through registers.
#include "conv2d/sm90/launch.cuh"

cuda_ops_status conv2d_sm90_backward_weight_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                     M    N   cluster ping-pong stages
    case 0: return conv2d_launch_backward_weight<Tile<float, 256, 128, 1, 2, false, 4, true, false>>(product, device, plan);
    case 1: return conv2d_launch_backward_weight<Tile<float, 128, 128, 2, 1, true, 6, true, false>>(product, device, plan);
    case 2: return conv2d_launch_backward_weight<Tile<float, 256, 128, 1, 1, false, 4, true, false>>(product, device, plan);
    case 3: return conv2d_launch_backward_weight<Tile<float, 256, 64, 1, 1, false, 5, true, false>>(product, device, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
