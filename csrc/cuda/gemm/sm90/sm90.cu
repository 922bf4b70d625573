// Rung 13: D = activation(alpha * op(A) op(B) + bias) by TMA and wgmma in clusters, with a persistent grid.
// A block an SM, in clusters of two, which walks from tile to tile; three warpgroups as in rung 12. The blocks of a
// cluster take tiles beside each other, and each loads its part of the slice they share for both (multicast). Tiles
// come in bands of rows, so that those that run at one time make up about a square, and what they read stays in the L2
// cache. Ping-pong: each consumer warpgroup has tiles of its own, and one multiplies while the other's results leave.
// Batches of matrices no larger than a tile or two go by smaller blocks that are no cluster's and share an SM by twos:
// there is nothing to share, and half of a cluster would have no tile.
// The tile is picked by the table in gemm/times.h; k is split where tiles are few and k is long.
// Fixes of rung 12: a tile's start and end are hidden, slices are fetched once a cluster, the order is the cache's, and
// small D gets small tiles. Bound by the tensor cores and, from 4096^3 on, by the card's power; small D by its start.
// One tile of halves (128 x 80) makes D or D transposed: where D has few columns, or few rows, 80 cuts it so that every
// SM has a tile. Where tiles are few and k is long, two blocks make one together, each with half of k
// (gemm/sm90/pair.cuh). Measured on an H200 against cuBLAS: bfloat16 1024^3 0.97 to 1.01, 2048^3 1.00,
// 4096^3 1.00 to 1.03, 8192^3 1.05, 5120 x 5120 x 256 1.14 to 1.20; TF32 by storage order 1.00 to 1.47;
// 256 products of 128 x 128 x 64 bfloat16 0.96 to 1.05, TF32 0.98 to 1.18.
// benchmarks/notes/gemm.md has it all.
#include "common/common.cuh"
#include "common/tensor_map.h"
#include "gemm/paths.h"

Answer gemm_sm90_supports(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability != 90)
        return NEEDS_90;
    if (p.k == 0 || p.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64, nor a k of zero");
    if (p.dtype == CUDA_OPS_FLOAT32 && !p.allow_tf32)
        return GEMM_NEEDS_TF32;
    const int64_t size = p.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    return map_possible(call.a, size, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.batch, p.lda,
                        p.stride_a) &&
                   map_possible(call.b, size, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k, p.batch, p.ldb,
                                p.stride_b)
               ? YES
               : no("A or B has no TMA descriptor: rows that are no multiple of 16 bytes, or not aligned");
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

int64_t gemm_sm90_planned_workspace(const cuda_ops_gemm_problem &p, const GemmPlan &plan)
{
    return gemm_pieces_bytes(p, plan.splits) + (p.dtype == CUDA_OPS_FLOAT32 ? gemm_sm90_tf32_bytes(p, plan.tile) : 0);
}

// Tiles of halves: the one that makes D or D transposed, and the first of those for batches. Of TF32: the first of
// those, and the one of them that does not turn B.
static constexpr int EITHER_WAY = 4, SMALL = 6, TF32_SMALL = 4, TF32_UNTURNED = 5;

// The tiles of halves that two blocks make together, each with half of k. That of 128 columns makes D alone, the others
// D or D transposed; those of 96 and 160 want neighbours along k of what gives them columns.
static constexpr int FIRST_PAIR = 16, PAIR_96 = 17, PAIR_128 = 18, PAIR_160 = 19, LAST_PAIR = 20;

static bool is_pair(int tile)
{
    return tile >= FIRST_PAIR && tile <= LAST_PAIR;
}

bool gemm_sm90_takes(const cuda_ops_gemm_problem &p, int tile, bool swapped)
{
    const bool tf32 = p.dtype == CUDA_OPS_FLOAT32;
    if (!tf32 && is_pair(tile)) {
        const bool k_contiguous = swapped ? !p.transpose_a : p.transpose_b;
        return (!swapped || tile != PAIR_128) && (k_contiguous || (tile != PAIR_96 && tile != PAIR_160));
    }
    // Those for batches have no gelu.
    if (tile >= (tf32 ? TF32_SMALL : SMALL) && (p.preactivation || p.activation > CUDA_OPS_GEMM_RELU))
        return false;
    if (tf32)
        return !swapped && (tile != TF32_UNTURNED || !p.transpose_a || p.transpose_b);
    return !swapped || tile == EITHER_WAY;
}

cuda_ops_status gemm_sm90_planned(const GemmCall &original, GemmDevice device, const GemmPlan &plan)
{
    if (!gemm_sm90_takes(original.problem, plan.tile, plan.swapped))
        return CUDA_OPS_INVALID_ARGUMENT;
    const GemmCall call = plan.swapped ? exchanged(original) : original;
    if (is_pair(plan.tile) && plan.splits > 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        if (is_pair(plan.tile))
            return gemm_sm90_pair_bfloat16(call, device, plan);
        if (plan.tile >= SMALL)
            return gemm_sm90_small_bfloat16(call, device, plan);
        return call.problem.transpose_a ? gemm_sm90_bfloat16_transposed(call, device, plan)
                                        : gemm_sm90_bfloat16(call, device, plan);
    case CUDA_OPS_FLOAT16:
        if (is_pair(plan.tile))
            return gemm_sm90_pair_float16(call, device, plan);
        if (plan.tile >= SMALL)
            return gemm_sm90_small_float16(call, device, plan);
        return call.problem.transpose_a ? gemm_sm90_float16_transposed(call, device, plan)
                                        : gemm_sm90_float16(call, device, plan);
    case CUDA_OPS_FLOAT32:
        return gemm_sm90_tf32(call, device, plan);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

int64_t gemm_sm90_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_sm90_planned_workspace(problem, gemm_sm90_plan(problem, device));
}

cuda_ops_status gemm_sm90(const GemmCall &call, GemmDevice device)
{
    return gemm_sm90_planned(call, device, gemm_sm90_plan(call.problem, device));
}
