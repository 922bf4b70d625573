// How threads share the columns of an [outer, cols, inner] array, and the log-sum-exp that they find together.
//
// A team of TEAM threads takes one column (the `cols` elements of one (outer, inner) pair, `inner` apart), thread
// `rank` of it the elements rank, rank + TEAM, ... Which threads make a team follows memory, so that a warp's loads
// touch neighbouring addresses:
//   inner == 1: threads of a team are neighbours, since the elements of a column are
//   inner > 1:  threads of a team are a block's width apart (STRIDED), since neighbouring columns are neighbours
//
// All threads of a block go through a reduction together, also those whose column is past the end.
#ifndef CUDA_OPS_COMMON_THREAD_GROUP_CUH
#define CUDA_OPS_COMMON_THREAD_GROUP_CUH

#include "common/rows.cuh"

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

// First the largest of all, so that each sum is rescaled once.
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
        value = lanes_combine<(TEAM < WARP_SIZE ? TEAM : WARP_SIZE)>(value);
        if constexpr (TEAM > WARP_SIZE) {
            static_assert(TEAM == TEAM_THREADS, "a team is a part of a warp, a warp, or the block");
            constexpr int WARPS = TEAM / WARP_SIZE;
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
template <int TEAM, bool STRIDED, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>> column_log_sum_exp(const T *input, int64_t cols,
                                                                              int64_t inner, int rank)
{
    typedef accumulate_type<T> A;
    if constexpr (STRIDED) {
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t c = rank; c < cols; c += TEAM)
            add_element(state, load_as_accumulate(input[c * inner]));
        return state;
    } else {
        return row_log_sum_exp<TEAM>(input, cols, rank);
    }
}

// The log-sum-exp of a column; all of its team's threads get it.
template <int TEAM, bool STRIDED, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>>
team_log_sum_exp(const T *input, int64_t cols, int64_t inner, int rank, log_sum_exp<accumulate_type<T>> *scratch)
{
    return team_reduce<TEAM, STRIDED>(column_log_sum_exp<TEAM, STRIDED>(input, cols, inner, rank), scratch);
}

// Size and kind of the teams for a shape. Rows of up to 32 (ten digits) would leave most of a warp idle; a warp takes
// rows of up to `longest_of_warp`, a block longer ones. Columns are split only when they are long, since there are
// often many.
struct team_shape {
    int team;
    bool strided;
};

static constexpr int64_t SHORT_ROW = 1024;

static inline team_shape choose_team(int64_t cols, int64_t inner, int64_t longest_of_warp = SHORT_ROW)
{
    if (inner == 1)
        return {cols <= 32 ? 8 : cols <= longest_of_warp ? WARP_SIZE : TEAM_THREADS, false};
    return {cols < 32 ? 1 : 8, true};
}

// A warp needs no barrier and, for a row, far fewer instructions than the warps of a block do together, but with few
// rows it leaves multiprocessors idle: so it takes rows of up to 8192, if that is no more than so many times the rows.
static inline int64_t longest_of_warp(int64_t columns, int times)
{
    const int64_t most = columns * times < 8 * SHORT_ROW ? columns * times : 8 * SHORT_ROW;
    return most > SHORT_ROW ? most : SHORT_ROW;
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
