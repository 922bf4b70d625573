// conv2d with a group per input channel, backward_weight:
//
//   grad_weight[o][r][s] = sum over n, y, x of grad_output[n][o][y][x] *
//                                              input[n][o / multiplier][y * stride - padding + r * dilation][...]
//
// Every thread sums all taps over its share of the pixels; blocks split images and rows, and split_k.cu's kernel adds
// the splits in order. Contiguous: a block per channel and some images, from tiles with halo in shared memory.
// channels_last: a warp per strip of pixels of 64 channels, or with strides and dilations a thread per some channels;
// of few pixels, and of channels that these do not take, unrolled_weight.cu. Everything else: a few taps at a time.
// Bound by memory.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "conv2d/depthwise/problem.cuh"
#include "conv2d/split_k.h"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int PLANE_ROWS = 2;
static constexpr int PIXEL_CHANNELS = 2; // of a lane, channels_last
static constexpr int GENERIC_TAPS = 8;   // taps of a block of the generic kernel
static constexpr int64_t WANTED_BLOCKS = 1056, PIXEL_BLOCKS = 264;

template <typename T, int K>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_backward_weight_contiguous_kernel(float *partial, const __grid_constant__ DepthwiseProblem p)
{
    extern __shared__ __align__(16) float patch[];
    __shared__ float sums[WARPS][K * K];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int rows = p.tile_height + K - 1, across = p.tile_width / RUN, units = across * (p.tile_height / PLANE_ROWS);
    const int64_t o = blockIdx.x % p.out_channels, split = blockIdx.x / p.out_channels;
    const int64_t tiles = (int64_t)p.tiles_x * p.tiles_y, groups = (p.batch + p.planes - 1) / p.planes;
    const bool whole_runs = p.out_width % RUN == 0 && is_aligned_run<T>(p.output);
    const T *const source = (const T *)p.input + o / p.multiplier * p.in.c;

    float sum[K * K] = {};
    for (int64_t item = split; item < groups * tiles; item += p.splits) {
        int64_t group = item;
        const int x0 = (int)divide_in_place(group, p.tiles_x) * p.tile_width,
                  y0 = (int)divide_in_place(group, p.tiles_y) * p.tile_height;
        const int64_t first = group * p.planes;
        const int planes = p.batch - first < p.planes ? (int)(p.batch - first) : p.planes;
        __syncthreads(); // the previous patch has been read
        depthwise_patch<T, K>(patch, p, source + first * p.in.n, p.in.n, planes, y0, x0);
        __syncthreads();

        for (int unit = threadIdx.x; unit < planes * units; unit += THREADS) {
            const int plane = quotient(unit, p.by_units), rest = unit - plane * units,
                      down = quotient(rest, p.by_across);
            const int x = x0 + (rest - down * across) * RUN, y = y0 + down * PLANE_ROWS;
            if (x >= p.out_width || y >= p.out_height)
                continue;
            // Pixels past the output are not multiplied, not even by zero: input may be infinite.
            const int left_x = p.out_width - x, left_y = p.out_height - y;
            const T *const grad = (const T *)p.output + (first + plane) * p.out.n + o * p.out.c + y * p.out_width + x;
            const float *const line = patch + (plane * rows + down * PLANE_ROWS) * p.pitch + (x - x0);
            float value[PLANE_ROWS][RUN];
#pragma unroll
            for (int i = 0; i < PLANE_ROWS; i++) {
                DepthwiseRun<T> run = {};
                if (i < left_y) {
                    if (whole_runs)
                        run = *(const DepthwiseRun<T> *)(grad + i * p.out_width);
                    else
#pragma unroll
                        for (int j = 0; j < RUN; j++)
                            if (j < left_x)
                                run.element[j] = grad[i * p.out_width + j];
                }
#pragma unroll
                for (int j = 0; j < RUN; j++)
                    value[i][j] = load_as_accumulate(run.element[j]);
            }
#pragma unroll
            for (int row = 0; row < PLANE_ROWS + K - 1; row++) {
                constexpr int WINDOW = (K + 3 + 3) / 4 * 4;
                float window[WINDOW];
#pragma unroll
                for (int i = 0; i < WINDOW; i += 4)
                    *(float4 *)(window + i) = *(const float4 *)(line + row * p.pitch + i);
#pragma unroll
                for (int r = 0; r < K; r++)
                    if (row - r >= 0 && row - r < PLANE_ROWS && row - r < left_y)
#pragma unroll
                        for (int j = 0; j < RUN; j++)
                            if (j < left_x)
#pragma unroll
                                for (int s = 0; s < K; s++)
                                    sum[r * K + s] += value[row - r][j] * window[s + j];
            }
        }
    }

#pragma unroll
    for (int tap = 0; tap < K * K; tap++) {
        const float all = warp_sum(sum[tap]);
        if (lane == 0)
            sums[warp][tap] = all;
    }
    __syncthreads();
    for (int tap = threadIdx.x; tap < K * K; tap += THREADS) {
        float all = 0;
        for (int w = 0; w < WARPS; w++)
            all += sums[w][tap];
        partial[(split * p.out_channels + o) * (K * K) + tap] = all;
    }
}

// Columns of a warp's strip, channels_last: as many as registers allow.
__host__ __device__ static constexpr int pixel_strip(int kernel)
{
    return kernel == 5 ? 2 : 4;
}

template <typename T>
__device__ __forceinline__ void two_channels(float (&value)[PIXEL_CHANNELS], const T *from)
{
    if constexpr (sizeof(T) == 4) {
        const float2 two = *(const float2 *)from;
        value[0] = two.x, value[1] = two.y;
    } else {
        const float2 two = unpack<T>(*(const uint32_t *)from);
        value[0] = two.x, value[1] = two.y;
    }
}

// Of 16 bits at any address.
template <typename T>
__device__ __forceinline__ void two_elements(float (&value)[PIXEL_CHANNELS], const T *from)
{
#pragma unroll
    for (int k = 0; k < PIXEL_CHANNELS; k++)
        value[k] = load_as_accumulate(from[k]);
}

// A warp's lanes have two neighbouring channels each, and go down STRIP columns of some rows of an image. A row of
// input is read once, for all K rows of grad_output that it meets, which stay in registers. Rows of both come by
// cp.async, some ahead of the one that is multiplied: a stage of a warp's ring holds COLUMNS pixels of a row of input
// and STRIP pixels of a row of grad_output, of 64 channels. One long function: the loop's rows and sums are registers.
// WORDS: 16 bits of an odd number of channels come by words of 4 bytes. Every other pixel begins amid a word: its stage
// holds one element of the channel before, and has room for 62 of the others.
template <typename T, int K, bool WORDS>
struct RowRing {
    static constexpr int STRIP = pixel_strip(K), COLUMNS = STRIP + K - 1, ACROSS = WARP_SIZE * PIXEL_CHANNELS;
    static constexpr int PIXEL_BYTES = ACROSS * sizeof(T), BYTES = (COLUMNS + STRIP) * PIXEL_BYTES;
    static constexpr int VECTOR_BYTES = WORDS ? 4 : 8, VECTORS = PIXEL_BYTES / VECTOR_BYTES,
                         COPIES = (COLUMNS + STRIP) * VECTORS / WARP_SIZE;
    static constexpr int COPY_PIXELS = WARP_SIZE / VECTORS; // pixels of a warp's copy
    static_assert(COLUMNS % COPY_PIXELS == 0 && STRIP % COPY_PIXELS == 0, "a copy is of input or of grad_output");
};
static constexpr int MOST_IN_FLIGHT = 3; // rows of input; a ring has one stage more, a power of two

// Whether pixels are no whole vectors of RowRing.
__host__ __device__ static inline bool comes_by_words(int64_t channels, size_t element)
{
    return channels * (int64_t)element % 8 != 0;
}

// Channels of a block.
__host__ __device__ static inline int ring_channels(int64_t channels)
{
    return WARP_SIZE * PIXEL_CHANNELS - (channels % 2 != 0 ? PIXEL_CHANNELS : 0);
}

// A word of two elements, of which `there` lie in the tensor (at most; none, if that is not positive).
__device__ __forceinline__ void copy_elements(void *to, const void *from, int there)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<4>(shared_address(to), from, there >= 2 ? 4 : there == 1 ? 2 : 0);
#else
    *(uint32_t *)to = there >= 2 ? *(const uint32_t *)from : there == 1 ? *(const unsigned short *)from : 0;
#endif
}

template <typename T, int K, bool WORDS>
__global__ void __launch_bounds__(THREADS, K <= 5 ? 2 : 1)
    conv2d_depthwise_backward_weight_channels_last_kernel(float *partial, const __grid_constant__ DepthwiseProblem p,
                                                          int stages)
{
    typedef RowRing<T, K, WORDS> Ring;
    constexpr int STRIP = Ring::STRIP, ACROSS = Ring::ACROSS;
    extern __shared__ __align__(16) char rings[];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int width = WORDS ? ring_channels(p.channels) : ACROSS; // channels of the block
    const int64_t channel_tiles = (p.channels + width - 1) / width, split = blockIdx.x / channel_tiles;
    const int64_t first_channel = blockIdx.x % channel_tiles * width;
    const int in_line = (int)p.in.y, out_line = (int)p.out.y, column_step = (int)p.channels;
    char *const ring = rings + warp * stages * Ring::BYTES;
    // This lane copies the same channels of all pixels.
    const int vector = lane % Ring::VECTORS, pixel_lane = lane / Ring::VECTORS;
    const int64_t copied_channel = first_channel + vector * (Ring::VECTOR_BYTES / (int)sizeof(T));
    const bool copies = copied_channel < p.channels;
    const int copied_left = (int)min(p.channels - copied_channel, (int64_t)2);
    // And has these of a stage's pixels, one element on where a pixel begins amid a word.
    const int own = min(lane * PIXEL_CHANNELS, width - PIXEL_CHANNELS);
    const unsigned int odd = (unsigned int)column_step & 1;

    float sum[K][K][PIXEL_CHANNELS] = {};
    const int64_t items = p.batch * p.tiles_y * p.tiles_x;
    for (int64_t item = split * WARPS + warp; item < items; item += p.splits * WARPS) {
        int64_t n = item;
        const int x = (int)divide_in_place(n, p.tiles_x) * STRIP,
                  y0 = (int)divide_in_place(n, p.tiles_y) * p.tile_height;
        const int pixels = p.out_width - x, rows = min(p.tile_height, p.out_height - y0), steps = rows + K - 1;
        const T *grad = (const T *)p.output + n * p.out.n + y0 * out_line + x * column_step + copied_channel;
        const T *const image = (const T *)p.input + n * p.in.n + copied_channel;
        // Where the first rows' pixels begin, in elements; how many does not matter, but whether they are odd.
        const unsigned int seen_from = (unsigned int)(n * p.in.n + (int64_t)(y0 - p.padding_top) * in_line +
                                                      (int64_t)(x - p.padding_left) * column_step);
        const unsigned int value_from = (unsigned int)(n * p.out.n + (int64_t)y0 * out_line + (int64_t)x * column_step);
        int offset[Ring::COPIES];     // of this lane's copies, in a row of either tensor
        unsigned int inside_bits = 0; // bit i: copy i is within the row
#pragma unroll
        for (int i = 0; i < Ring::COPIES; i++) {
            const int pixel = i * Ring::COPY_PIXELS + pixel_lane, j = pixel - Ring::COLUMNS;
            const int column = i * Ring::COPY_PIXELS < Ring::COLUMNS ? x - p.padding_left + pixel : j;
            const int columns = i * Ring::COPY_PIXELS < Ring::COLUMNS ? p.width : pixels;
            offset[i] = column * column_step;
            inside_bits |= (unsigned int)((unsigned int)column < (unsigned int)columns) << i;
        }
        const auto fetch = [&](int step) {
            if (step < steps && copies) {
                const int y = y0 - p.padding_top + step;
                const bool inside = (unsigned int)y < (unsigned int)p.height;
                const T *const line = image + (int64_t)y * in_line;
                char *const to = ring + (step & (stages - 1)) * Ring::BYTES + lane * Ring::VECTOR_BYTES;
                // WORDS, of even and of odd pixels: where words begin, and how many elements of this lane's there are.
                const unsigned int line_amid = (seen_from + (unsigned int)(step * in_line)) & 1,
                                   grad_amid = (value_from + (unsigned int)(step * out_line)) & 1;
                const T *const lines[] = {line - line_amid, line - (line_amid ^ odd)}, *const grads[] = {
                                                                                           grad - grad_amid,
                                                                                           grad - (grad_amid ^ odd)};
                const int line_left[] = {copied_left + (int)line_amid, copied_left + (int)(line_amid ^ odd)},
                          grad_left[] = {copied_left + (int)grad_amid, copied_left + (int)(grad_amid ^ odd)};
#pragma unroll
                for (int i = 0; i < Ring::COPIES; i++) {
                    const bool of_input = i * Ring::COPY_PIXELS < Ring::COLUMNS;
                    const bool there = (of_input ? inside : step < rows) && (inside_bits >> i & 1);
                    char *const copy = to + i * WARP_SIZE * Ring::VECTOR_BYTES;
                    if constexpr (WORDS) {
                        const int parity = (of_input ? i : i - Ring::COLUMNS) & 1;
                        copy_elements(copy, (of_input ? lines : grads)[parity] + offset[i],
                                      there ? (of_input ? line_left : grad_left)[parity] : 0);
                    } else
                        copy_to_shared<Ring::VECTOR_BYTES>(copy, (of_input ? line : grad) + offset[i], there);
                }
                grad += out_line;
            }
            cp_async_commit_group();
        };
        for (int step = 0; step < stages - 1; step++)
            fetch(step);
        float value[K][STRIP][PIXEL_CHANNELS]; // of grad_output, row y0 + step in value[step % K]
#pragma unroll 1
        for (int first = 0; first < steps; first += K)
#pragma unroll
            for (int now = 0; now < K; now++) {
                const int step = first + now;
                if (step >= steps)
                    break;
                if (stages > MOST_IN_FLIGHT)
                    cp_async_wait_group<MOST_IN_FLIGHT - 1>();
                else
                    cp_async_wait_group<0>();
                __syncwarp(); // all lanes' copies have arrived, and all have read the previous row
                fetch(step + stages - 1);
                const T *const row = (const T *)(ring + (step & (stages - 1)) * Ring::BYTES) + own;
                float seen[Ring::COLUMNS][PIXEL_CHANNELS];
                if constexpr (WORDS) {
                    const unsigned int seen_amid = (seen_from + (unsigned int)(step * in_line)) & 1,
                                       value_amid = (value_from + (unsigned int)(step * out_line)) & 1;
                    const T *const pixels_by_parity[] = {row + seen_amid, row + (seen_amid ^ odd)};
                    const T *const values_by_parity[] = {row + value_amid, row + (value_amid ^ odd)};
#pragma unroll
                    for (int i = 0; i < Ring::COLUMNS; i++)
                        two_elements(seen[i], pixels_by_parity[i & 1] + i * ACROSS);
#pragma unroll
                    for (int j = 0; j < STRIP; j++)
                        two_elements(value[now][j], values_by_parity[j & 1] + (Ring::COLUMNS + j) * ACROSS);
                } else {
#pragma unroll
                    for (int i = 0; i < Ring::COLUMNS; i++)
                        two_channels(seen[i], row + i * ACROSS);
#pragma unroll
                    for (int j = 0; j < STRIP; j++)
                        two_channels(value[now][j], row + (Ring::COLUMNS + j) * ACROSS);
                }
                // Rows and columns past the output are not multiplied, not even by zero: input may be infinite.
                const auto multiply = [&](auto all) {
#pragma unroll
                    for (int r = 0; r < K; r++) {
                        if (!all.value && (step - r < 0 || step - r >= rows))
                            continue;
#pragma unroll
                        for (int j = 0; j < STRIP; j++)
                            if (all.value || j < pixels)
#pragma unroll
                                for (int s = 0; s < K; s++)
#pragma unroll
                                    for (int k = 0; k < PIXEL_CHANNELS; k++)
                                        sum[r][s][k] += value[(now - r + K) % K][j][k] * seen[s + j][k];
                    }
                };
                if (step >= K - 1 && step < rows && pixels >= STRIP)
                    multiply(std::true_type());
                else
                    multiply(std::false_type());
            }
        __syncwarp(); // this strip's stages have been read
    }

    // Sums over the warps, a row of the kernel at a time, in the shared memory of the rings.
    float *const sums = (float *)rings; // [warp][K][ACROSS]
    cp_async_wait_all();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < K; r++) {
#pragma unroll
        for (int s = 0; s < K; s++)
#pragma unroll
            for (int k = 0; k < PIXEL_CHANNELS; k++)
                sums[(warp * K + s) * ACROSS + lane * PIXEL_CHANNELS + k] = sum[r][s][k];
        __syncthreads();
        for (int i = threadIdx.x; i < width * K; i += THREADS) {
            const int c = i / K, s = i % K;
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                all += sums[(w * K + s) * ACROSS + c];
            if (first_channel + c < p.channels)
                partial[(split * p.channels + first_channel + c) * (K * K) + r * K + s] = all;
        }
        __syncthreads();
    }
}

// The stages of the rings, as many as leave room for two blocks, and the block's bytes, with those of the last sums.
template <typename T, int K, bool WORDS>
static size_t row_ring_bytes(int *stages)
{
    typedef RowRing<T, K, WORDS> Ring;
    const int room = current_device().shared_bytes;
    constexpr size_t each = WARPS * Ring::BYTES, last = sizeof(float) * WARPS * K * Ring::ACROSS;
    *stages = 2 * (MOST_IN_FLIGHT + 1) * each <= (size_t)room ? MOST_IN_FLIGHT + 1 : 2;
    return std::max(*stages * each, last);
}

// A block sums GENERIC_TAPS taps of one channel (contiguous) or of 32 (channels_last) over a split of all pixels.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_backward_weight_kernel(accumulate_type<T> *partial, const __grid_constant__ DepthwiseProblem p)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[THREADS];
    const bool last = p.out.c == 1;
    const int channels = last ? WARP_SIZE : 1, lane = threadIdx.x % channels, pixel_lane = threadIdx.x / channels;
    const int kernel = p.kernel_height * p.kernel_width, tap_tiles = (kernel + GENERIC_TAPS - 1) / GENERIC_TAPS;
    const int64_t channel_tiles = (p.out_channels + channels - 1) / channels;
    const int64_t total = channel_tiles * tap_tiles * p.splits, pixels = p.batch * p.out_height * p.out_width;
    const int64_t each = (pixels + p.splits - 1) / p.splits;
    for (int64_t block = blockIdx.x; block < total; block += gridDim.x) {
        int64_t split = block;
        const int64_t o = divide_in_place(split, channel_tiles) * channels + lane;
        const int first_tap = (int)divide_in_place(split, tap_tiles) * GENERIC_TAPS;
        A sum[GENERIC_TAPS] = {};
        if (o < p.out_channels) {
            const int64_t end = min(pixels, (split + 1) * each);
            const T *const image = (const T *)p.input + o / p.multiplier * p.in.c;
            for (int64_t pixel = split * each + pixel_lane; pixel < end; pixel += THREADS / channels) {
                int64_t n = pixel;
                const int64_t x = divide_in_place(n, p.out_width), y = divide_in_place(n, p.out_height);
                const A value =
                    load_as_accumulate(((const T *)p.output)[n * p.out.n + o * p.out.c + y * p.out.y + x * p.out.x]);
                for (int i = 0; i < GENERIC_TAPS; i++) {
                    const int tap = first_tap + i, r = tap / p.kernel_width, s = tap % p.kernel_width;
                    const int64_t source_y = y * p.stride_height - p.padding_top + (int64_t)r * p.dilation_height;
                    const int64_t source_x = x * p.stride_width - p.padding_left + (int64_t)s * p.dilation_width;
                    if (tap < kernel && source_y >= 0 && source_y < p.height && source_x >= 0 && source_x < p.width)
                        sum[i] += value * load_as_accumulate(image[n * p.in.n + source_y * p.in.y + source_x * p.in.x]);
                }
            }
        }
        for (int i = 0; i < GENERIC_TAPS && first_tap + i < kernel; i++) {
            sums[threadIdx.x] = sum[i];
            __syncthreads();
            for (int half = THREADS / 2; half >= channels; half /= 2) {
                if ((int)threadIdx.x < half)
                    sums[threadIdx.x] += sums[threadIdx.x + half];
                __syncthreads();
            }
            if (pixel_lane == 0 && o < p.out_channels)
                partial[(split * p.out_channels + o) * kernel + first_tap + i] = sums[lane];
            __syncthreads();
        }
    }
}

// Channels of a thread of the kernel below, whose taps are all in registers.
__host__ __device__ static constexpr int any_channels(int kernel)
{
    return kernel <= 3 ? 8 : kernel <= 5 ? 4 : 2;
}
static constexpr int ANY_LANES = 32; // threads along the channels, at most

// channels_last, any stride and dilation: a thread sums all taps of some channels over its share of the pixels. The
// kernel has at most K rows and columns. A block has one split of `lanes` threads' channels.
template <typename T, int K>
__global__ void __launch_bounds__(THREADS, 2)
    conv2d_depthwise_backward_weight_any_kernel(float *partial, const __grid_constant__ DepthwiseProblem p, int lanes)
{
    constexpr int SIZE = any_channels(K);
    typedef aligned_vector<T, SIZE> V;
    __shared__ float sums[THREADS * SIZE];
    const int lane = (int)threadIdx.x % lanes, group = (int)threadIdx.x / lanes, groups = THREADS / lanes;
    const int64_t width = lanes * SIZE, channel_tiles = (p.channels + width - 1) / width;
    const int64_t first_channel = blockIdx.x % channel_tiles * width, split = blockIdx.x / channel_tiles;
    const int64_t channel = first_channel + lane * SIZE;
    const int64_t pixels = p.batch * p.out_height * p.out_width, each = (pixels + p.splits - 1) / p.splits;
    const int64_t end = min(pixels, (split + 1) * each);
    const V zero = vector_of_equal<T, SIZE>(0.0f);
    float sum[K][K][SIZE] = {};
    if (group < groups && channel < p.channels)
        for (int64_t pixel = split * each + group; pixel < end; pixel += groups) {
            int64_t n = pixel;
            const int x = (int)divide_in_place(n, p.out_width), y = (int)divide_in_place(n, p.out_height);
            const V grad = *reinterpret_cast<const V *>((const T *)p.output + pixel * p.channels + channel);
            const T *const image = (const T *)p.input + n * p.in.n + channel;
            const int x0 = x * p.stride_width - p.padding_left, y0 = y * p.stride_height - p.padding_top;
#pragma unroll
            for (int r = 0; r < K; r++) {
                const int source_y = y0 + r * p.dilation_height;
                const bool inside_y = r < p.kernel_height && (unsigned int)source_y < (unsigned int)p.height;
                V value[K];
#pragma unroll
                for (int s = 0; s < K; s++) {
                    const int source_x = x0 + s * p.dilation_width;
                    const bool inside =
                        inside_y && s < p.kernel_width && (unsigned int)source_x < (unsigned int)p.width;
                    value[s] = load_vector_or(
                        reinterpret_cast<const V *>(image + (int64_t)source_y * p.in.y + (int64_t)source_x * p.in.x),
                        inside, zero);
                }
#pragma unroll
                for (int s = 0; s < K; s++)
#pragma unroll
                    for (int e = 0; e < SIZE; e++)
                        sum[r][s][e] += element_of(grad, e) * element_of(value[s], e);
            }
        }
#pragma unroll
    for (int r = 0; r < K; r++)
#pragma unroll
        for (int s = 0; s < K; s++) {
            if (r >= p.kernel_height || s >= p.kernel_width)
                continue;
            if (group < groups)
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    sums[group * (int)width + lane * SIZE + e] = sum[r][s][e];
            __syncthreads();
            if (threadIdx.x < width && first_channel + threadIdx.x < p.channels) {
                float all = 0;
                for (int g = 0; g < groups; g++)
                    all += sums[g * (int)width + threadIdx.x];
                partial[(split * p.channels + first_channel + threadIdx.x) * (p.kernel_height * p.kernel_width) +
                        r * p.kernel_width + s] = all;
            }
            __syncthreads();
        }
}

enum WeightKernel { CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_ANY, GENERIC };

// Threads along the channels of CHANNELS_LAST_ANY.
static int any_lanes(const DepthwiseProblem &p, int kernel)
{
    const int64_t vectors = p.channels / any_channels(kernel);
    return (int)ceil_div(vectors, ceil_div(vectors, ANY_LANES));
}

// The K of its instance, or 0 where there is none.
static int any_kernel(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool aligned)
{
    const int most = p.kernel_height > p.kernel_width ? p.kernel_height : p.kernel_width;
    const int kernel = most <= 3 ? 3 : most <= 5 ? 5 : most <= 7 ? 7 : 0;
    const bool takes = aligned && kernel > 0 && dtype != CUDA_OPS_FLOAT64 && p.in.c == 1 && p.out.c == 1 &&
                       p.multiplier == 1 && p.channels % any_channels(kernel) == 0 && p.in.n <= INT_MAX;
    return takes ? kernel : 0;
}

// Blocks of the channels_last kernel that an H200 runs at once.
static int64_t pixel_blocks(int64_t kernel)
{
    return kernel == 7 ? PIXEL_BLOCKS / 2 : PIXEL_BLOCKS;
}

// The rows of an item of CHANNELS_LAST, and how many rows a warp goes through. More rows: less of the halo is read
// twice. Fewer: the last wave of items is shorter.
static int64_t item_rows(const DepthwiseProblem &p, int *item_height)
{
    const int64_t blocks = ceil_div(p.channels, ring_channels(p.channels));
    const int64_t strips = p.batch * ceil_div(p.out_width, pixel_strip(p.kernel_width)) * blocks;
    const int64_t at_once = WARPS * pixel_blocks(p.kernel_width);
    int64_t least = INT64_MAX;
    for (int64_t strips_y = 1; strips_y <= std::min<int64_t>(p.out_height, 64); strips_y++) {
        const int64_t rows = ceil_div(p.out_height, strips_y), tiles = ceil_div(p.out_height, rows);
        const int64_t time = ceil_div(strips * tiles, at_once) * (rows + p.kernel_height - 1);
        if (time < least) {
            least = time;
            *item_height = (int)rows;
        }
    }
    return least;
}

// What an H200 takes for CHANNELS_LAST, both launches: fitted to 3x3, 5x5 and 7x7 filters of 3 to 76 rows of a warp.
static double channels_last_microseconds(const DepthwiseProblem &p, cuda_ops_dtype dtype)
{
    int height;
    const double rows = (double)item_rows(p, &height);
    const bool words = dtype == CUDA_OPS_FLOAT32;
    // An H100 took so many times as long for 16 bits that come by words.
    const double slower = words || !comes_by_words(p.channels, 2) ? 1 : p.kernel_width == 7 ? 1.5 : 1.9;
    if (p.kernel_width == 3)
        return slower * (4.2 + rows * (words ? 0.95 : 0.64));
    if (p.kernel_width == 5)
        return slower * (5.2 + rows * (words ? 0.85 : 0.6));
    return slower * (5.7 + rows * (words ? 1.5 : 1.4));
}

// Chooses the kernel and its splits, for the launch and for the workspace query.
static WeightKernel plan_weight(DepthwiseProblem &p, const ConvCall &call, bool aligned, bool aligned_16)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool unrolled = depthwise_is_unrolled(p, call.dtype) && s.input_channels_last == s.output_channels_last;
    int64_t blocks, items;
    WeightKernel kernel = GENERIC;
    const size_t element = dtype_size(call.dtype);
    if (unrolled && s.input_channels_last && p.multiplier == 1 && aligned &&
        (!comes_by_words(p.channels, element) || (element == 2 && p.channels % 2 != 0))) {
        kernel = CHANNELS_LAST;
        blocks = ceil_div(p.channels, ring_channels(p.channels));
        p.tiles_x = (int)ceil_div(p.out_width, pixel_strip(p.kernel_width));
        item_rows(p, &p.tile_height);
        p.tiles_y = (int)ceil_div(p.out_height, p.tile_height);
        items = ceil_div(p.batch * p.tiles_x * p.tiles_y, WARPS);
    } else if (unrolled && !s.input_channels_last) {
        kernel = CONTIGUOUS;
        const int K = p.kernel_width;
        const int64_t tiles_x = ceil_div(p.out_width, 64);
        p.tile_width = (int)ceil_div(ceil_div(p.out_width, tiles_x), RUN) * RUN;
        const int64_t across = p.tile_width / RUN, most_down = 2 * THREADS / across;
        const int64_t down = ceil_div(p.out_height, PLANE_ROWS), tiles_y = ceil_div(down, most_down);
        p.tile_height = (int)ceil_div(down, tiles_y) * PLANE_ROWS;
        p.tiles_x = (int)tiles_x;
        p.tiles_y = (int)tiles_y;
        p.pitch = (int)ceil_div(p.tile_width + K - 1, 4) * 4;
        const int64_t units = across * (p.tile_height / PLANE_ROWS);
        const int64_t bytes = (int64_t)(p.tile_height + K - 1) * p.pitch * (int64_t)sizeof(float);
        int64_t planes_together = tiles_x * tiles_y == 1 ? 2 * THREADS / units : 1;
        while (planes_together > 1 && planes_together * bytes > 32 * 1024)
            planes_together--;
        p.planes = (int)(planes_together < p.batch ? planes_together : p.batch);
        p.by_rows = make_divisor(p.tile_height + K - 1);
        p.by_units = make_divisor(units);
        p.by_across = make_divisor(across);
        blocks = p.out_channels;
        items = tiles_x * tiles_y * ceil_div(p.batch, p.planes);
    } else if (const int any = any_kernel(p, call.dtype, aligned_16)) {
        kernel = CHANNELS_LAST_ANY;
        const int lanes = any_lanes(p, any);
        blocks = ceil_div(p.channels, lanes * any_channels(any));
        items = ceil_div(p.batch * p.out_height * p.out_width, 8 * (THREADS / lanes));
    } else {
        const int64_t taps = ceil_div((int64_t)p.kernel_height * p.kernel_width, GENERIC_TAPS);
        blocks = taps * (p.out.c == 1 ? ceil_div(p.out_channels, WARP_SIZE) : p.out_channels);
        // Four pixels a thread, of which a warp's are of one pixel where channels are last.
        const int64_t at_once = p.out.c == 1 ? THREADS / WARP_SIZE : THREADS;
        items = ceil_div(p.batch * p.out_height * p.out_width, 4 * at_once);
    }
    // channels_last: as many as run at once, since each block's last sums take long.
    const int64_t wanted = kernel == CHANNELS_LAST ? std::max<int64_t>(1, pixel_blocks(p.kernel_width) / blocks)
                                                   : ceil_div(WANTED_BLOCKS, blocks);
    p.splits = items < wanted ? (items > 0 ? items : 1) : wanted;
    return kernel;
}

template <typename T, int K, bool WORDS>
static void launch_channels_last(const DepthwiseProblem &p, float *partial, cudaStream_t stream)
{
    const int64_t blocks = ceil_div(p.channels, ring_channels(p.channels)) * p.splits;
    int stages;
    const size_t bytes = row_ring_bytes<T, K, WORDS>(&stages);
    const auto kernel = conv2d_depthwise_backward_weight_channels_last_kernel<T, K, WORDS>;
    allow_shared_memory(kernel, bytes);
    kernel<<<(unsigned int)blocks, THREADS, bytes, stream>>>(partial, p, stages);
}

template <typename T, int K>
static void launch_unrolled(const DepthwiseProblem &p, WeightKernel kernel, float *partial, cudaStream_t stream)
{
    if (kernel == CHANNELS_LAST) {
        if constexpr (sizeof(T) == 2)
            if (comes_by_words(p.channels, sizeof(T)))
                return launch_channels_last<T, K, true>(p, partial, stream);
        return launch_channels_last<T, K, false>(p, partial, stream);
    }
    const size_t shared = ((size_t)p.planes * (p.tile_height + K - 1) * p.pitch + 4) * sizeof(float);
    conv2d_depthwise_backward_weight_contiguous_kernel<T, K>
        <<<(unsigned int)(p.out_channels * p.splits), THREADS, shared, stream>>>(partial, p);
}

// The same for CHANNELS_LAST_ANY of larger images: of 3x3 and 5x5 filters with a stride of two.
static double any_microseconds(const DepthwiseProblem &p)
{
    const double results = (double)p.batch * p.out_height * p.out_width * (double)p.channels;
    return 4 + results * (p.kernel_width == 3 ? 7.4e-6 : 25e-6);
}

// Whether unrolled_weight.cu's kernel is taken instead.
static bool is_unrolled_weight(const DepthwiseProblem &p, const ConvCall &call, WeightKernel kernel,
                               const Device &device)
{
    constexpr double FEW_MICROSECONDS = 30; // measured of few pixels alone
    if (kernel == CONTIGUOUS || !conv2d_depthwise_unrolled_weight_takes(p, call.dtype))
        return false;
    const double expected = conv2d_depthwise_unrolled_weight_microseconds(p, device);
    return kernel == CHANNELS_LAST       ? expected < channels_last_microseconds(p, call.dtype)
           : kernel == CHANNELS_LAST_ANY ? expected < std::max(FEW_MICROSECONDS, any_microseconds(p))
                                         : true;
}

template <typename T>
static cuda_ops_status launch_weight(const ConvCall &call, ConvDevice device)
{
    DepthwiseProblem p = depthwise_problem(call);
    const bool aligned = is_aligned_run<T>(p.input) && is_aligned_run<T>(p.output);
    const bool aligned_16 = is_aligned_16(p.input) && is_aligned_16(p.output);
    const WeightKernel kernel = plan_weight(p, call, aligned, aligned_16);
    if (is_unrolled_weight(p, call, kernel, device))
        return conv2d_depthwise_unrolled_weight(p, call.dtype, call.workspace, device, call.stream);
    accumulate_type<T> *const partial = (accumulate_type<T> *)call.workspace;
    if ((double)p.out_channels * (double)p.splits > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if constexpr (sizeof(T) < 8) {
        if (kernel == CHANNELS_LAST_ANY) {
            const int any = any_kernel(p, call.dtype, true), lanes = any_lanes(p, any);
            const int64_t blocks = ceil_div(p.channels, lanes * any_channels(any)) * p.splits;
            const auto launched = any == 3   ? conv2d_depthwise_backward_weight_any_kernel<T, 3>
                                  : any == 5 ? conv2d_depthwise_backward_weight_any_kernel<T, 5>
                                             : conv2d_depthwise_backward_weight_any_kernel<T, 7>;
            launched<<<(unsigned int)blocks, THREADS, 0, call.stream>>>(partial, p, lanes);
        } else if (kernel != GENERIC && p.kernel_width == 3)
            launch_unrolled<T, 3>(p, kernel, partial, call.stream);
        else if (kernel != GENERIC && p.kernel_width == 5)
            launch_unrolled<T, 5>(p, kernel, partial, call.stream);
        else if (kernel != GENERIC)
            launch_unrolled<T, 7>(p, kernel, partial, call.stream);
    }
    if (kernel == GENERIC) {
        const int64_t taps = ceil_div((int64_t)p.kernel_height * p.kernel_width, GENERIC_TAPS);
        const int64_t channels = p.out.c == 1 ? ceil_div(p.out_channels, WARP_SIZE) : p.out_channels;
        conv2d_depthwise_backward_weight_kernel<T>
            <<<clamp_grid(channels * taps * p.splits), THREADS, 0, call.stream>>>(partial, p);
    }
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    // With one channel a group both layouts of the weight are the same.
    return conv2d_sum_splits(p.result, partial, p.out_channels * p.kernel_height * p.kernel_width, p.splits, call.dtype,
                             call.stream);
}

size_t conv2d_depthwise_backward_weight_workspace(const ConvCall &call, ConvDevice device)
{
    DepthwiseProblem p = depthwise_problem(call);
    // The pointers' alignment is not known here.
    int64_t splits = 0;
    for (const auto &[aligned, aligned_16] : {std::pair(true, true), std::pair(true, false), std::pair(false, false)}) {
        plan_weight(p, call, aligned, aligned_16);
        splits = splits > p.splits ? splits : p.splits;
    }
    const size_t bytes = (size_t)splits * p.out_channels * p.kernel_height * p.kernel_width *
                         (call.dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float));
    return conv2d_depthwise_unrolled_weight_takes(p, call.dtype)
               ? std::max(bytes, conv2d_depthwise_unrolled_weight_workspace(p, device))
               : bytes;
}

cuda_ops_status conv2d_depthwise_backward_weight(const ConvCall &call, ConvDevice device)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_weight<T>(call, device));
    return CUDA_OPS_INVALID_ARGUMENT;
}
