// What linear and the ops that are fused with it share on the way to their kernels.
#pragma once

#include "cuda_ops/linear.h"

#include <algorithm>

#include "checks.h"
#include "cpu_workspace.h"
#include "cuda_ops/gemm_cpu.h"
#include "empty.h"
#include "halves.h"
#include "product_grain.h"

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

// kernel(block, workspace) over blocks of a rows x columns result whose elements are sums of `depth` products. by_rows:
// the side that is cut; the longer one, since each thread packs all of the other operand.
template <typename Kernel>
void parallel_blocks(const char *op, int64_t rows, int64_t columns, int64_t depth, bool by_rows, const Kernel &kernel)
{
    const int64_t lines = by_rows ? rows : columns;
    const int64_t grain = product_grain(lines, rows * columns * depth, rows * depth + columns * depth + rows * columns);
    parallel_ranges(op, lines, grain, [&](int64_t begin, int64_t end) {
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

// Whether half_product takes it: of halves on a CPU with AMX, or of bfloat16 with AVX512-BF16.
inline bool has_half_product(const Tensor &tensor)
{
    return is_cpu_half(tensor) &&
           cuda_ops_gemm_has_tiles_cpu(tensor.scalar_type() == at::kHalf ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16);
}

// output = a b (+ bias for each column), of halves, matrices or a batch of them; output has contiguous rows, and their
// dtype or float32. bias has output's dtype, or is not there. relu: of the sums, before they are rounded.
inline void half_product(const char *op, const Tensor &output, const Tensor &a, const Tensor &b,
                         const void *bias = nullptr, bool relu = false)
{
    const bool batched = a.dim() == 3;
    const int64_t m = a.size(-2), n = b.size(-1), k = a.size(-1), batch = batched ? a.size(0) : 1;
    const bool by_rows = m >= n;
    const int64_t lines = by_rows ? m : n, output_row = output.stride(-2);
    const auto *const left = static_cast<const uint16_t *>(a.const_data_ptr());
    const auto *const right = static_cast<const uint16_t *>(b.const_data_ptr());
    auto *const result = static_cast<char *>(output.data_ptr());
    const cuda_ops_dtype dtype = a.scalar_type() == at::kHalf ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    const cuda_ops_dtype output_dtype = output.scalar_type() == at::kFloat ? CUDA_OPS_FLOAT32 : dtype;
    const auto size = static_cast<int64_t>(output.element_size());
    const int64_t grain = std::max<int64_t>(1, HALF_PRODUCT_GRAIN / std::max<int64_t>(1, (by_rows ? n : m) * k));
    parallel_ranges(op, batch * lines, grain, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(cuda_ops_gemm_tiles_workspace_cpu());
        cuda_ops_status status = CUDA_OPS_SUCCESS;
        while (begin < end && status == CUDA_OPS_SUCCESS) {
            const int64_t index = begin / lines, first = begin - index * lines;
            const int64_t count = std::min(lines - first, end - begin);
            const int64_t row = by_rows ? first : 0, column = by_rows ? 0 : first;
            const auto *const of_bias = static_cast<const char *>(bias);
            status = cuda_ops_gemm_tiles_cpu(
                result + ((batched ? index * output.stride(0) : 0) + row * output_row + column) * size, output_row,
                bias ? of_bias + column * size : nullptr,
                left + (batched ? index * a.stride(0) : 0) + row * a.stride(-2), a.stride(-2), a.stride(-1),
                right + (batched ? index * b.stride(0) : 0) + column * b.stride(-1), b.stride(-2), b.stride(-1),
                by_rows ? count : m, by_rows ? n : count, k, workspace, relu, dtype, output_dtype);
            begin += count;
        }
        return status;
    });
}

} // namespace cuda_ops
