// What the paths of window_attention share: how one is called. window_attention.cu holds the table.
#ifndef CUDA_OPS_WINDOW_ATTENTION_PATHS_H
#define CUDA_OPS_WINDOW_ATTENTION_PATHS_H

#include <cuda_runtime.h>

#include "common/paths.h"
#include "cuda_ops/window_attention.h"

// One pass as a launcher gets it; window_attention.cu has checked that there is something to do.
struct WindowCall {
    bool backward;
    void *output;               // forward's result
    void *grad_qkv, *grad_bias; // backward's; grad_bias may be NULL
    const void *grad_output;
    const void *qkv, *bias; // bias may be NULL
    void *workspace;        // window_partials_bytes, where grad_bias is wanted
    cuda_ops_windows windows;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

// Backward's blocks have a head each, and of that every window_slots-th window; what they have of grad_bias lies
// [slots, heads, positions, positions] in the workspace, and is added up by window_bias_sums.
static constexpr int64_t WINDOW_BLOCKS = 3; // of a multiprocessor
static inline int64_t window_slots(const cuda_ops_windows &w, const Device &device)
{
    const int64_t blocks = WINDOW_BLOCKS * (device.multiprocessors > 0 ? device.multiprocessors : 1);
    const int64_t slots = (blocks + w.heads - 1) / w.heads, count = cuda_ops_window_count(&w);
    return slots < count ? slots : count;
}
cuda_ops_status window_bias_sums(const WindowCall &call, int64_t slots);

// fp16 and bf16 on the tensor cores (window_attention/mma/).
Answer window_attention_mma_supports(const WindowCall &call, const Device &device);
cuda_ops_status window_attention_mma(const WindowCall &call, const Device &device);

// Takes every call (window_attention/simt.cu).
cuda_ops_status window_attention_simt(const WindowCall &call, const Device &device);

#endif
