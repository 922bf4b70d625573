// The first stages of a block's first tile are asked of the L2 before wait_for_predecessor(), while the kernel before
// still runs and the blocks of a cluster wait for one another: a prefetch looks at nothing, and the L2 is coherent
// whoever writes later. What comes from device memory is on its way when the loads begin.
#ifndef CUDA_OPS_GEMM_SM90_AHEAD_CUH
#define CUDA_OPS_GEMM_SM90_AHEAD_CUH

#include "common/tensor_map.h"
#include "gemm/sm90/tile.cuh"
#include "ptx/prefetch_tensor.cuh"

// How many stages. Where k is split they cost more than they save (benchmarks/notes/gemm.md).
static constexpr int STAGES_AHEAD = 4;
static inline int stages_ahead(int64_t splits)
{
    return splits > 1 ? 0 : STAGES_AHEAD;
}

#if defined(CUDA_OPS_HOPPER_CODE)

// The tile, whose first step is at k. Clusters that load the same lines take turns, step by step: `turns_a` columns of
// them of A's, of which this one is `turn_a`, and `turns_b` rows of B's.
struct Ahead {
    int steps, k, m, n, batch_a, batch_b, rank_m, rank_n;
    bool lone;
    int turns_a, turns_b, turn_a, turn_b;
};

// This block's box of a column of a stage, which is PARTS boxes, or, if `lone`, all of them (load_column).
template <int PARTS, int LINES>
__device__ __forceinline__ void prefetch_column(const CUtensorMap *map, int inner, int line, int batch, int rank,
                                                bool lone)
{
    if (PARTS > 1 && !lone) {
        tma_prefetch_3d(map, inner, line + rank * LINES, batch);
        return;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        tma_prefetch_3d(map, inner, line + part * LINES, batch);
}

template <typename C>
__device__ __forceinline__ void prefetch_ahead(const Ahead &x, const CUtensorMap *map_a, const CUtensorMap *map_b)
{
#pragma unroll 1
    for (int step = x.turn_a; step < x.steps; step += x.turns_a) {
        const int k = x.k + step * C::K;
        if constexpr (C::A_MN_MAJOR) {
#pragma unroll
            for (int column = 0; column < C::A_COLUMNS; column++)
                prefetch_column<C::CLUSTER_N, C::K / C::CLUSTER_N>(map_a, x.m + column * C::ROW, k, x.batch_a, x.rank_n,
                                                                   x.lone);
        } else {
            prefetch_column<C::CLUSTER_N, C::M / C::CLUSTER_N>(map_a, k, x.m, x.batch_a, x.rank_n, x.lone);
        }
    }
#pragma unroll 1
    for (int step = x.turn_b; step < x.steps; step += x.turns_b) {
        const int k = x.k + step * C::K;
        if constexpr (C::B_MN_MAJOR) {
#pragma unroll
            for (int column = 0; column < C::B_COLUMNS; column++)
                prefetch_column<C::CLUSTER_M, C::K / C::CLUSTER_M>(map_b, x.n + column * C::ROW, k, x.batch_b, x.rank_m,
                                                                   x.lone);
        } else {
            prefetch_column<C::CLUSTER_M, C::N / C::CLUSTER_M>(map_b, k, x.n, x.batch_b, x.rank_m, x.lone);
        }
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
