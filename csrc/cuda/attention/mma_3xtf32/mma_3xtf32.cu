// attention, mma_3xtf32 path: float32 on the tensor cores, by three products in TF32 for one, which keep float32's
// accuracy whether TF32 is allowed or not. forward.cu and backward.cu have the kernels; what comes before backward's, and
// the workspace, are the float32 path's.
#include "attention/mma_3xtf32/mma_3xtf32.h"

#include "attention/fragments.cuh"
#include "common/common.cuh"

static constexpr Answer HAS_LONG_GRADIENTS = {"backward takes rows of up to 64 elements"};
static constexpr Answer IS_NOT_ALLOWED = {"CUDA_OPS_3XTF32 is 0 in the environment"};
static constexpr Answer HAS_SLOW_TENSOR_CORES = {"this GPU's tensor cores are no faster in TF32 than its CUDA cores"};

// CUDA_OPS_3XTF32=0 in the environment leaves float32 to multiply-adds, as it does in products of matrices.
static bool is_allowed()
{
    static ForcedPath setting = {"CUDA_OPS_3XTF32"};
    return setting.row(1, [](int) { return "0"; }) != 0;
}

Answer attention_mma_3xtf32_supports(const AttentionCall &call, const Device &device)
{
    const bool wide = attention_float32_is_wide(call.problem);
    const Answer answer = attention_float32_supports(call, device);
    if (!answer)
        return answer;
    if (!is_allowed())
        return IS_NOT_ALLOWED;
    if (call.backward && wide)
        return HAS_LONG_GRADIENTS;
    const int bytes = call.backward ? attention_mma_3xtf32_backward_bytes() : attention_mma_3xtf32_forward_bytes(wide);
    return bytes > device.shared_bytes ? no("needs more shared memory than a block of this device may have") : YES;
}

// Of the GPUs for workstations (8.6, 8.9, 12.0) a multiprocessor has as many multiply-adds of float32 a cycle as of TF32.
Answer attention_mma_3xtf32_is_fast(const AttentionCall &call, const Device &device)
{
    if (device.capability != 80 && device.capability != 90 && device.capability != 100)
        return HAS_SLOW_TENSOR_CORES;
    return attention_float32_is_fast(call, device);
}

int64_t attention_mma_3xtf32_workspace(const AttentionCall &call, const Device &device)
{
    return attention_float32_workspace(call, device);
}

cuda_ops_status attention_mma_3xtf32(const AttentionCall &call, const Device &)
{
    Mma3xTf32Work work = {};
    (Float32Work &)work = attention_float32_work(call);
    work.dropout = dropout_work_of(call.problem, call.state);
    const cuda_ops_attention &p = call.problem;
    work.masked = scores_are_masked(p);
    work.simple = !(p.softcap > 0) && !p.alibi_slopes && p.mask_kind != CUDA_OPS_ATTENTION_MASK_ADDITIVE;
    if (!call.backward)
        return attention_mma_3xtf32_forward(work, attention_float32_is_wide(call.problem), call.stream);
    const cuda_ops_status status = attention_float32_prepare(work, call.stream);
    return status != CUDA_OPS_SUCCESS || work.blocks == 0 ? status : attention_mma_3xtf32_backward(work, call.stream);
}
