// softmax, rung 5: the warps of a block share a row, which they load by 16 bytes.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: a block of 512 for each row, of up to 16384 elements in its registers. Each warp does with its part what
// rung 4 does with a row; then 16 pairs of largest element and sum are merged through shared memory, with one barrier,
// and the exponentials, which each warp has made for its own largest element, get a factor. Fixes: rows of 16384 are
// read once, and by a quarter of the load instructions where they are aligned to 16 bytes. Leaves: of longer rows a
// block reads the second time what the first pass left in the L2, online; short rows leave most of a block idle at a
// barrier, and go faster by rung 4. Bound by memory.
#include "common/aligned_vector.cuh"
#include "ladder/share.cuh"
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

static constexpr int THREADS = 512, WARPS = THREADS / WARP_SIZE;

template <int COUNT, int K>
__global__ void __launch_bounds__(THREADS) softmax_block_a_row_kernel(float *output, const float *input, int columns)
{
    __shared__ SoftmaxState scratch[WARPS];
    const int64_t offset = (int64_t)blockIdx.x * columns;
    float x[K];
    load_share<COUNT>(x, input + offset, columns, threadIdx.x, THREADS, -INFINITY);
    const SoftmaxState of_warp = exponentials_of_warp(x), state = merged_over_block(of_warp, scratch);
    const float factor = expf(of_warp.maximum - state.maximum) / state.sum;
#pragma unroll
    for (int k = 0; k < K; k++)
        x[k] *= factor;
    store_share<COUNT>(output + offset, x, columns, threadIdx.x, THREADS);
}

// Of rows that do not fit.
__global__ void __launch_bounds__(THREADS) softmax_streamed_kernel(float *output, const float *input, int64_t columns)
{
    __shared__ SoftmaxState scratch[WARPS];
    const int64_t offset = blockIdx.x * columns;
    SoftmaxState state = state_of_none();
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < columns; c += THREADS)
        add_element(state, input[offset + c]);
    state = merged_over_block(merged_over_warp(state), scratch);
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < columns; c += THREADS)
        output[offset + c] = expf(input[offset + c] - state.maximum) / state.sum;
}

cuda_ops_status softmax_block_a_row(const LadderCall &call)
{
    float *const output = static_cast<float *>(call.outputs[0].data);
    const float *const input = static_cast<const float *>(call.inputs[0].data);
    const int64_t rows = call.inputs[0].sizes[0], columns = call.inputs[0].sizes[1];
    if (rows == 0 || columns == 0)
        return CUDA_OPS_SUCCESS;
    const bool vectors = columns % 4 == 0 && is_aligned_16(input) && is_aligned_16(output);
    if (columns > MOST_OF_SHARE * THREADS)
        softmax_streamed_kernel<<<(unsigned int)rows, THREADS, 0, call.stream>>>(output, input, columns);
    else if (vectors)
        DISPATCH_SHARE(columns, THREADS, K,
                       softmax_block_a_row_kernel<4, K>
                       <<<(unsigned int)rows, THREADS, 0, call.stream>>>(output, input, (int)columns))
    else
        DISPATCH_SHARE(columns, THREADS, K,
                       softmax_block_a_row_kernel<1, K>
                       <<<(unsigned int)rows, THREADS, 0, call.stream>>>(output, input, (int)columns))
    return launch_status();
}
