// scale_channels: output = input * f(scale) with a scale for each channel of each image, grad_input = grad_output *
// f(scale), grad_scale = f'(scale) * the sum over pixels of grad_output * input.
// With channels innermost a thread has one 16-byte vector of channels of several pixels of an image, so that its factors
// are computed once; backward's blocks add their pixels up in shared memory, and where several share an image a second
// kernel adds their sums in a fixed order. Else a thread has vectors of a channel's pixels, and backward a warp or a
// block for each channel of an image. Bound by memory: one read and one write forward, two reads and one write backward.
#include "cuda_ops/scale_channels.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"

static constexpr int SCALE_CHANNELS_THREADS = 256;
static constexpr int PIXELS = 4;                  // of a thread, under way together
static constexpr int64_t WANTED_BLOCKS = 8 * 132; // of backward; a constant, so that sums are cut alike on every device
static constexpr int64_t LEAST_PIXELS = 2 * PIXELS; // of a thread there, where an image is shared
static constexpr int64_t LONG_ROW = 2048;           // from which on a block has one channel

template <typename T>
struct ScaleChannels {
    typedef accumulate_type<T> A;
    T *output, *grad_scale; // output: or the gradient of input; may be NULL in backward
    const T *input, *grad_output, *scale;
    A *partials; // backward: sums of each split of the pixels, or NULL
    int64_t outer, count, inner;
    int64_t vectors, lanes; // with channels innermost: vectors of a pixel, and threads that share an image's pixels
    int64_t split;          // backward: pixels of a block
    int across;             // backward: threads of a block that share a pixel
    cuda_ops_channel_gate gate;
};

template <typename T, typename A>
__device__ __forceinline__ A gate_of(A scale, cuda_ops_channel_gate gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID) {
        if constexpr (sizeof(T) == 2)
            return sigmoid_f16(scale);
        else if constexpr (sizeof(T) == 4)
            return sigmoid_f32(scale);
        else
            return sigmoid_f64(scale);
    }
    if (gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID) {
        if constexpr (sizeof(A) == 4)
            return hardsigmoid_f32(scale);
        else
            return hardsigmoid_f64(scale);
    }
    return scale;
}

template <typename T, typename A>
__device__ __forceinline__ A gate_slope_of(A scale, cuda_ops_channel_gate gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID) {
        const A share = gate_of<T>(scale, gate);
        return share * (A(1) - share);
    }
    if (gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID)
        return scale > A(-3) && scale < A(3) ? A(1) / A(6) : A(0);
    return A(1);
}

// A gate that is shut or wide open has no gradient, whatever the sum is: of an infinite one it would be NaN.
template <typename T, typename A>
__device__ __forceinline__ A times_gate_slope(A sum, A scale, cuda_ops_channel_gate gate)
{
    const A slope = gate_slope_of<T>(scale, gate);
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID && slope == A(0) ? A(0) : sum * slope;
}

template <typename T, int SIZE>
__device__ __forceinline__ void load_gates(accumulate_type<T> (&gates)[SIZE], const T *scale,
                                           cuda_ops_channel_gate gate)
{
    const aligned_vector<T, SIZE> s = *reinterpret_cast<const aligned_vector<T, SIZE> *>(scale);
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        gates[e] = gate_of<T>(element_of(s, e), gate);
}

template <typename T, int SIZE>
__device__ __forceinline__ void store_scaled(T *to, const aligned_vector<T, SIZE> &x,
                                             const accumulate_type<T> (&gates)[SIZE])
{
    accumulate_type<T> y[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        y[e] = element_of(x, e) * gates[e];
    store_vector(reinterpret_cast<aligned_vector<T, SIZE> *>(to), vector_of<T>(y));
}

// Channels innermost. A thread's pixels are `lanes` apart.
template <typename T, int SIZE>
__global__ void __launch_bounds__(SCALE_CHANNELS_THREADS) scale_channels_forward_kernel(const ScaleChannels<T> a)
{
    typedef aligned_vector<T, SIZE> V;
    const int64_t index = (int64_t)blockIdx.x * SCALE_CHANNELS_THREADS + threadIdx.x;
    const bool small = index <= INT32_MAX && a.vectors <= INT32_MAX;
    const int64_t lane = small ? (int64_t)((uint32_t)index / (uint32_t)a.vectors) : index / a.vectors;
    const int64_t vector = index - lane * a.vectors;
    wait_for_predecessor();
    release_successor();
    if (lane >= a.lanes)
        return;
    for (int64_t image = blockIdx.y; image < a.outer; image += gridDim.y) {
        accumulate_type<T> gates[SIZE];
        const int64_t corner = image * a.count * a.inner + vector * SIZE;
        for (int64_t first = lane; first < a.count; first += a.lanes * PIXELS) {
            V x[PIXELS];
#pragma unroll
            for (int u = 0; u < PIXELS; u++)
                if (first + u * a.lanes < a.count)
                    x[u] = *reinterpret_cast<const V *>(a.input + corner + (first + u * a.lanes) * a.inner);
            if (first == lane)
                load_gates<T, SIZE>(gates, a.scale + image * a.inner + vector * SIZE, a.gate);
#pragma unroll
            for (int u = 0; u < PIXELS; u++)
                if (first + u * a.lanes < a.count)
                    store_scaled<T, SIZE>(a.output + corner + (first + u * a.lanes) * a.inner, x[u], gates);
        }
    }
}

// Pixels innermost: [outer][count]. SIZE > 1: count is SIZE at least, so that a vector meets two channels at most.
template <typename T, int SIZE>
__global__ void __launch_bounds__(SCALE_CHANNELS_THREADS) scale_channels_planes_kernel(const ScaleChannels<T> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, SIZE> V;
    wait_for_predecessor();
    release_successor();
    const int64_t total = a.outer * a.count / SIZE, step = (int64_t)gridDim.x * SCALE_CHANNELS_THREADS * PIXELS;
    const bool small = a.outer * a.count <= INT32_MAX;
    for (int64_t first = (int64_t)blockIdx.x * SCALE_CHANNELS_THREADS * PIXELS + threadIdx.x; first < total;
         first += step) {
        V x[PIXELS];
#pragma unroll
        for (int u = 0; u < PIXELS; u++)
            if (first + u * SCALE_CHANNELS_THREADS < total)
                x[u] = *reinterpret_cast<const V *>(a.input + (first + u * SCALE_CHANNELS_THREADS) * SIZE);
#pragma unroll
        for (int u = 0; u < PIXELS; u++) {
            const int64_t at = (first + u * SCALE_CHANNELS_THREADS) * SIZE;
            if (at >= total * SIZE)
                continue;
            const int64_t row = small ? (int64_t)((uint32_t)at / (uint32_t)a.count) : at / a.count;
            const int64_t left = a.count - (at - row * a.count);
            const A gate = gate_of<T>(load_as_accumulate(a.scale[row]), a.gate);
            A next = gate, gates[SIZE];
            if (left < SIZE)
                next = gate_of<T>(load_as_accumulate(a.scale[row + 1]), a.gate);
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                gates[e] = e < left ? gate : next;
            store_scaled<T, SIZE>(a.output + at, x[u], gates);
        }
    }
}

// Channels innermost. blockIdx: tile of channels, split of the pixels, image.
template <typename T, int SIZE>
__global__ void __launch_bounds__(SCALE_CHANNELS_THREADS) scale_channels_backward_kernel(const ScaleChannels<T> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, SIZE> V;
    __shared__ A exchange[SCALE_CHANNELS_THREADS * SIZE];
    const int down = SCALE_CHANNELS_THREADS / a.across, x = (int)threadIdx.x % a.across,
              y = (int)threadIdx.x / a.across;
    const int64_t vector = (int64_t)blockIdx.x * a.across + x;
    const bool works = y < down && vector < a.vectors;
    const int64_t begin = blockIdx.y * a.split, end = begin + a.split < a.count ? begin + a.split : a.count;
    wait_for_predecessor();
    release_successor();
    for (int64_t image = blockIdx.z; image < a.outer; image += gridDim.z) {
        A gates[SIZE] = {}, sum[SIZE] = {};
        if (works && a.output)
            load_gates<T, SIZE>(gates, a.scale + image * a.inner + vector * SIZE, a.gate);
        const int64_t corner = image * a.count * a.inner + vector * SIZE;
        for (int64_t first = begin + y; first < end && works; first += down * PIXELS) {
            V g[PIXELS], input[PIXELS];
#pragma unroll
            for (int u = 0; u < PIXELS; u++)
                if (first + u * down < end) {
                    const int64_t at = corner + (first + u * down) * a.inner;
                    g[u] = *reinterpret_cast<const V *>(a.grad_output + at);
                    input[u] = *reinterpret_cast<const V *>(a.input + at);
                }
#pragma unroll
            for (int u = 0; u < PIXELS; u++)
                if (first + u * down < end) {
#pragma unroll
                    for (int e = 0; e < SIZE; e++)
                        sum[e] += element_of(g[u], e) * element_of(input[u], e);
                    if (a.output)
                        store_scaled<T, SIZE>(a.output + corner + (first + u * down) * a.inner, g[u], gates);
                }
        }
        // The pixels that the block had side by side, added in their order.
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            exchange[threadIdx.x * SIZE + e] = sum[e];
        __syncthreads();
        for (int i = threadIdx.x; i < a.across * SIZE; i += SCALE_CHANNELS_THREADS) {
            const int64_t channel = (int64_t)blockIdx.x * a.across * SIZE + i;
            if (channel >= a.inner)
                continue;
            A total = 0;
            for (int other = 0; other < down; other++)
                total += exchange[other * a.across * SIZE + i];
            const int64_t at = image * a.inner + channel;
            if (a.partials)
                a.partials[blockIdx.y * a.outer * a.inner + at] = total;
            else
                a.grad_scale[at] =
                    store_from_accumulate<T>(times_gate_slope<T>(total, load_as_accumulate(a.scale[at]), a.gate));
        }
        __syncthreads();
    }
}

// The splits' sums, a thread for each channel of an image.
template <typename T>
__global__ void __launch_bounds__(SCALE_CHANNELS_THREADS)
    scale_channels_add_kernel(const ScaleChannels<T> a, int64_t splits)
{
    typedef accumulate_type<T> A;
    constexpr int IN_FLIGHT = 8;
    wait_for_predecessor();
    release_successor();
    const int64_t total = a.outer * a.inner;
    for (int64_t i = global_thread_index(); i < total; i += global_thread_count()) {
        A sum = 0;
        for (int64_t first = 0; first < splits; first += IN_FLIGHT) {
            A part[IN_FLIGHT];
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                part[s] = first + s < splits ? a.partials[(first + s) * total + i] : A(0);
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                sum += part[s];
        }
        a.grad_scale[i] = store_from_accumulate<T>(times_gate_slope<T>(sum, load_as_accumulate(a.scale[i]), a.gate));
    }
}

// Pixels innermost: `across` threads, a warp or the block, for a channel of an image. SIZE > 1: rows are whole vectors.
template <typename T, int SIZE>
__global__ void __launch_bounds__(SCALE_CHANNELS_THREADS)
    scale_channels_planes_backward_kernel(const ScaleChannels<T> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, SIZE> V;
    __shared__ A scratch[SCALE_CHANNELS_THREADS / WARP_SIZE];
    const int rows = SCALE_CHANNELS_THREADS / a.across, lane = (int)threadIdx.x % a.across;
    const int64_t vectors = a.count / SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t first_row = (int64_t)blockIdx.x * rows; first_row < a.outer; first_row += (int64_t)gridDim.x * rows) {
        const int64_t row = first_row + (int)threadIdx.x / a.across;
        A sum = 0;
        if (row < a.outer) {
            const A scale = load_as_accumulate(a.scale[row]);
            A gates[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                gates[e] = gate_of<T>(scale, a.gate);
            const V *const g = reinterpret_cast<const V *>(a.grad_output + row * a.count);
            const V *const x = reinterpret_cast<const V *>(a.input + row * a.count);
#pragma unroll 4
            for (int64_t i = lane; i < vectors; i += a.across) {
                const V of_output = g[i], input = x[i];
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    sum += element_of(of_output, e) * element_of(input, e);
                if (a.output)
                    store_scaled<T, SIZE>(a.output + row * a.count + i * SIZE, of_output, gates);
            }
        }
        sum = warp_sum(sum);
        if (a.across > WARP_SIZE) {
            if (threadIdx.x % WARP_SIZE == 0)
                scratch[threadIdx.x / WARP_SIZE] = sum;
            __syncthreads();
            if (threadIdx.x == 0)
                for (int warp = 1; warp < SCALE_CHANNELS_THREADS / WARP_SIZE; warp++)
                    sum += scratch[warp];
            __syncthreads();
        }
        if (lane == 0 && row < a.outer)
            a.grad_scale[row] =
                store_from_accumulate<T>(times_gate_slope<T>(sum, load_as_accumulate(a.scale[row]), a.gate));
    }
}

// How backward cuts images of so many vectors of channels: threads across a pixel, tiles of channels, splits of pixels.
struct ScaleChannelsPlan {
    int across;
    int64_t tiles, splits, split;
};

static ScaleChannelsPlan plan_scale_channels(int64_t outer, int64_t count, int64_t vectors)
{
    constexpr int64_t MOST_TILES = 4, FEWEST_ACROSS = 8;
    ScaleChannelsPlan best = {};
    int64_t used = 0;
    const int64_t fewest = ceil_div(vectors, SCALE_CHANNELS_THREADS);
    for (int64_t tiles = fewest; tiles < fewest + MOST_TILES; tiles++) {
        const int64_t across = ceil_div(vectors, tiles), threads = SCALE_CHANNELS_THREADS / across * across;
        if (tiles > fewest && across < FEWEST_ACROSS)
            break;
        if (threads > used) {
            used = threads;
            best.across = (int)across, best.tiles = ceil_div(vectors, across);
        }
    }
    const int64_t down = SCALE_CHANNELS_THREADS / best.across, blocks = best.tiles * (outer > 0 ? outer : 1);
    const int64_t wanted = ceil_div(WANTED_BLOCKS, blocks), most = count / (down * LEAST_PIXELS);
    best.splits = wanted < most ? wanted : most;
    if (best.splits < 1)
        best.splits = 1;
    best.splits = best.splits < MAX_GRID ? best.splits : MAX_GRID;
    best.split = ceil_div(count, best.splits);
    best.splits = ceil_div(count, best.split > 0 ? best.split : 1);
    return best;
}

extern "C" int64_t cuda_ops_scale_channels_workspace_cuda(int64_t outer, int64_t count, int64_t inner,
                                                          cuda_ops_dtype dtype)
{
    if (outer == 0 || count == 0 || inner <= 1)
        return 0;
    // By elements, where an address is not aligned.
    const int64_t size = 16 / dtype_size(dtype);
    int64_t most = plan_scale_channels(outer, count, inner).splits;
    if (inner % size == 0 && plan_scale_channels(outer, count, inner / size).splits > most)
        most = plan_scale_channels(outer, count, inner / size).splits;
    return most > 1 ? most * outer * inner * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

// The product with f(scale): forward, and backward without the gradient of scale.
template <typename T>
static cuda_ops_status scale_all(ScaleChannels<T> a, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const bool aligned = is_aligned_16(a.output) && is_aligned_16(a.input);
    if (a.inner > 1) {
        const bool vectorised = a.inner % SIZE == 0 && aligned && is_aligned_16(a.scale);
        a.vectors = vectorised ? a.inner / SIZE : a.inner;
        a.lanes = ceil_div(a.count, PIXELS);
        const int64_t most = ceil_div((int64_t)1 << 30, a.vectors);
        a.lanes = a.lanes < most ? a.lanes : most;
        const int64_t blocks = ceil_div(a.vectors * a.lanes, SCALE_CHANNELS_THREADS);
        if (blocks > INT32_MAX)
            return CUDA_OPS_INVALID_ARGUMENT;
        const int64_t images = a.outer < MAX_GRID ? a.outer : MAX_GRID;
        launch_dependent(vectorised ? scale_channels_forward_kernel<T, SIZE> : scale_channels_forward_kernel<T, 1>,
                         dim3((unsigned int)blocks, (unsigned int)images), dim3(SCALE_CHANNELS_THREADS), 0, stream, a);
        return launch_status();
    }
    const bool vectorised = aligned && a.count >= SIZE && a.outer * a.count % SIZE == 0;
    const int64_t vectors = a.outer * a.count / (vectorised ? SIZE : 1);
    launch_dependent(vectorised ? scale_channels_planes_kernel<T, SIZE> : scale_channels_planes_kernel<T, 1>,
                     clamp_grid(ceil_div(vectors, SCALE_CHANNELS_THREADS * PIXELS)), dim3(SCALE_CHANNELS_THREADS), 0,
                     stream, a);
    return launch_status();
}

template <typename T>
static cuda_ops_status scale_backward(ScaleChannels<T> a, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const bool aligned = is_aligned_16(a.output) && is_aligned_16(a.input) && is_aligned_16(a.grad_output);
    if (a.inner > 1) {
        const bool vectorised = a.inner % SIZE == 0 && aligned && is_aligned_16(a.scale);
        a.vectors = vectorised ? a.inner / SIZE : a.inner;
        const ScaleChannelsPlan plan = plan_scale_channels(a.outer, a.count, a.vectors);
        a.across = plan.across, a.split = plan.split;
        if (plan.splits == 1)
            a.partials = nullptr;
        else if (!a.partials)
            return CUDA_OPS_INVALID_ARGUMENT;
        if (plan.tiles > INT32_MAX)
            return CUDA_OPS_INVALID_ARGUMENT;
        const int64_t images = a.outer < MAX_GRID ? a.outer : MAX_GRID;
        launch_dependent(vectorised ? scale_channels_backward_kernel<T, SIZE> : scale_channels_backward_kernel<T, 1>,
                         dim3((unsigned int)plan.tiles, (unsigned int)plan.splits, (unsigned int)images),
                         dim3(SCALE_CHANNELS_THREADS), 0, stream, a);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS || plan.splits == 1)
            return status;
        launch_dependent(scale_channels_add_kernel<T>, clamp_grid(ceil_div(a.outer * a.inner, SCALE_CHANNELS_THREADS)),
                         dim3(SCALE_CHANNELS_THREADS), 0, stream, a, plan.splits);
        return launch_status();
    }
    const bool vectorised = aligned && a.count % SIZE == 0;
    a.across = a.count >= LONG_ROW ? SCALE_CHANNELS_THREADS : WARP_SIZE;
    launch_dependent(
        vectorised ? scale_channels_planes_backward_kernel<T, SIZE> : scale_channels_planes_backward_kernel<T, 1>,
        clamp_grid(ceil_div(a.outer, SCALE_CHANNELS_THREADS / a.across)), dim3(SCALE_CHANNELS_THREADS), 0, stream, a);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_scale_channels_forward_cuda(void *output, const void *input, const void *scale,
                                                                int64_t outer, int64_t count, int64_t inner,
                                                                cuda_ops_channel_gate gate, cuda_ops_dtype dtype,
                                                                cuda_ops_stream stream)
{
    if (outer == 0 || count == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        ScaleChannels<T> a = {};
        a.output = (T *)output, a.input = (const T *)input, a.scale = (const T *)scale;
        a.outer = outer, a.count = count, a.inner = inner, a.gate = gate;
        return scale_all(a, stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

extern "C" cuda_ops_status cuda_ops_scale_channels_backward_cuda(void *grad_input, void *grad_scale, void *workspace,
                                                                 const void *grad_output, const void *input,
                                                                 const void *scale, int64_t outer, int64_t count,
                                                                 int64_t inner, cuda_ops_channel_gate gate,
                                                                 cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (grad_scale && !input)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (outer == 0 || count == 0 || inner == 0 || (!grad_input && !grad_scale))
        return CUDA_OPS_SUCCESS; // no sum is of any pixel: the caller's zeros
    CUDA_OPS_DISPATCH(dtype, T, {
        ScaleChannels<T> a = {};
        a.output = (T *)grad_input, a.grad_scale = (T *)grad_scale, a.scale = (const T *)scale;
        a.input = (const T *)input, a.grad_output = (const T *)grad_output;
        a.partials = (accumulate_type<T> *)workspace;
        a.outer = outer, a.count = count, a.inner = inner, a.gate = gate;
        if (grad_scale)
            return scale_backward(a, stream);
        a.input = (const T *)grad_output;
        return scale_all(a, stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
