// adamw, rung 4: all parameters in one launch.
//     param *= 1 - lr * weight_decay; exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// Threads: a block of 256 for each chunk of 1024 elements of any parameter, four for each thread. The pointers and
// sizes of up to 80 parameters travel in the kernel's own parameters, 4 KB of constant memory that come with the
// launch: no array of pointers has to be written to the device first. A block finds the parameter of its chunk by
// bisection. Fixes: a launch for each 80 parameters instead of one for each; small parameters share the GPU instead of
// waiting for each other. Leaves: a thread has four loads in flight, one for each array, and lives for little more than
// their latency: a block is started, waits, and ends. Bound by memory, nearly: by the bytes in flight.
#include "adamw/ladder/list.cuh"

static constexpr int CHUNK = 4 * THREADS;

__global__ void __launch_bounds__(THREADS) adamw_one_launch_kernel(const __grid_constant__ AdamwList list)
{
    const AdamwChunk chunk = chunk_of_block(list, CHUNK);
    const AdamwTensor &tensor = list.tensors[chunk.tensor];
    const int64_t i = chunk.begin + 4 * threadIdx.x;
    if (list.aligned[chunk.tensor] && i + 4 <= chunk.end)
        step_vectors(tensor, i, load_vectors(tensor, i), list.step);
    else
        for (int64_t e = i; e < i + 4 && e < chunk.end; e++)
            step_at(tensor, e, list.step);
}

cuda_ops_status adamw_one_launch(const LadderCall &call)
{
    return launch_lists(call, adamw_one_launch_kernel, CHUNK);
}
