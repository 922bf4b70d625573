// 16-bit tiles of the sm90 path in clusters of eight blocks, two by four, for the gradients of weights: few tiles and a
// long k, where what bounds small tiles is the lines that an SM asks the L2 cache for. A block of such a cluster asks for a
// quarter of its tile's rows of A and half of B's columns. Both operands are stored along m and n there, and no other
// order is compiled. Not every SM has room: a cluster's are of one part of the GPU, and 15 clusters fit an H100 or H200.
#ifndef CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_CUH
#define CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_CUH

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/large_clusters.h"

// The tiles, as gemm/times.h numbers them.
template <typename T>
static cuda_ops_status launch_large_clusters(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    // clang-format off
    switch (plan.tile) {
    //                                 M   N   cluster ping-pong stages
    case 23: return launch<Tile<T, 64, 64, 2, 4, true, 12, true, true>>(call, device, plan);
    case 24:
        if (p.transpose_a)
            return launch<Tile<T, 128, 64, 2, 4, false, 8, true, true>>(call, device, plan);
        return p.transpose_b ? launch<Tile<T, 128, 64, 2, 4, false, 8, false, false>>(call, device, plan)
                             : launch<Tile<T, 128, 64, 2, 4, false, 8, false, true>>(call, device, plan);
    }
    // clang-format on
#else
    (void)call, (void)device, (void)plan;
#endif
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
