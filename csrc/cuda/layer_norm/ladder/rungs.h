// The ladder of layer_norm, forward and backward in one call; float32. Of a row, with xhat = (input - mean) * rstd and
// h = grad_output * weight:
//     output = xhat * weight + bias
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat))
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
#ifndef CUDA_OPS_LAYER_NORM_LADDER_RUNGS_H
#define CUDA_OPS_LAYER_NORM_LADDER_RUNGS_H

#include "ladder/ladder.h"

// What a call holds.
struct LayerNormLadder {
    float *output, *grad_input, *grad_weight, *grad_bias;
    const float *input, *weight, *bias, *grad_output;
    int64_t rows, columns;
    float eps;
    // Of the workspace: rows of 2 * columns sums, of grad_weight and of grad_bias; mean and rstd of each row.
    float *partials, *mean, *rstd;
};

// Rows of sums at the most.
static inline int64_t layer_norm_most_partials(int64_t rows)
{
    return rows < 2048 ? rows : 2048;
}

static inline LayerNormLadder layer_norm_tensors(const LadderCall &call)
{
    LayerNormLadder a;
    float **const outputs[] = {&a.output, &a.grad_input, &a.grad_weight, &a.grad_bias};
    const float **const inputs[] = {&a.input, &a.weight, &a.bias, &a.grad_output};
    for (int i = 0; i < 4; i++) {
        *outputs[i] = static_cast<float *>(call.outputs[i].data);
        *inputs[i] = static_cast<const float *>(call.inputs[i].data);
    }
    a.rows = call.inputs[0].sizes[0];
    a.columns = call.inputs[0].sizes[1];
    a.eps = (float)call.scalars[0];
    a.partials = static_cast<float *>(call.workspace);
    a.mean = a.partials + layer_norm_most_partials(a.rows) * 2 * a.columns;
    a.rstd = a.mean + a.rows;
    return a;
}

cuda_ops_status layer_norm_global_atomics(const LadderCall &call);
cuda_ops_status layer_norm_partial_sums(const LadderCall &call);
cuda_ops_status layer_norm_registers(const LadderCall &call);
cuda_ops_status layer_norm_persistent_grid(const LadderCall &call);
cuda_ops_status layer_norm_row_ahead(const LadderCall &call);
int64_t layer_norm_workspace(const LadderCall &call);

// Parts of a rung that later ones take over as they are.
void layer_norm_forward_by_warps(const LayerNormLadder &a, cudaStream_t stream);                // 01
void layer_norm_grad_input_by_warps(const LayerNormLadder &a, cudaStream_t stream);             // 01
void layer_norm_sum_partials(const LayerNormLadder &a, int64_t partials, cudaStream_t stream);  // 02
void layer_norm_grads_of_parameters(const LayerNormLadder &a, cudaStream_t stream);             // 02
void layer_norm_forward_by_blocks(const LayerNormLadder &a, bool vectors, cudaStream_t stream); // 03

static const LadderRung LAYER_NORM_RUNGS[] = {
    {1, layer_norm_global_atomics, nullptr, layer_norm_workspace},
    {2, layer_norm_partial_sums, nullptr, layer_norm_workspace},
    {3, layer_norm_registers, nullptr, layer_norm_workspace},
    {4, layer_norm_persistent_grid, nullptr, layer_norm_workspace},
    {5, layer_norm_row_ahead, nullptr, layer_norm_workspace},
};

static inline Answer layer_norm_check(const LadderCall &call)
{
    if (!has_tensors(call, 4, 4, 1) || call.inputs[0].dims != 2)
        return no("layer_norm has four outputs, four inputs, of which the first has two dimensions, and eps");
    for (int i = 0; i < 4; i++) {
        const bool is_parameter[2] = {i >= 2, i == 1 || i == 2}; // among outputs, among inputs
        for (int side = 0; side < 2; side++) {
            const LadderTensor &tensor = side == 0 ? call.outputs[i] : call.inputs[i];
            if (tensor.dtype != CUDA_OPS_FLOAT32)
                return no("takes float32");
            if (is_parameter[side] ? !has_shape(tensor, 1, call.inputs[0].sizes[1])
                                   : !same_shape(tensor, call.inputs[0]))
                return no("output, grad_input and grad_output have to be of input's shape, parameters and their "
                          "gradients of its columns");
        }
    }
    return call.inputs[0].sizes[0] <= INT32_MAX / 2 && call.inputs[0].sizes[1] <= INT32_MAX / 2
               ? YES
               : no("more rows than a grid has blocks, or longer ones");
}

#endif
