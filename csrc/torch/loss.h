// What the glue of the losses over classes shares: the checks of their arguments, and the error for a bad class index.
#pragma once

#include <ATen/core/DimVector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "checks.h"
#include "cuda_ops/loss.h"
#include "halves.h"

namespace cuda_ops
{

// Input seen as [outer, classes, inner] (csrc/include/cuda_ops/loss.h), and the shape of a loss without a reduction.
struct LossShape {
    int64_t outer, classes, inner;
    at::DimVector loss_sizes;

    int64_t columns() const
    {
        return outer * inner;
    }
};

// Refuses an input without a class dimension.
LossShape loss_shape(const char *op, const Tensor &input);

// `target` as class indices for `input`: its shape, its dtype and its device.
void check_class_indices(const char *op, const Tensor &target, const Tensor &input, const LossShape &shape);

void check_class_weight(const char *op, const std::optional<Tensor> &weight, const Tensor &input,
                        const LossShape &shape);

cuda_ops_reduction check_reduction(const char *op, int64_t reduction);

// Checks grad_output: one element a column, or a single one.
void check_grad_output(const char *op, const Tensor &grad_output, const Tensor &input, const LossShape &shape,
                       cuda_ops_reduction reduction);

// The dtype of total_weight and of other sums: input's, but float32 for float16 and bfloat16.
at::ScalarType accumulate_dtype(const Tensor &input);

// Forward's results, to be written: one loss a column or a single one; total_weight, or a tensor without elements where
// there is no reduction.
Tensor empty_loss(const Tensor &input, const LossShape &shape, cuda_ops_reduction reduction);
Tensor empty_total_weight(const Tensor &input, cuda_ops_reduction reduction);

// Class indices as the kernels read them: contiguous, int64.
inline Tensor as_indices(const Tensor &target)
{
    return target.scalar_type() == at::kLong ? target.contiguous() : target.to(at::kLong).contiguous();
}

// The results without any columns: a sum of 0, a mean of NaN.
void fill_loss_of_nothing(Tensor &loss, Tensor &total_weight, cuda_ops_reduction reduction);

// For backward: total_weight as forward made it.
void check_total_weight(const char *op, const Tensor &total_weight, const Tensor &input, cuda_ops_reduction reduction);

// Device memory for a launcher, from PyTorch's allocator.
Tensor empty_workspace(const Tensor &input, size_t bytes);

inline const void *pointer_or_null(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Throws IndexError if a class index is out of range. For targets on the CPU, before anything is computed.
void check_targets_cpu(const char *op, const Tensor &target, const LossShape &shape, int64_t ignore_index);

// Columns of one task of the CPU's threads. They depend on the shape alone, so that results are the same for any number
// of threads.
int64_t columns_per_task(const LossShape &shape);

// Forward on the CPU: kernel(partial, begin, end) over the columns, `partial` being null without a reduction, and then
// the second stage into loss and total_weight.
template <typename Kernel>
void reduce_columns_cpu(const char *op, const Tensor &loss, const Tensor &total_weight, const LossShape &shape,
                        cuda_ops_reduction reduction, cuda_ops_dtype dtype, const Kernel &kernel)
{
    const int64_t size = columns_per_task(shape), tasks = (shape.columns() + size - 1) / size;
    std::vector<double> partials(reduction == CUDA_OPS_REDUCTION_NONE ? 0 : 2 * tasks);
    parallel_ranges(op, tasks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            double *partial = partials.empty() ? nullptr : &partials[2 * task];
            const cuda_ops_status status = kernel(partial, task * size, std::min((task + 1) * size, shape.columns()));
            if (status != CUDA_OPS_SUCCESS)
                return status;
        }
        return cuda_ops_status{CUDA_OPS_SUCCESS};
    });
    if (reduction == CUDA_OPS_REDUCTION_NONE)
        return;
    float sum; // of halves, rounded once
    check_status(op, cuda_ops_loss_reduce_cpu(is_half(dtype) ? &sum : loss.data_ptr(), total_weight.data_ptr(),
                                              partials.data(), tasks, reduction,
                                              is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype));
    if (is_half(dtype))
        check_status(op, cuda_ops_round_cpu(loss.data_ptr(), &sum, 1, dtype));
}

// Bad class indices on CUDA. The kernel cannot raise, a device-side assert would make the process's CUDA context
// unusable, and waiting for the kernel would cost more than the kernel. So it writes into pinned host memory, and the
// error is raised by the next call of the op that finds it there, which costs one read of host memory. With
// CUDA_OPS_CHECK_INDICES=1 in the environment the call waits for its kernel and raises itself (except under
// CUDA-graph capture, where nothing may wait).
//
// One object for each op, static in its glue file.
class IndexErrors
{
  public:
    // `argument`: what the op calls the tensor of the indices.
    explicit constexpr IndexErrors(const char *op, const char *argument = "target") : op(op), argument(argument)
    {
    }

    // The current device's record, for a launch. Throws IndexError for what an earlier call left there.
    cuda_ops_index_error *record();

    // After the launch with `record`: waits and throws if the environment asks for it. `other`: the record of another
    // argument of the same call, which is forgotten where this one throws, lest a later call tell of it.
    void check_now(cuda_ops_index_error *record, cuda_ops_index_error *other = nullptr);

    // Throws IndexError for an index that is not in [0, classes). `when`: the end of the message.
    [[noreturn]] void raise(int64_t classes, int64_t value, int64_t position, const char *when = "") const;

  private:
    void raise_if_complete(cuda_ops_index_error *record, const char *when);

    const char *op, *argument;
};

} // namespace cuda_ops

// A launcher's workspace query, which a build without CUDA does not have (as CUDA_OPS_LAUNCH, checks.h).
#ifdef CUDA_OPS_WITH_CUDA
#define CUDA_OPS_WORKSPACE_BYTES(query) (query)
#else
#define CUDA_OPS_WORKSPACE_BYTES(query) (size_t{0})
#endif
