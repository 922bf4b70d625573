// Lists of tensors that one launch goes over, chunk by chunk: what SGD, Adam, clip_grad_norm_ and round_list share.
#ifndef CUDA_OPS_COMMON_TENSOR_LIST_CUH
#define CUDA_OPS_COMMON_TENSOR_LIST_CUH

#include <cstdint>

// Which of a list's tensors a chunk is of. list.first_chunk: of all the list's chunks, the first of each tensor.
template <typename List>
__device__ __forceinline__ int tensor_of(const List &list, int32_t chunk)
{
    int tensor = 0, above = list.tensors;
    while (above - tensor > 1) {
        const int middle = (tensor + above) / 2;
        if (list.first_chunk[middle] <= chunk)
            tensor = middle;
        else
            above = middle;
    }
    return tensor;
}

#endif
