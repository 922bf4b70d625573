// gemm, sm90_skinny path: D = activation(alpha * op(A) op(B) + bias) by TMA and wgmma for skinny and small D. A block
// makes a tile of 64 x 16, 32 or 64: a producer thread keeps a TMA pipeline full, as deep as shared memory allows (so
// that a long operand streams at the speed of memory), and one warpgroup multiplies. Where m is short, A and B are
// exchanged, so that the long side is wgmma's 64 rows, and n may be as few as 16. Where tiles are few and k is long,
// the blocks of a cluster split k: each sends its sums, register by register, to the first one's shared memory, whose
// mbarrier counts the bytes. Not persistent: two blocks share an SM, start under the kernel before (launch_dependent)
// and end early. The epilogue is one short loop through shared memory; unrolled, that of 64 x 64 sums took 3 us more,
// waiting for instructions. Neighbours fetch the same slices, so that sm90 wins where D is large. Bound by memory where
// m is short (3.3 TB/s with 16 rows, start included), else by the launch and the latency of the first bytes
// (benchmarks/notes/gemm.md).
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
