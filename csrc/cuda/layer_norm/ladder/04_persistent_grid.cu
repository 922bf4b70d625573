// layer_norm, rung 4: a grid that stays, and goes down the rows with the parameters' gradients in its registers.
//     output = xhat * weight + bias, xhat = (input - mean) * rstd
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)), h = grad_output * weight
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
// Threads: as many blocks of 256 as the GPU runs at once; block b takes the rows b, b + gridDim.x, ... A thread has the
// same columns of each, and so can add up their part of grad_weight and grad_bias as it goes, with no other thread; at
// the end a block leaves one row of partial sums, and rung 2's second kernel adds a few hundred of those. Forward is
// rung 3's. Fixes: input and grad_output are read once, for all three gradients. Leaves: a block loads its next row
// when it is done with this one: while it waits at its barrier it asks memory for nothing, and there are fewer blocks
// on an SM to fill the gap, since the sums take registers. Bound by latency, row by row.
#include "layer_norm/ladder/row.cuh"

template <int K>
__global__ void __launch_bounds__(THREADS) layer_norm_persistent_grid_kernel(const LayerNormLadder a)
{
    __shared__ float2 scratch[2][WARPS]; // in turn: the barrier between two writes of one is the other's
    const int columns = (int)a.columns;
    float grad_weight[K] = {}, grad_bias[K] = {};
    int turn = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        float x[K], g[K];
        load_share<1>(x, a.input + row * columns, columns, threadIdx.x, THREADS, 0.0f);
        load_share<1>(g, a.grad_output + row * columns, columns, threadIdx.x, THREADS, 0.0f);
        write_grad_input<1>(a, row, x, g, scratch[turn]);
#pragma unroll
        for (int k = 0; k < K; k++) {
            grad_weight[k] += g[k] * x[k];
            grad_bias[k] += g[k];
        }
    }
    float *const to = a.partials + blockIdx.x * 2 * a.columns;
    store_share<1>(to, grad_weight, columns, threadIdx.x, THREADS);
    store_share<1>(to + columns, grad_bias, columns, threadIdx.x, THREADS);
}

cuda_ops_status layer_norm_persistent_grid(const LadderCall &call)
{
    const LayerNormLadder a = layer_norm_tensors(call);
    if (a.columns > LONGEST)
        return layer_norm_partial_sums(call);
    layer_norm_forward_by_blocks(a, false, call.stream);
    int64_t partials = 0;
    if (a.rows > 0 && a.columns > 0)
        DISPATCH_SHARE(a.columns, THREADS, K,
                       partials = launch_persistent(layer_norm_persistent_grid_kernel<K>, a, call.stream))
    layer_norm_sum_partials(a, partials, call.stream);
    return launch_status();
}
