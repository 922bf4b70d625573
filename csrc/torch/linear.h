// What linear and the ops that are fused with it share on the way to their kernels.
#pragma once

#include "cuda_ops/linear.h"

#include <algorithm>

#include "checks.h"
#include "cpu_workspace.h"
#include "halves.h"

namespace cuda_ops
{

// The leading dimensions are one: all that the kernels know are rows.
inline int64_t rows_of(const Tensor &tensor)
{
    int64_t rows = 1;
    for (int64_t d = 0; d < tensor.dim() - 1; d++)
        rows *= tensor.size(d);
    return rows;
}

// Multiply-adds below which another thread is not worth waking.
constexpr int64_t PRODUCT_GRAIN = 1 << 19;

// kernel(block, workspace) over blocks of a rows x columns result whose elements are sums of `depth` products. by_rows:
// the side that is cut; the longer one, since each thread packs all of the other operand.
template <typename Kernel>
void parallel_blocks(const char *op, int64_t rows, int64_t columns, int64_t depth, bool by_rows, const Kernel &kernel)
{
    const int64_t other = std::max<int64_t>(1, (by_rows ? columns : rows) * depth);
    const int64_t grain = std::max<int64_t>(1, PRODUCT_GRAIN / other);
    parallel_ranges(op, by_rows ? rows : columns, grain, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(cuda_ops_linear_workspace_cpu());
        const cuda_ops_linear_block block =
            by_rows ? cuda_ops_linear_block{begin, end, 0, columns} : cuda_ops_linear_block{0, rows, begin, end};
        return kernel(block, workspace);
    });
}

template <typename Kernel>
void parallel_blocks(const char *op, int64_t rows, int64_t columns, int64_t depth, const Kernel &kernel)
{
    parallel_blocks(op, rows, columns, depth, rows >= columns, kernel);
}

} // namespace cuda_ops
