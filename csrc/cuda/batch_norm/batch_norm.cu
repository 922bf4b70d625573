// batch_norm. With n values in a channel, rstd = 1 / sqrt(variance + eps), normalised = (x - mean) * rstd:
//
//     output      = normalised * weight + bias
//     grad_bias   = sum of grad_output,   grad_weight = sum of grad_output * normalised
//     grad_input  = weight * rstd * (grad_output - grad_bias / n - normalised * grad_weight / n)
//
// and without the two last terms where the statistics are running ones. batch_norm_act: output = f(normalised * weight +
// bias + residual), and grad_sum, grad_output times f' of that sum, in place of grad_output in the others. The table of paths, and the launchers.
#include "batch_norm/paths.h"

static Answer split_supports(const NormCall &call, const Device &)
{
    return call.grad_added ? no("does not add up two gradients") : YES;
}

static PathTable<NormCall, 5> table = {
    {"CUDA_OPS_BATCH_NORM_PATH"},
    {{"groups", "batch_norm/groups.cu", "groups_backward_kernel", batch_norm_groups_supports, batch_norm_groups_is_fast,
      nullptr, batch_norm_groups},
     {"resident", "batch_norm/resident.cu", "resident_forward_kernel resident_backward_kernel",
      batch_norm_resident_supports, nullptr, nullptr, batch_norm_resident},
     {"cluster", "batch_norm/cluster.cu", "cluster_forward_kernel cluster_backward_kernel", batch_norm_cluster_supports,
      nullptr, nullptr, batch_norm_cluster},
     {"rows", "batch_norm/rows.cu", "rows_moments_kernel rows_normalize_kernel rows_sums_kernel rows_grad_input_kernel",
      batch_norm_rows_supports, nullptr, batch_norm_rows_workspace, batch_norm_rows},
     {"split", "batch_norm/split.cu",
      "moments_of_planes_kernel moments_of_rows_kernel normalize_kernel normalize_act_kernel sums_of_planes_kernel "
      "sums_of_rows_kernel gate_kernel grad_input_training_kernel grad_input_inference_kernel",
      split_supports, nullptr, batch_norm_split_workspace, batch_norm_split}}};

static NormCall call_of_sizes(cuda_ops_batch_norm_pass pass, int64_t outer, int64_t channels, int64_t inner, double eps,
                              cuda_ops_dtype dtype)
{
    NormCall call = {};
    call.pass = pass;
    call.wants_output = true;
    call.outer = outer, call.channels = channels, call.inner = inner;
    call.eps = eps;
    call.dtype = call.parameter_dtype = dtype;
    call.statistics_dtype = CUDA_OPS_FLOAT64;
    return call;
}

static bool is_empty(const NormCall &call)
{
    return call.outer == 0 || call.channels == 0 || call.inner == 0;
}

// Of all dtypes, and of all paths: which one takes a call is a matter of addresses too.
extern "C" int64_t cuda_ops_batch_norm_workspace_cuda(int64_t outer, int64_t channels, int64_t inner)
{
    NormCall call = call_of_sizes(CUDA_OPS_BATCH_NORM_TRAINING, outer, channels, inner, 0, CUDA_OPS_FLOAT16);
    if (is_empty(call))
        return 0;
    int64_t bytes = batch_norm_split_workspace(call, {});
    for (const cuda_ops_dtype dtype : {CUDA_OPS_FLOAT16, CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT64}) {
        call.dtype = dtype;
        if (batch_norm_rows_supports(call, {})) {
            const int64_t of_rows = batch_norm_rows_workspace(call, {});
            bytes = bytes > of_rows ? bytes : of_rows;
        }
    }
    return bytes;
}

extern "C" int cuda_ops_batch_norm_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_batch_norm_pass pass,
                                              int act, int64_t outer, int64_t channels, int64_t inner,
                                              cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    const cuda_ops_batch_norm_epilogue epilogue = {};
    NormCall call = call_of_sizes(pass, outer, channels, inner, 0, dtype);
    call.epilogue = act ? &epilogue : nullptr;
    return report_paths(reports, room, table, call, device);
}

extern "C" cuda_ops_status cuda_ops_batch_norm_act_forward_training_cuda(
    void *output, double *mean, double *variance, void *workspace, const cuda_ops_running_statistics *running,
    const void *input, const void *weight, const void *bias, const cuda_ops_batch_norm_epilogue *epilogue,
    int64_t outer, int64_t channels, int64_t inner, double eps, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
    cuda_ops_stream stream)
{
    NormCall call = call_of_sizes(CUDA_OPS_BATCH_NORM_TRAINING, outer, channels, inner, eps, dtype);
    call.wants_output = output;
    call.output = output, call.new_mean = mean, call.new_variance = variance, call.workspace = workspace;
    if (running)
        call.running = *running;
    call.input = input, call.weight = weight, call.bias = bias, call.epilogue = epilogue;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    return is_empty(call) ? CUDA_OPS_SUCCESS : run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_batch_norm_forward_training_cuda(
    void *output, double *mean, double *variance, void *workspace, const cuda_ops_running_statistics *running,
    const void *input, const void *weight, const void *bias, int64_t outer, int64_t channels, int64_t inner, double eps,
    cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    return cuda_ops_batch_norm_act_forward_training_cuda(output, mean, variance, workspace, running, input, weight,
                                                         bias, nullptr, outer, channels, inner, eps, dtype,
                                                         parameter_dtype, stream);
}

extern "C" cuda_ops_status cuda_ops_batch_norm_act_forward_inference_cuda(
    void *output, void *workspace, const void *input, const void *weight, const void *bias, const void *running_mean,
    const void *running_var, const cuda_ops_batch_norm_epilogue *epilogue, int64_t outer, int64_t channels,
    int64_t inner, double eps, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
    cuda_ops_stream stream)
{
    NormCall call = call_of_sizes(CUDA_OPS_BATCH_NORM_INFERENCE, outer, channels, inner, eps, dtype);
    call.output = output, call.workspace = workspace, call.epilogue = epilogue;
    call.input = input, call.weight = weight, call.bias = bias, call.mean = running_mean, call.variance = running_var;
    call.parameter_dtype = parameter_dtype, call.statistics_dtype = statistics_dtype, call.stream = stream;
    return is_empty(call) ? CUDA_OPS_SUCCESS : run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_batch_norm_forward_inference_cuda(
    void *output, void *workspace, const void *input, const void *weight, const void *bias, const void *running_mean,
    const void *running_var, int64_t outer, int64_t channels, int64_t inner, double eps, cuda_ops_dtype dtype,
    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    return cuda_ops_batch_norm_act_forward_inference_cuda(output, workspace, input, weight, bias, running_mean,
                                                          running_var, nullptr, outer, channels, inner, eps, dtype,
                                                          parameter_dtype, statistics_dtype, stream);
}

extern "C" cuda_ops_status cuda_ops_batch_norm_act_backward_cuda(
    void *grad_input, void *grad_sum, void *grad_weight, void *grad_bias, void *workspace, const void *grad_output,
    const void *grad_added, const void *input, const void *weight, const void *bias, const void *mean,
    const void *variance, const cuda_ops_batch_norm_epilogue *epilogue, int64_t outer, int64_t channels, int64_t inner,
    double eps, int training, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
    cuda_ops_stream stream)
{
    NormCall call =
        call_of_sizes(training ? CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD : CUDA_OPS_BATCH_NORM_INFERENCE_BACKWARD, outer,
                      channels, inner, eps, dtype);
    call.wants_output = grad_input;
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.workspace = workspace, call.grad_output = grad_output, call.grad_sum = grad_sum, call.epilogue = epilogue;
    call.grad_added = grad_added;
    call.input = input, call.weight = weight, call.bias = bias, call.mean = mean, call.variance = variance;
    call.parameter_dtype = parameter_dtype, call.statistics_dtype = statistics_dtype, call.stream = stream;
    return is_empty(call) ? CUDA_OPS_SUCCESS : run_path(table, call);
}

extern "C" int cuda_ops_batch_norm_act_adds_gradients_cuda(int64_t outer, int64_t channels, int64_t inner, int training,
                                                           cuda_ops_dtype dtype)
{
    alignas(16) static const char aligned[16] = {}; // for tensors, of which only the addresses are asked about
    cuda_ops_batch_norm_epilogue epilogue = {};
    epilogue.residual = aligned;
    NormCall call =
        call_of_sizes(training ? CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD : CUDA_OPS_BATCH_NORM_INFERENCE_BACKWARD, outer,
                      channels, inner, 0, dtype);
    call.epilogue = &epilogue;
    call.grad_added = aligned;
    const Device device = current_device();
    return !is_empty(call) && find_path(table, call, device) < (int)(sizeof(table.rows) / sizeof(table.rows[0]));
}

extern "C" cuda_ops_status cuda_ops_batch_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                             void *workspace, const void *grad_output,
                                                             const void *input, const void *weight, const void *mean,
                                                             const void *variance, int64_t outer, int64_t channels,
                                                             int64_t inner, double eps, int training,
                                                             cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                             cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    return cuda_ops_batch_norm_act_backward_cuda(
        grad_input, nullptr, grad_weight, grad_bias, workspace, grad_output, nullptr, input, weight, nullptr, mean,
        variance, nullptr, outer, channels, inner, eps, training, dtype, parameter_dtype, statistics_dtype, stream);
}
