// How threads share the columns of an [outer, cols, inner] array, and the log-sum-exp that they find together.
//
// A team of TEAM threads takes one column (the `cols` elements of one (outer, inner) pair, `inner` apart), thread
// `rank` of it the elements rank, rank + TEAM, ... Which threads make a team follows memory, so that a warp's loads
// touch neighbouring addresses:
//   inner == 1: threads of a team are neighbours, since the elements of a column are
//   inner > 1:  threads of a team are a block's width apart (STRIDED), since neighbouring columns are neighbours
//
// All threads of a block go through a reduction together, also those whose column is past the end.
#ifndef CUDA_OPS_TEAM_CUH
#define CUDA_OPS_TEAM_CUH

#include <math_constants.h>

#include "common.cuh"

static constexpr int TEAM_THREADS = 256;

// Which column of a block's TEAM_THREADS / team a thread works on, and its number in the team.
struct team_place {
    int slot, rank;
};

__device__ __forceinline__ team_place place_in_team(int team, bool strided)
{
    const int slots = TEAM_THREADS / team, thread = threadIdx.x;
    team_place place;
    place.slot = strided ? thread % slots : thread / team;
    place.rank = strided ? thread / slots : thread % team;
    return place;
}

// Where the first element of a column is.
__device__ __forceinline__ int64_t column_offset(int64_t column, int64_t cols, int64_t inner)
{
    return inner == 1 ? column * cols : column / inner * cols * inner + column % inner;
}

// The largest of some elements, and the sum of exp(element - largest). -inf and 0 for no elements.
template <typename A>
struct log_sum_exp {
    A maximum, sum;
};

template <typename A>
__device__ __forceinline__ log_sum_exp<A> log_sum_exp_of_none()
{
    return {-A(CUDART_INF), A(0)};
}

// Adds one element. The maximum passes over NaN; the sum takes it up. Equal infinities are counted, not subtracted.
template <typename A>
__device__ __forceinline__ void add_element(log_sum_exp<A> &state, A x)
{
    if (x > state.maximum) {
        state.sum = state.sum * exp(state.maximum - x) + A(1);
        state.maximum = x;
    } else {
        state.sum += x == state.maximum ? A(1) : exp(x - state.maximum);
    }
}

template <typename A>
__device__ __forceinline__ A combine(A a, A b)
{
    return a + b;
}

// Symmetric to the last bit, so that all threads of a butterfly end with the same.
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

template <typename A>
__device__ __forceinline__ A shuffle_xor(A value, int mask)
{
    return __shfl_xor_sync(FULL_WARP, value, mask);
}

template <typename A>
__device__ __forceinline__ log_sum_exp<A> shuffle_xor(log_sum_exp<A> value, int mask)
{
    return {__shfl_xor_sync(FULL_WARP, value.maximum, mask), __shfl_xor_sync(FULL_WARP, value.sum, mask)};
}

// `combine` over the values of a team, in a fixed order; every thread of it gets the result. `scratch` holds
// TEAM_THREADS values in shared memory and may be used again right after.
template <int TEAM, bool STRIDED, typename V>
__device__ __forceinline__ V team_reduce(V value, V *scratch)
{
    if constexpr (TEAM == 1) {
        return value;
    } else if constexpr (STRIDED) {
        constexpr int SLOTS = TEAM_THREADS / TEAM;
        scratch[threadIdx.x] = value;
        __syncthreads();
        const int slot = threadIdx.x % SLOTS;
        V result = scratch[slot];
#pragma unroll
        for (int rank = 1; rank < TEAM; rank++)
            result = combine(result, scratch[rank * SLOTS + slot]);
        __syncthreads(); // nobody may write the next values while another still reads these
        return result;
    } else {
        constexpr int LANES = TEAM < WARP_SIZE ? TEAM : WARP_SIZE;
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            value = combine(value, shuffle_xor(value, offset));
        if constexpr (TEAM > WARP_SIZE) {
            static_assert(TEAM == TEAM_THREADS, "a team is a part of a warp, a warp, or the block");
            if (threadIdx.x % WARP_SIZE == 0)
                scratch[threadIdx.x / WARP_SIZE] = value;
            __syncthreads();
            value = scratch[0];
#pragma unroll
            for (int warp = 1; warp < TEAM / WARP_SIZE; warp++)
                value = combine(value, scratch[warp]);
            __syncthreads();
        }
        return value;
    }
}

// The log-sum-exp of a column: `cols` elements from `input` on; all of its team's threads get it.
template <int TEAM, bool STRIDED, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>>
team_log_sum_exp(const T *input, int64_t cols, int64_t inner, int rank, log_sum_exp<accumulate_type<T>> *scratch)
{
    typedef accumulate_type<T> A;
    log_sum_exp<A> state = log_sum_exp_of_none<A>();
    for (int64_t c = rank; c < cols; c += TEAM)
        add_element(state, load_as_accumulate(input[c * inner]));
    return team_reduce<TEAM, STRIDED>(state, scratch);
}

// Size and kind of the teams for a shape. Rows of up to 32 (ten digits) would leave most of a warp idle; a warp takes
// rows of up to 1024, a block longer ones. Columns are split only when they are long, since there are often many.
struct team_shape {
    int team;
    bool strided;
};

static inline team_shape choose_team(int64_t cols, int64_t inner)
{
    if (inner == 1)
        return {cols <= 32 ? 8 : cols <= 1024 ? 32 : TEAM_THREADS, false};
    return {cols < 32 ? 1 : 8, true};
}

static inline int64_t team_blocks(int64_t columns, team_shape shape)
{
    return ceil_div(columns, TEAM_THREADS / shape.team);
}

// Runs the statement with the constants TEAM and STRIDED for what choose_team says.
#define CUDA_OPS_TEAM_DISPATCH(shape, TEAM, STRIDED, ...)                                                              \
    do {                                                                                                               \
        if ((shape).strided) {                                                                                         \
            constexpr bool STRIDED = true;                                                                             \
            if ((shape).team == 1) {                                                                                   \
                constexpr int TEAM = 1;                                                                                \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                constexpr int TEAM = 8;                                                                                \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        } else {                                                                                                       \
            constexpr bool STRIDED = false;                                                                            \
            if ((shape).team == 8) {                                                                                   \
                constexpr int TEAM = 8;                                                                                \
                __VA_ARGS__;                                                                                           \
            } else if ((shape).team == WARP_SIZE) {                                                                    \
                constexpr int TEAM = WARP_SIZE;                                                                        \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                constexpr int TEAM = TEAM_THREADS;                                                                     \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } while (false)

#endif
