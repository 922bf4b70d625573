// What attention's backward kernels on Hopper want of each query: the launch before theirs.
#ifndef CUDA_OPS_ATTENTION_SM90_PREPARE_CUH
#define CUDA_OPS_ATTENTION_SM90_PREPARE_CUH

#include <math.h>

#include "attention/sm90/band.h"
#include "attention/sm90/sequences.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/griddepcontrol.cuh"

// Where a query's number stands among those of its block: the four that a lane wants of 16 columns of a product,
// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, are neighbours.
__device__ __forceinline__ int statistics_place(int query)
{
    return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

// Before: what backward needs of each query, and turns of zero where there are any. Rows beyond the queries have a
// logsumexp of infinity, and so weights of zero, as have queries without keys. Blocks of queries that see no block of
// keys have gradients of zero, which nobody else writes. A thread has 16 bytes of a row.
struct BackwardPrepare {
    float *statistics;
    uint32_t *turns, *handed_out;            // NULL where kernels take no turns
    const float *logsumexp, *grad_logsumexp; // the latter may be NULL
    const void *output, *grad_output;
    void *grad_query;
    cuda_ops_attention_strides output_strides, grad_strides, grad_query_strides;
    Band band;
    int heads, blocks_m, head_dim, value_dim;
    float kept;     // 1 / dropout's scale, which delta is multiplied by
    float to_units; // of logsumexp, in which kernels have scores: log2(e), or 1 where a mask is added
    PackedWork packed;
};

template <typename T, int LANES, int M, bool PACKED>
__global__ void __launch_bounds__(256, 2) attention_sm90_prepare_kernel(const __grid_constant__ BackwardPrepare work)
{
    constexpr int ROWS = 256 / LANES;
    typedef aligned_vector<T, 8> Vector;
    wait_for_predecessor();
    release_successor();
    const int head = blockIdx.y % work.heads, batch = blockIdx.y / work.heads;
    const int lane = threadIdx.x % LANES;
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && work.handed_out)
        *work.handed_out = 0;
    int number = blockIdx.x;
    Band band = work.band;
    int64_t before = 0, all_queries = work.band.queries; // rows before the sequence, and of a head of logsumexp
    if constexpr (PACKED) {
        const int index = work.packed.blocks[blockIdx.x];
        if (index < 0)
            return;
        const PackedSequence sequence = work.packed.sequences[index];
        number = blockIdx.x - sequence.first_block, band = sequence.band;
        before = sequence.first_query, all_queries = work.packed.query_rows;
    }
    const int first = number * M, queries = band.queries;
    const T *const output = (const T *)work.output + batch * work.output_strides.batch +
                            head * work.output_strides.head + before * work.output_strides.row + 8 * lane;
    const T *const grad = (const T *)work.grad_output + batch * work.grad_strides.batch +
                          head * work.grad_strides.head + before * work.grad_strides.row + 8 * lane;
    const int64_t block = (int64_t)blockIdx.y * work.blocks_m + blockIdx.x;
    if (threadIdx.x == 0 && work.turns)
        work.turns[block] = 0;
    if (work.grad_query && !queries_see_keys(band, first, M)) {
        T *const to = (T *)work.grad_query + batch * work.grad_query_strides.batch +
                      head * work.grad_query_strides.head + before * work.grad_query_strides.row + 8 * lane;
        for (int row = first + threadIdx.x / LANES; row < min(first + M, queries) && 8 * lane < work.head_dim;
             row += ROWS)
            *(Vector *)(to + row * work.grad_query_strides.row) = {};
    }
    // A row's lanes have a part of the sums of TURNS rows, and one of them each the rest of one row. All loads are
    // under way before the first number is wanted.
    constexpr int TURNS = M / ROWS;
    static_assert(TURNS <= LANES, "a lane for each of the rows");
    Vector o[TURNS] = {}, g[TURNS] = {};
    const int local = threadIdx.x / LANES, own = first + local + lane * ROWS;
    const bool has_own = lane < TURNS && own < queries;
    const int64_t at = (int64_t)blockIdx.y * all_queries + before + own;
    const float logsumexp = has_own ? work.logsumexp[at] : -INFINITY;
    const float grad_logsumexp = has_own && work.grad_logsumexp ? work.grad_logsumexp[at] : 0.0f;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int row = first + local + i * ROWS;
        if (row < queries && 8 * lane < work.value_dim) {
            o[i] = *(const Vector *)(output + row * work.output_strides.row);
            g[i] = *(const Vector *)(grad + row * work.grad_strides.row);
        }
    }
    float delta = 0;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum += load_as_accumulate(o[i].element[e]) * load_as_accumulate(g[i].element[e]);
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        delta = lane == i ? sum : delta;
    }
    if (lane < TURNS) {
        float *const to = work.statistics + block * (2 * M) + statistics_place(local + lane * ROWS);
        to[0] = logsumexp == -INFINITY ? INFINITY : logsumexp * work.to_units;
        to[M] = (delta - grad_logsumexp) * work.kept;
    }
}

// For one of the two backward kernels, of rows of up to 128 elements or of more, without what only the former have:
// turns, and gradients of queries that no block of keys writes.
static inline BackwardPrepare prepare_of(const AttentionCall &call, float *statistics, const Band &band,
                                         int64_t blocks_m)
{
    const cuda_ops_attention &p = call.problem;
    BackwardPrepare prepare = {};
    prepare.statistics = statistics;
    prepare.logsumexp = (const float *)call.logsumexp, prepare.grad_logsumexp = (const float *)call.grad_logsumexp;
    prepare.output = call.output, prepare.grad_output = call.grad_output;
    prepare.output_strides = p.output, prepare.grad_strides = p.grad_output;
    prepare.grad_query_strides = p.grad_query;
    prepare.band = band, prepare.heads = (int)p.heads, prepare.blocks_m = (int)blocks_m;
    prepare.head_dim = (int)p.head_dim, prepare.value_dim = (int)p.value_dim;
    prepare.kept = 1, prepare.to_units = 1.4426950408889634f;
    return prepare;
}

#endif
