// Batch norm's statistics from forward.cuh's, ReLU and max pooling.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM90_POOL_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM90_POOL_CUH

#include "common/value.cuh"
#include "conv_bn_relu_pool/sm90/layout.cuh"
#include "ptx/barrier.cuh"

// The sum of `value` over a channel's slices (threads c, c + 64, ...), in order, for every thread of the channel.
__device__ __forceinline__ float sum_slices(float value, float *scratch)
{
    scratch[threadIdx.x] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int i = threadIdx.x % OUT_CHANNELS; i < (int)blockDim.x; i += OUT_CHANNELS)
        sum += scratch[i];
    __syncthreads();
    return sum;
}

// affine[channel] = (scale, shift) of scale * y + shift, from the blocks' partial statistics. Every block computes all
// of them; the first block also stores the statistics. Ends with a barrier.
template <typename T, int threads>
__device__ __forceinline__ void combine_statistics(float2 *affine, float *scratch, const Statistics &s,
                                                   const float2 *partial, int partials, int64_t batch)
{
    constexpr int SLICES = threads / OUT_CHANNELS, EACH = (MAX_BLOCKS + SLICES - 1) / SLICES;
    const int channel = threadIdx.x % OUT_CHANNELS, slice = threadIdx.x / OUT_CHANNELS;
    float2 p[EACH];
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int part = slice + i * SLICES;
        p[i] = part < partials ? __ldcg(partial + part * OUT_CHANNELS + channel) : make_float2(0.0f, 0.0f);
    }
    // The first `batch % partials` blocks have one image more.
    const int least = (int)(batch / partials), more = (int)(batch % partials);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        sum += p[i].x * (float)(least + (slice + i * SLICES < more));
    const float mean = sum_slices(sum, scratch) / (float)batch;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int part = slice + i * SLICES;
        const float delta = p[i].x - mean;
        if (part < partials)
            square += p[i].y + delta * delta * ((float)(least + (part < more)) * PIXELS);
    }
    const float m2 = sum_slices(square, scratch), n = (float)batch * PIXELS;
    if (slice == 0) {
        const float variance = m2 / n, rstd = rsqrtf(variance + (float)s.norm.eps);
        const float scale = s.norm.weight ? rstd * (float)load_value(s.norm.weight, s.norm.dtype, channel) : rstd;
        affine[channel] = make_float2(
            scale, (s.norm.bias ? (float)load_value(s.norm.bias, s.norm.dtype, channel) : 0.0f) - mean * scale);
        if (blockIdx.x == 0) {
            s.statistics[channel] = (double)mean;
            s.statistics[OUT_CHANNELS + channel] = (double)variance;
            const cuda_ops_running_statistics &running = s.running;
            if (running.mean) {
                const double bias = s.bias ? load_value(s.bias, s.bias_dtype, channel) : 0.0, m = running.momentum;
                const double unbiased = (double)m2 / ((double)batch * PIXELS - 1.0);
                store_value(running.mean, running.dtype, channel,
                            (1.0 - m) * load_value(running.mean, running.dtype, channel) + m * ((double)mean + bias));
                store_value(running.variance, running.dtype, channel,
                            (1.0 - m) * load_value(running.variance, running.dtype, channel) + m * unbiased);
            }
            if (running.batches && channel == 0)
                *running.batches += 1;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void load_y(uint4 (&y)[SIDE], const void *ys, int64_t image, int thread)
{
    const uint4 *from = (const uint4 *)((const char *)ys + image * Y_BYTES);
#pragma unroll
    for (int row = 0; row < POOLED; row++) {
        y[2 * row] = from[row * ROW_VECTORS + thread];
        y[2 * row + 1] = thread % 4 < 3 ? from[row * ROW_VECTORS + second_vector(thread)] : make_uint4(0, 0, 0, 0);
    }
}

// A warpgroup normalises, rectifies and pools one image in registers. The output goes to `pooled` in shared memory,
// which the caller copies after a barrier; for backward, y at the window's maximum and a 4-bit mask that tells which of
// the four it was (0: relu gave 0).
template <typename T>
__device__ __forceinline__ void pool_image(T *pooled, uint32_t *raws, uint8_t *masks_out, const uint4 (&y)[SIDE],
                                           const float2 (&affine_of)[2], int64_t image, int thread)
{
    const int r = thread / 32 * 16 + thread % 32 / 4, q = thread % 4;
    uint32_t masks[4] = {0, 0, 0, 0};
    uint32_t *raw_out = (uint32_t *)((char *)raws + image * RAW_BYTES);
#pragma unroll
    for (int row = 0; row < POOLED; row++) {
        const uint32_t top[4] = {y[2 * row].x, y[2 * row].y, y[2 * row + 1].x, y[2 * row + 1].y};
        const uint32_t low[4] = {y[2 * row].z, y[2 * row].w, y[2 * row + 1].z, y[2 * row + 1].w};
        float raw[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 affine = affine_of[i % 2], t = unpack(top[i], T()), l = unpack(low[i], T());
            const float v[4] = {t.x, t.y, l.x, l.y};
            float best = fmaf(affine.x, v[0], affine.y);
            uint32_t mask = 1;
            raw[i] = v[0];
#pragma unroll
            for (int e = 1; e < 4; e++) {
                const float z = fmaf(affine.x, v[e], affine.y);
                if (z > best || z != z) { // NaN propagates, as in PyTorch
                    best = z;
                    raw[i] = v[e];
                    mask = 1u << e;
                }
            }
            if (best <= 0.0f) {
                best = 0.0f;
                mask = 0;
            }
            masks[row / 2] |= mask << (row % 2 * 16 + i * 4);
            if (i < 2 || q < 3)
                pooled[(r + i % 2 * 8) * WINDOWS + row * POOLED + q + i / 2 * 4] = store_from_accumulate<T>(best);
        }
        raw_out[row * ROW_VECTORS + thread] = pack(raw[0], raw[1], T());
        if (q < 3)
            raw_out[row * ROW_VECTORS + second_vector(thread)] = pack(raw[2], raw[3], T());
    }
    if (q == 3) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            masks[i] &= 0x00ff00ffu; // the masked columns
    }
    ((uint4 *)(masks_out + image * MASK_BYTES))[thread] = make_uint4(masks[0], masks[1], masks[2], masks[3]);
}

template <typename T>
__device__ __forceinline__ void copy_pooled(void *output, const T *pooled, int64_t image, int thread)
{
    const uint4 *from = (const uint4 *)pooled;
    uint4 *to = (uint4 *)((char *)output + image * POOLED_BYTES);
    for (int i = thread; i < POOLED_BYTES / 16; i += WARPGROUP)
        to[i] = from[i];
}

template <typename T>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    pool_kernel(void *output, uint32_t *raws, uint8_t *masks, const void *ys, Statistics s, const float2 *partial,
                int partials, int64_t batch)
{
    __shared__ __align__(128) T pooled[POOL_GROUPS][OUT_CHANNELS * WINDOWS];
    __shared__ float scratch[POOL_THREADS];
    __shared__ float2 affine[OUT_CHANNELS];
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int r = thread / 32 * 16 + thread % 32 / 4;
    wait_for_predecessor();
    release_successor();
    int64_t image = blockIdx.x + (int64_t)group * gridDim.x;
    const int64_t step = (int64_t)POOL_GROUPS * gridDim.x;
    uint4 y[SIDE];
    if (image < batch)
        load_y(y, ys, image, thread);
    combine_statistics<T, POOL_THREADS>(affine, scratch, s, partial, partials, batch);
    const float2 affine_of[2] = {affine[r], affine[r + 8]};
    for (; image < batch; image += step) {
        pool_image(pooled[group], raws, masks, y, affine_of, image, thread);
        if (image + step < batch)
            load_y(y, ys, image + step, thread);
        bar_sync(1 + group, WARPGROUP);
        copy_pooled(output, pooled[group], image, thread);
        bar_sync(1 + group, WARPGROUP);
    }
}

#endif
