// conv2d with a group per input channel, forward and backward_input:
//
//   output[n][o][y][x]     = bias[o] + sum over r, s of weight[o][r][s] *
//                                      input[n][o / multiplier][y * stride - padding + r][alike in x]
//   grad_input[n][c][y][x] = sum over o of c, and r, s of weight[o][r][s] *
//                                      grad_output[n][o][(y + padding - r) / stride][alike in x]
//
// Contiguous, 3x3, 5x5 and 7x7 of stride 1 are unrolled here, for backward_input with a mirrored kernel: a block copies
// a tile of a plane with its halo (or some small planes) to shared memory as float32; a thread computes 4 x 4 pixels.
// channels_last: unrolled.cu and staged_sm80.cu, and of other kernels channels_last.cu. Everything else, float64 too: a thread
// per result.
// Bound by memory: each element is read once, in whole sectors.
#include <algorithm>

#include "conv2d/activation.cuh"
#include "conv2d/depthwise/problem.cuh"

static constexpr int THREADS = 256;
static constexpr int PLANE_ROWS = 4;
static constexpr int WANTED_BLOCKS = 4; // of small planes, on each multiprocessor
static constexpr int WARP_LINES = 8;    // of a patch that a warp copies at least

// The kernel of output channel o, which is dense in either format.
template <typename T, int K>
__device__ __forceinline__ float tap_weight(const DepthwiseProblem &p, int64_t o, int tap)
{
    return load_as_accumulate(((const T *)p.weight)[o * (K * K) + (p.flipped ? K * K - 1 - tap : tap)]);
}

template <typename T, int K>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_forward_contiguous_kernel(const __grid_constant__ DepthwiseProblem p)
{
    extern __shared__ __align__(16) float patch[];
    int block = blockIdx.x / (p.tiles_x * p.tiles_y), tile = blockIdx.x - block * (p.tiles_x * p.tiles_y);
    const int y0 = tile / p.tiles_x * p.tile_height, x0 = tile % p.tiles_x * p.tile_width;
    // Planes are numbered through all images; with a multiplier several of them read the same plane of the input.
    const int first = block * p.planes, all = (int)(p.batch * p.out_channels);
    const int planes = min(p.planes, all - first), out_channels = (int)p.out_channels;
    const int first_channel = first % out_channels;
    const T *const source = (const T *)p.input;
    if (p.multiplier == 1)
        depthwise_patch<T, K>(patch, p, source + first * p.in.c, p.in.c, planes, y0, x0);
    else
        depthwise_patch<T, K>(patch, p, source + first / p.multiplier * p.in.c, 0, planes, y0, x0);
    __syncthreads();

    const int rows = p.tile_height + K - 1, across = p.tile_width / RUN, units = across * (p.tile_height / PLANE_ROWS);
    const bool whole_runs = p.out_width % RUN == 0 && is_aligned_run<T>(p.result);
    for (int unit = threadIdx.x; unit < planes * units; unit += blockDim.x) {
        const int plane = quotient(unit, p.by_units), rest = unit - plane * units, down = quotient(rest, p.by_across);
        const int x = x0 + (rest - down * across) * RUN, y = y0 + down * PLANE_ROWS;
        if (x >= p.out_width || y >= p.out_height)
            continue;
        const int o = (first_channel + plane) % out_channels;
        float w[K * K];
#pragma unroll
        for (int tap = 0; tap < K * K; tap++)
            w[tap] = tap_weight<T, K>(p, o, tap);
        const float start = p.bias != nullptr ? load_as_accumulate(((const T *)p.bias)[o]) : 0.0f;
        float sum[PLANE_ROWS][RUN];
#pragma unroll
        for (int i = 0; i < PLANE_ROWS; i++)
#pragma unroll
            for (int j = 0; j < RUN; j++)
                sum[i][j] = start;

        const float *line = patch + (plane * rows + down * PLANE_ROWS) * p.pitch + (x - x0);
#pragma unroll
        for (int row = 0; row < PLANE_ROWS + K - 1; row++, line += p.pitch) {
            constexpr int WINDOW = (K + 3 + 3) / 4 * 4; // the last one or two may be past the tile, and are not used
            float window[WINDOW];
#pragma unroll
            for (int i = 0; i < WINDOW; i += 4)
                *(float4 *)(window + i) = *(const float4 *)(line + i);
#pragma unroll
            for (int r = 0; r < K; r++)
                if (row - r >= 0 && row - r < PLANE_ROWS)
#pragma unroll
                    for (int s = 0; s < K; s++)
#pragma unroll
                        for (int j = 0; j < RUN; j++)
                            sum[row - r][j] += w[r * K + s] * window[s + j];
        }
#pragma unroll
        for (int i = 0; i < PLANE_ROWS; i++)
            conv2d_activate<T>(sum[i], p.activation);
        T *result = (T *)p.result + (first + plane) * p.out.c + y * p.out_width + x;
#pragma unroll
        for (int i = 0; i < PLANE_ROWS; i++, result += p.out_width) {
            if (y + i >= p.out_height)
                break;
            T run[RUN];
#pragma unroll
            for (int j = 0; j < RUN; j++)
                run[j] = store_from_accumulate<T>(sum[i][j]);
            if (whole_runs)
                store_run(result, run);
            else
#pragma unroll
                for (int j = 0; j < RUN; j++)
                    if (x + j < p.out_width)
                        result[j] = run[j];
        }
    }
}

// Threads are in the order of the result in memory.
template <typename T>
__global__ void __launch_bounds__(THREADS) conv2d_depthwise_forward_kernel(const __grid_constant__ DepthwiseProblem p)
{
    typedef accumulate_type<T> A;
    const int64_t total = p.batch * p.out.n;
    for (int64_t index = global_thread_index(); index < total; index += global_thread_count()) {
        int64_t n = index, o, y, x;
        if (p.out.c == 1) {
            o = divide_in_place(n, p.out_channels);
            x = divide_in_place(n, p.out_width);
            y = divide_in_place(n, p.out_height);
        } else {
            x = divide_in_place(n, p.out_width);
            y = divide_in_place(n, p.out_height);
            o = divide_in_place(n, p.out_channels);
        }
        const T *const image = (const T *)p.input + n * p.in.n + o / p.multiplier * p.in.c;
        const T *const weight = (const T *)p.weight + o * p.w.n;
        const int64_t y0 = y * p.stride_height - p.padding_top, x0 = x * p.stride_width - p.padding_left;
        A sum = p.bias != nullptr ? load_as_accumulate(((const T *)p.bias)[o]) : A(0);
        for (int r = 0; r < p.kernel_height; r++) {
            const int64_t source_y = y0 + (int64_t)r * p.dilation_height;
            if (source_y < 0 || source_y >= p.height)
                continue;
            for (int s = 0; s < p.kernel_width; s++) {
                const int64_t source_x = x0 + (int64_t)s * p.dilation_width;
                if (source_x >= 0 && source_x < p.width)
                    sum += load_as_accumulate(weight[r * p.w.y + s * p.w.x]) *
                           load_as_accumulate(image[source_y * p.in.y + source_x * p.in.x]);
            }
        }
        if constexpr (sizeof(T) < 8) {
            float value[] = {sum};
            conv2d_activate<T>(value, p.activation);
            sum = value[0];
        }
        ((T *)p.result)[index] = store_from_accumulate<T>(sum);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_depthwise_backward_input_kernel(const __grid_constant__ DepthwiseProblem p)
{
    typedef accumulate_type<T> A;
    const int64_t total = p.batch * p.in.n;
    for (int64_t index = global_thread_index(); index < total; index += global_thread_count()) {
        int64_t n = index, c;
        int y, x;
        if (p.in.c == 1) {
            c = divide_in_place(n, p.channels);
            x = (int)divide_in_place(n, p.width);
            y = (int)divide_in_place(n, p.height);
        } else {
            x = (int)divide_in_place(n, p.width);
            y = (int)divide_in_place(n, p.height);
            c = divide_in_place(n, p.channels);
        }
        A sum = 0;
        for (int64_t o = c * p.multiplier; o < (c + 1) * p.multiplier; o++) {
            const T *const image = (const T *)p.output + n * p.out.n + o * p.out.c;
            const T *const weight = (const T *)p.weight + o * p.w.n;
            // The dilated kernel and the padded image are below 2^30.
            for (int r = 0; r < p.kernel_height; r++) {
                const int up = y + p.padding_top - r * p.dilation_height, out_y = up / p.stride_height;
                if (up < 0 || up - out_y * p.stride_height != 0 || out_y >= p.out_height)
                    continue;
                for (int s = 0; s < p.kernel_width; s++) {
                    const int back = x + p.padding_left - s * p.dilation_width, out_x = back / p.stride_width;
                    if (back >= 0 && back - out_x * p.stride_width == 0 && out_x < p.out_width)
                        sum += load_as_accumulate(weight[r * p.w.y + s * p.w.x]) *
                               load_as_accumulate(image[out_y * p.out.y + out_x * p.out.x]);
                }
            }
        }
        ((T *)p.result)[index] = store_from_accumulate<T>(sum);
    }
}

// backward_input of stride 1 as forward: grad_output is the input, and the kernel is mirrored.
static DepthwiseProblem as_forward(DepthwiseProblem p)
{
    DepthwiseProblem q = p;
    q.input = p.output;
    q.in = p.out;
    q.out = p.in;
    q.height = p.out_height;
    q.width = p.out_width;
    q.out_height = p.height;
    q.out_width = p.width;
    q.padding_top = (p.kernel_height - 1) * p.dilation_height - p.padding_top;
    q.padding_left = (p.kernel_width - 1) * p.dilation_width - p.padding_left;
    q.flipped = 1;
    return q;
}

template <typename T, int K>
static cuda_ops_status launch_contiguous(DepthwiseProblem p, ConvDevice device, cudaStream_t stream)
{
    // Tiles of equal width up to 64 columns, with as many rows as 256 threads compute; small planes share a block.
    const int64_t tiles_x = ceil_div(p.out_width, 64);
    p.tile_width = (int)ceil_div(ceil_div(p.out_width, tiles_x), RUN) * RUN;
    const int64_t across = p.tile_width / RUN, most_down = THREADS / across;
    const int64_t down = ceil_div(p.out_height, PLANE_ROWS), tiles_y = ceil_div(down, most_down);
    p.tile_height = (int)ceil_div(down, tiles_y) * PLANE_ROWS;
    p.tiles_x = (int)tiles_x;
    p.tiles_y = (int)tiles_y;
    const int64_t units = across * (p.tile_height / PLANE_ROWS), planes = p.batch * p.out_channels;
    p.pitch = (int)ceil_div(p.tile_width + K - 1, 4) * 4;
    const int64_t plane_words = (int64_t)(p.tile_height + K - 1) * p.pitch;
    int64_t planes_together = tiles_x * tiles_y == 1 && p.multiplier == 1 ? THREADS / units : 1;
    while (planes_together > 1 && planes_together * plane_words * (int64_t)sizeof(float) > 32 * 1024)
        planes_together--;
    // Few planes are spread over the GPU: a block's copy of its patches takes as many trips to memory as they have lines.
    const int64_t spread = ceil_div(planes, (int64_t)WANTED_BLOCKS * std::max(device.multiprocessors, 1));
    planes_together = std::min(planes_together, std::max<int64_t>(spread, 1));
    p.planes = (int)planes_together;
    p.by_rows = make_divisor(p.tile_height + K - 1);
    p.by_units = make_divisor(units);
    p.by_across = make_divisor(across);
    const double blocks = (double)tiles_x * (double)tiles_y * (double)ceil_div(planes, planes_together);
    if (blocks > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t lines = planes_together * (p.tile_height + K - 1);
    const int64_t warps = std::max(ceil_div(units * planes_together, WARP_SIZE), ceil_div(lines, WARP_LINES));
    const unsigned int threads = (unsigned int)std::min<int64_t>(warps * WARP_SIZE, THREADS);
    // The last run of a row reads up to two words past it.
    const size_t shared = (size_t)(planes_together * plane_words + 4) * sizeof(float);
    conv2d_depthwise_forward_contiguous_kernel<T, K><<<(unsigned int)blocks, threads, shared, stream>>>(p);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_generic(const DepthwiseProblem &p, bool forward, cudaStream_t stream)
{
    if (forward)
        conv2d_depthwise_forward_kernel<T><<<clamp_grid(ceil_div(p.batch * p.out.n, THREADS)), THREADS, 0, stream>>>(p);
    else
        conv2d_depthwise_backward_input_kernel<T>
            <<<clamp_grid(ceil_div(p.batch * p.in.n, THREADS)), THREADS, 0, stream>>>(p);
    return launch_status();
}

template <typename T>
static cuda_ops_status forward_backward_input(const ConvCall &call, ConvDevice device)
{
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    const DepthwiseProblem p = depthwise_problem(call);
    if constexpr (sizeof(T) < 8) {
        const bool as_it_stands = forward || p.stride_width != 1;
        const DepthwiseProblem q = as_it_stands ? p : as_forward(p);
        if (conv2d_depthwise_unrolled_takes(q, call.dtype, forward || !as_it_stands))
            return conv2d_depthwise_unrolled(q, call.dtype, forward || !as_it_stands, call.stream);
        const bool contiguous = !call.sizes.input_channels_last && !call.sizes.output_channels_last;
        if (depthwise_is_unrolled(p, call.dtype) && contiguous && (forward || p.multiplier == 1)) {
            if (p.kernel_width == 3)
                return launch_contiguous<T, 3>(q, device, call.stream);
            if (p.kernel_width == 5)
                return launch_contiguous<T, 5>(q, device, call.stream);
            return launch_contiguous<T, 7>(q, device, call.stream);
        }
    }
    if (conv2d_depthwise_channels_last_takes(p, call.dtype, forward))
        return conv2d_depthwise_channels_last(p, call.dtype, forward, call.stream);
    return launch_generic<T>(p, forward, call.stream);
}

bool conv2d_depthwise_applies(const ConvCall &call)
{
    return call.dtype != CUDA_OPS_FLOAT64;
}

Answer conv2d_depthwise_supports(const ConvCall &call, ConvDevice)
{
    return call.sizes.groups == call.sizes.in_channels && call.sizes.in_channels > 0
               ? YES
               : no("there is not a group for each input channel");
}

Answer conv2d_depthwise_is_fast(const ConvCall &call, ConvDevice)
{
    // One channel to many shares products: a matrix multiplication is faster.
    return call.sizes.groups > 1 || call.sizes.out_channels < 8 ? YES
                                                                : no("one input channel to 8 or more output channels");
}

size_t conv2d_depthwise_workspace(const ConvCall &call, ConvDevice device)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? conv2d_depthwise_backward_weight_workspace(call, device) : 0;
}

cuda_ops_status conv2d_depthwise(const ConvCall &call, ConvDevice device)
{
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return conv2d_depthwise_backward_weight(call, device);
    CUDA_OPS_DISPATCH(call.dtype, T, return forward_backward_input<T>(call, device));
    return CUDA_OPS_INVALID_ARGUMENT;
}
