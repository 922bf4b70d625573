// The sm90 path's products with gelu behind them (gelu.cuh), a dtype a file. Both take products with k whole whose D and
// preactivation TMA can write: A m x k; forward B n x k, backward B k x n.
#ifndef CUDA_OPS_GEMM_SM90_GELU_H
#define CUDA_OPS_GEMM_SM90_GELU_H

#include "gemm/paths.h"

// D = gelu(alpha * A op(B) + bias), and the problem's preactivation, which is not null.
cuda_ops_status gemm_sm90_gelu_forward_bfloat16(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_sm90_gelu_forward_float16(const GemmCall &call, GemmDevice device);
// D = (A B) * gelu'(preactivation), the preactivation laid out like D. workspace: null, or where the sums of D's
// columns, as D is stored, go for each GELU_SUM_ROWS rows, float32, over m rounded up to twice as many.
constexpr int GELU_SUM_ROWS = 128;
// Whether it takes the call, and its tile is as fast for the product as any: the plan is for one of the largest.
bool gemm_sm90_takes_gelu_backward(const GemmCall &call, GemmDevice device, const void *preactivation);
cuda_ops_status gemm_sm90_gelu_backward_bfloat16(const GemmCall &call, GemmDevice device, const void *preactivation);
cuda_ops_status gemm_sm90_gelu_backward_float16(const GemmCall &call, GemmDevice device, const void *preactivation);

#endif
