// The gradient of weight in conv_bn_relu_pool's tiled path in TF32 on Hopper: what backward_weight_sm90.cu, which describes
// it, and backward_sm90.cu do alike.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM80_WEIGHT_SM90_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM80_WEIGHT_SM90_CUH

#include "conv_bn_relu_pool/tiled_sm80/tile_sm90.cuh"

// The transposed input: [row][in channel][16 pixels].
static constexpr int INPUT_ROW = WEIGHT_IN * RASTER * 4, TRANSPOSED_BYTES = RASTER * INPUT_ROW;
static constexpr int VECTORS = WEIGHT_OUT / 4, WINDOWS = SIDE / 2 * (SIDE / 2); // of a tile
static constexpr int WEIGHT_COLUMNS = 3 * WEIGHT_IN;                            // wgmma's n

#if defined(CUDA_OPS_HOPPER_CODE)

// dy in shared memory: [32 channels of two, HALF bytes apart][pixel][channel], vectors xored with the pixel.
template <int HALF>
__device__ __forceinline__ uint32_t gradient_address(int pixel, int channel)
{
    return channel / 32 * HALF + pixel * PIXEL_BYTES + ((channel % 32 / 4 ^ (pixel & 7)) << 4) + channel % 4 * 4;
}

// What one of 256 threads transposes: eight pixels, half a row, of four channels.
struct transposed_share {
    int four, half, row;
};

__device__ __forceinline__ transposed_share share_of(int thread)
{
    return {thread % 8, thread / 8 % 2, thread / 16};
}

// Even pixels lie before odd ones, as a fragment's k are t and t + 4.
__device__ __forceinline__ void store_transposed(uint32_t transposed, const float4 (&v)[8],
                                                 const transposed_share &share)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int in = share.four * 4 + e;
        const auto of = [&](const float4 &x) { return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w; };
        const uint32_t to = transposed + share.row * INPUT_ROW + in * (RASTER * 4);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) // in the swizzle of 64 bytes
            st_shared_v4_f32(to + (((share.half * 2 + odd) ^ (in >> 1 & 3)) << 4),
                             make_float4(of(v[odd]), of(v[odd + 2]), of(v[odd + 4]), of(v[odd + 6])));
    }
}

// Adds a tile's products to `sums`, [tap column][tap row, in channel]; `at`: the thread's four pixels of dy in a row's
// first eight. Eight channels on they are xored with 32.
__device__ __forceinline__ void multiply_weight(float (&sums)[3][WEIGHT_COLUMNS / 2], uint32_t gradient,
                                                const uint32_t (&at)[4], uint32_t transposed)
{
    const uint64_t right = wgmma_descriptor(transposed, WGMMA_SWIZZLE_64, 8 * RASTER * 4);
#pragma unroll 1
    for (int row = 0; row < SIDE; row++) {
        const uint32_t from = gradient + row * RASTER * PIXEL_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t v[4][2], left[3][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ld_shared(v[i][0], from + half * 8 * PIXEL_BYTES + at[i]);
                ld_shared(v[i][1], from + half * 8 * PIXEL_BYTES + (at[i] ^ 32));
            }
#pragma unroll
            for (int column = 0; column < 3; column++) {
                left[column][0] = v[2 - column][0], left[column][1] = v[2 - column][1];
                left[column][2] = v[3 - column][0], left[column][3] = v[3 - column][1];
            }
            wgmma_fence();
#pragma unroll
            for (int column = 0; column < 3; column++)
                wgmma<float, WEIGHT_COLUMNS, 0>(sums[column], left[column],
                                                wgmma_advance(right, row * INPUT_ROW + half * 32), 1);
            wgmma_commit_group();
            wgmma_wait_group<1>(); // the next fragments are loaded while these are multiplied
        }
    }
    wgmma_wait_group<0>();
}

// Stores a warpgroup's sums as weight_vector has them.
__device__ __forceinline__ void store_weight(float *to, const float (&sums)[3][WEIGHT_COLUMNS / 2], int row_channel,
                                             int t)
{
#pragma unroll
    for (int column = 0; column < 3; column++)
#pragma unroll
        for (int i = 0; i < WEIGHT_COLUMNS / 2; i += 2) {
            const int number = i / 4 * 8 + 2 * t, in = number % WEIGHT_IN, out = row_channel + i / 2 % 2 * 8;
            *reinterpret_cast<float2 *>(to + weight_vector(number / WEIGHT_IN * 3 + column, out, in) * 4 + in % 4) =
                make_float2(sums[column][i], sums[column][i + 1]);
        }
}

#endif

#endif
