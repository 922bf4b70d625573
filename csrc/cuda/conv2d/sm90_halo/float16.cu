// conv2d's sm90_halo path for float16.
#include "conv2d/sm90_halo/kernel.cuh"

cuda_ops_status conv2d_sm90_halo_float16(const HaloProduct &product, ConvDevice device, int row_bytes, bool by_channel)
{
#if defined(CUDA_OPS_SM90A)
    if (row_bytes == 64)
        return by_channel ? conv2d_launch_halo<HaloTile<__half, 256, 64, true>>(product, device)
                          : conv2d_launch_halo<HaloTile<__half, 256, 64, false>>(product, device);
    return by_channel ? conv2d_launch_halo<HaloTile<__half, 192, 128, true>>(product, device)
                      : conv2d_launch_halo<HaloTile<__half, 192, 128, false>>(product, device);
#else
    (void)product, (void)device, (void)row_bytes, (void)by_channel;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
