// polynomial for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/polynomial.h"

#include <ATen/TensorOperators.h>

#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "vmap.h"

namespace cuda_ops
{

static int64_t check_coefficients(const char *op, at::ArrayRef<double> coefficients)
{
    const int64_t count = static_cast<int64_t>(coefficients.size());
    TORCH_CHECK(1 <= count && count <= CUDA_OPS_POLYNOMIAL_MAX, op, ": expected coefficients to have 1 to ",
                CUDA_OPS_POLYNOMIAL_MAX, " elements, got ", count);
    return count;
}

static Tensor polynomial_forward(const Tensor &input, at::ArrayRef<double> coefficients)
{
    const cuda_ops_dtype dtype = check_dtype("polynomial", "input", input);
    const int64_t coefficient_count = check_coefficients("polynomial", coefficients);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    Tensor output = empty_like_dense(x);
    if (x.numel() == 0)
        return output;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("polynomial", cuda_ops_polynomial_forward_cuda(output.data_ptr(), x.const_data_ptr(), x.numel(),
                                                                       coefficients.data(), coefficient_count, dtype,
                                                                       current_stream("polynomial")));
    else
        parallel_elements(
            "polynomial", x.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_polynomial_forward_cpu(to, from, begin, end, coefficients.data(), coefficient_count,
                                                       type);
            },
            writes(output), reads(x));
    return output;
}

static Tensor polynomial_backward(const Tensor &grad_output, const Tensor &input, at::ArrayRef<double> coefficients)
{
    const cuda_ops_dtype dtype = check_dtype("polynomial_backward", "input", input);
    const int64_t coefficient_count = check_coefficients("polynomial_backward", coefficients);
    check_like("polynomial_backward", "grad_output", grad_output, "input", input);
    check_same_shape("polynomial_backward", "grad_output", grad_output, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    const Tensor g = dense_like(grad_output, x);
    Tensor grad_input = empty_like_dense(x);
    if (x.numel() == 0)
        return grad_input;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("polynomial_backward",
                        cuda_ops_polynomial_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), x.const_data_ptr(),
                                                          x.numel(), coefficients.data(), coefficient_count, dtype,
                                                          current_stream("polynomial_backward")));
    else
        parallel_elements(
            "polynomial_backward", x.numel(), dtype,
            [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_polynomial_backward_cpu(to, grad, from, begin, end, coefficients.data(),
                                                        coefficient_count, type);
            },
            writes(grad_input), reads(g), reads(x));
    return grad_input;
}

// The derivative of grad_input = grad_output * p'(input) by input, times `tangent`: the backward of p'. Elementwise, so
// that backward and forward mode share it.
static Tensor polynomial_backward_input(const Tensor &tangent, const Tensor &grad_output, const Tensor &input,
                                        at::ArrayRef<double> coefficients)
{
    static const auto op = registered_op<decltype(polynomial_backward)>("cuda_ops::polynomial_backward");
    std::vector<double> derivative; // the coefficients of p'; a constant keeps one coefficient, 0
    for (size_t power = 1; power < coefficients.size(); power++)
        derivative.push_back(static_cast<double>(power) * coefficients[power]);
    if (derivative.empty())
        derivative.push_back(0);
    return op.call(tangent * grad_output, input, derivative);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("polynomial_forward(Tensor input, float[] coefficients) -> (Tensor output)");
    library.def("polynomial_backward(Tensor grad_output, Tensor input, float[] coefficients) -> (Tensor grad_input)");
    library.def("polynomial_backward_input(Tensor tangent, Tensor grad_output, Tensor input, float[] coefficients) "
                "-> Tensor",
                cuda_ops::polynomial_backward_input);
    CUDA_OPS_IMPLEMENT(library, "polynomial_forward", cuda_ops::polynomial_forward);
    CUDA_OPS_VMAP(library, "polynomial_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "polynomial_backward", cuda_ops::polynomial_backward);
    CUDA_OPS_VMAP(library, "polynomial_backward", "grad_output, input");
    CUDA_OPS_DERIVATIVES(library, "polynomial_forward",
                         {"input: polynomial_backward(grad_output, input, coefficients)",
                          "output <- polynomial_backward(tangent_input, input, coefficients)"});
    CUDA_OPS_DERIVATIVES(library, "polynomial_backward",
                         {"grad_output: polynomial_backward(grad_grad_input, input, coefficients)",
                          "input: polynomial_backward_input(grad_grad_input, grad_output, input, coefficients)",
                          "grad_input <- polynomial_backward(tangent_grad_output, input, coefficients)",
                          "grad_input <- polynomial_backward_input(tangent_input, grad_output, input, coefficients)"});
}
