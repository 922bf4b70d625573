// What linear and the ops that are fused with it share on the way to their kernels.
#pragma once

#include "cuda_ops/linear.h"

#include <algorithm>

#include "checks.h"
#include "cpu_workspace.h"
#include "cuda_ops/gemm_cpu.h"
#include "empty.h"
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

// product = a b of bfloat16, in float32, on the CPU: by the instructions for it where the processor has them (gemm_cpu.h).
// a and b have any strides, product is a contiguous matrix.
inline void bfloat16_product(const char *op, const Tensor &product, const Tensor &a, const Tensor &b)
{
    const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
    const bool by_rows = m >= n;
    const auto *const left = static_cast<const at::BFloat16 *>(a.const_data_ptr());
    const auto *const right = static_cast<const at::BFloat16 *>(b.const_data_ptr());
    float *const result = product.data_ptr<float>();
    const int64_t grain = std::max<int64_t>(1, PRODUCT_GRAIN / std::max<int64_t>(1, (by_rows ? n : m) * k));
    parallel_ranges(op, by_rows ? m : n, grain, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(cuda_ops_gemm_workspace_cpu(CUDA_OPS_BFLOAT16));
        const int64_t row = by_rows ? begin : 0, column = by_rows ? 0 : begin;
        return cuda_ops_gemm_cpu(result + row * n + column, n, left + row * a.stride(0), a.stride(0), a.stride(1),
                                 right + column * b.stride(1), b.stride(0), b.stride(1), by_rows ? end - begin : m,
                                 by_rows ? n : end - begin, k, /*accumulate=*/0, workspace, CUDA_OPS_BFLOAT16);
    });
}

inline Tensor bfloat16_product(const char *op, const Tensor &a, const Tensor &b)
{
    const Tensor product = empty({a.size(0), b.size(1)}, a.options().dtype(at::kFloat));
    bfloat16_product(op, product, a, b);
    return product;
}

} // namespace cuda_ops
