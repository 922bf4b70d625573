// What of products' registers becomes rows in shared memory, and operands of further products, in attention's backward
// kernels on Hopper.
#ifndef CUDA_OPS_ATTENTION_SM90_FRAGMENTS_CUH
#define CUDA_OPS_ATTENTION_SM90_FRAGMENTS_CUH

#include "common/half.cuh"
#include "ptx/cvt_relu.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

#if defined(CUDA_OPS_HOPPER_CODE)

// POSITIVE: 0 in place of what is negative.
template <typename T, bool POSITIVE = false>
__device__ __forceinline__ uint32_t pack_pair(float low, float high)
{
    if (POSITIVE)
        return is_bfloat16<T> ? cvt_rn_relu_bf16x2_f32(high, low) : cvt_rn_relu_f16x2_f32(high, low);
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}

// And back.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair)
{
    if (is_bfloat16<T>)
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
    return make_float2(__half2float(__ushort_as_half((unsigned short)(pair & 0xffff))),
                       __half2float(__ushort_as_half((unsigned short)(pair >> 16))));
}

// A product's registers as the operand of one whose k are its columns.
template <typename T, bool POSITIVE = false, int ROWS>
__device__ __forceinline__ void pack_fragments(uint32_t (&packed)[ROWS][4], const float (&x)[8 * ROWS])
{
#pragma unroll
    for (int k = 0; k < ROWS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[k][i] = pack_pair<T, POSITIVE>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

// These as rows of 64 elements, the columns of rows column_bytes apart. row: that whose addresses this lane gives.
template <int ROWS>
__device__ __forceinline__ void store_fragments(uint32_t to, int column_bytes, const uint32_t (&packed)[ROWS][4],
                                                int row, int lane)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int vector = (2 * i + lane / 16) % 8 ^ row % 8;
        stmatrix_x4(to + i / 4 * column_bytes + row * SWIZZLE_ROW + vector * 16, packed[i][0], packed[i][1],
                    packed[i][2], packed[i][3]);
    }
}

template <typename T, int COUNT>
__device__ __forceinline__ void pack_and_store(uint32_t to, const float (&x)[COUNT], int column_bytes, int row,
                                               int lane)
{
    uint32_t packed[COUNT / 8][4];
    pack_fragments<T>(packed, x);
    store_fragments(to, column_bytes, packed, row, lane);
}
// 64 x 64 of a product as rows of its columns.
template <typename T>
__device__ __forceinline__ void pack_and_store_transposed(uint32_t to, const float (&x)[32], int warp, int lane)
{
    uint32_t packed[4][4];
    pack_fragments<T>(packed, x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 * i + lane / 16 * 8 + lane % 8, vector = (2 * warp + lane / 8 % 2) ^ lane % 8;
        stmatrix_x4_trans(to + row * SWIZZLE_ROW + vector * 16, packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
