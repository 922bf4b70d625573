// What the glue of layer_norm's ops shares: layer_norm and layer_norm_rounded.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "cuda_ops/layer_norm.h"
#include "parameters.h"

namespace cuda_ops
{

// Input seen as [rows, cols], cols being the elements of normalized_shape.
struct NormShape {
    int64_t rows = 1, cols = 1;

    NormShape(const char *op, const Tensor &input, at::IntArrayRef normalized_shape)
    {
        const int64_t dims = input.dim(), count = static_cast<int64_t>(normalized_shape.size());
        TORCH_CHECK(count > 0, op, ": expected normalized_shape to have at least one dimension, got []");
        TORCH_CHECK(count <= dims && input.sizes().slice(dims - count) == normalized_shape, op,
                    ": expected input to end in the dimensions of normalized_shape, ", normalized_shape, ", got shape ",
                    input.sizes());
        for (int64_t d = 0; d < dims; d++)
            (d < dims - count ? rows : cols) *= input.size(d);
    }

    bool empty() const
    {
        return rows == 0 || cols == 0;
    }
    // Rows that a thread of the CPU takes at least.
    int64_t grain() const
    {
        return std::max<int64_t>(ELEMENTWISE_GRAIN / 4 / cols, 1);
    }
};

// weight and bias, contiguous; undefined if not given.
struct NormParameters {
    Tensor weight, bias;
    cuda_ops_dtype dtype;

    NormParameters(const char *op, const std::optional<Tensor> &given_weight, const std::optional<Tensor> &given_bias,
                   const Tensor &input, at::IntArrayRef normalized_shape)
        : dtype(check_dtype(op, "input", input))
    {
        const auto check = [&](const char *name, const Tensor &tensor) {
            TORCH_CHECK(tensor.sizes() == normalized_shape, op, ": expected ", name,
                        " to have the shape normalized_shape, ", normalized_shape, ", got ", tensor.sizes());
            dtype = check_parameter(op, name, tensor, input);
            return tensor.contiguous();
        };
        if (given_weight)
            weight = check("weight", *given_weight);
        if (given_bias)
            bias = check("bias", *given_bias);
        if (given_weight && given_bias)
            check_like(op, "bias", *given_bias, "weight", *given_weight);
    }
};

inline const void *data_or_null(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

struct Normalized {
    Tensor output, sum, mean, rstd, state, mask;
};

// The same values at a multiple of 16 bytes.
inline Tensor contiguous_vectors(const Tensor &tensor)
{
    const Tensor dense = tensor.contiguous();
    return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 ? dense.clone() : dense;
}

// `residual`: NULL for the norm alone. `with_mask`: the mask of dropout, of p above 0, is wanted.
Normalized norm_forward(const char *op, cuda_ops_norm norm, const Tensor &input, const Tensor *residual,
                        at::IntArrayRef normalized_shape, const std::optional<Tensor> &weight,
                        const std::optional<Tensor> &bias, double eps, double p, bool with_mask = false);

// The mask that forward left, and the gradient by it.
struct Masked {
    const Tensor &mask;
    double p;
    Tensor grad_dropped;
};

// What is not wanted is returned empty. grad_weight and grad_bias are of the dtype of weight, or else of bias, or else
// of input, and so is the last one, the sums of grad_input over its rows.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(const char *op, cuda_ops_norm norm, const Tensor &grad_output,
                                                         const std::optional<Tensor> &grad_sum, const Tensor &input,
                                                         at::IntArrayRef normalized_shape,
                                                         const std::optional<Tensor> &weight, const Tensor *mean,
                                                         const Tensor &rstd, std::optional<at::ScalarType> bias_type,
                                                         std::array<bool, 4> wanted, Masked *masked = nullptr);

// ---- composed of registered ops ------------------------------------------------------------------------------------

using LayerNormBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const std::optional<Tensor> &,
                                                             const Tensor &, c10::SymIntArrayRef,
                                                             const std::optional<Tensor> &, const Tensor &,
                                                             const Tensor &, double, std::optional<at::ScalarType>,
                                                             std::array<bool, 3>);
using RmsNormBackward = std::tuple<Tensor, Tensor>(const Tensor &, const std::optional<Tensor> &, const Tensor &,
                                                   c10::SymIntArrayRef, const std::optional<Tensor> &, const Tensor &,
                                                   double, std::array<bool, 2>);

inline const auto &layer_norm_backward_op()
{
    static const auto op = registered_op<LayerNormBackward>("cuda_ops::layer_norm_backward");
    return op;
}
inline const auto &rms_norm_backward_op()
{
    static const auto op = registered_op<RmsNormBackward>("cuda_ops::rms_norm_backward");
    return op;
}

// Numbers below -2^62 are symbols to the dispatcher, which would end in an internal assertion of its own.
inline void check_normalized_shape(const char *op, c10::SymIntArrayRef normalized_shape)
{
    for (const c10::SymInt &size : normalized_shape)
        if (const std::optional<int64_t> number = size.maybe_as_int())
            TORCH_CHECK(*number >= 0, op, ": expected normalized_shape to have no negative number, got ", *number);
}

// The tangents of output and sum.
std::tuple<Tensor, Tensor>
add_layer_norm_tangents(const std::optional<Tensor> &tangent_input, const std::optional<Tensor> &tangent_residual,
                        const std::optional<Tensor> &tangent_weight, const std::optional<Tensor> &tangent_bias,
                        const Tensor &sum, c10::SymIntArrayRef normalized_shape, const std::optional<Tensor> &weight,
                        const Tensor &mean, const Tensor &rstd, const Tensor &state, double eps, double p);
std::tuple<Tensor, Tensor> add_rms_norm_tangents(const std::optional<Tensor> &tangent_input,
                                                 const std::optional<Tensor> &tangent_residual,
                                                 const std::optional<Tensor> &tangent_weight, const Tensor &sum,
                                                 c10::SymIntArrayRef normalized_shape,
                                                 const std::optional<Tensor> &weight, const Tensor &rstd,
                                                 const Tensor &state, double eps, double p);

} // namespace cuda_ops
