// attention of packed sequences, for PyTorch: query [rows, heads, head_dim], of which sequence b has rows
// [cu_seqlens_q[b], cu_seqlens_q[b + 1]), and likewise key and value. Nothing is copied, and no length is read by the host.
#include "attention.h"

#include <ATen/ops/empty.h>

#include <limits>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "halves.h"

namespace cuda_ops
{

// [rows, heads, elements].
static cuda_ops_attention_strides packed_strides(const Tensor &tensor)
{
    return {0, tensor.stride(1), tensor.stride(0)};
}

static void check_starts(const char *op, const char *argument, const Tensor &starts, const Tensor &query)
{
    check_same_device(op, argument, starts, "query", query);
    TORCH_CHECK(starts.scalar_type() == at::kInt, op, ": expected ", argument, " to be int32, got ",
                c10::getDtypeNames(starts.scalar_type()).first);
    TORCH_CHECK(starts.dim() == 1 && starts.size(0) > 0, op, ": expected ", argument,
                " to have shape [sequences + 1], got ", starts.sizes());
}

struct PackedCall {
    cuda_ops_attention call = {};
    Tensor query_starts, key_starts, slopes; // which the call points to
    cuda_ops_dtype dtype;
};

// Of operands whose rows are dense.
static PackedCall packed_call(const char *op, const Tensor &query, const Tensor &key, const Tensor &value,
                              const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k,
                              const std::optional<Tensor> &alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                              const AttentionOptions &options, bool bottom_right)
{
    PackedCall packed;
    packed.dtype = check_dtype(op, "query", query);
    check_like(op, "key", key, "query", query);
    check_like(op, "value", value, "query", query);
    check_dim(op, "query", query, 3, 3);
    check_dim(op, "key", key, 3, 3);
    check_dim(op, "value", value, 3, 3);
    TORCH_CHECK(value.size(0) == key.size(0) && value.size(1) == key.size(1), op,
                ": expected value to have the rows and the heads of key, got shapes ", value.sizes(), " and ",
                key.sizes());
    TORCH_CHECK(key.size(2) == query.size(2), op, ": expected key to have the last dimension of query, ", query.size(2),
                ", got ", key.size(2));
    TORCH_CHECK(query.size(1) == 0 || (key.size(1) > 0 && query.size(1) % key.size(1) == 0), op,
                ": expected the heads of key to divide those of query, ", query.size(1), ", got ", key.size(1));
    check_starts(op, "cu_seqlens_q", cu_seqlens_q, query);
    check_starts(op, "cu_seqlens_k", cu_seqlens_k, query);
    TORCH_CHECK(cu_seqlens_k.size(0) == cu_seqlens_q.size(0), op,
                ": expected cu_seqlens_k to have the shape of cu_seqlens_q, ", cu_seqlens_q.sizes(), ", got ",
                cu_seqlens_k.sizes());
    TORCH_CHECK(max_seqlen_q >= 0 && max_seqlen_k >= 0, op,
                ": expected max_seqlen_q and max_seqlen_k to be 0 or more, got ", max_seqlen_q, " and ", max_seqlen_k);
    check_attention_options(op, options);
    cuda_ops_attention &call = packed.call;
    call.batch = cu_seqlens_q.size(0) - 1, call.heads = query.size(1), call.key_heads = key.size(1);
    call.queries = std::min(max_seqlen_q, query.size(0)), call.keys = std::min(max_seqlen_k, key.size(0));
    call.head_dim = query.size(2), call.value_dim = value.size(2);
    call.query = packed_strides(query), call.key = packed_strides(key), call.value = packed_strides(value);
    set_attention_options(call, options);
    set_attention_slopes(op, packed.slopes, call, alibi_slopes, query);
    packed.query_starts = cu_seqlens_q.contiguous(), packed.key_starts = cu_seqlens_k.contiguous();
    call.sequences.query_starts = packed.query_starts.const_data_ptr<int32_t>();
    call.sequences.key_starts = packed.key_starts.const_data_ptr<int32_t>();
    call.sequences.query_rows = query.size(0), call.sequences.key_rows = key.size(0);
    call.sequences.bottom_right = bottom_right;
    return packed;
}

static double packed_products(const cuda_ops_attention &call, int64_t dims)
{
    return static_cast<double>(call.sequences.query_rows) * static_cast<double>(call.heads) *
           static_cast<double>(call.keys) * static_cast<double>(dims);
}

static std::tuple<Tensor, Tensor> attention_varlen_forward(const Tensor &query, const Tensor &key, const Tensor &value,
                                                           const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k,
                                                           const std::optional<Tensor> &alibi_slopes,
                                                           int64_t max_seqlen_q, int64_t max_seqlen_k, double scale,
                                                           int64_t window_left, int64_t window_right, double softcap,
                                                           bool bottom_right)
{
    const char *const op = "attention_varlen";
    check_dim(op, "query", query, 3, 3);
    check_dim(op, "key", key, 3, 3);
    check_dim(op, "value", value, 3, 3);
    const c10::OptionalDeviceGuard guard(at::device_of(query));
    const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
    PackedCall packed = packed_call(op, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k,
                                    {scale, 0, window_left, window_right, softcap, 0.0}, bottom_right);
    cuda_ops_attention &call = packed.call;
    const cuda_ops_dtype dtype = packed.dtype;
    const Tensor output = empty({query.size(0), call.heads, call.value_dim}, query.options());
    const Tensor logsumexp = empty({call.heads, query.size(0)}, query.options().dtype(logsumexp_type(query)));
    call.output = packed_strides(output);
    if (logsumexp.numel() == 0)
        return {output, logsumexp};
    if (!q.is_cuda()) {
        output.zero_(); // rows of no sequence
        logsumexp.fill_(-std::numeric_limits<double>::infinity());
    }
    if (attention_forward_of_halves(op, output, logsumexp, q, k, v, call, dtype))
        return {output, logsumexp};
    if (is_cpu_half(query)) {
        const auto [result, sums] =
            in_float32(attention_varlen_forward, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                       max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap, bottom_right);
        return {output.copy_(result), sums};
    }
    if (q.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = attention_workspace(cuda_ops_attention_forward_workspace_cuda(&call, dtype), q);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_forward_cuda(output.data_ptr(), logsumexp.data_ptr(), nullptr,
                                                            q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                                                            workspace.defined() ? workspace.data_ptr() : nullptr, &call,
                                                            dtype, current_stream(op)));
        return {output, logsumexp};
    }
    const int64_t parts = cuda_ops_attention_forward_parts_cpu(&call);
    parallel_parts(
        op, parts,
        packed_products(call, call.head_dim + call.value_dim) / static_cast<double>(std::max<int64_t>(parts, 1)),
        cuda_ops_attention_forward_workspace_cpu(&call, dtype), [&](void *workspace, int64_t begin, int64_t end) {
            return cuda_ops_attention_forward_cpu(output.data_ptr(), logsumexp.data_ptr(), q.const_data_ptr(),
                                                  k.const_data_ptr(), v.const_data_ptr(), workspace, &call, begin, end,
                                                  dtype);
        });
    return {output, logsumexp};
}

static std::tuple<Tensor, Tensor, Tensor>
attention_varlen_backward(const Tensor &grad_output, const std::optional<Tensor> &grad_logsumexp, const Tensor &query,
                          const Tensor &key, const Tensor &value, const Tensor &cu_seqlens_q,
                          const Tensor &cu_seqlens_k, const std::optional<Tensor> &alibi_slopes, const Tensor &output,
                          const Tensor &logsumexp, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale,
                          int64_t window_left, int64_t window_right, double softcap, bool bottom_right)
{
    const char *const op = "attention_varlen_backward";
    check_dim(op, "query", query, 3, 3);
    check_dim(op, "key", key, 3, 3);
    check_dim(op, "value", value, 3, 3);
    check_dim(op, "grad_output", grad_output, 3, 3);
    check_dim(op, "output", output, 3, 3);
    const c10::OptionalDeviceGuard guard(at::device_of(query));
    const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
    const Tensor g = attention_rows(grad_output), o = attention_rows(output), l = logsumexp.contiguous();
    const Tensor grad_l = grad_logsumexp ? grad_logsumexp->contiguous() : Tensor();
    PackedCall packed = packed_call(op, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k,
                                    {scale, 0, window_left, window_right, softcap, 0.0}, bottom_right);
    cuda_ops_attention &call = packed.call;
    const cuda_ops_dtype dtype = packed.dtype;
    check_like(op, "grad_output", grad_output, "query", query);
    check_like(op, "output", output, "query", query);
    const std::array<int64_t, 3> sizes{query.size(0), query.size(1), value.size(2)};
    for (const auto &[name, tensor] : {std::pair("grad_output", grad_output), std::pair("output", output)})
        TORCH_CHECK(tensor.sizes() == at::IntArrayRef(sizes), op, ": expected ", name, " to have shape ",
                    at::IntArrayRef(sizes), ", got ", tensor.sizes());
    const std::array<int64_t, 2> row_sizes{query.size(1), query.size(0)};
    const auto check_rows = [&](const char *name, const Tensor &tensor) {
        check_same_device(op, name, tensor, "query", query);
        TORCH_CHECK(tensor.scalar_type() == logsumexp_type(query) && tensor.sizes() == at::IntArrayRef(row_sizes), op,
                    ": expected ", name, " to be ", c10::getDtypeNames(logsumexp_type(query)).first, " of shape ",
                    at::IntArrayRef(row_sizes), ", got ", c10::getDtypeNames(tensor.scalar_type()).first, " of shape ",
                    tensor.sizes());
    };
    check_rows("logsumexp", logsumexp);
    if (grad_logsumexp)
        check_rows("grad_logsumexp", *grad_logsumexp);
    Tensor grad_query = empty(query.sizes(), query.options()), grad_key = empty(key.sizes(), key.options()),
           grad_value = empty(value.sizes(), value.options());
    const bool empty_call = logsumexp.numel() == 0 || call.keys == 0 || call.queries == 0 || call.batch == 0;
    if (empty_call || !q.is_cuda()) { // on the CPU rows of no sequence
        grad_query.zero_();
        grad_key.zero_();
        grad_value.zero_();
    }
    if (empty_call)
        return {grad_query, grad_key, grad_value};
    call.output = packed_strides(o), call.grad_output = packed_strides(g);
    call.grad_query = packed_strides(grad_query);
    call.grad_key = packed_strides(grad_key), call.grad_value = packed_strides(grad_value);
    if (attention_backward_of_halves(op, {grad_query, grad_key, grad_value}, g, grad_l, q, k, v, o, l, call, false,
                                     dtype))
        return {grad_query, grad_key, grad_value};
    if (is_cpu_half(query)) {
        const auto [to_query, to_key, to_value] =
            in_float32(attention_varlen_backward, grad_output, grad_logsumexp, query, key, value, cu_seqlens_q,
                       cu_seqlens_k, alibi_slopes, output, logsumexp, max_seqlen_q, max_seqlen_k, scale, window_left,
                       window_right, softcap, bottom_right);
        return {grad_query.copy_(to_query), grad_key.copy_(to_key), grad_value.copy_(to_value)};
    }
    const void *const grad_l_data = grad_l.defined() ? grad_l.const_data_ptr() : nullptr;
    if (q.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = attention_workspace(cuda_ops_attention_backward_workspace_cuda(&call, 0, dtype), q);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_backward_cuda(grad_query.data_ptr(), grad_key.data_ptr(),
                                                             grad_value.data_ptr(), nullptr, g.const_data_ptr(),
                                                             grad_l_data, q.const_data_ptr(), k.const_data_ptr(),
                                                             v.const_data_ptr(), o.const_data_ptr(), l.const_data_ptr(),
                                                             workspace.defined() ? workspace.data_ptr() : nullptr,
                                                             &call, dtype, current_stream(op)));
        return {grad_query, grad_key, grad_value};
    }
    const int64_t parts = cuda_ops_attention_backward_parts_cpu(&call);
    parallel_parts(
        op, parts, packed_products(call, 3 * call.head_dim + 2 * call.value_dim) / static_cast<double>(parts),
        cuda_ops_attention_backward_workspace_cpu(&call, dtype), [&](void *workspace, int64_t begin, int64_t end) {
            return cuda_ops_attention_backward_cpu(grad_query.data_ptr(), grad_key.data_ptr(), grad_value.data_ptr(),
                                                   nullptr, g.const_data_ptr(), grad_l_data, q.const_data_ptr(),
                                                   k.const_data_ptr(), v.const_data_ptr(), o.const_data_ptr(),
                                                   l.const_data_ptr(), workspace, &call, begin, end, dtype);
        });
    return {grad_query, grad_key, grad_value};
}

// By way of the dispatcher, so that torch.compile sees the op.
static std::tuple<Tensor, Tensor, Tensor>
attention_varlen_gradients(const std::optional<Tensor> &grad_output, const std::optional<Tensor> &grad_logsumexp,
                           const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &cu_seqlens_q,
                           const Tensor &cu_seqlens_k, const std::optional<Tensor> &alibi_slopes, const Tensor &output,
                           const Tensor &logsumexp, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, double scale,
                           c10::SymInt window_left, c10::SymInt window_right, double softcap, bool bottom_right)
{
    using Optional = std::optional<Tensor>;
    using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const Optional &, const Tensor &,
                                                        const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                                        const Optional &, const Tensor &, const Tensor &, c10::SymInt,
                                                        c10::SymInt, double, c10::SymInt, c10::SymInt, double, bool);
    using Composed = std::tuple<Tensor, Tensor, Tensor>(
        const Optional &, const Optional &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
        const Tensor &, const Optional &, c10::SymInt, c10::SymInt, double, c10::SymInt, c10::SymInt, double, bool);
    if (is_differentiated_further(
            {grad_output.value_or(Tensor()), grad_logsumexp.value_or(Tensor()), query, key, value})) {
        static const auto composed = registered_op<Composed>("cuda_ops::attention_varlen_gradients_composed");
        return composed.call(grad_output, grad_logsumexp, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                             max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap, bottom_right);
    }
    static const auto backward = registered_op<Backward>("cuda_ops::attention_varlen_backward");
    const Tensor g = grad_output ? *grad_output : output.new_zeros_symint(output.sym_sizes());
    return backward.call(g, grad_logsumexp, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, output,
                         logsumexp, max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap,
                         bottom_right);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("attention_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
                "Tensor cu_seqlens_k, Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, "
                "SymInt window_left, SymInt window_right, float softcap, bool bottom_right) "
                "-> (Tensor output, Tensor logsumexp)");
    library.def("attention_varlen_backward(Tensor grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
                "Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor output, "
                "Tensor logsumexp, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, bool bottom_right) "
                "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
    library.def("attention_varlen_gradients(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
                "Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor output, "
                "Tensor logsumexp, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, bool bottom_right) -> (Tensor, Tensor, Tensor)",
                cuda_ops::attention_varlen_gradients);
    library.def("attention_varlen_gradients_composed(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, "
                "Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, "
                "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, SymInt window_right, "
                "float softcap, bool bottom_right) -> (Tensor, Tensor, Tensor)");
    cuda_ops::register_kernels_of_all_ops(library, "attention_varlen_gradients_composed");
    library.def("attention_varlen_tangents(Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, "
                "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
                "Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, bool bottom_right) -> (Tensor output, Tensor logsumexp)");
    CUDA_OPS_IMPLEMENT(library, "attention_varlen_forward", cuda_ops::attention_varlen_forward);
    CUDA_OPS_IMPLEMENT(library, "attention_varlen_backward", cuda_ops::attention_varlen_backward);
    CUDA_OPS_AUTOCAST(library, "attention_varlen_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "attention_varlen_forward",
        {"query, key, value: attention_varlen_gradients(grad_output, grad_logsumexp, query, key, value, cu_seqlens_q, "
         "cu_seqlens_k, alibi_slopes, output, logsumexp, max_seqlen_q, max_seqlen_k, scale, window_left, window_right, "
         "softcap, bottom_right)",
         "alibi_slopes: not differentiable",
         "output, logsumexp <- attention_varlen_tangents(tangent_query, tangent_key, tangent_value, query, key, value, "
         "cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, scale, window_left, window_right, "
         "softcap, bottom_right)"});
}
