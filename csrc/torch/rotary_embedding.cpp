// rotary_embedding for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/rotary_embedding.h"

#include <optional>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

// Laid out as `like` is: rows within heads, or heads within rows.
static Tensor empty_as(const Tensor &like, at::ScalarType type)
{
    const auto options = like.options().dtype(type);
    if (like.stride(1) < like.stride(2))
        return empty({like.size(0), like.size(2), like.size(1), like.size(3)}, options).transpose(1, 2);
    return empty(like.sizes(), options);
}

static void set_strides(int64_t (&strides)[3], const Tensor &tensor)
{
    for (int64_t d = 0; d < 3; d++)
        strides[d] = tensor.stride(d);
}

static Tensor rotated(const char *op, const char *name, const Tensor &input, const Tensor &cos, const Tensor &sin,
                      std::optional<at::ScalarType> wanted, bool transposed)
{
    check_dtype(op, name, input);
    check_dtype(op, "cos", cos);
    check_like(op, "sin", sin, "cos", cos);
    check_same_shape(op, "sin", sin, "cos", cos);
    check_same_device(op, "cos", cos, name, input);
    check_dim(op, name, input, 4, 4);
    TORCH_CHECK(input.size(3) % 2 == 0, op, ": expected ", name,
                " to have an even last dimension, of pairs, got shape ", input.sizes());
    TORCH_CHECK(cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == input.size(0)) && cos.size(1) == input.size(2) &&
                    cos.size(2) == input.size(3),
                op, ": expected cos to have shape [", input.size(0), " or 1, ", input.size(2), ", ", input.size(3),
                "], the batch, length and features of ", name, ", got ", cos.sizes());
    const at::ScalarType own = input.scalar_type(), promoted = c10::promoteTypes(own, cos.scalar_type());
    const at::ScalarType type = wanted.value_or(promoted);
    TORCH_CHECK(type == at::kFloat || type == at::kDouble || is_half(type), op,
                ": expected dtype to be floating point, got ", c10::toString(type));
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    // What the kernels do not take beside each other is computed in the dtype to which all promote.
    const at::ScalarType wide = c10::promoteTypes(promoted, type);
    const at::ScalarType computed = is_half(wide) && input.is_cpu() ? at::kFloat : wide;
    const auto narrows = [&](at::ScalarType other) { return other == own || other == at::kFloat; };
    const bool alike = own == cos.scalar_type() && own == type;
    const bool mixed = computed == at::kFloat && (is_half(own) ? narrows(type) : is_half(type));
    const bool as_they_are = input.is_cuda() && (alike || mixed);
    Tensor x = as_they_are ? input : input.to(computed);
    const at::ScalarType table_type = as_they_are ? (alike ? own : at::kFloat) : computed;
    if (x.stride(3) != 1)
        x = x.contiguous();
    const bool one_table = cos.size(0) == 1;
    const Tensor c = cos.to(table_type).contiguous(), s = sin.to(table_type).contiguous();
    Tensor output = empty_as(input, as_they_are ? type : computed);
    if (output.numel() > 0) {
        cuda_ops_rotary_embedding_call call = {};
        call.batch = x.size(0), call.heads = x.size(1), call.length = x.size(2), call.features = x.size(3);
        set_strides(call.input_strides, x);
        set_strides(call.output_strides, output);
        call.table_stride = one_table ? 0 : call.length * call.features;
        call.transposed = transposed;
        call.dtype = check_dtype(op, name, x);
        call.table_dtype = check_dtype(op, "cos", c);
        call.output_dtype = check_dtype(op, "output", output);
        if (x.is_cuda())
            CUDA_OPS_LAUNCH(op,
                            cuda_ops_rotary_embedding_cuda(output.data_ptr(), x.const_data_ptr(), c.const_data_ptr(),
                                                           s.const_data_ptr(), &call, current_stream(op)));
        else
            parallel_ranges(
                op, call.batch * call.length, std::max<int64_t>(1, ELEMENTWISE_GRAIN / (call.heads * call.features)),
                [&](int64_t begin, int64_t end) {
                    return cuda_ops_rotary_embedding_cpu(output.data_ptr(), x.const_data_ptr(), c.const_data_ptr(),
                                                         s.const_data_ptr(), &call, begin, end);
                });
    }
    return output.to(type);
}

static Tensor rotary_embedding_forward(const Tensor &input, const Tensor &cos, const Tensor &sin,
                                       std::optional<at::ScalarType> dtype)
{
    return rotated("rotary_embedding", "input", input, cos, sin, dtype, false);
}

static Tensor rotary_embedding_backward(const Tensor &grad_output, const Tensor &cos, const Tensor &sin,
                                        at::ScalarType dtype)
{
    return rotated("rotary_embedding_backward", "grad_output", grad_output, cos, sin, dtype, true);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("rotary_embedding_forward(Tensor input, Tensor cos, Tensor sin, ScalarType? dtype) -> (Tensor output)");
    library.def("rotary_embedding_backward(Tensor grad_output, Tensor cos, Tensor sin, ScalarType dtype)"
                " -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "rotary_embedding_forward", cuda_ops::rotary_embedding_forward);
    CUDA_OPS_IMPLEMENT(library, "rotary_embedding_backward", cuda_ops::rotary_embedding_backward);
    // The output is linear in the input: backward turns the other way, and its own gradient is the way back.
    CUDA_OPS_DERIVATIVES(library, "rotary_embedding_forward",
                         {"input: rotary_embedding_backward(grad_output, cos, sin, input.dtype)",
                          "cos, sin: not differentiable",
                          "output <- rotary_embedding_forward(tangent_input, cos, sin, output.dtype)"});
    CUDA_OPS_DERIVATIVES(library, "rotary_embedding_backward",
                         {"grad_output: rotary_embedding_forward(grad_grad_input, cos, sin, grad_output.dtype)",
                          "cos, sin: not differentiable",
                          "grad_input <- rotary_embedding_backward(tangent_grad_output, cos, sin, dtype)"});
}
