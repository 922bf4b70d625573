// The kernel of layer_norm's and rms_norm's forward pass (forward.cu), and of group_norm's (group_norm/rows.cu), in which
// weight and bias belong to channels, runs of a row's elements.
#ifndef CUDA_OPS_LAYER_NORM_FORWARD_CUH
#define CUDA_OPS_LAYER_NORM_FORWARD_CUH

#include <type_traits>

#include "common/device.h"
#include "common/fast_division.cuh"
#include "cuda_ops/dropout.h"
#include "layer_norm/paths.h"
#include "layer_norm/rows.cuh"

static constexpr int MOST_THREADS = 512;

// H: of output, and of what is added to the residual: T, or a half beside float.
template <typename T, typename H = T>
struct ForwardRows {
    typedef accumulate_type<T> A;
    H *output;
    T *sum;
    double *mean;
    A *rstd;
    int64_t *state;
    uint8_t *mask;     // a bit an element, where vectors have eight
    const void *input; // of H's where a residual is added, else of T's
    const T *residual;
    const void *weight, *bias;
    int64_t rows;
    int cols, threads, cluster;
    A eps, inverse_cols, scale; // scale: of what dropout leaves
    uint32_t threshold;
    bool rms, full_parameters, drops;
    cuda_ops_philox_state philox;
    // group_norm's: rows are groups of channels, `length` elements each
    double *variance;
    int64_t groups, group_channels;
    int length;
    Divider by_length;
};

// Which of elements `at` to at + COUNT - 1 of the tensor dropout keeps, as dropout.cu does: bit e for the e-th. Each of
// Philox's counters is for four elements. A vector starts at a multiple of COUNT.
template <int COUNT>
__device__ __forceinline__ uint32_t draw_kept(int64_t at, uint64_t seed, uint64_t offset, uint32_t threshold)
{
    constexpr int PART = COUNT < 4 ? COUNT : 4;
    uint32_t kept = 0;
#pragma unroll
    for (int part = 0; part < COUNT / PART; part++) {
        const uint64_t counter = (uint64_t)at / 4 + part;
        uint32_t words[4] = {(uint32_t)(offset / 4), (uint32_t)(offset / 4 >> 32), (uint32_t)counter,
                             (uint32_t)(counter >> 32)};
        cuda_ops_philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
#pragma unroll
        for (int e = 0; e < PART; e++) {
            const int word_index = PART == 4 ? e : (int)(at % 4) + e;
            const uint32_t word = word_index == 0   ? words[0]
                                  : word_index == 1 ? words[1]
                                  : word_index == 2 ? words[2]
                                                    : words[3];
            kept |= (word >= threshold ? 1u : 0u) << (part * PART + e);
        }
    }
    return kept;
}

// Times weight, plus bias, of the channels of COUNT elements from element `at` of a row on.
template <typename T, int COUNT>
__device__ __forceinline__ void apply_channels(accumulate_type<T> (&values)[COUNT], const ForwardRows<T> &a,
                                               int64_t row, int at)
{
    typedef accumulate_type<T> A;
    if (!a.weight && !a.bias)
        return;
    const int64_t group = a.rows <= INT32_MAX ? (int64_t)((uint32_t)row % (uint32_t)a.groups) : row % a.groups;
    const int within = (int)a.by_length.of((uint32_t)at);
    int64_t channel = group * a.group_channels + within;
    int next = (within + 1) * a.length - at; // where the next channel begins
    A scale = 1, shift = 0;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        if (e == 0 || e == next) {
            if (e > 0)
                channel++, next += a.length;
            scale = a.weight ? parameter_at<T>(a.weight, a.full_parameters, channel) : A(1);
            shift = a.bias ? parameter_at<T>(a.bias, a.full_parameters, channel) : A(0);
        }
        values[e] = values[e] * scale + shift;
    }
}

// Whole warps go through the loop together, with rows past the end as rows without elements.
template <typename T, int COUNT, int VECTORS, bool ADD, bool CLUSTER, bool CHANNELS = false, typename H = T>
__global__ void __launch_bounds__(MOST_THREADS,
                                  (ADD && VECTORS > 4) || CHANNELS || sizeof(T) == 8 || (CLUSTER && sizeof(T) == 2) ? 1
                                                                                                                    : 2)
    layer_norm_forward_kernel(const ForwardRows<T, H> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    typedef aligned_vector<H, COUNT> Q;
    typedef std::conditional_t<ADD, H, T> I; // of input
    typedef aligned_vector<I, COUNT> PI;
    __shared__ RowScratch<A, 2> scratch;
    int turn = 0;
    const int cluster = CLUSTER ? a.cluster : 1, block = (int)(blockIdx.x % cluster);
    const int slots = blockDim.x / a.threads, rank = threadIdx.x % a.threads + block * a.threads;
    const int stride = a.threads * cluster;
    const P zeros = vector_of_equal<T, COUNT>(A(0));
    const PI no_input = vector_of_equal<I, COUNT>(A(0));
    prepare_row_sums<CLUSTER>(scratch);
    wait_for_predecessor();
    release_successor();
    uint64_t seed = 0, offset = 0;
    if (ADD && a.drops) {
        seed = cuda_ops_philox_seed(a.philox), offset = cuda_ops_philox_offset(a.philox);
        if (global_thread_index() == 0) {
            a.state[0] = (int64_t)seed;
            a.state[1] = (int64_t)offset;
        }
    }
    const int64_t step = (int64_t)(gridDim.x / cluster) * slots;
    for (int64_t first = (int64_t)(blockIdx.x / cluster) * slots; first < a.rows; first += step) {
        const int64_t row = first + threadIdx.x / a.threads;
        const int vectors = row < a.rows ? a.cols / COUNT : 0;
        const int64_t start = row * a.cols;
        P x[VECTORS];
        PI input[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            input[v] = load_vector_or(reinterpret_cast<const PI *>((const I *)a.input + start) + rank + v * stride,
                                      rank + v * stride < vectors, no_input);
        if constexpr (std::is_same_v<I, T>)
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                x[v] = input[v];
        else
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                x[v] = zeros;
        if constexpr (ADD) {
            P r[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                r[v] = load_vector_or(reinterpret_cast<const P *>(a.residual + start) + rank + v * stride,
                                      rank + v * stride < vectors, zeros);
            uint32_t kept[VECTORS]; // drawn while the loads are under way
            if (a.drops)
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (rank + v * stride < vectors)
                        kept[v] =
                            draw_kept<COUNT>(start + (int64_t)(rank + v * stride) * COUNT, seed, offset, a.threshold);
            if (COUNT == 8 && a.mask)
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (rank + v * stride < vectors)
                        a.mask[row * vectors + rank + v * stride] = (uint8_t)kept[v];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (rank + v * stride < vectors) {
                    A sum[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        sum[e] = element_of(input[v], e);
                    if (a.drops)
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            sum[e] *= kept[v] >> e & 1 ? a.scale : A(0);
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        sum[e] += element_of(r[v], e);
                    x[v] = vector_of<T>(sum); // what is normalised is the sum that is returned, rounded
                    store_vector(reinterpret_cast<P *>(a.sum + start) + rank + v * stride, x[v]);
                }
        }
        // Of elements over n, since their sum may be too large for the dtype where the mean is not.
        A mean[1] = {0};
        if (!a.rms) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    mean[0] += element_of(x[v], e) * a.inverse_cols;
            row_sums<CLUSTER>(mean, a.threads, cluster, scratch, turn);
        }
        // The mean of differences from the mean is what its rounding left out.
        A sums[2] = {0, 0};
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * stride < vectors)
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    const A difference = element_of(x[v], e) - mean[0];
                    sums[0] += difference * difference;
                    sums[1] += difference * a.inverse_cols;
                }
        row_sums<CLUSTER>(sums, a.threads, cluster, scratch, turn);
        const A rest = a.rms ? A(0) : sums[1];
        const A rstd = rstd_of(sums[0] * a.inverse_cols, rest, a.eps);
        if (rank == 0 && vectors > 0) {
            if (a.mean)
                a.mean[row] = (double)mean[0] + (double)rest;
            if constexpr (CHANNELS)
                a.variance[row] = (double)variance_of(sums[0] * a.inverse_cols, rest);
            else
                a.rstd[row] = rstd;
        }
        const A shift = -rest * rstd;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * stride < vectors) {
                const int64_t at = (int64_t)(rank + v * stride) * COUNT;
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = (element_of(x[v], e) - mean[0]) * rstd + shift;
                if constexpr (CHANNELS) {
                    apply_channels<T>(result, a, row, (int)at);
                } else {
                    A parameters[COUNT];
                    if (a.weight) {
                        load_parameters<T>(parameters, a.weight, a.full_parameters, at);
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] *= parameters[e];
                    }
                    if (a.bias) {
                        load_parameters<T>(parameters, a.bias, a.full_parameters, at);
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] += parameters[e];
                    }
                }
                store_vector(reinterpret_cast<Q *>(a.output + start + at), vector_of<H>(result));
            }
    }
    if (CLUSTER)
        cluster_sync(); // others may still send it their sums
}

// Launches a kernel of CLUSTER over the rows.
template <bool CLUSTER, typename T, typename H = T>
static void launch_forward_rows(void (*kernel)(const ForwardRows<T, H>), const RowShape &shape,
                                const ForwardRows<T, H> &a, cudaStream_t stream)
{
    const int64_t groups = ceil_div(a.rows, shape.slots), most = MAX_GRID / shape.cluster;
    const int64_t blocks = (groups < most ? groups : most) * shape.cluster;
    if constexpr (CLUSTER)
        launch_dependent_clusters(kernel, blocks, shape.threads, shape.cluster, 0, stream, a);
    else
        launch_dependent(kernel, dim3((unsigned int)blocks), dim3((unsigned int)(shape.threads * shape.slots)), 0,
                         stream, a);
}

#endif
