// How groups of threads share the columns of an [outer, cols, inner] array, and their log-sum-exp.
//
// A group of GROUP threads takes one column (the `cols` elements of one (outer, inner) pair, `inner` apart), thread
// `rank` of it the elements rank, rank + GROUP, ... Which threads form a group follows memory, so that a warp's loads
// touch adjacent addresses:
//   inner == 1: a group's threads are adjacent, as the elements of a column are
//   inner > 1:  a group's threads are strided over the block (STRIDED), since adjacent columns are adjacent in memory
//
// All threads of a block take part in a reduction, also those whose column is out of bounds.
#ifndef CUDA_OPS_COMMON_THREAD_GROUP_CUH
#define CUDA_OPS_COMMON_THREAD_GROUP_CUH

#include "common/rows.cuh"

static constexpr int GROUP_THREADS = 256; // of a block

// The column (`slot`) that a thread works on, of the GROUP_THREADS / group of its block, and its rank in the group.
struct group_position {
    int slot, rank;
};

__device__ __forceinline__ group_position position_in_group(int group, bool strided)
{
    const int slots = GROUP_THREADS / group, thread = threadIdx.x;
    group_position at;
    at.slot = strided ? thread % slots : thread / group;
    at.rank = strided ? thread / slots : thread % group;
    return at;
}

// The index of the first element of a column.
__device__ __forceinline__ int64_t column_offset(int64_t column, int64_t cols, int64_t inner)
{
    return inner == 1 ? column * cols : column / inner * cols * inner + column % inner;
}

template <typename A>
__device__ __forceinline__ A combine(A a, A b)
{
    return a + b;
}

template <typename A>
__device__ __forceinline__ log_sum_exp<A> combine(log_sum_exp<A> a, log_sum_exp<A> b)
{
    const bool first = a.maximum >= b.maximum;
    const log_sum_exp<A> high = first ? a : b, low = first ? b : a;
    const A factor = low.maximum == high.maximum ? A(1) : exp(low.maximum - high.maximum);
    return {high.maximum, high.sum + low.sum * factor};
}

// log(sum(exp(x - maximum))). NaN where an element is +inf, as PyTorch has it; in a column of -inf alone it is the
// subtraction of the maximum that gives NaN.
template <typename A>
__device__ __forceinline__ A log_of_sum(log_sum_exp<A> state)
{
    return state.maximum == A(CUDART_INF) ? A(CUDART_NAN) : log(state.sum);
}

// Over LANES neighbouring lanes of a warp, which all get the same bits: butterflies of symmetric operations.
template <int LANES, typename A>
__device__ __forceinline__ A lanes_combine(A value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

// The maximum first, so that each sum is rescaled once.
template <int LANES, typename A>
__device__ __forceinline__ log_sum_exp<A> lanes_combine(log_sum_exp<A> value)
{
    A maximum = value.maximum; // never NaN
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        maximum = fmax(maximum, __shfl_xor_sync(FULL_WARP, maximum, offset));
    const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum;
    return {maximum, lanes_combine<LANES>(value.sum * exp(value.maximum - shift))};
}

// `combine` over the values of a group, in a fixed order; every thread of it gets the result. `scratch` holds
// GROUP_THREADS values in shared memory and may be used again right after.
template <int GROUP, bool STRIDED, typename V>
__device__ __forceinline__ V group_reduce(V value, V *scratch)
{
    if constexpr (GROUP == 1) {
        return value;
    } else if constexpr (STRIDED) {
        constexpr int SLOTS = GROUP_THREADS / GROUP;
        scratch[threadIdx.x] = value;
        __syncthreads();
        const int slot = threadIdx.x % SLOTS;
        V result = scratch[slot];
#pragma unroll
        for (int rank = 1; rank < GROUP; rank++)
            result = combine(result, scratch[rank * SLOTS + slot]);
        __syncthreads(); // no thread may write the next values while another still reads these
        return result;
    } else {
        value = lanes_combine<(GROUP < WARP_SIZE ? GROUP : WARP_SIZE)>(value);
        if constexpr (GROUP > WARP_SIZE) {
            static_assert(GROUP == GROUP_THREADS, "a group is a part of a warp, a warp, or the block");
            constexpr int WARPS = GROUP / WARP_SIZE;
            const int lane = threadIdx.x % WARP_SIZE;
            if (lane == 0)
                scratch[threadIdx.x / WARP_SIZE] = value;
            __syncthreads();
            value = lanes_combine<WARPS>(scratch[lane % WARPS]);
            __syncthreads();
        }
        return value;
    }
}

// The log-sum-exp of thread `rank`'s share of a column: `cols` elements from `input` on.
template <int GROUP, bool STRIDED, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>> column_log_sum_exp(const T *input, int64_t cols,
                                                                              int64_t inner, int rank)
{
    typedef accumulate_type<T> A;
    if constexpr (STRIDED) {
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t c = rank; c < cols; c += GROUP)
            add_element(state, load_as_accumulate(input[c * inner]));
        return state;
    } else {
        return row_log_sum_exp<GROUP>(input, cols, rank);
    }
}

// The log-sum-exp of a column; all threads of its group get it.
template <int GROUP, bool STRIDED, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>>
group_log_sum_exp(const T *input, int64_t cols, int64_t inner, int rank, log_sum_exp<accumulate_type<T>> *scratch)
{
    return group_reduce<GROUP, STRIDED>(column_log_sum_exp<GROUP, STRIDED>(input, cols, inner, rank), scratch);
}

// The groups for a shape. Rows of up to 32 (ten classes) would leave most of a warp idle; a warp takes rows of up to
// `longest_of_warp`, a block longer ones. Strided columns are shared only when they are long, since there are often
// many.
struct group_shape {
    int threads;
    bool strided;
};

static constexpr int64_t SHORT_ROW = 1024;

static inline group_shape choose_group(int64_t cols, int64_t inner, int64_t longest_of_warp = SHORT_ROW)
{
    if (inner == 1)
        return {cols <= 32 ? 8 : cols <= longest_of_warp ? WARP_SIZE : GROUP_THREADS, false};
    return {cols < 32 ? 1 : 8, true};
}

// A warp needs no barrier and, for a row, far fewer instructions than the warps of a block together, but with few rows
// it leaves multiprocessors idle: so it takes rows of up to 8192 if that is at most `times` the number of rows.
static inline int64_t longest_of_warp(int64_t columns, int times)
{
    const int64_t most = columns * times < 8 * SHORT_ROW ? columns * times : 8 * SHORT_ROW;
    return most > SHORT_ROW ? most : SHORT_ROW;
}

static inline int64_t group_blocks(int64_t columns, group_shape shape)
{
    return ceil_div(columns, GROUP_THREADS / shape.threads);
}

// Runs the statement with the constants GROUP and STRIDED for what choose_group says.
#define CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED, ...)                                                            \
    do {                                                                                                               \
        if ((shape).strided) {                                                                                         \
            constexpr bool STRIDED = true;                                                                             \
            if ((shape).threads == 1) {                                                                                \
                constexpr int GROUP = 1;                                                                               \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                constexpr int GROUP = 8;                                                                               \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        } else {                                                                                                       \
            constexpr bool STRIDED = false;                                                                            \
            if ((shape).threads == 8) {                                                                                \
                constexpr int GROUP = 8;                                                                               \
                __VA_ARGS__;                                                                                           \
            } else if ((shape).threads == WARP_SIZE) {                                                                 \
                constexpr int GROUP = WARP_SIZE;                                                                       \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                constexpr int GROUP = GROUP_THREADS;                                                                   \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } while (false)

#endif
