// layer_norm, rung 1: a warp a row, which adds its part of the parameters' gradients to memory, by atomics.
//     output = xhat * weight + bias, xhat = (input - mean) * rstd
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)), h = grad_output * weight
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
// Threads: a warp for each row, in blocks of 256. Forward goes over the row for the mean, for the variance (the mean of
// squared distances from the mean; the mean of squares less the square of the mean would lose all digits where the mean
// is large), and to write. Backward goes over input and grad_output twice: for the two means, and to write. Leaves:
// sums along rows stay in a warp, sums over rows do not: each element is two atomic additions, to addresses that all
// rows share, so that the L2 makes those of one column one after the other, in any order: not the same bits twice.
// Bound by the atomics.
#include "common/common.cuh"
#include "layer_norm/ladder/rungs.h"

static constexpr int THREADS = 256, ROWS = THREADS / WARP_SIZE; // of a block

__global__ void __launch_bounds__(THREADS) layer_norm_forward_by_warps_kernel(const LayerNormLadder a)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / WARP_SIZE;
    if (row >= a.rows)
        return;
    const float *const x = a.input + row * a.columns;
    float sum = 0, squares = 0;
    for (int64_t c = lane; c < a.columns; c += WARP_SIZE)
        sum += x[c];
    const float mean = warp_sum(sum) / (float)a.columns;
    for (int64_t c = lane; c < a.columns; c += WARP_SIZE)
        squares += (x[c] - mean) * (x[c] - mean);
    const float rstd = 1 / sqrtf(warp_sum(squares) / (float)a.columns + a.eps);
    for (int64_t c = lane; c < a.columns; c += WARP_SIZE)
        a.output[row * a.columns + c] = (x[c] - mean) * rstd * a.weight[c] + a.bias[c];
    if (lane == 0) { // for backward
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

template <bool ATOMICS> // without them, grad_input alone: rung 2's
__global__ void __launch_bounds__(THREADS) layer_norm_backward_by_warps_kernel(const LayerNormLadder a)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / WARP_SIZE, offset = row * a.columns;
    if (row >= a.rows)
        return;
    const float mean = a.mean[row], rstd = a.rstd[row];
    float sum = 0, product = 0;
    for (int64_t c = lane; c < a.columns; c += WARP_SIZE) {
        const float h = a.grad_output[offset + c] * a.weight[c];
        sum += h;
        product += h * (a.input[offset + c] - mean) * rstd;
    }
    sum = warp_sum(sum) / (float)a.columns;
    product = warp_sum(product) / (float)a.columns;
    for (int64_t c = lane; c < a.columns; c += WARP_SIZE) {
        const float g = a.grad_output[offset + c], xhat = (a.input[offset + c] - mean) * rstd;
        a.grad_input[offset + c] = rstd * (g * a.weight[c] - sum - xhat * product);
        if (ATOMICS) {
            atomicAdd(&a.grad_weight[c], g * xhat);
            atomicAdd(&a.grad_bias[c], g);
        }
    }
}

int64_t layer_norm_workspace(const LadderCall &call)
{
    const int64_t rows = call.inputs[0].sizes[0], columns = call.inputs[0].sizes[1];
    return (layer_norm_most_partials(rows) * 2 * columns + 2 * rows) * (int64_t)sizeof(float);
}

void layer_norm_forward_by_warps(const LayerNormLadder &a, cudaStream_t stream)
{
    if (a.rows > 0 && a.columns > 0)
        layer_norm_forward_by_warps_kernel<<<(unsigned int)ceil_div(a.rows, ROWS), THREADS, 0, stream>>>(a);
}

void layer_norm_grad_input_by_warps(const LayerNormLadder &a, cudaStream_t stream)
{
    if (a.rows > 0 && a.columns > 0)
        layer_norm_backward_by_warps_kernel<false><<<(unsigned int)ceil_div(a.rows, ROWS), THREADS, 0, stream>>>(a);
}

cuda_ops_status layer_norm_global_atomics(const LadderCall &call)
{
    const LayerNormLadder a = layer_norm_tensors(call);
    layer_norm_forward_by_warps(a, call.stream);
    cudaMemsetAsync(a.grad_weight, 0, a.columns * sizeof(float), call.stream);
    cudaMemsetAsync(a.grad_bias, 0, a.columns * sizeof(float), call.stream);
    if (a.rows > 0 && a.columns > 0)
        layer_norm_backward_by_warps_kernel<true><<<(unsigned int)ceil_div(a.rows, ROWS), THREADS, 0, call.stream>>>(a);
    return launch_status();
}
