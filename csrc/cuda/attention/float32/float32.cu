// attention, float32 path: rows of up to 128 elements, whole and aligned vectors, on the CUDA cores. forward_sm80.cu and
// backward_sm80.cu have the kernels.
#include "attention/float32/float32.h"

#include "common/common.cuh"

static constexpr Answer IS_NOT_FLOAT32 = {"takes float32 alone"};
static constexpr Answer IS_TOO_LONG = {"rows have more than 128 elements"};
static constexpr Answer HAS_MASK_GRADIENT = {"makes no gradient for a mask"};
static constexpr Answer NEEDS_SHARED_MEMORY = {"needs more shared memory than a block of this device may have"};
static constexpr Answer HAS_TOO_MANY_BLOCKS = {"has 2^31 blocks or more"};
static constexpr Answer HAS_FEW_QUERIES = {"few queries' gradients are more exact by simt"};

static Float32Work work_of(const AttentionCall &call)
{
    Float32Work work = {};
    work.p = call.problem;
    work.tiles = ceil_div(call.problem.queries, FLOAT32_QUERIES);
    work.blocks = ceil_div(call.problem.keys, float32_keys(attention_float32_is_wide(call.problem)));
    work.rows = attention_rows(call.problem);
    return work;
}

static int64_t turns_of(const AttentionCall &call)
{
    return call.problem.batch * call.problem.heads * ceil_div(call.problem.queries, FLOAT32_QUERIES);
}

Answer attention_float32_supports(const AttentionCall &call, const Device &device)
{
    const cuda_ops_attention &p = call.problem;
    if (call.dtype != CUDA_OPS_FLOAT32)
        return IS_NOT_FLOAT32;
    if (device.capability < 80)
        return NEEDS_80;
    if (p.head_dim > FLOAT32_MOST_COLUMNS || p.value_dim > FLOAT32_MOST_COLUMNS)
        return IS_TOO_LONG;
    if (!attention_rows_are_aligned(call))
        return NEEDS_ALIGNMENT;
    if (call.backward && (call.with_grad_mask || call.grad_mask))
        return HAS_MASK_GRADIENT;
    const int bytes = call.backward ? attention_float32_backward_bytes(attention_float32_is_wide(p))
                                    : attention_float32_forward_bytes(attention_float32_is_wide(p));
    if (bytes > device.shared_bytes)
        return NEEDS_SHARED_MEMORY;
    const Float32Work work = work_of(call);
    const int64_t heads = p.batch * p.heads, most = work.tiles > work.blocks ? work.tiles : work.blocks;
    return heads * most > INT32_MAX ? HAS_TOO_MANY_BLOCKS : YES;
}

// Of few queries simt mends what rounding makes of delta, which takes all of a row's keys at once. Of packed sequences
// nobody knows here how few each has; their forward adds up scores as this backward does.
Answer attention_float32_is_fast(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    return call.backward && p.queries <= FLOAT32_QUERIES && !p.sequences.query_starts ? HAS_FEW_QUERIES : YES;
}

// delta, remainders, turns, and how many blocks of keys have been handed out.
int64_t attention_float32_workspace(const AttentionCall &call, const Device &)
{
    const int64_t of_a_row = attention_has_remainder(call.problem) ? 2 : 1;
    return call.backward ? (of_a_row * attention_rows(call.problem) + turns_of(call) + 1) * 4 : 0;
}

Float32Work attention_float32_work(const AttentionCall &call)
{
    Float32Work work = work_of(call);
    work.query = (const float *)call.query, work.key = (const float *)call.key, work.value = (const float *)call.value;
    if (!call.backward) {
        work.result = (float *)call.output, work.logsumexp_result = (float *)call.logsumexp, work.state = call.state;
        return work;
    }
    work.output = (const float *)call.output, work.logsumexp = (const float *)call.logsumexp;
    work.grad_output = (const float *)call.grad_output, work.grad_logsumexp = (const float *)call.grad_logsumexp;
    work.grad_query = (float *)call.grad_query, work.grad_key = (float *)call.grad_key;
    work.grad_value = (float *)call.grad_value;
    work.delta = (float *)call.workspace;
    float *end = work.delta + work.rows;
    if (attention_has_remainder(call.problem))
        work.remainder = end, end += work.rows;
    work.turns = (uint32_t *)end;
    work.handed_out = work.turns + turns_of(call);
    return work;
}

cuda_ops_status attention_float32(const AttentionCall &call, const Device &)
{
    const Float32Work work = attention_float32_work(call);
    const bool wide = attention_float32_is_wide(call.problem);
    if (!call.backward)
        return attention_float32_forward(work, wide, call.stream);
    const cuda_ops_status status = attention_float32_prepare(work, call.stream);
    return status != CUDA_OPS_SUCCESS || work.blocks == 0 ? status
                                                          : attention_float32_backward(work, wide, call.stream);
}
