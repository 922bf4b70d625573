// softmax: output = exp(input - max) / sum(exp(input - max)) along the middle dimension of [outer, cols, inner]. The kernels,
// and what bounds them, are in common/softmax.cuh.
#include "cuda_ops/softmax.h"

#include "common/softmax.cuh"

static PathTable<SoftmaxCall, 5> table = {
    {"CUDA_OPS_SOFTMAX_PATH"},
    {{"cluster", "softmax/register_rows.cu", "softmax_forward_any_row_kernel softmax_backward_any_row_kernel",
      softmax_cluster_supports, softmax_cluster_is_fast, nullptr, softmax_cluster},
     {"unaligned_row", "softmax/register_rows.cu", "softmax_forward_any_row_kernel softmax_backward_any_row_kernel",
      softmax_unaligned_row_supports, softmax_unaligned_row_is_fast, nullptr, softmax_unaligned_row},
     {"row", "common/softmax.cuh", "softmax_forward_row_kernel softmax_backward_row_kernel", softmax_row_supports,
      nullptr, nullptr, softmax_row<false>},
     {"split", "softmax/split.cu", SOFTMAX_SPLIT_KERNELS, softmax_split_supports, softmax_split_is_fast,
      softmax_split_workspace, softmax_split},
     {"thread_group", "common/softmax.cuh", "softmax_forward_kernel softmax_backward_kernel", softmax_group_supports,
      nullptr, nullptr, softmax_group<false>}}};

// One pass, without its tensors.
static SoftmaxCall call_of(bool backward, int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype)
{
    SoftmaxCall call = {};
    call.log = false, call.backward = backward;
    call.columns = outer * inner, call.cols = cols, call.inner = inner;
    call.scale = 1;
    call.dtype = dtype;
    return call;
}

extern "C" int cuda_ops_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t outer,
                                           int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                           const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of(backward != 0, outer, cols, inner, dtype), device);
}

extern "C" size_t cuda_ops_softmax_workspace_cuda(int backward, int64_t outer, int64_t cols, int64_t inner,
                                                  cuda_ops_dtype dtype)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return 0;
    return (size_t)path_workspace(table, call_of(backward != 0, outer, cols, inner, dtype));
}

extern "C" cuda_ops_status cuda_ops_softmax_forward_cuda(void *output, void *workspace, const void *input,
                                                         int64_t outer, int64_t cols, int64_t inner,
                                                         cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    SoftmaxCall call = call_of(false, outer, cols, inner, dtype);
    call.a = output, call.b = input, call.workspace = workspace, call.stream = stream;
    return run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_softmax_backward_cuda(void *grad_input, void *workspace, const void *grad_output,
                                                          const void *output, double scale, int64_t outer, int64_t cols,
                                                          int64_t inner, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    SoftmaxCall call = call_of(true, outer, cols, inner, dtype);
    call.a = grad_input, call.b = grad_output, call.c = output, call.workspace = workspace, call.stream = stream;
    call.scale = scale;
    return run_path(table, call);
}
