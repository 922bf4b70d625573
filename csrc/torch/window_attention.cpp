// window_attention for PyTorch: checks, allocation and the choice of backend. Its further derivatives are composed of
// PyTorch's ops by cuda_ops/ops/window_attention.py.
#include "cuda_ops/window_attention.h"

#include <ATen/ops/zeros_like.h>

#include <optional>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "parameters.h"
#include "vmap.h"

namespace cuda_ops
{

static cuda_ops_windows windows_of(const char *op, const Tensor &qkv, const std::optional<Tensor> &bias,
                                   int64_t num_heads, at::IntArrayRef window_size, at::IntArrayRef shift_size,
                                   bool grid, double scale)
{
    check_dtype(op, "qkv", qkv);
    TORCH_CHECK(qkv.dim() == 4, op, ": expected qkv to have 4 dimensions, images, height, width and channels, got ",
                qkv.dim());
    TORCH_CHECK(num_heads > 0, op, ": expected num_heads to be positive, got ", num_heads);
    TORCH_CHECK(qkv.size(3) % 3 == 0 && qkv.size(3) / 3 % num_heads == 0, op,
                ": expected qkv to have queries, keys and values of ", num_heads, " heads, got ", qkv.size(3),
                " channels");
    TORCH_CHECK(window_size.size() == 2 && shift_size.size() == 2, op,
                ": expected window_size and shift_size to have 2 values, got ", window_size, " and ", shift_size);
    for (int d = 0; d < 2; d++) {
        TORCH_CHECK(window_size[d] > 0 && qkv.size(1 + d) % window_size[d] == 0, op,
                    ": expected window_size to divide [", qkv.size(1), ", ", qkv.size(2), "], got ", window_size);
        TORCH_CHECK(shift_size[d] >= 0 && shift_size[d] < window_size[d], op,
                    ": expected shift_size to be in [0, window_size), got ", shift_size);
        TORCH_CHECK(!grid || shift_size[d] == 0, op, ": expected shift_size to be 0 with grid, got ", shift_size);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        window_size[0] <= CUDA_OPS_WINDOW_POSITIONS && window_size[0] * window_size[1] <= CUDA_OPS_WINDOW_POSITIONS, op,
        ": expected window_size to be of at most ", CUDA_OPS_WINDOW_POSITIONS, " pixels, got ", window_size);
    if (bias) {
        check_parameter(op, "bias", *bias, qkv);
        const int64_t positions = window_size[0] * window_size[1];
        TORCH_CHECK(bias->sizes().equals({num_heads, positions, positions}), op, ": expected bias to have shape [",
                    num_heads, ", ", positions, ", ", positions, "], got ", bias->sizes());
    }
    cuda_ops_windows w{};
    w.images = qkv.size(0), w.height = qkv.size(1), w.width = qkv.size(2);
    w.heads = num_heads, w.head_dim = qkv.size(3) / 3 / num_heads;
    w.window_height = window_size[0], w.window_width = window_size[1];
    w.shift_y = shift_size[0], w.shift_x = shift_size[1];
    w.grid = grid, w.scale = scale;
    return w;
}

// Bias as the kernels take it.
static Tensor bias_of_windows(const std::optional<Tensor> &bias, at::ScalarType type)
{
    return bias ? bias->to(type == at::kDouble ? at::kDouble : at::kFloat).contiguous() : Tensor();
}

static const void *window_bias_data(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Windows' heads that are worth a thread.
static int64_t window_grain(const cuda_ops_windows &w)
{
    const int64_t positions = cuda_ops_window_positions(&w);
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, positions * positions * w.head_dim));
}

static Tensor window_attention_forward(const Tensor &qkv, const std::optional<Tensor> &bias, int64_t num_heads,
                                       at::IntArrayRef window_size, at::IntArrayRef shift_size, bool grid, double scale)
{
    const char *const op = "window_attention";
    const cuda_ops_windows w = windows_of(op, qkv, bias, num_heads, window_size, shift_size, grid, scale);
    const c10::OptionalDeviceGuard guard(at::device_of(qkv));
    const Tensor x = widened(resolved(qkv).contiguous()), b = bias_of_windows(bias, qkv.scalar_type());
    const Tensor output = empty({w.images, w.height, w.width, w.heads * w.head_dim}, x.options());
    if (output.numel() == 0)
        return output.to(qkv.scalar_type());
    const cuda_ops_dtype dtype = check_dtype(op, "qkv", x);
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_window_attention_forward_cuda(output.data_ptr(), x.const_data_ptr(),
                                                                   window_bias_data(b), &w, dtype, current_stream(op)));
    else
        parallel_ranges(op, cuda_ops_window_count(&w) * w.heads, window_grain(w), [&](int64_t begin, int64_t end) {
            return cuda_ops_window_attention_forward_cpu(output.data_ptr(), x.const_data_ptr(), window_bias_data(b), &w,
                                                         begin, end, dtype);
        });
    return output.to(qkv.scalar_type());
}

// So many parts of the windows on the CPU, whatever the number of threads: sums of bias's gradient do not depend on it.
static constexpr int64_t WINDOW_CHUNKS = 32;

static std::tuple<Tensor, Tensor> window_attention_backward(const Tensor &grad_output, const Tensor &qkv,
                                                            const std::optional<Tensor> &bias, int64_t num_heads,
                                                            at::IntArrayRef window_size, at::IntArrayRef shift_size,
                                                            bool grid, double scale, bool wants_bias)
{
    const char *const op = "window_attention_backward";
    const cuda_ops_windows w = windows_of(op, qkv, bias, num_heads, window_size, shift_size, grid, scale);
    check_like(op, "grad_output", grad_output, "qkv", qkv);
    TORCH_CHECK(grad_output.sizes().equals({w.images, w.height, w.width, w.heads * w.head_dim}), op,
                ": expected grad_output to have output's shape, got ", grad_output.sizes());
    TORCH_CHECK(bias || !wants_bias, op, ": expected bias, whose gradient is wanted, to be a Tensor, got None");
    const c10::OptionalDeviceGuard guard(at::device_of(qkv));
    const Tensor x = widened(resolved(qkv).contiguous()), g = widened(resolved(grad_output).contiguous());
    const Tensor b = bias_of_windows(bias, qkv.scalar_type());
    const Tensor grad_qkv = empty(x.sizes(), x.options());
    Tensor grad_bias = !wants_bias             ? empty({0}, x.options())
                       : grad_qkv.numel() == 0 ? at::zeros_like(b)
                                               : empty(b.sizes(), b.options());
    if (grad_qkv.numel() > 0) {
        const cuda_ops_dtype dtype = check_dtype(op, "qkv", x);
        if (x.is_cuda()) {
            Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
            workspace = empty_bytes(cuda_ops_window_attention_workspace_cuda(&w, wants_bias, dtype), x);
#endif
            CUDA_OPS_LAUNCH(op, cuda_ops_window_attention_backward_cuda(
                                    grad_qkv.data_ptr(), wants_bias ? grad_bias.data_ptr() : nullptr,
                                    workspace.defined() ? workspace.data_ptr() : nullptr, g.const_data_ptr(),
                                    x.const_data_ptr(), window_bias_data(b), &w, dtype, current_stream(op)));
        } else {
            const int64_t chunks = std::min(WINDOW_CHUNKS, cuda_ops_window_count(&w));
            const int64_t positions = cuda_ops_window_positions(&w);
            const Tensor partials = wants_bias ? empty({chunks, w.heads, positions, positions}, b.options()) : Tensor();
            parallel_ranges(op, chunks * w.heads, 1, [&](int64_t begin, int64_t end) {
                return cuda_ops_window_attention_backward_cpu(
                    grad_qkv.data_ptr(), partials.defined() ? partials.data_ptr() : nullptr, g.const_data_ptr(),
                    x.const_data_ptr(), window_bias_data(b), &w, chunks, begin, end, dtype);
            });
            if (wants_bias)
                grad_bias = partials.sum(0);
        }
    }
    return {grad_qkv.to(qkv.scalar_type()), wants_bias ? grad_bias.to(bias->scalar_type()) : grad_bias};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("window_attention_forward(Tensor qkv, Tensor? bias, int num_heads, int[2] window_size, int[2] "
                "shift_size, bool grid, float scale) -> (Tensor output)");
    library.def("window_attention_backward(Tensor grad_output, Tensor qkv, Tensor? bias, int num_heads, int[2] "
                "window_size, int[2] shift_size, bool grid, float scale, bool wants_bias) -> (Tensor grad_qkv, Tensor "
                "grad_bias)");
    library.def("window_attention_gradients(Tensor grad_output, Tensor qkv, Tensor? bias, int num_heads, int[2] "
                "window_size, int[2] shift_size, bool grid, float scale, bool[2] wanted) -> Tensor[]");
    library.def("window_attention_tangent(Tensor? tangent_qkv, Tensor? tangent_bias, Tensor qkv, Tensor? bias, int "
                "num_heads, int[2] window_size, int[2] shift_size, bool grid, float scale) -> (Tensor tangent_output)");
    CUDA_OPS_IMPLEMENT(library, "window_attention_forward", cuda_ops::window_attention_forward);
    CUDA_OPS_IMPLEMENT(library, "window_attention_backward", cuda_ops::window_attention_backward);
    CUDA_OPS_AUTOCAST(library, "window_attention_forward", INPUT_ONLY);
    CUDA_OPS_VMAP(library, "window_attention_forward", "qkv*");
    CUDA_OPS_DERIVATIVES(
        library, "window_attention_forward",
        {"qkv, bias: window_attention_backward(grad_output, qkv, bias, num_heads, window_size, shift_size, grid, "
         "scale, "
         "wants_bias) or window_attention_gradients(grad_output, qkv, bias, num_heads, window_size, shift_size, grid, "
         "scale, wanted)",
         "output <- window_attention_tangent(tangent_qkv, tangent_bias, qkv, bias, num_heads, window_size, shift_size, "
         "grid, scale)"});
}
