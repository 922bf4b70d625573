// softmax, rung 1: a thread goes over its row for the largest element, for the sum, and to write.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: one for each row. The largest element is taken off so that no exponential overflows; the quotient does not
// change. Leaves: a row is read three times, and from memory each time, where a GPU's rows together are larger than its
// caches; the 32 rows of a warp lie far apart, so that each of its loads asks for 32 cache lines, of which it uses 4
// bytes each; and where there are few rows, there are few threads. Bound by the latency of memory, over and over.
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

static constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS)
    softmax_three_passes_kernel(float *output, const float *input, int64_t rows, int64_t columns)
{
    const int64_t row = global_thread_index();
    if (row >= rows)
        return;
    const float *const x = input + row * columns;
    float maximum = -FLT_MAX, sum = 0;
    for (int64_t c = 0; c < columns; c++)
        maximum = fmaxf(maximum, x[c]);
    for (int64_t c = 0; c < columns; c++)
        sum += expf(x[c] - maximum);
    for (int64_t c = 0; c < columns; c++)
        output[row * columns + c] = expf(x[c] - maximum) / sum;
}

cuda_ops_status softmax_three_passes(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    if (input.count > 0)
        softmax_three_passes_kernel<<<(unsigned int)ceil_div(input.sizes[0], THREADS), THREADS, 0, call.stream>>>(
            static_cast<float *>(call.outputs[0].data), static_cast<const float *>(input.data), input.sizes[0],
            input.sizes[1]);
    return launch_status();
}
