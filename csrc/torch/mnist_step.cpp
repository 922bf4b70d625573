// mnist_step for PyTorch: checks, and the launch. CUDA alone.
#include "cuda_ops/mnist_step.h"

#include <ATen/DeviceGuard.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <array>
#include <cmath>
#include <vector>

#include "loss.h"

namespace cuda_ops
{

static IndexErrors mnist_step_index_errors("mnist_step", "indices");

// The order of `parameters`, and their sizes.
struct ParameterSize {
    const char *name;
    std::vector<int64_t> sizes;
};
static const std::array<ParameterSize, 18> &parameter_sizes()
{
    static const std::array<ParameterSize, 18> sizes = {{
        {"conv1.weight", {32, 1, 3, 3}},
        {"conv1.bias", {32}},
        {"norm1.weight", {32}},
        {"norm1.bias", {32}},
        {"norm1.running_mean", {32}},
        {"norm1.running_var", {32}},
        {"norm1.num_batches_tracked", {}},
        {"conv2.weight", {64, 32, 3, 3}},
        {"conv2.bias", {64}},
        {"norm2.weight", {64}},
        {"norm2.bias", {64}},
        {"norm2.running_mean", {64}},
        {"norm2.running_var", {64}},
        {"norm2.num_batches_tracked", {}},
        {"linear1.weight", {128, 3136}},
        {"linear1.bias", {128}},
        {"linear2.weight", {10, 128}},
        {"linear2.bias", {10}},
    }};
    return sizes;
}

static bool mnist_step_supported(const Tensor &like, int64_t batch)
{
    (void)batch;
#ifdef CUDA_OPS_WITH_CUDA
    if (like.is_cuda()) {
        const c10::OptionalDeviceGuard guard(at::device_of(like));
        return cuda_ops_mnist_step_supported(batch);
    }
#endif
    (void)like;
    return false;
}

static int64_t mnist_step_workspace(const Tensor &like, int64_t batch)
{
    (void)like, (void)batch;
#ifdef CUDA_OPS_WITH_CUDA
    const c10::OptionalDeviceGuard guard(at::device_of(like));
    return cuda_ops_mnist_step_workspace(batch);
#else
    return 0;
#endif
}

static void check(const char *op, at::TensorList parameters, const Tensor &losses, const Tensor &workspace,
                  const Tensor &images, const Tensor &labels, const Tensor &indices, const Tensor &rates)
{
    const auto dtype = [](const Tensor &tensor) { return c10::getDtypeNames(tensor.scalar_type()).first; };
    const auto expect = [&](const char *name, const Tensor &tensor, at::ScalarType type, at::IntArrayRef sizes) {
        check_same_device(op, name, tensor, "images", images);
        TORCH_CHECK(tensor.scalar_type() == type, op, ": expected ", name, " to be ", c10::getDtypeNames(type).first,
                    ", got ", dtype(tensor));
        TORCH_CHECK(tensor.sizes() == sizes, op, ": expected ", name, " to have shape ", sizes, ", got ",
                    tensor.sizes());
        TORCH_CHECK(tensor.is_contiguous() && !tensor.is_neg(), op, ": expected ", name, " to be contiguous");
    };
    TORCH_CHECK(indices.dim() == 2, op, ": expected indices to have shape [steps, batch], got ", indices.sizes());
    TORCH_CHECK(images.dim() >= 1 && images.scalar_type() == at::kByte, op, ": expected images to be uint8, got ",
                dtype(images), " of shape ", images.sizes());
    const int64_t count = images.size(0), steps = indices.size(0);
    TORCH_CHECK(images.numel() == count * 784 && images.is_contiguous() && !images.is_neg(), op,
                ": expected images to be contiguous, of 28 x 28 pixels each, got shape ", images.sizes());
    TORCH_CHECK(parameters.size() == parameter_sizes().size(), op, ": expected ", parameter_sizes().size(),
                " parameters, got ", parameters.size());
    for (size_t i = 0; i < parameters.size(); i++) {
        const ParameterSize &wanted = parameter_sizes()[i];
        expect(wanted.name, parameters[i], wanted.sizes.empty() ? at::kLong : at::kFloat, wanted.sizes);
    }
    expect("labels", labels, at::kLong, {count});
    expect("indices", indices, at::kLong, indices.sizes());
    expect("rates", rates, at::kFloat, {steps, 2});
    expect("losses", losses, at::kFloat, {steps});
    expect("workspace", workspace, at::kByte, {workspace.numel()});
    const int64_t least = mnist_step_workspace(images, indices.size(1));
    TORCH_CHECK(workspace.numel() >= least, op, ": expected workspace to have ", least, " bytes or more, got ",
                workspace.numel());
}

// options: eps and momentum of the first batch norm, and of the second; mean and standard deviation of the pixels, as
// fractions of 255; label smoothing.
static void mnist_step_(at::TensorList parameters, const Tensor &losses, const Tensor &workspace, const Tensor &images,
                        const Tensor &labels, const Tensor &indices, const Tensor &rates,
                        const c10::List<double> &options)
{
    const char *op = "mnist_step";
    TORCH_CHECK_NOT_IMPLEMENTED(images.is_cuda(), op, ": runs on CUDA alone, got images on ", images.device());
    const c10::OptionalDeviceGuard guard(at::device_of(images));
    check(op, parameters, losses, workspace, images, labels, indices, rates);
    TORCH_CHECK(options.size() == 7, op, ": expected 7 options, got ", options.size());
    const double mean = options[4], std = options[5];
    TORCH_CHECK_VALUE(std::isfinite(mean) && std::isfinite(std) && std > 0, op,
                      ": expected a finite mean, and a standard deviation above 0, got ", mean, " and ", std);
    const int64_t steps = indices.size(0), batch = indices.size(1);
    TORCH_CHECK_NOT_IMPLEMENTED(mnist_step_supported(images, batch), op, ": batches of ", batch,
                                " are not supported by this device or build: it takes 1 to ",
                                static_cast<int>(CUDA_OPS_MNIST_STEP_MOST),
                                " images, and a Hopper GPU with 128 multiprocessors or more");
    if (steps == 0)
        return;
#ifdef CUDA_OPS_WITH_CUDA
    const auto at = [&](size_t i) { return parameters[i].mutable_data_ptr<float>(); };
    const auto block = [&](size_t first, double eps, double momentum) {
        return cuda_ops_mnist_block{at(first),
                                    at(first + 1),
                                    at(first + 2),
                                    at(first + 3),
                                    at(first + 4),
                                    at(first + 5),
                                    parameters[first + 6].mutable_data_ptr<int64_t>(),
                                    static_cast<float>(eps),
                                    static_cast<float>(momentum)};
    };
    const cuda_ops_mnist_parameters kernel_parameters = {
        block(0, options[0], options[1]), block(7, options[2], options[3]), at(14), at(15), at(16), at(17)};
    cuda_ops_index_error *error = mnist_step_index_errors.record();
    CUDA_OPS_LAUNCH(op, cuda_ops_mnist_step_cuda(losses.mutable_data_ptr<float>(), &kernel_parameters,
                                                 workspace.mutable_data_ptr(), error, images.const_data_ptr<uint8_t>(),
                                                 labels.const_data_ptr<int64_t>(), images.size(0),
                                                 indices.const_data_ptr<int64_t>(), rates.const_data_ptr<float>(),
                                                 steps, batch, mean, std, options[6], current_stream(op)));
    mnist_step_index_errors.check_now(error);
#endif
    // Autograd sees nothing of the writes above, so that backward through values from before the steps is told here.
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const Tensor &parameter : parameters)
        if (!parameter.is_inference())
            parameter.unsafeGetTensorImpl()->bump_version();
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("mnist_step_supported(Tensor like, int batch) -> bool");
    library.def("mnist_step_workspace(Tensor like, int batch) -> int");
    library.def("mnist_step_(Tensor(a!)[] parameters, Tensor(b!) losses, Tensor(c!) workspace, Tensor images, "
                "Tensor labels, Tensor indices, Tensor rates, float[] options) -> ()");
    CUDA_OPS_IMPLEMENT(library, "mnist_step_supported", cuda_ops::mnist_step_supported);
    CUDA_OPS_IMPLEMENT(library, "mnist_step_workspace", cuda_ops::mnist_step_workspace);
    CUDA_OPS_IMPLEMENT(library, "mnist_step_", cuda_ops::mnist_step_);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "mnist_step_");
}
