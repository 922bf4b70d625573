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
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + 4 * t;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    wait_for_predecessor();
    release_successor();
    int64_t first = (int64_t)blockIdx.x * b.units;
    load_tiles(tiles, input, first, s, b);
    make_coefficients<float>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                             blockIdx.x == 0);
    // Column g of the fragment `block` is channel channel_of(block, g), such that the four threads of a window store 64
    // bytes in a row; k is a pixel of rows 2 * pair and 2 * pair + 1, t and t + 4.
    const auto channel_of = [](int block, int column) {
        return 16 * (block / 2) + 4 * (column / 2) + 2 * (block % 2) + column % 2;
    };
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
                    cvt_rna_tf32(inside ? c.weight[row * 3 + column][channel_of(block, g)] : 0.0f);
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
            uint32_t where[2];
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
                for (int half = 0; half < 2; half++) {
                    where[half] = block % 2 ? where[half] : 0;
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * half + e, of = channel_of(block, 2 * t + e);
                        unsigned int position;
                        const float z =
                            largest(y[0][i], y[1][i], y[2][i], y[3][i], position) * c.scale[of] + c.offset[of];
                        const bool inactive = z <= 0.0f;
                        where[half] |= (inactive ? 0u : position) << (block % 2 * 16 + e * 8);
                        result[half][block % 2 * 2 + e] = inactive ? 0.0f : z;
                    }
                }
                if (block % 2 == 0)
                    continue;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int window = begin + g + 8 * half, of = channel + block / 2 * 16;
                    if (window < windows.count && of < s.channels) {
                        const int64_t at = (windows.before + window) * s.channels + of;
                        *(float4 *)(output + at) =
                            make_float4(result[half][0], result[half][1], result[half][2], result[half][3]);
                        *(uint32_t *)(argmax + at) = where[half];
                    }
                }
            }
        }
    }
#endif
}

// ---- C ----

__global__ void __launch_bounds__(THREADS, 2)
    one_sums_tf32_kernel(float *partials, const float *grad_output, const uint8_t *argmax, const float *input,
                         one_sizes s, band_grid b, int ring_offset)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    typedef GradientRing<float> Ring;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    tf32_pixel *const tiles = (tf32_pixel *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ float shared_sums[WARPS][CHANNELS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS;
    const bool whole_vectors = s.channels % 16 == 0;
    unsigned char *const ring = dynamic_shared + ring_offset + warp * Ring::WARP_BYTES;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    wait_for_predecessor();
    release_successor();
    float products[4][2][2][4], sums[4]; // [channel][pair of positions][pixels]
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sums[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++)
            products[j][i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        const window_range windows = windows_of(first, b);
        const auto start_step = [&](int step) {
            start_gradients(ring, step, grad_output, argmax, windows, first_channel, whole_vectors, s);
        };
#pragma unroll
        for (int step = 0; step < Ring::STEPS_AHEAD - 1; step++)
            start_step(step);
        load_tiles(tiles, input, first, s, b);
        int step = 0;
        for (int begin = warp * 16; begin < windows.count; begin += WARPS * 16, step++) {
            cp_async_wait_group<Ring::STEPS_AHEAD - 2>();
            __syncwarp(); // all lanes have read the step before, whose slot the next start_step overwrites
            const unsigned char *const from = ring + step % Ring::STEPS_AHEAD * Ring::STEP_BYTES;
            float4 grad[4];
            uint32_t where[4], pixels[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = t + 4 * i, window = begin + row;
                grad[i] = *(const float4 *)(from + row * Ring::GRAD_PITCH + 16 * g);
                where[i] = *(const uint32_t *)(from + 16 * Ring::GRAD_PITCH + row * Ring::ARGMAX_PITCH + 4 * g);
                const tf32_pixel *corner =
                    tiles + corners[window < windows.count ? window : 0] + g / 4 * b.pitch + g % 4;
                pixels[0][i] = corner[0].bits;
                pixels[1][i] = corner[2 * b.pitch].bits;
            }
            start_step(step + Ring::STEPS_AHEAD - 1);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint32_t masked[2][4]; // [window][position]
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float4 &v = grad[2 * half + i];
                        const float dz = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
                        const uint32_t rounded = cvt_rna_tf32(dz);
                        uint32_t any = 0;
#pragma unroll
                        for (int position = 0; position < 4; position++) {
                            const uint32_t shifted = where[2 * half + i] << position;
                            masked[i][position] = rounded & prmt(shifted, 0, 0x8888 + j * 0x1111);
                            any |= shifted;
                        }
                        sums[j] += __uint_as_float(__float_as_uint(dz) & prmt(any, 0, 0x8888 + j * 0x1111));
                    }
#pragma unroll
                    for (int pair = 0; pair < 2; pair++) {
                        const uint32_t a[4] = {masked[0][2 * pair], masked[0][2 * pair + 1], masked[1][2 * pair],
                                               masked[1][2 * pair + 1]};
#pragma unroll
                        for (int tile = 0; tile < 2; tile++)
                            mma_sync<float>(products[j][pair][tile], a, pixels[tile][2 * half],
                                            pixels[tile][2 * half + 1]);
                    }
                }
        }
        cp_async_wait_all(); // the steps beyond the last
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sums[j] += __shfl_xor_sync(FULL_WARP, sums[j], 1);
        sums[j] += __shfl_xor_sync(FULL_WARP, sums[j], 2);
        if (t == 0)
            shared_sums[warp][4 * g + j] = sums[j];
    }
    store_products(partials, (float *)dynamic_shared, products, shared_sums, first_channel, s);
#endif
}

#endif
