// layer_norm, rung 5: the next row is under way while this one is worked on, by 16 bytes a load.
//     output = xhat * weight + bias, xhat = (input - mean) * rstd
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)), h = grad_output * weight
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
// Threads: as in rung 4, but that a thread asks for its part of the block's next row before it computes with this one,
// and that a load or a store moves four elements; of columns that are no multiple of four, or pointers that are not
// aligned to 16 bytes, rung 4 takes care. Forward is rung 3's, by 16 bytes too. Fixes: the barrier of a row is waited
// for while the next one's loads are in flight. Leaves: two rows of input and grad_output, two of sums, and of 8192
// columns that is all the registers there are; short rows have a barrier for little work, where several rows a block
// would do better, as the library's kernel has them. Bound by memory.
#include "layer_norm/ladder/row.cuh"

template <int K>
__global__ void __launch_bounds__(THREADS) layer_norm_row_ahead_kernel(const LayerNormLadder a)
{
    __shared__ float2 scratch[2][WARPS]; // in turn: the barrier between two writes of one is the other's
    const int columns = (int)a.columns;
    float grad_weight[K] = {}, grad_bias[K] = {}, next_x[K], next_g[K];
    int turn = 0;
    load_share<4>(next_x, a.input + (int64_t)blockIdx.x * columns, columns, threadIdx.x, THREADS, 0.0f);
    load_share<4>(next_g, a.grad_output + (int64_t)blockIdx.x * columns, columns, threadIdx.x, THREADS, 0.0f);
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        float x[K], g[K];
#pragma unroll
        for (int k = 0; k < K; k++)
            x[k] = next_x[k], g[k] = next_g[k];
        const int64_t next = row + gridDim.x;
        const int there = next < a.rows ? columns : 0; // columns of the next row, if there is one
        load_share<4>(next_x, a.input + next * columns, there, threadIdx.x, THREADS, 0.0f);
        load_share<4>(next_g, a.grad_output + next * columns, there, threadIdx.x, THREADS, 0.0f);
        write_grad_input<4>(a, row, x, g, scratch[turn]);
#pragma unroll
        for (int k = 0; k < K; k++) {
            grad_weight[k] += g[k] * x[k];
            grad_bias[k] += g[k];
        }
    }
    float *const to = a.partials + blockIdx.x * 2 * a.columns;
    store_share<4>(to, grad_weight, columns, threadIdx.x, THREADS);
    store_share<4>(to + columns, grad_bias, columns, threadIdx.x, THREADS);
}

cuda_ops_status layer_norm_row_ahead(const LadderCall &call)
{
    const LayerNormLadder a = layer_norm_tensors(call);
    if (a.columns > LONGEST || !layer_norm_takes_vectors(a) || a.rows == 0 || a.columns == 0)
        return layer_norm_persistent_grid(call);
    layer_norm_forward_by_blocks(a, true, call.stream);
    int64_t partials;
    DISPATCH_SHARE(a.columns, THREADS, K, partials = launch_persistent(layer_norm_row_ahead_kernel<K>, a, call.stream))
    layer_norm_sum_partials(a, partials, call.stream);
    return launch_status();
}
