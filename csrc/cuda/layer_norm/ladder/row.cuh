// What rungs 3 to 5 share: a block has a row in its registers.
#ifndef CUDA_OPS_LAYER_NORM_LADDER_ROW_CUH
#define CUDA_OPS_LAYER_NORM_LADDER_ROW_CUH

#include "common/aligned_vector.cuh"
#include "ladder/share.cuh"
#include "layer_norm/ladder/rungs.h"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int64_t LONGEST = (int64_t)THREADS * MOST_OF_SHARE; // 8192

static inline bool layer_norm_takes_vectors(const LayerNormLadder &a)
{
    bool aligned = a.columns % 4 == 0;
    for (const void *pointer : {(const void *)a.output, (const void *)a.grad_input, (const void *)a.input,
                                (const void *)a.grad_output, (const void *)a.weight, (const void *)a.bias})
        aligned = aligned && is_aligned_16(pointer);
    return aligned;
}

// The two sums over the block, for each thread, with one barrier. `scratch` is not to be written again before another.
__device__ __forceinline__ float2 sums_of_block(float2 values, float2 *scratch)
{
    const int lane = threadIdx.x % WARP_SIZE;
    values = make_float2(warp_sum(values.x), warp_sum(values.y));
    if (lane == 0)
        scratch[threadIdx.x / WARP_SIZE] = values;
    __syncthreads();
    values = lane < WARPS ? scratch[lane] : make_float2(0, 0);
    return make_float2(warp_sum(values.x), warp_sum(values.y));
}

// Of a row whose input and grad_output are in `x` and `g`: writes grad_input, and leaves xhat in `x`.
template <int COUNT, int K>
__device__ __forceinline__ void write_grad_input(const LayerNormLadder &a, int64_t row, float (&x)[K],
                                                 const float (&g)[K], float2 *scratch)
{
    const int columns = (int)a.columns;
    const float mean = a.mean[row], rstd = a.rstd[row];
    float h[K];
    load_share<COUNT>(h, a.weight, columns, threadIdx.x, THREADS, 0.0f);
    float2 sums = {};
#pragma unroll
    for (int k = 0; k < K; k++) { // g is 0 beyond the row, and so is h
        x[k] = (x[k] - mean) * rstd;
        h[k] *= g[k];
        sums.x += h[k];
        sums.y += h[k] * x[k];
    }
    sums = sums_of_block(sums, scratch);
#pragma unroll
    for (int k = 0; k < K; k++)
        h[k] = rstd * (h[k] - sums.x / (float)columns - x[k] * (sums.y / (float)columns));
    store_share<COUNT>(a.grad_input + row * columns, h, columns, threadIdx.x, THREADS);
}

// Of rungs 4 and 5: as many blocks as the GPU runs at once, or rows; returns how many. Each leaves partial sums.
static inline int64_t launch_persistent(void (*kernel)(LayerNormLadder), const LayerNormLadder &a, cudaStream_t stream)
{
    const int64_t resident = (int64_t)current_device().multiprocessors * active_blocks(kernel, THREADS, 0);
    const int64_t most = layer_norm_most_partials(a.rows), blocks = resident < most ? resident : most;
    kernel<<<(unsigned int)blocks, THREADS, 0, stream>>>(a);
    return blocks;
}

#endif
