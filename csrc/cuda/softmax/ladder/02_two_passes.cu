// softmax, rung 2: online: the largest element and the sum in one pass.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: one for each row. The sum is kept for the largest element so far; when a larger one turns up, what has been
// added is too large by exp(new - old), and is multiplied by exp(old - new). Fixes: two passes over memory instead of
// three. Leaves: two exponentials for each element in the first pass, which is more arithmetic for less memory, a good
// bargain as a rule; the passes are as bad as before, 32 cache lines for each load of a warp. Bound by latency still.
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

static constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS)
    softmax_two_passes_kernel(float *output, const float *input, int64_t rows, int64_t columns)
{
    const int64_t row = global_thread_index();
    if (row >= rows)
        return;
    const float *const x = input + row * columns;
    SoftmaxState state = state_of_none();
    for (int64_t c = 0; c < columns; c++)
        add_element(state, x[c]);
    for (int64_t c = 0; c < columns; c++)
        output[row * columns + c] = expf(x[c] - state.maximum) / state.sum;
}

cuda_ops_status softmax_two_passes(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    if (input.count > 0)
        softmax_two_passes_kernel<<<(unsigned int)ceil_div(input.sizes[0], THREADS), THREADS, 0, call.stream>>>(
            static_cast<float *>(call.outputs[0].data), static_cast<const float *>(input.data), input.sizes[0],
            input.sizes[1]);
    return launch_status();
}
