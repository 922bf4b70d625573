// attention's rows that no kernel of a path writes. Of packed tensors those that no sequence has become 0, of
// logsumexp -inf: each lane searches for a row's sequence, and the warp writes the rows that have none, of all heads;
// there are few of them as a rule, and the search, which waits for one start after the other, is all that it costs.
// And where there are no queries, all of the keys' and values' gradients are 0.
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
    void *tensor;
    cuda_ops_attention_strides strides;
    int64_t batch, heads, rows, elements;
    const int32_t *starts; // of `sequences` sequences; NULL: there are none
    int64_t sequences, longest;
    int is_logsumexp; // of accumulate_type, and -inf is written instead of 0
};

// Block y of the grid has tensor y.
static constexpr int MOST_TENSORS = 3;
struct ClearedTensors {
    ClearedRows tensors[MOST_TENSORS];
};

template <typename T>
static __device__ void clear_row(const ClearedRows &work, int64_t index, T value)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t batch = index / work.rows, row = index - batch * work.rows;
    T *const to = (T *)work.tensor + batch * work.strides.batch + row * work.strides.row;
    for (int64_t head = 0; head < work.heads; head++)
        for (int64_t d = lane; d < work.elements; d += WARP_SIZE)
            to[head * work.strides.head + d] = value;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) attention_clear_kernel(const __grid_constant__ ClearedTensors all)
{
    const ClearedRows &work = all.tensors[blockIdx.y];
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t count = work.batch * work.rows;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = global_thread_index() - lane; first < count; first += global_thread_count()) {
        const int64_t mine = first + lane;
        const bool clear = mine < count && !(work.starts && is_of_a_sequence(work.starts, work.sequences, work.longest,
                                                                             mine % work.rows));
        for (unsigned int left = __ballot_sync(FULL_WARP, clear); left; left &= left - 1) {
            const int64_t index = first + __ffs((int)left) - 1;
            if (work.is_logsumexp)
                clear_row(work, index, accumulate_type<T>(-INFINITY));
            else
                clear_row(work, index, store_from_accumulate<T>(accumulate_type<T>(0)));
        }
    }
}

template <typename T>
static cuda_ops_status clear(const ClearedTensors &all, int count, cudaStream_t stream)
{
    int64_t rows = 0;
    for (int i = 0; i < count; i++) {
        const ClearedRows &work = all.tensors[i];
        const int64_t own = work.heads == 0 || work.elements == 0 ? 0 : work.batch * work.rows;
        rows = own > rows ? own : rows;
    }
    if (rows == 0)
        return CUDA_OPS_SUCCESS;
    const dim3 grid(clamp_grid(ceil_div(rows, THREADS)), (unsigned int)count);
    launch_dependent(attention_clear_kernel<T>, grid, dim3(THREADS), 0, stream, all);
    return launch_status();
}

// Of packed tensors.
static ClearedRows rows_of_queries(void *tensor, const cuda_ops_attention &p, const cuda_ops_attention_strides &strides,
                                   int64_t elements)
{
    const cuda_ops_attention_sequences &q = p.sequences;
    return {tensor, strides, 1, p.heads, q.query_rows, elements, q.query_starts, p.batch, p.queries, false};
}
static ClearedRows rows_of_keys(void *tensor, const cuda_ops_attention &p, const cuda_ops_attention_strides &strides,
                                int64_t elements)
{
    const cuda_ops_attention_sequences &q = p.sequences;
    return {tensor, strides, 1, p.key_heads, q.key_rows, elements, q.key_starts, p.batch, p.keys, false};
}

template <typename T>
static cuda_ops_status clear_unpacked(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    if (call.backward)
        return clear<T>({{rows_of_queries(call.grad_query, p, p.grad_query, p.head_dim),
                          rows_of_keys(call.grad_key, p, p.grad_key, p.head_dim),
                          rows_of_keys(call.grad_value, p, p.grad_value, p.value_dim)}},
                        3, call.stream);
    ClearedRows logsumexp = rows_of_queries(call.logsumexp, p, {0, p.sequences.query_rows, 1}, 1);
    logsumexp.is_logsumexp = true;
    return clear<T>({{rows_of_queries(call.output, p, p.output, p.value_dim), logsumexp}}, 2, call.stream);
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
    return clear<T>({{{call.grad_key, p.grad_key, batch, p.key_heads, rows, p.head_dim, nullptr, 0, 0, false},
                      {call.grad_value, p.grad_value, batch, p.key_heads, rows, p.value_dim, nullptr, 0, 0, false}}},
                    2, call.stream);
}

cuda_ops_status attention_clear_keys(const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return clear_keys<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
