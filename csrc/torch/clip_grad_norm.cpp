// clip_grad_norm for PyTorch: partials of the norm of gradients on one device, of any dtypes, and their scaling in
// place. What does not lie in one block of memory goes through a copy.
#include "cuda_ops/clip_grad_norm.h"

#include <algorithm>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "parameter_list.h"

namespace cuda_ops
{

// Gradients of one dtype, dense, with their addresses and sizes as the launchers take them.
struct GradientsAlike {
    cuda_ops_dtype dtype;
    std::vector<Tensor> tensors;
    std::vector<void *> pointers;
    std::vector<int64_t> counts;

    int64_t size() const
    {
        return static_cast<int64_t>(tensors.size());
    }
};

static void check_clip_arguments(const at::TensorList grads, double norm_type)
{
    TORCH_CHECK_NOT_IMPLEMENTED(norm_type > 0, "clip_grad_norm_: expected norm_type to be greater than 0, got ",
                                norm_type);
    for (const Tensor &grad : grads) {
        check_dtype("clip_grad_norm_", "grads", grad);
        check_same_device("clip_grad_norm_", "grads", grad, "grads[0]", grads[0]);
    }
}

static std::vector<GradientsAlike> alike_by_dtype(const at::TensorList grads)
{
    std::vector<GradientsAlike> lists;
    for (const Tensor &grad : grads) {
        const cuda_ops_dtype dtype = check_dtype("clip_grad_norm_", "grads", grad);
        auto list = std::find_if(lists.begin(), lists.end(), [&](const GradientsAlike &l) { return l.dtype == dtype; });
        if (list == lists.end())
            list = lists.insert(list, GradientsAlike{dtype, {}, {}, {}});
        list->tensors.push_back(dense(grad));
        list->pointers.push_back(list->tensors.back().data_ptr());
        list->counts.push_back(grad.numel());
    }
    return lists;
}

// Elements that one task of the CPU's threads adds up: fixed, so that results are the same for any number of threads.
constexpr int64_t GRADIENT_TASK = 32768;

static Tensor clip_grad_norm_partials(at::TensorList grads, double norm_type)
{
    const char *op = "clip_grad_norm_";
    check_clip_arguments(grads, norm_type);
    TORCH_CHECK(!grads.empty(), op, ": expected one gradient at least");
    const c10::OptionalDeviceGuard guard(at::device_of(grads[0]));
    const std::vector<GradientsAlike> lists = alike_by_dtype(grads);
    const at::TensorOptions options = grads[0].options().dtype(at::kDouble);
    if (grads[0].is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        int64_t count = 0;
        for (const GradientsAlike &list : lists)
            count += cuda_ops_grad_norm_partials_cuda(list.counts.data(), list.size());
        Tensor partials = empty({count}, options);
        double *next = partials.data_ptr<double>();
        for (const GradientsAlike &list : lists) {
            check_status(op, cuda_ops_grad_norm_cuda(next, list.pointers.data(), list.counts.data(), list.size(),
                                                     norm_type, list.dtype, current_stream(op)));
            next += cuda_ops_grad_norm_partials_cuda(list.counts.data(), list.size());
        }
        return partials;
#else
        current_stream(op);
#endif
    }
    int64_t tasks = 0;
    for (const Tensor &grad : grads)
        tasks += (grad.numel() + GRADIENT_TASK - 1) / GRADIENT_TASK;
    Tensor partials = empty({tasks}, options);
    double *next = partials.data_ptr<double>();
    for (const GradientsAlike &list : lists)
        for (int64_t i = 0; i < list.size(); i++) {
            const int64_t count = list.counts[i], own = (count + GRADIENT_TASK - 1) / GRADIENT_TASK;
            parallel_ranges(op, own, 1, [&](int64_t begin, int64_t end) {
                cuda_ops_status status = CUDA_OPS_SUCCESS;
                for (int64_t task = begin; task < end && status == CUDA_OPS_SUCCESS; task++)
                    status = call_rows(
                        list.dtype, task * GRADIENT_TASK, std::min((task + 1) * GRADIENT_TASK, count),
                        [&](const void *from, int64_t first, int64_t last, cuda_ops_dtype type) {
                            return cuda_ops_grad_norm_partial_cpu(next + task, from, norm_type, first, last, type);
                        },
                        reads(list.tensors[i]));
                return status;
            });
            next += own;
        }
    return partials;
}

// Scales the gradients by the norm that the partials come to, and returns the norm in `dtype`.
static Tensor clip_grad_norm_scale_(at::TensorList grads, const Tensor &partials, double norm_type, double max_norm,
                                    at::ScalarType dtype)
{
    const char *op = "clip_grad_norm_";
    check_clip_arguments(grads, norm_type);
    TORCH_CHECK(partials.dim() == 1 && partials.scalar_type() == at::kDouble, op,
                ": expected partials to be float64 of one dimension, got ", partials.scalar_type(), " of shape ",
                partials.sizes());
    if (!grads.empty())
        check_same_device(op, "partials", partials, "grads[0]", grads[0]);
    const c10::OptionalDeviceGuard guard(at::device_of(partials));
    const Tensor parts = partials.contiguous();
    Tensor norm = empty(at::IntArrayRef{}, parts.options().dtype(dtype));
    const cuda_ops_dtype norm_dtype = check_dtype(op, "dtype", norm);
    std::vector<GradientsAlike> lists = alike_by_dtype(grads);
    if (lists.empty())
        lists.push_back(GradientsAlike{CUDA_OPS_FLOAT32, {}, {}, {}}); // for the norm alone
    if (parts.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        for (size_t i = 0; i < lists.size(); i++)
            check_status(op, cuda_ops_clip_grads_cuda(i == 0 ? norm.data_ptr() : nullptr, norm_dtype,
                                                      lists[i].pointers.data(), lists[i].counts.data(), lists[i].size(),
                                                      parts.const_data_ptr<double>(), parts.numel(), norm_type,
                                                      max_norm, lists[i].dtype, current_stream(op)));
#else
        (void)norm_dtype;
        current_stream(op);
#endif
    } else {
        const double value = cuda_ops_grad_norm_cpu(parts.const_data_ptr<double>(), parts.numel(), norm_type);
        norm.fill_(value);
        const double factor = cuda_ops_clip_factor_cpu(value, max_norm);
        for (const GradientsAlike &list : lists)
            for (int64_t i = 0; i < list.size(); i++)
                parallel_elements(
                    op, list.counts[i], list.dtype,
                    [&](void *grad, int64_t begin, int64_t end, cuda_ops_dtype type) {
                        return cuda_ops_clip_grad_cpu(grad, factor, begin, end, type);
                    },
                    updates(list.tensors[i]));
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<size_t> next(lists.size(), 0); // of each list, the gradient that is the next one's copy
    for (const Tensor &grad : grads)
        for (size_t i = 0; i < lists.size(); i++)
            if (lists[i].dtype == check_dtype(op, "grads", grad))
                write_back(grad, lists[i].tensors[next[i]++]);
    return norm;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("clip_grad_norm_partials(Tensor[] grads, float norm_type) -> Tensor");
    library.def(
        "clip_grad_norm_scale_(Tensor(a!)[] grads, Tensor partials, float norm_type, float max_norm, ScalarType dtype) "
        "-> Tensor");
    CUDA_OPS_IMPLEMENT(library, "clip_grad_norm_partials", cuda_ops::clip_grad_norm_partials);
    CUDA_OPS_IMPLEMENT(library, "clip_grad_norm_scale_", cuda_ops::clip_grad_norm_scale_);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "clip_grad_norm_scale_");
}
