// What the kernels of sm90.cu share: sizes, layouts in shared and device memory, and how images and weights are loaded.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM90_LAYOUT_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM90_LAYOUT_CUH

#include "conv_bn_relu_pool/paths.h"

#include "common/common.cuh"
#include "ptx/cp_async.cuh"
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

// What the pooling kernel needs for statistics, and where they go.
struct Statistics {
    double *statistics; // out: mean (without the convolution's bias) and variance of each channel
    cuda_ops_running_statistics running;
    cuda_ops_norm_parameters norm;
    const void *bias;
    cuda_ops_dtype bias_dtype;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (!defined(__CUDA_ARCH__) && defined(CUDA_OPS_SM90A))
#define CUDA_OPS_BLOCK_SM90_CODE 1 // else kernels are declared only

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

// A thread's vectors of a row of windows (of ROW_VECTORS): number `thread`, and where q < 3 the one below.
static constexpr int SECOND_VECTORS = WARPGROUP;
__device__ __forceinline__ int second_vector(int thread)
{
    return SECOND_VECTORS + thread / 4 * 3 + thread % 4;
}

#endif // CUDA_OPS_BLOCK_SM90_CODE

#endif
