// adamw, rung 3: 16 bytes at a time.
//     param *= 1 - lr * weight_decay; exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// Threads: one for four elements, a kernel for each parameter. The up to three elements behind the last whole vector
// have a thread each; a parameter of which any array is not aligned to 16 bytes goes to rung 2. Fixes: a quarter of the
// loads, stores and addresses, and four times the bytes in flight for each thread. Leaves: a launch for each parameter:
// of a model's some hundred, most are biases and norms of a few kilobytes, which take a launch's time each. Bound by
// memory where parameters are large, by launches where they are many.
#include "adamw/ladder/step.cuh"

__global__ void __launch_bounds__(THREADS)
    adamw_vectors_kernel(const AdamwTensor tensor, const AdamwStep step, int64_t count)
{
    const int64_t thread = global_thread_index(), whole = count / 4;
    if (thread < whole)
        step_vectors(tensor, 4 * thread, load_vectors(tensor, 4 * thread), step);
    else if (4 * whole + (thread - whole) < count)
        step_at(tensor, 4 * whole + (thread - whole), step);
}

cuda_ops_status adamw_vectors(const LadderCall &call)
{
    const AdamwStep step = adamw_step(call);
    for (int i = 0; i < call.input_count; i++) {
        const AdamwTensor tensor = adamw_tensor(call, i);
        const int64_t count = call.inputs[i].count;
        if (!is_aligned_16(tensor))
            adamw_fused_of(tensor, step, count, call.stream);
        else if (count > 0)
            adamw_vectors_kernel<<<(unsigned int)ceil_div(count / 4 + count % 4, THREADS), THREADS, 0, call.stream>>>(
                tensor, step, count);
    }
    return launch_status();
}
