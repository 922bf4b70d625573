// The ladder of adamw: one step of AdamW over a list of float32 parameters, in place. Of each element, with t = step:
//     param *= 1 - lr * weight_decay
//     exp_avg += (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// A call of n parameters: outputs are params, exp_avgs, exp_avg_sqs, n of each; inputs are grads; scalars are lr,
// beta1, beta2, eps, weight_decay and step.
#ifndef CUDA_OPS_ADAMW_LADDER_RUNGS_H
#define CUDA_OPS_ADAMW_LADDER_RUNGS_H

#include "ladder/ladder.h"

cuda_ops_status adamw_op_at_a_time(const LadderCall &call);
cuda_ops_status adamw_fused(const LadderCall &call);
cuda_ops_status adamw_vectors(const LadderCall &call);
cuda_ops_status adamw_one_launch(const LadderCall &call);
cuda_ops_status adamw_in_flight(const LadderCall &call);
int64_t adamw_op_at_a_time_workspace(const LadderCall &call);

static const LadderRung ADAMW_RUNGS[] = {
    {1, adamw_op_at_a_time, nullptr, adamw_op_at_a_time_workspace},
    {2, adamw_fused, nullptr, nullptr},
    {3, adamw_vectors, nullptr, nullptr},
    {4, adamw_one_launch, nullptr, nullptr},
    {5, adamw_in_flight, nullptr, nullptr},
};

static inline Answer adamw_check(const LadderCall &call)
{
    if (call.scalar_count != 6 || call.output_count != 3 * (int64_t)call.input_count)
        return no("adamw has three outputs for each input, and six scalars");
    for (int i = 0; i < call.output_count; i++) {
        const LadderTensor &state = call.outputs[i], &grad = call.inputs[i % call.input_count];
        if (state.dtype != CUDA_OPS_FLOAT32 || grad.dtype != CUDA_OPS_FLOAT32)
            return no("takes float32");
        if (state.count != grad.count)
            return no("a parameter, its states and its gradient have to be of one size");
    }
    // Blocks of 256 threads, an element each.
    for (int i = 0; i < call.input_count; i++)
        if (call.inputs[i].count > (int64_t)INT32_MAX * 256)
            return no("more elements than a grid has threads");
    return YES;
}

#endif
