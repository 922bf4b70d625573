// conv2d's sm90 path: backward_weight, in bfloat16.
#include "conv2d/sm90/backward_weight.cuh"

cuda_ops_status conv2d_sm90_backward_weight_bfloat16(const ConvProduct &product, ConvDevice device,
                                                     const ConvPlan &plan)
{
    return conv2d_sm90_backward_weight_16bit<__nv_bfloat16>(product, device, plan);
}
