// concat for PyTorch: checks, allocation and the choice of backend; and its autograd, which is one of its own, since the
// lines that other ops' derivatives are (autograd.h) know no lists.
#include "cuda_ops/concat.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "vmap.h"

namespace cuda_ops
{

static const char *const CONCAT = "concat";

// As PyTorch: tensors of shape (0,) are passed over, whatever the others' dimensions.
static bool is_passed_over(const Tensor &tensor)
{
    return tensor.dim() == 1 && tensor.sym_size(0) == 0;
}

// The first tensor that counts, or the first one.
static const Tensor &concat_pattern(at::TensorList tensors)
{
    TORCH_CHECK(!tensors.empty(), CONCAT, ": expected tensors to have elements, got none");
    const auto *const found =
        std::find_if(tensors.begin(), tensors.end(), [](const Tensor &tensor) { return !is_passed_over(tensor); });
    return found == tensors.end() ? tensors.front() : *found;
}

static int64_t concat_dim(const Tensor &pattern, int64_t dim)
{
    if (is_passed_over(pattern)) // as all are: of none PyTorch asks for a dimension
        return 0;
    const int64_t rank = pattern.dim();
    TORCH_CHECK(rank > 0, CONCAT, ": expected tensors to have dimensions, got one that has none");
    TORCH_CHECK_INDEX(-rank <= dim && dim < rank, CONCAT, ": expected dim to be in [", -rank, ", ", rank - 1,
                      "] for tensors of shape ", pattern.sym_sizes(), ", got ", dim);
    return dim < 0 ? dim + rank : dim;
}

static Tensor concat_forward(at::TensorList tensors, int64_t given_dim)
{
    const Tensor &pattern = concat_pattern(tensors);
    check_dtype(CONCAT, "tensors[0]", tensors.front());
    const int64_t dim = concat_dim(pattern, given_dim);
    at::DimVector sizes(pattern.sizes());
    sizes[static_cast<size_t>(dim)] = 0;
    at::MemoryFormat format = pattern.suggest_memory_format();
    std::vector<const Tensor *> parts;
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor &tensor = tensors[i];
        const std::string name = "tensors[" + std::to_string(i) + "]";
        check_like(CONCAT, name.c_str(), tensor, "tensors[0]", tensors.front());
        if (is_passed_over(tensor) && pattern.dim() != 1)
            continue;
        bool fits = tensor.dim() == pattern.dim();
        for (int64_t d = 0; fits && d < pattern.dim(); d++)
            fits = d == dim || tensor.size(d) == pattern.size(d);
        TORCH_CHECK(fits, CONCAT, ": expected ", name, " to have the shape ", pattern.sizes(), " but along dimension ",
                    dim, ", got ", tensor.sizes());
        sizes[static_cast<size_t>(dim)] += tensor.size(dim);
        if (tensor.suggest_memory_format() != format)
            format = at::MemoryFormat::Contiguous;
        parts.push_back(&tensor);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(pattern));
    Tensor output = empty(sizes, pattern.options().memory_format(format));
    if (output.numel() == 0)
        return output;
    std::vector<Tensor> dense_parts;
    std::vector<const void *> inputs;
    std::vector<int64_t> cols;
    for (const Tensor *const part : parts) {
        dense_parts.push_back(part->contiguous(format));
        inputs.push_back(dense_parts.back().const_data_ptr());
        cols.push_back(part->size(dim));
    }
    // From the outermost dimension in memory on.
    int64_t outer = 1, inner = 1;
    bool is_inside = false;
    const std::vector<int64_t> last{0, 2, 3, 1};
    for (int64_t place = 0; place < output.dim(); place++) {
        const int64_t d = format == at::MemoryFormat::ChannelsLast ? last[static_cast<size_t>(place)] : place;
        if (d == dim)
            is_inside = true;
        else
            (is_inside ? inner : outer) *= output.size(d);
    }
    const auto count = static_cast<int64_t>(parts.size());
    const int bytes = static_cast<int>(output.element_size());
    if (output.is_cuda())
        CUDA_OPS_LAUNCH(CONCAT, cuda_ops_concat_cuda(output.data_ptr(), inputs.data(), cols.data(), count, outer, inner,
                                                     bytes, current_stream(CONCAT)));
    else
        parallel_ranges(CONCAT, output.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
            return cuda_ops_concat_cpu(output.data_ptr(), inputs.data(), cols.data(), count, outer, inner, begin, end,
                                       bytes);
        });
    return output;
}

namespace
{

using torch::autograd::Node;
using torch::autograd::variable_list;

// Gradients are views of the one that comes in.
struct ConcatBackward : public Node {
    int64_t dim = 0;
    std::vector<c10::SymInt> sizes; // along it
    std::vector<bool> passed_over;

    std::string name() const override
    {
        return "ConcatBackward";
    }

    variable_list apply(variable_list &&grads) override
    {
        variable_list results(sizes.size());
        const Tensor &grad = grads[0];
        if (!grad.defined())
            return results;
        c10::SymInt begin = 0;
        for (size_t i = 0; i < sizes.size(); i++) {
            if (task_should_compute_output(i))
                results[i] = passed_over[i] ? grad.new_zeros({0}) : grad.narrow_symint(dim, begin, sizes[i]);
            begin = begin + sizes[i];
        }
        return results;
    }
};

} // namespace

static Tensor concat_autograd(c10::DispatchKeySet keys, at::TensorList tensors, int64_t dim)
{
    static const auto op = registered_op<Tensor(at::TensorList, int64_t)>("cuda_ops::concat_forward");
    bool requires_grad = false, has_tangent = false;
    for (const Tensor &tensor : tensors) {
        requires_grad |= tensor.requires_grad();
        has_tangent |= tensor._fw_grad(0).defined();
    }
    std::shared_ptr<ConcatBackward> node;
    if (requires_grad && at::GradMode::is_enabled()) {
        node = std::shared_ptr<ConcatBackward>(new ConcatBackward, torch::autograd::deleteNode);
        const Tensor &pattern = concat_pattern(tensors);
        node->dim = concat_dim(pattern, dim);
        torch::autograd::edge_list edges;
        for (const Tensor &tensor : tensors) {
            edges.push_back(torch::autograd::impl::gradient_edge(tensor));
            const bool passed_over = is_passed_over(tensor) && pattern.dim() != 1;
            node->passed_over.push_back(passed_over);
            node->sizes.push_back(passed_over || tensor.dim() <= node->dim ? c10::SymInt(0)
                                                                           : tensor.sym_size(node->dim));
        }
        node->set_next_edges(std::move(edges));
    }
    Tensor output;
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        output = op.redispatch(keys & c10::after_ADInplaceOrView_keyset, tensors, dim);
    }
    if (node)
        torch::autograd::set_history(output, node);
    if (has_tangent) {
        std::vector<Tensor> tangents;
        for (const Tensor &tensor : tensors) {
            const Tensor tangent = tensor._fw_grad(0);
            tangents.push_back(tangent.defined() ? tangent : at::zeros_like(tensor._fw_primal(0)));
        }
        output._set_fw_grad(op.call(tangents, dim), 0, false);
    }
    return output;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("concat_forward(Tensor[] tensors, int dim) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "concat_forward", cuda_ops::concat_forward);
    CUDA_OPS_VMAP(library, "concat_forward", "tensors[1], dim");
    library.impl("concat_forward", torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(cuda_ops::concat_autograd)));
}
