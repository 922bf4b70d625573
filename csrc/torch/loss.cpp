// The checks of loss.h, and the errors for bad class indices.
#include "loss.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "empty.h"

#ifdef CUDA_OPS_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace cuda_ops
{

LossShape loss_shape(const char *op, const Tensor &input)
{
    TORCH_CHECK_VALUE(input.dim() >= 1, op, ": expected input to have a dimension of classes, got shape ",
                      input.sizes());
    LossShape shape{1, input.size(0), 1, {}};
    if (input.dim() == 1)
        return shape;
    shape.outer = input.size(0);
    shape.classes = input.size(1);
    shape.loss_sizes = {shape.outer};
    for (int64_t d = 2; d < input.dim(); d++) {
        shape.inner *= input.size(d);
        shape.loss_sizes.push_back(input.size(d));
    }
    return shape;
}

void check_class_indices(const char *op, const Tensor &target, const Tensor &input, const LossShape &shape)
{
    check_same_device(op, "target", target, "input", input);
    TORCH_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == at::kByte, op,
                ": expected target to be int64 (or uint8) for class indices, got ",
                c10::getDtypeNames(target.scalar_type()).first);
    const at::IntArrayRef expected = shape.loss_sizes;
    // As in PyTorch, one sample without a batch dimension may have its class as a number or as a list of one.
    if (target.sizes() == expected || (input.dim() == 1 && target.dim() == 1 && target.size(0) == 1))
        return;
    // As in PyTorch, another number of samples is a ValueError, and another number of dimensions a RuntimeError.
    const bool other_batch = input.dim() == 1 ? target.dim() == 1 : target.dim() >= 1 && target.size(0) != shape.outer;
    TORCH_CHECK_VALUE(!other_batch, op, ": expected target to have shape ", expected, " for an input of shape ",
                      input.sizes(), ", got ", target.sizes());
    TORCH_CHECK(false, op, ": expected target to have shape ", expected, " for an input of shape ", input.sizes(),
                ", got ", target.sizes());
}

void check_class_weight(const char *op, const std::optional<Tensor> &weight, const Tensor &input,
                        const LossShape &shape)
{
    if (!weight)
        return;
    check_like(op, "weight", *weight, "input", input);
    TORCH_CHECK(weight->dim() == 1 && weight->size(0) == shape.classes, op, ": expected weight to have shape [",
                shape.classes, "], one element for each class, got ", weight->sizes());
}

cuda_ops_reduction check_reduction(const char *op, int64_t reduction)
{
    TORCH_CHECK_VALUE(0 <= reduction && reduction <= 2, op,
                      ": expected reduction to be 0 (none), 1 (mean) or 2 (sum), got ", reduction);
    return static_cast<cuda_ops_reduction>(reduction);
}

void check_grad_output(const char *op, const Tensor &grad_output, const Tensor &input, const LossShape &shape,
                       cuda_ops_reduction reduction)
{
    check_like(op, "grad_output", grad_output, "input", input);
    const at::IntArrayRef expected =
        reduction == CUDA_OPS_REDUCTION_NONE ? at::IntArrayRef(shape.loss_sizes) : at::IntArrayRef();
    TORCH_CHECK(grad_output.sizes() == expected, op, ": expected grad_output to have the shape of the loss, ", expected,
                ", got ", grad_output.sizes());
}

at::ScalarType accumulate_dtype(const Tensor &input)
{
    return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor empty_loss(const Tensor &input, const LossShape &shape, cuda_ops_reduction reduction)
{
    return reduction == CUDA_OPS_REDUCTION_NONE ? empty(shape.loss_sizes, input.options())
                                                : empty(at::IntArrayRef{}, input.options());
}

Tensor empty_total_weight(const Tensor &input, cuda_ops_reduction reduction)
{
    const at::TensorOptions options = input.options().dtype(accumulate_dtype(input));
    return reduction == CUDA_OPS_REDUCTION_NONE ? empty({0}, options) : empty(at::IntArrayRef{}, options);
}

void fill_loss_of_nothing(Tensor &loss, Tensor &total_weight, cuda_ops_reduction reduction)
{
    loss.fill_(reduction == CUDA_OPS_REDUCTION_MEAN ? std::numeric_limits<double>::quiet_NaN() : 0.0);
    total_weight.zero_();
}

void check_total_weight(const char *op, const Tensor &total_weight, const Tensor &input, cuda_ops_reduction reduction)
{
    check_same_device(op, "total_weight", total_weight, "input", input);
    TORCH_CHECK(reduction != CUDA_OPS_REDUCTION_MEAN ||
                    (total_weight.numel() == 1 && total_weight.scalar_type() == accumulate_dtype(input)),
                op, ": expected total_weight to be the one of forward, a single ",
                c10::getDtypeNames(accumulate_dtype(input)).first, ", got shape ", total_weight.sizes());
}

Tensor empty_workspace(const Tensor &input, size_t bytes)
{
    return empty({static_cast<int64_t>(bytes)}, input.options().dtype(at::kByte));
}

void IndexErrors::raise(int64_t classes, int64_t value, int64_t position, const char *when) const
{
    C10_THROW_ERROR(IndexError, c10::str(op, ": expected ", argument, " to be in [0, ", classes, "), got ", value,
                                         " at position ", position, when));
}

void check_targets_cpu(const char *op, const Tensor &target, const LossShape &shape, int64_t ignore_index)
{
    const int64_t *values = target.const_data_ptr<int64_t>();
    const int64_t position = cuda_ops_loss_find_bad_target_cpu(values, target.numel(), shape.classes, ignore_index);
    if (position >= 0)
        IndexErrors(op).raise(shape.classes, values[position], position);
}

int64_t columns_per_task(const LossShape &shape)
{
    // Neighbouring columns share cache lines when they are not rows.
    const int64_t fewest = shape.inner == 1 ? 1 : 64;
    return std::clamp<int64_t>(8192 / std::max<int64_t>(shape.classes, 1), fewest, 4096);
}

#ifdef CUDA_OPS_WITH_CUDA

// The records of an op, one for each device, in memory that host and devices share. Never freed, since kernels that are
// still running and CUDA graphs that are replayed later write there.
static cuda_ops_index_error *allocate_records(const char *op)
{
    void *memory = nullptr;
    const size_t bytes = C10_COMPILE_TIME_MAX_GPUS * sizeof(cuda_ops_index_error);
    // The first call may be under graph capture, where nothing may be allocated otherwise.
    const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
    const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    check_status(op, error == cudaSuccess ? CUDA_OPS_SUCCESS : CUDA_OPS_CUDA_ERROR + static_cast<int>(error));
    std::memset(memory, 0, bytes);
    return static_cast<cuda_ops_index_error *>(memory);
}

cuda_ops_index_error *IndexErrors::record()
{
    static std::mutex mutex;
    static std::map<const IndexErrors *, cuda_ops_index_error *> records;
    cuda_ops_index_error *all = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        cuda_ops_index_error *&entry = records[this];
        if (entry == nullptr)
            entry = allocate_records(op);
        all = entry;
    }
    cuda_ops_index_error *record = all + c10::cuda::current_device();
    raise_if_complete(record, " of an earlier call (CUDA tells of it late; with CUDA_OPS_CHECK_INDICES=1 in the "
                              "environment the call itself raises)");
    return record;
}

void IndexErrors::raise_if_complete(cuda_ops_index_error *record, const char *when)
{
    if (__atomic_load_n(&record->state, __ATOMIC_ACQUIRE) != CUDA_OPS_INDEX_ERROR_COMPLETE)
        return;
    const cuda_ops_index_error error = *record;
    __atomic_store_n(&record->state, CUDA_OPS_INDEX_ERROR_NONE, __ATOMIC_RELEASE);
    raise(error.classes, error.value, error.position, when);
}

void IndexErrors::check_now(cuda_ops_index_error *record, cuda_ops_index_error *other)
{
    const char *wanted = std::getenv("CUDA_OPS_CHECK_INDICES");
    if (wanted == nullptr || std::strcmp(wanted, "1") != 0 ||
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
        return;
    const cudaError_t error = cudaStreamSynchronize(current_stream(op));
    check_status(op, error == cudaSuccess ? CUDA_OPS_SUCCESS : CUDA_OPS_CUDA_ERROR + static_cast<int>(error));
    if (other != nullptr && __atomic_load_n(&record->state, __ATOMIC_ACQUIRE) == CUDA_OPS_INDEX_ERROR_COMPLETE)
        __atomic_store_n(&other->state, CUDA_OPS_INDEX_ERROR_NONE, __ATOMIC_RELEASE);
    raise_if_complete(record, "");
}

#else

cuda_ops_index_error *IndexErrors::record()
{
    return nullptr;
}

void IndexErrors::check_now(cuda_ops_index_error *, cuda_ops_index_error *)
{
}

#endif

} // namespace cuda_ops
