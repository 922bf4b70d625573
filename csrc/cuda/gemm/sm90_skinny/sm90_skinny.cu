// Rung 14: D = activation(alpha * op(A) op(B) + bias) for skinny and small products: little D.
// A block makes a tile of 64 x 16 to 64. One thread keeps the copy engine's ring full, as much as shared memory
// holds (so that a long operand streams at the speed of memory), and one warpgroup multiplies by wgmma. Where m is
// short, A and B change places, so that the long side is the one of which wgmma takes 64, and n may be as few as 16.
// Where tiles are few and k is long, k is cut among the blocks of a cluster: each sends its sums, register by register,
// to the first one's shared memory, whose barrier counts the bytes, so that nobody waits but who adds them.
// Fixes of rung 13: with small tiles few SMs are idle, and plain blocks, two of which share an SM, start (under the
// kernel before, see launch_dependent) and end sooner than a persistent grid's. Results leave by way of shared memory
// and one short loop: unrolled, the way out of 64 x 64 sums took 3 microseconds more, waiting for instructions.
// Leaves on the table: neighbours fetch the same slices, so that it is no match where D is large. Bound by memory where
// m is short (3.3 TB/s with 16 rows, start included), else by a launch and the way of the first bytes.
// benchmarks/notes/gemm.md has what is measured.
#include "common/common.cuh"
#include "gemm/paths.h"
#include "ptx/wgmma.cuh"

Answer gemm_sm90_skinny_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (const Answer answer = gemm_sm90_supports(call, device); !answer)
        return answer;
    return p.dtype != CUDA_OPS_FLOAT32 || (!p.transpose_a && p.transpose_b)
               ? YES
               : no("TF32's operands are not both stored along k");
}

cuda_ops_status gemm_sm90_skinny_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        return gemm_sm90_skinny_bfloat16(call, device, plan);
    case CUDA_OPS_FLOAT16:
        return gemm_sm90_skinny_float16(call, device, plan);
    case CUDA_OPS_FLOAT32:
        return gemm_sm90_skinny_tf32(call, device, plan);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status gemm_sm90_skinny(const GemmCall &call, GemmDevice device)
{
    return gemm_sm90_skinny_planned(call, device, gemm_sm90_skinny_plan(call.problem, device));
}
