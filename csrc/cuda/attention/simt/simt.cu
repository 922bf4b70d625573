// attention, simt path: delta, dropout's factors, and which instance of the kernels (kernel.cuh) a call gets.
#include "attention/simt/simt.h"
#include "attention/tile_scores.cuh"

// Of the kernels without tiles.
static constexpr int PLAIN_THREADS = 256;

// Of all weights: a thread has two keys, j even and j + 1, of a query.
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_dropout_factors_kernel(T *factors, const __grid_constant__ cuda_ops_attention p)
{
    typedef accumulate_type<T> A;
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    const int64_t pairs = ceil_div(p.keys, 2), rows = p.batch * p.heads * p.queries;
    for (int64_t at = global_thread_index(); at < rows * pairs; at += global_thread_count()) {
        const int64_t row = at / pairs, j = at % pairs * 2;
        A both[2];
        dropout_factors(both, p, row / p.queries, row % p.queries, j, seed, offset);
        T *const to = factors + row * p.keys + j;
        to[0] = store_from_accumulate<T>(both[0]);
        if (j + 1 < p.keys)
            to[1] = store_from_accumulate<T>(both[1]);
    }
}

extern "C" cuda_ops_status cuda_ops_attention_dropout_factors_cuda(void *factors, const cuda_ops_attention *call,
                                                                   cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    const cuda_ops_attention &p = *call;
    if (p.batch < 0 || p.heads < 0 || p.queries < 0 || p.keys < 0 || !(p.dropout >= 0 && p.dropout <= 1))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t pairs = p.batch * p.heads * p.queries * ceil_div(p.keys, 2);
    if (pairs == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        attention_dropout_factors_kernel<T>
        <<<clamp_grid(ceil_div(pairs, PLAIN_THREADS)), PLAIN_THREADS, 0, (cudaStream_t)stream>>>((T *)factors, p);
        return launch_status());
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// A warp a row.
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_delta_kernel(accumulate_type<T> *delta, const T *grad_output, const T *output,
                           const accumulate_type<T> *grad_logsumexp, cuda_ops_attention_strides grad_output_strides,
                           cuda_ops_attention_strides output_strides, int64_t rows, int64_t heads, int64_t queries,
                           int64_t elements)
{
    typedef accumulate_type<T> A;
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t row = global_thread_index() / WARP_SIZE; row < rows; row += global_thread_count() / WARP_SIZE) {
        const int64_t i = row % queries, head = row / queries % heads, batch = row / queries / heads;
        const T *const g =
            rows_of<T>((const void *)grad_output, grad_output_strides, batch, head) + i * grad_output_strides.row;
        const T *const o = rows_of<T>((const void *)output, output_strides, batch, head) + i * output_strides.row;
        A sum = 0;
        for (int64_t d = lane; d < elements; d += WARP_SIZE)
            sum += load_as_accumulate(g[d]) * load_as_accumulate(o[d]);
        sum = warp_sum(sum);
        if (lane == 0)
            delta[row] = sum - (grad_logsumexp ? grad_logsumexp[row] : A(0));
    }
}

template <typename T>
static cuda_ops_status launch_delta(void *delta, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    const int64_t rows = attention_rows(p), queries = p.sequences.query_starts ? p.sequences.query_rows : p.queries;
    attention_delta_kernel<T><<<clamp_grid(ceil_div(rows, PLAIN_THREADS / WARP_SIZE)), PLAIN_THREADS, 0, call.stream>>>(
        (A *)delta, (const T *)call.grad_output, (const T *)call.output, (const A *)call.grad_logsumexp, p.grad_output,
        p.output, rows, p.heads, queries, p.value_dim);
    return launch_status();
}

cuda_ops_status attention_delta(void *delta, const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_delta<T>(delta, call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// Three numbers a row: delta, and what grad_query's kernel has mended for that of grad_key and grad_value.
int64_t attention_simt_workspace(const AttentionCall &call, const Device &)
{
    return call.backward ? attention_rows(call.problem) * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) * 3 : 0;
}

cuda_ops_status attention_simt(const AttentionCall &call, const Device &)
{
    switch (call.dtype) {
    case CUDA_OPS_FLOAT32:
        return attention_simt_float32(call);
    case CUDA_OPS_FLOAT64:
        return attention_simt_float64(call);
    case CUDA_OPS_FLOAT16:
        return attention_simt_float16(call);
    case CUDA_OPS_BFLOAT16:
        return attention_simt_bfloat16(call);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
