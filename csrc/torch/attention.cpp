// attention for PyTorch: checks, allocation and the choice of backend. Operands go to the kernels with their strides,
// and a mask is never expanded in memory.
#include "attention.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "dropout_state.h"
#include "empty.h"
#include "halves.h"
#include "vmap.h"

namespace cuda_ops
{

// With elements of a row as neighbours.
Tensor attention_rows(const Tensor &tensor)
{
    return tensor.stride(-1) == 1 && !tensor.is_neg() ? tensor : tensor.contiguous();
}

// A new tensor of these sizes, [batch, heads, rows, elements], laid out as `like` is: heads within rows or rows within
// heads.
static Tensor attention_empty(int64_t batch, int64_t heads, int64_t rows, int64_t elements, const Tensor &like)
{
    if (like.stride(1) < like.stride(2))
        return empty({batch, rows, heads, elements}, like.options()).transpose(1, 2);
    return empty({batch, heads, rows, elements}, like.options());
}

cuda_ops_attention_strides attention_strides(const Tensor &tensor)
{
    return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void check_attention_options(const char *op, const AttentionOptions &options)
{
    TORCH_CHECK(options.softcap >= 0.0 && std::isfinite(options.softcap), op,
                ": expected softcap to be 0 or more and finite, got ", options.softcap);
    TORCH_CHECK(options.window_left >= -1 && options.window_right >= -1, op,
                ": expected window to be numbers of keys, or -1 without a bound, got (", options.window_left, ", ",
                options.window_right, ")");
    const int64_t most = int64_t(1) << 60;
    TORCH_CHECK(options.window_left < most && options.window_right < most, op,
                ": expected window to be below 2^60, got (", options.window_left, ", ", options.window_right, ")");
    TORCH_CHECK(-most < options.diagonal && options.diagonal < most, op, ": expected diagonal to be below 2^60, got ",
                options.diagonal);
}

void set_attention_options(cuda_ops_attention &call, const AttentionOptions &options)
{
    call.scale = options.scale;
    call.diagonal = options.diagonal;
    call.window_left = options.window_left < 0 ? CUDA_OPS_ATTENTION_UNBOUNDED : options.window_left;
    call.window_right = options.window_right < 0 ? CUDA_OPS_ATTENTION_UNBOUNDED : options.window_right;
    call.softcap = options.softcap;
    call.dropout = options.dropout;
}

static cuda_ops_dtype check_attention_tensors(const char *op, const Tensor &query, const Tensor &key,
                                              const Tensor &value, const AttentionOptions &options)
{
    const cuda_ops_dtype dtype = check_dtype(op, "query", query);
    check_like(op, "key", key, "query", query);
    check_like(op, "value", value, "query", query);
    check_dim(op, "query", query, 4, 4);
    check_dim(op, "key", key, 4, 4);
    check_dim(op, "value", value, 4, 4);
    TORCH_CHECK(key.size(0) == query.size(0) && value.size(0) == query.size(0), op,
                ": expected query, key and value to have the same batch, got ", query.size(0), ", ", key.size(0),
                " and ", value.size(0));
    TORCH_CHECK(value.size(1) == key.size(1) && value.size(2) == key.size(2), op,
                ": expected value to have the heads and the length of key, got shapes ", value.sizes(), " and ",
                key.sizes());
    TORCH_CHECK(key.size(3) == query.size(3), op, ": expected key to have the last dimension of query, ", query.size(3),
                ", got ", key.size(3));
    TORCH_CHECK(query.size(1) == 0 || (key.size(1) > 0 && query.size(1) % key.size(1) == 0), op,
                ": expected the heads of key to divide those of query, ", query.size(1), ", got ", key.size(1));
    TORCH_CHECK(0.0 <= options.dropout && options.dropout <= 1.0, op, ": expected dropout to be between 0 and 1, got ",
                options.dropout);
    check_attention_options(op, options);
    return dtype;
}

static cuda_ops_dtype attention_dtype(at::ScalarType type)
{
    return type == at::kDouble     ? CUDA_OPS_FLOAT64
           : type == at::kHalf     ? CUDA_OPS_FLOAT16
           : type == at::kBFloat16 ? CUDA_OPS_BFLOAT16
                                   : CUDA_OPS_FLOAT32;
}

void set_attention_slopes(const char *op, Tensor &kept, cuda_ops_attention &call,
                          const std::optional<Tensor> &alibi_slopes, const Tensor &query)
{
    if (alibi_slopes) {
        check_same_device(op, "alibi_slopes", *alibi_slopes, "query", query);
        TORCH_CHECK(alibi_slopes->is_floating_point(), op, ": expected alibi_slopes to be floating point, got ",
                    c10::getDtypeNames(alibi_slopes->scalar_type()).first);
        const bool of_heads = alibi_slopes->dim() == 1 && alibi_slopes->size(0) == call.heads;
        const bool of_batch =
            alibi_slopes->dim() == 2 && alibi_slopes->size(0) == call.batch && alibi_slopes->size(1) == call.heads;
        TORCH_CHECK(of_heads || of_batch, op, ": expected alibi_slopes to have shape [", call.heads, "] or [",
                    call.batch, ", ", call.heads, "], got ", alibi_slopes->sizes());
        kept = alibi_slopes->to(at::kFloat).contiguous();
        call.alibi_slopes = kept.const_data_ptr<float>();
        call.alibi_batch = of_batch ? call.heads : 0;
    }
}

// The call; `kept` holds the memory of mask and slopes.
static cuda_ops_attention attention_call(const char *op, std::array<Tensor, 2> &kept, const Tensor &query,
                                         const Tensor &key, const Tensor &value, const std::optional<Tensor> &mask,
                                         const std::optional<Tensor> &alibi_slopes, const AttentionOptions &options)
{
    cuda_ops_attention call = {};
    call.batch = query.size(0), call.heads = query.size(1), call.key_heads = key.size(1);
    call.queries = query.size(2), call.keys = key.size(2);
    call.head_dim = query.size(3), call.value_dim = value.size(3);
    call.query = attention_strides(query), call.key = attention_strides(key), call.value = attention_strides(value);
    set_attention_options(call, options);
    if (mask) {
        check_same_device(op, "mask", *mask, "query", query);
        const at::ScalarType type = mask->scalar_type();
        TORCH_CHECK(type == at::kBool || type == at::kFloat || type == query.scalar_type(), op,
                    ": expected mask to be bool, float32 or of the dtype of query, ",
                    c10::getDtypeNames(query.scalar_type()).first, ", got ", c10::getDtypeNames(type).first);
        const std::array<int64_t, 4> sizes{call.batch, call.heads, call.queries, call.keys};
        TORCH_CHECK(at::is_expandable_to(mask->sizes(), sizes), op,
                    ": expected mask to be of a shape that broadcasts to ", at::IntArrayRef(sizes), ", got ",
                    mask->sizes());
        kept[0] = mask->resolve_neg();
        const Tensor all = kept[0].expand(sizes);
        call.mask = kept[0].const_data_ptr();
        call.mask_kind = type == at::kBool ? CUDA_OPS_ATTENTION_MASK_BOOLEAN : CUDA_OPS_ATTENTION_MASK_ADDITIVE;
        call.mask_dtype = type == at::kBool ? CUDA_OPS_FLOAT32 : attention_dtype(type);
        call.mask_batch = all.stride(0), call.mask_head = all.stride(1);
        call.mask_row = all.stride(2), call.mask_column = all.stride(3);
    }
    set_attention_slopes(op, kept[1], call, alibi_slopes, query);
    return call;
}

// What a query and a key cost by tile registers, in multiply-adds of float32, of so many elements of rows: products are
// 16 times as fast (of float16, three each), and what is between them takes as long as 32 multiply-adds.
static double tiles_cost(const Tensor &logsumexp, const cuda_ops_attention &call, cuda_ops_dtype dtype, int64_t dims)
{
    const double product = (dtype == CUDA_OPS_FLOAT16 ? 3.0 : 1.0) / 16;
    return static_cast<double>(logsumexp.numel()) * static_cast<double>(call.keys) *
           (product * static_cast<double>(dims) + 32);
}

bool attention_forward_of_halves(const char *op, const Tensor &output, const Tensor &logsumexp, const Tensor &query,
                                 const Tensor &key, const Tensor &value, const cuda_ops_attention &call,
                                 cuda_ops_dtype dtype)
{
    if (!is_cpu_half(query) || !cuda_ops_attention_takes_halves_cpu(&call, 0, 0, dtype))
        return false;
    int not_finite = 0;
    const int64_t parts = cuda_ops_attention_halves_forward_parts_cpu(&call);
    const double cost = tiles_cost(logsumexp, call, dtype, call.head_dim + call.value_dim);
    parallel_parts(op, parts, cost / static_cast<double>(parts),
                   cuda_ops_attention_halves_forward_workspace_cpu(&call, dtype),
                   [&](void *workspace, int64_t begin, int64_t end) {
                       return cuda_ops_attention_halves_forward_cpu(
                           output.data_ptr(), logsumexp.data_ptr(), query.const_data_ptr(), key.const_data_ptr(),
                           value.const_data_ptr(), workspace, &not_finite, &call, begin, end, dtype);
                   });
    return not_finite == 0;
}

bool attention_backward_of_halves(const char *op, const std::array<Tensor, 3> &grads, const Tensor &grad_output,
                                  const Tensor &grad_logsumexp, const Tensor &query, const Tensor &key,
                                  const Tensor &value, const Tensor &output, const Tensor &logsumexp,
                                  const cuda_ops_attention &call, bool with_scores, cuda_ops_dtype dtype)
{
    if (!is_cpu_half(query) || !cuda_ops_attention_takes_halves_cpu(&call, 1, with_scores, dtype))
        return false;
    // It is in proportion to the keys, and kept by each thread.
    constexpr int64_t MOST_BYTES = int64_t(64) << 20;
    const int64_t bytes = cuda_ops_attention_halves_backward_workspace_cpu(&call);
    if (bytes > MOST_BYTES)
        return false;
    const int64_t parts = cuda_ops_attention_backward_parts_cpu(&call);
    const double cost = tiles_cost(logsumexp, call, dtype, 3 * call.head_dim + 2 * call.value_dim);
    parallel_parts(op, parts, cost / static_cast<double>(parts), bytes,
                   [&](void *workspace, int64_t begin, int64_t end) {
                       return cuda_ops_attention_halves_backward_cpu(
                           grads[0].data_ptr(), grads[1].data_ptr(), grads[2].data_ptr(), grad_output.const_data_ptr(),
                           grad_logsumexp.defined() ? grad_logsumexp.const_data_ptr() : nullptr, query.const_data_ptr(),
                           key.const_data_ptr(), value.const_data_ptr(), output.const_data_ptr(),
                           logsumexp.const_data_ptr(), workspace, &call, begin, end, dtype);
                   });
    return true;
}

// What widened tensors are multiplied as. Three products of tile registers for each of float16's take longer than one of
// float32's.
static cuda_ops_dtype products_of_halves(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? dtype : CUDA_OPS_FLOAT32;
}

// The third output lets backward draw the same numbers again: seed and offset, 2 int64 on query's device; none without
// dropout.
// products: the half that the tensors were widened from on the CPU; else float32.
static std::tuple<Tensor, Tensor, Tensor> attention_forward_of(const Tensor &query, const Tensor &key,
                                                               const Tensor &value, const std::optional<Tensor> &mask,
                                                               const std::optional<Tensor> &alibi_slopes,
                                                               const AttentionOptions &options, cuda_ops_dtype products)
{
    const char *const op = "attention";
    const double dropout = options.dropout;
    const cuda_ops_dtype dtype = check_attention_tensors(op, query, key, value, options);
    const c10::OptionalDeviceGuard guard(at::device_of(query));
    const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
    std::array<Tensor, 2> kept;
    cuda_ops_attention call = attention_call(op, kept, q, k, v, mask, alibi_slopes, options);
    const Tensor output = attention_empty(call.batch, call.heads, call.queries, call.value_dim, query);
    const Tensor logsumexp =
        empty({call.batch, call.heads, call.queries}, query.options().dtype(logsumexp_type(query)));
    Tensor state = empty({dropout > 0.0 ? 2 : 0}, query.options().dtype(at::kLong));
    if (logsumexp.numel() == 0) {
        if (dropout > 0.0)
            state.zero_();
        return {output, logsumexp, state};
    }
    call.output = attention_strides(output);
    call.products = products;
    if (attention_forward_of_halves(op, output, logsumexp, q, k, v, call, dtype))
        return {output, logsumexp, state};
    if (is_cpu_half(query)) {
        const auto [result, sums, drawn] =
            attention_forward_of(widened(query), widened(key), widened(value), widened(mask), alibi_slopes, options,
                                 products_of_halves(dtype));
        return {output.copy_(result), sums, drawn};
    }
    if (dropout > 0.0)
        call.philox = draw_philox(query.device());
    if (q.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = attention_workspace(cuda_ops_attention_forward_workspace_cuda(&call, dtype), q);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_forward_cuda(output.data_ptr(), logsumexp.data_ptr(),
                                                            dropout > 0.0 ? state.data_ptr<int64_t>() : nullptr,
                                                            q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                                                            workspace.defined() ? workspace.data_ptr() : nullptr, &call,
                                                            dtype, current_stream(op)));
        return {output, logsumexp, state};
    }
    if (dropout > 0.0) {
        state.data_ptr<int64_t>()[0] = static_cast<int64_t>(call.philox.seed);
        state.data_ptr<int64_t>()[1] = static_cast<int64_t>(call.philox.offset);
    }
    const int64_t parts = cuda_ops_attention_forward_parts_cpu(&call);
    const double multiply_adds = static_cast<double>(logsumexp.numel()) * static_cast<double>(call.keys) *
                                 static_cast<double>(call.head_dim + call.value_dim);
    parallel_parts(op, parts, multiply_adds / static_cast<double>(parts),
                   cuda_ops_attention_forward_workspace_cpu(&call, dtype),
                   [&](void *workspace, int64_t begin, int64_t end) {
                       return cuda_ops_attention_forward_cpu(output.data_ptr(), logsumexp.data_ptr(),
                                                             q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                                                             workspace, &call, begin, end, dtype);
                   });
    return {output, logsumexp, state};
}

static std::tuple<Tensor, Tensor, Tensor>
attention_forward(const Tensor &query, const Tensor &key, const Tensor &value, const std::optional<Tensor> &mask,
                  const std::optional<Tensor> &alibi_slopes, double scale, int64_t diagonal, int64_t window_left,
                  int64_t window_right, double softcap, double dropout, const std::optional<Tensor> & /* call */)
{
    return attention_forward_of(query, key, value, mask, alibi_slopes,
                                {scale, diagonal, window_left, window_right, softcap, dropout}, CUDA_OPS_FLOAT32);
}

// Dropout's factors of weights of these sizes, [batch, heads, queries, keys], for what is composed of other ops.
static Tensor attention_dropout_factors(const Tensor &state, at::IntArrayRef sizes, double dropout, at::ScalarType type)
{
    const char *const op = "attention_dropout_factors";
    TORCH_CHECK(state.scalar_type() == at::kLong && state.sizes() == at::IntArrayRef({2}), op,
                ": expected state to be 2 int64, got ", c10::getDtypeNames(state.scalar_type()).first, " of shape ",
                state.sizes());
    TORCH_CHECK(sizes.size() == 4 && std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }),
                op, ": expected sizes to be 4 numbers, none of them negative, got ", sizes);
    TORCH_CHECK(are_sizes_of_a_tensor(sizes), op, ": expected sizes that a tensor can have, got ", sizes);
    TORCH_CHECK(0.0 <= dropout && dropout <= 1.0, op, ": expected dropout to be between 0 and 1, got ", dropout);
    const c10::OptionalDeviceGuard guard(at::device_of(state));
    Tensor factors = empty(sizes, state.options().dtype(type));
    const cuda_ops_dtype dtype = check_dtype(op, "factors", factors);
    if (factors.numel() == 0)
        return factors;
    if (is_cpu_half(factors))
        return factors.copy_(attention_dropout_factors(state, sizes, dropout, at::kFloat));
    const Tensor seed_and_offset = state.contiguous();
    const int64_t *const values = seed_and_offset.const_data_ptr<int64_t>();
    cuda_ops_attention call = {};
    call.batch = sizes[0], call.heads = sizes[1], call.queries = sizes[2], call.keys = sizes[3];
    call.dropout = dropout;
    if (factors.is_cuda()) {
        call.philox.seed_pointer = values, call.philox.offset_pointer = values + 1;
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_attention_dropout_factors_cuda(factors.data_ptr(), &call, dtype, current_stream(op)));
        return factors;
    }
    call.philox.seed = static_cast<uint64_t>(values[0]), call.philox.offset = static_cast<uint64_t>(values[1]);
    parallel_ranges(op, factors.numel() / sizes[3], std::max<int64_t>(1, ELEMENTWISE_GRAIN / sizes[3]),
                    [&](int64_t begin, int64_t end) {
                        return cuda_ops_attention_dropout_factors_cpu(factors.data_ptr(), &call, begin, end, dtype);
                    });
    return factors;
}

// The gradients of query, key and value, into `grads` of their sizes where it holds tensors (after the checks), else into
// new ones that it then holds. Returns grad_scores: that of the scores before a mask is summed over what it was broadcast
// to, if that is wanted; else empty.
static Tensor attention_backward_into(std::array<Tensor, 3> &grads, const Tensor &grad_output,
                                      const std::optional<Tensor> &grad_logsumexp, const Tensor &query,
                                      const Tensor &key, const Tensor &value, const std::optional<Tensor> &mask,
                                      const std::optional<Tensor> &alibi_slopes, const Tensor &output,
                                      const Tensor &logsumexp, const Tensor &state, const AttentionOptions &options,
                                      bool with_scores, cuda_ops_dtype products = CUDA_OPS_FLOAT32)
{
    const char *const op = "attention_backward";
    const double dropout = options.dropout;
    const cuda_ops_dtype dtype = check_attention_tensors(op, query, key, value, options);
    check_like(op, "grad_output", grad_output, "query", query);
    check_like(op, "output", output, "query", query);
    const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2), value.size(3)};
    for (const auto &[name, tensor] : {std::pair("grad_output", grad_output), std::pair("output", output)})
        TORCH_CHECK(tensor.sizes() == at::IntArrayRef(sizes), op, ": expected ", name, " to have shape ",
                    at::IntArrayRef(sizes), ", got ", tensor.sizes());
    const auto check_rows = [&](const char *name, const Tensor &tensor) {
        check_same_device(op, name, tensor, "query", query);
        TORCH_CHECK(tensor.scalar_type() == logsumexp_type(query) && tensor.sizes() == query.sizes().slice(0, 3), op,
                    ": expected ", name, " to be ", c10::getDtypeNames(logsumexp_type(query)).first, " of shape ",
                    query.sizes().slice(0, 3), ", got ", c10::getDtypeNames(tensor.scalar_type()).first, " of shape ",
                    tensor.sizes());
    };
    check_rows("logsumexp", logsumexp);
    if (grad_logsumexp)
        check_rows("grad_logsumexp", *grad_logsumexp);
    check_same_device(op, "state", state, "query", query);
    TORCH_CHECK(state.scalar_type() == at::kLong && (dropout == 0.0 || state.sizes() == at::IntArrayRef({2})), op,
                ": expected state to be 2 int64, got ", c10::getDtypeNames(state.scalar_type()).first, " of shape ",
                state.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(query));
    const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
    const Tensor g = attention_rows(grad_output), o = attention_rows(output), l = logsumexp.contiguous();
    const Tensor grad_l = grad_logsumexp ? grad_logsumexp->contiguous() : Tensor(),
                 seed_and_offset = state.contiguous();
    std::array<Tensor, 2> kept;
    cuda_ops_attention call = attention_call(op, kept, q, k, v, mask, alibi_slopes, options);
    if (!grads[0].defined())
        grads = {attention_empty(call.batch, call.heads, call.queries, call.head_dim, query),
                 attention_empty(call.batch, call.key_heads, call.keys, call.head_dim, key),
                 attention_empty(call.batch, call.key_heads, call.keys, call.value_dim, value)};
    const Tensor &grad_query = grads[0], &grad_key = grads[1], &grad_value = grads[2];
    Tensor grad_scores = with_scores ? empty({call.batch, call.heads, call.queries, call.keys}, query.options())
                                     : empty({0}, query.options());
    if (logsumexp.numel() == 0 || call.keys == 0) {
        for (const Tensor &grad : grads)
            grad.zero_();
        return grad_scores;
    }
    call.products = products;
    call.output = attention_strides(o), call.grad_output = attention_strides(g);
    call.grad_query = attention_strides(grad_query);
    call.grad_key = attention_strides(grad_key), call.grad_value = attention_strides(grad_value);
    if (attention_backward_of_halves(op, grads, g, grad_l, q, k, v, o, l, call, with_scores, dtype))
        return grad_scores;
    if (is_cpu_half(query)) {
        std::array<Tensor, 3> computed;
        const Tensor scores = attention_backward_into(
            computed, widened(grad_output), grad_logsumexp, widened(query), widened(key), widened(value), widened(mask),
            alibi_slopes, widened(output), logsumexp, state, options, with_scores, products_of_halves(dtype));
        for (size_t i = 0; i < grads.size(); i++)
            grads[i].copy_(computed[i]);
        return scores.to(query.scalar_type());
    }
    void *const grad_mask = with_scores ? grad_scores.data_ptr() : nullptr;
    const void *const grad_l_data = grad_l.defined() ? grad_l.const_data_ptr() : nullptr;
    if (q.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        call.philox.seed_pointer = dropout > 0.0 ? seed_and_offset.const_data_ptr<int64_t>() : nullptr;
        call.philox.offset_pointer = dropout > 0.0 ? call.philox.seed_pointer + 1 : nullptr;
        const Tensor workspace =
            attention_workspace(cuda_ops_attention_backward_workspace_cuda(&call, with_scores, dtype), q);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_backward_cuda(grad_query.data_ptr(), grad_key.data_ptr(),
                                                             grad_value.data_ptr(), grad_mask, g.const_data_ptr(),
                                                             grad_l_data, q.const_data_ptr(), k.const_data_ptr(),
                                                             v.const_data_ptr(), o.const_data_ptr(), l.const_data_ptr(),
                                                             workspace.defined() ? workspace.data_ptr() : nullptr,
                                                             &call, dtype, current_stream(op)));
        return grad_scores;
    }
    if (dropout > 0.0) {
        call.philox.seed = static_cast<uint64_t>(seed_and_offset.const_data_ptr<int64_t>()[0]);
        call.philox.offset = static_cast<uint64_t>(seed_and_offset.const_data_ptr<int64_t>()[1]);
    }
    const int64_t parts = cuda_ops_attention_backward_parts_cpu(&call);
    const double multiply_adds = static_cast<double>(logsumexp.numel()) * static_cast<double>(call.keys) *
                                 static_cast<double>(3 * call.head_dim + 2 * call.value_dim);
    parallel_parts(op, parts, multiply_adds / static_cast<double>(parts),
                   cuda_ops_attention_backward_workspace_cpu(&call, dtype),
                   [&](void *workspace, int64_t begin, int64_t end) {
                       return cuda_ops_attention_backward_cpu(
                           grad_query.data_ptr(), grad_key.data_ptr(), grad_value.data_ptr(), grad_mask,
                           g.const_data_ptr(), grad_l_data, q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                           o.const_data_ptr(), l.const_data_ptr(), workspace, &call, begin, end, dtype);
                   });
    return grad_scores;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor>
attention_backward(const Tensor &grad_output, const std::optional<Tensor> &grad_logsumexp, const Tensor &query,
                   const Tensor &key, const Tensor &value, const std::optional<Tensor> &mask,
                   const std::optional<Tensor> &alibi_slopes, const Tensor &output, const Tensor &logsumexp,
                   const Tensor &state, double scale, int64_t diagonal, int64_t window_left, int64_t window_right,
                   double softcap, double dropout, bool with_scores)
{
    std::array<Tensor, 3> grads;
    const Tensor grad_scores = attention_backward_into(
        grads, grad_output, grad_logsumexp, query, key, value, mask, alibi_slopes, output, logsumexp, state,
        {scale, diagonal, window_left, window_right, softcap, dropout}, with_scores);
    return {grads[0], grads[1], grads[2], grad_scores};
}

// The wanted ones of query, key, value and mask. By way of the dispatcher, so that torch.compile sees the op.
static std::vector<Tensor>
attention_gradients(const std::optional<Tensor> &grad_output, const std::optional<Tensor> &grad_logsumexp,
                    const Tensor &query, const Tensor &key, const Tensor &value, const std::optional<Tensor> &mask,
                    const std::optional<Tensor> &alibi_slopes, const Tensor &output, const Tensor &logsumexp,
                    const Tensor &state, double scale, c10::SymInt diagonal, c10::SymInt window_left,
                    c10::SymInt window_right, double softcap, double dropout, std::array<bool, 4> wanted)
{
    using Optional = std::optional<Tensor>;
    using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor &, const Optional &, const Tensor &, const Tensor &, const Tensor &, const Optional &,
        const Optional &, const Tensor &, const Tensor &, const Tensor &, double, c10::SymInt, c10::SymInt, c10::SymInt,
        double, double, bool);
    using Composed = std::vector<Tensor>(const Optional &, const Optional &, const Tensor &, const Tensor &,
                                         const Tensor &, const Optional &, const Optional &, const Tensor &, double,
                                         c10::SymInt, c10::SymInt, c10::SymInt, double, double, std::array<bool, 4>);
    if (is_differentiated_further({grad_output.value_or(Tensor()), grad_logsumexp.value_or(Tensor()), query, key, value,
                                   mask.value_or(Tensor())})) {
        static const auto composed = registered_op<Composed>("cuda_ops::attention_gradients_composed");
        return composed.call(grad_output, grad_logsumexp, query, key, value, mask, alibi_slopes, state, scale, diagonal,
                             window_left, window_right, softcap, dropout, wanted);
    }
    static const auto backward = registered_op<Backward>("cuda_ops::attention_backward");
    const Tensor g = grad_output ? *grad_output : output.new_zeros_symint(output.sym_sizes());
    const auto [grad_query, grad_key, grad_value, grad_scores] =
        backward.call(g, grad_logsumexp, query, key, value, mask, alibi_slopes, output, logsumexp, state, scale,
                      diagonal, window_left, window_right, softcap, dropout, wanted[3]);
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(grad_query);
    if (wanted[1])
        grads.push_back(grad_key);
    if (wanted[2])
        grads.push_back(grad_value);
    if (wanted[3])
        grads.push_back(at::sum_to(grad_scores, mask->sym_sizes()).to(mask->scalar_type()));
    return grads;
}

// attention of query, key and value that lie in one tensor, as a projection makes them: [batch, length, 3, heads,
// head_dim]. Backward writes the three gradients into one such tensor, where those of three views would be copied.

// [batch, heads, length, head_dim] each, views.
static std::array<Tensor, 3> packed_parts(const Tensor &qkv)
{
    return {qkv.select(2, 0).transpose(1, 2), qkv.select(2, 1).transpose(1, 2), qkv.select(2, 2).transpose(1, 2)};
}

static void check_packed(const char *op, const Tensor &qkv)
{
    TORCH_CHECK(qkv.dim() == 5 && qkv.size(2) == 3, op,
                ": expected qkv to have shape [batch, length, 3, heads, head_dim], got ", qkv.sizes());
}

static std::tuple<Tensor, Tensor, Tensor> attention_packed_forward(const Tensor &qkv,
                                                                   const std::optional<Tensor> &alibi_slopes,
                                                                   double scale, int64_t window_left,
                                                                   int64_t window_right, double softcap, double dropout,
                                                                   const std::optional<Tensor> &call)
{
    check_packed("attention_packed", qkv);
    const auto [query, key, value] = packed_parts(qkv);
    const auto [output, logsumexp, state] = attention_forward(query, key, value, std::nullopt, alibi_slopes, scale, 0,
                                                              window_left, window_right, softcap, dropout, call);
    return {output.transpose(1, 2), logsumexp, state};
}

static Tensor attention_packed_backward(const Tensor &grad_output, const std::optional<Tensor> &grad_logsumexp,
                                        const Tensor &qkv, const std::optional<Tensor> &alibi_slopes,
                                        const Tensor &output, const Tensor &logsumexp, const Tensor &state,
                                        double scale, int64_t window_left, int64_t window_right, double softcap,
                                        double dropout)
{
    const char *const op = "attention_packed_backward";
    check_packed(op, qkv);
    check_dim(op, "grad_output", grad_output, 4, 4);
    check_dim(op, "output", output, 4, 4);
    const c10::OptionalDeviceGuard guard(at::device_of(qkv));
    const auto [query, key, value] = packed_parts(qkv);
    Tensor grad_qkv = empty(qkv.sizes(), qkv.options());
    std::array<Tensor, 3> grads = packed_parts(grad_qkv);
    attention_backward_into(grads, grad_output.transpose(1, 2), grad_logsumexp, query, key, value, std::nullopt,
                            alibi_slopes, output.transpose(1, 2), logsumexp, state,
                            {scale, 0, window_left, window_right, softcap, dropout}, false);
    return grad_qkv;
}

static Tensor attention_packed_gradients(const std::optional<Tensor> &grad_output,
                                         const std::optional<Tensor> &grad_logsumexp, const Tensor &qkv,
                                         const std::optional<Tensor> &alibi_slopes, const Tensor &output,
                                         const Tensor &logsumexp, const Tensor &state, double scale,
                                         c10::SymInt window_left, c10::SymInt window_right, double softcap,
                                         double dropout)
{
    using Optional = std::optional<Tensor>;
    using Backward = Tensor(const Tensor &, const Optional &, const Tensor &, const Optional &, const Tensor &,
                            const Tensor &, const Tensor &, double, c10::SymInt, c10::SymInt, double, double);
    using Composed = Tensor(const Optional &, const Optional &, const Tensor &, const Optional &, const Tensor &,
                            double, c10::SymInt, c10::SymInt, double, double);
    if (is_differentiated_further({grad_output.value_or(Tensor()), grad_logsumexp.value_or(Tensor()), qkv})) {
        static const auto composed = registered_op<Composed>("cuda_ops::attention_packed_gradients_composed");
        return composed.call(grad_output, grad_logsumexp, qkv, alibi_slopes, state, scale, window_left, window_right,
                             softcap, dropout);
    }
    static const auto backward = registered_op<Backward>("cuda_ops::attention_packed_backward");
    const Tensor g = grad_output ? *grad_output : output.new_zeros_symint(output.sym_sizes());
    return backward.call(g, grad_logsumexp, qkv, alibi_slopes, output, logsumexp, state, scale, window_left,
                         window_right, softcap, dropout);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    // `call`, which is not read, is for torch.compile, as dropout's.
    library.def("attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alibi_slopes, "
                "float scale, SymInt diagonal, SymInt window_left, SymInt window_right, float softcap, float dropout, "
                "Tensor? call=None) -> (Tensor output, Tensor logsumexp, Tensor state)",
                {at::Tag::nondeterministic_seeded});
    library.def(
        "attention_backward(Tensor grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, "
        "Tensor? mask, Tensor? alibi_slopes, Tensor output, Tensor logsumexp, Tensor state, float scale, "
        "SymInt diagonal, SymInt window_left, SymInt window_right, float softcap, float dropout, "
        "bool with_scores) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_scores)");
    library.def("attention_gradients_composed(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
                "Tensor value, Tensor? mask, Tensor? alibi_slopes, Tensor state, float scale, SymInt diagonal, "
                "SymInt window_left, SymInt window_right, float softcap, float dropout, bool[4] wanted) -> Tensor[]");
    cuda_ops::register_kernels_of_all_ops(library, "attention_gradients_composed");
    library.def("attention_tangents(Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, "
                "Tensor? tangent_mask, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alibi_slopes, "
                "Tensor state, float scale, SymInt diagonal, SymInt window_left, SymInt window_right, float softcap, "
                "float dropout) -> (Tensor output, Tensor logsumexp)");
    library.def("attention_gradients(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
                "Tensor value, Tensor? mask, Tensor? alibi_slopes, Tensor output, Tensor logsumexp, Tensor state, "
                "float scale, SymInt diagonal, SymInt window_left, SymInt window_right, float softcap, float dropout, "
                "bool[4] wanted) -> Tensor[]",
                cuda_ops::attention_gradients);
    library.def("attention_dropout_factors(Tensor state, SymInt[] sizes, float dropout, ScalarType dtype) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "attention_dropout_factors", cuda_ops::attention_dropout_factors);
    CUDA_OPS_IMPLEMENT(library, "attention_forward", cuda_ops::attention_forward);
    CUDA_OPS_VMAP(library, "attention_forward", "random dropout");
    CUDA_OPS_IMPLEMENT(library, "attention_backward", cuda_ops::attention_backward);
    CUDA_OPS_AUTOCAST(library, "attention_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "attention_forward",
        {"query, key, value, mask: attention_gradients(grad_output, grad_logsumexp, query, key, value, mask, "
         "alibi_slopes, output, logsumexp, state, scale, diagonal, window_left, window_right, softcap, dropout, "
         "wanted)",
         "alibi_slopes: not differentiable",
         "output, logsumexp <- attention_tangents(tangent_query, tangent_key, tangent_value, tangent_mask, query, key, "
         "value, mask, alibi_slopes, state, scale, diagonal, window_left, window_right, softcap, dropout)"});

    library.def("attention_packed_forward(Tensor qkv, Tensor? alibi_slopes, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, float dropout, Tensor? call=None) -> (Tensor output, "
                "Tensor logsumexp, Tensor state)",
                {at::Tag::nondeterministic_seeded});
    library.def("attention_packed_backward(Tensor grad_output, Tensor? grad_logsumexp, Tensor qkv, "
                "Tensor? alibi_slopes, Tensor output, Tensor logsumexp, Tensor state, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, float dropout) -> (Tensor grad_qkv)");
    library.def("attention_packed_gradients(Tensor? grad_output, Tensor? grad_logsumexp, Tensor qkv, "
                "Tensor? alibi_slopes, Tensor output, Tensor logsumexp, Tensor state, float scale, SymInt window_left, "
                "SymInt window_right, float softcap, float dropout) -> Tensor",
                cuda_ops::attention_packed_gradients);
    library.def("attention_packed_gradients_composed(Tensor? grad_output, Tensor? grad_logsumexp, Tensor qkv, "
                "Tensor? alibi_slopes, Tensor state, float scale, SymInt window_left, SymInt window_right, "
                "float softcap, float dropout) -> Tensor");
    cuda_ops::register_kernels_of_all_ops(library, "attention_packed_gradients_composed");
    library.def("attention_packed_tangents(Tensor tangent_qkv, Tensor qkv, Tensor? alibi_slopes, Tensor state, "
                "float scale, SymInt window_left, SymInt window_right, float softcap, float dropout) "
                "-> (Tensor output, Tensor logsumexp)");
    CUDA_OPS_IMPLEMENT(library, "attention_packed_forward", cuda_ops::attention_packed_forward);
    CUDA_OPS_VMAP(library, "attention_packed_forward", "random dropout");
    CUDA_OPS_IMPLEMENT(library, "attention_packed_backward", cuda_ops::attention_packed_backward);
    CUDA_OPS_AUTOCAST(library, "attention_packed_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "attention_packed_forward",
        {"qkv: attention_packed_gradients(grad_output, grad_logsumexp, qkv, alibi_slopes, output, logsumexp, state, "
         "scale, window_left, window_right, softcap, dropout)",
         "alibi_slopes: not differentiable",
         "output, logsumexp <- attention_packed_tangents(tangent_qkv, qkv, alibi_slopes, state, scale, window_left, "
         "window_right, softcap, dropout)"});
}
