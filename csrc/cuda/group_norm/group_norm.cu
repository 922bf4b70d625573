// group_norm and instance_norm: the table of paths, the launchers, and the update of running statistics.
// include/cuda_ops/group_norm.h has the formulas.
#include "common/common.cuh"
#include "common/value.cuh"
#include "group_norm/paths.h"

static Answer split_supports(const GroupNormCall &, const Device &)
{
    return YES;
}

static PathTable<GroupNormCall, 3> table = {
    {"CUDA_OPS_GROUP_NORM_PATH"},
    {{"registers", "group_norm/rows.cu", "layer_norm_forward_kernel", group_norm_registers_supports, nullptr, nullptr,
      group_norm_rows},
     {"cluster", "group_norm/rows.cu", "layer_norm_forward_kernel", group_norm_cluster_supports, nullptr, nullptr,
      group_norm_rows},
     {"split", "group_norm/split.cu",
      "group_norm_moments_of_rows_kernel group_norm_moments_of_columns_kernel group_norm_prepare_kernel "
      "group_norm_normalize_rows_kernel group_norm_normalize_columns_kernel",
      split_supports, nullptr, group_norm_split_workspace, group_norm_split}}};

static GroupNormCall call_of_sizes(const cuda_ops_group_norm_sizes &sizes, double eps, cuda_ops_dtype dtype)
{
    GroupNormCall call = {};
    call.sizes = sizes;
    // Where both formats are the same.
    if (sizes.inner == 1 || sizes.channels == 1)
        call.sizes.channels_last = 0;
    call.eps = eps;
    call.dtype = call.parameter_dtype = dtype;
    return call;
}

static bool is_empty(const cuda_ops_group_norm_sizes &sizes)
{
    return sizes.images == 0 || sizes.channels == 0 || sizes.inner == 0;
}

static bool fits(const cuda_ops_group_norm_sizes &sizes)
{
    return sizes.groups > 0 && sizes.channels % sizes.groups == 0 && sizes.channels <= INT32_MAX;
}

extern "C" int cuda_ops_group_norm_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_group_norm_sizes sizes,
                                              cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    if (!fits(sizes)) // of an empty call, or of none
        sizes = {sizes.images, 1, sizes.inner, 1, 0};
    return report_paths(reports, room, table, call_of_sizes(sizes, 0, dtype), device);
}

extern "C" int64_t cuda_ops_group_norm_workspace_cuda(cuda_ops_group_norm_sizes sizes, int backward,
                                                      cuda_ops_dtype dtype)
{
    if (is_empty(sizes) || !fits(sizes))
        return 0;
    const GroupNormCall call = call_of_sizes(sizes, 0, dtype);
    return backward ? group_norm_backward_workspace(call) : path_workspace(table, call);
}

extern "C" cuda_ops_status cuda_ops_group_norm_forward_cuda(void *output, double *mean, double *variance,
                                                            void *workspace, const void *input, const void *weight,
                                                            const void *bias, cuda_ops_group_norm_sizes sizes,
                                                            double eps, cuda_ops_dtype dtype,
                                                            cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (is_empty(sizes))
        return CUDA_OPS_SUCCESS;
    if (!fits(sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    GroupNormCall call = call_of_sizes(sizes, eps, dtype);
    call.output = output, call.new_mean = mean, call.new_variance = variance, call.workspace = workspace;
    call.input = input, call.weight = weight, call.bias = bias;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    return run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_group_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                             void *workspace, const void *grad_output,
                                                             const void *input, const void *weight, const double *mean,
                                                             const double *variance, cuda_ops_group_norm_sizes sizes,
                                                             double eps, cuda_ops_dtype dtype,
                                                             cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (is_empty(sizes) || (!grad_input && !grad_weight && !grad_bias))
        return CUDA_OPS_SUCCESS;
    if (!fits(sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    GroupNormCall call = call_of_sizes(sizes, eps, dtype);
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.workspace = workspace, call.grad_output = grad_output, call.input = input, call.weight = weight;
    call.mean = mean, call.variance = variance;
    call.parameter_dtype = parameter_dtype, call.stream = stream;
    return group_norm_backward(call);
}

// --- the running statistics of instance_norm -------------------------------------------------------------------------

static constexpr int UPDATE_THREADS = 128;

// A warp has a channel, and adds the images' statistics in a fixed order.
__global__ void __launch_bounds__(UPDATE_THREADS)
    instance_norm_update_kernel(void *running_mean, void *running_var, const double *mean, const double *variance,
                                int64_t images, int64_t channels, double unbiased, double momentum,
                                cuda_ops_dtype statistics_dtype)
{
    const int lane = threadIdx.x % WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t channel = global_thread_index() / WARP_SIZE; channel < channels;
         channel += global_thread_count() / WARP_SIZE) {
        double means = 0, variances = 0;
        for (int64_t n = lane; n < images; n += WARP_SIZE) {
            means += mean[n * channels + channel];
            variances += variance[n * channels + channel];
        }
        means = warp_sum(means) / (double)images;
        variances = warp_sum(variances) / (double)images * unbiased;
        if (lane == 0) {
            const double before = load_value(running_mean, statistics_dtype, channel);
            const double spread = load_value(running_var, statistics_dtype, channel);
            store_value(running_mean, statistics_dtype, channel, (1 - momentum) * before + momentum * means);
            store_value(running_var, statistics_dtype, channel, (1 - momentum) * spread + momentum * variances);
        }
    }
}

extern "C" cuda_ops_status cuda_ops_instance_norm_update_cuda(void *running_mean, void *running_var, const double *mean,
                                                              const double *variance, int64_t images, int64_t channels,
                                                              int64_t count, double momentum,
                                                              cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    if (images == 0 || channels == 0)
        return CUDA_OPS_SUCCESS;
    const dim3 grid(clamp_grid(ceil_div(channels, UPDATE_THREADS / WARP_SIZE)));
    launch_dependent(instance_norm_update_kernel, grid, dim3(UPDATE_THREADS), 0, stream, running_mean, running_var,
                     mean, variance, images, channels, (double)count / (double)(count - 1), momentum, statistics_dtype);
    return launch_status();
}
