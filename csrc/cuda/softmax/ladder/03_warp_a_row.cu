// softmax, rung 3: the lanes of a warp share a row.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: a warp for each row, in blocks of 128. Lane l has the elements l, l + 32, ..., and a largest element and a
// sum of its own; five shuffles merge the 32 pairs, by the rule by which rung 2 adds an element. Fixes: a warp's load
// is one cache line; there are 32 times as many threads, and so as many loads in flight. Leaves: the row is read twice,
// the second time from a cache as a rule; three exponentials are made for each element, where one would do. Bound by
// these, and by memory where rows are too long for the caches.
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

static constexpr int THREADS = 128, ROWS = THREADS / WARP_SIZE; // of a block

__global__ void __launch_bounds__(THREADS)
    softmax_warp_a_row_kernel(float *output, const float *input, int64_t rows, int64_t columns)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / WARP_SIZE;
    if (row >= rows)
        return;
    const float *const x = input + row * columns;
    SoftmaxState state = state_of_none();
    for (int64_t c = lane; c < columns; c += WARP_SIZE)
        add_element(state, x[c]);
    state = merged_over_warp(state);
    for (int64_t c = lane; c < columns; c += WARP_SIZE)
        output[row * columns + c] = expf(x[c] - state.maximum) / state.sum;
}

cuda_ops_status softmax_warp_a_row(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    if (input.count > 0)
        softmax_warp_a_row_kernel<<<(unsigned int)ceil_div(input.sizes[0], ROWS), THREADS, 0, call.stream>>>(
            static_cast<float *>(call.outputs[0].data), static_cast<const float *>(input.data), input.sizes[0],
            input.sizes[1]);
    return launch_status();
}
