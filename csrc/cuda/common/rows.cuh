// Contiguous rows, which a team of threads goes through in pieces of 16 bytes, several under way in each thread. A row
// may start and end anywhere: the elements before its first whole piece and after its last one, fewer than a piece has
// at either end, go to a thread each.
#ifndef CUDA_OPS_COMMON_ROWS_CUH
#define CUDA_OPS_COMMON_ROWS_CUH

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"

static constexpr int PIECES_UNDER_WAY = 4;

// exp for results and summands that are to be rounded to a T. For the halves by the multiprocessor's own exp2, four
// times as fast as exp: its relative error, 2e-7 and 1e-7 times |x| more, is far below what a half can tell.
template <typename T>
__device__ __forceinline__ accumulate_type<T> exp_for(accumulate_type<T> x)
{
    if constexpr (sizeof(T) == 2) {
        return ex2_approx_ftz(x * 1.44269504f);
    } else {
        return exp(x);
    }
}

// `head` elements before the first whole piece, `pieces`, and the elements from `tail` on after them.
struct row_cut {
    int head;
    int64_t pieces, tail;
};

template <typename T>
__device__ __forceinline__ row_cut cut_row(const T *row, int64_t cols)
{
    constexpr int SIZE = vector16<T>::size;
    const int64_t until_aligned = -(reinterpret_cast<uintptr_t>(row) / sizeof(T)) % SIZE;
    row_cut cut;
    cut.head = (int)(until_aligned < cols ? until_aligned : cols);
    cut.pieces = (cols - cut.head) / SIZE;
    cut.tail = cut.head + cut.pieces * SIZE;
    return cut;
}

// Calls function(c, values) for thread `rank`'s share of a row, where values[k][e] is element c + e of inputs[k]; then
// values[0] goes to the same place of output, unless that is null. `team`: threads, eight at least. All arrays lie
// alike against 16 bytes (see lie_alike).
template <int INPUTS, typename T, typename F>
__device__ __forceinline__ void for_row(T *output, const T *const (&inputs)[INPUTS], int64_t cols, int rank, int team,
                                        F function)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int UNDER_WAY = PIECES_UNDER_WAY / INPUTS;
    const row_cut cut = cut_row(inputs[0], cols);
    for (int64_t first = rank; first < cut.pieces; first += UNDER_WAY * team) {
        const int64_t left = cut.pieces - first, at = cut.head + first * V::size;
        V pieces[UNDER_WAY][INPUTS];
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++)
            if (i * team < left)
#pragma unroll
                for (int k = 0; k < INPUTS; k++)
                    pieces[i][k] = reinterpret_cast<const V *>(inputs[k] + at)[i * team];
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++)
            if (i * team < left) {
                A values[INPUTS][V::size];
#pragma unroll
                for (int k = 0; k < INPUTS; k++)
#pragma unroll
                    for (int e = 0; e < V::size; e++)
                        values[k][e] = element_of(pieces[i][k], e);
                function(at + i * team * V::size, values);
                if (output)
                    store_vector(reinterpret_cast<V *>(output + at) + i * team, vector_of<T>(values[0]));
            }
    }
#pragma unroll 1
    for (int end = 0; end < 2; end++) {
        const int64_t c = end == 0 ? (rank < cut.head ? rank : cols) : cut.tail + rank;
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

static inline bool lie_alike(const void *a, const void *b)
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

// Adds PIECES * COUNT elements at one go, of which those that are missing are -inf: one rescaling for all. NaN as
// above. Without any element above -inf the sum is zero, and it is the subtraction of the maximum that makes the result
// NaN.
template <typename T, int PIECES, int COUNT>
__device__ __forceinline__ void add_elements(log_sum_exp<accumulate_type<T>> &state,
                                             const aligned_vector<T, COUNT> (&pieces)[PIECES])
{
    typedef accumulate_type<T> A;
    A maximum = state.maximum;
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            maximum = fmax(maximum, element_of(pieces[i], e));
    const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum;
    A sum = state.sum * exp_for<T>(state.maximum - shift);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        A part = 0;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            part += exp_for<T>(element_of(pieces[i], e) - shift);
        sum += part;
    }
    state = {maximum, sum};
}

// Adds thread `rank`'s share of `pieces` pieces from `row` on.
template <int COUNT, int TEAM, typename T>
__device__ __forceinline__ void add_pieces(log_sum_exp<accumulate_type<T>> &state, const T *row, int64_t pieces,
                                           int rank)
{
    typedef aligned_vector<T, COUNT> P;
    const P none = vector_of_equal<T, COUNT>(-accumulate_type<T>(CUDART_INF));
    for (int64_t first = rank; first < pieces; first += PIECES_UNDER_WAY * TEAM) {
        const P *const from = reinterpret_cast<const P *>(row) + first;
        const int64_t left = pieces - first;
        P share[PIECES_UNDER_WAY];
#pragma unroll
        for (int i = 0; i < PIECES_UNDER_WAY; i++)
            share[i] = load_vector_or(from + i * TEAM, i * TEAM < left, none);
        add_elements(state, share);
    }
}

// The log-sum-exp of thread `rank`'s share of a row that a team of TEAM threads goes through. Rows of teams below a
// warp are so short that they go element by element.
template <int TEAM, typename T>
__device__ __forceinline__ log_sum_exp<accumulate_type<T>> row_log_sum_exp(const T *row, int64_t cols, int rank)
{
    typedef accumulate_type<T> A;
    log_sum_exp<A> state = log_sum_exp_of_none<A>();
    if constexpr (TEAM < WARP_SIZE) {
        add_pieces<1, TEAM>(state, row, cols, rank);
    } else {
        const row_cut cut = cut_row(row, cols);
        const T none = store_from_accumulate<T>(-A(CUDART_INF));
        const aligned_vector<T, 1> ends[2] = {{rank < cut.head ? row[rank] : none},
                                              {cut.tail + rank < cols ? row[cut.tail + rank] : none}};
        add_pieces<vector16<T>::size, TEAM>(state, row + cut.head, cut.pieces, rank);
        if (cut.head > 0 || cut.tail < cols)
            add_elements(state, ends);
    }
    return state;
}

#endif
