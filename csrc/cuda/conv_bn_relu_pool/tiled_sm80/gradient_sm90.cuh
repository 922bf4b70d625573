// The gradient of input in conv_bn_relu_pool's tiled path in TF32 on Hopper: what convolve_sm90.cu and backward_sm90.cu do
// alike.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM80_GRADIENT_SM90_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM80_GRADIENT_SM90_CUH

#include "conv_bn_relu_pool/tiled_sm80/tile_sm90.cuh"

// dy: two rasters of 32 channels, of which products of 240 pixels read 18 more.
static constexpr int GRADIENT_PIXELS = PIXELS + RASTER, GRADIENT_COLUMNS = 32, GRADIENT_CHUNKS = 2;
static constexpr int GRADIENT_RASTER =
    (2 * RASTER + 2 + GRADIENT_PIXELS) * PIXEL_BYTES / SWIZZLE_ATOM * SWIZZLE_ATOM + SWIZZLE_ATOM;
static constexpr int GRADIENT_STAGE = GRADIENT_CHUNKS * GRADIENT_RASTER;
// Of wgmma's 64 rows 32 channels need half. The others make another tap: of each warp's 16 rows, the first eight have one
// tap of eight channels and the next another, a shift of dy's raster apart, so that both end up in one thread's
// registers, or in its neighbour's. Nine taps in five products, a tap column of dy's raster at a time:
//     ALONE     tap row 0 of column 2; what it adds to the other rows is dropped, as its descriptor's groups of eight
//               rows are half as far apart as they lie, so that every second one is something else
//     COLUMNS   tap row 0 of columns 0 and 1, a pixel apart
//     ROWS      tap rows 2 and 1 of columns 0, 1 and 2, an image row apart
static constexpr int PAIRED_BYTES = 64 * PIXEL_BYTES, ALONE_BYTES = GRADIENT_COLUMNS * PIXEL_BYTES;
static constexpr int ROWS_PAIRED = 0, COLUMNS_PAIRED = 3 * GRADIENT_CHUNKS * PAIRED_BYTES;
static constexpr int ALONE = COLUMNS_PAIRED + GRADIENT_CHUNKS * PAIRED_BYTES;
static constexpr int GRADIENT_WEIGHT_BYTES = ALONE + GRADIENT_CHUNKS * ALONE_BYTES;

#if defined(CUDA_OPS_HOPPER_CODE)

// Column f of dy's raster is multiplied with tap column 2 - f: [product][chunk of 32 out channels][row][channel].
__device__ __forceinline__ void stage_gradient_weight(uint32_t staged, const float *weight, const tiled_problem &p,
                                                      int first_column)
{
    constexpr int LENGTH = GRADIENT_COLUMNS * TAPS;
    const int line_step = p.in_channels * TAPS;
    const int length = min(p.in_channels - first_column, GRADIENT_COLUMNS) * TAPS;
    const float *const from = weight + (int64_t)first_column * TAPS;
#pragma unroll 9
    for (int i = threadIdx.x; i < GRADIENT_CHUNKS * DEPTH * LENGTH / 4; i += blockDim.x) {
        const int out = i / (LENGTH / 4), at = i % (LENGTH / 4) * 4, k = out % DEPTH;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (out < p.out_channels && at < length)
            v = *reinterpret_cast<const float4 *>(from + (int64_t)out * line_step + at);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int in = (at + e) / TAPS, tap = (at + e) % TAPS, tap_row = tap / 3, f = 2 - tap % 3;
            const int chunk = out / DEPTH, paired = in / 8 * 16 + in % 8;
            const int row = tap_row > 0 ? paired + (tap_row == 1 ? 8 : 0) : f < 2 ? paired + (f == 1 ? 8 : 0) : in;
            const uint32_t to = staged + (tap_row > 0 ? ROWS_PAIRED + (f * GRADIENT_CHUNKS + chunk) * PAIRED_BYTES
                                          : f < 2     ? COLUMNS_PAIRED + chunk * PAIRED_BYTES
                                                      : ALONE + chunk * ALONE_BYTES);
            st_shared(to + row * PIXEL_BYTES + (((k >> 2) ^ (row & 7)) << 4) + (k & 3) * 4, cvt_rna_tf32(values[e]));
        }
    }
}

// d = the gradient of a tile's pixels, two of its four values a pixel and channel, of the weights and of dy's rasters.
__device__ __forceinline__ void multiply_gradient(float (&d)[GRADIENT_PIXELS / 2], uint32_t weights, uint32_t gradient,
                                                  int lane)
{
    // Uniform anew for each tile: as constants of the loop the descriptors would lie in ordinary registers.
    const uint32_t left = warp_uniform(weights), raster = warp_uniform(gradient);
    const uint64_t paired = wgmma_descriptor(left, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    const uint64_t alone = wgmma_descriptor(left + ALONE, WGMMA_SWIZZLE_128, 4 * PIXEL_BYTES);
    const uint64_t right = wgmma_descriptor(raster, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    const auto multiply = [&](uint64_t taps, int bytes_of_chunk, int pixel, bool adds) {
#pragma unroll
        for (int chunk = 0; chunk < GRADIENT_CHUNKS; chunk++)
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++)
                wgmma<float, GRADIENT_PIXELS, 0, 0>(
                    d, wgmma_advance(taps, chunk * bytes_of_chunk + k * 32),
                    wgmma_advance(right, chunk * GRADIENT_RASTER + pixel * PIXEL_BYTES + k * 32),
                    adds || chunk + k > 0);
    };
    wgmma_fence();
    multiply(wgmma_advance(paired, COLUMNS_PAIRED), PAIRED_BYTES, 2 * RASTER, false);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(d);
    // The other rows' next pixel is this thread's or the next lane's of four, where the fourth one's is 8 pixels on.
    const bool begins = lane % 4 == 0;
    const int next = (lane & ~3) | ((lane + 1) & 3);
#pragma unroll
    for (int i = 0; i < GRADIENT_PIXELS / 2; i += 4) {
        const float after = i + 4 < GRADIENT_PIXELS / 2 ? d[i + 6] : 0.0f;
        d[i] += d[i + 3];
        d[i + 1] += __shfl_sync(FULL_WARP, begins ? after : d[i + 2], next);
    }
    wgmma_pin(d);
    wgmma_fence();
    multiply(alone, ALONE_BYTES, 2 * RASTER + 2, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(d);
#pragma unroll
    for (int i = 0; i < GRADIENT_PIXELS / 2; i += 4)
        d[i + 2] = d[i + 3] = 0.0f;
    wgmma_pin(d);
    wgmma_fence();
#pragma unroll
    for (int f = 0; f < 3; f++)
        multiply(wgmma_advance(paired, ROWS_PAIRED + f * GRADIENT_CHUNKS * PAIRED_BYTES), PAIRED_BYTES, f, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
}

// Stores a warpgroup's d, of which a thread has `channel`.
__device__ __forceinline__ void store_gradient(float *result, const float (&d)[GRADIENT_PIXELS / 2],
                                               const tiled_problem &p, const tile_coordinate &origin, int channel,
                                               int q)
{
    const int rows = min(p.height - origin.y, SIDE), columns = min(p.width - origin.x, SIDE);
    const int64_t row_step = (int64_t)p.width * p.in_channels;
    float *const to =
        result + ((origin.image * p.height + origin.y) * p.width + origin.x) * (int64_t)p.in_channels + channel;
    if (channel < p.in_channels)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int x = c / 2 * 8 + 2 * q + c % 2;
            float *at = to + x * p.in_channels;
            if (x < columns)
#pragma unroll
                for (int row = 0; row < SIDE; row++, at += row_step) {
                    const int i = row * 8 + c / 2 * 4 + c % 2;
                    if (row < rows)
                        *at = d[i] + d[i + 8 + 2];
                }
        }
}

#endif

#endif
