// conv2d's sm90 path: backward_input of stride 1, in 16 bits. An instance has a file of its own, so that they
// compile side by side.
#ifndef CUDA_OPS_CONV2D_SM90_BACKWARD_INPUT_CUH
#define CUDA_OPS_CONV2D_SM90_BACKWARD_INPUT_CUH

#include "conv2d/sm90/cluster.cuh"

template <typename T>
static cuda_ops_status conv2d_sm90_backward_input_16bit(const ConvProduct &product, ConvDevice device,
                                                        const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                             M    N   cluster ping-pong stages
    case 0: return conv2d_launch_forward<Tile<T, 128, 256, 2, 1, false, 4, false, true>>(product, device, plan);
    case 1: return conv2d_launch_forward<Tile<T, 128, 128, 2, 1, true, 5, false, true>>(product, device, plan);
    case 2: return conv2d_launch_forward<Tile<T, 128, 64, 2, 1, false, 7, false, true>>(product, device, plan);
    case 3: return conv2d_launch_forward<Tile<T, 128, 128, 1, 2, false, 5, false, true>>(product, device, plan);
    case 4: return conv2d_launch_forward<Tile<T, 128, 192, 2, 1, true, 4, false, true>>(product, device, plan);
    case 5: return conv2d_launch_forward_cluster<ClusterTile<T, 64, 9, false, true>>(product, plan);
    case 6: return conv2d_launch_forward_cluster<ClusterTile<T, 256, 4, false, true>>(product, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
