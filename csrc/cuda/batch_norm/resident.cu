// batch_norm where a channel fits into the shared memory of one block: one kernel a pass (batch_norm.cu has the
// formulas), instead of split.cu's three, each of which waits for the one before.
// A block loads its channel by aligned vectors into shared memory, adds its values up, and writes the result from
// shared memory: forward reads input once and writes output; backward reads input and grad_output once and writes
// grad_input. The variance is the mean of squared differences from the mean, in a second pass over the kept values. The
// mean is taken relative to one of the values, for split.cu's reasons; threads' sums are added in double, in a fixed
// order, and one warp makes the factors of them: in all warps the roots in double took longer than the rest.
// Bound by latency where channels are few, since an SM has only one block's loads in flight, and by memory beyond.
#include "batch_norm/channel_values.cuh"
#include "batch_norm/paths.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int MOST_THREADS = 512;
static constexpr int LEAST_THREADS = 64;
// Of shared memory, beside a channel's values: the sums and the factors.
static constexpr int STATIC_BYTES = 512;
// Loads that a thread has in flight.
static constexpr int IN_FLIGHT = 5;
static constexpr int IN_FLIGHT_OF_TWO = 3; // of each of two tensors
// Of a multiprocessor: what it has registers for.
static constexpr int ROUND_THREADS = 1024;
static constexpr int QUARTER_BYTES = 56 << 10; // of its shared memory

// A channel as a block walks it: `count` vectors in runs of `run`, a plane each. They fit into shared memory, and so
// into an int.
struct walk {
    int count, run;
};

// Where a thread is in its walk: vector `index` of the channel and `column` of its plane, `offset` vectors into the
// tensor.
struct step {
    int index, column;
    int64_t offset;
};

__device__ __forceinline__ step first_step(const walk &w, int64_t channel, int64_t channels)
{
    const int plane = (int)threadIdx.x / w.run, column = (int)threadIdx.x % w.run;
    return {(int)threadIdx.x, column, (plane * channels + channel) * w.run + column};
}

// Advances by a block's stride: `planes` whole planes and `rest` vectors.
__device__ __forceinline__ void advance(step &at, const walk &w, int planes, int rest, int64_t channels)
{
    at.index += (int)blockDim.x;
    at.column += rest;
    at.offset += planes * channels * w.run + rest;
    if (at.column >= w.run) {
        at.column -= w.run;
        at.offset += (channels - 1) * w.run;
    }
}

// Calls what(index in shared memory, offset in the tensor) for each of the thread's vectors.
template <typename What>
__device__ __forceinline__ void for_vectors(const walk &w, int64_t channel, int64_t channels, What what)
{
    const int planes = (int)blockDim.x / w.run, rest = (int)blockDim.x % w.run;
    for (step at = first_step(w, channel, channels); at.index < w.count; advance(at, w, planes, rest, channels))
        what(at.index, at.offset);
}

// Copies the thread's vectors of each tensor to shared memory, IN_FLIGHT loads at a time or as many of each.
template <int TENSORS, typename P>
__device__ __forceinline__ void keep(P *const (&kept)[TENSORS], const P *const (&tensors)[TENSORS], const walk &w,
                                     int64_t channel, int64_t channels)
{
    constexpr int EACH = TENSORS == 1 ? IN_FLIGHT : IN_FLIGHT_OF_TWO;
    const int planes = (int)blockDim.x / w.run, rest = (int)blockDim.x % w.run;
    step at = first_step(w, channel, channels);
    while (at.index < w.count) {
        const int first = at.index;
        P value[EACH][TENSORS];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (at.index < w.count)
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    value[k][t] = tensors[t][at.offset];
            advance(at, w, planes, rest, channels);
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (first + k * (int)blockDim.x < w.count)
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    kept[t][first + k * (int)blockDim.x] = value[k][t];
    }
}

// Sums over the block, which every thread gets. Its warps are a power of two; `scratch` is not used again.
template <int COUNT>
__device__ __forceinline__ void block_totals(double (&values)[COUNT],
                                             double (&scratch)[COUNT][MOST_THREADS / WARP_SIZE])
{
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = warp_sum(values[k]);
    if (lane == 0)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            scratch[k][threadIdx.x / WARP_SIZE] = values[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = scratch[k][lane % warps];
    for (int offset = warps / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            values[k] += __shfl_xor_sync(FULL_WARP, values[k], offset);
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    resident_forward_kernel(T *output, double *mean, double *variance, const __grid_constant__ RunningUpdate running,
                            const T *input, const void *weight, const void *bias, int64_t outer, int64_t channels,
                            walk w, double eps, double inverse_count, cuda_ops_dtype parameter_dtype)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, WIDTH> P;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ double of_sum[1][MOST_THREADS / WARP_SIZE], of_squares[1][MOST_THREADS / WARP_SIZE];
    __shared__ ForwardFactors<A> factors;
    P *const kept = (P *)shared;
    const int64_t channel = blockIdx.x, inner = (int64_t)w.run * WIDTH;
    wait_for_predecessor();
    release_successor();
    const ChannelValues values = load_forward_values(weight, bias, parameter_dtype, running.statistics, channel);
    const T first = input[channel * inner], middle = input[(outer / 2 * channels + channel) * inner + inner / 2],
            last = input[((outer - 1) * channels + channel + 1) * inner - 1];
    keep<1>({kept}, {(const P *)input}, w, channel, channels);
    const A origin = middle_of(load_as_accumulate(first), load_as_accumulate(middle), load_as_accumulate(last));
    // A thread reads only what it wrote itself, so that no barrier is needed.
    A sum = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            sum += load_as_accumulate(kept[i].element[e]) - origin;
    double total[1] = {(double)sum};
    block_totals(total, of_sum);
    const double relative = total[0] * inverse_count;
    const A shift = (A)relative;
    A squares = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const A difference = load_as_accumulate(kept[i].element[e]) - origin - shift;
            squares += difference * difference;
        }
    double apart[1] = {(double)squares};
    block_totals(apart, of_squares);
    if (threadIdx.x < WARP_SIZE) {
        const double m = (double)origin + relative, biased = apart[0] * inverse_count;
        const ForwardFactors<A> made(m, biased, values.of(0), values.of(1), eps);
        const double old_mean = values.of(2), old_variance = values.of(3);
        if (threadIdx.x == 0) {
            factors = made;
            mean[channel] = m;
            variance[channel] = biased;
            running.update(channel, m, biased, old_mean, old_variance);
        }
    }
    __syncthreads();
    const ForwardFactors<A> f = factors;
    for_vectors(w, channel, channels, [&](int index, int64_t offset) {
        P y;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            y.element[e] =
                store_from_accumulate<T>((load_as_accumulate(kept[index].element[e]) - f.center) * f.scale + f.offset);
        ((P *)output)[offset] = y;
    });
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    resident_backward_kernel(T *grad_input, void *grad_weight, void *grad_bias, const T *grad_output, const T *input,
                             const void *weight, const void *mean, const void *variance, int64_t channels, walk w,
                             double eps, double inverse_count, cuda_ops_dtype parameter_dtype,
                             cuda_ops_dtype statistics_dtype)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, WIDTH> P;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ double scratch[2][MOST_THREADS / WARP_SIZE];
    __shared__ BackwardFactors<A> factors;
    P *const kept_input = (P *)shared, *const kept_grad = kept_input + w.count;
    const int64_t channel = blockIdx.x;
    wait_for_predecessor();
    release_successor();
    const ChannelValues values =
        load_backward_values(weight, parameter_dtype, mean, variance, statistics_dtype, channel);
    keep<2>({kept_grad, kept_input}, {(const P *)grad_output, (const P *)input}, w, channel, channels);
    const double m = values.of(1);
    const A center = (A)m;
    A sum = A(0), products = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const A g = load_as_accumulate(kept_grad[i].element[e]);
            sum += g;
            products += g * (load_as_accumulate(kept_input[i].element[e]) - center);
        }
    double totals[2] = {(double)sum, (double)products};
    block_totals(totals, scratch);
    if (threadIdx.x < WARP_SIZE) {
        double dot;
        const BackwardFactors<A> made(totals[0], totals[1], m, values.of(2), values.of(0), eps, inverse_count, &dot);
        if (threadIdx.x == 0) {
            factors = made;
            if (grad_weight) {
                store_value(grad_weight, parameter_dtype, channel, dot);
                store_value(grad_bias, parameter_dtype, channel, totals[0]);
            }
        }
    }
    __syncthreads();
    const BackwardFactors<A> f = factors;
    for_vectors(w, channel, channels, [&](int index, int64_t offset) {
        P y;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            y.element[e] = store_from_accumulate<T>(
                load_as_accumulate(kept_grad[index].element[e]) * f.scale +
                (load_as_accumulate(kept_input[index].element[e]) - center) * f.slope + f.offset);
        ((P *)grad_input)[offset] = y;
    });
}

Answer batch_norm_resident_supports(const NormCall &call, const Device &device)
{
    const bool backward = call.pass == CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD;
    if (!backward && call.pass != CUDA_OPS_BATCH_NORM_TRAINING)
        return no("takes only training");
    if (call.epilogue)
        return no("has no activation and no residual");
    if (!call.wants_output)
        return no("does not take calls for the values by channel only");
    // With channels innermost a channel's values are not contiguous.
    if (call.inner <= 1 || call.channels > INT32_MAX)
        return no("a channel's values are not contiguous (channels_last, or no spatial dimensions)");
    // Values of input, and in backward of grad_output as well. The scratch is in shared memory too.
    const int64_t limit = (device.shared_bytes - STATIC_BYTES) / ((backward ? 2 : 1) * dtype_size(call.dtype));
    return call.outer <= limit / call.inner ? YES : no("a channel does not fit into the shared memory of one block");
}

// Enough for all of a channel's loads to be in flight at once, and more, up to a thread for every vector, while all
// channels still run at once: a second round of blocks takes as long as the first. Blocks of 256 threads overlap better
// than those of 512, where shared memory has room for four.
static unsigned int threads_for(const walk &w, int64_t channels, int bytes, int in_flight, int width,
                                const Device &device)
{
    const int least = width > 1 ? 1 : 2; // single elements of a thread, more or less
    const int64_t room = (int64_t)device.multiprocessors * ROUND_THREADS;
    int threads = LEAST_THREADS;
    while (threads < MOST_THREADS && threads * least < w.count) {
        const bool wants_more = threads * in_flight < w.count && (threads < MOST_THREADS / 2 || bytes > QUARTER_BYTES);
        if (!wants_more && channels * threads * 2 > room)
            break;
        threads *= 2;
    }
    return (unsigned int)threads;
}

// The widest vectors to which all planes at these addresses are aligned, in bytes: 16, 8, or 1 for one element.
static int vector_bytes(int64_t inner_bytes, const void *a, const void *b, const void *c)
{
    const uintptr_t low = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)inner_bytes;
    return low % 16 == 0 ? 16 : low % 8 == 0 ? 8 : 1;
}

// Elements in a vector of so many bytes.
template <typename T, int BYTES>
static constexpr int WIDTH_OF = BYTES > (int)sizeof(T) ? BYTES / (int)sizeof(T) : 1;

template <typename T, int BYTES>
static void launch_forward(const NormCall &call, const Device &device)
{
    constexpr int WIDTH = WIDTH_OF<T, BYTES>;
    const int64_t count = call.outer * call.inner;
    const walk w = {(int)(count / WIDTH), (int)(call.inner / WIDTH)};
    const int bytes = (int)count * (int)sizeof(T);
    allow_shared_memory(resident_forward_kernel<T, WIDTH>, bytes);
    launch_dependent(resident_forward_kernel<T, WIDTH>, dim3((unsigned int)call.channels),
                     dim3(threads_for(w, call.channels, bytes, IN_FLIGHT, WIDTH, device)), bytes, call.stream,
                     (T *)call.output, call.new_mean, call.new_variance, running_update_of(call), (const T *)call.input,
                     call.weight, call.bias, call.outer, call.channels, w, call.eps, 1.0 / (double)count,
                     call.parameter_dtype);
}

template <typename T, int BYTES>
static void launch_backward(const NormCall &call, const Device &device)
{
    constexpr int WIDTH = WIDTH_OF<T, BYTES>;
    const int64_t count = call.outer * call.inner;
    const walk w = {(int)(count / WIDTH), (int)(call.inner / WIDTH)};
    const int bytes = 2 * (int)count * (int)sizeof(T);
    allow_shared_memory(resident_backward_kernel<T, WIDTH>, bytes);
    launch_dependent(resident_backward_kernel<T, WIDTH>, dim3((unsigned int)call.channels),
                     dim3(threads_for(w, call.channels, bytes, IN_FLIGHT_OF_TWO, WIDTH, device)), bytes, call.stream,
                     (T *)call.grad_input, call.grad_weight, call.grad_bias, (const T *)call.grad_output,
                     (const T *)call.input, call.weight, call.mean, call.variance, call.channels, w, call.eps,
                     1.0 / (double)count, call.parameter_dtype, call.statistics_dtype);
}

cuda_ops_status batch_norm_resident(const NormCall &call, const Device &device)
{
    const int64_t inner_bytes = call.inner * dtype_size(call.dtype);
    if (call.pass == CUDA_OPS_BATCH_NORM_TRAINING) {
        const int bytes = vector_bytes(inner_bytes, call.output, call.input, nullptr);
        CUDA_OPS_DISPATCH(call.dtype, T,
                          const auto launch = bytes == 16  ? launch_forward<T, 16>
                                              : bytes == 8 ? launch_forward<T, 8>
                                                           : launch_forward<T, 1>;
                          launch(call, device));
        return launch_status();
    }
    const int bytes = vector_bytes(inner_bytes, call.grad_input, call.grad_output, call.input);
    CUDA_OPS_DISPATCH(call.dtype, T,
                      const auto launch = bytes == 16  ? launch_backward<T, 16>
                                          : bytes == 8 ? launch_backward<T, 8>
                                                       : launch_backward<T, 1>;
                      launch(call, device));
    return launch_status();
}
