// Input seen as [outer, cols, inner], for softmax and log_softmax, and their workspace.
#pragma once

#include <algorithm>

#include "checks.h"
#include "halves.h"
#include "loss.h"

namespace cuda_ops
{

// cols is the dimension `dim`, which may count from the end. A tensor without dimensions is one of one element, as in
// PyTorch.
struct SoftmaxShape {
    int64_t outer = 1, cols = 1, inner = 1;

    // Elements that lie together and that kernels go along.
    int64_t row() const
    {
        return cols * inner;
    }
};

inline SoftmaxShape softmax_shape(const char *op, const Tensor &input, int64_t dim)
{
    const int64_t dims = input.dim(), bound = std::max<int64_t>(dims, 1);
    TORCH_CHECK_INDEX(-bound <= dim && dim < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                      "] for an input of shape ", input.sizes(), ", got ", dim);
    const int64_t wrapped = dim < 0 ? dim + bound : dim;
    SoftmaxShape shape;
    for (int64_t d = 0; d < dims; d++)
        (d < wrapped ? shape.outer : d == wrapped ? shape.cols : shape.inner) *= input.size(d);
    return shape;
}

// Device memory for a launcher that mostly needs none.
inline Tensor workspace_if_any(const Tensor &input, size_t bytes)
{
    return bytes > 0 ? empty_workspace(input, bytes) : Tensor();
}

inline void *pointer_to(const Tensor &workspace)
{
    return workspace.defined() ? workspace.data_ptr() : nullptr;
}

// Columns that a thread of the CPU takes at least.
inline int64_t column_grain(const SoftmaxShape &shape)
{
    return std::max<int64_t>(ELEMENTWISE_GRAIN / 8 / shape.cols, 1);
}

// parallel_rows over the columns, of which a row of the arrays has `inner`.
template <typename Kernel, typename... Arrays>
void parallel_columns(const char *op, const SoftmaxShape &shape, cuda_ops_dtype dtype, const Kernel &kernel,
                      const Arrays &...arrays)
{
    parallel_rows(op, shape.outer * shape.inner, shape.inner, column_grain(shape), dtype, kernel, arrays...);
}

} // namespace cuda_ops
