// at::empty for ops whose small calls are host-bound: its two trips through the dispatcher cost more than the
// allocation.
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

// Whether PyTorch fills new memory with values that cannot be mistaken for results.
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

// With the strides of `tensor`, which is dense (see `dense`).
inline at::Tensor empty_like_dense(const at::Tensor &tensor)
{
    return empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
}

inline at::Tensor empty_bytes(int64_t count, const at::Tensor &like)
{
    return empty({count}, at::TensorOptions().device(like.device()).dtype(at::kByte));
}

} // namespace cuda_ops
