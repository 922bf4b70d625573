// conv2d's sm90 path for TF32: forward and backward_input by one kind of kernel, backward_weight by another, whose
// picture goes through registers.
#include "conv2d/sm90/kernel.cuh"

cuda_ops_status conv2d_pixels_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                             M    N   cluster ping-pong stages
    case 0: return conv2d_launch_pixels<Tile<float, 128, 256, 2, 1, false, 4, false, false, true>>(product, device, plan);
    case 1: return conv2d_launch_pixels<Tile<float, 128, 128, 2, 1, true, 5, false, false, true>>(product, device, plan);
    case 2: return conv2d_launch_pixels<Tile<float, 128, 64, 2, 1, false, 8, false, false, true>>(product, device, plan);
    case 3: return conv2d_launch_pixels<Tile<float, 128, 128, 1, 2, false, 6, false, false, true>>(product, device, plan);
    case 4: return conv2d_launch_pixels<Tile<float, 128, 256, 1, 1, false, 4, false, false>, CONV_HALVED>(product, device, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}

cuda_ops_status conv2d_weight_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                     M    N   cluster ping-pong stages
    case 0: return conv2d_launch_weight<Tile<float, 256, 128, 1, 2, false, 4, true, false>>(product, device, plan);
    case 1: return conv2d_launch_weight<Tile<float, 128, 128, 2, 1, true, 6, true, false>>(product, device, plan);
    case 2: return conv2d_launch_weight<Tile<float, 256, 128, 1, 1, false, 4, true, false>>(product, device, plan);
    case 3: return conv2d_launch_weight<Tile<float, 256, 64, 1, 1, false, 5, true, false>>(product, device, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
