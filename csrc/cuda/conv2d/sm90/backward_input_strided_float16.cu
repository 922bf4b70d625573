// conv2d's sm90 path: backward_input with a stride, some stride phases in one launch, in float16.
#include "conv2d/sm90/backward_input_strided.cuh"

cuda_ops_status conv2d_sm90_backward_input_strided_float16(const ConvProduct *products, int count, ConvDevice device,
                                                           const ConvPlan &plan)
{
    return conv2d_sm90_backward_input_strided_16bit<__half>(products, count, device, plan);
}
