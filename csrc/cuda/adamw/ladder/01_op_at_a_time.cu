// adamw, rung 1: an op at a time, as a framework runs the formula when it is written down line by line.
//     param *= 1 - lr * weight_decay; exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// Threads: one for each element, a kernel for each op, eight for each parameter. Every kernel reads its operands from
// memory and writes its result there, though the next one needs nothing else. Leaves: an element is moved 20 times, of
// which 7 would do: four numbers read, three written; and a launch for each op and parameter, which takes longer than
// the op where a parameter is small. Bound by memory that is moved for nothing, or by launches.
#include "adamw/ladder/step.cuh"

__global__ void __launch_bounds__(THREADS) adamw_scale_kernel(float *x, float factor, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        x[i] *= factor;
}

__global__ void __launch_bounds__(THREADS) adamw_lerp_kernel(float *x, const float *to, float part, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        x[i] += part * (to[i] - x[i]);
}

__global__ void __launch_bounds__(THREADS)
    adamw_add_square_kernel(float *x, const float *y, float factor, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        x[i] += factor * y[i] * y[i];
}

__global__ void __launch_bounds__(THREADS) adamw_root_kernel(float *root, const float *x, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        root[i] = sqrtf(x[i]);
}

__global__ void __launch_bounds__(THREADS) adamw_add_kernel(float *x, float addend, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        x[i] += addend;
}

__global__ void __launch_bounds__(THREADS)
    adamw_subtract_quotient_kernel(float *x, const float *above, const float *below, float factor, int64_t count)
{
    const int64_t i = global_thread_index();
    if (i < count)
        x[i] -= factor * (above[i] / below[i]);
}

int64_t adamw_op_at_a_time_workspace(const LadderCall &call)
{
    int64_t most = 0;
    for (int i = 0; i < call.input_count; i++)
        most = call.inputs[i].count > most ? call.inputs[i].count : most;
    return most * (int64_t)sizeof(float);
}

cuda_ops_status adamw_op_at_a_time(const LadderCall &call)
{
    const AdamwStep step = adamw_step(call);
    float *const root = static_cast<float *>(call.workspace);
    for (int i = 0; i < call.input_count; i++) {
        const AdamwTensor t = adamw_tensor(call, i);
        const int64_t n = call.inputs[i].count;
        const unsigned int blocks = (unsigned int)ceil_div(n, THREADS);
        if (n == 0)
            continue;
        adamw_scale_kernel<<<blocks, THREADS, 0, call.stream>>>(t.param, step.keep, n);
        adamw_lerp_kernel<<<blocks, THREADS, 0, call.stream>>>(t.exp_avg, t.grad, step.fresh1, n);
        adamw_scale_kernel<<<blocks, THREADS, 0, call.stream>>>(t.exp_avg_sq, step.beta2, n);
        adamw_add_square_kernel<<<blocks, THREADS, 0, call.stream>>>(t.exp_avg_sq, t.grad, step.fresh2, n);
        adamw_root_kernel<<<blocks, THREADS, 0, call.stream>>>(root, t.exp_avg_sq, n);
        adamw_scale_kernel<<<blocks, THREADS, 0, call.stream>>>(root, step.correction, n);
        adamw_add_kernel<<<blocks, THREADS, 0, call.stream>>>(root, step.eps, n);
        adamw_subtract_quotient_kernel<<<blocks, THREADS, 0, call.stream>>>(t.param, t.exp_avg, root, step.size, n);
    }
    return launch_status();
}
