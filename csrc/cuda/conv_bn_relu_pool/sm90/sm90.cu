// conv_bn_relu_pool on Hopper's tensor cores: conv 3x3 (padding 1) -> batch norm (training) -> ReLU -> max pool 2x2 in
// fp16 or bf16, [batch][14][14][32] channels_last -> [batch][64][7][7].
//     y[64][224 pixels] = sum over the nine taps of weight[64][32 of a tap] * image shifted by the tap
// The image lies in shared memory as a raster 16 pixels wide with its padding, so that 8 neighbouring pixels are a core
// matrix of wgmma and tap (dy, dx) is an offset of 16 dy + dx pixels in the descriptor's address: no im2col. Two of the
// 16 columns of a result are masked. A warpgroup takes an image; five kernels: forward (y and its statistics), pool,
// sums (of dz and dz (y - mean)), backward (both gradients from dy, which is not stored), reduce (of the blocks' weight
// gradients, in order). Every sum has a fixed order: results repeat bitwise on one kind of device.
// Bound by the tensor cores (21.7 MFLOP an image, both passes) and the traffic of y, small batches by latency. On an
// H200, bf16, 16384 images: forward 0.86 and backward 0.72 of cuBLAS's rate at 4096^3, pool 0.87 of a copy's
// (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/paths.h"

#include "common/prefetch.cuh"
#include "common/value.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

// [[maybe_unused]]: by compilations for architectures that get no kernels.
static constexpr int IN_CHANNELS = 32, OUT_CHANNELS = 64, SIDE = 14, POOLED = 7, TAPS = 9;
static constexpr int PIXELS = SIDE * SIDE, WINDOWS = POOLED * POOLED;
// An image in shared memory: 16 x 16 raster pixels and two more that the masked columns read, each with its channels
// side by side, in the wgmma swizzle of that width; rounded up to whole repeats of the swizzle.
static constexpr int TILE_PIXEL = IN_CHANNELS * 2, GRAD_PIXEL = OUT_CHANNELS * 2;
static constexpr int TILE_BYTES = (258 * TILE_PIXEL + 511) / 512 * 512;
// dy is read by products of 240 pixels, which reach 16 further.
static constexpr int GRAD_TILE_BYTES = (274 * GRAD_PIXEL + 1023) / 1024 * 1024;
static_assert(TILE_PIXEL == 64 && GRAD_PIXEL == 128, "the swizzles below are those of 64 and 128 bytes");
// Per image in device memory, in the accumulators' layout: for each row of windows 128 vectors (a thread's windows in
// column q), then 96 (those in column q + 4, of the threads with q < 3), so that masked columns are not stored. y: the
// four values of the window in channel r and in r + 8; raw: one of each; masks: 16 bytes a thread, which is the byte
// per output that argmax has in the other paths.
static constexpr int ROW_VECTORS = 224;
static constexpr int Y_BYTES = POOLED * ROW_VECTORS * 16;
static constexpr int RAW_BYTES = POOLED * ROW_VECTORS * 4;
[[maybe_unused]] static constexpr int MASK_BYTES = OUT_CHANNELS * WINDOWS;
static_assert(Y_BYTES == OUT_CHANNELS * PIXELS * 2 && RAW_BYTES == OUT_CHANNELS * WINDOWS * 2, "no padding");
static constexpr int POOLED_BYTES = OUT_CHANNELS * WINDOWS * 2;
// Weights staged in shared memory as [tap][out channel][in channel]; the pitches spread rows and taps over the banks.
static constexpr int WEIGHT_ROW = IN_CHANNELS * TAPS;
static constexpr int WEIGHT_PITCH = IN_CHANNELS + 8, WEIGHT_PLANE = OUT_CHANNELS * WEIGHT_PITCH + 8;
static constexpr int WEIGHT_BYTES = TAPS * WEIGHT_PLANE * 2;
static constexpr int GRAD_WEIGHTS = OUT_CHANNELS * WEIGHT_ROW;
static constexpr int POOL_GROUPS = 4; // warpgroups a block in the pooling and summing kernels
[[maybe_unused]] static constexpr int POOL_THREADS = POOL_GROUPS * WARPGROUP;
static constexpr int MAX_BLOCKS = 132;
[[maybe_unused]] static constexpr int REDUCE_SLICES = 16;

[[maybe_unused]] static constexpr int FORWARD_SHARED = 4 * TILE_BYTES + WEIGHT_BYTES;
[[maybe_unused]] static constexpr int BACKWARD_SHARED =
    2 * GRAD_TILE_BYTES + 2 * TILE_BYTES + 2 * Y_BYTES + 2 * POOLED_BYTES + SIDE * 16 * 64 + WEIGHT_BYTES + 512 + 16;

struct Statistics {
    double *statistics; // out: mean (without the convolution's bias) and variance of each channel
    cuda_ops_running_statistics running;
    cuda_ops_norm_parameters norm;
    const void *bias;
    cuda_ops_dtype bias_dtype;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (!defined(__CUDA_ARCH__) && defined(CUDA_OPS_SM90A))

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const uint32_t *)&pair;
}
__device__ __forceinline__ float2 unpack(uint32_t word, __nv_bfloat16)
{
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t word, __half)
{
    return __half22float2(*(const __half2 *)&word);
}

// How many images a block has: block, block + blocks, ...
__device__ __forceinline__ int64_t block_images(int64_t batch, int block, int blocks)
{
    return batch > block ? (batch - block + blocks - 1) / blocks : 0;
}

// Copies an image's 784 aligned vectors to their swizzled raster pixels.
__device__ __forceinline__ void load_tile(uint32_t tile, const void *input, int64_t image, int thread)
{
    const char *from = (const char *)input + image * (PIXELS * IN_CHANNELS * 2);
#pragma unroll
    for (int i = 0; i < 7; i++) {
        const int vector = thread + i * WARPGROUP;
        if (i < 6 || vector < PIXELS * IN_CHANNELS / 8) {
            const int pixel = vector >> 2, row = pixel / SIDE, column = pixel - row * SIDE;
            const int raster = (row + 1) * 16 + column + 1;
            cp_async_16(tile + raster * TILE_PIXEL + ((vector & 3) ^ (raster >> 1 & 3)) * 16, from + vector * 16);
        }
    }
}

__device__ __forceinline__ void zero_shared(char *shared, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *(uint4 *)(shared + i) = make_uint4(0, 0, 0, 0);
}

// The convolution's weights to shared memory, rounded to T.
template <typename T>
__device__ __forceinline__ void stage_weight(T *staged, const void *weight, bool is_float)
{
    constexpr int THREADS = 2 * WARPGROUP, EACH = GRAD_WEIGHTS / 4 / THREADS;
    T w[EACH][4];
#pragma unroll
    for (int i = 0; i < EACH; i++) { // all loads in flight at once
        const int vector = threadIdx.x + i * THREADS;
        if (is_float) {
            const float4 v = ((const float4 *)weight)[vector];
            w[i][0] = store_from_accumulate<T>(v.x);
            w[i][1] = store_from_accumulate<T>(v.y);
            w[i][2] = store_from_accumulate<T>(v.z);
            w[i][3] = store_from_accumulate<T>(v.w);
        } else {
            *(uint2 *)w[i] = ((const uint2 *)weight)[vector];
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int vector = threadIdx.x + i * THREADS;
        const int row = vector / (WEIGHT_ROW / 4), column = vector % (WEIGHT_ROW / 4) * 4;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int channel = (column + e) / TAPS, tap = (column + e) % TAPS;
            staged[tap * WEIGHT_PLANE + row * WEIGHT_PITCH + channel] = w[i][e];
        }
    }
}
static_assert(GRAD_WEIGHTS / 4 % (2 * WARPGROUP) == 0, "whole rounds of vectors");

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

// A thread's vectors of a row of windows (of ROW_VECTORS): number `thread`, and where q < 3 the one below.
static constexpr int SECOND_VECTORS = WARPGROUP;
__device__ __forceinline__ int second_vector(int thread)
{
    return SECOND_VECTORS + thread / 4 * 3 + thread % 4;
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

// y and its statistics. The weights stay in registers, 72 a thread, for all images of a warpgroup; the 112 accumulators
// of a thread hold whole pooling windows and are stored in their own layout, 16 bytes a thread and image row.
// Statistics of an image in two passes over the accumulators, merged as Chan et al. do.
template <typename T>
__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    forward_kernel(void *ys, float2 *partial, const void *input, const void *weight, bool is_float, int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    // warp_uniform tells the compiler so, and descriptors stay in uniform registers.
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    char *tiles = shared + group * 2 * TILE_BYTES;
    T *staged = (T *)(shared + 4 * TILE_BYTES);
    zero_shared(shared, 4 * TILE_BYTES);
    __syncthreads();
    // All blocks together prefetch the weights while the kernel before this one still runs.
    for (int line = blockIdx.x + threadIdx.x * gridDim.x; line < GRAD_WEIGHTS * (is_float ? 4 : 2) / CACHE_LINE;
         line += gridDim.x * blockDim.x)
        prefetch_global_l2((const char *)weight + line * CACHE_LINE);
    wait_for_predecessor();
    release_successor();
    const int64_t step = 2 * (int64_t)gridDim.x;
    int64_t image = blockIdx.x + (int64_t)group * gridDim.x;
    if (image < batch)
        load_tile(shared_address(tiles), input, image, thread);
    cp_async_commit_group();
    stage_weight(staged, weight, is_float);
    __syncthreads();
    uint32_t a[TAPS * 2][4];
    const T *fragment = staged + (warp * 16 + (lane >> 3 & 1) * 8 + lane % 8) * WEIGHT_PITCH + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < TAPS * 2; k++)
        ldmatrix_x4(a[k], shared_address(fragment + k / 2 * WEIGHT_PLANE + k % 2 * 16));
    float mean[2] = {0.0f, 0.0f}, m2[2] = {0.0f, 0.0f};
    int count = 0;
    const uint64_t descriptor = wgmma_descriptor(shared_address(tiles), WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
    for (; image < batch; image += step) {
        const uint64_t tile = wgmma_advance(descriptor, (count & 1) * TILE_BYTES);
        cp_async_wait_group<0>();
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        float d[112];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TAPS * 2; k++) {
            const int tap = k / 2;
            wgmma<T, 224, 0>(d, a[k], wgmma_advance(tile, (tap / 3 * 16 + tap % 3) * TILE_PIXEL + k % 2 * 32), k > 0);
        }
        wgmma_commit_group();
        // The other tile was read last by the previous image's products, which every warp has waited for.
        if (image + step < batch)
            load_tile(shared_address(tiles) + (~count & 1) * TILE_BYTES, input, image + step, thread);
        cp_async_commit_group();
        wgmma_wait_group<0>();
        uint4 *y = (uint4 *)((char *)ys + image * Y_BYTES);
#pragma unroll
        for (int row = 0; row < POOLED; row++) {
            const float *v = d + row * 16;
            y[row * ROW_VECTORS + thread] = make_uint4(pack(v[0], v[1], T()), pack(v[2], v[3], T()),
                                                       pack(v[8], v[9], T()), pack(v[10], v[11], T()));
            if (q < 3)
                y[row * ROW_VECTORS + second_vector(thread)] = make_uint4(
                    pack(v[4], v[5], T()), pack(v[6], v[7], T()), pack(v[12], v[13], T()), pack(v[14], v[15], T()));
        }
        // Columns 14 and 15, which are masked, are the second vector of lanes with q = 3.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.0f, rest = 0.0f;
#pragma unroll
            for (int row = 0; row < SIDE; row++) {
                sum += d[row * 8 + h * 2] + d[row * 8 + h * 2 + 1];
                rest += d[row * 8 + h * 2 + 4] + d[row * 8 + h * 2 + 5];
            }
            sum += q < 3 ? rest : 0.0f;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const float m = sum * (1.0f / PIXELS);
            float square = 0.0f, other = 0.0f;
#pragma unroll
            for (int row = 0; row < SIDE; row++) {
                const float *v = d + row * 8 + h * 2;
                square += (v[0] - m) * (v[0] - m) + (v[1] - m) * (v[1] - m);
                other += (v[4] - m) * (v[4] - m) + (v[5] - m) * (v[5] - m);
            }
            square += q < 3 ? other : 0.0f;
            square += __shfl_xor_sync(FULL_WARP, square, 1);
            square += __shfl_xor_sync(FULL_WARP, square, 2);
            const float delta = m - mean[h], weight_new = 1.0f / (float)(count + 1);
            mean[h] += delta * weight_new;
            m2[h] += square + delta * delta * ((float)count * weight_new * PIXELS);
        }
        count++;
    }
    // Merges both warpgroups' statistics into the block's.
    __shared__ float2 statistics[2][OUT_CHANNELS];
    if (q == 0) {
        statistics[group][r] = make_float2(mean[0], m2[0]);
        statistics[group][r + 8] = make_float2(mean[1], m2[1]);
    }
    __syncthreads();
    if (threadIdx.x < OUT_CHANNELS) {
        const float total = (float)block_images(batch, blockIdx.x, gridDim.x);
        const float second = (float)((int64_t)total / 2), first = total - second;
        const float2 x = statistics[0][threadIdx.x], z = statistics[1][threadIdx.x];
        const float delta = z.x - x.x;
        partial[blockIdx.x * OUT_CHANNELS + threadIdx.x] =
            make_float2(x.x + delta * (second / total), x.y + z.y + delta * delta * (first * second / total * PIXELS));
    }
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

// partial[block][channel] = (sum of dz, sum of dz * (y - mean)) over the block's images.
template <typename T>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    sums_kernel(float2 *partial, const void *grad_output, const uint32_t *raws, const uint8_t *masks_in,
                const double *statistics, int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    char *grads = shared + group * 2 * POOLED_BYTES;
    int64_t image = blockIdx.x + (int64_t)group * gridDim.x;
    const int64_t step = (int64_t)POOL_GROUPS * gridDim.x;
    // Prefetch what forward stored of the first images, while the kernel before this one still runs.
    for (int64_t p = image, i = 0; p < batch && i < 2; p += step, i++) {
        if (thread < RAW_BYTES / CACHE_LINE)
            prefetch_global_l2((const char *)raws + p * RAW_BYTES + thread * CACHE_LINE);
        else if (thread - RAW_BYTES / CACHE_LINE < MASK_BYTES / CACHE_LINE)
            prefetch_global_l2(masks_in + p * MASK_BYTES + (thread - RAW_BYTES / CACHE_LINE) * CACHE_LINE);
    }
    wait_for_predecessor();
    release_successor();
    const float mean_of[2] = {(float)statistics[r], (float)statistics[r + 8]};
    float sum[2] = {0.0f, 0.0f}, product[2] = {0.0f, 0.0f};
    uint2 raw[POOLED], raw_next[POOLED] = {};
    uint4 mask, mask_next = {};
    auto load = [&](int64_t p, int stage) {
        if (p < batch) {
            const char *from = (const char *)grad_output + p * POOLED_BYTES;
            for (int i = thread; i < POOLED_BYTES / 16; i += WARPGROUP)
                cp_async_16(shared_address(grads + stage * POOLED_BYTES) + i * 16, from + i * 16);
            const uint32_t *raw_of = (const uint32_t *)((const char *)raws + p * RAW_BYTES);
#pragma unroll
            for (int row = 0; row < POOLED; row++)
                raw_next[row] = make_uint2(raw_of[row * ROW_VECTORS + thread],
                                           q < 3 ? raw_of[row * ROW_VECTORS + second_vector(thread)] : 0);
            mask_next = ((const uint4 *)(masks_in + p * MASK_BYTES))[thread];
        }
        cp_async_commit_group();
    };
    load(image, 0);
    for (int stage = 0; image < batch; image += step, stage ^= 1) {
#pragma unroll
        for (int row = 0; row < POOLED; row++)
            raw[row] = raw_next[row];
        mask = mask_next;
        load(image + step, stage ^ 1);
        cp_async_wait_group<1>();
        bar_sync(1 + group, WARPGROUP);
        const T *g = (const T *)(grads + stage * POOLED_BYTES);
        const uint32_t masks[4] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
        for (int row = 0; row < POOLED; row++) {
            const float2 a = unpack(raw[row].x, T()), b = unpack(raw[row].y, T());
            const float v[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (masks[row / 2] >> (row % 2 * 16 + i * 4) & 15) {
                    const float dz = load_as_accumulate(g[(r + i % 2 * 8) * WINDOWS + row * POOLED + q + i / 2 * 4]);
                    sum[i % 2] += dz;
                    product[i % 2] += dz * (v[i] - mean_of[i % 2]);
                }
        }
        bar_sync(1 + group, WARPGROUP);
    }
    __shared__ float2 results[POOL_GROUPS][OUT_CHANNELS];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 1);
        sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 2);
        product[h] += __shfl_xor_sync(FULL_WARP, product[h], 1);
        product[h] += __shfl_xor_sync(FULL_WARP, product[h], 2);
        if (q == 0)
            results[group][r + 8 * h] = make_float2(sum[h], product[h]);
    }
    __syncthreads();
    if (threadIdx.x < OUT_CHANNELS) {
        float2 total = results[0][threadIdx.x];
        for (int i = 1; i < POOL_GROUPS; i++) {
            total.x += results[i][threadIdx.x].x;
            total.y += results[i][threadIdx.x].y;
        }
        partial[blockIdx.x * OUT_CHANNELS + threadIdx.x] = total;
    }
}

static constexpr int BARRIER_FULL = 1, BARRIER_EMPTY = 3, BARRIER_FIRST = 5, BARRIER_SECOND = 6;

// Both gradients, by two warpgroups. The first makes dy = scale dz + slope y + offset in accumulator layout, which is
// also the layout of wgmma's left operand, multiplies it with the image (9 taps x 16 accumulators, kept over all
// images), and stores it to shared memory; the second multiplies the weights (96 registers) with it. In the second the
// 64 rows of wgmma serve 32 channels: rows 8..15 of each warp compute tap row 1 where rows 0..7 compute tap row 0, one
// image row apart, so that both end up in one thread's registers.
template <typename T>
__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    backward_kernel(void *grad_input, float4 *grad_weight_partial, void *grad_bn_weight, void *grad_bn_bias,
                    void *grad_bias, const void *grad_output, const void *input, const void *weight,
                    cuda_ops_norm_parameters norm, cuda_ops_dtype bias_dtype, const double *statistics,
                    const void *ys_in, const uint8_t *masks_in, const float2 *partial, int partials, bool is_float,
                    int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    char *grad_tiles = shared, *tiles = grad_tiles + 2 * GRAD_TILE_BYTES, *ys = tiles + 2 * TILE_BYTES;
    char *grads = ys + 2 * Y_BYTES, *staging = grads + 2 * POOLED_BYTES, *end = staging + SIDE * 16 * 64;
    T *staged = (T *)end;
    float2 *coefficients = (float2 *)(end + WEIGHT_BYTES);
    const uint32_t barriers = shared_address(end + WEIGHT_BYTES + 512);
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    const int images = (int)block_images(batch, blockIdx.x, gridDim.x);
    __shared__ float2 scratch[2 * WARPGROUP];
    __shared__ float scales[OUT_CHANNELS];
    zero_shared(shared, 2 * GRAD_TILE_BYTES + 2 * TILE_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init_fenced(barriers);
        mbarrier_init_fenced(barriers + 8);
    }
    fence_proxy_async();
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    auto load = [&](int i) { // by the first warpgroup
        if (i >= images)
            return;
        const int64_t image = blockIdx.x + (int64_t)i * gridDim.x;
        const int stage = i & 1;
        if (thread == 0) {
            mbarrier_arrive_expect_tx(barriers + stage * 8, Y_BYTES + POOLED_BYTES);
            bulk_load(shared_address(ys + stage * Y_BYTES), (const char *)ys_in + image * Y_BYTES, Y_BYTES,
                      barriers + stage * 8);
            bulk_load(shared_address(grads + stage * POOLED_BYTES), (const char *)grad_output + image * POOLED_BYTES,
                      POOLED_BYTES, barriers + stage * 8);
        }
        load_tile(shared_address(tiles + stage * TILE_BYTES), input, image, thread);
    };
    if (group == 0) {
        load(0);
        cp_async_commit_group();
        load(1);
        cp_async_commit_group();
    }
    {
        const int channel = threadIdx.x % OUT_CHANNELS, slice = threadIdx.x / OUT_CHANNELS;
        float2 sum = make_float2(0.0f, 0.0f);
        if (partials > 0) {
#pragma unroll 11
            for (int part = slice; part < partials; part += 2 * WARPGROUP / OUT_CHANNELS) {
                const float2 p = partial[part * OUT_CHANNELS + channel];
                sum.x += p.x;
                sum.y += p.y;
            }
        }
        stage_weight(staged, weight, is_float);
        scratch[threadIdx.x] = sum;
        __syncthreads();
        if (slice == 0) {
            for (int i = 1; i < 2 * WARPGROUP / OUT_CHANNELS; i++) {
                sum.x += scratch[channel + i * OUT_CHANNELS].x;
                sum.y += scratch[channel + i * OUT_CHANNELS].y;
            }
            const float mean = (float)statistics[channel], n = (float)batch * PIXELS;
            const float rstd = rsqrtf((float)statistics[OUT_CHANNELS + channel] + (float)norm.eps);
            const float scale = norm.weight ? rstd * (float)load_value(norm.weight, norm.dtype, channel) : rstd;
            const float slope = -scale * rstd * rstd * sum.y / n;
            scales[channel] = scale;
            coefficients[channel] = make_float2(-scale * sum.x / n - slope * mean, slope);
            if (blockIdx.x == 0) {
                if (grad_bn_weight)
                    store_value(grad_bn_weight, norm.dtype, channel, (double)(sum.y * rstd));
                if (grad_bn_bias)
                    store_value(grad_bn_bias, norm.dtype, channel, (double)sum.x);
                if (grad_bias) // batch norm subtracts the mean, so that bias has no effect
                    store_value(grad_bias, bias_dtype, channel, (double)(sum.x * 0.0f));
            }
        }
        __syncthreads();
    }
    if (group == 0) {
        const float2 of[2] = {coefficients[r], coefficients[r + 8]};
        const float scale[2] = {scales[r], scales[r + 8]};
        float d[TAPS][16];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                d[tap][i] = 0.0f;
        // stmatrix: lane l has the address of pixel l % 8 of matrix l / 8 (two channel chunks, then the next 8 pixels).
        const int lane_pixel = 16 + 1 + lane % 8 + (lane >> 4) * 8;
        const uint32_t lane_offset = lane_pixel * GRAD_PIXEL + ((2 * warp + (lane >> 3 & 1)) ^ (lane_pixel & 7)) * 16;
        const uint4 *mask_of = (const uint4 *)masks_in + thread;
        const uint64_t descriptor = wgmma_descriptor(shared_address(tiles), WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
        // Zeros the masked columns' words.
        const uint32_t keep_second = q == 3 ? 0 : ~0u;
        uint4 mask = images > 0 ? mask_of[(int64_t)blockIdx.x * (MASK_BYTES / 16)] : make_uint4(0, 0, 0, 0);
        for (int i = 0; i < images; i++) {
            const int stage = i & 1;
            const uint64_t tile = wgmma_advance(descriptor, stage * TILE_BYTES);
            const uint32_t grad_tile = shared_address(grad_tiles) + stage * GRAD_TILE_BYTES + lane_offset;
            const uint32_t masks[4] = {mask.x, mask.y, mask.z, mask.w};
            if (i + 1 < images)
                mask = mask_of[(blockIdx.x + (int64_t)(i + 1) * gridDim.x) * (MASK_BYTES / 16)];
            cp_async_wait_group<1>();
            fence_proxy_async();
            bar_sync(BARRIER_FIRST, WARPGROUP);
            if (i >= 2)
                bar_sync(BARRIER_EMPTY + stage, 2 * WARPGROUP);
            mbarrier_wait(barriers + stage * 8, i >> 1 & 1);
            const uint4 *y = (const uint4 *)(ys + stage * Y_BYTES);
            const T *g = (const T *)(grads + stage * POOLED_BYTES) + r * WINDOWS + q;
#pragma unroll
            for (int row = 0; row < POOLED; row++) {
                // Where q = 3 there is no second vector: any address in bounds will do.
                const uint4 y0 = y[row * ROW_VECTORS + thread];
                const uint4 y1 = y[row * ROW_VECTORS + SECOND_VECTORS + thread / 4 * 3 + (q < 3 ? q : 2)];
                const uint32_t top[4] = {y0.x, y0.y, y1.x, y1.y}, low[4] = {y0.z, y0.w, y1.z, y1.w};
                uint32_t a[2][4];
                const uint32_t bits = masks[row / 2] >> (row % 2 * 16);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float2 c = of[w % 2], t = unpack(top[w], T()), l = unpack(low[w], T());
                    // For w >= 2 and q = 3 the element does not exist: its mask is 0, and the address another's.
                    const float dz = scale[w % 2] *
                                     load_as_accumulate(
                                         g[w % 2 * 8 * WINDOWS + row * POOLED + w / 2 * 4 - (w / 2 && q == 3 ? 1 : 0)]);
                    const float v0 = fmaf(c.y, t.x, c.x) + (bits >> (w * 4) & 1 ? dz : 0.0f);
                    const float v1 = fmaf(c.y, t.y, c.x) + (bits >> (w * 4) & 2 ? dz : 0.0f);
                    const float v2 = fmaf(c.y, l.x, c.x) + (bits >> (w * 4) & 4 ? dz : 0.0f);
                    const float v3 = fmaf(c.y, l.y, c.x) + (bits >> (w * 4) & 8 ? dz : 0.0f);
                    a[0][w] = pack(v0, v1, T()) & (w >= 2 ? keep_second : ~0u);
                    a[1][w] = pack(v2, v3, T()) & (w >= 2 ? keep_second : ~0u);
                }
                stmatrix_x4_trans(grad_tile + 2 * row * 16 * GRAD_PIXEL, a[0][0], a[0][1], a[0][2], a[0][3]);
                stmatrix_x4_trans(grad_tile + (2 * row + 1) * 16 * GRAD_PIXEL, a[1][0], a[1][1], a[1][2], a[1][3]);
                if (row == POOLED - 1) {
                    fence_proxy_async();
                    bar_arrive(BARRIER_FULL + stage, 2 * WARPGROUP);
                }
                wgmma_fence();
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int tap = 0; tap < TAPS; tap++)
                        wgmma<T, 32, 1>(d[tap], a[h],
                                        wgmma_advance(tile, ((2 * row + h + tap / 3) * 16 + tap % 3) * TILE_PIXEL), 1);
                wgmma_commit_group();
                if (row == POOLED - 1)
                    wgmma_wait_group<0>();
                else
                    wgmma_wait_group<1>(); // overlaps with making dy of the next two rows
            }
            bar_sync(BARRIER_FIRST, WARPGROUP);
            load(i + 2);
            cp_async_commit_group();
        }
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                grad_weight_partial[((int64_t)blockIdx.x * TAPS * 4 + tap * 4 + j) * WARPGROUP + thread] =
                    make_float4(d[tap][j * 4], d[tap][j * 4 + 1], d[tap][j * 4 + 2], d[tap][j * 4 + 3]);
    } else {
        if (!grad_input) {
            for (int i = 0; i < images; i++) {
                bar_sync(BARRIER_FULL + (i & 1), 2 * WARPGROUP);
                if (i + 2 < images)
                    bar_arrive(BARRIER_EMPTY + (i & 1), 2 * WARPGROUP);
            }
            return;
        }
        // a[k]: 16 output channels (its k) of tap column f. k < 12: dy's row above, tap row 2 in rows 0..7 and tap row
        // 1 in rows 8..15; else dy's row below, tap row 0 in rows 0..7.
        uint32_t a[24][4];
        const T *fragment = staged + ((lane >> 4) * 8 + lane % 8) * WEIGHT_PITCH + warp * 8;
        const bool second = lane >> 3 & 1;
#pragma unroll
        for (int k = 0; k < 24; k++) {
            const int f = k / 4 % 3, tap = (k >= 12 ? 0 : second ? 1 : 2) * 3 + 2 - f;
            ldmatrix_x4_trans(a[k], shared_address(fragment + tap * WEIGHT_PLANE + k % 4 * 16 * WEIGHT_PITCH));
            if (k >= 12)
                a[k][1] = a[k][3] = 0;
        }
        const uint64_t descriptor = wgmma_descriptor(shared_address(grad_tiles), WGMMA_SWIZZLE_128, 8 * GRAD_PIXEL);
        for (int i = 0; i < images; i++) {
            const int64_t image = blockIdx.x + (int64_t)i * gridDim.x;
            const uint64_t grad_tile = wgmma_advance(descriptor, (i & 1) * GRAD_TILE_BYTES);
            bar_sync(BARRIER_FULL + (i & 1), 2 * WARPGROUP);
            float d[120];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 24; k++)
                wgmma<T, 240, 0>(d, a[k],
                                 wgmma_advance(grad_tile, ((k >= 12 ? 32 : 0) + k / 4 % 3) * GRAD_PIXEL + k % 4 * 32),
                                 k > 0);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            if (i + 2 < images)
                bar_arrive(BARRIER_EMPTY + (i & 1), 2 * WARPGROUP);
            // Rows 8..15 of a warp belong one image row up. Staged as [pixel][32 channels], the four vectors of a pixel
            // swizzled so that eight pixels fall into different banks.
#pragma unroll
            for (int j = 0; j < 28; j += 4) {
                uint32_t m[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *v = d + (j + e) * 4;
                    m[e] = pack(v[0] + v[8 + 2], v[1] + v[8 + 3], T());
                }
                const int pixel = j * 8 + lane;
                stmatrix_x4_trans(shared_address(staging) + pixel * 64 + (warp ^ (pixel >> 1 & 3)) * 16, m[0], m[1],
                                  m[2], m[3]);
            }
            bar_sync(BARRIER_SECOND, WARPGROUP);
            char *to = (char *)grad_input + image * (PIXELS * IN_CHANNELS * 2);
#pragma unroll
            for (int e = 0; e < 7; e++) {
                const int vector = thread + e * WARPGROUP;
                if (e < 6 || vector < PIXELS * IN_CHANNELS / 8) {
                    const int from = vector >> 2, row = from / SIDE, pixel = from + 2 * row;
                    *(uint4 *)(to + vector * 16) =
                        *(const uint4 *)(staging + pixel * 64 + ((vector & 3) ^ (pixel >> 1 & 3)) * 16);
                }
            }
        }
    }
}

// Adds the blocks' weight gradients in order: threads add 16 slices of the blocks, then the slices are added.
__global__ void __launch_bounds__(REDUCE_SLICES * 32)
    reduce_kernel(void *grad_weight, const float4 *partial, int partials, cuda_ops_dtype dtype)
{
    __shared__ float4 sums[REDUCE_SLICES][32];
    const int slice = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * 32 + lane;
    wait_for_predecessor();
    release_successor();
    constexpr int EACH = (MAX_BLOCKS + REDUCE_SLICES - 1) / REDUCE_SLICES;
    float4 p[EACH], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < EACH; i++) { // all in flight at once: their latency is most of this kernel's time
        const int part = slice + i * REDUCE_SLICES;
        p[i] = part < partials ? partial[(int64_t)part * (GRAD_WEIGHTS / 4) + index] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sum.x += p[i].x;
        sum.y += p[i].y;
        sum.z += p[i].z;
        sum.w += p[i].w;
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice == 0) {
#pragma unroll
        for (int i = 1; i < REDUCE_SLICES; i++) {
            sum.x += sums[i][lane].x;
            sum.y += sums[i][lane].y;
            sum.z += sums[i][lane].z;
            sum.w += sums[i][lane].w;
        }
        const int thread = index % WARPGROUP, tap = index / WARPGROUP / 4, j = index / WARPGROUP % 4;
        const int out_channel = thread / 32 * 16 + lane / 4, channel = j * 8 + 2 * (lane % 4);
        const int to = out_channel * WEIGHT_ROW + channel * TAPS + tap;
        store_value(grad_weight, dtype, to, (double)sum.x);
        store_value(grad_weight, dtype, to + TAPS, (double)sum.y);
        store_value(grad_weight, dtype, to + 8 * WEIGHT_ROW, (double)sum.z);
        store_value(grad_weight, dtype, to + 8 * WEIGHT_ROW + TAPS, (double)sum.w);
    }
}

#else // compilations for other architectures see declarations only: `supports` keeps them from being launched

template <typename T>
__global__ void forward_kernel(void *, float2 *, const void *, const void *, bool, int64_t)
{
}
template <typename T>
__global__ void pool_kernel(void *, uint32_t *, uint8_t *, const void *, Statistics, const float2 *, int, int64_t)
{
}
template <typename T>
__global__ void sums_kernel(float2 *, const void *, const uint32_t *, const uint8_t *, const double *, int64_t)
{
}
template <typename T>
__global__ void backward_kernel(void *, float4 *, void *, void *, void *, const void *, const void *, const void *,
                                cuda_ops_norm_parameters, cuda_ops_dtype, const double *, const void *, const uint8_t *,
                                const float2 *, int, bool, int64_t)
{
}
__global__ void reduce_kernel(void *, const float4 *, int, cuda_ops_dtype)
{
}

#endif

Answer conv_bn_relu_pool_sm90_supports(const ConvBlockCall &call, const Device &device)
{
    const cuda_ops_conv2d_sizes &c = call.sizes.conv;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (call.dtype != CUDA_OPS_BFLOAT16 && call.dtype != CUDA_OPS_FLOAT16)
        return NEEDS_HALVES;
    if (c.in_channels != IN_CHANNELS || c.out_channels != OUT_CHANNELS || c.in_height != SIDE || c.in_width != SIDE)
        return no("takes only 32 channels in, 64 out, images of 14 x 14");
    return device.capability == 90 ? YES : NEEDS_90;
}

// At most a block for each of an H200's multiprocessors, each with an image at least. From the batch alone, so that
// both passes split their sums alike.
static int blocks_of(int64_t batch)
{
    return (int)(batch < MAX_BLOCKS ? batch : MAX_BLOCKS);
}

int64_t conv_bn_relu_pool_sm90_workspace(int64_t batch)
{
    return blocks_of(batch) * (OUT_CHANNELS * (int64_t)sizeof(float2) + GRAD_WEIGHTS * (int64_t)sizeof(float));
}

#ifdef CUDA_OPS_SM90A

template <typename T>
static cuda_ops_status forward(void *output, void *conv_output, void *maximum, uint8_t *argmax, const Statistics &s,
                               void *workspace, const void *input, const void *weight, int64_t batch,
                               cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    const int blocks = blocks_of(batch);
    float2 *partial = (float2 *)workspace;
    allow_shared_memory(forward_kernel<T>, FORWARD_SHARED);
    launch_dependent(forward_kernel<T>, blocks, 2 * WARPGROUP, FORWARD_SHARED, stream, conv_output, partial, input,
                     weight, weight_dtype == CUDA_OPS_FLOAT32, batch);
    launch_dependent(pool_kernel<T>, blocks, POOL_THREADS, 0, stream, output, (uint32_t *)maximum, argmax, conv_output,
                     s, partial, blocks, batch);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(void *grad_input, void *grad_weight, void *grad_bias, void *grad_norm_weight,
                                void *grad_norm_bias, void *workspace, const void *grad_output, const uint8_t *argmax,
                                const void *maximum, const void *conv_output, const double *statistics,
                                const void *input, const void *weight, const cuda_ops_norm_parameters *norm,
                                int64_t batch, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    const int blocks = blocks_of(batch);
    float4 *grad_weight_partial = (float4 *)workspace;
    float2 *partial = (float2 *)(grad_weight_partial + blocks * (GRAD_WEIGHTS / 4));
    constexpr int SUMS_SHARED = POOL_GROUPS * 2 * POOLED_BYTES;
    allow_shared_memory(sums_kernel<T>, SUMS_SHARED);
    allow_shared_memory(backward_kernel<T>, BACKWARD_SHARED);
    launch_dependent(sums_kernel<T>, blocks, POOL_THREADS, SUMS_SHARED, stream, partial, grad_output,
                     (const uint32_t *)maximum, argmax, statistics, batch);
    launch_dependent(backward_kernel<T>, blocks, 2 * WARPGROUP, BACKWARD_SHARED, stream, grad_input,
                     grad_weight_partial, grad_norm_weight, grad_norm_bias, grad_bias, grad_output, input, weight,
                     *norm, weight_dtype, statistics, conv_output, argmax, partial, blocks,
                     weight_dtype == CUDA_OPS_FLOAT32, batch);
    launch_dependent(reduce_kernel, GRAD_WEIGHTS / 4 / 32, REDUCE_SLICES * 32, 0, stream, grad_weight,
                     grad_weight_partial, blocks, weight_dtype);
    return launch_status();
}

#endif

cuda_ops_status conv_bn_relu_pool_sm90_forward(void *output, void *conv_output, uint8_t *argmax, void *maximum,
                                               double *statistics, void *workspace,
                                               const cuda_ops_running_statistics *running, const void *input,
                                               const void *weight, const void *bias,
                                               const cuda_ops_norm_parameters *norm, int64_t batch,
                                               cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    if (batch == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    const Statistics s = {statistics, *running, *norm, bias, weight_dtype};
    if (dtype == CUDA_OPS_BFLOAT16)
        return forward<__nv_bfloat16>(output, conv_output, maximum, argmax, s, workspace, input, weight, batch,
                                      weight_dtype, stream);
    if (dtype == CUDA_OPS_FLOAT16)
        return forward<__half>(output, conv_output, maximum, argmax, s, workspace, input, weight, batch, weight_dtype,
                               stream);
#else
    (void)output, (void)conv_output, (void)argmax, (void)maximum, (void)statistics, (void)workspace, (void)running;
    (void)input, (void)weight, (void)bias, (void)norm, (void)dtype, (void)weight_dtype, (void)stream;
#endif
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

cuda_ops_status conv_bn_relu_pool_sm90_backward(void *grad_input, void *grad_weight, void *grad_bias,
                                                void *grad_norm_weight, void *grad_norm_bias, void *workspace,
                                                const void *grad_output, const uint8_t *argmax, const void *maximum,
                                                const void *conv_output, const double *statistics, const void *input,
                                                const void *weight, const cuda_ops_norm_parameters *norm, int64_t batch,
                                                cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    if (batch == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    if (dtype == CUDA_OPS_BFLOAT16)
        return backward<__nv_bfloat16>(grad_input, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias, workspace,
                                       grad_output, argmax, maximum, conv_output, statistics, input, weight, norm,
                                       batch, weight_dtype, stream);
    if (dtype == CUDA_OPS_FLOAT16)
        return backward<__half>(grad_input, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias, workspace,
                                grad_output, argmax, maximum, conv_output, statistics, input, weight, norm, batch,
                                weight_dtype, stream);
#else
    (void)grad_input, (void)grad_weight, (void)grad_bias, (void)grad_norm_weight, (void)grad_norm_bias;
    (void)workspace, (void)grad_output, (void)argmax, (void)maximum, (void)conv_output, (void)statistics, (void)input;
    (void)weight, (void)norm, (void)dtype, (void)weight_dtype, (void)stream;
#endif
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
