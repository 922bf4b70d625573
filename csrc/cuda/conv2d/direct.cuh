// What conv2d's few_channels and depthwise paths share.
#ifndef CUDA_OPS_CONV2D_DIRECT_CUH
#define CUDA_OPS_CONV2D_DIRECT_CUH

#include <limits.h>

#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "conv2d/paths.h"
#include "ptx/cp_async.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"

// Strides in elements; of a weight: n of output channels, y and x of rows and columns of the kernel.
struct DirectStrides {
    int64_t n, c, y, x;
};

static inline DirectStrides direct_strides(int64_t channels, int64_t height, int64_t width, int channels_last)
{
    if (channels_last)
        return {channels * height * width, 1, width * channels, channels};
    return {channels * height * width, height * width, width, 1};
}

// A path's problem with the members that both paths have: the call's tensors and sizes. The sizes of images fit in 32
// bits; the paths check that.
template <typename Problem>
static inline Problem direct_problem(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Problem p = {};
    p.input = call.input;
    p.weight = call.weight;
    p.bias = call.bias;
    p.activation = call.sizes.activation;
    p.output = call.output;
    p.result = call.result;
    p.in = direct_strides(s.in_channels, s.in_height, s.in_width, s.input_channels_last);
    p.out = direct_strides(s.out_channels, s.out_height, s.out_width, s.output_channels_last);
    p.w = direct_strides(s.in_channels / s.groups, s.kernel_height, s.kernel_width, s.weight_channels_last);
    p.batch = s.batch;
    p.channels = (decltype(p.channels))s.in_channels;
    p.out_channels = (decltype(p.out_channels))s.out_channels;
    p.height = (int)s.in_height;
    p.width = (int)s.in_width;
    p.out_height = (int)s.out_height;
    p.out_width = (int)s.out_width;
    p.kernel_height = (int)s.kernel_height;
    p.kernel_width = (int)s.kernel_width;
    p.stride_height = (int)s.stride_height;
    p.stride_width = (int)s.stride_width;
    p.padding_top = (int)s.padding_top;
    p.padding_left = (int)s.padding_left;
    p.dilation_height = (int)s.dilation_height;
    p.dilation_width = (int)s.dilation_width;
    return p;
}

// Copies BYTES from device to shared memory past the registers, zeros if not `inside`.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(void *shared, const void *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<BYTES>(shared_address(shared), global, inside ? BYTES : 0);
#else
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++)
        ((uint32_t *)shared)[i] = inside ? ((const uint32_t *)global)[i] : 0;
#endif
}

template <typename T>
__device__ __forceinline__ uint32_t bits_of(T value)
{
    if constexpr (sizeof(T) == 2)
        return *(const unsigned short *)&value;
    else
        return *(const uint32_t *)&value;
}

// Values side by side as one store of 4, 8 or 16 bytes. (The compiler makes several of a struct now and then.)
template <typename T, int COUNT>
__device__ __forceinline__ void store_run(T *to, const T (&values)[COUNT])
{
    constexpr int WORDS = COUNT * sizeof(T) / 4;
    uint32_t words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        words[i] = sizeof(T) == 4 ? bits_of(values[i])
                                  : bits_of(values[i * 2 % COUNT]) | bits_of(values[(i * 2 + 1) % COUNT]) << 16;
    if constexpr (WORDS == 4)
        st_global_v4(to, words[0], words[1], words[2], words[3]);
    else if constexpr (WORDS == 2)
        st_global_v2(to, words[0], words[1]);
    else
        *(uint32_t *)to = words[0];
}

#endif
