// How window_attention's mma path is called by dtype.
#ifndef CUDA_OPS_WINDOW_ATTENTION_MMA_MMA_H
#define CUDA_OPS_WINDOW_ATTENTION_MMA_MMA_H

#include <cuda_runtime.h>

#include "cuda_ops/window_attention.h"

struct WindowWork {
    const void *qkv, *grad_output;
    void *result; // output, or grad_qkv
    const float *bias;
    float *partials;                 // [slots, heads, positions, positions]; NULL: not wanted
    uint32_t count;                  // windows
    int height, width, down, across; // down, across: windows of an image
    int heads, head_dim, positions, window_width;
    int step_y, step_x;       // between a window's pixels
    int between_y, between_x; // between the first pixels of neighbouring windows
    int shift_y, shift_x, edge_y, edge_x;
    int64_t channels; // heads * head_dim
    float scale, scale_log2;
};

cuda_ops_status window_attention_mma_bfloat16(const WindowWork &work, bool backward, int64_t slots,
                                              cudaStream_t stream);
cuda_ops_status window_attention_mma_float16(const WindowWork &work, bool backward, int64_t slots, cudaStream_t stream);

#endif
