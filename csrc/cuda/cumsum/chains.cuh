// Sums that blocks leave for each other, in the workspace: cumsum's look-back along columns (cuda_ops/cumsum.h).
#ifndef CUDA_OPS_CUMSUM_CHAINS_CUH
#define CUDA_OPS_CUMSUM_CHAINS_CUH

#include "cumsum/chunk.cuh"

#include <math_constants.h>

static constexpr int64_t MOST_IN_GROUP = THREADS;
static constexpr int64_t LEAST_IN_GROUP = 16;

// The launch before has filled the workspace with ones: a NaN that no sum is stored as. One store of a word is both the
// sum and the message that it is there.
__device__ __forceinline__ float peek(const float *at)
{
    return *(const volatile float *)at;
}

__device__ __forceinline__ double peek(const double *at)
{
    return *(const volatile double *)at;
}

__device__ __forceinline__ bool is_missing(float value)
{
    return __float_as_uint(value) == 0xffffffffu;
}

__device__ __forceinline__ bool is_missing(double value)
{
    return __double_as_longlong(value) == -1;
}

__device__ __forceinline__ void publish(float *at, float value)
{
    *(volatile float *)at = value == value ? value : CUDART_NAN_F;
}

__device__ __forceinline__ void publish(double *at, double value)
{
    *(volatile double *)at = value == value ? value : CUDART_NAN;
}

// The sum of every `step`-th one of values[first ... end - 1], as soon as they are there; their loads do not wait for
// each other.
template <typename A>
__device__ __forceinline__ A wait_for_sum(const A *values, int64_t first, int64_t end, int step, int pitch)
{
    constexpr int IN_FLIGHT = 4;
    A sum = 0;
    for (; first < end; first += IN_FLIGHT * step) {
        A value[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * step < end)
                value[k] = peek(values + (first + k * step) * pitch);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * step < end) {
                while (is_missing(value[k]))
                    value[k] = peek(values + (first + k * step) * pitch);
                sum += value[k];
            }
    }
    return sum;
}

// How chunks are grouped, of each of `chains` that have `parts` chunks of `width` sums, a power of two. In the workspace
// lie the ticket (16 bytes), the chunks' sums [chain][part][width], and the groups' [chain][group][width].
struct Chains {
    int64_t chains, parts, groups;
    int group, width;

    __host__ __device__ int64_t sums() const
    {
        return chains * (parts + groups) * width;
    }
};

static Chains chains_of(int64_t chains, int64_t parts, int width)
{
    int64_t group = LEAST_IN_GROUP;
    while (group < MOST_IN_GROUP && group * group < parts)
        group *= 2;
    return {chains, parts, ceil_div(parts, group), (int)group, width};
}

template <typename A>
__device__ __forceinline__ A *chunk_sums(const Chains &c, void *workspace, int64_t chain)
{
    return (A *)((char *)workspace + 16) + chain * c.parts * c.width;
}

template <typename A>
__device__ __forceinline__ A *group_sums(const Chains &c, void *workspace, int64_t chain)
{
    return (A *)((char *)workspace + 16) + (c.chains * c.parts + chain * c.groups) * c.width;
}

// The next chunk to be taken: each once, in order.
__device__ __forceinline__ int64_t take_ticket(void *workspace)
{
    return (int64_t)(uint32_t)(atomicAdd((unsigned int *)workspace, 1u) + 1u);
}

// The block's sum of what threads of the same column have, columns being threadIdx.x % width. `kept` has THREADS
// elements.
template <typename A>
__device__ __forceinline__ A sum_of_columns(A *kept, A sum, int width)
{
    for (int offset = WARP_SIZE / 2; offset >= width; offset /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool few = width < WARP_SIZE;
    __syncthreads(); // whoever still reads the last sums
    if (!few || lane < width)
        kept[few ? warp * width + lane : threadIdx.x] = sum;
    __syncthreads();
    const int column = threadIdx.x % width, rows = few ? WARPS : THREADS / width;
    A total = 0;
    for (int row = 0; row < rows; row++)
        total += kept[row * width + column];
    return total;
}

// What lies before `part` in its chain: the sum of column threadIdx.x % width. `own`: this chunk's sums of the columns,
// which the group's last chunk adds to what its group has. For a whole block.
template <typename A>
__device__ __forceinline__ A look_back(A *kept, const A *own, const Chains &c, void *workspace, int64_t chain,
                                       int64_t part)
{
    const int column = threadIdx.x % c.width, lane = threadIdx.x / c.width, lanes = THREADS / c.width;
    const int64_t group = part / c.group, first_of_group = group * c.group;
    A sum = wait_for_sum(chunk_sums<A>(c, workspace, chain) + column, first_of_group + lane, part, lanes, c.width);
    A in_group = 0;
    if (part == first_of_group + c.group - 1) {
        in_group = sum_of_columns(kept, sum, c.width);
        if (threadIdx.x < c.width)
            publish(group_sums<A>(c, workspace, chain) + group * c.width + column, in_group + own[column]);
        if (group == 0)
            return in_group;
        sum = 0;
    }
    sum += wait_for_sum(group_sums<A>(c, workspace, chain) + column, (int64_t)lane, group, lanes, c.width);
    return in_group + sum_of_columns(kept, sum, c.width);
}

#endif
