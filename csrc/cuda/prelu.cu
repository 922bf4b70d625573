// prelu: output = input > 0 ? input : weight[c] * input; grad_input = input > 0 ? grad_output : weight[c] * grad_output,
// grad_weight[c] = the sum of input * grad_output where input is not above 0. Forward: 16 bytes a thread. Backward writes
// grad_input and adds up in the same pass: a block has a part of one channel's elements, or where channels are innermost
// some rows of neighbouring channels; a second kernel adds the parts, a warp a channel, in a fixed order. Bound by memory:
// one read and one write forward, two reads and one write backward.
#include "cuda_ops/prelu.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/group_sums.cuh"
#include "common/wide_division.cuh"

static constexpr int THREADS = 256;
static constexpr int IN_FLIGHT = 4; // vectors of a thread
// Blocks of backward, about; a constant, so that sums are cut alike on every device.
static constexpr int64_t WANTED_BLOCKS = 132 * 8;
static constexpr int WIDEST = 64; // vectors across, of rows of channels

struct PreluPlan {
    int64_t count, channels, inner;
    Divider by_inner, by_channels;
    // Backward. A channel's vectors are `runs` of `run` (its elements, if channels is 1, with `tail` left over), of which
    // a block has `step`; or rows of channels, of which a block has `step`, and `across` vectors of each.
    int64_t runs, run, tail, parts, step, tiles;
    Divider by_run;
    int across;
    bool by_rows;
};

static PreluPlan plan_prelu(int64_t outer, int64_t channels, int64_t inner, int count)
{
    if (channels == 1) { // one run
        inner *= outer;
        outer = 1;
    }
    PreluPlan plan = {};
    plan.count = outer * channels * inner;
    plan.channels = channels;
    plan.inner = inner;
    plan.by_inner = wide_divider_by(inner);
    plan.by_channels = wide_divider_by(channels);
    plan.by_rows = inner == 1 && channels > 1;
    plan.across = 1;
    if (plan.by_rows) {
        const int64_t width = channels / count;
        while (plan.across < WIDEST && plan.across < width)
            plan.across *= 2;
        plan.tiles = ceil_div(width, plan.across);
        const int64_t height = THREADS / plan.across, useful = ceil_div(outer, height * IN_FLIGHT);
        const int64_t wanted = ceil_div(WANTED_BLOCKS, plan.tiles);
        plan.step = ceil_div(outer, useful < wanted ? useful : wanted);
        plan.parts = ceil_div(outer, plan.step);
        return plan;
    }
    plan.run = inner / count;
    plan.tail = inner % count;
    plan.runs = outer;
    plan.by_run = wide_divider_by(plan.run > 0 ? plan.run : 1);
    const int64_t vectors = plan.run * plan.runs, useful = ceil_div(vectors, THREADS * IN_FLIGHT);
    const int64_t wanted = ceil_div(WANTED_BLOCKS, channels), parts = useful < wanted ? useful : wanted;
    plan.step = parts > 0 ? ceil_div(vectors, parts) : 1;
    plan.parts = vectors > 0 ? ceil_div(vectors, plan.step) : 1;
    return plan;
}

// Vectors of these arrays are 16 bytes of one channel, or of neighbouring ones, or single elements.
template <typename T>
static int vector_size(int64_t channels, int64_t inner, bool aligned)
{
    constexpr int SIZE = vector16<T>::size;
    const bool whole = channels == 1 || (inner == 1 ? channels : inner) % SIZE == 0;
    return aligned && whole ? SIZE : 1;
}

// A vector may reach from one channel into the next ones.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    prelu_forward_kernel(T *output, const T *input, const T *weight, const __grid_constant__ PreluPlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    wait_for_predecessor();
    release_successor();
    for (int64_t vector = global_thread_index(); vector * COUNT < plan.count; vector += global_thread_count()) {
        const int64_t at = vector * COUNT, run = divided(at, plan.inner, plan.by_inner);
        int64_t channel = run - divided(run, plan.channels, plan.by_channels) * plan.channels;
        int64_t left = plan.inner - (at - run * plan.inner); // of the channel's elements
        A slope = load_as_accumulate(weight[channel]);
        const auto apply = [&](A x) {
            if (left == 0) {
                channel = channel + 1 < plan.channels ? channel + 1 : 0;
                left = plan.inner;
                slope = load_as_accumulate(weight[channel]);
            }
            left--;
            return x > A(0) ? x : slope * x;
        };
        if (at + COUNT <= plan.count) {
            const V x = *reinterpret_cast<const V *>(input + at);
            A y[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                y[e] = apply(element_of(x, e));
            *reinterpret_cast<V *>(output + at) = vector_of<T>(y);
        } else {
            for (int64_t i = at; i < plan.count; i++)
                output[i] = store_from_accumulate<T>(apply(load_as_accumulate(input[i])));
        }
    }
}

// Adds the weight's part of the gradient, and returns the input's.
template <typename A>
__device__ __forceinline__ A backward_of(A x, A grad, A slope, A &sum)
{
    sum += x > A(0) ? A(0) : x * grad;
    return x > A(0) ? grad : slope * grad;
}

template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    prelu_backward_kernel(T *grad_input, accumulate_type<T> *partials, const T *grad_output, const T *input,
                          const T *weight, const __grid_constant__ PreluPlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    __shared__ A scratch[WARP_SIZE];
    for (int64_t unit = blockIdx.x; unit < plan.channels * plan.parts; unit += gridDim.x) {
        const int64_t channel = unit / plan.parts, part = unit - channel * plan.parts;
        const int64_t begin = part * plan.step, vectors = plan.run * plan.runs;
        const int64_t end = begin + plan.step < vectors ? begin + plan.step : vectors;
        const A slope = load_as_accumulate(weight[channel]);
        A sum = 0;
        for (int64_t first = begin + threadIdx.x; first < end; first += IN_FLIGHT * THREADS) {
            V x[IN_FLIGHT], g[IN_FLIGHT];
            int64_t at[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
                const int64_t vector = first + k * THREADS;
                at[k] = vector < end ? vector : -1;
                if (vector < end && plan.channels > 1) {
                    const int64_t run = divided(vector, plan.run, plan.by_run);
                    at[k] = (run * plan.channels + channel) * plan.run + vector - run * plan.run;
                }
                if (at[k] >= 0) {
                    x[k] = reinterpret_cast<const V *>(input)[at[k]];
                    g[k] = reinterpret_cast<const V *>(grad_output)[at[k]];
                }
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
                if (at[k] < 0)
                    break;
                A y[COUNT], part_sum = 0;
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    y[e] = backward_of(element_of(x[k], e), element_of(g[k], e), slope, part_sum);
                sum += part_sum;
                store_vector(reinterpret_cast<V *>(grad_input) + at[k], vector_of<T>(y));
            }
        }
        if (part == plan.parts - 1 && threadIdx.x < plan.tail) { // of one channel
            const int64_t at = plan.count - plan.tail + threadIdx.x;
            grad_input[at] = store_from_accumulate<T>(
                backward_of(load_as_accumulate(input[at]), load_as_accumulate(grad_output[at]), slope, sum));
        }
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0)
            partials[unit] = sum;
    }
}

template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    prelu_backward_rows_kernel(T *grad_input, accumulate_type<T> *partials, const T *grad_output, const T *input,
                               const T *weight, const __grid_constant__ PreluPlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    __shared__ A kept[COUNT][THREADS];
    const int column = threadIdx.x % plan.across, down = threadIdx.x / plan.across, height = THREADS / plan.across;
    const int64_t rows = plan.count / plan.channels, width = plan.channels / COUNT;
    for (int64_t unit = blockIdx.x; unit < plan.tiles * plan.parts; unit += gridDim.x) {
        const int64_t part = unit / plan.tiles, vector = (unit - part * plan.tiles) * plan.across + column;
        const int64_t end = (part + 1) * plan.step < rows ? (part + 1) * plan.step : rows;
        A sum[COUNT] = {};
        if (vector < width) {
            const V slopes = reinterpret_cast<const V *>(weight)[vector];
            for (int64_t row = part * plan.step + down; row < end; row += IN_FLIGHT * height) {
                V x[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    if (row + k * height < end) {
                        x[k] = reinterpret_cast<const V *>(input)[(row + k * height) * width + vector];
                        g[k] = reinterpret_cast<const V *>(grad_output)[(row + k * height) * width + vector];
                    }
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    if (row + k * height >= end)
                        break;
                    A y[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        y[e] = backward_of(element_of(x[k], e), element_of(g[k], e), element_of(slopes, e), sum[e]);
                    store_vector(reinterpret_cast<V *>(grad_input) + (row + k * height) * width + vector,
                                 vector_of<T>(y));
                }
            }
        }
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            kept[e][threadIdx.x] = sum[e];
        add_groups(down, height, [&](int half) {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                kept[e][threadIdx.x] += kept[e][threadIdx.x + half * plan.across];
        });
        if (down == 0 && vector < width)
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                partials[(vector * COUNT + e) * plan.parts + part] = kept[e][threadIdx.x];
        __syncthreads(); // before the next sums overwrite these
    }
}

// grad_weight[c] = the sum of the channel's parts.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    prelu_weight_kernel(T *grad_weight, const accumulate_type<T> *partials, int64_t channels, int64_t parts)
{
    typedef accumulate_type<T> A;
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t channel = global_thread_index() / WARP_SIZE; channel < channels;
         channel += global_thread_count() / WARP_SIZE) {
        A sum = 0;
#pragma unroll 4
        for (int64_t part = lane; part < parts; part += WARP_SIZE)
            sum += partials[channel * parts + part];
        sum = warp_sum(sum);
        if (lane == 0)
            grad_weight[channel] = store_from_accumulate<T>(sum);
    }
}

template <typename T, int COUNT>
static cuda_ops_status launch_backward(T *grad_input, T *grad_weight, void *workspace, const T *grad_output,
                                       const T *input, const T *weight, const PreluPlan &plan, cudaStream_t stream)
{
    accumulate_type<T> *const partials = (accumulate_type<T> *)workspace;
    if (plan.by_rows)
        prelu_backward_rows_kernel<T, COUNT><<<clamp_grid(plan.tiles * plan.parts), THREADS, 0, stream>>>(
            grad_input, partials, grad_output, input, weight, plan);
    else
        prelu_backward_kernel<T, COUNT><<<clamp_grid(plan.channels * plan.parts), THREADS, 0, stream>>>(
            grad_input, partials, grad_output, input, weight, plan);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    prelu_weight_kernel<<<clamp_grid(ceil_div(plan.channels, THREADS / WARP_SIZE)), THREADS, 0, stream>>>(
        grad_weight, partials, plan.channels, plan.parts);
    return launch_status();
}

template <typename T>
static cuda_ops_status prelu_backward(T *grad_input, T *grad_weight, void *workspace, const T *grad_output,
                                      const T *input, const T *weight, int64_t outer, int64_t channels, int64_t inner,
                                      cudaStream_t stream)
{
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(input) &&
                         (inner > 1 || is_aligned_16(weight));
    const int size = vector_size<T>(channels, inner, aligned);
    const PreluPlan plan = plan_prelu(outer, channels, inner, size);
    if (size > 1)
        return launch_backward<T, vector16<T>::size>(grad_input, grad_weight, workspace, grad_output, input, weight,
                                                     plan, stream);
    return launch_backward<T, 1>(grad_input, grad_weight, workspace, grad_output, input, weight, plan, stream);
}

template <typename T>
static cuda_ops_status prelu_forward(T *output, const T *input, const T *weight, int64_t outer, int64_t channels,
                                     int64_t inner, cudaStream_t stream)
{
    const int size = is_aligned_16(output) && is_aligned_16(input) ? vector16<T>::size : 1;
    const PreluPlan plan = plan_prelu(outer, channels, inner, 1);
    const dim3 grid(clamp_grid(ceil_div(ceil_div(plan.count, size), THREADS)));
    launch_dependent(size > 1 ? prelu_forward_kernel<T, vector16<T>::size> : prelu_forward_kernel<T, 1>, grid,
                     dim3(THREADS), 0, stream, output, input, weight, plan);
    return launch_status();
}

extern "C" int64_t cuda_ops_prelu_workspace_cuda(int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype)
{
    // Arrays that turn out not to be aligned, or no whole vectors, are cut differently.
    int64_t most = 0;
    for (int count : {(int)(16 / dtype_size(dtype)), 1}) {
        if (outer * channels * inner == 0 ||
            (count > 1 && channels > 1 && (inner == 1 ? channels : inner) % count != 0))
            continue;
        const int64_t sums = channels * plan_prelu(outer, channels, inner, count).parts;
        most = sums > most ? sums : most;
    }
    return most * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

extern "C" cuda_ops_status cuda_ops_prelu_forward_cuda(void *output, const void *input, const void *weight,
                                                       int64_t outer, int64_t channels, int64_t inner,
                                                       cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer * channels * inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return prelu_forward((T *)output, (const T *)input, (const T *)weight, outer, channels, inner, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_prelu_backward_cuda(void *grad_input, void *grad_weight, void *workspace,
                                                        const void *grad_output, const void *input, const void *weight,
                                                        int64_t outer, int64_t channels, int64_t inner,
                                                        cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (channels == 0)
        return CUDA_OPS_SUCCESS;
    if (outer * inner == 0) {
        cudaMemsetAsync(grad_weight, 0, (size_t)(channels * dtype_size(dtype)), stream);
        return launch_status();
    }
    CUDA_OPS_DISPATCH(dtype, T,
                      return prelu_backward((T *)grad_input, (T *)grad_weight, workspace, (const T *)grad_output,
                                            (const T *)input, (const T *)weight, outer, channels, inner, stream));
    return CUDA_OPS_SUCCESS;
}
