// attention, sm90 path: which calls it takes, and its workspace. forward_bfloat16.cu and backward_bfloat16.cu say how it
// works; each dtype and pass has a file of its own.
#include "attention/sm90/sm90.h"

#include <math.h>

#include "attention/sm90/band.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

#if defined(CUDA_OPS_SM90A)
static bool strides_fit(const cuda_ops_attention_strides &strides, int64_t batch, int64_t heads, int64_t rows,
                        int64_t elements, const void *tensor)
{
    return heads_map_possible(heads_layout(batch, heads, rows, elements, strides), tensor);
}
#endif

Answer attention_sm90_supports(const AttentionCall &call, const Device &device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_attention &p = call.problem;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    if (p.head_dim > 128 || p.value_dim > 128)
        return no("has tiles for rows of up to 128 elements");
    if (p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE || call.with_grad_mask || call.grad_mask)
        return no("takes no mask but windows");
    if (p.softcap != 0 || p.alibi_slopes)
        return no("has no softcap or slopes");
    // The largest score is that of the largest product; and 0 * -inf would be NaN.
    if (!(p.scale > 0 && p.scale < INFINITY))
        return no("takes positive scales alone");
    if (p.batch == 0 || p.heads == 0 || p.key_heads == 0 || p.queries == 0 || p.keys == 0)
        return no("has no tile without queries and keys");
    if (p.queries >= BAND_LIMIT || p.keys >= BAND_LIMIT || p.batch > 65535 / p.heads ||
        p.batch * p.heads * ceil_div(p.queries, 64) > INT32_MAX / 2 ||
        p.batch * p.key_heads * ceil_div(p.keys, 64) > INT32_MAX / 2)
        return no("numbers its tiles by 31 bits");
    if (p.dropout != 0 && p.batch * p.heads * ceil_div(p.queries, 16) > UINT32_MAX / 32)
        return no("numbers dropout's blocks by 32 bits");
    const bool forward_fits = strides_fit(p.query, p.batch, p.heads, p.queries, p.head_dim, call.query) &&
                              strides_fit(p.key, p.batch, p.key_heads, p.keys, p.head_dim, call.key) &&
                              strides_fit(p.value, p.batch, p.key_heads, p.keys, p.value_dim, call.value) &&
                              strides_fit(p.output, p.batch, p.heads, p.queries, p.value_dim, call.output);
    const bool backward_fits =
        !call.backward || (strides_fit(p.grad_output, p.batch, p.heads, p.queries, p.value_dim, call.grad_output) &&
                           strides_fit(p.grad_query, p.batch, p.heads, p.queries, p.head_dim, call.grad_query) &&
                           strides_fit(p.grad_key, p.batch, p.key_heads, p.keys, p.head_dim, call.grad_key) &&
                           strides_fit(p.grad_value, p.batch, p.key_heads, p.keys, p.value_dim, call.grad_value));
    return forward_fits && backward_fits
               ? YES
               : no("a tensor has no TMA descriptor: rows, strides or addresses that are no multiples of 16 bytes");
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

// Backward's, of each block of queries: sums of gradients, logsumexp and delta, and whose turn it is; and a counter.
int64_t attention_sm90_workspace(const AttentionCall &call, const Device &device)
{
    (void)device;
    if (!call.backward)
        return 0;
    const cuda_ops_attention &p = call.problem;
    const bool narrow = attention_sm90_is_narrow(p);
    const int64_t queries = attention_sm90_queries(narrow), elements = narrow ? 64 : 128;
    return p.batch * p.heads * ceil_div(p.queries, queries) * (4 * queries * (elements + 2) + 4) + 4;
}

cuda_ops_status attention_sm90(const AttentionCall &call, const Device &device)
{
    const bool is_bfloat16 = call.dtype == CUDA_OPS_BFLOAT16;
    if (call.problem.dropout != 0) {
        if (call.backward)
            return is_bfloat16 ? attention_sm90_backward_dropout_bfloat16(call, device)
                               : attention_sm90_backward_dropout_float16(call, device);
        return is_bfloat16 ? attention_sm90_forward_dropout_bfloat16(call, device)
                           : attention_sm90_forward_dropout_float16(call, device);
    }
    if (call.backward)
        return is_bfloat16 ? attention_sm90_backward_bfloat16(call, device)
                           : attention_sm90_backward_float16(call, device);
    return is_bfloat16 ? attention_sm90_forward_bfloat16(call, device) : attention_sm90_forward_float16(call, device);
}
