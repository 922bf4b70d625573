// at::empty for ops that small calls do feel: its two ways through the dispatcher take longer than the allocation.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#ifdef CUDA_OPS_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace cuda_ops
{

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions &options)
{
    const at::Context &context = at::globalContext();
    const bool filled = context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
    if (C10_UNLIKELY(filled)) // by PyTorch, with values that are not to be mistaken for results
        return at::empty(sizes, options);
#ifdef CUDA_OPS_WITH_CUDA
    if (options.device().is_cuda())
        return at::Tensor(at::detail::empty_cuda(sizes, options));
#endif
    return options.device().is_cpu() ? at::Tensor(at::detail::empty_cpu(sizes, options)) : at::empty(sizes, options);
}

// at::empty_like of a tensor whose elements lie in one gap-free block (checks.h, `dense`), with its strides.
inline at::Tensor empty_dense_like(const at::Tensor &tensor)
{
    const at::Context &context = at::globalContext();
    if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
        return at::empty_like(tensor);
#ifdef CUDA_OPS_WITH_CUDA
    if (tensor.is_cuda())
        return at::Tensor(at::detail::empty_strided_cuda(tensor.sizes(), tensor.strides(), tensor.options()));
#endif
    return at::Tensor(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.options()));
}

} // namespace cuda_ops
