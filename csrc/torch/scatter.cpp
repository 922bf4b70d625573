// index_add and scatter_add for PyTorch, out of place and in place: checks, layouts, allocation and the choice of backend.
#include "cuda_ops/scatter.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "autograd.h"
#include "cpu_workspace.h"
#include "cuda_ops/embedding.h"
#include "empty.h"
#include "loss.h"

namespace cuda_ops
{

static IndexErrors index_add_errors("index_add", "index");
static IndexErrors scatter_add_errors("scatter_add", "index");

static void check_scatter_index(const char *op, const Tensor &index)
{
    TORCH_CHECK(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt, op,
                ": expected index to be int64 or int32, got ", c10::getDtypeNames(index.scalar_type()).first);
    TORCH_CHECK_NOT_IMPLEMENTED(index.numel() < std::numeric_limits<int32_t>::max(), op,
                                ": expected index to have less than 2^31 - 1 elements, got shape ", index.sizes());
}

// From 0 on; a tensor without dimensions is one of one element.
static int64_t check_scatter_dim(const char *op, int64_t dim, const Tensor &input)
{
    const int64_t bound = std::max<int64_t>(input.dim(), 1);
    TORCH_CHECK_INDEX(-bound <= dim && dim < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                      "] for an input of shape ", input.sizes(), ", got ", dim);
    return dim < 0 ? dim + bound : dim;
}

static int64_t product_of(at::IntArrayRef sizes)
{
    int64_t product = 1;
    for (const int64_t size : sizes)
        product *= size;
    return product;
}

// `shape` is that of input, of at least one dimension, `count` the source's along dim.
static cuda_ops_scatter_sizes scatter_sizes(const char *op, at::IntArrayRef shape, int64_t dim, int64_t count)
{
    const cuda_ops_scatter_sizes sizes{product_of(shape.slice(0, dim)), shape[dim], count,
                                       product_of(shape.slice(dim + 1))};
    const int64_t limit = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_NOT_IMPLEMENTED(sizes.rows < limit && sizes.outer * sizes.count < limit, op,
                                ": expected less than 2^31 - 1 rows, got an input of shape ", shape);
    return sizes;
}

static int64_t scatter_grain(int64_t inner)
{
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(inner, 1));
}

static void check_scattered_cpu(const IndexErrors &errors, const Tensor &index, int64_t rows)
{
    const int64_t bad = cuda_ops_embedding_find_bad_index_cpu(
        index.const_data_ptr(), static_cast<int>(index.element_size()), index.numel(), rows);
    if (bad >= 0)
        errors.raise(rows, index.view(-1)[bad].item<int64_t>(), bad);
}

// Shorter rows are added element by element, as they come; of longer ones it is worth finding out which come together.
constexpr int64_t FEWEST_COLUMNS_OF_ROWS = 16;

// Calls kernel(plan, begin, end, workspace) for all units of a plan for the CPU.
template <typename Kernel>
static void run_scatter_plan(const char *op, const cuda_ops_scatter_sizes &sizes, cuda_ops_dtype dtype,
                             const Kernel &kernel)
{
    const cuda_ops_scatter_plan plan = cuda_ops_scatter_plan_cpu(sizes, dtype);
    const int64_t unit = (sizes.rows + sizes.count) * plan.columns;
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, unit));
    parallel_ranges(op, plan.count, grain, [&](int64_t begin, int64_t end) {
        return kernel(&plan, begin, end, thread_workspace(static_cast<int64_t>(plan.workspace_bytes)));
    });
}

// Dense, of at least one dimension, and no view of its negative.
static Tensor with_a_dim(const Tensor &tensor)
{
    return (tensor.dim() == 0 ? tensor.view({1}) : tensor).contiguous().resolve_neg();
}

// ---- index_add -----------------------------------------------------------------------------------------------------

static void check_index_add(const char *op, const Tensor &input, int64_t dim, const Tensor &index, const Tensor &source)
{
    check_same_device(op, "index", index, "input", input);
    check_like(op, "source", source, "input", input);
    check_scatter_index(op, index);
    TORCH_CHECK_INDEX(index.dim() <= 1, op, ": expected index to have 1 dimension, got shape ", index.sizes());
    bool fits = source.dim() == input.dim() && (source.dim() == 0 ? 1 : source.size(dim)) == index.numel();
    for (int64_t d = 0; fits && d < input.dim(); d++)
        fits = d == dim || source.size(d) == input.size(d);
    TORCH_CHECK(fits, op, ": expected source to have the shape of input, ", input.sizes(), ", but ", index.numel(),
                " along dim ", dim, ", one for each index, got ", source.sizes());
}

// output[index[k]] = input + alpha * source[k]; all dense, `output` may be `input`. `errors`: whose index it is.
static void launch_index_add(const char *op, IndexErrors &errors, const Tensor &output, const Tensor &input,
                             int64_t dim, const Tensor &index, const Tensor &source, double alpha)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const Tensor i = index.contiguous(), s = source.contiguous().resolve_neg();
    const int index_bytes = static_cast<int>(i.element_size());
    const cuda_ops_scatter_sizes sizes = scatter_sizes(op, input.sizes(), dim, i.numel());
    if (input.is_cuda()) {
        cuda_ops_index_error *error = errors.record();
        const int deterministic = at::globalContext().deterministicAlgorithms();
        const Tensor workspace = empty_workspace(
            input, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_index_add_workspace_cuda(sizes, dtype, deterministic)));
        (void)index_bytes, (void)dtype, (void)alpha, (void)deterministic;
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_index_add_cuda(output.data_ptr(), error, workspace.data_ptr(), input.const_data_ptr(),
                                                s.const_data_ptr(), i.const_data_ptr(), index_bytes, sizes, alpha,
                                                dtype, deterministic, current_stream(op)));
        errors.check_now(error);
        return;
    }
    check_scattered_cpu(errors, i, sizes.rows);
    if (sizes.inner < FEWEST_COLUMNS_OF_ROWS) {
        run_scatter_plan(op, sizes, dtype,
                         [&](const cuda_ops_scatter_plan *plan, int64_t begin, int64_t end, void *workspace) {
                             return cuda_ops_index_add_elements_cpu(output.data_ptr(), input.const_data_ptr(),
                                                                    s.const_data_ptr(), i.const_data_ptr(), index_bytes,
                                                                    sizes, alpha, plan, begin, end, workspace, dtype);
                         });
        return;
    }
    std::vector<int64_t> starts(sizes.rows + 2), slots(sizes.count);
    check_status(op, cuda_ops_embedding_sort_cpu(starts.data(), slots.data(), i.const_data_ptr(), index_bytes,
                                                 sizes.count, sizes.rows, /*padding_index=*/-1));
    if (output.numel() > 0)
        parallel_ranges(op, sizes.outer * sizes.rows, scatter_grain(sizes.inner), [&](int64_t begin, int64_t end) {
            return cuda_ops_index_add_cpu(output.data_ptr(), input.const_data_ptr(), s.const_data_ptr(), starts.data(),
                                          slots.data(), sizes, alpha, begin, end, dtype);
        });
}

static Tensor index_add_forward(const Tensor &input, int64_t dim, const Tensor &index, const Tensor &source,
                                double alpha)
{
    const char *const op = "index_add";
    check_dtype(op, "input", input);
    const int64_t wrapped = check_scatter_dim(op, dim, input);
    check_index_add(op, input, wrapped, index, source);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = with_a_dim(input);
    Tensor output = empty(input.sizes(), input.options());
    launch_index_add(op, index_add_errors, output, x, wrapped, index, source, alpha);
    return output;
}

// For ops in place: refuses what overlaps, calls write(target) on dense memory of `input`, and tells autograd.
template <typename Write>
static void write_in_place(const char *op, Tensor &input, const Tensor &index, const char *source_name,
                           const Tensor &source, const Write &write)
{
    check_written(op, "input", input);
    check_no_overlap(op, "index", index, "input", input);
    check_no_overlap(op, source_name, source, "input", input);
    const Tensor x = with_a_dim(input);
    write(x);
    if (!x.is_alias_of(input))
        input.copy_(x.view(input.sizes()));
    input.unsafeGetTensorImpl()->bump_version();
}

static void index_add_inplace(Tensor &input, int64_t dim, const Tensor &index, const Tensor &source, double alpha)
{
    const char *const op = "index_add_";
    check_dtype(op, "input", input);
    const int64_t wrapped = check_scatter_dim(op, dim, input);
    check_index_add(op, input, wrapped, index, source);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    write_in_place(op, input, index, "source", source, [&](const Tensor &x) {
        launch_index_add(op, index_add_errors, x, x, wrapped, index, source, alpha);
    });
}

static Tensor index_add_backward(const Tensor &grad_output, int64_t dim, const Tensor &index, double alpha)
{
    const char *const op = "index_add_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    const int64_t wrapped = check_scatter_dim(op, dim, grad_output);
    check_same_device(op, "index", index, "grad_output", grad_output);
    check_scatter_index(op, index);
    TORCH_CHECK_INDEX(index.dim() <= 1, op, ": expected index to have 1 dimension, got shape ", index.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = with_a_dim(grad_output), i = index.contiguous();
    const int index_bytes = static_cast<int>(i.element_size());
    const cuda_ops_scatter_sizes sizes = scatter_sizes(op, g.sizes(), wrapped, i.numel());
    TORCH_CHECK(grad_output.dim() > 0 || i.numel() == 1, op,
                ": expected one index for grad_output of one element, got ", i.numel());
    at::DimVector shape(grad_output.sizes());
    if (!shape.empty())
        shape[wrapped] = i.numel();
    Tensor grad_source = empty(shape, g.options());
    if (g.is_cuda())
        index_add_errors.record(); // raises what forward found, if it is known by now
    if (grad_source.numel() == 0)
        return grad_source;
    if (g.is_cuda()) {
        (void)index_bytes, (void)dtype;
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_index_add_backward_cuda(grad_source.data_ptr(), g.const_data_ptr(), i.const_data_ptr(),
                                                         index_bytes, sizes, alpha, dtype, current_stream(op)));
        return grad_source;
    }
    parallel_ranges(op, sizes.outer * sizes.count, scatter_grain(sizes.inner), [&](int64_t begin, int64_t end) {
        return cuda_ops_index_add_backward_cpu(grad_source.data_ptr(), g.const_data_ptr(), i.const_data_ptr(),
                                               index_bytes, sizes, alpha, begin, end, dtype);
    });
    return grad_source;
}

// What a gradient, or a tangent, of source gives to a tensor of that size.
static Tensor index_add_zeros(const Tensor &grad, c10::SymIntArrayRef size, int64_t dim, const Tensor &index,
                              double alpha)
{
    static const auto op = registered_op<Tensor(const Tensor &, int64_t, const Tensor &, const Tensor &, double)>(
        "cuda_ops::index_add_forward");
    return op.call(at::zeros_symint(size, grad.options()), dim, index, grad, alpha);
}

// ---- scatter_add ---------------------------------------------------------------------------------------------------

// No dimension of index is longer than that of source, nor, but for dim, than that of input.
static void check_scatter_add(const char *op, const Tensor &input, int64_t dim, const Tensor &index,
                              const Tensor &source)
{
    check_same_device(op, "index", index, "input", input);
    check_like(op, "src", source, "input", input);
    check_scatter_index(op, index);
    if (index.numel() == 0)
        return;
    const int64_t rank = std::max<int64_t>(input.dim(), 1);
    const auto size = [](const Tensor &tensor, int64_t d) { return tensor.dim() == 0 ? 1 : tensor.size(d); };
    bool fits = std::max<int64_t>(index.dim(), 1) == rank && std::max<int64_t>(source.dim(), 1) == rank;
    for (int64_t d = 0; fits && d < rank; d++)
        fits = size(index, d) <= size(source, d) && (d == dim || size(index, d) <= size(input, d));
    TORCH_CHECK(fits, op, ": expected index to be no larger than src, of shape ", source.sizes(),
                ", nor, apart from dim ", dim, ", than input, of shape ", input.sizes(), ", got ", index.sizes());
}

// The first elements of a tensor, as many as `like` has, in all dimensions but `dim` (-1: in all).
static Tensor first_elements(const Tensor &tensor, const Tensor &like, int64_t dim)
{
    Tensor result = tensor;
    for (int64_t d = 0; d < result.dim(); d++)
        if (d != dim && result.size(d) != like.size(d))
            result = result.narrow(d, 0, like.size(d));
    return result;
}

// Whether there are other dimensions, and index is the same all along each: then whole rows are added.
static bool is_expanded(const Tensor &index, int64_t dim)
{
    if (index.numel() == index.size(dim))
        return false;
    for (int64_t d = 0; d < index.dim(); d++)
        if (d != dim && index.size(d) > 1 && index.stride(d) != 0)
            return false;
    return true;
}

// Adds to `output`, of at least one dimension, in place.
static void launch_scatter_add(const char *op, const Tensor &output, int64_t dim, const Tensor &given_index,
                               const Tensor &given_source)
{
    if (given_index.numel() == 0)
        return;
    const Tensor index = given_index.dim() == 0 ? given_index.view({1}) : given_index;
    const Tensor source = first_elements(given_source.dim() == 0 ? given_source.view({1}) : given_source, index, -1);
    const Tensor part = first_elements(output, index, dim), x = part.contiguous();
    if (is_expanded(index, dim)) {
        Tensor rows = index;
        for (int64_t d = index.dim() - 1; d >= 0; d--)
            if (d != dim)
                rows = rows.select(d, 0);
        launch_index_add(op, scatter_add_errors, x, x, dim, rows, source, 1);
    } else {
        const cuda_ops_dtype dtype = check_dtype(op, "input", x);
        const Tensor i = index.contiguous(), s = source.contiguous().resolve_neg();
        const int index_bytes = static_cast<int>(i.element_size());
        const cuda_ops_scatter_sizes sizes = scatter_sizes(op, x.sizes(), dim, i.size(dim));
        if (x.is_cuda()) {
            cuda_ops_index_error *error = scatter_add_errors.record();
            const int deterministic = at::globalContext().deterministicAlgorithms();
            const Tensor workspace = empty_workspace(
                x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_scatter_add_workspace_cuda(sizes, dtype, deterministic)));
            (void)index_bytes, (void)dtype, (void)deterministic;
            CUDA_OPS_LAUNCH(op, cuda_ops_scatter_add_cuda(x.data_ptr(), error, workspace.data_ptr(), s.const_data_ptr(),
                                                          i.const_data_ptr(), index_bytes, sizes, dtype, deterministic,
                                                          current_stream(op)));
            scatter_add_errors.check_now(error);
        } else {
            check_scattered_cpu(scatter_add_errors, i, sizes.rows);
            if (is_half(dtype)) { // summed in float32, and rounded once
                run_scatter_plan(op, sizes, dtype,
                                 [&](const cuda_ops_scatter_plan *plan, int64_t begin, int64_t end, void *workspace) {
                                     return cuda_ops_scatter_add_halves_cpu(x.data_ptr(), s.const_data_ptr(),
                                                                            i.const_data_ptr(), index_bytes, sizes,
                                                                            plan, begin, end, workspace, dtype);
                                 });
            } else
                parallel_ranges(
                    op, sizes.outer * sizes.inner, scatter_grain(sizes.count), [&](int64_t begin, int64_t end) {
                        return cuda_ops_scatter_add_cpu(x.data_ptr(), s.const_data_ptr(), i.const_data_ptr(),
                                                        index_bytes, sizes, begin, end, dtype);
                    });
        }
    }
    if (!x.is_same(part))
        part.copy_(x);
}

static Tensor scatter_add_forward(const Tensor &input, int64_t dim, const Tensor &index, const Tensor &src)
{
    const char *const op = "scatter_add";
    check_dtype(op, "input", input);
    const int64_t wrapped = check_scatter_dim(op, dim, input);
    check_scatter_add(op, input, wrapped, index, src);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    Tensor output = empty(input.sizes(), input.options());
    output.copy_(input);
    launch_scatter_add(op, with_a_dim(output), wrapped, index, src);
    return output;
}

static void scatter_add_inplace(Tensor &input, int64_t dim, const Tensor &index, const Tensor &src)
{
    const char *const op = "scatter_add_";
    check_dtype(op, "input", input);
    const int64_t wrapped = check_scatter_dim(op, dim, input);
    check_scatter_add(op, input, wrapped, index, src);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    write_in_place(op, input, index, "src", src,
                   [&](const Tensor &x) { launch_scatter_add(op, x, wrapped, index, src); });
}

// grad_output at the places that index names. `size`: that of src, which may be larger than index; zeros beyond it.
static Tensor scatter_add_backward(const Tensor &grad_output, int64_t dim, const Tensor &given_index,
                                   at::IntArrayRef size)
{
    const char *const op = "scatter_add_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    const int64_t wrapped = check_scatter_dim(op, dim, grad_output);
    TORCH_CHECK(are_sizes_of_a_tensor(size), op, ": expected size to be that of src, got ", size);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    Tensor grad_source = empty(size, grad_output.options());
    check_scatter_add(op, grad_output, wrapped, given_index, grad_source);
    if (grad_output.is_cuda())
        scatter_add_errors.record();
    if (given_index.sizes() != size)
        grad_source.zero_();
    if (given_index.numel() == 0)
        return grad_source;
    const Tensor index = with_a_dim(given_index);
    const Tensor g = first_elements(with_a_dim(grad_output), index, wrapped).contiguous();
    const Tensor part = first_elements(grad_source.dim() == 0 ? grad_source.view({1}) : grad_source, index, -1);
    const Tensor to = part.is_contiguous() ? part : at::empty(part.sizes(), part.options());
    const int index_bytes = static_cast<int>(index.element_size());
    const cuda_ops_scatter_sizes sizes = scatter_sizes(op, g.sizes(), wrapped, index.size(wrapped));
    if (g.is_cuda()) {
        (void)index_bytes, (void)dtype;
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_scatter_add_backward_cuda(to.data_ptr(), g.const_data_ptr(), index.const_data_ptr(),
                                                           index_bytes, sizes, dtype, current_stream(op)));
    } else {
        parallel_ranges(op, sizes.outer * sizes.count, scatter_grain(sizes.inner), [&](int64_t begin, int64_t end) {
            return cuda_ops_scatter_add_backward_cpu(to.data_ptr(), g.const_data_ptr(), index.const_data_ptr(),
                                                     index_bytes, sizes, begin, end, dtype);
        });
    }
    if (!to.is_same(part))
        part.copy_(to);
    return grad_source;
}

static Tensor scatter_add_zeros(const Tensor &grad, c10::SymIntArrayRef size, int64_t dim, const Tensor &index)
{
    static const auto op =
        registered_op<Tensor(const Tensor &, int64_t, const Tensor &, const Tensor &)>("cuda_ops::scatter_add_forward");
    return op.call(at::zeros_symint(size, grad.options()), dim, index, grad);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def(
        "index_add_forward(Tensor input, int dim, Tensor index, Tensor source, float alpha) -> (Tensor output)");
    library.def("index_add_inplace(Tensor(a!) input, int dim, Tensor index, Tensor source, float alpha) -> ()");
    library.def("index_add_backward(Tensor grad_output, int dim, Tensor index, float alpha) -> (Tensor grad_source)");
    library.def("index_add_zeros(Tensor grad, SymInt[] size, int dim, Tensor index, float alpha) -> Tensor",
                cuda_ops::index_add_zeros);
    CUDA_OPS_IMPLEMENT(library, "index_add_forward", cuda_ops::index_add_forward);
    CUDA_OPS_IMPLEMENT(library, "index_add_inplace", cuda_ops::index_add_inplace);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "index_add_inplace");
    CUDA_OPS_IMPLEMENT(library, "index_add_backward", cuda_ops::index_add_backward);
    CUDA_OPS_DERIVATIVES(library, "index_add_forward",
                         {"input: grad_output", "source: index_add_backward(grad_output, dim, index, alpha)",
                          "output <- aten::expand(tangent_input, output.size, false)",
                          "output <- index_add_zeros(tangent_source, output.size, dim, index, alpha)"});
    CUDA_OPS_DERIVATIVES(library, "index_add_inplace",
                         {"input: grad_output", "source: index_add_backward(grad_output, dim, index, alpha)"});
    CUDA_OPS_DERIVATIVES(library, "index_add_backward",
                         {"grad_output: index_add_zeros(grad_grad_source, grad_output.size, dim, index, alpha)",
                          "grad_source <- index_add_backward(tangent_grad_output, dim, index, alpha)"});
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("scatter_add_forward(Tensor input, int dim, Tensor index, Tensor src) -> (Tensor output)");
    library.def("scatter_add_inplace(Tensor(a!) input, int dim, Tensor index, Tensor src) -> ()");
    library.def("scatter_add_backward(Tensor grad_output, int dim, Tensor index, SymInt[] size) -> (Tensor grad_src)");
    library.def("scatter_add_zeros(Tensor grad, SymInt[] size, int dim, Tensor index) -> Tensor",
                cuda_ops::scatter_add_zeros);
    CUDA_OPS_IMPLEMENT(library, "scatter_add_forward", cuda_ops::scatter_add_forward);
    CUDA_OPS_IMPLEMENT(library, "scatter_add_inplace", cuda_ops::scatter_add_inplace);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "scatter_add_inplace");
    CUDA_OPS_IMPLEMENT(library, "scatter_add_backward", cuda_ops::scatter_add_backward);
    CUDA_OPS_DERIVATIVES(library, "scatter_add_forward",
                         {"input: grad_output", "src: scatter_add_backward(grad_output, dim, index, src.size)",
                          "output <- aten::expand(tangent_input, output.size, false)",
                          "output <- scatter_add_zeros(tangent_src, output.size, dim, index)"});
    CUDA_OPS_DERIVATIVES(library, "scatter_add_inplace",
                         {"input: grad_output", "src: scatter_add_backward(grad_output, dim, index, src.size)"});
    CUDA_OPS_DERIVATIVES(library, "scatter_add_backward",
                         {"grad_output: scatter_add_zeros(grad_grad_src, grad_output.size, dim, index)",
                          "grad_src <- scatter_add_backward(tangent_grad_output, dim, index, size)"});
}
