// attention to a cache of keys and values, for PyTorch: checks, allocation and the choice of backend. Tensors are
// [batch, length, heads, head_dim]; a cache with a block table is [pages, page_size, key_heads, head_dim].
#include "attention.h"

#include <limits>
#include <tuple>

#include "autograd.h"
#include "halves.h"
#include "loss.h"

namespace cuda_ops
{

static IndexErrors length_errors("flash_attention_with_kvcache", "cache_seqlens");
static IndexErrors page_errors("flash_attention_with_kvcache", "block_table");

static void check_int32(const char *op, const char *argument, const Tensor &tensor, const char *like_name,
                        const Tensor &like)
{
    check_same_device(op, argument, tensor, like_name, like);
    TORCH_CHECK(tensor.scalar_type() == at::kInt, op, ": expected ", argument, " to be int32, got ",
                c10::getDtypeNames(tensor.scalar_type()).first);
}

// Strides of [batch or pages, rows, heads, elements].
static cuda_ops_attention_strides cache_strides(const Tensor &tensor)
{
    return {tensor.stride(0), tensor.stride(2), tensor.stride(1)};
}

// What both ops are told of a cache. `lengths` and `table` hold memory that the call points to.
struct Cache {
    cuda_ops_attention call = {};
    Tensor lengths, table;
};

// batch: of what goes to the cache or is asked of it.
static Cache check_cache(const char *op, const Tensor &key_cache, const Tensor &value_cache, int64_t batch,
                         int64_t new_keys, const std::optional<Tensor> &cache_seqlens,
                         const std::optional<Tensor> &block_table)
{
    check_like(op, "value_cache", value_cache, "key_cache", key_cache);
    check_dim(op, "key_cache", key_cache, 4, 4);
    check_dim(op, "value_cache", value_cache, 4, 4);
    TORCH_CHECK(value_cache.sizes().slice(0, 3) == key_cache.sizes().slice(0, 3), op,
                ": expected value_cache to have the shape of key_cache but in the last dimension, got shapes ",
                value_cache.sizes(), " and ", key_cache.sizes());
    TORCH_CHECK(new_keys >= 0, op, ": expected new_keys to be 0 or more, got ", new_keys);
    Cache cache;
    cuda_ops_attention &call = cache.call;
    cuda_ops_attention_sequences &sequences = call.sequences;
    call.batch = batch, call.key_heads = key_cache.size(2), call.keys = key_cache.size(1);
    call.head_dim = key_cache.size(3), call.value_dim = value_cache.size(3);
    call.key = cache_strides(key_cache), call.value = cache_strides(value_cache);
    if (block_table) {
        check_int32(op, "block_table", *block_table, "key_cache", key_cache);
        TORCH_CHECK(block_table->dim() == 2 && block_table->size(0) == batch, op,
                    ": expected block_table to have shape [", batch, ", pages of a sequence], got ",
                    block_table->sizes());
        TORCH_CHECK(key_cache.size(1) > 0 || block_table->size(1) == 0, op, ": expected pages of 1 row at least, got ",
                    "a key_cache of shape ", key_cache.sizes());
        cache.table = block_table->contiguous();
        sequences.block_table = cache.table.const_data_ptr<int32_t>();
        sequences.table_row = block_table->size(1), sequences.pages = key_cache.size(0);
        sequences.page_size = std::max<int64_t>(key_cache.size(1), 1);
        call.keys = sequences.table_row * sequences.page_size;
    } else {
        TORCH_CHECK(key_cache.size(0) == batch, op, ": expected key_cache to have the batch of query, ", batch,
                    ", got shape ", key_cache.sizes());
    }
    TORCH_CHECK_NOT_IMPLEMENTED(call.keys < std::numeric_limits<int32_t>::max() - 1024 && call.head_dim <= 256 &&
                                    call.value_dim <= 256,
                                op, ": expected rows of up to 256 elements and less than 2^31 - 1025 keys, got ",
                                "a key_cache of shape ", key_cache.sizes(), " and ", call.keys, " keys");
    sequences.new_keys = new_keys;
    if (cache_seqlens) {
        check_int32(op, "cache_seqlens", *cache_seqlens, "key_cache", key_cache);
        TORCH_CHECK(cache_seqlens->dim() == 1 && cache_seqlens->size(0) == batch, op,
                    ": expected cache_seqlens to have shape [", batch, "], got ", cache_seqlens->sizes());
        cache.lengths = cache_seqlens->contiguous();
        sequences.key_lengths = cache.lengths.const_data_ptr<int32_t>();
    }
    return cache;
}

// Throws IndexError for a length or a page on the CPU that there is not.
static void check_cache_cpu(const Cache &cache)
{
    const cuda_ops_attention &call = cache.call;
    const cuda_ops_attention_sequences &sequences = call.sequences;
    const int64_t most = call.keys - sequences.new_keys;
    for (int64_t b = 0; b < call.batch; b++) {
        const int64_t length = sequences.key_lengths ? sequences.key_lengths[b] : most;
        if (length < 0 || length > most)
            length_errors.raise(most + 1, length, b);
        const int64_t keys = length + sequences.new_keys;
        for (int64_t j = 0; sequences.block_table && j < keys; j += sequences.page_size) {
            const int64_t at = b * sequences.table_row + j / sequences.page_size;
            const int64_t page = sequences.block_table[at];
            if (page < 0 || page >= sequences.pages)
                page_errors.raise(sequences.pages, page, at);
        }
    }
}

static void attention_cache_append(const Tensor &key_cache, const Tensor &value_cache, const Tensor &key,
                                   const Tensor &value, const Tensor &cache_seqlens,
                                   const std::optional<Tensor> &block_table)
{
    const char *const op = "attention_cache";
    const cuda_ops_dtype dtype = check_dtype(op, "key_cache", key_cache);
    check_like(op, "key", key, "key_cache", key_cache);
    check_like(op, "value", value, "key_cache", key_cache);
    check_dim(op, "key", key, 4, 4);
    check_dim(op, "value", value, 4, 4);
    Cache cache = check_cache(op, key_cache, value_cache, key.size(0), key.size(1), cache_seqlens, block_table);
    const cuda_ops_attention &call = cache.call;
    TORCH_CHECK(key.size(2) == call.key_heads && key.size(3) == call.head_dim, op,
                ": expected key to have the heads and the last dimension of key_cache, got shapes ", key.sizes(),
                " and ", key_cache.sizes());
    const std::array<int64_t, 4> sizes{key.size(0), key.size(1), key.size(2), call.value_dim};
    TORCH_CHECK(value.sizes() == at::IntArrayRef(sizes), op, ": expected value to have shape ", at::IntArrayRef(sizes),
                ", got ", value.sizes());
    for (const auto &[name, tensor] : {std::pair("key_cache", key_cache), std::pair("value_cache", value_cache)}) {
        check_written(op, name, tensor);
        check_no_overlap(op, "key", key, name, tensor);
        check_no_overlap(op, "value", value, name, tensor);
        check_no_overlap(op, "cache_seqlens", cache_seqlens, name, tensor);
        if (block_table)
            check_no_overlap(op, "block_table", *block_table, name, tensor);
    }
    check_no_overlap(op, "value_cache", value_cache, "key_cache", key_cache);
    TORCH_CHECK_NOT_IMPLEMENTED(
        key_cache.stride(3) == 1 && value_cache.stride(3) == 1, op,
        ": expected key_cache and value_cache to have rows whose elements are neighbours, got strides ",
        key_cache.strides(), " and ", value_cache.strides());
    TORCH_CHECK_NOT_IMPLEMENTED(!key_cache.is_neg() && !value_cache.is_neg(), op,
                                ": expected key_cache and value_cache to be no negative views");
    const c10::OptionalDeviceGuard guard(at::device_of(key_cache));
    const Tensor k = attention_rows(key), v = attention_rows(value);
    if (key_cache.is_cuda()) {
        if (k.numel() == 0 && v.numel() == 0)
            return;
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_append_cuda(key_cache.data_ptr(), value_cache.data_ptr(),
                                                           k.const_data_ptr(), v.const_data_ptr(), cache_strides(k),
                                                           cache_strides(v), &call, dtype, current_stream(op)));
        return;
    }
    check_cache_cpu(cache);
    const int64_t elements = call.key_heads * call.sequences.new_keys * (call.head_dim + call.value_dim);
    parallel_ranges(op, call.batch, std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(elements, 1)),
                    [&](int64_t begin, int64_t end) {
                        return cuda_ops_attention_append_cpu(key_cache.data_ptr(), value_cache.data_ptr(),
                                                             k.const_data_ptr(), v.const_data_ptr(), cache_strides(k),
                                                             cache_strides(v), &call, begin, end, dtype);
                    });
}

// One query of several heads that share a key head, if it sees all keys: as many queries of that head, which then is read
// once. Results lie as before.
static void share_keys_of_heads(cuda_ops_attention &call)
{
    const int64_t heads = call.key_heads > 0 ? call.heads / call.key_heads : 1;
    if (call.queries != 1 || heads == 1 || call.alibi_slopes || call.window_left < CUDA_OPS_ATTENTION_UNBOUNDED)
        return;
    call.heads = call.key_heads, call.queries = heads;
    call.window_right = CUDA_OPS_ATTENTION_UNBOUNDED; // the last query sees the last key, whatever that was
    for (cuda_ops_attention_strides *strides : {&call.query, &call.output}) {
        strides->row = strides->head;
        strides->head *= heads;
    }
}

// new_keys: how many keys behind cache_seqlens have been appended.
static std::tuple<Tensor, Tensor>
attention_cache_forward(const Tensor &query, const Tensor &key_cache, const Tensor &value_cache,
                        const std::optional<Tensor> &cache_seqlens, const std::optional<Tensor> &block_table,
                        const std::optional<Tensor> &alibi_slopes, int64_t new_keys, double scale, int64_t window_left,
                        int64_t window_right, double softcap)
{
    const char *const op = "attention_cache";
    const AttentionOptions options{scale, 0, window_left, window_right, softcap, 0.0};
    const cuda_ops_dtype dtype = check_dtype(op, "query", query);
    check_like(op, "key_cache", key_cache, "query", query);
    check_dim(op, "query", query, 4, 4);
    check_attention_options(op, options);
    Cache cache = check_cache(op, key_cache, value_cache, query.size(0), new_keys, cache_seqlens, block_table);
    cuda_ops_attention &call = cache.call;
    TORCH_CHECK(query.size(3) == call.head_dim, op, ": expected key_cache to have the last dimension of query, ",
                query.size(3), ", got ", call.head_dim);
    TORCH_CHECK(query.size(2) == 0 || (call.key_heads > 0 && query.size(2) % call.key_heads == 0), op,
                ": expected the heads of key_cache to divide those of query, ", query.size(2), ", got ",
                call.key_heads);
    const c10::OptionalDeviceGuard guard(at::device_of(query));
    const Tensor q = attention_rows(query), k = attention_rows(key_cache), v = attention_rows(value_cache);
    call.key = cache_strides(k), call.value = cache_strides(v);
    call.heads = q.size(2), call.queries = q.size(1), call.query = cache_strides(q);
    set_attention_options(call, options);
    call.sequences.bottom_right = 1;
    Tensor slopes;
    set_attention_slopes(op, slopes, call, alibi_slopes, query);
    const Tensor output = empty({call.batch, call.queries, call.heads, call.value_dim}, query.options());
    const Tensor logsumexp =
        empty({call.batch, call.heads, call.queries}, query.options().dtype(logsumexp_type(query)));
    call.output = cache_strides(output);
    if (!q.is_cuda()) {
        check_cache_cpu(cache);
        share_keys_of_heads(call);
    }
    if (logsumexp.numel() == 0)
        return {output, logsumexp};
    if (call.keys > 0 && attention_forward_of_halves(op, output, logsumexp, q, k, v, call, dtype))
        return {output, logsumexp};
    if (is_cpu_half(query)) {
        const auto [result, sums] =
            in_float32(attention_cache_forward, query, key_cache, value_cache, cache_seqlens, block_table, alibi_slopes,
                       new_keys, scale, window_left, window_right, softcap);
        return {output.copy_(result), sums};
    }
    if (call.keys == 0 || call.value_dim == 0 || call.head_dim == 0) {
        TORCH_CHECK_NOT_IMPLEMENTED(call.keys == 0 || call.value_dim == 0, op,
                                    ": expected query to have elements in a row, got shape ", query.sizes());
        output.zero_();
        logsumexp.fill_(-std::numeric_limits<double>::infinity());
        return {output, logsumexp};
    }
    if (q.is_cuda()) {
        call.sequences.bad_length = length_errors.record();
        call.sequences.bad_page = page_errors.record();
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = attention_workspace(cuda_ops_attention_forward_workspace_cuda(&call, dtype), q);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_attention_forward_cuda(output.data_ptr(), logsumexp.data_ptr(), nullptr,
                                                            q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                                                            workspace.defined() ? workspace.data_ptr() : nullptr, &call,
                                                            dtype, current_stream(op)));
        length_errors.check_now(call.sequences.bad_length, call.sequences.bad_page);
        page_errors.check_now(call.sequences.bad_page);
        return {output, logsumexp};
    }
    const int64_t parts = cuda_ops_attention_forward_parts_cpu(&call);
    const double products = static_cast<double>(logsumexp.numel()) * static_cast<double>(call.keys) *
                            static_cast<double>(call.head_dim + call.value_dim);
    parallel_parts(op, parts, products / static_cast<double>(parts),
                   cuda_ops_attention_forward_workspace_cpu(&call, dtype),
                   [&](void *workspace, int64_t begin, int64_t end) {
                       return cuda_ops_attention_forward_cpu(output.data_ptr(), logsumexp.data_ptr(),
                                                             q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                                                             workspace, &call, begin, end, dtype);
                   });
    return {output, logsumexp};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("attention_cache_append(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, "
                "Tensor cache_seqlens, Tensor? block_table) -> ()");
    library.def("attention_cache_forward(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? cache_seqlens, "
                "Tensor? block_table, Tensor? alibi_slopes, SymInt new_keys, float scale, SymInt window_left, "
                "SymInt window_right, float softcap) -> (Tensor output, Tensor logsumexp)");
    CUDA_OPS_IMPLEMENT(library, "attention_cache_append", cuda_ops::attention_cache_append);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "attention_cache_append");
    CUDA_OPS_IMPLEMENT(library, "attention_cache_forward", cuda_ops::attention_cache_forward);
    CUDA_OPS_DERIVATIVES(library, "attention_cache_append", {"key_cache, value_cache, key, value: not differentiable"});
    CUDA_OPS_DERIVATIVES(library, "attention_cache_forward",
                         {"query, key_cache, value_cache, alibi_slopes: not differentiable"});
}
