// Kernel B of one_channel.cu on tensor cores in float32, where TF32 is allowed: as tensor_cores.cuh has it for fp16 and
// bf16, but that the 4 x 4 pixels of a window are the k of two m16n8k8, of two rows each.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_TF32_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_TF32_CUH

#include "conv_bn_relu_pool/one_channel/tensor_cores.cuh"
#include "ptx/cvt.cuh"

// A pixel in shared memory, rounded: tensor cores would cut off what is beyond TF32.
struct tf32_pixel {
    uint32_t bits;
};
template <>
__device__ __forceinline__ tf32_pixel store_from_accumulate<tf32_pixel>(float value)
{
    return {cvt_rna_tf32(value)};
}

// channels is a multiple of 8, and output and argmax are channels_last and aligned to 16 bytes.
__global__ void __launch_bounds__(THREADS, 2)
    one_forward_tf32_kernel(float *output, uint8_t *argmax, double *statistics, cuda_ops_running_statistics running,
                            const double *partials, int partial_count, const float *input, one_parameters p,
                            one_sizes s, band_grid b)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    tf32_pixel *const tiles = (tf32_pixel *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ one_coefficients c;
    __shared__ one_scratch scratch;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + 8 * t;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    wait_for_predecessor();
    release_successor();
    int64_t first = (int64_t)blockIdx.x * b.units;
    load_tiles(tiles, input, first, s, b);
    make_coefficients<float>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                             blockIdx.x == 0);
    // Column g of the fragment `block` is channel 8 * (g / 2) + 2 * block + g % 2; k is a pixel of rows 2 * pair and
    // 2 * pair + 1, t and t + 4.
    uint32_t weight[4][4][2][2]; // [block][position][pair]
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int position = 0; position < 4; position++)
#pragma unroll
            for (int pixel_row = 0; pixel_row < 4; pixel_row++) {
                const int row = pixel_row - position / 2, column = t - position % 2;
                const bool inside = row >= 0 && row < 3 && column >= 0 && column < 3;
                weight[block][position][pixel_row / 2][pixel_row % 2] =
                    cvt_rna_tf32(inside ? c.weight[row * 3 + column][8 * (g / 2) + 2 * block + g % 2] : 0.0f);
            }

    for (bool again = false; first < b.all_units; first += (int64_t)gridDim.x * b.units, again = true) {
        if (again)
            load_tiles(tiles, input, first, s, b);
        const window_range windows = windows_of(first, b);
        for (int begin = warp * 16; begin < windows.count; begin += WARPS * 16) {
            uint32_t pixels[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                const tf32_pixel *corner = tiles + corners[window < windows.count ? window : 0] + t;
#pragma unroll
                for (int row = 0; row < 4; row++)
                    pixels[row / 2][row % 2 * 2 + half] = corner[row * b.pitch].bits;
            }
            float result[2][4];
            uint32_t where[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (int block = 0; block < 4; block++) {
                float y[4][4];
#pragma unroll
                for (int position = 0; position < 4; position++) {
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        y[position][i] = 0.0f;
#pragma unroll
                    for (int pair = 0; pair < 2; pair++)
                        mma_sync<float>(y[position], pixels[pair], weight[block][position][pair][0],
                                        weight[block][position][pair][1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * half + e, of = 8 * t + 2 * block + e;
                        unsigned int position;
                        const float z =
                            largest(y[0][i], y[1][i], y[2][i], y[3][i], position) * c.scale[of] + c.offset[of];
                        const bool inactive = z <= 0.0f;
                        where[half][block / 2] |= (inactive ? 0u : position) << (block % 2 * 16 + e * 8);
                        result[half][block % 2 * 2 + e] = inactive ? 0.0f : z;
                    }
                if (block % 2 == 0)
                    continue;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int window = begin + g + 8 * half;
                    if (window < windows.count && channel < s.channels)
                        *(float4 *)(output + (windows.before + window) * s.channels + channel + block / 2 * 4) =
                            make_float4(result[half][0], result[half][1], result[half][2], result[half][3]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                if (window < windows.count && channel < s.channels)
                    *(uint2 *)(argmax + (windows.before + window) * s.channels + channel) =
                        make_uint2(where[half][0], where[half][1]);
            }
        }
    }
#endif
}

#endif
