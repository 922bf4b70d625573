// layer_norm and rms_norm forward, with or without an addition before, of rows that stay in registers:
//
//     output = (input - mean) * rstd * weight + bias
//
// A row has from one thread to a block, or on Hopper a cluster of up to eight blocks, whose threads hold up to eight
// 16-byte vectors each, or as many single elements where rows are not whole vectors at aligned addresses. The mean comes
// of one sum, variance and the mean's own rounding of a second one, over registers. Bound by memory: one read, one
// write (two and two with an addition); weight and bias stay in the cache.
#include "common/device.h"
#include "cuda_ops/dropout.h"
#include "layer_norm/paths.h"
#include "layer_norm/rows.cuh"

static constexpr int MOST_THREADS = 512;
static constexpr int SHORT_BLOCK = 128; // threads of a block of several rows

template <typename T>
struct ForwardRows {
    typedef accumulate_type<T> A;
    T *output, *sum;
    double *mean;
    A *rstd;
    int64_t *state;
    const T *input, *residual;
    const void *weight, *bias;
    int64_t rows;
    int cols, threads, cluster;
    A eps, inverse_cols, scale; // scale: of what dropout leaves
    uint32_t threshold;
    bool rms, full_parameters, drops;
    cuda_ops_philox_state philox;
};

// Drops elements `at` to at + COUNT - 1 of the tensor, or scales them, as dropout.cu does: each of Philox's counters is
// for four elements. A vector starts at a multiple of COUNT.
template <int COUNT, typename A>
__device__ __forceinline__ void drop(A (&values)[COUNT], int64_t at, uint64_t seed, uint64_t offset, uint32_t threshold,
                                     A scale)
{
    constexpr int PART = COUNT < 4 ? COUNT : 4;
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
            values[part * PART + e] *= word >= threshold ? scale : A(0);
        }
    }
}

// Whole warps go through the loop together, with rows past the end as rows without elements.
template <typename T, int COUNT, int VECTORS, bool ADD, bool CLUSTER>
__global__ void __launch_bounds__(MOST_THREADS, ADD || sizeof(T) == 8 || (CLUSTER && sizeof(T) == 2) ? 1 : 2)
    layer_norm_forward_kernel(const ForwardRows<T> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    __shared__ RowScratch<A, 2> scratch;
    int buffer = 0;
    const int cluster = CLUSTER ? a.cluster : 1, block = (int)(blockIdx.x % cluster);
    const int slots = blockDim.x / a.threads, rank = threadIdx.x % a.threads + block * a.threads;
    const int stride = a.threads * cluster;
    const P zeros = vector_of_equal<T, COUNT>(A(0));
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
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = load_vector_or(reinterpret_cast<const P *>(a.input + start) + rank + v * stride,
                                  rank + v * stride < vectors, zeros);
        if constexpr (ADD) {
            P r[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                r[v] = load_vector_or(reinterpret_cast<const P *>(a.residual + start) + rank + v * stride,
                                      rank + v * stride < vectors, zeros);
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (rank + v * stride < vectors) {
                    A sum[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        sum[e] = element_of(x[v], e);
                    if (a.drops)
                        drop(sum, start + (int64_t)(rank + v * stride) * COUNT, seed, offset, a.threshold, a.scale);
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
            row_sums<CLUSTER>(mean, a.threads, cluster, scratch, buffer);
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
        row_sums<CLUSTER>(sums, a.threads, cluster, scratch, buffer);
        const A rest = a.rms ? A(0) : sums[1];
        const A rstd = rstd_of(sums[0] * a.inverse_cols, rest, a.eps);
        if (rank == 0 && vectors > 0) {
            if (a.mean)
                a.mean[row] = (double)mean[0] + (double)rest;
            a.rstd[row] = rstd;
        }
        const A shift = -rest * rstd;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * stride < vectors) {
                const int64_t at = (int64_t)(rank + v * stride) * COUNT;
                A result[COUNT], parameters[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = (element_of(x[v], e) - mean[0]) * rstd + shift;
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
                store_vector(reinterpret_cast<P *>(a.output + start + at), vector_of<T>(result));
            }
    }
    if (CLUSTER)
        cluster_sync(); // others may still read this block's sums
}

RowShape layer_norm_forward_shape(const LayerNormCall &call, const Device &device)
{
    const int size = (int)(16 / dtype_size(call.dtype));
    const bool vectorised = call.cols % size == 0 && is_aligned_16(call.output) && is_aligned_16(call.sum) &&
                            is_aligned_16(call.input) && is_aligned_16(call.residual) && is_aligned_16(call.weight) &&
                            is_aligned_16(call.bias);
    RowShape shape = {vectorised ? size : 1, 8, 0, 1, 1};
    const int64_t vectors = call.cols / shape.elements, most = (int64_t)MOST_THREADS * shape.vectors;
    if (vectors > most) {
        while (vectors > most * shape.cluster && shape.cluster < MOST_CLUSTER)
            shape.cluster *= 2;
        if (vectorised && call.dtype != CUDA_OPS_FLOAT64 && vectors <= most * shape.cluster)
            shape.threads = (int)(ceil_div(vectors, WARP_SIZE * shape.vectors * shape.cluster) * WARP_SIZE);
        return shape;
    }
    if (vectorised && call.dtype != CUDA_OPS_FLOAT64) {
        if (vectors <= 2 * WARP_SIZE)
            shape.vectors = 2;
        else if (vectors <= 4 * WARP_SIZE || (8 * WARP_SIZE < vectors && vectors <= 1024))
            shape.vectors = 4;
    }
    // Single elements that are few go to more threads, which then read neighbours.
    shape.threads = round_threads(ceil_div(vectors, !vectorised && vectors <= 4 * WARP_SIZE ? 4 : shape.vectors));
    if (shape.threads <= WARP_SIZE)
        shape.slots = choose_slots(shape.threads, SHORT_BLOCK, call.rows, device.multiprocessors);
    return shape;
}

template <typename T, int COUNT, int VECTORS, bool CLUSTER>
static void launch(const LayerNormCall &call, const RowShape &shape, const ForwardRows<T> &a)
{
    if (shape.elements != COUNT || shape.vectors != VECTORS || (shape.cluster > 1) != CLUSTER)
        return;
    const auto kernel = call.residual ? layer_norm_forward_kernel<T, COUNT, VECTORS, true, CLUSTER>
                                      : layer_norm_forward_kernel<T, COUNT, VECTORS, false, CLUSTER>;
    const int64_t groups = ceil_div(call.rows, shape.slots), most = MAX_GRID / shape.cluster;
    const int64_t blocks = (groups < most ? groups : most) * shape.cluster;
    if constexpr (CLUSTER)
        launch_dependent_clusters(kernel, blocks, shape.threads, shape.cluster, 0, call.stream, a);
    else
        launch_dependent(kernel, dim3((unsigned int)blocks), dim3((unsigned int)(shape.threads * shape.slots)), 0,
                         call.stream, a);
}

cuda_ops_status layer_norm_forward(const LayerNormCall &call, const RowShape &shape)
{
    CUDA_OPS_DISPATCH(
        call.dtype, T, typedef accumulate_type<T> A; constexpr int SIZE = vector16<T>::size; ForwardRows<T> a = {};
        a.output = (T *)call.output, a.sum = (T *)call.sum, a.mean = call.mean, a.rstd = (A *)call.rstd;
        a.state = call.state, a.input = (const T *)call.input, a.residual = (const T *)call.residual;
        a.weight = call.weight, a.bias = call.bias, a.rows = call.rows, a.cols = (int)call.cols;
        a.threads = shape.threads, a.cluster = shape.cluster, a.eps = (A)call.eps, a.inverse_cols = A(1) / (A)call.cols;
        a.rms = call.rms, a.full_parameters = call.parameter_dtype != call.dtype, a.drops = call.state != nullptr;
        a.threshold = cuda_ops_dropout_threshold(call.p), a.scale = (A)cuda_ops_dropout_scale(call.p);
        a.philox = call.philox; launch<T, SIZE, 8, false>(call, shape, a); launch<T, 1, 8, false>(call, shape, a);
        if constexpr (sizeof(T) < sizeof(double)) {
            launch<T, SIZE, 2, false>(call, shape, a);
            launch<T, SIZE, 4, false>(call, shape, a);
            launch<T, SIZE, 8, true>(call, shape, a);
        });
    return launch_status();
}
