// conv2d's sm90_halo path for TF32.
#include "conv2d/sm90_halo/kernel.cuh"

cuda_ops_status conv2d_sm90_halo_tf32(const HaloProduct &product, ConvDevice device)
{
#if defined(CUDA_OPS_SM90A)
    return product.tile_columns == 32 ? conv2d_launch_halo<HaloTile<float, 128, 128, false, 32>>(product, device)
                                      : conv2d_launch_halo<HaloTile<float, 128, 128, false>>(product, device);
#else
    (void)product, (void)device;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
