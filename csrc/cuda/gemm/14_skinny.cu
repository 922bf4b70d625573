// Rung 14: D = activation(alpha * op(A) op(B) + bias) for skinny and small products: little D, all of k in one block.
// A block makes a tile of 32 or 64 x 16. One thread keeps the copy engine's ring full, as much as shared memory
// holds (so that a long operand streams at the speed of memory), one warpgroup multiplies by wgmma and writes its
// accumulators straight to D. Where m is short, A and B change places, so that the long side is the one of which wgmma
// takes 64, and n may be as few as 16.
// Fixes of rung 13: with small tiles few SMs are idle, and a grid of plain blocks, without clusters and without a
// second way for the results, starts and ends sooner than a persistent one. Leaves on the table: neighbours fetch the
// same slices, so that it is no match where D is large. Bound by memory where m is short, else by a launch and the way
// of the first bytes. Not kept: k cut among the blocks of a cluster, see benchmarks/notes/gemm.md, which has what is
// measured.
#include "common.cuh"
#include "gemm/hopper.cuh"
#include "gemm/rungs.h"

bool gemm_skinny_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return gemm_cluster_persistent_supports(call, device) &&
           (p.dtype != CUDA_OPS_FLOAT32 || (!p.transpose_a && p.transpose_b));
}

bool gemm_skinny_takes(const cuda_ops_gemm_problem &p, int tile, bool swapped)
{
    const bool a_mn_major = swapped ? !p.transpose_b : p.transpose_a;
    return tile == 0 || !a_mn_major;
}

cuda_ops_status gemm_skinny_planned(const GemmCall &call, const GemmPlan &plan)
{
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        return gemm_skinny_bfloat16(call, plan);
    case CUDA_OPS_FLOAT16:
        return gemm_skinny_float16(call, plan);
    case CUDA_OPS_FLOAT32:
        return gemm_skinny_tf32(call, plan);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status gemm_skinny(const GemmCall &call, GemmDevice device)
{
    return gemm_skinny_planned(call, gemm_skinny_plan(call.problem, device));
}
