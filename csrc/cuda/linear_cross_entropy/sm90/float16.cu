// linear_cross_entropy, path sm90: its products in float16.
#include "linear_cross_entropy/sm90/products.cuh"

cuda_ops_status head_logits_float16(const HeadLogits &call)
{
    return head_logits<__half>(call);
}

cuda_ops_status head_weight_gradient_float16(const HeadWeightGradient &call)
{
    return head_weight_gradient<__half>(call);
}
