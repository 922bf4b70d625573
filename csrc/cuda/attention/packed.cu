// attention's rows that no kernel of a path writes. Of packed tensors those that no sequence has become 0, of logsumexp
// -inf; a warp a row and head: a search among the sequences, and nothing to be written where the row is one's, as most
// are. And where there are no queries, all of the keys' and values' gradients are 0.
#include <math.h>

#include "attention/paths.h"
#include "common/common.cuh"

static constexpr int THREADS = 256;

// Whether sequence b, the last that begins at `row` or before, has it.
static __device__ bool is_of_a_sequence(const int32_t *starts, int64_t batch, int64_t longest, int64_t row)
{
    int64_t low = 0, high = batch; // starts[low] <= row < starts[high], if any
    if (row < starts[0] || row >= starts[batch])
        return false;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return row - starts[low] < longest;
}

// Rows [batch, head, row] of a tensor, of which those that a sequence has are left alone.
struct ClearedRows {
    cuda_ops_attention_strides strides;
    int64_t batch, heads, rows, elements;
    const int32_t *starts; // of `sequences` sequences; NULL: there are none
    int64_t sequences, longest;
    float value;
};

template <typename T>
__global__ void __launch_bounds__(THREADS) attention_clear_kernel(T *tensor, const __grid_constant__ ClearedRows work)
{
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t index = global_thread_index() / WARP_SIZE; index < work.batch * work.rows * work.heads;
         index += global_thread_count() / WARP_SIZE) {
        const int64_t head = index % work.heads, row = index / work.heads % work.rows;
        const int64_t batch = index / work.heads / work.rows;
        if (work.starts && is_of_a_sequence(work.starts, work.sequences, work.longest, row))
            continue;
        T *const to = tensor + batch * work.strides.batch + head * work.strides.head + row * work.strides.row;
        for (int64_t d = lane; d < work.elements; d += WARP_SIZE)
            to[d] = store_from_accumulate<T>(accumulate_type<T>(work.value));
    }
}

template <typename T>
static cuda_ops_status clear(void *tensor, const ClearedRows &work, cudaStream_t stream)
{
    const int64_t rows = work.batch * work.rows * work.heads;
    if (rows == 0 || work.elements == 0)
        return CUDA_OPS_SUCCESS;
    attention_clear_kernel<T>
        <<<clamp_grid(ceil_div(rows, THREADS / WARP_SIZE)), THREADS, 0, stream>>>((T *)tensor, work);
    return launch_status();
}

// Of packed tensors.
static ClearedRows rows_of_queries(const cuda_ops_attention &p, const cuda_ops_attention_strides &strides,
                                   int64_t elements, float value)
{
    const cuda_ops_attention_sequences &q = p.sequences;
    return {strides, 1, p.heads, q.query_rows, elements, q.query_starts, p.batch, p.queries, value};
}
static ClearedRows rows_of_keys(const cuda_ops_attention &p, const cuda_ops_attention_strides &strides,
                                int64_t elements)
{
    const cuda_ops_attention_sequences &q = p.sequences;
    return {strides, 1, p.key_heads, q.key_rows, elements, q.key_starts, p.batch, p.keys, 0.0f};
}

template <typename T>
static cuda_ops_status clear_unpacked(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    cuda_ops_status status;
    if (call.backward) {
        status = clear<T>(call.grad_query, rows_of_queries(p, p.grad_query, p.head_dim, 0.0f), call.stream);
        if (status == CUDA_OPS_SUCCESS)
            status = clear<T>(call.grad_key, rows_of_keys(p, p.grad_key, p.head_dim), call.stream);
        if (status == CUDA_OPS_SUCCESS)
            status = clear<T>(call.grad_value, rows_of_keys(p, p.grad_value, p.value_dim), call.stream);
        return status;
    }
    status = clear<T>(call.output, rows_of_queries(p, p.output, p.value_dim, 0.0f), call.stream);
    const cuda_ops_attention_strides dense = {0, p.sequences.query_rows, 1};
    return status != CUDA_OPS_SUCCESS
               ? status
               : clear<accumulate_type<T>>(call.logsumexp, rows_of_queries(p, dense, 1, -INFINITY), call.stream);
}

cuda_ops_status attention_clear_unpacked(const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return clear_unpacked<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

template <typename T>
static cuda_ops_status clear_keys(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const bool packed = p.sequences.query_starts;
    const int64_t batch = packed ? 1 : p.batch, rows = packed ? p.sequences.key_rows : p.keys;
    const ClearedRows keys = {p.grad_key, batch, p.key_heads, rows, p.head_dim, nullptr, 0, 0, 0.0f};
    const ClearedRows values = {p.grad_value, batch, p.key_heads, rows, p.value_dim, nullptr, 0, 0, 0.0f};
    const cuda_ops_status status = clear<T>(call.grad_key, keys, call.stream);
    return status != CUDA_OPS_SUCCESS ? status : clear<T>(call.grad_value, values, call.stream);
}

cuda_ops_status attention_clear_keys(const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return clear_keys<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
