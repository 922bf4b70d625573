// Neighbouring channels of a pixel as the unrolled channels_last kernels move them: VECTOR elements in one load.
#ifndef CUDA_OPS_CONV2D_DEPTHWISE_CHANNEL_VECTOR_CUH
#define CUDA_OPS_CONV2D_DEPTHWISE_CHANNEL_VECTOR_CUH

#include "conv2d/depthwise/problem.cuh"

template <typename T, int VECTOR>
struct ChannelVector {
    static constexpr int BYTES = sizeof(T) * VECTOR, WORDS = (BYTES + 3) / 4;
    uint32_t word[WORDS];
};

// Zeros where it is not `there`.
template <typename T, int VECTOR>
__device__ __forceinline__ void load_channels(ChannelVector<T, VECTOR> &v, const T *from, bool there)
{
    if constexpr (v.BYTES == 16) {
        const uint4 words = there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
        v.word[0] = words.x, v.word[1] = words.y, v.word[2] = words.z, v.word[3] = words.w;
    } else if constexpr (v.BYTES == 8) {
        const uint2 words = there ? *(const uint2 *)from : make_uint2(0, 0);
        v.word[0] = words.x, v.word[1] = words.y;
    } else if constexpr (v.BYTES == 4) {
        v.word[0] = there ? *(const uint32_t *)from : 0;
    } else {
        v.word[0] = there ? *(const unsigned short *)from : 0;
    }
}

template <typename T, int VECTOR, int COUNT>
__device__ __forceinline__ void convert_channels(float (&value)[COUNT][VECTOR],
                                                 const ChannelVector<T, VECTOR> (&raw)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            if constexpr (sizeof(T) == 4) {
                value[i][k] = __uint_as_float(raw[i].word[k]);
            } else if constexpr (VECTOR == 1) {
                const unsigned short bits = (unsigned short)raw[i].word[0];
                value[i][k] = load_as_accumulate(*(const T *)&bits);
            } else {
                const float2 two = unpack<T>(raw[i].word[k / 2]);
                value[i][k] = k % 2 == 0 ? two.x : two.y;
            }
        }
}

template <typename T, int VECTOR>
__device__ __forceinline__ void store_channels(T *to, const float (&value)[VECTOR])
{
    T values[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
        values[k] = store_from_accumulate<T>(value[k]);
    if constexpr (sizeof(T) * VECTOR >= 4)
        store_run(to, values);
    else
        *to = values[0];
}

#endif
