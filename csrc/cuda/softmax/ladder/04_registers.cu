// softmax, rung 4: the row stays in the warp's registers.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: a warp for each row of up to 1024 elements, 32 for each lane, with as many loads in flight. What has been
// read once need not be read online: the largest element comes first, by five shuffles, then the exponentials, once
// each, in place, then their sum. Fixes: one pass over memory, one exponential for each element instead of three.
// Leaves: longer rows, which go to rung 3: a lane has 255 registers and no more. Bound by memory, where rows fit.
#include "ladder/share.cuh"
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

static constexpr int THREADS = 128, ROWS = THREADS / WARP_SIZE; // of a block

template <int K>
__global__ void __launch_bounds__(THREADS)
    softmax_registers_kernel(float *output, const float *input, int64_t rows, int columns)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / WARP_SIZE;
    if (row >= rows)
        return;
    float x[K];
    load_share<1>(x, input + row * columns, columns, lane, WARP_SIZE, -INFINITY);
    const SoftmaxState state = exponentials_of_warp(x);
#pragma unroll
    for (int k = 0; k < K; k++)
        x[k] /= state.sum;
    store_share<1>(output + row * columns, x, columns, lane, WARP_SIZE);
}

cuda_ops_status softmax_registers(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    const int64_t rows = input.sizes[0], columns = input.sizes[1];
    if (columns > MOST_OF_SHARE * WARP_SIZE)
        return softmax_warp_a_row(call);
    if (input.count > 0)
        DISPATCH_SHARE(columns, WARP_SIZE, K,
                       softmax_registers_kernel<K><<<(unsigned int)ceil_div(rows, ROWS), THREADS, 0, call.stream>>>(
                           static_cast<float *>(call.outputs[0].data), static_cast<const float *>(input.data), rows,
                           (int)columns));
    return launch_status();
}
