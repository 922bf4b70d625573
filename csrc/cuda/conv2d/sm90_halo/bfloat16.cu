// conv2d's sm90_halo path for bfloat16.
#include "conv2d/sm90_halo/kernel.cuh"

cuda_ops_status conv2d_sm90_halo_bfloat16(const HaloProduct &product, ConvDevice device, int row_bytes, bool by_channel)
{
    return conv2d_sm90_halo_16bit<__nv_bfloat16>(product, device, row_bytes, by_channel);
}
