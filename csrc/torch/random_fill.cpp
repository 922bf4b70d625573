// Random numbers for PyTorch's tensors, uniform and normal, in place: checks, the generator and the choice of backend.
#include "cuda_ops/random_fill.h"

#include <ATen/DeviceGuard.h>

#include <cmath>
#include <optional>

#include "checks.h"
#include "dropout_state.h"
#include "halves.h"

namespace cuda_ops
{

static void random_fill(const char *op, Tensor &tensor, cuda_ops_distribution distribution, double first, double second,
                        const std::optional<at::Generator> &generator)
{
    const cuda_ops_dtype dtype = check_dtype(op, "tensor", tensor);
    TORCH_CHECK(!generator || !generator->defined() || generator->device().type() == tensor.device().type(), op,
                ": expected generator to be one of ", tensor.device().type(), ", got one of ",
                generator ? generator->device() : tensor.device());
    check_written(op, "tensor", tensor);
    const c10::OptionalDeviceGuard guard(at::device_of(tensor));
    const Tensor x = dense(tensor);
    if (x.numel() > 0) {
        const cuda_ops_philox_state philox = draw_philox(x.device(), generator, CUDA_OPS_RANDOM_FILL_OFFSET_STEP);
        if (x.is_cuda())
            CUDA_OPS_LAUNCH(op, cuda_ops_random_fill_cuda(x.data_ptr(), x.numel(), distribution, first, second, philox,
                                                          dtype, current_stream(op)));
        else
            parallel_elements(
                op, x.numel(), dtype,
                [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
                    return cuda_ops_random_fill_cpu(to, begin, end, distribution, first, second, philox, type);
                },
                writes(x));
    }
    if (!x.is_same(tensor))
        tensor.copy_(x);
    // What saved the old values for its backward is to notice.
    tensor.unsafeGetTensorImpl()->bump_version();
}

static void random_uniform(Tensor &tensor, double a, double b, std::optional<at::Generator> generator)
{
    TORCH_CHECK(std::isfinite(b - a) && a <= b, "uniform_: expected a to be at most b, and b - a to be finite, got ", a,
                " and ", b);
    random_fill("uniform_", tensor, CUDA_OPS_UNIFORM, a, b, generator);
}

static void random_normal(Tensor &tensor, double mean, double std, std::optional<at::Generator> generator)
{
    TORCH_CHECK(std >= 0, "normal_: expected std to be at least 0, got ", std);
    random_fill("normal_", tensor, CUDA_OPS_NORMAL, mean, std, generator);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("uniform_(Tensor(a!) tensor, float a, float b, Generator? generator) -> ()",
                {at::Tag::nondeterministic_seeded});
    library.def("normal_(Tensor(a!) tensor, float mean, float std, Generator? generator) -> ()",
                {at::Tag::nondeterministic_seeded});
    CUDA_OPS_IMPLEMENT(library, "uniform_", cuda_ops::random_uniform);
    CUDA_OPS_IMPLEMENT(library, "normal_", cuda_ops::random_normal);
    for (const char *name : {"uniform_", "normal_"}) {
        CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, name);
        // They are called where no gradients are recorded (cuda_ops/nn_init.py).
        library.impl(name, c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
    }
}
