// batch_norm for channels of any size, in three kernels a pass (batch_norm.cu has the formulas). (1) A reduction: each
// channel is split among as many blocks as fill the GPU, and each block stores its partial result. (2) A block a channel
// merges these in a fixed order, in double, and writes the coefficients of (3), an elementwise kernel of one or two
// multiply-adds (coefficients.cuh). No atomics: results repeat bitwise.
// Variance: a thread takes CHUNK values at a time, computes their mean and squared differences from it, and merges them
// into its own (Chan's formula): one division a chunk, and no difference of large sums. Values are taken relative to
// one of their channel, which keeps the digits of a mean that is far larger than the deviation. For the same reason (3)
// computes (x - center) * scale + offset, where center is the mean rounded to float and offset corrects for that.
// Bound by memory: forward reads input twice and writes output; backward reads input and grad_output twice and writes
// grad_input. One file, since both passes share the partition, the merging and the elementwise loop.
// batch_norm_act: (3) of forward adds the residual and applies the activation; (1) of backward computes the activation's
// argument anew, sums what it makes of it before that is rounded, and leaves it as grad_sum, which (3) reads. Where no
// sums are wanted, a kernel of its own leaves grad_sum.
#include "batch_norm/coefficients.cuh"
#include "batch_norm/epilogue.cuh"
#include "batch_norm/paths.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/elementwise.cuh"
#include "common/group_sums.cuh"
#include "common/moments.cuh"
#include "common/value.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
// Values that a thread has in flight, to hide the latency of memory.
static constexpr int CHUNK = 4;
// The longest part of a plane that a group of lanes takes at once; longer planes are several units of work.
static constexpr int64_t SEGMENT = 2048;
// A reduction has at least so many blocks, several for each multiprocessor, if there is work for them.
static constexpr int64_t WANTED_BLOCKS = 1024;
// A channel is split further where a thread would add more values than this in float.
static constexpr int64_t LONGEST_SUM = 64;

// How a reduction is spread over `tiles` * `splits` blocks.
struct partition {
    // inner > 1: a group of `lanes` threads reads one segment of a plane, and a tile is a channel.
    // inner = 1: a row of `lanes` threads reads neighbouring channels, and those are a tile.
    int lanes;
    int64_t tiles, splits;
    // What is split: segments of planes, or rows. A split takes `step` of them.
    int64_t units, step;
};

static partition partition_of(int64_t outer, int64_t channels, int64_t inner)
{
    const int64_t neighbours = inner == 1 ? channels : inner;
    partition p;
    p.lanes = 1;
    while (p.lanes < WARP_SIZE && p.lanes < neighbours)
        p.lanes *= 2;
    const int64_t groups = THREADS / p.lanes;
    p.tiles = inner == 1 ? ceil_div(channels, p.lanes) : channels;
    p.units = inner == 1 ? outer : outer * ceil_div(inner, SEGMENT);
    const int64_t to_fill = ceil_div(WANTED_BLOCKS, p.tiles);
    const int64_t values = inner == 1 ? outer * p.lanes : outer * inner; // of a tile
    const int64_t to_stay_short = ceil_div(values, THREADS * LONGEST_SUM);
    const int64_t useful = ceil_div(p.units, inner == 1 ? groups * CHUNK : groups);
    const int64_t wanted = to_fill > to_stay_short ? to_fill : to_stay_short;
    p.step = ceil_div(p.units, wanted < useful ? wanted : useful);
    p.splits = ceil_div(p.units, p.step); // each has at least one unit
    return p;
}

// Merges the first `count` of the values, 1 to CHUNK.
template <typename A>
__device__ __forceinline__ moments<A> add_chunk(const moments<A> &before, const A (&value)[CHUNK], int count)
{
    A sum = A(0);
#pragma unroll
    for (int k = 0; k < CHUNK; k++)
        sum += k < count ? value[k] : A(0);
    moments<A> chunk = {A(count), sum / A(count), A(0)};
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
        const A difference = k < count ? value[k] - chunk.mean : A(0);
        chunk.squares += difference * difference;
    }
    return merge(before, chunk);
}

// Moments of one split of one channel, for inner > 1. A plane is `segments` units.
template <typename T>
__global__ void moments_of_planes_kernel(double *partials, const T *input, int64_t channels, int64_t inner,
                                         int64_t segments, partition p)
{
    typedef accumulate_type<T> A;
    __shared__ moments<A> scratch[WARPS];
    const int64_t channel = blockIdx.x % channels, split = blockIdx.x / channels;
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const int64_t outer = p.units / segments;
    const A origin = middle_of(load_as_accumulate(input[channel * inner]),
                               load_as_accumulate(input[(outer / 2 * channels + channel) * inner + inner / 2]),
                               load_as_accumulate(input[((outer - 1) * channels + channel + 1) * inner - 1]));
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    moments<A> mine = {A(0), A(0), A(0)};
    for (int64_t unit = split * p.step + group; unit < end; unit += groups) {
        const int64_t start = unit % segments * SEGMENT;
        const T *x = input + (unit / segments * channels + channel) * inner + start;
        const int length = (int)(inner - start < SEGMENT ? inner - start : SEGMENT);
        for (int i = lane; i < length; i += p.lanes * CHUNK) {
            A value[CHUNK];
            int count = 0;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                const bool inside = i + k * p.lanes < length;
                value[k] = inside ? load_as_accumulate(x[i + k * p.lanes]) - origin : A(0);
                count += inside;
            }
            mine = add_chunk(mine, value, count);
        }
    }
    mine = warp_merge(mine);
    const int warp_lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    if (warp_lane == 0)
        scratch[warp] = mine;
    __syncthreads();
    if (warp > 0)
        return;
    const moments<A> none = {A(0), A(0), A(0)};
    mine = warp_merge(warp_lane < WARPS ? scratch[warp_lane] : none);
    if (warp_lane == 0) {
        double *partial = partials + (channel * p.splits + split) * PARTIAL;
        partial[0] = (double)mine.count;
        partial[1] = (double)origin + (double)mine.mean;
        partial[2] = (double)mine.squares;
    }
}

// Moments of one split of `lanes` neighbouring channels, for inner = 1.
template <typename T>
__global__ void moments_of_rows_kernel(double *partials, const T *input, int64_t channels, partition p)
{
    typedef accumulate_type<T> A;
    __shared__ moments<A> scratch[THREADS];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const int64_t channel = blockIdx.x % p.tiles * p.lanes + lane, split = blockIdx.x / p.tiles;
    const bool inside = channel < channels;
    const A origin = inside ? middle_of(load_as_accumulate(input[channel]),
                                        load_as_accumulate(input[p.units / 2 * channels + channel]),
                                        load_as_accumulate(input[(p.units - 1) * channels + channel]))
                            : A(0);
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    moments<A> mine = {A(0), A(0), A(0)};
    // Threads beyond the last channel have no values, but take part in the barriers below.
    for (int64_t row = split * p.step + group; inside && row < end; row += groups * CHUNK) {
        A value[CHUNK];
        int count = 0;
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int64_t r = row + (int64_t)k * groups;
            value[k] = r < end ? load_as_accumulate(input[r * channels + channel]) - origin : A(0);
            count += r < end;
        }
        mine = add_chunk(mine, value, count);
    }
    scratch[threadIdx.x] = mine;
    add_groups(group, groups, [&](int half) {
        scratch[threadIdx.x] = merge(scratch[threadIdx.x], scratch[threadIdx.x + half * p.lanes]);
    });
    if (group == 0 && inside) {
        double *partial = partials + (channel * p.splits + split) * PARTIAL;
        partial[0] = (double)scratch[threadIdx.x].count;
        partial[1] = (double)origin + (double)scratch[threadIdx.x].mean;
        partial[2] = (double)scratch[threadIdx.x].squares;
    }
}

// The channel of a flat index, and its offset in the plane; advanced from one element to the next without a division.
struct position {
    int64_t channel, offset;
};

__device__ __forceinline__ position position_of(int64_t index, int64_t channels, int64_t inner)
{
    const int64_t plane = index / inner;
    return {plane % channels, index - plane * inner};
}

// Returns whether this is another channel.
__device__ __forceinline__ bool advance(position &at, int64_t channels, int64_t inner)
{
    if (++at.offset < inner)
        return false;
    at.offset = 0;
    if (++at.channel == channels)
        at.channel = 0;
    return true;
}

// for_elements with the coefficients c = load(channel) of each element's channel: y's element e is element(x, e, c).
template <typename T, int INPUTS, typename Load, typename Element>
__device__ __forceinline__ void for_elements_of_channels(T *output, const T *const (&inputs)[INPUTS], int64_t count,
                                                         int64_t vectors, int64_t channels, int64_t inner, Load load,
                                                         Element element)
{
    for_elements(output, inputs, count, vectors, [&](int64_t first, const auto &x, auto &y) {
        position at = position_of(first, channels, inner);
        auto c = load(at.channel);
#pragma unroll
        for (int e = 0; e < y.size; e++) {
            y.element[e] = element(x, e, c);
            if (e + 1 < y.size && advance(at, channels, inner))
                c = load(at.channel);
        }
    });
}

template <typename T>
__global__ void normalize_kernel(T *output, const T *input, const accumulate_type<T> *coefficients, int64_t count,
                                 int64_t channels, int64_t inner, int64_t vectors)
{
    const T *const inputs[] = {input};
    for_elements_of_channels(
        output, inputs, count, vectors, channels, inner,
        [&](int64_t channel) { return load_forward(coefficients, channel, channels); },
        [](const auto &x, int e, const auto &c) { return normalize_element(x[0].element[e], c); });
}

// normalize_kernel of batch_norm_act.
template <typename T, bool RESIDUAL>
__global__ void normalize_act_kernel(T *output, const T *input, const accumulate_type<T> *coefficients, int64_t count,
                                     int64_t channels, int64_t inner, int64_t vectors,
                                     const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    const T *const inputs[] = {input, RESIDUAL ? epilogue.residual : input};
    for_elements_of_channels(
        output, inputs, count, vectors, channels, inner,
        [&](int64_t channel) { return load_forward(coefficients, channel, channels); },
        [&](const auto &x, int e, const auto &c) {
            A z[] = {(load_as_accumulate(x[0].element[e]) - c.center) * c.scale + c.offset};
            if (RESIDUAL)
                z[0] += load_as_accumulate(x[1].element[e]);
            epilogue.apply(z);
            return store_from_accumulate<T>(z[0]);
        });
}

// grad_sum = grad_output * f'(z), with the coefficients of forward.
template <typename T, bool RESIDUAL>
__global__ void gate_kernel(T *grad_sum, const T *grad_output, const T *input, const accumulate_type<T> *coefficients,
                            int64_t count, int64_t channels, int64_t inner, int64_t vectors,
                            const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    const T *const inputs[] = {grad_output, input, RESIDUAL ? epilogue.residual : input};
    for_elements_of_channels(
        grad_sum, inputs, count, vectors, channels, inner,
        [&](int64_t channel) { return load_forward(coefficients, channel, channels); },
        [&](const auto &x, int e, const auto &c) {
            A grad[] = {load_as_accumulate(x[0].element[e])};
            A z[] = {(load_as_accumulate(x[1].element[e]) - c.center) * c.scale + c.offset};
            if (RESIDUAL)
                z[0] += load_as_accumulate(x[2].element[e]);
            epilogue.gate(grad, z);
            return store_from_accumulate<T>(grad[0]);
        });
}

// What batch_norm_act's sums need beside batch_norm's: the place of grad_sum, and the coefficients of forward.
template <typename T>
struct Gate {
    T *grad_sum;
    const accumulate_type<T> *coefficients;
    Epilogue<T> epilogue;

    // grad = grad * f'(z), stored in grad_sum, of CHUNK elements from `first` at a distance of `step`, of which `count`
    // are there. centered: input - center.
    __device__ __forceinline__ void apply(accumulate_type<T> (&grad)[CHUNK],
                                          const accumulate_type<T> (&centered)[CHUNK],
                                          const forward_coefficients<accumulate_type<T>> &c, int64_t first,
                                          int64_t step, int count) const
    {
        accumulate_type<T> z[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            z[k] = centered[k] * c.scale + c.offset;
            if (epilogue.residual && k < count)
                z[k] += load_as_accumulate(epilogue.residual[first + k * step]);
        }
        epilogue.gate(grad, z);
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (k < count)
                grad_sum[first + k * step] = store_from_accumulate<T>(grad[k]);
    }
};

// Sums of grad_output (if ACT, times f'(z)) and of that times input - center, of one split of one channel, for
// inner > 1.
template <typename T, bool ACT>
__global__ void sums_of_planes_kernel(double *partials, const T *grad_output, const T *input, const void *mean,
                                      int64_t channels, int64_t inner, int64_t segments, partition p,
                                      cuda_ops_dtype statistics_dtype, const __grid_constant__ Gate<T> gate)
{
    typedef accumulate_type<T> A;
    __shared__ A scratch[WARP_SIZE];
    const int64_t channel = blockIdx.x % channels, split = blockIdx.x / channels;
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const A center = (A)load_value(mean, statistics_dtype, channel);
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    forward_coefficients<A> forward = {};
    if (ACT)
        forward = load_forward(gate.coefficients, channel, channels);
    A sum = A(0), products = A(0);
    for (int64_t unit = split * p.step + group; unit < end; unit += groups) {
        const int64_t start = unit % segments * SEGMENT;
        const int64_t offset = (unit / segments * channels + channel) * inner + start;
        const T *x = input + offset, *g = grad_output + offset;
        const int length = (int)(inner - start < SEGMENT ? inner - start : SEGMENT);
        for (int i = lane; i < length; i += p.lanes * CHUNK) {
            A grad[CHUNK], value[CHUNK];
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                const bool inside = i + k * p.lanes < length;
                grad[k] = inside ? load_as_accumulate(g[i + k * p.lanes]) : A(0);
                value[k] = inside ? load_as_accumulate(x[i + k * p.lanes]) - center : A(0);
            }
            if (ACT)
                gate.apply(grad, value, forward, offset + i, p.lanes, ceil_div(length - i, p.lanes));
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                sum += grad[k];
                products += grad[k] * value[k];
            }
        }
    }
    sum = block_sum(sum, scratch);
    products = block_sum(products, scratch);
    if (threadIdx.x == 0) {
        double *partial = partials + (channel * p.splits + split) * PARTIAL;
        partial[0] = (double)sum;
        partial[1] = (double)products;
    }
}

// The same of one split of `lanes` neighbouring channels, for inner = 1.
template <typename T, bool ACT>
__global__ void sums_of_rows_kernel(double *partials, const T *grad_output, const T *input, const void *mean,
                                    int64_t channels, partition p, cuda_ops_dtype statistics_dtype,
                                    const __grid_constant__ Gate<T> gate)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[THREADS], products[THREADS];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const int64_t channel = blockIdx.x % p.tiles * p.lanes + lane, split = blockIdx.x / p.tiles;
    const bool inside = channel < channels;
    const A center = inside ? (A)load_value(mean, statistics_dtype, channel) : A(0);
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    forward_coefficients<A> forward = {};
    if (ACT && inside)
        forward = load_forward(gate.coefficients, channel, channels);
    A sum = A(0), product = A(0);
    for (int64_t row = split * p.step + group; inside && row < end; row += groups * CHUNK) {
        A grad[CHUNK], value[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int64_t r = row + (int64_t)k * groups;
            grad[k] = r < end ? load_as_accumulate(grad_output[r * channels + channel]) : A(0);
            value[k] = r < end ? load_as_accumulate(input[r * channels + channel]) - center : A(0);
        }
        if (ACT)
            gate.apply(grad, value, forward, row * channels + channel, groups * channels,
                       (int)(end - row < groups * CHUNK ? ceil_div(end - row, (int64_t)groups) : CHUNK));
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            sum += grad[k];
            product += grad[k] * value[k];
        }
    }
    sums[threadIdx.x] = sum;
    products[threadIdx.x] = product;
    add_groups(group, groups, [&](int half) {
        sums[threadIdx.x] += sums[threadIdx.x + half * p.lanes];
        products[threadIdx.x] += products[threadIdx.x + half * p.lanes];
    });
    if (group == 0 && inside) {
        double *partial = partials + (channel * p.splits + split) * PARTIAL;
        partial[0] = (double)sums[threadIdx.x];
        partial[1] = (double)products[threadIdx.x];
    }
}

template <typename T>
__global__ void grad_input_training_kernel(T *grad_input, const T *grad_output, const T *input,
                                           const accumulate_type<T> *coefficients, int64_t count, int64_t channels,
                                           int64_t inner, int64_t vectors)
{
    const T *const inputs[] = {grad_output, input};
    for_elements_of_channels(
        grad_input, inputs, count, vectors, channels, inner,
        [&](int64_t channel) { return load_backward(coefficients, channel, channels); },
        [](const auto &x, int e, const auto &c) { return grad_element(x[0].element[e], x[1].element[e], c); });
}

template <typename T>
__global__ void grad_input_inference_kernel(T *grad_input, const T *grad_output, const accumulate_type<T> *coefficients,
                                            int64_t count, int64_t channels, int64_t inner, int64_t vectors)
{
    const T *const inputs[] = {grad_output};
    for_elements_of_channels(
        grad_input, inputs, count, vectors, channels, inner,
        [&](int64_t channel) { return load_backward(coefficients, channel, channels); },
        [](const auto &x, int e, const auto &c) { return grad_element(x[0].element[e], c); });
}

// Blocks of a reduction; the grid has one dimension, and is not clamped, since a block has barriers.
static bool fits_a_grid(const partition &p)
{
    return p.tiles <= INT32_MAX / p.splits;
}

template <typename T>
static cuda_ops_status normalize(T *output, const T *input, const accumulate_type<T> *coefficients, int64_t outer,
                                 int64_t channels, int64_t inner, const cuda_ops_batch_norm_epilogue *epilogue,
                                 cudaStream_t stream)
{
    const int64_t count = outer * channels * inner;
    if (epilogue) {
        const Epilogue<T> f = epilogue_of<T>(epilogue);
        const int64_t vectors = vectors_of(count, (const T *)output, input, f.residual);
        const auto kernel = f.residual ? normalize_act_kernel<T, true> : normalize_act_kernel<T, false>;
        kernel<<<elementwise_grid(count, vectors), ELEMENTWISE_THREADS, 0, stream>>>(output, input, coefficients, count,
                                                                                     channels, inner, vectors, f);
        return launch_status();
    }
    const int64_t vectors = vectors_of(count, (const T *)output, input);
    normalize_kernel<<<elementwise_grid(count, vectors), ELEMENTWISE_THREADS, 0, stream>>>(
        output, input, coefficients, count, channels, inner, vectors);
    return launch_status();
}

template <typename T>
static cuda_ops_status forward_training(T *output, double *mean, double *variance, void *workspace, const T *input,
                                        const void *weight, const void *bias, int64_t outer, int64_t channels,
                                        int64_t inner, double eps, const cuda_ops_batch_norm_epilogue *epilogue,
                                        cuda_ops_dtype parameter_dtype, const RunningUpdate &running,
                                        cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const partition p = partition_of(outer, channels, inner);
    if (!fits_a_grid(p))
        return CUDA_OPS_INVALID_ARGUMENT;
    double *partials = (double *)workspace;
    A *coefficients = coefficients_of<A>(workspace, p.splits, channels);
    const unsigned int blocks = (unsigned int)(p.tiles * p.splits);
    if (inner == 1)
        moments_of_rows_kernel<<<blocks, THREADS, 0, stream>>>(partials, input, channels, p);
    else
        moments_of_planes_kernel<<<blocks, THREADS, 0, stream>>>(partials, input, channels, inner,
                                                                 ceil_div(inner, SEGMENT), p);
    cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    prepare_training(mean, variance, coefficients, partials, weight, bias, channels, p.splits, eps, parameter_dtype,
                     running, stream);
    status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !output)
        return status;
    return normalize(output, input, coefficients, outer, channels, inner, epilogue, stream);
}

template <typename T>
static cuda_ops_status forward_inference(T *output, void *workspace, const T *input, const void *weight,
                                         const void *bias, const void *running_mean, const void *running_var,
                                         int64_t outer, int64_t channels, int64_t inner, double eps,
                                         const cuda_ops_batch_norm_epilogue *epilogue, cuda_ops_dtype parameter_dtype,
                                         cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    accumulate_type<T> *coefficients = (accumulate_type<T> *)workspace;
    prepare_inference(coefficients, weight, bias, running_mean, running_var, channels, eps, parameter_dtype,
                      statistics_dtype, stream);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    return normalize(output, input, coefficients, outer, channels, inner, epilogue, stream);
}

template <typename T>
static cuda_ops_status grad_input_of(T *grad_input, const T *grad_output, const T *input,
                                     const accumulate_type<T> *coefficients, int64_t outer, int64_t channels,
                                     int64_t inner, int training, cudaStream_t stream)
{
    const int64_t count = outer * channels * inner;
    const int64_t vectors = vectors_of(count, (const T *)grad_input, grad_output, input);
    const unsigned int grid = elementwise_grid(count, vectors);
    if (training)
        grad_input_training_kernel<<<grid, ELEMENTWISE_THREADS, 0, stream>>>(
            grad_input, grad_output, input, coefficients, count, channels, inner, vectors);
    else
        grad_input_inference_kernel<<<grid, ELEMENTWISE_THREADS, 0, stream>>>(grad_input, grad_output, coefficients,
                                                                              count, channels, inner, vectors);
    return launch_status();
}

// batch_norm_act's grad_sum, where no sums are made that leave it.
template <typename T>
static void gate_alone(const NormCall &call, const Gate<T> &gate)
{
    const int64_t count = call.outer * call.channels * call.inner;
    const T *const g = (const T *)call.grad_output, *const x = (const T *)call.input;
    const int64_t vectors = vectors_of(count, g, x, (const T *)gate.grad_sum, gate.epilogue.residual);
    const auto kernel = gate.epilogue.residual ? gate_kernel<T, true> : gate_kernel<T, false>;
    kernel<<<elementwise_grid(count, vectors), ELEMENTWISE_THREADS, 0, call.stream>>>(
        gate.grad_sum, g, x, gate.coefficients, count, call.channels, call.inner, vectors, gate.epilogue);
}

template <typename T, bool ACT>
static void sums(const NormCall &call, double *partials, const partition &p, const Gate<T> &gate)
{
    const unsigned int blocks = (unsigned int)(p.tiles * p.splits);
    const T *const g = (const T *)call.grad_output, *const x = (const T *)call.input;
    if (call.inner == 1)
        sums_of_rows_kernel<T, ACT><<<blocks, THREADS, 0, call.stream>>>(partials, g, x, call.mean, call.channels, p,
                                                                         call.statistics_dtype, gate);
    else
        sums_of_planes_kernel<T, ACT><<<blocks, THREADS, 0, call.stream>>>(partials, g, x, call.mean, call.channels,
                                                                           call.inner, ceil_div(call.inner, SEGMENT), p,
                                                                           call.statistics_dtype, gate);
}

template <typename T>
static cuda_ops_status backward(const NormCall &call)
{
    typedef accumulate_type<T> A;
    const partition p = partition_of(call.outer, call.channels, call.inner);
    if (!fits_a_grid(p))
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool training = call.pass == CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD, act = call.epilogue;
    const bool needs_sums = training || call.grad_weight;
    double *const partials = (double *)call.workspace;
    // Those of forward, until the sums are made; then those of backward.
    A *const coefficients = coefficients_of<A>(call.workspace, p.splits, call.channels);
    const Gate<T> gate = {(T *)call.grad_sum, coefficients, epilogue_of<T>(call.epilogue)};
    if (act)
        prepare_inference(coefficients, call.weight, call.bias, call.mean, call.variance, call.channels, call.eps,
                          call.parameter_dtype, call.statistics_dtype, call.stream);
    if (act && needs_sums)
        sums<T, true>(call, partials, p, gate);
    else if (act)
        gate_alone(call, gate);
    else if (needs_sums)
        sums<T, false>(call, partials, p, gate);
    cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    prepare_backward(call.grad_weight, call.grad_bias, coefficients, partials, call.weight, nullptr, call.mean,
                     call.variance, call.channels, needs_sums ? p.splits : 0, (double)(call.outer * call.inner),
                     call.eps, call.parameter_dtype, call.statistics_dtype, call.stream);
    status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !call.grad_input)
        return status;
    return grad_input_of((T *)call.grad_input, act ? (const T *)call.grad_sum : (const T *)call.grad_output,
                         (const T *)call.input, coefficients, call.outer, call.channels, call.inner, training,
                         call.stream);
}

int64_t batch_norm_split_workspace(const NormCall &call, const Device &)
{
    const partition p = partition_of(call.outer, call.channels, call.inner);
    return batch_norm_workspace_bytes(p.splits, call.channels);
}

cuda_ops_status batch_norm_split(const NormCall &call, const Device &)
{
    switch (call.pass) {
    case CUDA_OPS_BATCH_NORM_TRAINING:
        CUDA_OPS_DISPATCH(call.dtype, T,
                          return forward_training((T *)call.output, call.new_mean, call.new_variance, call.workspace,
                                                  (const T *)call.input, call.weight, call.bias, call.outer,
                                                  call.channels, call.inner, call.eps, call.epilogue,
                                                  call.parameter_dtype, running_update_of(call), call.stream));
        break;
    case CUDA_OPS_BATCH_NORM_INFERENCE:
        CUDA_OPS_DISPATCH(call.dtype, T,
                          return forward_inference((T *)call.output, call.workspace, (const T *)call.input, call.weight,
                                                   call.bias, call.mean, call.variance, call.outer, call.channels,
                                                   call.inner, call.eps, call.epilogue, call.parameter_dtype,
                                                   call.statistics_dtype, call.stream));
        break;
    default:
        CUDA_OPS_DISPATCH(call.dtype, T, return backward<T>(call));
        break;
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}
