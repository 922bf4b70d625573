// at::empty for ops that small calls do feel: its two ways through the dispatcher take longer than the allocation.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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

} // namespace cuda_ops
