// attention, sm90 path: which calls it takes, and its workspace. forward_bfloat16.cu and backward_bfloat16.cu say how it
// works; each dtype and pass has a file of its own.
#include "attention/sm90/sm90.h"

#include <math.h>

#include "attention/sm90/added_mask.h"
#include "attention/sm90/band.h"
#include "attention/sm90/maps.h"
#include "attention/sm90/mask.h"
#include "attention/sm90/sequences.h"
#include "common/common.cuh"

// Whether a mask that is added is read by pairs of keys.
static Answer takes_added_mask(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const bool is_float = p.mask_dtype == CUDA_OPS_FLOAT32;
    if (!is_float && p.mask_dtype != call.dtype)
        return no("adds masks of float32 and of the dtype alone");
    const uintptr_t pair = is_float ? 8 : 4;
    if (p.keys % 2 != 0 || p.mask_column != 1 || p.mask_row % 2 != 0 || p.mask_head % 2 != 0 || p.mask_batch % 2 != 0 ||
        (uintptr_t)p.mask % pair != 0 || (uintptr_t)call.grad_mask % 4 != 0)
        return no("adds masks of which two neighbouring keys are aligned");
    return p.mask_row < INT32_MAX ? YES : no("numbers a mask's rows by 31 bits");
}

Answer attention_sm90_supports(const AttentionCall &call, const Device &device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_attention &p = call.problem;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    const int64_t longest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    if (longest > 256)
        return no("has tiles for rows of up to 256 elements");
    if (longest > 128 && (p.sequences.query_starts || p.dropout != 0))
        return no("has tiles for packed sequences, and for dropout, of rows of up to 128 elements");
    const bool is_added = p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE;
    if (p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE && longest > 128)
        return no("has tiles for masks of rows of up to 128 elements");
    if (const Answer answer = is_added ? takes_added_mask(call) : YES; !answer)
        return answer;
    if (call.with_grad_mask && !is_added)
        return no("makes the gradient of a mask that is added alone");
    if (p.softcap != 0 || p.alibi_slopes)
        return no("has no softcap or slopes");
    // The largest score is that of the largest product; and 0 * -inf would be NaN.
    if (!(p.scale > 0 && p.scale < INFINITY))
        return no("takes positive scales alone");
    if (p.batch == 0 || p.heads == 0 || p.key_heads == 0 || p.queries == 0 || p.keys == 0)
        return no("has no tile without queries and keys");
    const cuda_ops_attention_sequences &q = p.sequences;
    const bool packed = q.query_starts;
    if (packed ? q.query_rows >= BAND_LIMIT || q.key_rows >= BAND_LIMIT || p.batch >= BAND_LIMIT || p.heads > 65535 ||
                     p.heads * packed_blocks(q.query_rows, p.batch, 64) > INT32_MAX / 2 ||
                     p.key_heads * packed_blocks(q.key_rows, p.batch, 64) > INT32_MAX / 2
               : p.queries >= BAND_LIMIT || p.keys >= BAND_LIMIT || p.batch > 65535 / p.heads ||
                     p.batch * p.heads * ceil_div(p.queries, 64) > INT32_MAX / 2 ||
                     p.batch * p.key_heads * ceil_div(p.keys, 64) > INT32_MAX / 2)
        return no("numbers its tiles by 31 bits");
    if (p.dropout != 0 && p.batch * p.heads * ceil_div(p.queries, 16) > UINT32_MAX / 32)
        return no("numbers dropout's blocks by 32 bits");
    const auto fits = packed ? packed_map_possible : heads_map_possible;
    const bool forward_fits = fits(query_layout(p, p.head_dim, p.query), call.query) &&
                              fits(key_layout(p, p.head_dim, p.key), call.key) &&
                              fits(key_layout(p, p.value_dim, p.value), call.value) &&
                              fits(query_layout(p, p.value_dim, p.output), call.output);
    const bool backward_fits = !call.backward || (fits(query_layout(p, p.value_dim, p.grad_output), call.grad_output) &&
                                                  fits(query_layout(p, p.head_dim, p.grad_query), call.grad_query) &&
                                                  fits(key_layout(p, p.head_dim, p.grad_key), call.grad_key) &&
                                                  fits(key_layout(p, p.value_dim, p.grad_value), call.grad_value));
    return forward_fits && backward_fits
               ? YES
               : no("a tensor has no TMA descriptor: rows, strides or addresses that are no multiples of 16 bytes");
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

Answer attention_sm90_is_fast(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    // Of 40 tokens a sequence it takes 1.3 times as long as the mma path at head dim 64, and 0.95 at 128, but for each
    // sequence's rows a block of sums in fp32.
    return call.backward && p.sequences.query_starts && p.sequences.query_rows < 64 * p.batch
               ? no("backward of packed sequences of fewer than 64 queries each leaves most of a block empty")
               : YES;
}

int64_t attention_sm90_query_blocks(const cuda_ops_attention &p)
{
    const int64_t size = attention_sm90_queries(attention_sm90_is_narrow(p));
    return p.heads * (p.sequences.query_starts ? packed_blocks(p.sequences.query_rows, p.batch, size)
                                               : p.batch * ceil_div(p.queries, size));
}

int64_t attention_sm90_backward_bytes(const cuda_ops_attention &p)
{
    const bool narrow = attention_sm90_is_narrow(p);
    const int64_t queries = attention_sm90_queries(narrow), elements = narrow ? 64 : 128;
    if (attention_sm90_is_wide(p))
        return attention_sm90_query_blocks(p) * (4 * queries * 2);
    return (attention_sm90_query_blocks(p) * (4 * queries * (elements + 2) + 4) + 4 + 15) / 16 * 16;
}

int64_t attention_sm90_workspace(const AttentionCall &call, const Device &device)
{
    (void)device;
    const cuda_ops_attention &p = call.problem;
    return (call.backward ? attention_sm90_backward_bytes(p) + added_mask_bytes(p) : 0) +
           (p.sequences.query_starts ? attention_sm90_sequences_bytes(call) : attention_sm90_mask_bytes(p));
}

cuda_ops_status attention_sm90(const AttentionCall &call, const Device &device)
{
    const bool is_bfloat16 = call.dtype == CUDA_OPS_BFLOAT16;
    if (call.problem.sequences.query_starts) {
        if (call.backward)
            return is_bfloat16 ? attention_sm90_backward_packed_bfloat16(call, device)
                               : attention_sm90_backward_packed_float16(call, device);
        return is_bfloat16 ? attention_sm90_forward_packed_bfloat16(call, device)
                           : attention_sm90_forward_packed_float16(call, device);
    }
    if (call.problem.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN) {
        if (call.backward)
            return is_bfloat16 ? attention_sm90_backward_masked_bfloat16(call, device)
                               : attention_sm90_backward_masked_float16(call, device);
        return is_bfloat16 ? attention_sm90_forward_masked_bfloat16(call, device)
                           : attention_sm90_forward_masked_float16(call, device);
    }
    if (call.problem.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE) {
        if (call.backward)
            return is_bfloat16 ? attention_sm90_backward_added_bfloat16(call, device)
                               : attention_sm90_backward_added_float16(call, device);
        return is_bfloat16 ? attention_sm90_forward_added_bfloat16(call, device)
                           : attention_sm90_forward_added_float16(call, device);
    }
    if (call.problem.dropout != 0) {
        if (call.backward)
            return is_bfloat16 ? attention_sm90_backward_dropout_bfloat16(call, device)
                               : attention_sm90_backward_dropout_float16(call, device);
        return is_bfloat16 ? attention_sm90_forward_dropout_bfloat16(call, device)
                           : attention_sm90_forward_dropout_float16(call, device);
    }
    if (call.backward && attention_sm90_is_wide(call.problem))
        return is_bfloat16 ? attention_sm90_backward_wide_bfloat16(call) : attention_sm90_backward_wide_float16(call);
    if (call.backward)
        return is_bfloat16 ? attention_sm90_backward_bfloat16(call, device)
                           : attention_sm90_backward_float16(call, device);
    return is_bfloat16 ? attention_sm90_forward_bfloat16(call, device) : attention_sm90_forward_float16(call, device);
}
