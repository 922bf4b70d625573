// attention of packed sequences: rows of the packed tensors that no sequence has become 0, of logsumexp -inf.
// A warp a row and head: a search among the sequences, and nothing to be written where the row is one's, as most are.
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

// value: of logsumexp, where `strides.row` is 1 and there is one element.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attention_clear_kernel(T *tensor, cuda_ops_attention_strides strides, int64_t elements, const int32_t *starts,
                           int64_t batch, int64_t longest, int64_t rows, int64_t heads, float value)
{
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t index = global_thread_index() / WARP_SIZE; index < rows * heads;
         index += global_thread_count() / WARP_SIZE) {
        const int64_t row = index / heads, head = index % heads;
        if (!is_of_a_sequence(starts, batch, longest, row))
            for (int64_t d = lane; d < elements; d += WARP_SIZE)
                tensor[head * strides.head + row * strides.row + d] =
                    store_from_accumulate<T>(accumulate_type<T>(value));
    }
}

template <typename T>
static cuda_ops_status clear(void *tensor, const cuda_ops_attention_strides &strides, int64_t elements, bool of_keys,
                             const cuda_ops_attention &p, float value, cudaStream_t stream)
{
    const cuda_ops_attention_sequences &q = p.sequences;
    const int64_t rows = of_keys ? q.key_rows : q.query_rows, heads = of_keys ? p.key_heads : p.heads;
    if (rows == 0 || heads == 0 || elements == 0)
        return CUDA_OPS_SUCCESS;
    attention_clear_kernel<T><<<clamp_grid(ceil_div(rows * heads, THREADS / WARP_SIZE)), THREADS, 0, stream>>>(
        (T *)tensor, strides, elements, of_keys ? q.key_starts : q.query_starts, p.batch, of_keys ? p.keys : p.queries,
        rows, heads, value);
    return launch_status();
}

template <typename T>
static cuda_ops_status clear_all(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    if (call.backward) {
        cuda_ops_status status = clear<T>(call.grad_query, p.grad_query, p.head_dim, false, p, 0.0f, call.stream);
        if (status == CUDA_OPS_SUCCESS)
            status = clear<T>(call.grad_key, p.grad_key, p.head_dim, true, p, 0.0f, call.stream);
        if (status == CUDA_OPS_SUCCESS)
            status = clear<T>(call.grad_value, p.grad_value, p.value_dim, true, p, 0.0f, call.stream);
        return status;
    }
    const cuda_ops_status status = clear<T>(call.output, p.output, p.value_dim, false, p, 0.0f, call.stream);
    const cuda_ops_attention_strides dense = {0, p.sequences.query_rows, 1};
    return status != CUDA_OPS_SUCCESS
               ? status
               : clear<accumulate_type<T>>(call.logsumexp, dense, 1, false, p, -INFINITY, call.stream);
}

cuda_ops_status attention_clear_unpacked(const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return clear_all<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
