// window_attention, mma path: bf16 and fp16 on the tensor cores, for windows of up to 64 pixels and heads of up to 64
// elements. A block of four warps has a head, and of that every so many windows; the next window's pixels come by
// cp.async while one is computed with. A warp has 16 rows of scores in registers, whole ones: softmax is of four
// neighbouring lanes, and backward makes the weights again from qkv alone. The bias is in registers for all windows of
// the block, and so are the sums of its gradient, which leave the block once.
// Bound by memory, in the end: qkv is read once and the output written once; backward reads qkv and grad_output and
// writes grad_qkv. 0.5 to 0.65 of a copy's speed forward and 0.3 to 0.5 backward, by the time that a window takes.
#include "window_attention/mma/mma.h"

#include "common/aligned_vector.cuh"
#include "window_attention/paths.h"

static constexpr double LOG2_E = 1.4426950408889634;

Answer window_attention_mma_supports(const WindowCall &call, const Device &device)
{
    const cuda_ops_windows &w = call.windows;
    if (device.capability < 80)
        return NEEDS_80;
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    if (cuda_ops_window_positions(&w) > 64)
        return no("windows of more than 64 pixels");
    if (w.head_dim > 64 || w.head_dim % 8 != 0)
        return no("heads are not of up to 64 elements, a multiple of 8");
    if (!is_aligned_16(call.qkv) || !is_aligned_16(call.output) || !is_aligned_16(call.grad_qkv) ||
        !is_aligned_16(call.grad_output))
        return NEEDS_ALIGNMENT;
    if (w.head_dim > 32 && device.shared_bytes < 96 << 10)
        return no("the device has too little shared memory for heads of more than 32 elements");
    if (cuda_ops_window_count(&w) > INT32_MAX || w.height > INT32_MAX / 2 || w.width > INT32_MAX / 2 ||
        w.heads > INT32_MAX / 64 / 132)
        return no("too many windows, or images too large");
    return YES;
}

cuda_ops_status window_attention_mma(const WindowCall &call, const Device &device)
{
    const cuda_ops_windows &w = call.windows;
    WindowWork work = {};
    work.qkv = call.qkv, work.grad_output = call.grad_output;
    work.result = call.backward ? call.grad_qkv : call.output;
    work.bias = (const float *)call.bias;
    work.partials = call.grad_bias ? (float *)call.workspace : nullptr;
    work.count = (uint32_t)cuda_ops_window_count(&w);
    work.height = (int)w.height, work.width = (int)w.width;
    work.down = (int)(w.height / w.window_height), work.across = (int)(w.width / w.window_width);
    work.heads = (int)w.heads, work.head_dim = (int)w.head_dim, work.channels = w.heads * w.head_dim;
    work.positions = (int)cuda_ops_window_positions(&w), work.window_width = (int)w.window_width;
    work.step_y = w.grid ? work.down : 1, work.step_x = w.grid ? work.across : 1;
    work.between_y = w.grid ? 1 : (int)w.window_height, work.between_x = w.grid ? 1 : (int)w.window_width;
    work.shift_y = (int)w.shift_y, work.shift_x = (int)w.shift_x;
    work.edge_y = (int)(w.window_height - w.shift_y), work.edge_x = (int)(w.window_width - w.shift_x);
    work.scale = (float)w.scale, work.scale_log2 = (float)(w.scale * LOG2_E);
    const auto launch = call.dtype == CUDA_OPS_BFLOAT16 ? window_attention_mma_bfloat16 : window_attention_mma_float16;
    const int64_t slots = window_slots(w, device);
    const cuda_ops_status status = launch(work, call.backward, slots, call.stream);
    return status == CUDA_OPS_SUCCESS && call.grad_bias ? window_bias_sums(call, slots) : status;
}
