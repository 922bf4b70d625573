// conv2d's sm90 path: forward in TF32, and backward_input of stride 1 with a transposed weight.
#include "conv2d/sm90/cluster.cuh"

cuda_ops_status conv2d_sm90_forward_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    // clang-format off
    switch (plan.tile) {
    //                                                             M    N   cluster ping-pong stages
    case 0: return conv2d_launch_forward<Tile<float, 128, 256, 2, 1, false, 4, false, false, true>>(product, device, plan);
    case 1: return conv2d_launch_forward<Tile<float, 128, 128, 2, 1, true, 5, false, false, true>>(product, device, plan);
    case 2: return conv2d_launch_forward<Tile<float, 128, 64, 2, 1, false, 8, false, false, true>>(product, device, plan);
    case 3: return conv2d_launch_forward<Tile<float, 128, 128, 1, 2, false, 6, false, false, true>>(product, device, plan);
    case 4: return conv2d_launch_forward<Tile<float, 128, 192, 2, 1, true, 4, false, false, true>>(product, device, plan);
    case 5: return conv2d_launch_forward_cluster<ClusterTile<float, 64, 9, false, false>>(product, plan);
    case 6: return conv2d_launch_forward_cluster<ClusterTile<float, 128, 7, false, false>>(product, plan);
    }
    // clang-format on
#endif
    (void)product, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
}
