// What the glue of every op shares: argument checks with one style of message, the bridge from tensors to the C API's
// dtypes and streams, threads on the CPU, and the one status check.
//
// A message reads: <op>: expected <argument> to be <what>, got <what it is>.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cuda_ops/core.h"

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "compile with -fopenmp: without it at::parallel_for runs on one thread"
#endif

namespace cuda_ops
{

using at::Tensor;

// The C API's dtype of a tensor. Refuses dtypes without kernels: integers and complex. (What the CPU does with float16
// and bfloat16: halves.h.)
cuda_ops_dtype check_dtype(const char *op, const char *argument, const Tensor &tensor);

// Same device and dtype as `reference`, or an error that names both.
void check_like(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                const Tensor &reference);

void check_same_device(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                       const Tensor &reference);

void check_same_shape(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                      const Tensor &reference);

void check_dim(const char *op, const char *argument, const Tensor &tensor, int64_t minimum, int64_t maximum);

// For ops in place: refuses a tensor that has an element twice in memory.
void check_written(const char *op, const char *argument, const Tensor &tensor);

// For ops in place: refuses what is read from memory that is written.
void check_no_overlap(const char *op, const char *argument, const Tensor &tensor, const char *written_name,
                      const Tensor &written);

// Whether a tensor can have these sizes: none is negative, and the strides of a contiguous one do not overflow.
inline bool are_sizes_of_a_tensor(at::IntArrayRef sizes)
{
    int64_t strides = 1;
    for (const int64_t size : sizes)
        if (size < 0 || c10::mul_overflows(strides, size > 0 ? size : 1, &strides))
            return false;
    return true;
}

// The tensor of an argument that may be None, where the call cannot do without it, or an error that names both.
const Tensor &required(const char *op, const char *argument, const std::optional<Tensor> &tensor);

// `tensor` itself if it is dense in some order of dimensions (and not a view of its negative), else a dense copy.
// at::empty_like of the result has the result's strides, so that an elementwise kernel may take both as flat arrays.
Tensor dense(const Tensor &tensor);

// `tensor` itself, but a dense copy of a view of its negative.
inline Tensor resolved(const Tensor &tensor)
{
    return tensor.is_neg() ? dense(tensor) : tensor;
}
inline std::optional<Tensor> resolved(const std::optional<Tensor> &tensor)
{
    return tensor ? std::optional<Tensor>(resolved(*tensor)) : tensor;
}

// `tensor` laid out with the strides of `reference` (dense, of the same shape): itself if it is, else a copy.
Tensor dense_like(const Tensor &tensor, const Tensor &reference);

// Throws unless `status` is success, with the cause and, where it is known, the cure.
void check_status(const char *op, cuda_ops_status status);

// PyTorch's current stream on the current device. In a build without CUDA: an error that says how to get one.
cuda_ops_stream current_stream(const char *op);

// An op's name in messages: linear for cuda_ops::linear_forward.
std::string display_name(const c10::OperatorHandle &op);

// Registers what all ops share: that tensors which are not dense are an error that names op and argument, and vmap
// (vmap.h). For ops that have no kernel of their own; CUDA_OPS_IMPLEMENT does it for the others.
void register_kernels_of_all_ops(torch::Library &library, const char *name);

// Elements below which another thread is not worth waking (at::internal::GRAIN_SIZE is PyTorch's own figure).
constexpr int64_t ELEMENTWISE_GRAIN = 32768;

// Calls kernel(begin, end) over ranges of [0, count) on PyTorch's threads; a status that is not success throws.
template <typename Kernel>
void parallel_ranges(const char *op, int64_t count, int64_t grain, const Kernel &kernel)
{
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { check_status(op, kernel(begin, end)); });
}

} // namespace cuda_ops

// The CUDA launchers exist only in a build with CUDA. A glue file writes its launch inside this macro; without CUDA
// the call becomes the error of current_stream and the launcher is not referenced.
#ifdef CUDA_OPS_WITH_CUDA
#define CUDA_OPS_LAUNCH(op, call) ::cuda_ops::check_status(op, call)
#else
#define CUDA_OPS_LAUNCH(op, call) ((void)::cuda_ops::current_stream(op))
#endif

// Registers `function` for both backends; it looks at its tensors to see where it runs. The CUDA key is registered
// without CUDA too, so that a CUDA tensor meets our message and not the dispatcher's.
#define CUDA_OPS_IMPLEMENT(library, name, function)                                                                    \
    do {                                                                                                               \
        (library).impl(name, c10::DispatchKey::CPU, function);                                                         \
        (library).impl(name, c10::DispatchKey::CUDA, function);                                                        \
        ::cuda_ops::register_kernels_of_all_ops(library, name);                                                        \
    } while (false)

// For an op that writes into its arguments and returns nothing: passes tensors with a lazy negation (such as the
// imaginary part of a conjugate) to the op, which resolves them by `dense`. PyTorch's fallback makes a copy and writes
// the result back; it takes that from what the op returns, and would read past the stack here.
#define CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, name)                                                                   \
    (library).impl(name, c10::DispatchKey::Negative, torch::CppFunction::makeFallthrough())
