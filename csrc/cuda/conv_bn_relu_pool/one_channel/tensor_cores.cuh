// Kernels B and C of one_channel.cu on tensor cores, in fp16 and bf16.
//
// In B the 4 x 4 pixels of a window are the k of one m16n8k16; its columns are the kernel at each of the window's four
// positions, for 32 channels. Channels are permuted such that a thread ends up with 8 neighbouring ones of a window, a
// 16-byte store. C is the transposed product: k is windows, the rows are (position, channel), the columns the pixels.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_TENSOR_CORES_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_TENSOR_CORES_CUH

#include "common/prefetch.cuh"
#include "conv_bn_relu_pool/one_channel/bands.cuh"
#include "conv_bn_relu_pool/one_channel/coefficients.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define CUDA_OPS_ONE_TENSOR_CORES 1
#endif

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const T pair[2] = {store_from_accumulate<T>(low), store_from_accumulate<T>(high)};
    return (uint32_t)*(const uint16_t *)&pair[0] | (uint32_t)*(const uint16_t *)&pair[1] << 16;
}

// The offset in `tiles` of each window's 4 x 4 pixels. Ends without a barrier.
__device__ __forceinline__ void fill_corners(uint16_t *corners, const band_grid &b)
{
    for (int window = threadIdx.x; window < b.units * b.rows * b.window_columns; window += THREADS) {
        const int row = window / b.window_columns, column = window - row * b.window_columns;
        const int unit = row / b.rows;
        corners[window] = (uint16_t)(unit * b.tile + 2 * (row - unit * b.rows) * b.pitch + 2 * column);
    }
}

// How many windows a block's units from `first` on have, and how many the tensor has before them.
struct window_range {
    int count;
    int64_t before;
};

__device__ __forceinline__ window_range windows_of(int64_t first, const band_grid &b)
{
    const int of_unit = b.rows * b.window_columns;
    const int64_t left = b.all_units - first;
    return {(int)(left < b.units ? left : b.units) * of_unit, first * of_unit};
}

// channels is a multiple of 8, and output and argmax are channels_last and aligned to 16 bytes.
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    one_forward_tensor_kernel(T *output, uint8_t *argmax, double *statistics, cuda_ops_running_statistics running,
                              const double *partials, int partial_count, const T *input, one_parameters p, one_sizes s,
                              band_grid b)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    T *const tiles = (T *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ one_coefficients c;
    __shared__ one_scratch scratch;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + 8 * t;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    // A waited for the images before it released this kernel, so that they can be read before A has finished.
    int64_t first = (int64_t)blockIdx.x * b.units;
    load_tiles(tiles, input, first, s, b);
    wait_for_predecessor();
    release_successor();
    make_coefficients<T>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                         blockIdx.x == 0);
    // Column g of the fragment `block` is channel 8 * (g / 2) + 2 * block + g % 2.
    uint32_t weight[4][4][2]; // [block][position]
    float scale[8], offset[8];
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int position = 0; position < 4; position++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = (2 * t + 8 * half) / 4 - position / 2, column = (2 * t + e) % 4 - position % 2;
                    const bool inside = row >= 0 && row < 3 && column >= 0 && column < 3;
                    value[e] = inside ? c.weight[row * 3 + column][8 * (g / 2) + 2 * block + g % 2] : 0.0f;
                }
                weight[block][position][half] = pack<T>(value[0], value[1]);
            }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        scale[i] = c.scale[8 * t + i];
        offset[i] = c.offset[8 * t + i];
    }

    for (bool again = false; first < b.all_units; first += (int64_t)gridDim.x * b.units, again = true) {
        if (again)
            load_tiles(tiles, input, first, s, b);
        const window_range windows = windows_of(first, b);
        for (int begin = warp * 16; begin < windows.count; begin += WARPS * 16) {
            uint32_t pixels[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                const T *corner = tiles + corners[window < windows.count ? window : 0] + t / 2 * b.pitch + t % 2 * 2;
                pixels[half] = *(const uint32_t *)corner;
                pixels[2 + half] = *(const uint32_t *)(corner + 2 * b.pitch);
            }
            uint32_t result[2][4], where[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (int block = 0; block < 4; block++) {
                float y[4][4];
#pragma unroll
                for (int position = 0; position < 4; position++) {
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        y[position][i] = 0.0f;
                    mma_sync<T>(y[position], pixels, weight[block][position][0], weight[block][position][1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float z[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * half + e;
                        unsigned int position;
                        z[e] = largest(y[0][i], y[1][i], y[2][i], y[3][i], position) * scale[2 * block + e] +
                               offset[2 * block + e];
                        const bool inactive = z[e] <= 0.0f;
                        z[e] = inactive ? 0.0f : z[e];
                        where[half][block / 2] |= (inactive ? 0u : position) << (block % 2 * 16 + e * 8);
                    }
                    result[half][block] = pack<T>(z[0], z[1]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                if (window < windows.count && channel < s.channels) {
                    const int64_t i = (windows.before + window) * s.channels + channel;
                    *(uint4 *)(output + i) =
                        make_uint4(result[half][0], result[half][1], result[half][2], result[half][3]);
                    *(uint2 *)(argmax + i) = make_uint2(where[half][0], where[half][1]);
                }
            }
        }
    }
#endif
}

// C's warps copy grad_output and argmax to shared memory several steps ahead (a step is 16 windows of 32 channels): the
// one step that fits in registers would leave memory idle. The pitches keep windows 2t in different banks, and in
// float32 windows t and t + 4.
template <typename T>
struct GradientRing {
    static constexpr bool WIDE = sizeof(T) == 4;
    static constexpr int GRAD_PITCH = WIDE ? 160 : 80, ARGMAX_PITCH = WIDE ? 32 : 48;
    static constexpr int STEP_BYTES = 16 * (GRAD_PITCH + ARGMAX_PITCH), STEPS_AHEAD = WIDE ? 3 : 4;
    static constexpr int WARP_BYTES = STEPS_AHEAD * STEP_BYTES, BYTES = WARPS * WARP_BYTES;
};

// A warp's sums of dz * pixel, [position][channel][pixel], in shared memory; rows of 18 against bank conflicts.
static constexpr int PRODUCT_ROW = 18, PRODUCTS = 4 * CHANNELS * PRODUCT_ROW, WARPS_AT_ONCE = 4;

// Copies the argmax of a warp's 16 windows from `begin` on to rows of shared memory: 16 bytes are 16 channels, of which
// the tensor may have the first 8 only.
__device__ __forceinline__ void start_argmax(unsigned char *to, int pitch, const uint8_t *argmax,
                                             const window_range &windows, int begin, int first_channel,
                                             bool whole_vectors, int lane, const one_sizes &s)
{
    const int row = lane / 2, window = begin + row, of = first_channel + lane % 2 * 16;
    unsigned char *const target = to + row * pitch + lane % 2 * 16;
    const bool valid = window < windows.count && of + 16 <= s.channels;
    const int64_t at = (windows.before + (window < windows.count ? window : 0)) * s.channels;
    if (whole_vectors) {
        cp_async<16>(shared_address(target), argmax + at + (valid ? of : 0), valid ? 16 : 0);
    } else {
        const bool some = window < windows.count && of < s.channels;
        const uint2 low = some ? *(const uint2 *)(argmax + at + of) : make_uint2(0, 0);
        const uint2 high = valid ? *(const uint2 *)(argmax + at + of + 8) : make_uint2(0, 0);
        *(uint4 *)target = make_uint4(low.x, low.y, high.x, high.y);
    }
}

// Starts a step of a warp, whose part of the ring it is: 16 windows, each with 32 gradients and 32 bytes of argmax.
template <typename T>
__device__ __forceinline__ void start_gradients(unsigned char *ring, int step, const T *grad_output,
                                                const uint8_t *argmax, const window_range &windows, int first_channel,
                                                bool whole_vectors, const one_sizes &s)
{
    typedef GradientRing<T> Ring;
    constexpr int MANY = 16 / (int)sizeof(T), LANES = CHANNELS / MANY, ROWS = WARP_SIZE / LANES; // of 16 bytes
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    unsigned char *const to = ring + step % Ring::STEPS_AHEAD * Ring::STEP_BYTES;
    const int begin = (step * WARPS + warp) * 16;
#pragma unroll
    for (int i = 0; i < 16 / ROWS; i++) {
        const int row = lane / LANES + ROWS * i, window = begin + row, of = first_channel + lane % LANES * MANY;
        const bool valid = window < windows.count && of < s.channels;
        const int64_t at = (windows.before + (valid ? window : 0)) * s.channels + (valid ? of : 0);
        cp_async<16>(shared_address(to + row * Ring::GRAD_PITCH + lane % LANES * 16), grad_output + at, valid ? 16 : 0);
    }
    start_argmax(to + 16 * Ring::GRAD_PITCH, Ring::ARGMAX_PITCH, argmax, windows, begin, first_channel, whole_vectors,
                 lane, s);
    cp_async_commit_group();
}

// Adds the products and sums(dz) of all warps into partials[channel][sum][block]; `shared` is where the images were.
__device__ __forceinline__ void store_products(float *partials, float *shared, const float (&products)[4][2][2][4],
                                               const float (&shared_sums)[WARPS][CHANNELS], int first_channel,
                                               const one_sizes &s)
{
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    // WARPS_AT_ONCE warps at a time.
    float total[2] = {0.0f, 0.0f};
    for (int round = 0; round < WARPS / WARPS_AT_ONCE; round++) {
        __syncthreads();
        if (warp / WARPS_AT_ONCE == round) {
            float *mine = shared + warp % WARPS_AT_ONCE * PRODUCTS + 4 * g * PRODUCT_ROW + 2 * t;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int position = 0; position < 4; position++)
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        const float *from = &products[j][position / 2][tile][position % 2 * 2];
                        *(float2 *)(mine + (position * CHANNELS + j) * PRODUCT_ROW + 8 * tile) =
                            make_float2(from[0], from[1]);
                    }
        }
        __syncthreads();
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            const int i = threadIdx.x + pass * THREADS, tap = i / CHANNELS;
            if (i < TAPS * CHANNELS)
                for (int w = 0; w < WARPS_AT_ONCE; w++)
#pragma unroll
                    for (int position = 0; position < 4; position++) {
                        const int pixel = (tap / 3 + position / 2) * 4 + tap % 3 + position % 2;
                        total[pass] +=
                            shared[w * PRODUCTS + (position * CHANNELS + i % CHANNELS) * PRODUCT_ROW + pixel];
                    }
        }
    }
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        const int i = threadIdx.x + pass * THREADS, of_channel = first_channel + i % CHANNELS;
        if (i >= GRADIENT_SUMS * CHANNELS || of_channel >= s.channels)
            continue;
        if (i >= TAPS * CHANNELS)
            for (int w = 0; w < WARPS; w++)
                total[pass] += shared_sums[w][i % CHANNELS];
        partials[((int64_t)of_channel * GRADIENT_SUMS + i / CHANNELS) * gridDim.x + blockIdx.x] = total[pass];
    }
}

// One long function: the ring's loads, the products and their sums over the warps share a warp's registers.
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    one_sums_tensor_kernel(float *partials, const T *grad_output, const uint8_t *argmax, const T *input, one_sizes s,
                           band_grid b, int ring_offset)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    typedef GradientRing<T> Ring;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    T *const tiles = (T *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ float shared_sums[WARPS][CHANNELS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS;
    const bool whole_vectors = s.channels % 16 == 0;
    unsigned char *const ring = dynamic_shared + ring_offset + warp * Ring::WARP_BYTES;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    // Prefetch what forward stored, while the kernel before this one still runs: each block its first units.
    const int64_t first_unit = (int64_t)blockIdx.x * b.units;
    if (first_unit < b.all_units && s.channels <= CHANNELS) {
        const window_range windows = windows_of(first_unit, b);
        prefetch_lines(argmax + windows.before * s.channels, (int64_t)windows.count * s.channels);
        const int64_t image = first_unit / b.bands, left = s.batch - image, some = b.units / b.bands + 1;
        const int64_t size = (int64_t)s.height * s.width;
        prefetch_lines(input + image * size, (some < left ? some : left) * size * (int64_t)sizeof(T));
    }
    wait_for_predecessor();
    release_successor();
    float products[4][2][2][4], sums[2][4]; // [channel][pair of positions][pixels]
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; j++)
            products[i][j / 8][j / 4 % 2][j % 4] = 0.0f;
    }
    const uint32_t one = pack<T>(1.0f, 1.0f), ones[2] = {one, one};
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
            uint2 grad[4];
            uint32_t where[4], pixels[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (int i = 0; i < 4; i++) { // windows 2t, 2t + 1 and these eight on
                const int row = 2 * t + i % 2 + i / 2 * 8, window = begin + row;
                grad[i] = *(const uint2 *)(from + row * Ring::GRAD_PITCH + 8 * g);
                where[i] = *(const uint32_t *)(from + 16 * Ring::GRAD_PITCH + row * Ring::ARGMAX_PITCH + 4 * g);
                const uint16_t *corner =
                    (const uint16_t *)tiles + corners[window < windows.count ? window : 0] + g / 4 * b.pitch + g % 4;
                pixels[0][i / 2] |= (uint32_t)corner[0] << (i % 2 * 16);
                pixels[1][i / 2] |= (uint32_t)corner[2 * b.pitch] << (i % 2 * 16);
            }
            start_step(step + Ring::STEPS_AHEAD - 1);
            uint32_t any[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t dz[2], masked[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint2 even = grad[2 * half], odd = grad[2 * half + 1];
                    dz[half] = __byte_perm(j < 2 ? even.x : even.y, j < 2 ? odd.x : odd.y, j % 2 ? 0x7632 : 0x5410);
#pragma unroll
                    for (int position = 0; position < 4; position++) {
                        const uint32_t mask =
                            prmt(where[2 * half] << position, where[2 * half + 1] << position, 0xCC88 + j * 0x1111);
                        masked[half][position] = dz[half] & mask;
                    }
                    any[half][j] = masked[half][0] | masked[half][1] | masked[half][2] | masked[half][3];
                }
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const uint32_t a[4] = {masked[0][2 * pair], masked[0][2 * pair + 1], masked[1][2 * pair],
                                           masked[1][2 * pair + 1]};
                    mma_sync<T>(products[j][pair][0], a, pixels[0][0], pixels[0][1]);
                    mma_sync<T>(products[j][pair][1], a, pixels[1][0], pixels[1][1]);
                }
            }
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const uint32_t a[4] = {any[0][2 * pair], any[0][2 * pair + 1], any[1][2 * pair], any[1][2 * pair + 1]};
                mma_sync<T>(sums[pair], a, ones[0], ones[1]);
            }
        }
        cp_async_wait_all(); // the steps beyond the last
    }
    if (t == 0)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            shared_sums[warp][4 * g + 2 * pair] = sums[pair][0];
            shared_sums[warp][4 * g + 2 * pair + 1] = sums[pair][2];
        }
    store_products(partials, (float *)dynamic_shared, products, shared_sums, first_channel, s);
#endif
}

// Bytes of shared memory for the images and the windows' offsets.
static size_t tensor_shared(const band_grid &b, size_t element_size)
{
    return (size_t)b.units * b.tile * element_size + (size_t)b.units * b.rows * b.window_columns * sizeof(uint16_t);
}

// Whether the tensor-core kernels apply; the pointers are those accessed as aligned vectors.
static bool uses_tensor_cores(const one_sizes &s, const void *first, const void *second)
{
    return current_device().capability >= 80 && s.output_channels_last && s.channels % 8 == 0 && is_aligned_16(first) &&
           is_aligned_16(second);
}

#endif
