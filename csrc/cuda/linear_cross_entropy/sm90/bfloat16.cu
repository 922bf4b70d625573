// linear_cross_entropy, path sm90: its products in bfloat16.
#include "linear_cross_entropy/sm90/products.cuh"

cuda_ops_status head_logits_bfloat16(const HeadLogits &call)
{
    return head_logits<__nv_bfloat16>(call);
}

cuda_ops_status head_weight_gradient_bfloat16(const HeadWeightGradient &call)
{
    return head_weight_gradient<__nv_bfloat16>(call);
}
