// What the glue of the optimizers shares: tensors of a list as the kernels want them, dense and in one order, and what
// was computed of copies brought back.
#pragma once

#include "checks.h"
#include "halves.h"

namespace cuda_ops
{

// Whether the elements of two dense tensors of one shape lie in the same order, and neither as their negatives. Strides
// of dimensions of size 1 mean nothing, and do differ: a channels_last weight of one input channel is one.
inline bool same_layout(const Tensor &a, const Tensor &b)
{
    for (int64_t d = 0; d < a.dim(); d++)
        if (a.size(d) != 1 && a.stride(d) != b.stride(d))
            return false;
    return !a.is_neg() && !b.is_neg();
}

// `tensor` with its elements in the order of `param`, which is dense: itself if they are, else a copy.
inline Tensor in_order_of(const Tensor &param, const Tensor &tensor)
{
    return same_layout(tensor, param) ? tensor : dense_like(tensor, param);
}

// After a kernel has written `result`, which is `target` or a copy of it. Autograd sees nothing of such writes, so that
// backward through values from before is told here. Call it below at::AutoDispatchBelowADInplaceOrView.
inline void write_back(const Tensor &target, const Tensor &result)
{
    if (!target.is_same(result))
        target.copy_(result);
    if (!target.is_inference())
        target.unsafeGetTensorImpl()->bump_version();
}

} // namespace cuda_ops
