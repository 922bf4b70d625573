// batch_norm's gradients of planes that are no whole 16-byte vectors (5x5, 7x7), of many channels: as resident.cu, in one
// kernel, but a block has a few neighbouring channels, whose planes of an image lie in one piece and so in vectors.
// The block copies the vectors that each image's piece touches to shared memory, where the piece lies at the same place
// within a vector; one warp or more has a channel there, adds its values up and overwrites them by the results, and the
// block writes these by vectors, but for a piece's ends, which share a vector with other channels.
// Bound by the instructions for single values in shared memory, which is why forward, with a pass more over them and half
// as many loads, was slower than resident.cu's.
#include "batch_norm/channel_values.cuh"
#include "batch_norm/paths.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int MOST_THREADS = 256;
static constexpr int MOST_WARPS = MOST_THREADS / WARP_SIZE;
static constexpr int IN_FLIGHT = 2; // vectors of each tensor that a thread loads at a time
// Of a multiprocessor: resident.cu's smallest blocks that run at once.
static constexpr int64_t MANY_CHANNELS = 16;
// Values of a channel for each of its threads, about.
static constexpr int64_t VALUES_OF_THREAD = 32;
// Of shared memory: four such blocks a multiprocessor, and with the sums below the 48 KB that need not be allowed.
static constexpr int64_t MOST_BYTES = 47 << 10;

// `count` neighbouring channels of each block, `threads` threads a channel; `vectors` of shared memory hold an image's
// piece wherever it begins.
struct Groups {
    int64_t channels;
    int outer, inner, count, threads, vectors;
};

// A walk through pairs (of an image, and a place below `length` in it) that are numbered through, by `step` at a time.
struct Walk {
    int image, place, images, places, length;

    __device__ __forceinline__ Walk(int first, int step, int length)
        : image(first / length), place(first % length), images(step / length), places(step % length), length(length)
    {
    }

    __device__ __forceinline__ void advance()
    {
        image += images, place += places;
        if (place >= length)
            place -= length, image++;
    }
};

// The block's piece of an image: elements [begin, end) of the tensor.
template <int SIZE>
struct Piece {
    int64_t begin, end;

    __device__ __forceinline__ Piece(const Groups &g, int64_t channel, int image)
    {
        const int64_t left = g.channels - channel;
        begin = ((int64_t)image * g.channels + channel) * g.inner;
        end = begin + (left < g.count ? left : g.count) * g.inner;
    }

    // The element that vector k of those that the piece touches begins at.
    __device__ __forceinline__ int64_t vector(int k) const
    {
        return begin / SIZE * SIZE + (int64_t)k * SIZE;
    }
};

// Copies the block's pieces of both tensors to shared memory, IN_FLIGHT loads of each at a time.
template <typename T>
__device__ __forceinline__ void keep(vector16<T> *const (&kept)[2], const T *const (&tensors)[2], const Groups &g,
                                     int64_t channel)
{
    typedef vector16<T> V;
    const int64_t all = g.outer * g.channels * g.inner;
    const int count = g.outer * g.vectors, threads = (int)blockDim.x;
    Walk at((int)threadIdx.x, threads, g.vectors);
    for (int i = (int)threadIdx.x; i < count; i += IN_FLIGHT * threads) {
        V value[IN_FLIGHT][2];
        bool touched[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const Piece<V::size> piece(g, channel, at.image);
            const int64_t from = piece.vector(at.place);
            touched[k] = i + k * threads < count && from < piece.end;
            if (touched[k] && from + V::size <= all) {
#pragma unroll
                for (int t = 0; t < 2; t++)
                    value[k][t] = *reinterpret_cast<const V *>(tensors[t] + from);
            } else if (touched[k]) { // the tensor ends within a vector
#pragma unroll
                for (int e = 0; e < V::size; e++)
#pragma unroll
                    for (int t = 0; t < 2; t++)
                        value[k][t].element[e] = tensors[t][from + e < all ? from + e : from];
            }
            at.advance();
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (touched[k])
#pragma unroll
                for (int t = 0; t < 2; t++)
                    kept[t][i + k * threads] = value[k][t];
    }
}

template <typename T>
__device__ __forceinline__ void write(T *tensor, const vector16<T> *kept, const Groups &g, int64_t channel)
{
    typedef vector16<T> V;
    const int count = g.outer * g.vectors, threads = (int)blockDim.x;
    Walk at((int)threadIdx.x, threads, g.vectors);
    for (int i = (int)threadIdx.x; i < count; i += threads, at.advance()) {
        const Piece<V::size> piece(g, channel, at.image);
        const int64_t to = piece.vector(at.place);
        if (piece.begin <= to && to + V::size <= piece.end) {
            *reinterpret_cast<V *>(tensor + to) = kept[i];
        } else {
#pragma unroll
            for (int e = 0; e < V::size; e++)
                if (piece.begin <= to + e && to + e < piece.end)
                    tensor[to + e] = kept[i].element[e];
        }
    }
}

// Calls what(i) for each of the values of the thread's channel that are its own, element i of shared memory.
template <int SIZE, typename What>
__device__ __forceinline__ void for_values(const Groups &g, int64_t channel, What what)
{
    const int rank = (int)threadIdx.x % g.threads, mine = (int)threadIdx.x / g.threads * g.inner;
    const int count = g.outer * g.inner, pitch = g.vectors * SIZE;
    // Pieces begin where their image's do within a vector: modulo SIZE, a power of two.
    const int first = (int)(channel * g.inner % SIZE), step = (int)(g.channels * g.inner % SIZE);
    Walk at(rank, g.threads, g.inner);
#pragma unroll 4
    for (int i = rank; i < count; i += g.threads, at.advance())
        what(at.image * pitch + (first + at.image * step) % SIZE + mine + at.place);
}

// Sums over the threads of a channel, which all get them. `scratch` is not used again.
template <int COUNT>
__device__ __forceinline__ void channel_totals(double (&values)[COUNT], int threads,
                                               double (&scratch)[COUNT][MOST_WARPS])
{
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = warp_sum(values[k]);
    if (threads == WARP_SIZE)
        return;
    if (threadIdx.x % WARP_SIZE == 0)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            scratch[k][threadIdx.x / WARP_SIZE] = values[k];
    __syncthreads();
    const int first = (int)threadIdx.x / threads * (threads / WARP_SIZE);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        values[k] = scratch[k][first];
        for (int warp = 1; warp < threads / WARP_SIZE; warp++)
            values[k] += scratch[k][first + warp];
    }
}

template <typename T>
__global__ void __launch_bounds__(MOST_THREADS, 4)
    groups_backward_kernel(T *grad_input, void *grad_weight, void *grad_bias, const T *grad_output, const T *input,
                           const void *weight, const void *mean, const void *variance, const __grid_constant__ Groups g,
                           double eps, double inverse_count, cuda_ops_dtype parameter_dtype,
                           cuda_ops_dtype statistics_dtype)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ double scratch[2][MOST_WARPS];
    vector16<T> *const vectors = (vector16<T> *)shared;
    T *const grads = (T *)shared, *const inputs = grads + g.outer * g.vectors * SIZE;
    const int64_t first = (int64_t)blockIdx.x * g.count, channel = first + threadIdx.x / g.threads;
    const bool there = channel < g.channels;
    wait_for_predecessor();
    release_successor();
    const ChannelValues values =
        load_backward_values(weight, parameter_dtype, mean, variance, statistics_dtype, there ? channel : first);
    keep<T>({vectors, vectors + g.outer * g.vectors}, {grad_output, input}, g, first);
    __syncthreads();
    const double m = values.of(1);
    const A center = (A)m;
    double totals[2] = {0, 0};
    if (there) {
        A sum = A(0), products = A(0);
        for_values<SIZE>(g, first, [&](int i) {
            const A grad = load_as_accumulate(grads[i]);
            sum += grad;
            products += grad * (load_as_accumulate(inputs[i]) - center);
        });
        totals[0] = (double)sum, totals[1] = (double)products;
    }
    channel_totals(totals, g.threads, scratch);
    double dot;
    const BackwardFactors<A> f(totals[0], totals[1], m, values.of(2), values.of(0), eps, inverse_count, &dot);
    if (there) {
        if (threadIdx.x % g.threads == 0 && grad_weight) {
            store_value(grad_weight, parameter_dtype, channel, dot);
            store_value(grad_bias, parameter_dtype, channel, totals[0]);
        }
        for_values<SIZE>(g, first, [&](int i) {
            grads[i] = store_from_accumulate<T>(load_as_accumulate(grads[i]) * f.scale +
                                                (load_as_accumulate(inputs[i]) - center) * f.slope + f.offset);
        });
    }
    __syncthreads();
    write(grad_input, vectors, g, first);
}

static int64_t shared_bytes_of(const NormCall &call, int64_t count)
{
    const int64_t size = 16 / dtype_size(call.dtype);
    return 2 * call.outer * (ceil_div(count * call.inner, size) + 1) * 16;
}

// As many channels of a block as leave two blocks to each multiprocessor. What a channel's threads add up depends on its
// sizes alone, whatever the block has beside it.
static Groups groups_of(const NormCall &call, const Device &device)
{
    const int64_t values = call.outer * call.inner, size = 16 / dtype_size(call.dtype);
    Groups g = {call.channels, (int)call.outer, (int)call.inner, 1, WARP_SIZE, 0};
    while (g.threads < MOST_THREADS / 2 && g.threads * VALUES_OF_THREAD < values)
        g.threads *= 2;
    while (g.count * 2 * g.threads <= MOST_THREADS && g.count * 4 * device.multiprocessors <= call.channels &&
           shared_bytes_of(call, g.count * 2) <= MOST_BYTES)
        g.count *= 2;
    g.vectors = (int)ceil_div((int64_t)g.count * call.inner, size) + 1;
    return g;
}

Answer batch_norm_groups_supports(const NormCall &call, const Device &)
{
    if (call.pass != CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD)
        return no("takes only training's backward pass");
    if (call.epilogue)
        return no("has no activation and no residual");
    if (!call.wants_output)
        return no("does not take calls for the values by channel only");
    if (call.inner <= 1 || call.channels > INT32_MAX)
        return no("a channel's values are not contiguous (channels_last, or no spatial dimensions)");
    for (const void *const tensor : {call.input, call.grad_output, (const void *)call.grad_input})
        if (!is_aligned_16(tensor))
            return no("a tensor is not aligned to 16 bytes");
    return call.outer <= MOST_BYTES / call.inner && shared_bytes_of(call, 1) <= MOST_BYTES
               ? YES
               : no("a channel is too large for a quarter of a multiprocessor's shared memory");
}

// resident.cu's blocks are small enough where channels are, and all run at once where these are few: on an H100 it took
// 16.2 us of 32x1550x7x7 in bf16, and this one 23.4; of 16x3024x5x5 18.6, and this one 13.6.
Answer batch_norm_groups_is_fast(const NormCall &call, const Device &device)
{
    if (call.inner * dtype_size(call.dtype) % 16 == 0)
        return no("planes are whole vectors of 16 bytes");
    const Groups g = groups_of(call, device);
    return g.count > 1 && g.threads == WARP_SIZE && call.channels > MANY_CHANNELS * device.multiprocessors
               ? YES
               : no("channels are few enough for a block each, or too large for a warp");
}

cuda_ops_status batch_norm_groups(const NormCall &call, const Device &device)
{
    const Groups g = groups_of(call, device);
    const dim3 grid((unsigned int)ceil_div(call.channels, g.count)), threads((unsigned int)(g.count * g.threads));
    const size_t bytes = (size_t)shared_bytes_of(call, g.count);
    CUDA_OPS_DISPATCH(call.dtype, T,
                      launch_dependent(groups_backward_kernel<T>, grid, threads, bytes, call.stream,
                                       (T *)call.grad_input, call.grad_weight, call.grad_bias,
                                       (const T *)call.grad_output, (const T *)call.input, call.weight, call.mean,
                                       call.variance, g, call.eps, 1.0 / (double)(call.outer * call.inner),
                                       call.parameter_dtype, call.statistics_dtype));
    return launch_status();
}
