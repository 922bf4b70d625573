// linear_relu: output[i][j] = relu(sum over p of input[i][p] * weight[j][p] + bias[j]), and with
// masked = output <= 0 ? 0 : grad_output
//     grad_input[i][p]  = sum over j of masked[i][j] * weight[j][p]
//     grad_weight[j][p] = sum over i of masked[i][j] * input[i][p]
//     grad_bias[j]      = sum over i of masked[i][j]
// The table of paths, and the launchers. The choice was measured for 3136 to 128 features on an H200
// (benchmarks/notes/mnist.md).
#include "linear_relu/paths.h"

static Answer skinny_supports(const LinearReluCall &, const Device &)
{
    return YES;
}

static cuda_ops_status skinny(const LinearReluCall &call, const Device &)
{
    return call.backward ? linear_relu_skinny_backward(call) : linear_relu_skinny_forward(call);
}

static PathTable<LinearReluCall, 3> table = {
    {"CUDA_OPS_LINEAR_RELU_PATH"},
    {{"sm90", "linear_relu/sm90.cu", "linear_relu_sm90_forward_kernel linear_relu_sm90_backward_kernel",
      linear_relu_sm90_supports, linear_relu_sm90_is_fast, linear_relu_sm90_workspace, linear_relu_sm90},
     {"gemm", "linear_relu/gemm.cu",
      "gemm_sm90_kernel gemm_sm90_pair_kernel gemm_sm90_triple_kernel gemm_sm90_skinny_kernel gemm_align_kernel "
      "gemm_narrow_rows_kernel gemm_narrow_columns_kernel linear_relu_mask_kernel",
      linear_relu_gemm_supports, linear_relu_gemm_is_fast, linear_relu_gemm_workspace, linear_relu_gemm},
     {"skinny", "linear_relu/skinny/", "skinny_gemm_kernel linear_relu_backward_kernel", skinny_supports, nullptr,
      nullptr, skinny}}};

static LinearReluCall call_of_sizes(bool backward, int64_t rows, int64_t in_features, int64_t out_features,
                                    int allow_tf32, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype)
{
    LinearReluCall call = {};
    call.backward = backward;
    call.rows = rows, call.in_features = in_features, call.out_features = out_features;
    call.allow_tf32 = allow_tf32 != 0;
    call.dtype = dtype, call.parameter_dtype = parameter_dtype;
    return call;
}

extern "C" int64_t cuda_ops_linear_relu_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                               int allow_tf32, cuda_ops_dtype dtype,
                                                               cuda_ops_dtype parameter_dtype)
{
    return path_workspace(table,
                          call_of_sizes(false, rows, in_features, out_features, allow_tf32, dtype, parameter_dtype));
}

extern "C" int64_t cuda_ops_linear_relu_backward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                                int allow_tf32, cuda_ops_dtype dtype,
                                                                cuda_ops_dtype parameter_dtype)
{
    return path_workspace(table,
                          call_of_sizes(true, rows, in_features, out_features, allow_tf32, dtype, parameter_dtype));
}

extern "C" int cuda_ops_linear_relu_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t rows,
                                               int64_t in_features, int64_t out_features, int allow_tf32,
                                               cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                               const cuda_ops_device_facts *device)
{
    return report_paths(
        reports, room, table,
        call_of_sizes(backward != 0, rows, in_features, out_features, allow_tf32, dtype, parameter_dtype), device);
}

extern "C" cuda_ops_status cuda_ops_linear_relu_forward_cuda(void *output, const void *input, const void *weight,
                                                             const void *bias, void *workspace, int64_t rows,
                                                             int64_t in_features, int64_t out_features, int allow_tf32,
                                                             cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                             cuda_ops_stream stream)
{
    if (rows == 0 || out_features == 0)
        return CUDA_OPS_SUCCESS;
    LinearReluCall call = call_of_sizes(false, rows, in_features, out_features, allow_tf32, dtype, parameter_dtype);
    call.output = output;
    call.input = input, call.weight = weight, call.bias = bias;
    call.workspace = workspace, call.stream = stream;
    return run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_linear_relu_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                              const void *grad_output, const void *output,
                                                              const void *input, const void *weight, void *workspace,
                                                              int64_t rows, int64_t in_features, int64_t out_features,
                                                              int allow_tf32, cuda_ops_dtype dtype,
                                                              cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    LinearReluCall call = call_of_sizes(true, rows, in_features, out_features, allow_tf32, dtype, parameter_dtype);
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.grad_output = grad_output, call.activated = output;
    call.input = input, call.weight = weight;
    call.workspace = workspace, call.stream = stream;
    return run_path(table, call);
}
