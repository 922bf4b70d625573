// attention's backward of rows of 129 to 256 elements on Hopper, bfloat16, by the formulas of backward_bfloat16.cu, in
// three launches: delta, beside logsumexp; the gradients of keys and values (wide_keys.cuh); those of queries
// (wide_queries.cuh). Scores are computed twice, 7 products where 5 are wanted: with 64 keys a block, which are as many
// as there are registers for, the queries' sums over blocks of keys would take the L2 longer than that. Nothing is
// added in device memory, so that results repeat bit by bit. Bound by reads of shared memory and by latency between the
// products (benchmarks/notes/attention.md).
#include "attention/sm90/backward_wide.cuh"

cuda_ops_status attention_sm90_backward_wide_bfloat16(const AttentionCall &call)
{
    return launch_backward_wide_of<__nv_bfloat16>(call);
}
