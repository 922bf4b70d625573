// at::empty for ops that small calls do feel: its two ways through the dispatcher take longer than the allocation.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#ifdef CUDA_OPS_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace cuda_ops
{

// Whether new memory is filled, by PyTorch, with values that are not to be mistaken for results.
inline bool fills_memory()
{
    const at::Context &context = at::globalContext();
    return C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory());
}

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions &options)
{
    if (fills_memory())
        return at::empty(sizes, options);
#ifdef CUDA_OPS_WITH_CUDA
    if (options.device().is_cuda())
        return at::Tensor(at::detail::empty_cuda(sizes, options));
#endif
    return options.device().is_cpu() ? at::Tensor(at::detail::empty_cpu(sizes, options)) : at::empty(sizes, options);
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions &options)
{
    if (fills_memory())
        return at::empty_strided(sizes, strides, options);
#ifdef CUDA_OPS_WITH_CUDA
    if (options.device().is_cuda())
        return at::Tensor(at::detail::empty_strided_cuda(sizes, strides, options));
#endif
    return options.device().is_cpu() ? at::Tensor(at::detail::empty_strided_cpu(sizes, strides, options))
                                     : at::empty_strided(sizes, strides, options);
}

// Of a tensor whose elements lie in one block, as `dense` gives them: with its strides.
inline at::Tensor empty_like_dense(const at::Tensor &tensor)
{
    return empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
}

inline at::Tensor empty_bytes(int64_t count, const at::Tensor &like)
{
    return empty({count}, at::TensorOptions().device(like.device()).dtype(at::kByte));
}

} // namespace cuda_ops
