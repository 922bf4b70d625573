// adamw, rung 5: several vectors of each array in flight.
//     param *= 1 - lr * weight_decay; exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// Threads: a block of 256 for each chunk of 2048 elements, two vectors of each of the four arrays for each thread,
// which asks for all eight before it computes with the first: 128 bytes in flight. A chunk that a parameter's end cuts,
// or one that is not aligned to 16 bytes, is stepped element by element. Fixes: twice the bytes in flight, half as many
// blocks to start, half as many bisections. Leaves: nothing that this formula could save: 28 bytes for each element
// have to move. Bound by memory.
#include "adamw/ladder/list.cuh"

static constexpr int VECTORS = 2, CHUNK = 4 * VECTORS * THREADS;

__global__ void __launch_bounds__(THREADS) adamw_in_flight_kernel(const __grid_constant__ AdamwList list)
{
    const AdamwChunk chunk = chunk_of_block(list, CHUNK);
    const AdamwTensor &tensor = list.tensors[chunk.tensor];
    if (list.aligned[chunk.tensor] && chunk.end - chunk.begin == CHUNK) {
        AdamwVectors vectors[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            vectors[v] = load_vectors(tensor, chunk.begin + 4 * (v * THREADS + threadIdx.x));
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            step_vectors(tensor, chunk.begin + 4 * (v * THREADS + threadIdx.x), vectors[v], list.step);
    } else {
        for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += THREADS)
            step_at(tensor, i, list.step);
    }
}

cuda_ops_status adamw_in_flight(const LadderCall &call)
{
    return launch_lists(call, adamw_in_flight_kernel, CHUNK);
}
