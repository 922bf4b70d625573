// conv2d's sm90 path: forward, in bfloat16.
#include "conv2d/sm90/forward.cuh"

cuda_ops_status conv2d_sm90_forward_bfloat16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
    return conv2d_sm90_forward_16bit<__nv_bfloat16>(product, device, plan);
}
