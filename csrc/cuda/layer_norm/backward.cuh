// The kernel of layer_norm's and rms_norm's backward pass: backward.cu, and with gradients in halves beside float
// rounded.cu.
#ifndef CUDA_OPS_LAYER_NORM_BACKWARD_CUH
#define CUDA_OPS_LAYER_NORM_BACKWARD_CUH

#include <type_traits>

#include "layer_norm/paths.h"
#include "layer_norm/rows.cuh"

static constexpr int MOST_BACKWARD_THREADS = 1024;
static constexpr int SLOT_THREADS = 512; // of a block of several rows, or in a cluster: two such a multiprocessor

// H: of grad_output and grad_dropped: T, or a half beside float.
template <typename T, typename H = T>
struct BackwardRows {
    typedef accumulate_type<T> A;
    T *grad_input;
    H *grad_dropped;
    A *partials;
    const H *grad_output;
    const T *grad_sum, *input;
    const double *mean;
    const A *rstd;
    const void *weight;
    const uint8_t *mask;
    int64_t rows;
    int cols, threads, cluster;
    A inverse_cols, scale;            // scale: of what dropout keeps
    bool rms, full_parameters, apart; // apart: several rows of warps of their own side by side
};

template <typename T, int COUNT, int VECTORS, bool CLUSTER, bool SUMS, bool DROPS = false, typename H = T>
__global__ void __launch_bounds__(MOST_BACKWARD_THREADS) layer_norm_backward_kernel(const BackwardRows<T, H> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    typedef aligned_vector<H, COUNT> Q;
    constexpr int SHARE = COUNT * VECTORS;                           // columns of a thread
    constexpr bool AHEAD = COUNT > 1, SUM_AHEAD = AHEAD && !CLUSTER; // as far as there are registers
    __shared__ RowScratch<A, 2> scratch;
    __shared__ __align__(16) A exchange[SLOT_THREADS * SHARE];
    int turn = 0;
    const int cluster = CLUSTER ? a.cluster : 1, block = (int)(blockIdx.x % cluster);
    const int slots = blockDim.x / a.threads, rank = threadIdx.x % a.threads + block * a.threads;
    const int stride = a.threads * cluster, vectors = a.cols / COUNT;
    const int64_t part = blockIdx.x / cluster, step = (int64_t)(gridDim.x / cluster) * slots;
    const P zeros = vector_of_equal<T, COUNT>(A(0));
    const Q no_grad = vector_of_equal<H, COUNT>(A(0));
    A grad_weight[SHARE] = {}, grad_bias[SHARE] = {};
    // Of grad_input: four of a thread's sums behind those of its neighbours, so that banks do not conflict.
    float4 *const input_sums = reinterpret_cast<float4 *>(exchange) + threadIdx.x;
    static_assert(!SUMS || (SHARE == 8 && sizeof(A) == sizeof(float)), "two vectors of a thread in `exchange`");
    if constexpr (SUMS)
        input_sums[0] = input_sums[SLOT_THREADS] = make_float4(0, 0, 0, 0);
    P x[VECTORS];
    Q g[VECTORS];
    double mean = 0;
    A rstd = 0;
    const auto load = [&](P(&x)[VECTORS], Q(&g)[VECTORS], double &mean, A &rstd, int64_t row) {
        const bool there = row < a.rows;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int at = rank + v * stride;
            x[v] =
                load_vector_or(reinterpret_cast<const P *>(a.input + row * a.cols) + at, there && at < vectors, zeros);
            g[v] = load_vector_or(reinterpret_cast<const Q *>(a.grad_output + row * a.cols) + at, there && at < vectors,
                                  no_grad);
        }
        mean = there && !a.rms ? a.mean[row] : 0.0;
        rstd = there ? a.rstd[row] : A(0);
    };
    prepare_row_sums<CLUSTER>(scratch);
    wait_for_predecessor();
    release_successor();
    load(x, g, mean, rstd, part * slots + threadIdx.x / a.threads);
    for (int64_t first = part * slots; first < a.rows; first += step) {
        const int64_t row = first + threadIdx.x / a.threads;
        P next_x[VECTORS];
        Q next_g[VECTORS];
        double next_mean;
        A next_rstd;
        if constexpr (AHEAD)
            load(next_x, next_g, next_mean, next_rstd, row + step);
        P more[VECTORS];
        if constexpr (SUM_AHEAD) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                more[v] = load_vector_or(reinterpret_cast<const P *>(a.grad_sum + row * a.cols) + rank + v * stride,
                                         a.grad_sum && row < a.rows && rank + v * stride < vectors, zeros);
        }
        uint32_t kept = 0;
        if constexpr (DROPS)
            if (row < a.rows && rank < vectors)
                kept = a.mask[row * vectors + rank];
        const A center = (A)mean, shift = (A)((double)center - mean) * rstd;
        A sums[2] = {0, 0}, h[SHARE];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            A weight[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                weight[e] = A(1);
            if (a.weight && rank + v * stride < vectors)
                load_parameters<T>(weight, a.weight, a.full_parameters, (int64_t)(rank + v * stride) * COUNT);
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                const A xhat = (element_of(x[v], e) - center) * rstd + shift, grad = element_of(g[v], e);
                h[v * COUNT + e] = grad * weight[e];
                sums[0] += h[v * COUNT + e];
                sums[1] += h[v * COUNT + e] * xhat;
                grad_weight[v * COUNT + e] += grad * xhat;
                grad_bias[v * COUNT + e] += grad;
            }
        }
        if (a.grad_input) {
            row_sums<CLUSTER>(sums, a.threads, cluster, scratch, turn, !CLUSTER && a.apart);
            const A mean_h = a.rms ? A(0) : sums[0] * a.inverse_cols, slope = sums[1] * a.inverse_cols;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (row < a.rows && rank + v * stride < vectors) {
                    const int64_t at = row * a.cols + (int64_t)(rank + v * stride) * COUNT;
                    A result[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++) {
                        const A xhat = (element_of(x[v], e) - center) * rstd + shift;
                        result[e] = rstd * (h[v * COUNT + e] - mean_h - xhat * slope);
                    }
                    if (a.grad_sum) {
                        if constexpr (!SUM_AHEAD)
                            more[v] = *reinterpret_cast<const P *>(a.grad_sum + at);
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] += element_of(more[v], e);
                    }
                    if constexpr (SUMS) {
#pragma unroll
                        for (int e = 0; e < COUNT; e += 4) {
                            float4 &sum = input_sums[e / 4 * SLOT_THREADS];
                            const float4 before = sum;
                            sum = make_float4(before.x + result[e], before.y + result[e + 1], before.z + result[e + 2],
                                              before.w + result[e + 3]);
                        }
                    }
                    store_vector(reinterpret_cast<P *>(a.grad_input + at), vector_of<T>(result));
                    if constexpr (DROPS) {
                        static_assert(COUNT == 8 && VECTORS == 1 && !SUMS, "a byte of the mask a thread");
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] *= kept >> e & 1 ? a.scale : A(0);
                        store_vector(reinterpret_cast<Q *>(a.grad_dropped + at), vector_of<H>(result));
                    }
                    if constexpr (!std::is_same_v<H, T>)
                        if (a.grad_dropped)
                            store_vector(reinterpret_cast<Q *>(a.grad_dropped + at), vector_of<H>(result));
                }
        }
        if constexpr (!AHEAD)
            load(next_x, next_g, next_mean, next_rstd, row + step);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = next_x[v], g[v] = next_g[v];
        mean = next_mean, rstd = next_rstd;
    }
    if (CLUSTER && a.grad_input)
        cluster_sync(); // others may still send it their sums
    if (!a.partials)
        return;
    // The rows that the block had side by side, added in their order; then [part][weight, bias or input][column].
    constexpr int KINDS = SUMS ? 3 : 2;
    A of_input[SHARE] = {};
    if constexpr (SUMS) {
#pragma unroll
        for (int e = 0; e < SHARE; e += 4) {
            const float4 sum = input_sums[e / 4 * SLOT_THREADS];
            of_input[e] = sum.x, of_input[e + 1] = sum.y, of_input[e + 2] = sum.z, of_input[e + 3] = sum.w;
        }
    }
#pragma unroll
    for (int which = 0; which < KINDS; which++) {
        A *const to = a.partials + (KINDS * part + which) * a.cols;
        A sums[SHARE];
#pragma unroll
        for (int k = 0; k < SHARE; k++)
            sums[k] = which == 0 ? grad_weight[k] : which == 1 ? grad_bias[k] : of_input[k];
        if (slots == 1) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    if (rank + v * stride < vectors)
                        to[(rank + v * stride) * COUNT + e] = sums[v * COUNT + e];
            continue;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SHARE; k++)
            exchange[threadIdx.x * SHARE + k] = sums[k];
        __syncthreads();
        for (int i = threadIdx.x; i < a.threads * SHARE; i += blockDim.x) {
            A total = 0;
            for (int slot = 0; slot < slots; slot++)
                total += exchange[slot * a.threads * SHARE + i];
            const int vector = i / SHARE + i % SHARE / COUNT * stride; // slots > 1: no cluster, rank = i / SHARE
            if (vector < vectors)
                to[vector * COUNT + i % COUNT] = total;
        }
    }
}

#endif
