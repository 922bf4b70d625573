// to[copy][channel][pixel] = from[pixel + first_shift + copy * shift][channel], for float32.
//
// A block of 256 threads transposes tiles of 128 pixels (and as many more as the shifted copies read) and 32 channels
// through shared memory, by 16-byte loads along channels and coalesced stores along pixels. Bound by memory.
#include "common/aligned_vector.cuh"
#include "conv2d/sm90/transpose.h"
#include "ptx/wgmma.cuh"

static constexpr int THREADS = 256;
static constexpr int PIXELS = 128, CHANNELS = 32;

__global__ void __launch_bounds__(THREADS)
    conv2d_sm90_transpose_kernel(float *to, const float *from, const __grid_constant__ Transpose t)
{
    constexpr int VECTORS = CHANNELS / 4, PASS = THREADS / VECTORS; // threads per pixel, pixels at a time
    constexpr int LOADED = PIXELS + CONV2D_MOST_SHIFT;
    __shared__ float tile[CHANNELS][LOADED + 1]; // 4 channels on are 4 banks on
    const int pixels = (int)(t.images * t.grid_height * t.grid_width), shifts = (t.copies - 1) * t.shift;
    const int64_t across = ceil_div(t.channels, CHANNELS), tiles = across * ceil_div(pixels, PIXELS);
    const int x = threadIdx.x % VECTORS * 4, y = threadIdx.x / VECTORS;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const int64_t first = index / across * PIXELS, channel = index % across * CHANNELS;
        float4 values[LOADED / PASS];
#pragma unroll
        for (int i = 0; i < LOADED / PASS; i++) {
            // Pixels are below 2^31.
            const int pixel = (int)first + t.first_shift + y + i * PASS, line = pixel / (int)t.grid_width;
            const int column = pixel - line * (int)t.grid_width, image = line / (int)t.grid_height;
            const int row = line - image * (int)t.grid_height;
            values[i] = make_float4(0, 0, 0, 0);
            if (y + i * PASS < PIXELS + shifts && pixel >= 0 && pixel < pixels && column < t.width && row < t.height &&
                channel + x < t.channels)
                values[i] = *(const float4 *)(from + image * t.image_stride + row * t.row_stride +
                                              column * t.pixel_stride + channel + x);
        }
#pragma unroll
        for (int i = 0; i < LOADED / PASS; i++) {
            tile[x][y + i * PASS] = values[i].x;
            tile[x + 1][y + i * PASS] = values[i].y;
            tile[x + 2][y + i * PASS] = values[i].z;
            tile[x + 3][y + i * PASS] = values[i].w;
        }
        __syncthreads();
        for (int copy = 0; copy < t.copies; copy++) {
            float *const rows = to + copy * t.channels * t.pitch;
#pragma unroll
            for (int c = warp; c < CHANNELS; c += THREADS / WARP_SIZE)
#pragma unroll
                for (int r = lane; r < PIXELS; r += WARP_SIZE)
                    if (channel + c < t.channels && first + r < pixels)
                        rows[(channel + c) * t.pitch + first + r] = tile[c][r + copy * t.shift];
        }
        __syncthreads();
    }
}

cuda_ops_status conv2d_transpose(void *to, const void *from, const Transpose &t, cudaStream_t stream)
{
    const int64_t pixels = t.images * t.grid_height * t.grid_width;
    launch_dependent(conv2d_sm90_transpose_kernel,
                     dim3(clamp_grid(ceil_div(pixels, PIXELS) * ceil_div(t.channels, CHANNELS))), THREADS, 0, stream,
                     (float *)to, (const float *)from, t);
    return launch_status();
}

bool conv2d_transposes_input(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return HAS_SM90A && device.capability == 90 && call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32 &&
           s.in_channels % 4 == 0 && s.batch * s.out_height * s.out_width < INT32_MAX - 1024 &&
           is_aligned_16(call.input);
}

cuda_ops_status conv2d_transpose_input(void *to, const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Transpose t = conv2d_transpose_of(s.batch, s.out_height, s.out_width, s.in_channels);
    t.image_stride = s.in_height * s.in_width * s.in_channels;
    t.row_stride = s.stride_height * s.in_width * s.in_channels;
    t.pixel_stride = s.stride_width * s.in_channels;
    t.pitch = conv2d_transposed_input_pitch(s);
    return conv2d_transpose(to, call.input, t, call.stream);
}
