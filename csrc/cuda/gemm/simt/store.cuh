// The simt path's epilogues, from a block's sums to D, to the preactivation or to partial sums.
#ifndef CUDA_OPS_GEMM_SIMT_STORE_CUH
#define CUDA_OPS_GEMM_SIMT_STORE_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/arithmetic.cuh"

struct SimtArguments {
    int64_t m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    int64_t tiles_m, tiles_n, band;
    int64_t chunk;   // the k of a split; the last one has less
    bool to_partial; // sums go to `partial` as they are, and gemm_add_splits finishes them
    bool vectors;    // rows of what is written are aligned to 16 bytes
};

// Stores adjacent elements of a row, of which `left` are in bounds; whole: all are, and aligned to be written at once.
template <typename To, typename A, int COUNT>
__device__ __forceinline__ void store_row(To *to, const A (&value)[COUNT], int left, bool whole)
{
    typedef aligned_vector<To, COUNT> Vector;
    Vector vector;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        vector.element[e] = store_from_accumulate<To>(value[e]);
    if (whole)
        *reinterpret_cast<Vector *>(to) = vector;
    else
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            if (e < left)
                to[e] = vector.element[e];
}

// The epilogue through shared memory: the sums go there one by one, and a rolled loop finishes them and writes rows of
// the warp's tile. A 16-byte store would want four sums in consecutive registers, in the very banks of their factors of
// B, and the main loop would lose a quarter of its speed and more. The position of an element in its 16 bytes is XORed
// with the row, so that a warp's stores meet each bank once. Rows [from, from + COUNT) of the thread's; added to what
// is there if `add`.
template <int LANES_M, int WARP_N, int COUNT, typename A, int TM, int TN>
__device__ __forceinline__ void put_sums(A *mine, int lane_m, const A (&sum)[TM][TN], int from, bool add)
{
    constexpr int V = vector16<A>::size, LANES_N = 32 / LANES_M;
#pragma unroll
    for (int e = 0; e < V; e++) {
        volatile A *const to = mine + (e ^ lane_m % V);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = e; j < TN; j += V) {
                const int at = (i / V * LANES_M * V + i % V) * WARP_N + j / V * LANES_N * V;
                to[at] = add ? to[at] + sum[from + i][j] : sum[from + i][j];
            }
    }
}

// Where a lane stores its 16 bytes of each row.
template <typename T>
struct SimtRows {
    void *d, *preactivation;     // preactivation: or null
    accumulate_type<T> *partial; // or null: where the sums go as they are instead
    int64_t to, pitch, column;   // offset of row 0, from row to row, and the column in D
    int left;                    // columns in bounds from there on
    bool vectors;                // rows are aligned to 16 bytes
};

// Finishes and stores rows begin, begin + step, ... below `count` of what put_sums left at `results`; row 0 is row
// `first` of D.
template <typename T, int LANES_M, int WARP_N>
__device__ __forceinline__ void finish_rows(const SimtRows<T> &rows, const accumulate_type<T> *results, int64_t first,
                                            int count, int begin, int step, const Epilogue &epilogue)
{
    typedef accumulate_type<T> A;
    constexpr int V = vector16<A>::size;
    const bool vectors = rows.vectors && rows.left == V;
    A bias[V] = {};
    if (epilogue.bias)
#pragma unroll
        for (int e = 0; e < V; e++)
            if (e < rows.left)
                bias[e] = bias_at<T>(epilogue, rows.column + e);
    if (rows.left <= 0)
        return;
#pragma unroll 1
    for (int r = begin; r < count; r += step) {
        const vector16<A> found = *reinterpret_cast<const vector16<A> *>(results + r * WARP_N);
        A value[V];
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] = found.element[e];
#pragma unroll
        for (int bit = 1; bit < V; bit *= 2)
            if (r / V % LANES_M & bit)
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (!(e & bit)) {
                        const A other = value[e];
                        value[e] = value[e | bit], value[e | bit] = other;
                    }
        const int64_t at = rows.to + (first + r) * rows.pitch;
        if (rows.partial) {
            store_row(rows.partial + at, value, rows.left, vectors);
            continue;
        }
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] = value[e] * (A)epilogue.alpha + bias[e];
        const bool wide = sizeof(T) == 2 && epilogue.output_float32;
        if (rows.preactivation) {
            if (wide)
                store_row(static_cast<float *>(rows.preactivation) + at, value, rows.left, vectors);
            else
                store_row(static_cast<T *>(rows.preactivation) + at, value, rows.left, vectors);
            if (!wide)
#pragma unroll
                for (int e = 0; e < V; e++) // as it was rounded
                    value[e] = load_as_accumulate(store_from_accumulate<T>(value[e]));
        }
        activate_all(value, opaque(epilogue.activation));
        if (wide)
            store_row(static_cast<float *>(rows.d) + at, value, rows.left, vectors);
        else
            store_row(static_cast<T *>(rows.d) + at, value, rows.left, vectors);
    }
}

// Where a thread is in the grid: the block's tile, split and product, and its warp and lane within.
struct SimtPosition {
    int64_t row, column, split, batch; // of the tile's first element
    int lane, lane_m, lane_n, warp_slice, warp_tile;
    int warp_row, warp_column; // in the tile
};

// The epilogue through shared memory, where the stages were, in ROUNDS rounds.
template <typename T, typename Tile, int ROUNDS, typename A, int TM, int TN>
__device__ __forceinline__ void store_through_shared(void *d, void *preactivation, A *partial, A *shared,
                                                     const A (&sum)[TM][TN], const SimtArguments &s,
                                                     const SimtPosition &at, const Epilogue &epilogue)
{
    constexpr int V = vector16<A>::size;
    __syncthreads();
    constexpr int ROUND_M = TM / V / ROUNDS * V;
    constexpr int ROUND_ROWS = Tile::LANES_M * ROUND_M; // of a warp, in a round
    static_assert(TM % (V * ROUNDS) == 0, "a round has whole vectors");
    constexpr int ACROSS = Tile::WARP_N / V, ROWS = 32 / ACROSS; // lanes for a row, rows at once
    A *const results = shared + at.warp_tile * ROUND_ROWS * Tile::WARP_N;
    A *const mine = results + at.lane_m * V * Tile::WARP_N + at.lane_n * V;
    const bool whole = !s.to_partial;
    const int64_t c = at.column + at.warp_column + at.lane % ACROSS * V;
    const SimtRows<T> rows = {d,
                              preactivation,
                              whole ? nullptr : partial,
                              (whole ? at.batch * s.stride_d : (at.split * gridDim.y + at.batch) * s.m * s.n) + c,
                              whole ? s.ldd : s.n,
                              c,
                              s.n - c < V ? (int)(s.n - c) : V,
                              s.vectors};
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll 1
        for (int group = 0; group < Tile::SLICES; group++) {
            // The groups' sums are added in order.
            if (group == at.warp_slice)
#pragma unroll
                for (int p = 0; p < ROUNDS; p++)
                    if (p == round)
                        put_sums<Tile::LANES_M, Tile::WARP_N, ROUND_M>(mine, at.lane_m, sum, p * ROUND_M,
                                                                       Tile::SLICES > 1 && group > 0);
            if (Tile::SLICES > 1)
                __syncthreads();
        }
        __syncwarp();
        const int64_t first = at.row + at.warp_row + round * ROUND_ROWS, left = s.m - first;
        finish_rows<T, Tile::LANES_M, Tile::WARP_N>(
            rows, results + at.lane % ACROSS * V, first, left < ROUND_ROWS ? (int)left : ROUND_ROWS,
            at.lane / ACROSS + at.warp_slice * ROWS, ROWS * Tile::SLICES, epilogue);
        if (Tile::SLICES > 1)
            __syncthreads();
        __syncwarp();
    }
}

#endif
