// histogram, rung 1: every thread counts its element in memory, by an atomic.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: one for each element. Leaves: 256 counters are 8 cache lines, to which all threads of the GPU send their
// additions; the L2 makes those to one line one after the other. Bound by the L2's atomics.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    histogram_global_atomics_kernel(unsigned int *counts, const T *input, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count && is_bin(input[i]))
        atomicAdd(&counts[input[i]], 1);
}

template <typename T>
static void launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    unsigned int *const counts = static_cast<unsigned int *>(call.outputs[0].data);
    cudaMemsetAsync(counts, 0, BINS * sizeof(*counts), call.stream);
    if (input.count > 0)
        histogram_global_atomics_kernel<T><<<(unsigned int)ceil_div(input.count, THREADS), THREADS, 0, call.stream>>>(
            counts, static_cast<const T *>(input.data), input.count);
}

cuda_ops_status histogram_global_atomics(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch<uint8_t>(call);
    else
        launch<int32_t>(call);
    return launch_status();
}
