// attention's backward on Hopper, bfloat16. With S the scores, P = exp(S - logsumexp), dP = grad_output value^T and
// dS = P (dP - delta):   grad_value = P^T grad_output,   grad_key = scale dS^T query,   grad_query = scale dS key.
// Two launches. The first makes delta and puts it beside logsumexp. The second has one block an SM, which takes block
// after block of 128 keys, 64 a consumer warpgroup, and walks over blocks of queries, which a producer warp loads.
// S^T and dP^T are computed, so that P^T and dS^T are left operands in registers for the values' and the keys'
// gradients, which stay in registers; dS goes to shared memory for the queries' gradients, whose sums over the blocks
// of keys are made in device memory by TMA, in fp32 and in a fixed order (a turn is taken for every block of queries;
// order.h): results repeat bit by bit. The last block of keys loads the others' sums and stores what it rounds. With
// several heads to a key head, their blocks of queries follow each other. With dropout, factors D, P^T becomes D P^T
// and dP D dP: instances of their own (backward_dropout_bfloat16.cu), whose threads draw the numbers of the scores that
// they have; of masks likewise, and dS is the gradient of one that is added (backward_masked_bfloat16.cu,
// backward_added_bfloat16.cu). Rows of more than 128 elements have kernels of their own (backward_wide_bfloat16.cu).
// Bound by latency between the products (benchmarks/notes/attention.md).
#include "attention/sm90/backward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_backward_bfloat16(const AttentionCall &call, const Device &device)
{
    return launch_backward_of<__nv_bfloat16, false>(call, device);
}
