// conv2d with a group per channel in channels_last, of any kernel, stride and dilation: what unrolled.cu has no
// instance for. forward and backward_input, for one output channel a group.
//
// A thread computes 16 bytes of channels, or one channel where they are no whole vectors: PIXELS neighbouring pixels of
// the output in forward, one pixel of the input in backward_input, which visits only the taps whose output exists. A
// block has the kernels of its channels in shared memory as float; what neighbouring pixels read twice comes from L1.
// Bound by memory: each element is read once, in whole sectors.
#include "conv2d/activation.cuh"
#include "conv2d/depthwise/problem.cuh"

static constexpr int THREADS = 256;
static constexpr int PIXELS = 4; // of a thread, along a row of the output
static constexpr int64_t WANTED_BLOCKS = 2112;
static constexpr int MOST_WEIGHT_BYTES = 48 << 10;

// Vectors of channels of a block.
static int most_lanes(int size)
{
    return size == 1 ? 64 : 16;
}

// A block has `lanes` vectors of channels, and `groups` runs of pixels at a time.
struct Tiles {
    int lanes, groups, channel_tiles, runs_x;
    int64_t runs, blocks_of_tile;
};

static Tiles tiles_of(const DepthwiseProblem &p, int64_t height, int64_t width, int pixels, int size)
{
    const int64_t vectors = p.channels / size;
    Tiles t;
    t.channel_tiles = (int)ceil_div(vectors, most_lanes(size));
    t.lanes = (int)ceil_div(vectors, t.channel_tiles);
    t.groups = THREADS / t.lanes;
    t.runs_x = (int)ceil_div(width, pixels);
    t.runs = p.batch * height * t.runs_x;
    const int64_t wanted = ceil_div(WANTED_BLOCKS, t.channel_tiles), most = ceil_div(t.runs, t.groups);
    t.blocks_of_tile = most < wanted ? most : wanted;
    return t;
}

// The kernels of a block's channels as [tap][channel of the tile]; each channel's lies dense.
template <typename T>
__device__ __forceinline__ void keep_weights(float *weights, const DepthwiseProblem &p, int64_t first_channel,
                                             int width)
{
    const int taps = p.kernel_height * p.kernel_width;
    for (int i = threadIdx.x; i < taps * width; i += THREADS) {
        const int channel = i / taps, tap = i - channel * taps;
        weights[(p.flipped ? taps - 1 - tap : tap) * width + channel] =
            first_channel + channel < p.channels
                ? load_as_accumulate(((const T *)p.weight)[(first_channel + channel) * taps + tap])
                : 0.0f;
    }
}

// A tap's weights for a thread's channels, by four where they are aligned: one by one, lanes would meet in banks.
template <int SIZE>
__device__ __forceinline__ void tap_weights(float (&w)[SIZE], const float *from)
{
    if constexpr (SIZE % 4 == 0) {
#pragma unroll
        for (int e = 0; e < SIZE; e += 4)
            *(float4 *)(w + e) = *(const float4 *)(from + e);
    } else {
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            w[e] = from[e];
    }
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(THREADS, 2)
    conv2d_depthwise_forward_any_kernel(const __grid_constant__ DepthwiseProblem p, const Tiles t)
{
    typedef aligned_vector<T, SIZE> V;
    extern __shared__ __align__(16) float weights[];
    const int width = t.lanes * SIZE, lane = (int)threadIdx.x % t.lanes, group = (int)threadIdx.x / t.lanes;
    const int64_t first_channel = (int64_t)(blockIdx.x % t.channel_tiles) * width;
    const int64_t channel = first_channel + lane * SIZE;
    keep_weights<T>(weights, p, first_channel, width);
    __syncthreads();
    if (group >= t.groups || channel >= p.channels)
        return;
    float start[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        start[e] = p.bias != nullptr ? load_as_accumulate(((const T *)p.bias)[channel + e]) : 0.0f;
    const V zero = vector_of_equal<T, SIZE>(0.0f);
    const int in_line = (int)p.in.y, in_column = (int)p.in.x;
    for (int64_t run = blockIdx.x / t.channel_tiles * t.groups + group; run < t.runs;
         run += t.blocks_of_tile * t.groups) {
        int64_t n = run;
        const int x = (int)divide_in_place(n, t.runs_x) * PIXELS, y = (int)divide_in_place(n, p.out_height);
        const T *const image = (const T *)p.input + n * p.in.n + channel;
        const int x0 = x * p.stride_width - p.padding_left, y0 = y * p.stride_height - p.padding_top;
        float sum[PIXELS][SIZE];
#pragma unroll
        for (int j = 0; j < PIXELS; j++)
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                sum[j][e] = start[e];
        for (int r = 0; r < p.kernel_height; r++) {
            const int source_y = y0 + r * p.dilation_height;
            if ((unsigned int)source_y >= (unsigned int)p.height)
                continue;
            const T *const line = image + (int64_t)source_y * in_line;
            const float *tap = weights + r * p.kernel_width * width + lane * SIZE;
#pragma unroll 2
            for (int s = 0; s < p.kernel_width; s++, tap += width) {
                float w[SIZE];
                tap_weights(w, tap);
                V value[PIXELS];
#pragma unroll
                for (int j = 0; j < PIXELS; j++) {
                    const int source_x = x0 + j * p.stride_width + s * p.dilation_width;
                    value[j] =
                        load_vector_or(reinterpret_cast<const V *>(line + (int64_t)source_x * in_column),
                                       (unsigned int)source_x < (unsigned int)p.width && x + j < p.out_width, zero);
                }
#pragma unroll
                for (int e = 0; e < SIZE; e++)
#pragma unroll
                    for (int j = 0; j < PIXELS; j++)
                        sum[j][e] += w[e] * element_of(value[j], e);
            }
        }
        T *const result = (T *)p.result + n * p.out.n + (int64_t)y * p.out.y + (int64_t)x * p.out.x + channel;
#pragma unroll
        for (int j = 0; j < PIXELS; j++)
            conv2d_activate<T>(sum[j], p.activation);
#pragma unroll
        for (int j = 0; j < PIXELS; j++)
            if (x + j < p.out_width)
                store_vector(reinterpret_cast<V *>(result + j * p.out.x), vector_of<T>(sum[j]));
    }
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(THREADS, 4)
    conv2d_depthwise_backward_input_any_kernel(const __grid_constant__ DepthwiseProblem p, const Tiles t)
{
    typedef aligned_vector<T, SIZE> V;
    extern __shared__ __align__(16) float weights[];
    const int width = t.lanes * SIZE, lane = (int)threadIdx.x % t.lanes, group = (int)threadIdx.x / t.lanes;
    const int64_t first_channel = (int64_t)(blockIdx.x % t.channel_tiles) * width;
    const int64_t channel = first_channel + lane * SIZE;
    keep_weights<T>(weights, p, first_channel, width);
    __syncthreads();
    if (group >= t.groups || channel >= p.channels)
        return;
    // Without dilation every stride-th tap has an output, from the first one that has.
    const int step_y = p.dilation_height == 1 ? p.stride_height : 1;
    const int step_x = p.dilation_width == 1 ? p.stride_width : 1;
    for (int64_t run = blockIdx.x / t.channel_tiles * t.groups + group; run < t.runs;
         run += t.blocks_of_tile * t.groups) {
        int64_t n = run;
        const int x = (int)divide_in_place(n, t.runs_x), y = (int)divide_in_place(n, p.height);
        const T *const image = (const T *)p.output + n * p.out.n + channel;
        float sum[SIZE] = {};
        const int top = y + p.padding_top, left = x + p.padding_left;
        for (int r = step_y > 1 ? top % step_y : 0; r < p.kernel_height; r += step_y) {
            const int up = top - r * p.dilation_height, out_y = up / p.stride_height;
            if (up < 0 || up - out_y * p.stride_height != 0 || out_y >= p.out_height)
                continue;
            const T *const line = image + (int64_t)out_y * p.out.y;
#pragma unroll 2
            for (int s = step_x > 1 ? left % step_x : 0; s < p.kernel_width; s += step_x) {
                const int back = left - s * p.dilation_width, out_x = back / p.stride_width;
                if (back < 0 || back - out_x * p.stride_width != 0 || out_x >= p.out_width)
                    continue;
                const V value = *reinterpret_cast<const V *>(line + (int64_t)out_x * p.out.x);
                float w[SIZE];
                tap_weights(w, weights + (r * p.kernel_width + s) * width + lane * SIZE);
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    sum[e] += w[e] * element_of(value, e);
            }
        }
        store_vector(
            reinterpret_cast<V *>((T *)p.result + n * p.in.n + (int64_t)y * p.in.y + (int64_t)x * p.in.x + channel),
            vector_of<T>(sum));
    }
}

// A thread's channels: 16 bytes, or one.
static int size_of(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward)
{
    const int size = (int)(16 / dtype_size(dtype));
    return p.channels % size == 0 && is_aligned_16(forward ? p.input : p.output) && is_aligned_16(p.result) ? size : 1;
}

static int64_t weight_bytes(const DepthwiseProblem &p, const Tiles &t, int size)
{
    return (int64_t)p.kernel_height * p.kernel_width * t.lanes * size * (int)sizeof(float);
}

static Tiles tiles_of(const DepthwiseProblem &p, bool forward, int size)
{
    return forward ? tiles_of(p, p.out_height, p.out_width, PIXELS, size) : tiles_of(p, p.height, p.width, 1, size);
}

template <typename T, int SIZE>
static cuda_ops_status launch(const DepthwiseProblem &p, bool forward, cudaStream_t stream)
{
    const Tiles t = tiles_of(p, forward, SIZE);
    const dim3 blocks((unsigned int)(t.blocks_of_tile * t.channel_tiles));
    const auto kernel =
        forward ? conv2d_depthwise_forward_any_kernel<T, SIZE> : conv2d_depthwise_backward_input_any_kernel<T, SIZE>;
    kernel<<<blocks, THREADS, (size_t)weight_bytes(p, t, SIZE), stream>>>(p, t);
    return launch_status();
}

bool conv2d_depthwise_channels_last_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward)
{
    if (dtype == CUDA_OPS_FLOAT64 || p.in.c != 1 || p.out.c != 1 || p.multiplier != 1)
        return false;
    const int size = size_of(p, dtype, forward);
    const Tiles t = tiles_of(p, forward, size);
    return weight_bytes(p, t, size) <= MOST_WEIGHT_BYTES && t.channel_tiles <= WANTED_BLOCKS &&
           // Offsets of pixels along either dimension, and of a line, have 32 bits.
           p.in.n <= INT_MAX && p.out.n <= INT_MAX;
}

template <typename T>
static cuda_ops_status launch(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward, cudaStream_t stream)
{
    return size_of(p, dtype, forward) > 1 ? launch<T, vector16<T>::size>(p, forward, stream)
                                          : launch<T, 1>(p, forward, stream);
}

cuda_ops_status conv2d_depthwise_channels_last(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                               cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return launch<float>(p, dtype, forward, stream);
    case CUDA_OPS_FLOAT16:
        return launch<__half>(p, dtype, forward, stream);
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16>(p, dtype, forward, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
