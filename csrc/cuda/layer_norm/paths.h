// layer_norm's table of paths: what a call is, and the paths' functions. The table is in layer_norm.cu.
#ifndef CUDA_OPS_LAYER_NORM_PATHS_H
#define CUDA_OPS_LAYER_NORM_PATHS_H

#include "common/paths.h"
#include "cuda_ops/layer_norm.h"

// One pass as a launcher gets it; layer_norm.cu has checked that there is something to do.
struct LayerNormCall {
    bool backward, rms;
    // forward; sum and residual are NULL where nothing is added
    void *output, *sum;
    double *mean;
    void *rstd;
    int64_t *state;    // NULL without dropout
    uint8_t *new_mask; // dropout's, where it is wanted
    const void *residual, *bias;
    cuda_ops_philox_state philox;
    double eps;
    // backward
    void *grad_input, *grad_weight, *grad_bias, *grad_input_sums, *workspace;
    void *grad_dropped;  // grad_input by dropout's mask
    const uint8_t *mask; // that mask; NULL: neither
    const void *grad_output, *grad_sum;
    const double *saved_mean;
    const void *saved_rstd;
    // both
    const void *input, *weight;
    double p; // of dropout
    int64_t rows, cols;
    cuda_ops_dtype dtype, parameter_dtype;
    cudaStream_t stream;
};

// A row that starts anywhere, in registers, forward (unaligned_row.cu).
Answer layer_norm_unaligned_row_supports(const LayerNormCall &call, const Device &device);
Answer layer_norm_unaligned_row_is_fast(const LayerNormCall &call, const Device &device);
cuda_ops_status layer_norm_unaligned_row(const LayerNormCall &call, const Device &device);
// A row in the registers of a part of a warp, a warp or a block (forward.cu, backward.cu).
Answer layer_norm_registers_supports(const LayerNormCall &call, const Device &device);
// A row in the registers of a cluster of blocks (forward.cu, backward.cu).
Answer layer_norm_cluster_supports(const LayerNormCall &call, const Device &device);
// A row of any length, which a block reads again for each step (streamed.cu).
int64_t layer_norm_streamed_workspace(const LayerNormCall &call, const Device &device);
cuda_ops_status layer_norm_streamed(const LayerNormCall &call, const Device &device);

// How rows are laid on threads: of `elements` elements at a time in `vectors` a thread, by `threads` threads of each of
// `cluster` blocks, of which one has `slots` rows. threads = 0: rows of this length and alignment do not fit.
struct RowShape {
    int elements, vectors, threads, slots, cluster;
};
RowShape layer_norm_forward_shape(const LayerNormCall &call, const Device &device);
RowShape layer_norm_backward_shape(const LayerNormCall &call, const Device &device);
cuda_ops_status layer_norm_forward(const LayerNormCall &call, const RowShape &shape);
cuda_ops_status layer_norm_backward(const LayerNormCall &call, const RowShape &shape, const Device &device);
// Rows of sums that backward's blocks leave at the most.
int64_t layer_norm_backward_parts(const LayerNormCall &call, const Device &device);

// grad_weight[c] and grad_bias[c]: the sums over i of partials[i][0][c] and of partials[i][1][c], in a fixed order;
// with `of_input`, grad_input_sums[c] those of partials[i][2][c]. For the kernel that is next on the stream after the
// one that leaves them.
cuda_ops_status layer_norm_sum_partials(const LayerNormCall &call, int64_t parts, bool of_input);

// grad_input_sums of what lies in grad_input, where no kernel has left partials of it.
int64_t layer_norm_sum_grad_input_workspace(const LayerNormCall &call);
cuda_ops_status layer_norm_sum_grad_input(const LayerNormCall &call);

#endif
