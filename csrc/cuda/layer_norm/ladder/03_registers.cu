// layer_norm, rung 3: the row stays in a block's registers.
//     output = xhat * weight + bias, xhat = (input - mean) * rstd
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)), h = grad_output * weight
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
// Threads: a block of 256 for each row of up to 8192 elements, 32 for each thread; longer ones go to rung 2. Forward
// reads the row once, and finds mean and variance, one after the other, in registers. Backward reads input and
// grad_output once and finds both means with one barrier. The parameters' gradients are rung 2's. Fixes: one pass where
// there were three, and one where there were two. Leaves: the sums over rows read input and grad_output once more,
// after grad_input did, and of more than the L2 holds from memory. Bound by memory: seven reads and writes of a tensor,
// where five would do.
#include "layer_norm/ladder/row.cuh"

template <int COUNT, int K>
__global__ void __launch_bounds__(THREADS) layer_norm_forward_by_blocks_kernel(const LayerNormLadder a)
{
    __shared__ float scratch[WARP_SIZE];
    const int columns = (int)a.columns;
    const int64_t row = blockIdx.x;
    float x[K], weight[K], bias[K];
    load_share<COUNT>(x, a.input + row * columns, columns, threadIdx.x, THREADS, 0.0f);
    float sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < K; k++)
        sum += x[k];
    const float mean = block_sum(sum, scratch) / (float)columns;
#pragma unroll
    for (int k = 0; k < K; k++)
        if (column_of_share<COUNT>(k, threadIdx.x, THREADS) < columns)
            squares += (x[k] - mean) * (x[k] - mean);
    const float rstd = 1 / sqrtf(block_sum(squares, scratch) / (float)columns + a.eps);
    load_share<COUNT>(weight, a.weight, columns, threadIdx.x, THREADS, 0.0f);
    load_share<COUNT>(bias, a.bias, columns, threadIdx.x, THREADS, 0.0f);
#pragma unroll
    for (int k = 0; k < K; k++)
        x[k] = (x[k] - mean) * rstd * weight[k] + bias[k];
    store_share<COUNT>(a.output + row * columns, x, columns, threadIdx.x, THREADS);
    if (threadIdx.x == 0) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

template <int K>
__global__ void __launch_bounds__(THREADS) layer_norm_grad_input_kernel(const LayerNormLadder a)
{
    __shared__ float2 scratch[WARPS];
    const int64_t row = blockIdx.x;
    float x[K], g[K];
    load_share<1>(x, a.input + row * a.columns, (int)a.columns, threadIdx.x, THREADS, 0.0f);
    load_share<1>(g, a.grad_output + row * a.columns, (int)a.columns, threadIdx.x, THREADS, 0.0f);
    write_grad_input<1>(a, row, x, g, scratch);
}

void layer_norm_forward_by_blocks(const LayerNormLadder &a, bool vectors, cudaStream_t stream)
{
    if (a.rows == 0 || a.columns == 0)
        return;
    const unsigned int rows = (unsigned int)a.rows;
    if (vectors)
        DISPATCH_SHARE(a.columns, THREADS, K,
                       layer_norm_forward_by_blocks_kernel<4, K><<<rows, THREADS, 0, stream>>>(a))
    else
        DISPATCH_SHARE(a.columns, THREADS, K,
                       layer_norm_forward_by_blocks_kernel<1, K><<<rows, THREADS, 0, stream>>>(a))
}

cuda_ops_status layer_norm_registers(const LadderCall &call)
{
    const LayerNormLadder a = layer_norm_tensors(call);
    if (a.columns > LONGEST)
        return layer_norm_partial_sums(call);
    layer_norm_forward_by_blocks(a, false, call.stream);
    if (a.rows > 0 && a.columns > 0)
        DISPATCH_SHARE(a.columns, THREADS, K,
                       layer_norm_grad_input_kernel<K><<<(unsigned int)a.rows, THREADS, 0, call.stream>>>(a))
    layer_norm_grads_of_parameters(a, call.stream);
    return launch_status();
}
