// batch_norm where a channel fits into the shared memory of one block: one kernel a pass (batch_norm.cu has the
// formulas), instead of split.cu's three, each of which waits for the one before.
// A block loads its channel by aligned vectors into shared memory, adds its values up, and writes the result from
// shared memory: forward reads input once and writes output; backward reads input and grad_output once and writes
// grad_input. The variance is the mean of squared differences from the mean, in a second pass over the kept values. The
// mean is taken relative to one of the values, for split.cu's reasons; threads' sums are added in double, in a fixed
// order.
// Bound by latency where channels are few, since an SM has only one block's loads in flight, and by memory beyond.
#include "batch_norm/paths.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/value.cuh"

static constexpr int MOST_THREADS = 512;
static constexpr int LEAST_THREADS = 64;
// Loads that a thread has in flight.
static constexpr int IN_FLIGHT = 5;

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

// Copies the thread's vectors to shared memory, IN_FLIGHT loads at a time.
template <typename P>
__device__ __forceinline__ void keep(P *kept, const P *tensor, const walk &w, int64_t channel, int64_t channels)
{
    const int planes = (int)blockDim.x / w.run, rest = (int)blockDim.x % w.run;
    step at = first_step(w, channel, channels);
    while (at.index < w.count) {
        const int first = at.index;
        P value[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (at.index < w.count)
                value[k] = tensor[at.offset];
            advance(at, w, planes, rest, channels);
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * (int)blockDim.x < w.count)
                kept[first + k * (int)blockDim.x] = value[k];
    }
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    resident_forward_kernel(T *output, double *mean, double *variance, const T *input, const void *weight,
                            const void *bias, int64_t outer, int64_t channels, walk w, double eps,
                            cuda_ops_dtype parameter_dtype)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, WIDTH> P;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ double scratch[WARP_SIZE];
    P *const kept = (P *)shared;
    const int64_t channel = blockIdx.x, inner = (int64_t)w.run * WIDTH;
    const A origin = middle_of(load_as_accumulate(input[channel * inner]),
                               load_as_accumulate(input[(outer / 2 * channels + channel) * inner + inner / 2]),
                               load_as_accumulate(input[((outer - 1) * channels + channel + 1) * inner - 1]));
    const double count = (double)(outer * inner);

    keep(kept, (const P *)input, w, channel, channels);
    // A thread reads only what it wrote itself, so that no barrier is needed.
    A sum = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            sum += load_as_accumulate(kept[i].element[e]) - origin;
    const double relative = block_sum((double)sum, scratch) / count;
    const A shift = (A)relative;
    A squares = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const A difference = load_as_accumulate(kept[i].element[e]) - origin - shift;
            squares += difference * difference;
        }
    const double m = (double)origin + relative;
    const double biased = block_sum((double)squares, scratch) / count;
    if (threadIdx.x == 0) {
        mean[channel] = m;
        variance[channel] = biased;
    }

    const double gain = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) / sqrt(biased + eps);
    const double lift = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
    const A center = (A)m, scale = (A)gain, rest = (A)(lift - (m - (double)center) * gain);
    for_vectors(w, channel, channels, [&](int index, int64_t offset) {
        P y;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            y.element[e] =
                store_from_accumulate<T>((load_as_accumulate(kept[index].element[e]) - center) * scale + rest);
        ((P *)output)[offset] = y;
    });
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    resident_backward_kernel(T *grad_input, void *grad_weight, void *grad_bias, const T *grad_output, const T *input,
                             const void *weight, const void *mean, const void *variance, int64_t outer,
                             int64_t channels, walk w, double eps, cuda_ops_dtype parameter_dtype,
                             cuda_ops_dtype statistics_dtype)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, WIDTH> P;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ double scratch[WARP_SIZE];
    P *const kept_input = (P *)shared, *const kept_grad = kept_input + w.count;
    const int64_t channel = blockIdx.x, inner = (int64_t)w.run * WIDTH;
    keep(kept_grad, (const P *)grad_output, w, channel, channels);
    keep(kept_input, (const P *)input, w, channel, channels);
    const double m = load_value(mean, statistics_dtype, channel);
    const double rstd = 1.0 / sqrt(load_value(variance, statistics_dtype, channel) + eps);
    const double gain = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) * rstd;
    const A center = (A)m;
    A sum = A(0), products = A(0);
    for (int i = (int)threadIdx.x; i < w.count; i += (int)blockDim.x)
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const A g = load_as_accumulate(kept_grad[i].element[e]);
            sum += g;
            products += g * (load_as_accumulate(kept_input[i].element[e]) - center);
        }
    const double total = block_sum((double)sum, scratch);
    // center is the mean rounded to float; the product is corrected for the difference.
    const double rounding = m - (double)center, count = (double)(outer * inner);
    const double dot = (block_sum((double)products, scratch) - rounding * total) * rstd;
    if (threadIdx.x == 0 && grad_weight) {
        store_value(grad_weight, parameter_dtype, channel, dot);
        store_value(grad_bias, parameter_dtype, channel, total);
    }
    const double tilt = -gain * rstd * dot / count;
    const A scale = (A)gain, slope = (A)tilt, rest = (A)(-gain * total / count - tilt * rounding);
    for_vectors(w, channel, channels, [&](int index, int64_t offset) {
        P y;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            y.element[e] =
                store_from_accumulate<T>(load_as_accumulate(kept_grad[index].element[e]) * scale +
                                         (load_as_accumulate(kept_input[index].element[e]) - center) * slope + rest);
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
    const int64_t limit =
        (device.shared_bytes - (int)sizeof(double) * WARP_SIZE) / ((backward ? 2 : 1) * dtype_size(call.dtype));
    return call.outer <= limit / call.inner ? YES : no("a channel does not fit into the shared memory of one block");
}

// A thread for every vector, within the limits.
static unsigned int threads_for(const walk &w)
{
    int threads = LEAST_THREADS;
    while (threads < MOST_THREADS && threads < w.count)
        threads *= 2;
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
static void launch_forward(void *output, double *mean, double *variance, const void *input, const void *weight,
                           const void *bias, int64_t outer, int64_t channels, int64_t inner, double eps,
                           cuda_ops_dtype parameter_dtype, cudaStream_t stream)
{
    constexpr int WIDTH = WIDTH_OF<T, BYTES>;
    const walk w = {(int)(outer * inner / WIDTH), (int)(inner / WIDTH)};
    const int bytes = (int)(outer * inner) * (int)sizeof(T);
    allow_shared_memory(resident_forward_kernel<T, WIDTH>, bytes);
    resident_forward_kernel<T, WIDTH><<<(unsigned int)channels, threads_for(w), bytes, stream>>>(
        (T *)output, mean, variance, (const T *)input, weight, bias, outer, channels, w, eps, parameter_dtype);
}

template <typename T, int BYTES>
static void launch_backward(void *grad_input, void *grad_weight, void *grad_bias, const void *grad_output,
                            const void *input, const void *weight, const void *mean, const void *variance,
                            int64_t outer, int64_t channels, int64_t inner, double eps, cuda_ops_dtype parameter_dtype,
                            cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    constexpr int WIDTH = WIDTH_OF<T, BYTES>;
    const walk w = {(int)(outer * inner / WIDTH), (int)(inner / WIDTH)};
    const int bytes = 2 * (int)(outer * inner) * (int)sizeof(T);
    allow_shared_memory(resident_backward_kernel<T, WIDTH>, bytes);
    resident_backward_kernel<T, WIDTH><<<(unsigned int)channels, threads_for(w), bytes, stream>>>(
        (T *)grad_input, grad_weight, grad_bias, (const T *)grad_output, (const T *)input, weight, mean, variance,
        outer, channels, w, eps, parameter_dtype, statistics_dtype);
}

cuda_ops_status batch_norm_resident(const NormCall &call, const Device &)
{
    const int64_t inner_bytes = call.inner * dtype_size(call.dtype);
    if (call.pass == CUDA_OPS_BATCH_NORM_TRAINING) {
        const int bytes = vector_bytes(inner_bytes, call.output, call.input, nullptr);
        CUDA_OPS_DISPATCH(call.dtype, T,
                          const auto launch = bytes == 16  ? launch_forward<T, 16>
                                              : bytes == 8 ? launch_forward<T, 8>
                                                           : launch_forward<T, 1>;
                          launch(call.output, call.new_mean, call.new_variance, call.input, call.weight, call.bias,
                                 call.outer, call.channels, call.inner, call.eps, call.parameter_dtype, call.stream));
        return launch_status();
    }
    const int bytes = vector_bytes(inner_bytes, call.grad_input, call.grad_output, call.input);
    CUDA_OPS_DISPATCH(call.dtype, T,
                      const auto launch = bytes == 16  ? launch_backward<T, 16>
                                          : bytes == 8 ? launch_backward<T, 8>
                                                       : launch_backward<T, 1>;
                      launch(call.grad_input, call.grad_weight, call.grad_bias, call.grad_output, call.input,
                             call.weight, call.mean, call.variance, call.outer, call.channels, call.inner, call.eps,
                             call.parameter_dtype, call.statistics_dtype, call.stream));
    return launch_status();
}
