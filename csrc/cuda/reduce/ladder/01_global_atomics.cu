// reduce, rung 1: every thread adds its element to the one result in memory, by an atomic.
//     output = sum over i of input[i]
// Threads: one for each element. Leaves: all additions are to one address, so that the L2 makes them one after the other,
// in the order in which they happen to arrive: slow by orders of magnitude, not the same bits twice, and in float32 less
// exact than any other rung, since small numbers are added to an ever larger one. Bound by the L2's atomics.
#include "common/common.cuh"
#include "reduce/ladder/rungs.h"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_global_atomics_kernel(T *output, const T *input, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        atomicAdd(output, input[i]);
}

template <typename T>
static void launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    T *const output = static_cast<T *>(call.outputs[0].data);
    cudaMemsetAsync(output, 0, sizeof(T), call.stream);
    if (input.count > 0)
        reduce_global_atomics_kernel<T><<<(unsigned int)ceil_div(input.count, THREADS), THREADS, 0, call.stream>>>(
            output, static_cast<const T *>(input.data), input.count);
}

cuda_ops_status reduce_global_atomics(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        launch<float>(call);
    else
        launch<double>(call);
    return launch_status();
}
