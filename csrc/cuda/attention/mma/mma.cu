// attention, mma path: bf16 and fp16 on the tensor cores by mma.sync, in FlashAttention-2's shape. A block of four warps
// has 128 queries (64 where rows are longer than 128 elements), whose 16 or 32 rows are a warp's own, so that softmax
// needs no shared memory: a row's maximum and sum are of four neighbouring lanes. Tiles of 64 keys and values come in
// turn by cp.async, each while the other is multiplied with; scores stay in registers, and become the left operand of
// the second product. Rows are padded to 64, 128 or 256 elements, but products stop at the row's length.
// Backward is delta, then a kernel by queries and one by keys, both of which compute the scores again: two products
// more than needed, but nothing is added up between blocks, and results repeat bit by bit. Where a mask is added, one
// before finds what of logsumexp a float does not hold, and the kernel by queries stores dS if its gradient is wanted.
// Bound by shared memory: a warp reads an operand's tile for 16 or 32 rows.
#include "attention/mma/kernel.cuh"
#include "attention/mma/remainder.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

// 64, 128 or 256; 0: longer.
static int padded_head(const cuda_ops_attention &p)
{
    const int64_t longest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    return longest <= 64 ? 64 : longest <= 128 ? 128 : longest <= 256 ? 256 : 0;
}

static int shared_bytes(const AttentionCall &call)
{
    const int head = padded_head(call.problem);
    if (call.backward)
        return head == 64    ? MmaShape<64>::BACKWARD_BYTES
               : head == 128 ? MmaShape<128>::BACKWARD_BYTES
                             : MmaShape<256>::BACKWARD_BYTES;
    return head == 64    ? MmaShape<64>::FORWARD_BYTES
           : head == 128 ? MmaShape<128>::FORWARD_BYTES
                         : MmaShape<256>::FORWARD_BYTES;
}

static int64_t forward_rows(int head)
{
    return head == 256 ? MmaShape<256>::ROWS : MmaShape<128>::ROWS;
}

static bool has_too_many_blocks(const cuda_ops_attention &p)
{
    const int64_t rows = p.queries > p.keys ? p.queries : p.keys;
    const int64_t heads = p.batch * p.heads;
    return heads > 0 && ceil_div(rows, TILE) > INT32_MAX / 2 / heads;
}

Answer attention_mma_supports(const AttentionCall &call, const Device &device)
{
    const cuda_ops_attention &p = call.problem;
    if (device.capability < 80)
        return NEEDS_80;
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    if (padded_head(p) == 0)
        return no("rows of more than 256 elements");
    if (p.head_dim == 0 || p.value_dim == 0)
        return no("rows without elements");
    if (!attention_rows_are_aligned(call))
        return no("a tensor's rows are not whole 16-byte vectors that are aligned");
    if (!(p.scale > 0))
        return no("the scale is not positive");
    if (shared_bytes(call) > device.shared_bytes)
        return no("the device has too little shared memory for rows of this length");
    return has_too_many_blocks(p) ? no("more blocks than a launch may have") : YES;
}

int64_t attention_mma_workspace(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    return call.backward ? attention_rows(p) * 4 * (attention_has_remainder(p) ? 2 : 1) : 0;
}

static MmaAttention work_of(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    MmaAttention work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    work.masked = scores_are_masked(p);
    work.general = p.softcap > 0 || p.alibi_slopes || (p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE && !work.masked);
    work.drops = p.dropout > 0;
    work.dropout = dropout_work_of(p, call.state);
    work.chunks = 1;
    work.grad_output = call.grad_output, work.logsumexp = (const float *)call.logsumexp;
    return work;
}

cuda_ops_status attention_mma_remainder(float *remainder, int *large, const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const auto launch = call.dtype == CUDA_OPS_BFLOAT16 ? attention_mma_bfloat16 : attention_mma_float16;
    MmaAttention work = work_of(call);
    work.tiles = ceil_div(p.queries, TILE);
    work.remainder = remainder, work.large = large;
    return launch(ATTENTION_REMAINDER, padded_head(p), work, p.batch * p.heads * work.tiles, call.stream);
}

cuda_ops_status attention_mma(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    const int head = padded_head(p);
    MmaAttention work = work_of(call);
    const auto launch = call.dtype == CUDA_OPS_BFLOAT16 ? attention_mma_bfloat16 : attention_mma_float16;
    if (!call.backward) {
        work.result = call.output, work.logsumexp_result = (float *)call.logsumexp;
        work.tiles = ceil_div(p.queries, forward_rows(head));
        return launch(ATTENTION_FORWARD, head, work, p.batch * p.heads * work.tiles, call.stream);
    }
    work.delta = (const float *)call.workspace;
    cuda_ops_status status = attention_delta(call.workspace, call);
    work.tiles = ceil_div(p.queries, TILE);
    if (status == CUDA_OPS_SUCCESS && attention_has_remainder(p)) {
        work.remainder = (float *)call.workspace + attention_rows(p);
        status = attention_mma_remainder(work.remainder, nullptr, call);
    }
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.result = call.grad_query;
    work.grad_mask = call.grad_mask;
    work.grad_mask_vectors = p.keys % 8 == 0 && is_aligned_16(call.grad_mask);
    status = launch(ATTENTION_GRAD_QUERY, head, work, p.batch * p.heads * work.tiles, call.stream);
    if (status != CUDA_OPS_SUCCESS || p.keys == 0)
        return status;
    work.result = call.grad_key, work.second_result = call.grad_value;
    work.tiles = ceil_div(p.keys, TILE);
    work.chunks = head == 256 ? 2 : 1;
    return launch(ATTENTION_GRAD_KEY_VALUE, head, work, p.batch * p.key_heads * work.tiles * work.chunks, call.stream);
}
