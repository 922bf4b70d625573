// conv2d's sm90 path: backward_weight, in float16.
#include "conv2d/sm90/backward_weight.cuh"

cuda_ops_status conv2d_sm90_backward_weight_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan)
{
    return conv2d_sm90_backward_weight_16bit<__half>(product, device, plan);
}
