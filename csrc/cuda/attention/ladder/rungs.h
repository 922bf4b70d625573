// The ladder of attention, forward: of each head, with scale = 1 / sqrt(head_dim),
//     output = softmax(scale * query key^T) value, where causal query i sees keys 0 to i alone
// query and output [batch][heads][queries][head_dim], key and value [batch][heads][keys][head_dim]; head_dim 64 or 128.
#ifndef CUDA_OPS_ATTENTION_LADDER_RUNGS_H
#define CUDA_OPS_ATTENTION_LADDER_RUNGS_H

#include "ladder/ladder.h"

// What a call holds.
struct AttentionLadder {
    void *output;
    const void *query, *key, *value;
    float *scores;                      // rungs 1 and 2, of the workspace: heads x queries x keys
    int heads, queries, keys, head_dim; // heads: of all batches
    bool causal;
    float scale;
};

static inline AttentionLadder attention_tensors(const LadderCall &call)
{
    const LadderTensor &query = call.inputs[0], &key = call.inputs[1];
    AttentionLadder a;
    a.output = call.outputs[0].data;
    a.query = query.data, a.key = key.data, a.value = call.inputs[2].data;
    a.scores = static_cast<float *>(call.workspace);
    a.heads = (int)(query.sizes[0] * query.sizes[1]);
    a.queries = (int)query.sizes[2], a.keys = (int)key.sizes[2], a.head_dim = (int)query.sizes[3];
    a.causal = call.scalars[0] != 0;
    a.scale = a.head_dim == 64 ? 0.125f : 0.08838834764831845f;
    return a;
}

static inline int64_t attention_workspace(const LadderCall &call)
{
    const AttentionLadder a = attention_tensors(call);
    return (int64_t)a.heads * a.queries * a.keys * (int64_t)sizeof(float);
}

cuda_ops_status attention_stored_scores(const LadderCall &call);
cuda_ops_status attention_fused_softmax(const LadderCall &call);
cuda_ops_status attention_online_softmax(const LadderCall &call);
cuda_ops_status attention_mma(const LadderCall &call);
cuda_ops_status attention_tma_wgmma(const LadderCall &call);
cuda_ops_status attention_overlap(const LadderCall &call);

static inline Answer attention_mma_supports(const LadderCall &call, const Device &device)
{
    if (call.inputs[0].dtype != CUDA_OPS_BFLOAT16)
        return no("takes bfloat16");
    return device.capability >= 80 ? YES : NEEDS_80;
}
Answer attention_hopper_supports(const LadderCall &call, const Device &device); // 05

static const LadderRung ATTENTION_RUNGS[] = {
    {1, attention_stored_scores, nullptr, attention_workspace},
    {2, attention_fused_softmax, nullptr, attention_workspace},
    {3, attention_online_softmax, nullptr, nullptr},
    {4, attention_mma, attention_mma_supports, nullptr},
    {5, attention_tma_wgmma, attention_hopper_supports, nullptr},
    {6, attention_overlap, attention_hopper_supports, nullptr},
};

static inline Answer attention_check(const LadderCall &call)
{
    if (!has_tensors(call, 1, 3, 1))
        return no("attention has query, key and value, one output, and whether it is causal");
    const LadderTensor &query = call.inputs[0], &key = call.inputs[1], &value = call.inputs[2];
    if (query.dims != 4 || !same_shape(call.outputs[0], query) || key.dims != 4 || !same_shape(key, value))
        return no("query, key and value have four dimensions; output has query's shape, value key's");
    for (int i : {0, 1, 3})
        if (query.sizes[i] != key.sizes[i])
            return no("query and key have the same batch, heads and head_dim");
    if (query.sizes[3] != 64 && query.sizes[3] != 128)
        return no("takes a head_dim of 64 and of 128");
    for (const LadderTensor *tensor : {&call.outputs[0], &query, &key, &value})
        if (tensor->dtype != query.dtype || (query.dtype != CUDA_OPS_FLOAT32 && query.dtype != CUDA_OPS_BFLOAT16))
            return no("takes float32 and bfloat16, of one dtype");
    return query.sizes[0] <= 65535 && query.sizes[1] <= 65535 && query.sizes[0] * query.sizes[1] <= 65535 &&
                   query.sizes[2] <= 1 << 21 && key.sizes[2] <= 1 << 21
               ? YES
               : no("more heads, queries or keys than a grid has blocks");
}

#endif
