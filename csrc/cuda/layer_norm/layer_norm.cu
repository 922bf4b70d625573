// layer_norm, rms_norm and both after an addition: the table of paths, and the launchers. forward.cu and backward.cu
// have the formulas.
#include "common/common.cuh"
#include "common/rows.cuh"
#include "layer_norm/paths.h"

static constexpr int64_t LONG_ROW = 1024;

static RowShape shape_of(const LayerNormCall &call, const Device &device)
{
    return call.backward ? layer_norm_backward_shape(call, device) : layer_norm_forward_shape(call, device);
}

Answer layer_norm_registers_supports(const LayerNormCall &call, const Device &device)
{
    const RowShape shape = shape_of(call, device);
    return shape.cluster == 1 && shape.threads > 0
               ? YES
               : no("rows are longer than what a block's registers hold, in vectors where they are whole ones");
}

// Few long rows that are no whole vectors take a round of the streamed kernel's blocks, which read vectors.
static Answer registers_is_fast(const LayerNormCall &call, const Device &device)
{
    const bool streams = !call.backward && !call.residual && call.cols > LONG_ROW &&
                         call.rows <= device.multiprocessors && shape_of(call, device).elements == 1 &&
                         same_alignment(call.input, call.output);
    return streams ? no("rows are few and long, and read by single elements here") : YES;
}

Answer layer_norm_cluster_supports(const LayerNormCall &call, const Device &device)
{
    if (device.capability < 90)
        return NEEDS_90;
    const RowShape shape = shape_of(call, device);
    if (shape.cluster == 1)
        return no("a block holds a row");
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("has no kernel for float64");
    return shape.threads > 0
               ? YES
               : no("rows are longer than a cluster of 8 holds, or not whole vectors aligned to 16 bytes");
}

static Answer streamed_supports(const LayerNormCall &, const Device &)
{
    return YES;
}

static int64_t in_registers_workspace(const LayerNormCall &call, const Device &device)
{
    return call.backward
               ? layer_norm_backward_parts(call, device) * 3 * call.cols * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4)
               : 0;
}

static cuda_ops_status in_registers(const LayerNormCall &call, const Device &device)
{
    const RowShape shape = shape_of(call, device);
    return call.backward ? layer_norm_backward(call, shape, device) : layer_norm_forward(call, shape);
}

static PathTable<LayerNormCall, 4> table = {
    {"CUDA_OPS_LAYER_NORM_PATH"},
    {{"unaligned_row", "layer_norm/unaligned_row.cu", "layer_norm_forward_unaligned_kernel",
      layer_norm_unaligned_row_supports, layer_norm_unaligned_row_is_fast, nullptr, layer_norm_unaligned_row},
     {"registers", "layer_norm/forward.cu", "layer_norm_forward_kernel layer_norm_backward_kernel",
      layer_norm_registers_supports, registers_is_fast, in_registers_workspace, in_registers},
     {"cluster", "layer_norm/forward.cu", "layer_norm_forward_kernel layer_norm_backward_kernel",
      layer_norm_cluster_supports, nullptr, in_registers_workspace, in_registers},
     {"streamed", "layer_norm/streamed.cu",
      "layer_norm_forward_streamed_kernel layer_norm_grad_input_streamed_kernel "
      "layer_norm_grad_parameters_streamed_kernel",
      streamed_supports, nullptr, layer_norm_streamed_workspace, layer_norm_streamed}}};

static LayerNormCall call_of_sizes(bool backward, int64_t rows, int64_t cols, cuda_ops_dtype dtype)
{
    LayerNormCall call = {};
    call.backward = backward;
    call.rows = rows, call.cols = cols;
    call.dtype = call.parameter_dtype = dtype;
    return call;
}

extern "C" int cuda_ops_layer_norm_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t rows,
                                              int64_t cols, cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of_sizes(backward != 0, rows, cols, dtype), device);
}

// Whether rows are such as the kernels in registers keep and take masks for: halves in whole vectors, by one block.
static bool takes_mask(const LayerNormCall &call)
{
    const RowShape shape = shape_of(call, current_device());
    return (call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16) && shape.elements == 8 &&
           shape.threads > 0 && shape.cluster == 1;
}

extern "C" int64_t cuda_ops_layer_norm_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype)
{
    if (rows == 0 || cols == 0)
        return 0;
    // Rows of whole vectors may turn out not to be aligned; single elements then have other blocks.
    const LayerNormCall call = call_of_sizes(true, rows, cols, dtype);
    LayerNormCall misaligned = call;
    misaligned.input = reinterpret_cast<const void *>(1);
    const int64_t aligned_bytes = path_workspace(table, call), bytes = path_workspace(table, misaligned);
    const int64_t of_input = layer_norm_sum_grad_input_workspace(call);
    // What takes a mask has one way alone, whatever path is forced on the rest.
    const int64_t of_mask = takes_mask(call) ? in_registers_workspace(call, current_device()) : 0;
    int64_t most = aligned_bytes > bytes ? aligned_bytes : bytes;
    most = most > of_mask ? most : of_mask;
    return most > of_input ? most : of_input;
}

extern "C" cuda_ops_status cuda_ops_layer_norm_forward_cuda(void *output, double *mean, void *rstd, const void *input,
                                                            const void *weight, const void *bias, int64_t rows,
                                                            int64_t cols, double eps, cuda_ops_norm norm,
                                                            cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                            cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = call_of_sizes(false, rows, cols, dtype);
    call.rms = norm == CUDA_OPS_RMS_NORM;
    call.output = output, call.mean = mean, call.rstd = rstd;
    call.input = input, call.weight = weight, call.bias = bias, call.eps = eps;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    return run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_add_layer_norm_forward_cuda(void *output, void *sum, double *mean, void *rstd,
                                                                int64_t *state, const void *input, const void *residual,
                                                                const void *weight, const void *bias, int64_t rows,
                                                                int64_t cols, double eps, cuda_ops_norm norm, double p,
                                                                cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                                                cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (!(p >= 0.0 && p <= 1.0) || (p > 0.0) != (state != nullptr))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = call_of_sizes(false, rows, cols, dtype);
    call.rms = norm == CUDA_OPS_RMS_NORM;
    call.output = output, call.sum = sum, call.mean = mean, call.rstd = rstd, call.state = state;
    call.input = input, call.residual = residual, call.weight = weight, call.bias = bias, call.eps = eps;
    call.p = p, call.philox = philox, call.parameter_dtype = parameter_dtype, call.stream = stream;
    return run_path(table, call);
}

extern "C" int cuda_ops_layer_norm_takes_mask_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype)
{
    return takes_mask(call_of_sizes(false, rows, cols, dtype)) && takes_mask(call_of_sizes(true, rows, cols, dtype));
}

extern "C" cuda_ops_status cuda_ops_add_layer_norm_forward_mask_cuda(
    void *output, void *sum, double *mean, void *rstd, int64_t *state, uint8_t *mask, const void *input,
    const void *residual, const void *weight, const void *bias, int64_t rows, int64_t cols, double eps, double p,
    cuda_ops_philox_state philox, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (!(p > 0.0 && p <= 1.0) || !state || !mask)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = call_of_sizes(false, rows, cols, dtype);
    call.output = output, call.sum = sum, call.mean = mean, call.rstd = rstd, call.state = state, call.new_mask = mask;
    call.input = input, call.residual = residual, call.weight = weight, call.bias = bias, call.eps = eps;
    call.p = p, call.philox = philox, call.parameter_dtype = parameter_dtype, call.stream = stream;
    return takes_mask(call) ? layer_norm_forward(call, shape_of(call, current_device())) : CUDA_OPS_INVALID_ARGUMENT;
}

extern "C" cuda_ops_status
cuda_ops_layer_norm_backward_mask_cuda(void *grad_input, void *grad_dropped, void *grad_weight, void *grad_bias,
                                       void *workspace, const void *grad_output, const void *grad_sum,
                                       const void *input, const void *weight, const double *mean, const void *rstd,
                                       const uint8_t *mask, double p, int64_t rows, int64_t cols, cuda_ops_dtype dtype,
                                       cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (!(p > 0.0 && p <= 1.0) || !mask || !grad_input || !grad_dropped)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = call_of_sizes(true, rows, cols, dtype);
    call.grad_input = grad_input, call.grad_dropped = grad_dropped, call.mask = mask, call.p = p;
    call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.workspace = workspace, call.grad_output = grad_output, call.grad_sum = grad_sum;
    call.input = input, call.weight = weight, call.saved_mean = mean, call.saved_rstd = rstd;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    const Device &device = current_device();
    return takes_mask(call) ? layer_norm_backward(call, shape_of(call, device), device) : CUDA_OPS_INVALID_ARGUMENT;
}

extern "C" cuda_ops_status cuda_ops_layer_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                             void *grad_input_sums, void *workspace,
                                                             const void *grad_output, const void *grad_sum,
                                                             const void *input, const void *weight, const double *mean,
                                                             const void *rstd, int64_t rows, int64_t cols,
                                                             cuda_ops_norm norm, cuda_ops_dtype dtype,
                                                             cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (grad_input_sums && !grad_input)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0 || (!grad_input && !grad_weight && !grad_bias))
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = call_of_sizes(true, rows, cols, dtype);
    call.rms = norm == CUDA_OPS_RMS_NORM;
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.grad_input_sums = grad_input_sums;
    call.workspace = workspace, call.grad_output = grad_output, call.grad_sum = grad_sum;
    call.input = input, call.weight = weight, call.saved_mean = mean, call.saved_rstd = rstd;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    return run_path(table, call);
}
