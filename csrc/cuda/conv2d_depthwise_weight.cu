// conv2d with a group for each input channel, weight gradient: grad_weight[o][r][s] = sum over n, y, x of
// grad_output[n][o][y][x] * input[n][o / multiplier][y * stride - padding + r * dilation][...]; see
// conv2d_depthwise.cu.
//
// Every thread sums all taps over its share of the pixels, blocks share images and rows, and a second kernel adds up
// what they found, in order. `planes` (contiguous) works on patches in shared memory, a block for a channel and some
// images; `pixels` (channels_last) reads from global memory, a thread for a run of channels; `any` takes the rest, a
// few taps at a time. Bound by memory.
#include "conv2d_depthwise.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int PLANE_ROWS = 2;
static constexpr int PIXEL_CHANNELS = 8; // threads of a block along runs of channels
static constexpr int ANY_TAPS = 8;       // taps that a block of `any` sums
static constexpr int64_t WANTED_BLOCKS = 1056;

template <typename T, int K>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_planes_weight_kernel(float *partial, const __grid_constant__ DepthwiseProblem p)
{
    extern __shared__ __align__(16) float patch[];
    __shared__ float sums[WARPS][K * K];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int rows = p.tile_height + K - 1, across = p.tile_width / RUN, units = across * (p.tile_height / PLANE_ROWS);
    const int64_t o = blockIdx.x % p.out_channels, part = blockIdx.x / p.out_channels;
    const int64_t tiles = (int64_t)p.tiles_x * p.tiles_y, groups = (p.batch + p.planes - 1) / p.planes;
    const bool whole_runs = p.out_width % RUN == 0 && is_aligned_run<T>(p.output);
    const T *const source = (const T *)p.input + o / p.multiplier * p.in.c;

    float sum[K * K] = {};
    for (int64_t item = part; item < groups * tiles; item += p.parts) {
        int64_t group = item;
        const int x0 = (int)split(group, p.tiles_x) * p.tile_width, y0 = (int)split(group, p.tiles_y) * p.tile_height;
        const int64_t first = group * p.planes;
        const int planes = p.batch - first < p.planes ? (int)(p.batch - first) : p.planes;
        __syncthreads(); // the patch of the item before has been used
        depthwise_patch<T, K>(patch, p, source + first * p.in.n, p.in.n, planes, y0, x0);
        __syncthreads();

        for (int unit = threadIdx.x; unit < planes * units; unit += THREADS) {
            const int plane = quotient(unit, p.by_units), rest = unit - plane * units,
                      down = quotient(rest, p.by_across);
            const int x = x0 + (rest - down * across) * RUN, y = y0 + down * PLANE_ROWS;
            if (x >= p.out_width || y >= p.out_height)
                continue;
            // Pixels past the output are not multiplied, not even by zero: input may be infinite.
            const int there_x = p.out_width - x, there_y = p.out_height - y;
            const T *const grad = (const T *)p.output + (first + plane) * p.out.n + o * p.out.c + y * p.out_width + x;
            const float *const line = patch + (plane * rows + down * PLANE_ROWS) * p.pitch + (x - x0);
            float value[PLANE_ROWS][RUN];
#pragma unroll
            for (int i = 0; i < PLANE_ROWS; i++) {
                DepthwiseRun<T> run = {};
                if (i < there_y) {
                    if (whole_runs)
                        run = *(const DepthwiseRun<T> *)(grad + i * p.out_width);
                    else
#pragma unroll
                        for (int j = 0; j < RUN; j++)
                            if (j < there_x)
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
                    if (row - r >= 0 && row - r < PLANE_ROWS && row - r < there_y)
#pragma unroll
                        for (int j = 0; j < RUN; j++)
                            if (j < there_x)
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
        partial[(part * p.out_channels + o) * (K * K) + tap] = all;
    }
}

// CHANNELS neighbours for a thread: fewer of them where there are many taps.
template <typename T, int K, int CHANNELS>
__global__ void __launch_bounds__(THREADS, K <= 5 ? 2 : 1)
    conv2d_depthwise_pixels_weight_kernel(float *partial, const __grid_constant__ DepthwiseProblem p)
{
    struct __align__(CHANNELS * sizeof(T)) Run {
        T element[CHANNELS];
    };
    __shared__ float sums[WARPS][PIXEL_CHANNELS * CHANNELS][K];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int run = threadIdx.x % PIXEL_CHANNELS, place = threadIdx.x / PIXEL_CHANNELS;
    const int64_t channel_tiles = (p.channels + PIXEL_CHANNELS * CHANNELS - 1) / (PIXEL_CHANNELS * CHANNELS);
    const int64_t first_channel = blockIdx.x % channel_tiles * (PIXEL_CHANNELS * CHANNELS),
                  part = blockIdx.x / channel_tiles;
    const int64_t channel = first_channel + run * CHANNELS;
    const bool there = channel < p.channels;

    float sum[K][K][CHANNELS] = {};
    // An item is a row of an image in runs of 4 pixels; each part has a range of them, so that rows that share their
    // input come one after the other.
    const int64_t runs = (p.out_width + RUN - 1) / RUN, items = p.batch * p.out_height * runs;
    const int64_t each = (items + p.parts - 1) / p.parts, end = min(items, (part + 1) * each);
    const int in_line = (int)p.in.y, out_column = (int)p.out.x;
    typedef DepthwiseWindow<T, K, CHANNELS> Window;
    Window window;
    for (int64_t item = part * each + place; there && item < end; item += THREADS / PIXEL_CHANNELS) {
        int64_t n = item;
        const int x = (int)split(n, runs) * RUN, y = (int)split(n, p.out_height);
        const T *const grad = (const T *)p.output + n * p.out.n + y * (int)p.out.y + x * out_column + channel;
        const T *const image = (const T *)p.input + n * p.in.n + channel;
        const int pixels = p.out_width - x;
        window.aim(p, x - p.padding_left);
        const auto fetch = [&](uint32_t(&raw)[Window::COLUMNS][Window::WORDS], int r) {
            const int source_y = y + r - p.padding_top;
            window.fetch(raw, image + source_y * in_line, (unsigned int)source_y < (unsigned int)p.height);
        };
        uint32_t raw[2][Window::COLUMNS][Window::WORDS];
        fetch(raw[0], 0);
        Run from[RUN] = {};
#pragma unroll
        for (int j = 0; j < RUN; j++)
            if (j < pixels)
                from[j] = *(const Run *)(grad + j * out_column);
        float value[RUN][CHANNELS];
#pragma unroll
        for (int r = 0; r < K; r++) {
            if (r + 1 < K)
                fetch(raw[(r + 1) % 2], r + 1);
            if (r == 0)
#pragma unroll
                for (int j = 0; j < RUN; j++)
#pragma unroll
                    for (int k = 0; k < CHANNELS; k++)
                        value[j][k] = load_as_accumulate(from[j].element[k]);
            float seen[Window::COLUMNS][CHANNELS];
            Window::convert(seen, raw[r % 2]);
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if (j < pixels)
#pragma unroll
                    for (int s = 0; s < K; s++)
#pragma unroll
                        for (int k = 0; k < CHANNELS; k++)
                            sum[r][s][k] += value[j][k] * seen[s + j][k];
        }
    }

    // The four threads of a warp that have the same channels, then the warps, a row of the kernel at a time.
#pragma unroll
    for (int r = 0; r < K; r++) {
#pragma unroll
        for (int s = 0; s < K; s++)
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) {
                float all = sum[r][s][k];
                all += __shfl_xor_sync(FULL_WARP, all, PIXEL_CHANNELS);
                all += __shfl_xor_sync(FULL_WARP, all, 2 * PIXEL_CHANNELS);
                if (lane < PIXEL_CHANNELS)
                    sums[warp][run * CHANNELS + k][s] = all;
            }
        __syncthreads();
        for (int i = threadIdx.x; i < PIXEL_CHANNELS * CHANNELS * K; i += THREADS) {
            const int c = i / K, s = i % K;
            float all = 0;
            for (int w = 0; w < WARPS; w++)
                all += sums[w][c][s];
            if (first_channel + c < p.channels)
                partial[(part * p.channels + first_channel + c) * (K * K) + r * K + s] = all;
        }
        __syncthreads();
    }
}

// ANY_TAPS taps of one channel (contiguous), or of 32 of them (channels_last), and a part of the pixels of all images.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_any_weight_kernel(accumulate_type<T> *partial, const __grid_constant__ DepthwiseProblem p)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[THREADS];
    const bool last = p.out.c == 1;
    const int channels = last ? WARP_SIZE : 1, lane = threadIdx.x % channels, place = threadIdx.x / channels;
    const int kernel = p.kernel_height * p.kernel_width, tap_tiles = (kernel + ANY_TAPS - 1) / ANY_TAPS;
    const int64_t channel_tiles = (p.out_channels + channels - 1) / channels;
    const int64_t total = channel_tiles * tap_tiles * p.parts, pixels = p.batch * p.out_height * p.out_width;
    const int64_t each = (pixels + p.parts - 1) / p.parts;
    for (int64_t block = blockIdx.x; block < total; block += gridDim.x) {
        int64_t part = block;
        const int64_t o = split(part, channel_tiles) * channels + lane;
        const int first_tap = (int)split(part, tap_tiles) * ANY_TAPS;
        A sum[ANY_TAPS] = {};
        if (o < p.out_channels) {
            const int64_t end = min(pixels, (part + 1) * each);
            const T *const image = (const T *)p.input + o / p.multiplier * p.in.c;
            for (int64_t pixel = part * each + place; pixel < end; pixel += THREADS / channels) {
                int64_t n = pixel;
                const int64_t x = split(n, p.out_width), y = split(n, p.out_height);
                const A value =
                    load_as_accumulate(((const T *)p.output)[n * p.out.n + o * p.out.c + y * p.out.y + x * p.out.x]);
                for (int i = 0; i < ANY_TAPS; i++) {
                    const int tap = first_tap + i, r = tap / p.kernel_width, s = tap % p.kernel_width;
                    const int64_t source_y = y * p.stride_height - p.padding_top + (int64_t)r * p.dilation_height;
                    const int64_t source_x = x * p.stride_width - p.padding_left + (int64_t)s * p.dilation_width;
                    if (tap < kernel && source_y >= 0 && source_y < p.height && source_x >= 0 && source_x < p.width)
                        sum[i] += value * load_as_accumulate(image[n * p.in.n + source_y * p.in.y + source_x * p.in.x]);
                }
            }
        }
        for (int i = 0; i < ANY_TAPS && first_tap + i < kernel; i++) {
            sums[threadIdx.x] = sum[i];
            __syncthreads();
            for (int half = THREADS / 2; half >= channels; half /= 2) {
                if ((int)threadIdx.x < half)
                    sums[threadIdx.x] += sums[threadIdx.x + half];
                __syncthreads();
            }
            if (place == 0 && o < p.out_channels)
                partial[(part * p.out_channels + o) * kernel + first_tap + i] = sums[lane];
            __syncthreads();
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_weight_sum_kernel(const accumulate_type<T> *partial, const __grid_constant__ DepthwiseProblem p)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t kernel = (int64_t)p.kernel_height * p.kernel_width, count = p.out_channels * kernel;
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t i = first + lane;
        A sum = 0;
        if (i < count)
            for (int64_t part = warp; part < p.parts; part += WARPS)
                sum += partial[part * count + i];
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && i < count) {
#pragma unroll
            for (int w = 1; w < WARPS; w++)
                sum += sums[w][lane];
            ((T *)p.result)[i] = store_from_accumulate<T>(sum); // one channel: both formats are the same
        }
        __syncthreads();
    }
}

enum WeightKernel { PLANES, PIXELS, ANY };

// Channels of a run of `pixels`: as many as leave registers for two blocks.
static constexpr int pixel_run(int element, int kernel)
{
    return element == 2 && kernel == 3 ? 4 : 2;
}

// Which kernel, and its parts; the launcher and the query for the workspace must agree.
static WeightKernel plan_weight(DepthwiseProblem &p, const ConvCall &call, bool aligned)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool usual = depthwise_is_usual(p, call.dtype) && s.input_channels_last == s.output_channels_last;
    int64_t blocks, items;
    WeightKernel kernel = ANY;
    if (usual && s.input_channels_last && p.multiplier == 1 && p.channels % RUN == 0 && aligned) {
        kernel = PIXELS;
        blocks =
            ceil_div(p.channels, PIXEL_CHANNELS * pixel_run(call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2, p.kernel_width));
        items = ceil_div(p.batch * p.out_height * ceil_div(p.out_width, RUN), 4 * THREADS / PIXEL_CHANNELS);
    } else if (usual && !s.input_channels_last) {
        kernel = PLANES;
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
        int64_t together = tiles_x * tiles_y == 1 ? 2 * THREADS / units : 1;
        while (together > 1 && together * bytes > 32 * 1024)
            together--;
        p.planes = (int)(together < p.batch ? together : p.batch);
        p.by_rows = make_divisor(p.tile_height + K - 1);
        p.by_units = make_divisor(units);
        p.by_across = make_divisor(across);
        blocks = p.out_channels;
        items = tiles_x * tiles_y * ceil_div(p.batch, p.planes);
    } else {
        const int64_t taps = ceil_div((int64_t)p.kernel_height * p.kernel_width, ANY_TAPS);
        blocks = taps * (p.out.c == 1 ? ceil_div(p.out_channels, WARP_SIZE) : p.out_channels);
        items = ceil_div(p.batch * p.out_height * p.out_width, 4 * THREADS);
    }
    // Of `pixels` fewer, whose last sums are many.
    const int64_t wanted = ceil_div(kernel == PIXELS ? WANTED_BLOCKS / 2 : WANTED_BLOCKS, blocks);
    p.parts = items < wanted ? (items > 0 ? items : 1) : wanted;
    return kernel;
}

template <typename T, int K>
static void launch_usual(const DepthwiseProblem &p, WeightKernel kernel, float *partial, cudaStream_t stream)
{
    if (kernel == PIXELS) {
        constexpr int CHANNELS = pixel_run(sizeof(T), K);
        const int64_t blocks = ceil_div(p.channels, PIXEL_CHANNELS * CHANNELS) * p.parts;
        conv2d_depthwise_pixels_weight_kernel<T, K, CHANNELS><<<(unsigned int)blocks, THREADS, 0, stream>>>(partial, p);
        return;
    }
    const size_t shared = ((size_t)p.planes * (p.tile_height + K - 1) * p.pitch + 4) * sizeof(float);
    conv2d_depthwise_planes_weight_kernel<T, K>
        <<<(unsigned int)(p.out_channels * p.parts), THREADS, shared, stream>>>(partial, p);
}

template <typename T>
static cuda_ops_status launch_weight(const ConvCall &call)
{
    DepthwiseProblem p = depthwise_problem(call);
    const WeightKernel kernel = plan_weight(p, call, is_aligned_run<T>(p.input) && is_aligned_run<T>(p.output));
    accumulate_type<T> *const partial = (accumulate_type<T> *)call.workspace;
    if ((double)p.out_channels * (double)p.parts > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if constexpr (sizeof(T) < 8) {
        if (kernel != ANY && p.kernel_width == 3)
            launch_usual<T, 3>(p, kernel, partial, call.stream);
        else if (kernel != ANY && p.kernel_width == 5)
            launch_usual<T, 5>(p, kernel, partial, call.stream);
        else if (kernel != ANY)
            launch_usual<T, 7>(p, kernel, partial, call.stream);
    }
    if (kernel == ANY) {
        const int64_t taps = ceil_div((int64_t)p.kernel_height * p.kernel_width, ANY_TAPS);
        const int64_t channels = p.out.c == 1 ? ceil_div(p.out_channels, WARP_SIZE) : p.out_channels;
        conv2d_depthwise_any_weight_kernel<T>
            <<<clamp_grid(channels * taps * p.parts), THREADS, 0, call.stream>>>(partial, p);
    }
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int64_t count = p.out_channels * p.kernel_height * p.kernel_width;
    conv2d_depthwise_weight_sum_kernel<T>
        <<<clamp_grid(ceil_div(count, WARP_SIZE)), THREADS, 0, call.stream>>>(partial, p);
    return launch_status();
}

size_t conv2d_depthwise_weight_workspace(const ConvCall &call, ConvDevice)
{
    DepthwiseProblem p = depthwise_problem(call);
    // Pointers are not known yet.
    plan_weight(p, call, true);
    const int64_t parts = p.parts;
    plan_weight(p, call, false);
    return (size_t)(parts > p.parts ? parts : p.parts) * p.out_channels * p.kernel_height * p.kernel_width *
           (call.dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float));
}

cuda_ops_status conv2d_depthwise_weight(const ConvCall &call, ConvDevice)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_weight<T>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}
