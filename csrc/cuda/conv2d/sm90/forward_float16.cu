// conv2d's sm90 path: forward, in float16.
#include "conv2d/sm90/forward.cuh"

cuda_ops_status conv2d_sm90_forward_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
    return conv2d_sm90_forward_16bit<__half>(product, device, plan);
}
