// Kernels B and C of one_channel.cu on CUDA cores: a lane has a channel, in B with its weights in registers.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_CUDA_CORES_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_CUDA_CORES_CUH

#include "conv_bn_relu_pool/one_channel/bands.cuh"
#include "conv_bn_relu_pool/one_channel/coefficients.cuh"

// ---- B ----

template <typename T>
__global__ void __launch_bounds__(THREADS)
    one_forward_kernel(T *output, uint8_t *argmax, double *statistics, cuda_ops_running_statistics running,
                       const double *partials, int partial_count, const T *input, one_parameters p, one_sizes s,
                       band_grid b, one_strides strides)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float *const tiles = (float *)dynamic_shared;
    __shared__ one_coefficients c;
    __shared__ one_scratch scratch;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + lane;
    clear_border(tiles, s, b);
    wait_for_predecessor();
    release_successor();
    make_coefficients<T>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                         blockIdx.x == 0);
    float weight[TAPS];
#pragma unroll
    for (int k = 0; k < TAPS; k++)
        weight[k] = c.weight[k][lane];
    const float scale = c.scale[lane], offset = c.offset[lane];

    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        load_tiles(tiles, input, first, s, b);
        for (int line = warp; line < b.units * b.rows; line += WARPS) {
            const int unit = line / b.rows, row = line - unit * b.rows;
            const int64_t at = first + unit, image = at / b.bands;
            const int window_row = (int)(at - image * b.bands) * b.rows + row;
            if (at >= b.all_units)
                continue;
            const float *tile = tiles + unit * b.tile + 2 * row * b.pitch;
            const int64_t base = image * strides.image + (int64_t)window_row * b.window_columns * strides.window +
                                 channel * strides.channel;
            float pixels[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float2 two = *(const float2 *)(tile + r * b.pitch);
                pixels[r][2] = two.x;
                pixels[r][3] = two.y;
            }
#pragma unroll 2
            for (int column = 0; column < b.window_columns; column++) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float2 two = *(const float2 *)(tile + r * b.pitch + 2 * column + 2);
                    pixels[r][0] = pixels[r][2];
                    pixels[r][1] = pixels[r][3];
                    pixels[r][2] = two.x;
                    pixels[r][3] = two.y;
                }
                float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int k = 0; k < TAPS; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        y[i] += weight[k] * pixels[k / 3 + i / 2][k % 3 + i % 2];
                unsigned int position;
                const float z = largest(y[0], y[1], y[2], y[3], position) * scale + offset;
                const bool inactive = z <= 0.0f;
                if (channel < s.channels) {
                    const int64_t i = base + column * strides.window;
                    output[i] = store_from_accumulate<T>(inactive ? 0.0f : z);
                    argmax[i] = (uint8_t)(inactive ? 0u : position);
                }
            }
        }
    }
}

// ---- C ----

// Adds the warps' sums, shared[warp][sum][channel], into partials[channel][sum][block].
__device__ __forceinline__ void store_gradient_sums(float *partials, const float *shared, int warps, int first_channel,
                                                    const one_sizes &s)
{
    for (int i = threadIdx.x; i < GRADIENT_SUMS * CHANNELS; i += THREADS) {
        const int channel = first_channel + i % CHANNELS;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++)
            sum += shared[w * GRADIENT_SUMS * CHANNELS + i];
        if (channel < s.channels)
            partials[((int64_t)channel * GRADIENT_SUMS + i / CHANNELS) * gridDim.x + blockIdx.x] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    one_sums_kernel(float *partials, const T *grad_output, const uint8_t *argmax, const T *input, one_sizes s,
                    band_grid b, one_strides strides)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float *const tiles = (float *)dynamic_shared;
    __shared__ float shared[WARPS * GRADIENT_SUMS * CHANNELS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + lane;
    clear_border(tiles, s, b);
    wait_for_predecessor();
    release_successor();
    float sums[GRADIENT_SUMS];
#pragma unroll
    for (int k = 0; k < GRADIENT_SUMS; k++)
        sums[k] = 0.0f;
    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        load_tiles(tiles, input, first, s, b);
        for (int line = warp; line < b.units * b.rows; line += WARPS) {
            const int unit = line / b.rows, row = line - unit * b.rows;
            const int64_t at = first + unit, image = at / b.bands;
            const int window_row = (int)(at - image * b.bands) * b.rows + row;
            if (at >= b.all_units || channel >= s.channels)
                continue;
            const float *tile = tiles + unit * b.tile + 2 * row * b.pitch;
            const int64_t base = image * strides.image + (int64_t)window_row * b.window_columns * strides.window +
                                 channel * strides.channel;
#pragma unroll 4
            for (int column = 0; column < b.window_columns; column++) {
                const int64_t i = base + column * strides.window;
                const unsigned int position = argmax[i];
                const float dz = position ? (float)load_as_accumulate(grad_output[i]) : 0.0f;
                const float *pixels = tile + 2 * column + (position & 0x50u ? 1 : 0) + (position & 0x30u ? b.pitch : 0);
                sums[TAPS] += dz;
#pragma unroll
                for (int k = 0; k < TAPS; k++)
                    sums[k] += dz * pixels[k / 3 * b.pitch + k % 3];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < GRADIENT_SUMS; k++)
        shared[(warp * GRADIENT_SUMS + k) * CHANNELS + lane] = sums[k];
    __syncthreads();
    store_gradient_sums(partials, shared, WARPS, first_channel, s);
}

#endif
