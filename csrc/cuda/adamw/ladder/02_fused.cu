// adamw, rung 2: one kernel for the whole formula.
//     param *= 1 - lr * weight_decay; exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// Threads: one for each element, a kernel for each parameter. An element is read, stepped in registers, and written.
// Fixes: 7 numbers moved for each element instead of 20, and an eighth of the launches. Leaves: loads and stores of 4
// bytes, each with an address to compute; a launch for each parameter still. Bound by memory, nearly, or by launches.
#include "adamw/ladder/step.cuh"

__global__ void __launch_bounds__(THREADS)
    adamw_fused_kernel(const AdamwTensor tensor, const AdamwStep step, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        step_at(tensor, i, step);
}

void adamw_fused_of(const AdamwTensor &tensor, const AdamwStep &step, int64_t count, cudaStream_t stream)
{
    if (count > 0)
        adamw_fused_kernel<<<(unsigned int)ceil_div(count, THREADS), THREADS, 0, stream>>>(tensor, step, count);
}

cuda_ops_status adamw_fused(const LadderCall &call)
{
    const AdamwStep step = adamw_step(call);
    for (int i = 0; i < call.input_count; i++)
        adamw_fused_of(adamw_tensor(call, i), step, call.inputs[i].count, call.stream);
    return launch_status();
}
