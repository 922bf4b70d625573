// Contiguous rows, which a group of threads reads by 16-byte vectors, several in flight in each thread. A row may start
// and end anywhere: the elements before its first whole vector and after its last one, fewer than a vector has at
// either end, go to a thread each.
#ifndef CUDA_OPS_COMMON_ROWS_CUH
#define CUDA_OPS_COMMON_ROWS_CUH

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"

static constexpr int VECTORS_IN_FLIGHT = 4;

// exp for results and summands that are rounded to T. For fp16 and bf16 by the special function unit's exp2, four times
// as fast as exp: its relative error, 2e-7 plus 1e-7 times |x|, is far below what 16 bits can tell.
template <typename T>
__device__ __forceinline__ accumulate_type<T> exp_for(accumulate_type<T> x)
{
    if constexpr (sizeof(T) == 2) {
        return ex2_approx_ftz(x * 1.44269504f);
    } else {
        return exp(x);
    }
}

// A row's `head` elements before its first whole vector, its `vectors`, and the elements from `tail` on.
struct row_split {
    int head;
    int64_t vectors, tail;
};

template <typename T>
__device__ __forceinline__ row_split split_row(const T *row, int64_t cols)
{
    constexpr int SIZE = vector16<T>::size;
    const int64_t until_aligned = -(reinterpret_cast<uintptr_t>(row) / sizeof(T)) % SIZE;
    row_split split;
    split.head = (int)(until_aligned < cols ? until_aligned : cols);
    split.vectors = (cols - split.head) / SIZE;
    split.tail = split.head + split.vectors * SIZE;
    return split;
}

// Calls function(c, values) for thread `rank`'s share of a row, where values[k][e] is element c + e of inputs[k]; then
// stores values[0] at the same index of output, unless that is null. `group`: its threads, eight at least. All arrays
// have the same alignment within 16 bytes (see same_alignment).
template <int INPUTS, typename T, typename F>
__device__ __forceinline__ void for_row(T *output, const T *const (&inputs)[INPUTS], int64_t cols, int rank, int group,
                                        F function)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int IN_FLIGHT = VECTORS_IN_FLIGHT / INPUTS;
    const row_split split = split_row(inputs[0], cols);
    for (int64_t first = rank; first < split.vectors; first += IN_FLIGHT * group) {
        const int64_t left = split.vectors - first, at = split.head + first * V::size;
        V vectors[IN_FLIGHT][INPUTS];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (i * group < left)
#pragma unroll
                for (int k = 0; k < INPUTS; k++)
                    vectors[i][k] = reinterpret_cast<const V *>(inputs[k] + at)[i * group];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (i * group < left) {
                A values[INPUTS][V::size];
#pragma unroll
                for (int k = 0; k < INPUTS; k++)
#pragma unroll
                    for (int e = 0; e < V::size; e++)
                        values[k][e] = element_of(vectors[i][k], e);
                function(at + i * group * V::size, values);
                if (output)
                    store_vector(reinterpret_cast<V *>(output + at) + i * group, vector_of<T>(values[0]));
            }
    }
#pragma unroll 1
    for (int end = 0; end < 2; end++) {
        const int64_t c = end == 0 ? (rank < split.head ? rank : cols) : split.tail + rank;
        if (c < cols) {
            A values[INPUTS][1];
#pragma unroll
            for (int k = 0; k < INPUTS; k++)
                values[k][0] = load_as_accumulate(inputs[k][c]);
            function(c, values);
            if (output)
                output[c] = store_from_accumulate<T>(values[0][0]);
        }
    }
}

static inline bool same_alignment(const void *a, const void *b)
{
    return (reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)) % 16 == 0;
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

// Adds VECTORS * COUNT elements at once, of which missing ones are -inf: one rescaling for all. NaN as above. Without
// any element above -inf the sum is zero, and it is the subtraction of the maximum that makes the result NaN.
template <typename T, int VECTORS, int COUNT>
__device__ __forceinline__ void add_elements(log_sum_exp<accumulate_type<T>> &state,
                                             const aligned_vector<T, COUNT> (&vectors)[VECTORS])
{
    typedef accumulate_type<T> A;
    A maximum = state.maximum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            maximum = fmax(maximum, element_of(vectors[i], e));
    const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum;
    A sum = state.sum * exp_for<T>(state.maximum - shift);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        A part = 0;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            part += exp_for<T>(element_of(vectors[i], e) - shift);
        sum += part;
    }
    state = {maximum, sum};
}

// Adds thread `rank`'s share of `vectors` vectors from `row` on.
template <int COUNT, int GROUP, typename T>
__device__ __forceinline__ void add_vectors(log_sum_exp<accumulate_type<T>> &state, const T *row, int64_t vectors,
                                            int rank)
{
    typedef aligned_vector<T, COUNT> P;
    const P none = vector_of_equal<T, COUNT>(-accumulate_type<T>(CUDART_INF));
    for (int64_t first = rank; first < vectors; first += VECTORS_IN_FLIGHT * GROUP) {
        const P *const from = reinterpret_cast<const P *>(row) + first;
        const int64_t left = vectors - first;
        P share[VECTORS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
            share[i] = load_vector_or(from + i * GROUP, i * GROUP < left, none);
        add_elements(state, share);
    }
}

// The log-sum-exp of thread `rank`'s share of a row that a group of GROUP threads reads. Groups below a warp have rows
// so short that they go element by element.
template <int GROUP, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>> row_log_sum_exp(const T *row, int64_t cols, int rank)
{
    typedef accumulate_type<T> A;
    log_sum_exp<A> state = log_sum_exp_of_none<A>();
    if constexpr (GROUP < WARP_SIZE) {
        add_vectors<1, GROUP>(state, row, cols, rank);
    } else {
        const row_split split = split_row(row, cols);
        const T none = store_from_accumulate<T>(-A(CUDART_INF));
        const aligned_vector<T, 1> ends[2] = {{rank < split.head ? row[rank] : none},
                                              {split.tail + rank < cols ? row[split.tail + rank] : none}};
        add_vectors<vector16<T>::size, GROUP>(state, row + split.head, split.vectors, rank);
        if (split.head > 0 || split.tail < cols)
            add_elements(state, ends);
    }
    return state;
}

#endif
