// conv2d of few channels in 16 bits, forward, by way of patches in shared memory:
//
//   output [pixel][o] = patches [pixel][k] weight^T + bias
//
// A block copies the patches of 128 pixels, a row each, and multiplies them by mma.sync with the weights that it keeps.
// Rows are ordered such that a lane has four pixels side by side, and columns such that it has eight channels: both
// formats are stored from registers. Several blocks share an SM, so that one copies while another multiplies.
#include "common/aligned_vector.cuh"
#include "conv2d/direct.cuh"
#include "conv2d/patches/patches.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

static constexpr int THREADS = 128, TILE = 128;   // pixels, of which a warp has 32
static constexpr int GROUP = 32, MOST_K = 256;    // channels that are ordered together; elements of a patch
static constexpr int64_t MOST_SHARED = 96 * 1024; // so that two blocks share an SM

// Elements from row to row in shared memory: an odd number of 16 bytes, so that eight rows are in different banks.
__host__ __device__ __forceinline__ int row_pitch(const Patches &p)
{
    return p.pitch + VECTOR;
}

// Where a pixel of 32, or a channel, is among the rows of the instruction's fragments.
__device__ __forceinline__ int row_of_pixel(int i)
{
    return i / 32 * 32 + i % 4 / 2 * 16 + i % 2 * 8 + i % 32 / 4;
}
__device__ __forceinline__ int row_of_channel(int c)
{
    return c / GROUP * GROUP + c % 8 / 2 * 8 + c % GROUP / 8 * 2 + c % 2;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_patches_forward_kernel(T *output, const uint16_t *input, const T *weight, const T *bias, int wide,
                                  const __grid_constant__ Patches p)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const int pitch = row_pitch(p), first_channel = blockIdx.y * p.block_channels;
    const int channels = min(p.block_channels, (p.out_channels - first_channel + GROUP - 1) / GROUP * GROUP);
    uint16_t *const pixels = (uint16_t *)shared, *const weights = pixels + TILE * pitch;
    float *const biases = (float *)(weights + p.block_channels * pitch);
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE, g = lane / 4, t = lane % 4;
    wait_for_predecessor();
    release_successor();

    const int across = min(p.pitch, THREADS);
    if (thread / across < THREADS / across)
        for (int k = thread % across; k < p.pitch; k += across) {
            const int64_t offset = k < p.taken ? weight_offset(p, first_channel, k) : 0;
#pragma unroll 4
            for (int c = thread / across; c < channels; c += THREADS / across)
                weights[row_of_channel(c) * pitch + k] =
                    k < p.taken && first_channel + c < p.out_channels
                        ? (uint16_t)bits_of(weight[offset + (int64_t)c * p.weight_o])
                        : (uint16_t)0;
        }
    for (int c = thread; c < channels; c += THREADS)
        biases[c] = bias && first_channel + c < p.out_channels ? load_as_accumulate(bias[first_channel + c]) : 0.0f;

    const int vectors = p.pitch / VECTOR, rows = THREADS / vectors, vector = thread % vectors;
    const PatchVector<uint16_t> read(p, input, vector);
    const uint32_t a_rows = shared_address(pixels + (warp * 32 + lane / 8 % 2 * 8 + lane % 8) * pitch + lane / 16 * 8);
    const uint32_t b_rows = shared_address(weights + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8);
    const int plane = p.out_height * p.out_width;
    const bool last = p.output_last;

    for (int tile = blockIdx.x; tile * TILE < p.pixels; tile += gridDim.x) {
        __syncthreads();
        if (thread / vectors < rows)
#pragma unroll 2
            for (int i = thread / vectors; i < TILE; i += rows) {
                const int pixel = tile * TILE + i;
                *(uint4 *)(pixels + row_of_pixel(i) * pitch + vector * VECTOR) =
                    pixel < p.pixels ? read.of(p, pixel) : uint4{};
            }
        __syncthreads();
        const int first_pixel = tile * TILE + warp * 32 + 4 * g;
        for (int at = 0; at < channels; at += 2 * GROUP) {
            const int groups = min(2, (channels - at) / GROUP);
            float sum[2][8][4] = {}; // [rows of 16][columns of 8]
#pragma unroll 2
            for (int k = 0; k < p.pitch; k += 16) {
                uint32_t a[2][4];
                ldmatrix_x4(a[0], a_rows + 2 * k);
                ldmatrix_x4(a[1], a_rows + 2 * (16 * pitch + k));
#pragma unroll
                for (int j = 0; j < 8; j += 2)
                    if (j / 4 < groups) {
                        uint32_t b[4];
                        ldmatrix_x4(b, b_rows + 2 * ((at + j * 8) * pitch + k));
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            mma_sync<T>(sum[i][j], a[i], b[0], b[1]);
                            mma_sync<T>(sum[i][j + 1], a[i], b[2], b[3]);
                        }
                    }
            }
            // Pixel q of the lane's and channel m of a group's eight.
            const auto value = [&](int q, int group, int m) {
                return store_from_accumulate<T>(sum[q / 2][group * 4 + m / 2][q % 2 * 2 + m % 2] +
                                                biases[at + group * GROUP + t * 8 + m]);
            };
#pragma unroll
            for (int group = 0; group < 2; group++) {
                const int channel = first_channel + at + group * GROUP + t * 8;
                if (group >= groups || channel >= p.out_channels)
                    break;
                if (last && wide) {
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        T run[8];
#pragma unroll
                        for (int m = 0; m < 8; m++)
                            run[m] = value(q, group, m);
                        if (first_pixel + q < p.pixels)
                            store_run(output + (int64_t)(first_pixel + q) * p.out_channels + channel, run);
                    }
                } else if (!last && wide) {
                    const int image = first_pixel / plane;
                    T *const to =
                        output + ((int64_t)image * p.out_channels + channel) * plane + (first_pixel - image * plane);
#pragma unroll
                    for (int m = 0; m < 8; m++) {
                        T run[4];
#pragma unroll
                        for (int q = 0; q < 4; q++)
                            run[q] = value(q, group, m);
                        if (first_pixel < p.pixels && channel + m < p.out_channels)
                            store_run(to + (int64_t)m * plane, run);
                    }
                } else {
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        const int pixel = first_pixel + q, image = pixel / plane, in_plane = pixel - image * plane;
                        const int64_t step = last ? 1 : plane;
                        T *const to = last ? output + (int64_t)pixel * p.out_channels + channel
                                           : output + ((int64_t)image * p.out_channels + channel) * plane + in_plane;
#pragma unroll
                        for (int m = 0; m < 8; m++)
                            if (pixel < p.pixels && channel + m < p.out_channels)
                                to[m * step] = value(q, group, m);
                    }
                }
            }
        }
    }
}

static Patches padded_to_steps(const Patches &of)
{
    Patches p = of;
    p.pitch = (int)ceil_div(p.taken, 16) * 16;
    const int64_t row = 2 * row_pitch(p), fit = (MOST_SHARED - TILE * row) / (row + 4) / GROUP * GROUP;
    const int64_t all = ceil_div(p.out_channels, GROUP) * GROUP;
    p.block_channels = (int)(all < fit ? all : fit);
    return p;
}

bool conv2d_patches_forward_fits(const Patches &of)
{
    return of.taken <= MOST_K && padded_to_steps(of).block_channels > 0;
}

template <typename T>
static cuda_ops_status launch_forward(const ConvCall &call, const Patches &p, ConvDevice device)
{
    const auto kernel = conv2d_patches_forward_kernel<T>;
    const size_t shared = 2 * (size_t)row_pitch(p) * (TILE + p.block_channels) + 4 * (size_t)p.block_channels;
    allow_shared_memory(kernel, shared);
    const int64_t chunks = ceil_div(p.out_channels, p.block_channels), tiles = ceil_div(p.pixels, TILE);
    const int64_t resident = ceil_div((int64_t)active_blocks(kernel, THREADS, shared) * device.multiprocessors, chunks);
    const int64_t plane = (int64_t)p.out_height * p.out_width;
    const bool wide = is_aligned_16(call.result) && (p.output_last ? p.out_channels % VECTOR == 0 : plane % 4 == 0);
    launch_dependent(kernel, dim3((unsigned int)(tiles < resident ? tiles : resident), (unsigned int)chunks), THREADS,
                     shared, call.stream, (T *)call.result, (const uint16_t *)call.input, (const T *)call.weight,
                     (const T *)call.bias, wide, p);
    return launch_status();
}

cuda_ops_status conv2d_patches_forward(const ConvCall &call, const Patches &of, ConvDevice device)
{
    const Patches p = padded_to_steps(of);
    return call.dtype == CUDA_OPS_FLOAT16 ? launch_forward<__half>(call, p, device)
                                          : launch_forward<__nv_bfloat16>(call, p, device);
}
