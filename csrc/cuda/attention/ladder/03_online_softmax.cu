// attention, rung 3: online softmax: the matrix of scores is never stored.
//     output = softmax(scale * query key^T) value
// Threads: a block of 256 for 64 queries of a head, which goes over the keys once. Of each row it keeps the largest score
// so far, the sum of exponentials and the output, both relative to it. When a tile has a larger score, what is there was
// made with exp(score - old) and should have been made with exp(score - new): all of it is too large by exp(new - old),
// and is multiplied by exp(old - new), sum and output alike. (Softmax's ladder does so with the sum alone, in its rung
// 2.) Fixes: no workspace, and no traffic but that of the four tensors; each tile's scores live in registers, and its
// weights in shared memory. Of speed that is worth 7 % at a head_dim of 64, and costs 9 % at 128, where the output that
// is multiplied for each tile is twice as wide: what it is worth shows when products are fast, in rung 4. Leaves:
// products on the CUDA cores, whose float32 multiply-adds are a fifteenth of what the tensor cores do in bfloat16;
// weights go to shared memory and back, since the threads that multiply them are not those that made them; and loading,
// computing and waiting take turns at barriers. Bound by the CUDA cores' multiply-adds, and by the shared memory that
// feeds them.
#include "attention/ladder/tile.cuh"

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_online_softmax_kernel(const AttentionLadder a)
{
    extern __shared__ float4 shared[];
    Tiles<D> &tiles = *reinterpret_cast<Tiles<D> *>(shared);
    // The last queries come first: where they see only keys before them, they take longest.
    const int first_query = (gridDim.x - 1 - blockIdx.x) * QUERIES, end = keys_of_block(a, first_query);
    const int64_t head = blockIdx.y;
    const T *const keys = static_cast<const T *>(a.key) + head * a.keys * D;
    const T *const values = static_cast<const T *>(a.value) + head * a.keys * D;
    float scores[ROWS][COLUMNS<D>], maximum[ROWS], sum[ROWS] = {};
    float output[ROWS][OUTPUTS<D>] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        maximum[r] = -CUDART_INF_F;

    load_tile<T, D>(tiles.query, static_cast<const T *>(a.query) + head * a.queries * D, first_query, a.queries);
    for (int first_key = 0; first_key < end; first_key += KEYS<D>) {
        load_tile<T, D>(tiles.other, keys, first_key, a.keys);
        __syncthreads();
        scores_of_tiles<D>(scores, tiles, a, first_query, first_key);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float largest = maximum[r];
#pragma unroll
            for (int c = 0; c < COLUMNS<D>; c++)
                largest = fmaxf(largest, scores[r][c]);
            largest = maximum_of_row(largest); // finite: all queries see key 0, which is in the first tile
            const float factor = expf(maximum[r] - largest); // of the first tile exp(-inf), 0
            maximum[r] = largest;
            sum[r] *= factor;
#pragma unroll
            for (int c = 0; c < COLUMNS<D>; c++) {
                scores[r][c] = expf(scores[r][c] - largest);
                sum[r] += scores[r][c];
            }
#pragma unroll
            for (int j = 0; j < OUTPUTS<D>; j++)
                output[r][j] *= factor;
        }
        put_weights<D>(tiles, scores);
        __syncthreads(); // the keys have been read: values take their place
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

cuda_ops_status attention_online_softmax(const LadderCall &call)
{
    const AttentionLadder a = attention_tensors(call);
    const dim3 grid((unsigned int)ceil_div(a.queries, QUERIES), (unsigned int)a.heads);
    DISPATCH_ATTENTION(call, a, T, D, {
        allow_shared_memory(attention_online_softmax_kernel<T, D>, sizeof(Tiles<D>));
        attention_online_softmax_kernel<T, D><<<grid, THREADS, sizeof(Tiles<D>), call.stream>>>(a);
    })
    return launch_status();
}
