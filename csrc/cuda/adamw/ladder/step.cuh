// What the rungs of adamw share: a parameter's four arrays, the step's numbers, and the step of one element.
#ifndef CUDA_OPS_ADAMW_LADDER_STEP_CUH
#define CUDA_OPS_ADAMW_LADDER_STEP_CUH

#include <math.h>

#include "adamw/ladder/rungs.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 256;

struct AdamwTensor {
    float *param, *exp_avg, *exp_avg_sq;
    const float *grad;
};

static inline AdamwTensor adamw_tensor(const LadderCall &call, int i)
{
    const int count = call.input_count;
    return {static_cast<float *>(call.outputs[i].data), static_cast<float *>(call.outputs[count + i].data),
            static_cast<float *>(call.outputs[2 * count + i].data), static_cast<const float *>(call.inputs[i].data)};
}

static inline bool is_aligned_16(const AdamwTensor &tensor)
{
    return is_aligned_16(tensor.param) && is_aligned_16(tensor.exp_avg) && is_aligned_16(tensor.exp_avg_sq) &&
           is_aligned_16(tensor.grad);
}

// What does not depend on the element, computed once, in double, on the host.
struct AdamwStep {
    float keep;                  // 1 - lr * weight_decay
    float fresh1, beta2, fresh2; // 1 - beta1, beta2, 1 - beta2
    float size, correction, eps; // lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
};

static inline AdamwStep adamw_step(const LadderCall &call)
{
    const double lr = call.scalars[0], beta1 = call.scalars[1], beta2 = call.scalars[2], t = call.scalars[5];
    return {(float)(1 - lr * call.scalars[4]),
            (float)(1 - beta1),
            (float)beta2,
            (float)(1 - beta2),
            (float)(lr / (1 - pow(beta1, t))),
            (float)(1 / sqrt(1 - pow(beta2, t))),
            (float)call.scalars[3]};
}

__device__ __forceinline__ void step_element(float &param, float &exp_avg, float &exp_avg_sq, float grad,
                                             const AdamwStep &step)
{
    exp_avg += step.fresh1 * (grad - exp_avg);
    exp_avg_sq = step.beta2 * exp_avg_sq + step.fresh2 * grad * grad;
    param = param * step.keep - step.size * (exp_avg / (sqrtf(exp_avg_sq) * step.correction + step.eps));
}

// Element i in memory.
__device__ __forceinline__ void step_at(const AdamwTensor &tensor, int64_t i, const AdamwStep &step)
{
    float param = tensor.param[i], exp_avg = tensor.exp_avg[i], exp_avg_sq = tensor.exp_avg_sq[i];
    step_element(param, exp_avg, exp_avg_sq, tensor.grad[i], step);
    tensor.param[i] = param;
    tensor.exp_avg[i] = exp_avg;
    tensor.exp_avg_sq[i] = exp_avg_sq;
}

// Rung 2's kernel for one parameter.
void adamw_fused_of(const AdamwTensor &tensor, const AdamwStep &step, int64_t count, cudaStream_t stream);

// Four elements, as 16 bytes of each array.
struct AdamwVectors {
    float4 param, exp_avg, exp_avg_sq, grad;
};

__device__ __forceinline__ AdamwVectors load_vectors(const AdamwTensor &tensor, int64_t i)
{
    return {*reinterpret_cast<const float4 *>(tensor.param + i), *reinterpret_cast<const float4 *>(tensor.exp_avg + i),
            *reinterpret_cast<const float4 *>(tensor.exp_avg_sq + i),
            *reinterpret_cast<const float4 *>(tensor.grad + i)};
}

__device__ __forceinline__ void step_vectors(const AdamwTensor &tensor, int64_t i, AdamwVectors v,
                                             const AdamwStep &step)
{
    step_element(v.param.x, v.exp_avg.x, v.exp_avg_sq.x, v.grad.x, step);
    step_element(v.param.y, v.exp_avg.y, v.exp_avg_sq.y, v.grad.y, step);
    step_element(v.param.z, v.exp_avg.z, v.exp_avg_sq.z, v.grad.z, step);
    step_element(v.param.w, v.exp_avg.w, v.exp_avg_sq.w, v.grad.w, step);
    *reinterpret_cast<float4 *>(tensor.param + i) = v.param;
    *reinterpret_cast<float4 *>(tensor.exp_avg + i) = v.exp_avg;
    *reinterpret_cast<float4 *>(tensor.exp_avg_sq + i) = v.exp_avg_sq;
}

#endif
