// The list of parameters of rungs 4 and 5, which travels in a kernel's own parameters.
#ifndef CUDA_OPS_ADAMW_LADDER_LIST_CUH
#define CUDA_OPS_ADAMW_LADDER_LIST_CUH

#include "adamw/ladder/step.cuh"

static constexpr int MOST_TENSORS = 80; // of a launch

struct AdamwList {
    AdamwTensor tensors[MOST_TENSORS];
    int64_t counts[MOST_TENSORS];
    int32_t
        first_chunk[MOST_TENSORS + 1]; // of all chunks of the list, a parameter's first; behind the last: their number
    int32_t size;
    uint8_t aligned[MOST_TENSORS]; // to 16 bytes
    AdamwStep step;
};
static_assert(sizeof(AdamwList) <= 4096, "a kernel's parameters hold 4 KB");

// The parameter that a chunk is of, by bisection: the last whose first chunk is not behind it.
__device__ __forceinline__ int tensor_of_chunk(const AdamwList &list, int32_t chunk)
{
    int tensor = 0, above = list.size;
    while (above - tensor > 1) {
        const int middle = (tensor + above) / 2;
        if (list.first_chunk[middle] <= chunk)
            tensor = middle;
        else
            above = middle;
    }
    return tensor;
}

// What a block works on: `chunk` elements of one parameter, from `begin` on.
struct AdamwChunk {
    int tensor;
    int64_t begin, end;
};

__device__ __forceinline__ AdamwChunk chunk_of_block(const AdamwList &list, int elements)
{
    AdamwChunk chunk;
    chunk.tensor = tensor_of_chunk(list, (int32_t)blockIdx.x);
    chunk.begin = (int64_t)((int32_t)blockIdx.x - list.first_chunk[chunk.tensor]) * elements;
    const int64_t count = list.counts[chunk.tensor];
    chunk.end = chunk.begin + elements < count ? chunk.begin + elements : count;
    return chunk;
}

// kernel<<<a block for each chunk>>>(list) for as many parameters at a time as a list holds, none of them empty.
static inline cuda_ops_status launch_lists(const LadderCall &call, void (*kernel)(AdamwList), int elements)
{
    AdamwList list;
    list.step = adamw_step(call);
    list.size = 0;
    list.first_chunk[0] = 0;
    for (int i = 0; i < call.input_count; i++) {
        const int64_t count = call.inputs[i].count, chunks = ceil_div(count, elements);
        if (count > 0) {
            // A full list goes, and one whose chunks would be more than a grid has blocks.
            if (list.size == MOST_TENSORS || list.first_chunk[list.size] + chunks > INT32_MAX) {
                kernel<<<(unsigned int)list.first_chunk[list.size], THREADS, 0, call.stream>>>(list);
                list.size = 0;
            }
            list.tensors[list.size] = adamw_tensor(call, i);
            list.counts[list.size] = count;
            list.aligned[list.size] = is_aligned_16(list.tensors[list.size]);
            list.first_chunk[list.size + 1] = (int32_t)(list.first_chunk[list.size] + chunks);
            list.size++;
        }
    }
    if (list.size > 0)
        kernel<<<(unsigned int)list.first_chunk[list.size], THREADS, 0, call.stream>>>(list);
    return launch_status();
}

#endif
