// conv2d's sm90 path: backward_input with a stride, some stride phases in one launch.
#include "conv2d/sm90/launch.cuh"

cuda_ops_status conv2d_sm90_backward_input_strided_tf32(const ConvProduct *products, int count, ConvDevice device,
                                                        const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                       M    N   cluster ping-pong stages
    case 0: return conv2d_launch_backward_input_strided<Tile<float, 128, 128, 2, 1, true, 6, false, false>>(products, count, device, plan);
    case 1: return conv2d_launch_backward_input_strided<Tile<float, 128, 64, 2, 1, false, 8, false, false>>(products, count, device, plan);
    }
    // clang-format on
#endif
    (void)products, (void)count, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
