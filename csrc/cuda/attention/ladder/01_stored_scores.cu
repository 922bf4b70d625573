// attention, rung 1: three kernels, and the matrix of scores in memory between them, as a framework runs the formula.
//     output = softmax(scale * query key^T) value
// Threads: a block of 256 for a tile of 64 queries by 64 or 32 keys of a head, which multiplies as gemm's ladder does
// with tiles in shared memory (tile.cuh); then a warp for each row of scores, which goes over it three times, for the
// largest score, for the sum of exponentials, and to write, as softmax's first rungs do; then a block for 64 queries,
// which takes the weights back tile by tile and multiplies by values. Leaves: a matrix of queries x keys float32 numbers
// for each head: of 4096 tokens and 64 heads it is 4.3 GB, where all that goes in and comes out is 0.27; it is written
// twice and read four times. And where queries see only keys before them, half of it is computed for nothing. Bound by
// the CUDA cores' multiply-adds for three quarters of its time, and by that traffic for the rest.
#include "attention/ladder/tile.cuh"

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_scores_kernel(const AttentionLadder a)
{
    extern __shared__ float4 shared[];
    Tiles<D> &tiles = *reinterpret_cast<Tiles<D> *>(shared);
    const int first_key = blockIdx.x * KEYS<D>, first_query = blockIdx.y * QUERIES;
    const int64_t head = blockIdx.z;
    load_tile<T, D>(tiles.query, static_cast<const T *>(a.query) + head * a.queries * D, first_query, a.queries);
    load_tile<T, D>(tiles.other, static_cast<const T *>(a.key) + head * a.keys * D, first_key, a.keys);
    __syncthreads();
    float scores[ROWS][COLUMNS<D>];
    scores_of_tiles<D>(scores, tiles, a, first_query, first_key);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS<D>; c++) {
            const int query = first_query + first_row_of_thread() + r, key = first_key + thread_x() + ACROSS * c;
            if (query < a.queries && key < a.keys)
                a.scores[(head * a.queries + query) * a.keys + key] = scores[r][c];
        }
}

__global__ void __launch_bounds__(THREADS) attention_softmax_kernel(const AttentionLadder a)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = global_thread_index() / WARP_SIZE;
    if (row >= (int64_t)a.heads * a.queries)
        return;
    float *const scores = a.scores + row * a.keys;
    float maximum = -CUDART_INF_F, sum = 0;
    for (int key = lane; key < a.keys; key += WARP_SIZE)
        maximum = fmaxf(maximum, scores[key]);
    maximum = warp_max(maximum);
    for (int key = lane; key < a.keys; key += WARP_SIZE)
        sum += expf(scores[key] - maximum);
    sum = warp_sum(sum);
    for (int key = lane; key < a.keys; key += WARP_SIZE)
        scores[key] = expf(scores[key] - maximum) / sum;
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_values_kernel(const AttentionLadder a)
{
    extern __shared__ float4 shared[];
    Tiles<D> &tiles = *reinterpret_cast<Tiles<D> *>(shared);
    const int first_query = blockIdx.x * QUERIES;
    const int64_t head = blockIdx.y;
    const T *const values = static_cast<const T *>(a.value) + head * a.keys * D;
    float output[ROWS][OUTPUTS<D>] = {};
    const float ones[ROWS] = {1, 1, 1, 1};
    for (int first_key = 0; first_key < a.keys; first_key += KEYS<D>) {
        float weights[ROWS][COLUMNS<D>];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS<D>; c++) {
                const int query = first_query + first_row_of_thread() + r, key = first_key + thread_x() + ACROSS * c;
                const bool there = query < a.queries && key < a.keys;
                weights[r][c] = there ? a.scores[(head * a.queries + query) * a.keys + key] : 0.0f;
            }
        put_weights<D>(tiles, weights);
        load_tile<T, D>(tiles.other, values, first_key, a.keys);
        __syncthreads();
        add_values<D>(output, tiles);
        __syncthreads(); // read, before the next tile takes its place
    }
    store_output<T, D>(static_cast<T *>(a.output) + head * a.queries * D, output, ones, first_query, a.queries);
}

cuda_ops_status attention_stored_scores(const LadderCall &call)
{
    const AttentionLadder a = attention_tensors(call);
    const unsigned int tiles = (unsigned int)ceil_div(a.queries, QUERIES), heads = (unsigned int)a.heads;
    const int64_t rows = (int64_t)a.heads * a.queries;
    DISPATCH_ATTENTION(call, a, T, D, {
        const size_t bytes = sizeof(Tiles<D>);
        allow_shared_memory(attention_scores_kernel<T, D>, bytes);
        allow_shared_memory(attention_values_kernel<T, D>, bytes);
        attention_scores_kernel<T, D>
            <<<dim3((unsigned int)ceil_div(a.keys, KEYS<D>), tiles, heads), THREADS, bytes, call.stream>>>(a);
        attention_softmax_kernel<<<(unsigned int)ceil_div(rows, THREADS / WARP_SIZE), THREADS, 0, call.stream>>>(a);
        attention_values_kernel<T, D><<<dim3(tiles, heads), THREADS, bytes, call.stream>>>(a);
    })
    return launch_status();
}
