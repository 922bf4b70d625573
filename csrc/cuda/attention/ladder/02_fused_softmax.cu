// attention, rung 2: one kernel; softmax happens on the way from one product to the other.
//     output = softmax(scale * query key^T) value
// Threads: a block of 256 for 64 queries of a head. It goes over the keys once for the scores, which it stores, and keeps
// the largest of each row; and a second time, when each thread takes back the scores that it has stored itself, makes
// exponentials of them, adds these up, and multiplies them by values. What rows are to be divided by is known at the end,
// and the division is one of the output's 64 or 128 numbers instead of one of each weight. Fixes: scores are written once
// and read once, where they were moved six times; two launches; tiles that no query of the block sees are left out.
// Leaves: the matrix, still of queries x keys, for which there has to be room. It is there only because an exponential
// needs the row's largest score, and that is known when the last key has been seen. Bound by the CUDA cores'
// multiply-adds, and by the shared memory that feeds them.
#include "attention/ladder/tile.cuh"

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_fused_softmax_kernel(const AttentionLadder a)
{
    extern __shared__ float4 shared[];
    Tiles<D> &tiles = *reinterpret_cast<Tiles<D> *>(shared);
    const int first_query = blockIdx.x * QUERIES, end = keys_of_block(a, first_query);
    const int64_t head = blockIdx.y;
    const T *const keys = static_cast<const T *>(a.key) + head * a.keys * D;
    const T *const values = static_cast<const T *>(a.value) + head * a.keys * D;
    float scores[ROWS][COLUMNS<D>], maximum[ROWS], sum[ROWS] = {};
    float output[ROWS][OUTPUTS<D>] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        maximum[r] = -CUDART_INF_F;
    const auto stored = [&](int r, int c, int first_key) -> float * { // NULL: beyond the matrix
        const int query = first_query + first_row_of_thread() + r, key = first_key + thread_x() + ACROSS * c;
        return query < a.queries && key < a.keys ? a.scores + (head * a.queries + query) * a.keys + key : nullptr;
    };

    load_tile<T, D>(tiles.query, static_cast<const T *>(a.query) + head * a.queries * D, first_query, a.queries);
    for (int first_key = 0; first_key < end; first_key += KEYS<D>) {
        load_tile<T, D>(tiles.other, keys, first_key, a.keys);
        __syncthreads();
        scores_of_tiles<D>(scores, tiles, a, first_query, first_key);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS<D>; c++) {
                maximum[r] = fmaxf(maximum[r], scores[r][c]);
                if (float *const to = stored(r, c, first_key))
                    *to = scores[r][c];
            }
        __syncthreads(); // read, before the next tile takes its place
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        maximum[r] = maximum_of_row(maximum[r]);
    for (int first_key = 0; first_key < end; first_key += KEYS<D>) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS<D>; c++) {
                const float *const from = stored(r, c, first_key);
                scores[r][c] = from ? expf(*from - maximum[r]) : 0.0f;
                sum[r] += scores[r][c];
            }
        put_weights<D>(tiles, scores);
        load_tile<T, D>(tiles.other, values, first_key, a.keys);
        __syncthreads();
        add_values<D>(output, tiles);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        sum[r] = 1 / sum_of_row(sum[r]);
    store_output<T, D>(static_cast<T *>(a.output) + head * a.queries * D, output, sum, first_query, a.queries);
}

cuda_ops_status attention_fused_softmax(const LadderCall &call)
{
    const AttentionLadder a = attention_tensors(call);
    const dim3 grid((unsigned int)ceil_div(a.queries, QUERIES), (unsigned int)a.heads);
    DISPATCH_ATTENTION(call, a, T, D, {
        allow_shared_memory(attention_fused_softmax_kernel<T, D>, sizeof(Tiles<D>));
        attention_fused_softmax_kernel<T, D><<<grid, THREADS, sizeof(Tiles<D>), call.stream>>>(a);
    })
    return launch_status();
}
