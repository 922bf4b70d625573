// dropout and dropout_add for PyTorch: checks, allocation, the choice of backend, and the way to PyTorch's generators.
#include "cuda_ops/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/zeros.h>

#include <mutex>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "dropout_state.h"
#include "elements.h"
#include "empty.h"
#include "vmap.h"

#ifdef CUDA_OPS_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#endif

namespace cuda_ops
{

static void check_p(const char *op, double p)
{
    TORCH_CHECK(0.0 <= p && p <= 1.0, op, ": expected p to be between 0 and 1, got ", p);
}

// A new key for each call from the CPU generator, whose own algorithm cannot start at an offset.
static cuda_ops_philox_state draw_on_cpu(const std::optional<at::Generator> &given)
{
    at::Generator generator = given && given->defined() ? *given : at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    cuda_ops_philox_state philox{};
    philox.seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    return philox;
}

#ifdef CUDA_OPS_WITH_CUDA
// The CUDA generator is a Philox itself: its key, and the next part of its offset. Under graph capture it gives
// pointers, to which every replay writes new values.
static cuda_ops_philox_state draw_on_cuda(c10::DeviceIndex device, const std::optional<at::Generator> &given,
                                          uint64_t offset_step)
{
    at::Generator generator = given && given->defined() ? *given : at::cuda::detail::getDefaultCUDAGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::PhiloxCudaState drawn =
        at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(offset_step);
    cuda_ops_philox_state philox{};
    if (drawn.captured_) {
        philox.seed_pointer = drawn.seed_.ptr;
        philox.offset_pointer = drawn.offset_.ptr;
        philox.offset = drawn.offset_intragraph_;
    } else {
        philox.seed = drawn.seed_.val;
        philox.offset = drawn.offset_.val;
    }
    return philox;
}
#endif

cuda_ops_philox_state draw_philox(c10::Device device, const std::optional<at::Generator> &generator,
                                  uint64_t offset_step)
{
#ifdef CUDA_OPS_WITH_CUDA
    if (device.is_cuda())
        return draw_on_cuda(device.index(), generator, offset_step);
#endif
    (void)device, (void)offset_step;
    return draw_on_cpu(generator);
}

constexpr int64_t SEED_AND_OFFSET = 2;

// On the CPU as many more int64 of the state say what is kept (cuda_ops/dropout.h).
static int64_t masked_state_size(const Tensor &input)
{
    return SEED_AND_OFFSET + (input.numel() + 63) / 64;
}

static int64_t kept_blocks(const Tensor &input)
{
    return (input.numel() + CUDA_OPS_DROPOUT_KEPT_BLOCK - 1) / CUDA_OPS_DROPOUT_KEPT_BLOCK;
}

constexpr int64_t KEPT_GRAIN = ELEMENTWISE_GRAIN / CUDA_OPS_DROPOUT_KEPT_BLOCK;

// The second output is what backward needs: seed and offset, 2 int64 on input's device, from which it draws the same numbers
// again, and on the CPU the mask itself. residual is what is added, or undefined.
static std::tuple<Tensor, Tensor> dropout_and_add(const char *op, const Tensor &input, const Tensor &residual, double p)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_p(op, p);
    if (residual.defined()) {
        check_like(op, "residual", residual, "input", input);
        check_same_shape(op, "residual", residual, "input", input);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input), r = residual.defined() ? dense_like(residual, x) : Tensor();
    [[maybe_unused]] const void *const added = r.defined() ? r.const_data_ptr() : nullptr;
    Tensor output = empty_like_dense(x);
    if (x.numel() == 0)
        return {output, at::zeros({2}, x.options().dtype(at::kLong))};
    Tensor state = empty({x.is_cuda() ? SEED_AND_OFFSET : masked_state_size(x)}, x.options().dtype(at::kLong));
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_dropout_add_forward_cuda(output.data_ptr(), state.data_ptr<int64_t>(),
                                                              x.const_data_ptr(), added, x.numel(), p,
                                                              draw_philox(x.device()), dtype, current_stream(op)));
        return {output, state};
    }
    const cuda_ops_philox_state philox = draw_philox(x.device());
    int64_t *const values = state.data_ptr<int64_t>();
    values[0] = static_cast<int64_t>(philox.seed);
    values[1] = static_cast<int64_t>(philox.offset);
    values[state.numel() - 1] = 0; // of which half may be unused
    uint32_t *const kept = reinterpret_cast<uint32_t *>(values + SEED_AND_OFFSET);
    const int64_t count = x.numel(), block = CUDA_OPS_DROPOUT_KEPT_BLOCK;
    parallel_stored_rows(
        op, kept_blocks(x), 1, KEPT_GRAIN, dtype,
        [&](void *to, const void *from, const void *its_residual, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_dropout_keep_cpu(to, kept, from, its_residual, count, begin, end, p, philox, type);
        },
        writes(output, block), reads(x, block), reads(r, block));
    return {output, state};
}

static std::tuple<Tensor, Tensor> dropout_forward(const Tensor &input, double p,
                                                  const std::optional<Tensor> & /* call */)
{
    return dropout_and_add("dropout", input, {}, p);
}

static std::tuple<Tensor, Tensor> dropout_add_forward(const Tensor &input, const Tensor &residual, double p,
                                                      const std::optional<Tensor> & /* call */)
{
    return dropout_and_add("dropout_add", input, residual, p);
}

// stride: the strides of forward's output. The mask goes by the offset in memory, so that backward has to use the same
// layout, whatever the strides of grad_output.
static Tensor dropout_backward(const Tensor &grad_output, const Tensor &state, double p, at::IntArrayRef stride)
{
    const char *const op = "dropout_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_p(op, p);
    check_same_device(op, "state", state, "grad_output", grad_output);
    const bool is_masked = grad_output.is_cpu() && state.numel() > SEED_AND_OFFSET;
    TORCH_CHECK(state.scalar_type() == at::kLong && state.dim() == 1 &&
                    state.numel() == (is_masked ? masked_state_size(grad_output) : SEED_AND_OFFSET),
                op, ": expected state to be 2 int64, got ", c10::getDtypeNames(state.scalar_type()).first, " of shape ",
                state.sizes());
    TORCH_CHECK(static_cast<int64_t>(stride.size()) == grad_output.dim(), op,
                ": expected stride to have one element a dimension of grad_output, ", grad_output.sizes(), ", got ",
                stride);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    Tensor grad_input = empty_strided(grad_output.sizes(), stride, grad_output.options());
    TORCH_CHECK(grad_input.is_non_overlapping_and_dense(), op,
                ": expected stride to be that of a dense tensor of shape ", grad_output.sizes(), ", got ", stride);
    const Tensor g = dense_like(grad_output, grad_input), seed_and_offset = state.contiguous();
    if (g.numel() == 0)
        return grad_input;
    if (g.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_dropout_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                           seed_and_offset.const_data_ptr<int64_t>(), g.numel(), p,
                                                           dtype, current_stream(op)));
        return grad_input;
    }
    if (is_masked) {
        const auto *const kept =
            reinterpret_cast<const uint32_t *>(seed_and_offset.const_data_ptr<int64_t>() + SEED_AND_OFFSET);
        const int64_t count = g.numel(), block = CUDA_OPS_DROPOUT_KEPT_BLOCK;
        parallel_stored_rows(
            op, kept_blocks(g), 1, KEPT_GRAIN, dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_dropout_kept_cpu(to, from, kept, count, begin, end, p, type);
            },
            writes(grad_input, block), reads(g, block));
        return grad_input;
    }
    cuda_ops_philox_state philox{};
    philox.seed = static_cast<uint64_t>(seed_and_offset.const_data_ptr<int64_t>()[0]);
    philox.offset = static_cast<uint64_t>(seed_and_offset.const_data_ptr<int64_t>()[1]);
    parallel_stored_elements(
        op, g.numel(), dtype,
        [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_dropout_cpu(to, from, begin, end, p, philox, type);
        },
        writes(grad_input), reads(g));
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    // The tag tells torch.compile that a repeated call gives another result. But its common-subexpression elimination
    // has a list of PyTorch's own ops instead, and would merge two calls with the same arguments; `call`, which is not
    // read, makes them differ.
    library.def("dropout_forward(Tensor input, float p, Tensor? call=None) -> (Tensor output, Tensor state)",
                {at::Tag::nondeterministic_seeded});
    library.def("dropout_backward(Tensor grad_output, Tensor state, float p, SymInt[] stride) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "dropout_forward", cuda_ops::dropout_forward);
    CUDA_OPS_VMAP(library, "dropout_forward", "random p");
    CUDA_OPS_IMPLEMENT(library, "dropout_backward", cuda_ops::dropout_backward);
    CUDA_OPS_DERIVATIVES(library, "dropout_forward",
                         {"input: dropout_backward(grad_output, state, p, output.stride)",
                          "output <- dropout_backward(tangent_input, state, p, output.stride)"});
    library.def("dropout_add_forward(Tensor input, Tensor residual, float p, Tensor? call=None) -> (Tensor output, "
                "Tensor state)",
                {at::Tag::nondeterministic_seeded});
    CUDA_OPS_IMPLEMENT(library, "dropout_add_forward", cuda_ops::dropout_add_forward);
    CUDA_OPS_VMAP(library, "dropout_add_forward", "random p");
    CUDA_OPS_DERIVATIVES(library, "dropout_add_forward",
                         {"input: dropout_backward(grad_output, state, p, output.stride)", "residual: grad_output",
                          "output <- dropout_backward(tangent_input, state, p, output.stride)",
                          "output <- aten::expand(tangent_residual, output.size, false)"});
    // grad_output times forward's mask: linear, and its own gradient is the same product.
    CUDA_OPS_DERIVATIVES(library, "dropout_backward",
                         {"grad_output: dropout_backward(grad_grad_input, state, p, stride)",
                          "grad_input <- dropout_backward(tangent_grad_output, state, p, stride)"});
}
