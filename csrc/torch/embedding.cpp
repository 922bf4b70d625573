// embedding and token_position_embedding for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <vector>

#include "autograd.h"
#include "empty.h"
#include "loss.h"
#include "vmap.h"

namespace cuda_ops
{

static IndexErrors embedding_index_errors("embedding", "input");
static IndexErrors token_index_errors("token_position_embedding", "tokens");

// The rows of a table, or of what goes in or out of it, are along the last dimension.
static void check_embedding_table(const char *op, const char *argument, const Tensor &weight)
{
    TORCH_CHECK(weight.dim() == 2, op, ": expected ", argument, " to have 2 dimensions, got shape ", weight.sizes());
    TORCH_CHECK_NOT_IMPLEMENTED(weight.size(0) < std::numeric_limits<int32_t>::max(), op, ": expected ", argument,
                                " to have less than 2^31 - 1 rows, got shape ", weight.sizes());
}

static void check_embedding_indices(const char *op, const char *argument, const Tensor &indices)
{
    TORCH_CHECK(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt, op, ": expected ", argument,
                " to be int64 or int32, got ", c10::getDtypeNames(indices.scalar_type()).first);
    TORCH_CHECK_NOT_IMPLEMENTED(indices.numel() <= std::numeric_limits<int32_t>::max(), op, ": expected ", argument,
                                " to have less than 2^31 elements, got shape ", indices.sizes());
}

// Throws IndexError for an index on the CPU that names no row.
static void check_indices_cpu(const IndexErrors &errors, const Tensor &indices, int64_t rows)
{
    const int index_bytes = static_cast<int>(indices.element_size());
    const int64_t bad =
        cuda_ops_embedding_find_bad_index_cpu(indices.const_data_ptr(), index_bytes, indices.numel(), rows);
    if (bad >= 0)
        errors.raise(rows, indices.view(-1)[bad].item<int64_t>(), bad);
}

static at::DimVector with_columns(at::IntArrayRef sizes, int64_t cols)
{
    at::DimVector result(sizes.begin(), sizes.end());
    result.push_back(cols);
    return result;
}

static int64_t row_grain(int64_t cols)
{
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(cols, 1));
}

// The last two arguments are backward's.
static Tensor embedding_forward(const Tensor &input, const Tensor &weight, int64_t /* padding_idx */,
                                bool /* scale_grad_by_freq */)
{
    const char *op = "embedding";
    const cuda_ops_dtype dtype = check_dtype(op, "weight", weight);
    check_embedding_table(op, "weight", weight);
    check_same_device(op, "input", input, "weight", weight);
    check_embedding_indices(op, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(weight));
    const Tensor i = input.contiguous(), w = weight.contiguous();
    const int64_t count = i.numel(), rows = w.size(0), cols = w.size(1);
    const int index_bytes = static_cast<int>(i.element_size());
    Tensor output = empty(with_columns(input.sizes(), cols), w.options());
    if (w.is_cuda()) {
        cuda_ops_index_error *error = embedding_index_errors.record();
        if (output.numel() == 0)
            return output;
        CUDA_OPS_LAUNCH(op, cuda_ops_embedding_forward_cuda(output.data_ptr(), error, w.const_data_ptr(),
                                                            i.const_data_ptr(), index_bytes, count, rows, cols, dtype,
                                                            current_stream(op)));
        embedding_index_errors.check_now(error);
        return output;
    }
    check_indices_cpu(embedding_index_errors, i, rows);
    if (output.numel() == 0)
        return output;
    parallel_ranges(op, count, row_grain(cols), [&](int64_t begin, int64_t end) {
        return cuda_ops_embedding_forward_cpu(output.data_ptr(), w.const_data_ptr(), i.const_data_ptr(), index_bytes,
                                              rows, cols, begin, end, dtype);
    });
    return output;
}

// The dtype of gradients of weights beside that of the output: the same, or float32 beside halves.
static cuda_ops_dtype check_gradient_dtype(const char *op, at::ScalarType dtype, const Tensor &grad_output)
{
    if (dtype == grad_output.scalar_type())
        return check_dtype(op, "grad_output", grad_output);
    const bool of_halves = is_half(grad_output.scalar_type());
    TORCH_CHECK(dtype == at::kFloat && of_halves, op, ": expected dtype to be that of grad_output, ",
                c10::getDtypeNames(grad_output.scalar_type()).first,
                of_halves ? ", or float32" : ""); // any number may have been passed as a dtype
    return CUDA_OPS_FLOAT32;
}

static void check_table_size(const char *op, at::IntArrayRef size)
{
    TORCH_CHECK(size.size() == 2 && size[0] >= 0 && size[1] >= 0, op,
                ": expected size to be that of a table, two sizes of at least 0, got ", size);
    TORCH_CHECK_NOT_IMPLEMENTED(size[0] < std::numeric_limits<int32_t>::max(), op,
                                ": expected size to have less than 2^31 - 1 rows, got ", size);
}

// Into grad_weight, which is added to where `accumulate` says so, or a new one.
static Tensor embedding_gradient(const Tensor &grad_output, const Tensor &input, at::IntArrayRef size,
                                 at::ScalarType weight_dtype, int64_t padding_idx, bool scale_grad_by_freq,
                                 Tensor grad_weight, [[maybe_unused]] bool accumulate)
{
    const char *op = "embedding_backward";
    // The launches on CUDA alone ask for it.
    [[maybe_unused]] const cuda_ops_dtype output_dtype = check_dtype(op, "grad_output", grad_output);
    const cuda_ops_dtype dtype = check_gradient_dtype(op, weight_dtype, grad_output);
    check_same_device(op, "input", input, "grad_output", grad_output);
    check_embedding_indices(op, "input", input);
    check_table_size(op, size);
    const at::DimVector expected = with_columns(input.sizes(), size[1]);
    TORCH_CHECK(grad_output.sizes() == at::IntArrayRef(expected), op, ": expected grad_output to have shape ",
                at::IntArrayRef(expected), ", got ", grad_output.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(), i = input.contiguous();
    const int64_t count = i.numel(), rows = size[0], cols = size[1];
    const int index_bytes = static_cast<int>(i.element_size());
    if (!grad_weight.defined())
        grad_weight = empty(size, g.options().dtype(weight_dtype));
    if (g.is_cuda())
        embedding_index_errors.record(); // raises what forward found, if it is known by now
    if (grad_weight.numel() == 0)
        return grad_weight;
    if (g.is_cuda()) {
        const Tensor workspace = empty_workspace(
            g, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_embedding_backward_workspace_cuda(count, rows, cols, output_dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_embedding_backward_cuda(grad_weight.data_ptr(), workspace.data_ptr(),
                                                             g.const_data_ptr(), i.const_data_ptr(), index_bytes, count,
                                                             rows, cols, padding_idx, scale_grad_by_freq, accumulate,
                                                             dtype, output_dtype, current_stream(op)));
        return grad_weight;
    }
    check_indices_cpu(embedding_index_errors, i, rows);
    std::vector<int64_t> starts(rows + 2), slots(count);
    check_status(op, cuda_ops_embedding_sort_cpu(starts.data(), slots.data(), i.const_data_ptr(), index_bytes, count,
                                                 rows, padding_idx));
    if (is_half(dtype)) {
        parallel_ranges(op, rows, row_grain(cols), [&](int64_t begin, int64_t end) {
            return cuda_ops_embedding_backward_cpu(grad_weight.data_ptr(), g.const_data_ptr(), starts.data(),
                                                   slots.data(), cols, scale_grad_by_freq, begin, end, dtype);
        });
        return grad_weight;
    }
    const Tensor wide = widened(g); // whose rows are read in the order of the indices
    parallel_rows(
        op, rows, 1, row_grain(cols), dtype,
        [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_embedding_backward_cpu(to, wide.const_data_ptr(), starts.data(), slots.data(), cols,
                                                   scale_grad_by_freq, begin, end, type);
        },
        writes(grad_weight, cols));
    return grad_weight;
}

static Tensor embedding_backward(const Tensor &grad_output, const Tensor &input, at::IntArrayRef size,
                                 at::ScalarType weight_dtype, int64_t padding_idx, bool scale_grad_by_freq)
{
    return embedding_gradient(grad_output, input, size, weight_dtype, padding_idx, scale_grad_by_freq, Tensor(), false);
}

// Adds the gradient to grad_weight, of which only the rows that `input` names are touched.
static void embedding_backward_add(const Tensor &grad_weight, const Tensor &grad_output, const Tensor &input)
{
    const char *const op = "embedding_backward_add";
    check_same_device(op, "grad_weight", grad_weight, "grad_output", grad_output);
    const auto gradient = [&](const Tensor &to) {
        return embedding_gradient(resolved(grad_output), resolved(input), grad_weight.sizes(),
                                  grad_weight.scalar_type(), -1, false, to, to.defined());
    };
    if (grad_weight.is_cuda() && grad_weight.is_contiguous() && !grad_weight.is_neg()) {
        gradient(grad_weight);
    } else {
        const at::AutoDispatchBelowADInplaceOrView below;
        grad_weight.add_(gradient(Tensor()));
    }
}

// Gradients and tangents of the two, composed of the ops, by way of the dispatcher.

static Tensor call_embedding(const Tensor &input, const Tensor &weight)
{
    static const auto op =
        registered_op<Tensor(const Tensor &, const Tensor &, int64_t, bool)>("cuda_ops::embedding_forward");
    return op.call(input, weight, -1, false);
}

static Tensor call_embedding_backward(const Tensor &grad_output, const Tensor &input, at::SymIntArrayRef size,
                                      at::ScalarType dtype)
{
    static const auto op =
        registered_op<Tensor(const Tensor &, const Tensor &, at::SymIntArrayRef, at::ScalarType, int64_t, bool)>(
            "cuda_ops::embedding_backward");
    return op.call(grad_output, input, size, dtype, -1, false);
}

// Of embedding_backward for its grad_output: the rows of `grad`, but for those that had no part in it.
static Tensor embedding_backward_grad_output(const Tensor &grad, const Tensor &input, at::ScalarType dtype,
                                             int64_t padding_idx, bool scale_grad_by_freq)
{
    Tensor result = call_embedding(input, grad);
    if (scale_grad_by_freq) {
        c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
        sizes.push_back(1);
        const at::ScalarType counting = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        const Tensor ones = at::ones_symint(sizes, grad.options().dtype(counting));
        const Tensor counts = call_embedding_backward(ones, input, {grad.sym_size(0), 1}, counting);
        result = result / call_embedding(input, counts);
    }
    if (padding_idx >= 0)
        result = at::masked_fill(result, at::eq(input, padding_idx).unsqueeze(-1), 0);
    return result.to(dtype);
}

// What forward checks of the sizes of its arguments.
static void check_token_positions(const char *op, const Tensor &tokens, const Tensor &token_weight,
                                  const Tensor &position_weight)
{
    check_embedding_table(op, "token_weight", token_weight);
    check_embedding_table(op, "position_weight", position_weight);
    check_like(op, "position_weight", position_weight, "token_weight", token_weight);
    check_same_device(op, "tokens", tokens, "token_weight", token_weight);
    check_embedding_indices(op, "tokens", tokens);
    TORCH_CHECK(position_weight.size(1) == token_weight.size(1), op,
                ": expected position_weight to have the columns of token_weight, ", token_weight.size(1),
                ", got shape ", position_weight.sizes());
    TORCH_CHECK(tokens.dim() >= 1, op, ": expected tokens to have a dimension of positions, got shape []");
    TORCH_CHECK(tokens.size(-1) <= position_weight.size(0), op, ": expected tokens to have at most ",
                position_weight.size(0), " positions, the rows of position_weight, got shape ", tokens.sizes());
}

static Tensor token_position_embedding_forward(const Tensor &tokens, const Tensor &token_weight,
                                               const Tensor &position_weight, at::ScalarType output_type)
{
    const char *op = "token_position_embedding";
    const cuda_ops_dtype dtype = check_dtype(op, "token_weight", token_weight);
    check_token_positions(op, tokens, token_weight, position_weight);
    cuda_ops_dtype output_dtype = dtype;
    if (output_type != token_weight.scalar_type()) {
        TORCH_CHECK_NOT_IMPLEMENTED(is_half(output_type) && dtype == CUDA_OPS_FLOAT32, op,
                                    ": expected dtype to be that of the weights, or float16 or bfloat16 beside float32 "
                                    "weights");
        output_dtype = output_type == at::kHalf ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    }
    const c10::OptionalDeviceGuard guard(at::device_of(token_weight));
    const Tensor i = tokens.contiguous(), w = token_weight.contiguous(), p = position_weight.contiguous();
    const int64_t rows = w.size(0), cols = w.size(1), positions = i.size(-1), count = i.numel();
    const int index_bytes = static_cast<int>(i.element_size());
    Tensor output = empty(with_columns(tokens.sizes(), cols), w.options().dtype(output_type));
    if (w.is_cuda()) {
        cuda_ops_index_error *error = token_index_errors.record();
        if (output.numel() == 0)
            return output;
        CUDA_OPS_LAUNCH(op, cuda_ops_token_position_embedding_forward_cuda(
                                output.data_ptr(), error, w.const_data_ptr(), p.const_data_ptr(), i.const_data_ptr(),
                                index_bytes, count / positions, positions, rows, cols, dtype, output_dtype,
                                current_stream(op)));
        token_index_errors.check_now(error);
        return output;
    }
    check_indices_cpu(token_index_errors, i, rows);
    if (output.numel() == 0)
        return output;
    const Tensor tokens_table = widened(w), positions_table = widened(p);
    parallel_rows(
        op, count, 1, row_grain(cols), output_dtype,
        [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_token_position_embedding_forward_cpu(to, tokens_table.const_data_ptr(),
                                                                 positions_table.const_data_ptr(), i.const_data_ptr(),
                                                                 index_bytes, rows, cols, positions, begin, end, type);
        },
        writes(output, cols));
    return output;
}

// grad_output: [..., positions, cols]; its sum over all but the last two, and zeros beyond the positions.
static Tensor position_embedding_backward(const Tensor &grad_output, at::IntArrayRef size, at::ScalarType weight_dtype)
{
    const char *op = "position_embedding_backward";
    // The launches on CUDA alone ask for it.
    [[maybe_unused]] const cuda_ops_dtype output_dtype = check_dtype(op, "grad_output", grad_output);
    const cuda_ops_dtype dtype = check_gradient_dtype(op, weight_dtype, grad_output);
    check_table_size(op, size);
    TORCH_CHECK(grad_output.dim() >= 2 && grad_output.size(-2) <= size[0] && grad_output.size(-1) == size[1], op,
                ": expected grad_output to have at most the rows and the columns of a table of size ", size,
                ", got shape ", grad_output.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous();
    const int64_t rows = size[0], cols = size[1], positions = g.size(-2);
    Tensor grad_weight = empty(size, g.options().dtype(weight_dtype));
    if (grad_weight.numel() == 0)
        return grad_weight;
    const int64_t batch = positions == 0 ? 0 : g.numel() / positions / cols;
    if (g.is_cuda()) {
        const Tensor workspace =
            empty_workspace(g, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_position_embedding_backward_workspace_cuda(
                                   batch, positions, cols, output_dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_position_embedding_backward_cuda(grad_weight.data_ptr(), workspace.data_ptr(),
                                                                      g.const_data_ptr(), batch, positions, rows, cols,
                                                                      dtype, output_dtype, current_stream(op)));
        return grad_weight;
    }
    const Tensor wide = widened(g);
    parallel_rows(
        op, rows, 1, row_grain(cols), dtype,
        [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_position_embedding_backward_cpu(to, wide.const_data_ptr(), batch, positions, cols, begin,
                                                            end, type);
        },
        writes(grad_weight, cols));
    return grad_weight;
}

// What rows `positions` of a table, or its tangent, are in an output of that size.
static Tensor position_rows(const Tensor &weight, at::SymIntArrayRef size, at::ScalarType dtype)
{
    TORCH_CHECK(weight.dim() == 2 && size.size() >= 2,
                "position_embedding_rows: expected weight to have 2 dimensions and "
                "size at least 2, got shapes ",
                weight.sym_sizes(), " and ", size);
    return weight.narrow_symint(0, 0, size[size.size() - 2]).to(dtype).expand_symint(size);
}

static Tensor token_embedding_tangent(const Tensor &tokens, const Tensor &tangent, at::ScalarType dtype)
{
    return call_embedding(tokens, tangent).to(dtype);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("embedding_forward(Tensor input, Tensor weight, int padding_idx, bool scale_grad_by_freq) -> (Tensor "
                "output)");
    library.def(
        "embedding_backward(Tensor grad_output, Tensor input, SymInt[] size, ScalarType dtype, int padding_idx, "
        "bool scale_grad_by_freq) -> (Tensor grad_weight)");
    library.def("embedding_backward_grad_output(Tensor grad, Tensor input, ScalarType dtype, int padding_idx, bool "
                "scale_grad_by_freq) -> Tensor",
                cuda_ops::embedding_backward_grad_output);
    library.def("embedding_backward_add(Tensor(a!) grad_weight, Tensor grad_output, Tensor input) -> ()");
    CUDA_OPS_IMPLEMENT(library, "embedding_backward_add", cuda_ops::embedding_backward_add);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "embedding_backward_add");
    // It is called where no gradients are recorded (cuda_ops/models/_gpt_ops.py).
    library.impl("embedding_backward_add", c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
    CUDA_OPS_IMPLEMENT(library, "embedding_forward", cuda_ops::embedding_forward);
    CUDA_OPS_VMAP(library, "embedding_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "embedding_backward", cuda_ops::embedding_backward);
    CUDA_OPS_DERIVATIVES(library, "embedding_forward",
                         {"weight: embedding_backward(grad_output, input, weight.size, weight.dtype, padding_idx, "
                          "scale_grad_by_freq)",
                          "output <- embedding_forward(input, tangent_weight, padding_idx, scale_grad_by_freq)"});
    CUDA_OPS_DERIVATIVES(library, "embedding_backward",
                         {"grad_output: embedding_backward_grad_output(grad_grad_weight, input, grad_output.dtype, "
                          "padding_idx, scale_grad_by_freq)",
                          "grad_weight <- embedding_backward(tangent_grad_output, input, size, dtype, padding_idx, "
                          "scale_grad_by_freq)"});
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("token_position_embedding_forward(Tensor tokens, Tensor token_weight, Tensor position_weight, "
                "ScalarType dtype) -> (Tensor output)");
    library.def("token_position_embedding_tangent(Tensor tokens, Tensor tangent, ScalarType dtype) -> Tensor",
                cuda_ops::token_embedding_tangent);
    library.def("position_embedding_rows(Tensor weight, SymInt[] size, ScalarType dtype) -> Tensor",
                cuda_ops::position_rows);
    library.def("position_embedding_backward(Tensor grad_output, SymInt[] size, ScalarType dtype) -> (Tensor "
                "grad_position_weight)");
    CUDA_OPS_IMPLEMENT(library, "token_position_embedding_forward", cuda_ops::token_position_embedding_forward);
    CUDA_OPS_IMPLEMENT(library, "position_embedding_backward", cuda_ops::position_embedding_backward);
    CUDA_OPS_DERIVATIVES(
        library, "token_position_embedding_forward",
        {"token_weight: embedding_backward(grad_output, tokens, token_weight.size, token_weight.dtype, -1, false)",
         "position_weight: position_embedding_backward(grad_output, position_weight.size, position_weight.dtype)",
         "output <- token_position_embedding_tangent(tokens, tangent_token_weight, dtype)",
         "output <- position_embedding_rows(tangent_position_weight, output.size, dtype)"});
    CUDA_OPS_DERIVATIVES(
        library, "position_embedding_backward",
        {"grad_output: position_embedding_rows(grad_grad_position_weight, grad_output.size, grad_output.dtype)",
         "grad_position_weight <- position_embedding_backward(tangent_grad_output, size, dtype)"});
}
