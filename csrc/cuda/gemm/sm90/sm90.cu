// gemm, sm90 path: D = activation(alpha * op(A) op(B) + bias) by TMA and wgmma, in clusters, with a persistent grid of
// one block an SM: a producer warpgroup and two consumers (ladder/12_tma_wgmma_sm90.cu has the plain form). The blocks
// of a cluster have adjacent tiles, and each loads its part of the operand they share by multicast. Tiles are walked in
// bands, so that concurrent ones share the L2. Ping-pong: each consumer has tiles of its own, and one multiplies during
// the other's epilogue. Small matrices in batches take smaller blocks, two an SM, without clusters. k is split where
// tiles are few; two to four blocks may split it within a cluster (gemm/sm90/pair.cuh). gemm/sm90/lean.cuh has tiles
// without gelu and with a stage more, gemm/sm90/triple.cuh such of 192 rows, gemm/sm90/large_clusters.cuh small ones in
// clusters of eight. 16-bit tiles of 80, 160, 192 and 256 columns make D^T too, as tiles with as many rows: a wave that
// one of the two fills badly, the other may fill. gemm.cu picks the tile by gemm/times.h. Bound by the tensor cores and,
// from 4096^3 on, by the card's power; small D by its start. Measured on an H200 against cuBLAS: bf16 1024^3 0.97 to
// 1.01, 2048^3 1.00, 4096^3 1.00 to 1.03, 8192^3 1.05, 5120 x 5120 x 256 1.14 to 1.20; TF32 1.00 to 1.47 by storage
// order; 256 products of 128 x 128 x 64 bf16 0.96 to 1.05, TF32 0.98 to 1.18
// (benchmarks/notes/gemm.md).
#include "common/activation.cuh"
#include "common/common.cuh"
#include "common/tensor_map.h"
#include "gemm/paths.h"
#include "gemm/sm90/gelu.h"
#include "gemm/sm90/large_clusters.h"
#include "gemm/sm90/lean.h"
#include "gemm/sm90/tile.cuh"
#include "gemm/sm90/triple.h"

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
    return !p.unaligned_a && !p.unaligned_b &&
                   map_possible(call.a, size, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.batch, p.lda,
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
    return gemm_splits_bytes(p, plan.splits) + (p.dtype == CUDA_OPS_FLOAT32 ? gemm_sm90_tf32_bytes(p, plan.tile) : 0);
}

// Tile numbers. 16 bits: the tile that makes D or D^T, and the first of those for batches. TF32: the first of those for
// batches, the one of them that does not transpose B, and the one whose blocks lie side by side in a cluster.
static constexpr int D_OR_TRANSPOSED = 4, SMALL = 6, TF32_SMALL = 4, TF32_UNTRANSPOSED = 5, TF32_SIDE_BY_SIDE = 6;
// The first and last of the 16-bit tiles of lean.cuh.
static constexpr int FIRST_LEAN = 10, LAST_LEAN = 11, TILE_160 = 22;

static bool is_lean(int tile)
{
    return (tile >= FIRST_LEAN && tile <= LAST_LEAN) || tile == TILE_160;
}

// The 16-bit tiles that make D^T too where TMA writes it, with k whole and without gelu; that of 160 columns makes D^T
// alone.
static constexpr int TILE_256 = 0, TILE_192 = 2, TILE_64 = 3;

static bool makes_either(int tile)
{
    return tile == TILE_256 || tile == TILE_192 || tile == TILE_64 || tile == TILE_160;
}

// Those of triple.cuh.
static constexpr int FIRST_TRIPLE = 13, LAST_TRIPLE = 15;

static bool is_triple(int tile)
{
    return tile >= FIRST_TRIPLE && tile <= LAST_TRIPLE;
}

// The 16-bit tiles that a cluster of two blocks makes, each with half of k. That of 128 columns makes D only, the
// others D or D^T; those of 96 and 160 want the operand that gives the columns K-major.
static constexpr int FIRST_PAIR = 16, PAIR_96 = 17, PAIR_128 = 18, PAIR_160 = 19, LAST_PAIR = 21;
// Those of three and four are for A stored k x m and B k x n.
static constexpr int OF_THREE = 25, OF_FOUR = 26;

static bool is_of_more(int tile)
{
    return tile == OF_THREE || tile == OF_FOUR;
}

static bool is_pair(int tile)
{
    return (tile >= FIRST_PAIR && tile <= LAST_PAIR) || is_of_more(tile);
}

// Those of large_clusters.cuh.
static constexpr int FIRST_OF_LARGE_CLUSTERS = 23, LAST_OF_LARGE_CLUSTERS = 24; // the first for one storage order

static bool is_of_large_clusters(int tile)
{
    return tile >= FIRST_OF_LARGE_CLUSTERS && tile <= LAST_OF_LARGE_CLUSTERS;
}

bool gemm_sm90_takes(const cuda_ops_gemm_problem &p, int tile, bool swapped)
{
    const bool tf32 = p.dtype == CUDA_OPS_FLOAT32;
    if (!tf32 && is_pair(tile)) {
        const bool k_contiguous = swapped ? !p.transpose_a : p.transpose_b;
        if (is_of_more(tile))
            return !swapped && p.transpose_a && !p.transpose_b;
        return (!swapped || tile != PAIR_128) && (k_contiguous || (tile != PAIR_96 && tile != PAIR_160));
    }
    // The tiles for batches have no gelu, nor have those of lean.cuh, triple.cuh and large_clusters.cuh.
    if (tile >= (tf32 ? TF32_SMALL : SMALL) && (p.preactivation || is_gelu(p.activation)))
        return false;
    if (tf32)
        return !swapped && (tile != TF32_UNTRANSPOSED || !p.transpose_a || p.transpose_b) &&
               (tile != TF32_SIDE_BY_SIDE || (p.transpose_a && !p.transpose_b));
    if (swapped && makes_either(tile))
        return !p.preactivation && !is_gelu(p.activation) && (tile != TILE_160 || !p.transpose_a) &&
               can_copy_out({nullptr, nullptr, nullptr, nullptr, nullptr, p, nullptr});
    if (is_of_large_clusters(tile) &&
        (tile == FIRST_OF_LARGE_CLUSTERS ? !p.transpose_a || p.transpose_b : p.transpose_a && p.transpose_b))
        return false;
    return tile != TILE_160 && (!swapped || tile == D_OR_TRANSPOSED);
}

bool gemm_sm90_splits(const cuda_ops_gemm_problem &p, int tile, bool swapped)
{
    return p.dtype == CUDA_OPS_FLOAT32 || !(is_pair(tile) || (swapped && makes_either(tile)));
}

// There is a kernel of the tile of 128 x 192 for gelu too.
static bool has_gelu_kernel(const GemmCall &call, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    GemmCall kept = call;
    kept.d = p.preactivation;
    return plan.tile == TILE_192 && plan.splits <= 1 && p.preactivation && is_gelu(p.activation) && !p.transpose_a &&
           p.transpose_b && can_copy_out(call) && can_copy_out(kept);
}

bool gemm_sm90_takes_gelu_backward(const GemmCall &call, GemmDevice device, const void *preactivation)
{
    constexpr int TILE_128 = 1;
    const cuda_ops_gemm_problem &p = call.problem;
    if ((p.dtype != CUDA_OPS_FLOAT16 && p.dtype != CUDA_OPS_BFLOAT16) || p.transpose_a || p.transpose_b ||
        !gemm_sm90_supports(call, device))
        return false;
    GemmCall of_preactivation = call;
    of_preactivation.d = const_cast<void *>(preactivation);
    GemmPlan plan = gemm_sm90_plan(p, device);
    if (is_lean(plan.tile) || is_triple(plan.tile) || is_of_large_clusters(plan.tile) ||
        (plan.swapped && makes_either(plan.tile))) { // the best of those that have gelu instead
        cuda_ops_gemm_problem other = p;
        other.activation = CUDA_OPS_GEMM_GELU;
        plan = gemm_sm90_plan(other, device);
    }
    // A plan of other large tiles is a little faster than gelu's at the product, but leaves gelu a pass of its own.
    const bool large = plan.tile == LAST_PAIR ||
                       (!plan.swapped && (plan.tile == TILE_192 || plan.tile == TILE_256 || plan.tile == TILE_128));
    return plan.splits <= 1 && large && can_copy_out(call) && can_copy_out(of_preactivation);
}

cuda_ops_status gemm_sm90_planned(const GemmCall &original, GemmDevice device, const GemmPlan &wanted)
{
    GemmPlan plan = wanted;
    if (!gemm_sm90_takes(original.problem, plan.tile, plan.swapped))
        return CUDA_OPS_INVALID_ARGUMENT;
    // An address that TMA cannot write to, of which the choice knows nothing.
    if (original.problem.dtype != CUDA_OPS_FLOAT32 && plan.swapped && makes_either(plan.tile) &&
        !can_copy_out(original)) {
        plan.swapped = 0;
        plan.tile = plan.tile == TILE_160 ? TILE_192 : plan.tile;
    }
    const GemmCall call = plan.swapped ? exchanged(original) : original;
    if (is_pair(plan.tile) && plan.splits > 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        if (is_pair(plan.tile))
            return gemm_sm90_pair_bfloat16(call, device, plan);
        if (is_lean(plan.tile))
            return gemm_sm90_lean_bfloat16(call, device, plan);
        if (is_triple(plan.tile))
            return gemm_sm90_triple_bfloat16(call, device, plan);
        if (is_of_large_clusters(plan.tile))
            return gemm_sm90_large_clusters_bfloat16(call, device, plan);
        if (plan.tile >= SMALL)
            return gemm_sm90_small_bfloat16(call, device, plan);
        if (has_gelu_kernel(call, plan))
            return gemm_sm90_gelu_forward_bfloat16(call, device);
        return call.problem.transpose_a ? gemm_sm90_bfloat16_transposed(call, device, plan)
                                        : gemm_sm90_bfloat16(call, device, plan);
    case CUDA_OPS_FLOAT16:
        if (is_pair(plan.tile))
            return gemm_sm90_pair_float16(call, device, plan);
        if (is_lean(plan.tile))
            return gemm_sm90_lean_float16(call, device, plan);
        if (is_triple(plan.tile))
            return gemm_sm90_triple_float16(call, device, plan);
        if (is_of_large_clusters(plan.tile))
            return gemm_sm90_large_clusters_float16(call, device, plan);
        if (plan.tile >= SMALL)
            return gemm_sm90_small_float16(call, device, plan);
        if (has_gelu_kernel(call, plan))
            return gemm_sm90_gelu_forward_float16(call, device);
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
