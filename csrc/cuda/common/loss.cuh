// What the losses over classes share: the record of an invalid class index, and the two stages of a reduction.
//
// A mean or a sum takes two launches, without atomics, and repeats bitwise: each block of the first leaves (sum of
// losses, sum of weights) in the workspace, and one block adds those up in the second. Both in double: that is one
// addition a column, and makes the mean of any number of losses exact in float32. Where one block takes
// all columns it writes the result at once.
#ifndef CUDA_OPS_COMMON_LOSS_CUH
#define CUDA_OPS_COMMON_LOSS_CUH

#include <math_constants.h>

#include "common/common.cuh"
#include "cuda_ops/loss.h"

// The largest grid of the first stage, beyond which blocks loop: it fills any GPU and keeps the second stage short.
static constexpr int64_t MAX_PARTIALS = 4096;

static inline unsigned int clamp_to_partials(int64_t blocks)
{
    return (unsigned int)(blocks < MAX_PARTIALS ? blocks : MAX_PARTIALS);
}

static inline size_t partials_bytes(unsigned int blocks)
{
    return 2 * sizeof(double) * blocks;
}

__device__ __forceinline__ bool is_class(int64_t target, int64_t classes)
{
    return 0 <= target && target < classes;
}

// Takes the record if it is free, and writes it before it is marked as complete for the host.
__device__ __forceinline__ void record_bad_index(cuda_ops_index_error *error, int64_t position, int64_t value,
                                                 int64_t classes)
{
    if (error == nullptr || atomicCAS(&error->state, CUDA_OPS_INDEX_ERROR_NONE, CUDA_OPS_INDEX_ERROR_BEING_WRITTEN) !=
                                CUDA_OPS_INDEX_ERROR_NONE)
        return;
    volatile cuda_ops_index_error *record = error;
    record->position = position;
    record->value = value;
    record->classes = classes;
    __threadfence_system();
    record->state = CUDA_OPS_INDEX_ERROR_COMPLETE;
}

// First stage, its end: the sums of a block's threads into the block's pair. `scratch`: 32 doubles of shared memory.
__device__ __forceinline__ void write_partials(double *partials, double loss, double weight, double *scratch)
{
    loss = block_sum(loss, scratch);
    weight = block_sum(weight, scratch);
    if (threadIdx.x == 0) {
        partials[2 * blockIdx.x] = loss;
        partials[2 * blockIdx.x + 1] = weight;
    }
}

template <typename T>
__device__ __forceinline__ void write_loss(T *loss, accumulate_type<T> *total_weight, double sum, double weight,
                                           bool mean)
{
    *loss = store_from_accumulate<T>((accumulate_type<T>)(mean ? sum / weight : sum));
    *total_weight = (accumulate_type<T>)weight;
}

static constexpr int REDUCE_THREADS = 512, PARTIALS_IN_FLIGHT = MAX_PARTIALS / REDUCE_THREADS;

// Second stage, one block; it starts while the first one runs.
template <typename T>
__global__ void __launch_bounds__(REDUCE_THREADS)
    loss_reduce_kernel(T *loss, accumulate_type<T> *total_weight, const double *partials, int count, bool mean)
{
    __shared__ double scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    double sum = 0, weight = 0;
    for (int first = threadIdx.x; first < count; first += PARTIALS_IN_FLIGHT * REDUCE_THREADS) {
        double pairs[PARTIALS_IN_FLIGHT][2];
#pragma unroll
        for (int i = 0; i < PARTIALS_IN_FLIGHT; i++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                pairs[i][k] = first + i * REDUCE_THREADS < count ? partials[2 * (first + i * REDUCE_THREADS) + k] : 0;
#pragma unroll
        for (int i = 0; i < PARTIALS_IN_FLIGHT; i++) {
            sum += pairs[i][0];
            weight += pairs[i][1];
        }
    }
    sum = block_sum(sum, scratch);
    weight = block_sum(weight, scratch);
    if (threadIdx.x == 0)
        write_loss(loss, total_weight, sum, weight, mean);
}

template <typename T>
static cuda_ops_status launch_loss_reduce(T *loss, void *total_weight, const double *partials, unsigned int count,
                                          cuda_ops_reduction reduction, cudaStream_t stream)
{
    launch_dependent(loss_reduce_kernel<T>, dim3(1), dim3(REDUCE_THREADS), 0, stream, loss,
                     (accumulate_type<T> *)total_weight, partials, (int)count, reduction == CUDA_OPS_REDUCTION_MEAN);
    return launch_status();
}

#endif
