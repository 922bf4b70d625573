// log_softmax: output = (input - max) - log(sum(exp(input - max))) along the middle dimension of [outer, cols, inner]. The kernels,
// and what bounds them, are in common/softmax.cuh.
#include "cuda_ops/log_softmax.h"

#include "common/softmax.cuh"

static PathTable<SoftmaxCall, 2> table = {
    {"CUDA_OPS_LOG_SOFTMAX_PATH"},
    {{"row", "common/softmax.cuh", "softmax_forward_row_kernel softmax_backward_row_kernel", softmax_row_supports,
      nullptr, nullptr, softmax_row<true>},
     {"thread_group", "common/softmax.cuh", "softmax_forward_kernel softmax_backward_kernel", softmax_group_supports,
      nullptr, nullptr, softmax_group<true>}}};

extern "C" int cuda_ops_log_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t outer,
                                               int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                               const cuda_ops_device_facts *device)
{
    return report_paths(
        reports, room, table,
        SoftmaxCall{backward != 0, nullptr, nullptr, nullptr, outer * inner, cols, inner, 1, dtype, nullptr}, device);
}

extern "C" cuda_ops_status cuda_ops_log_softmax_forward_cuda(void *output, const void *input, int64_t outer,
                                                             int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    return run_path(table, SoftmaxCall{false, output, input, nullptr, outer * inner, cols, inner, 1, dtype, stream});
}

extern "C" cuda_ops_status cuda_ops_log_softmax_backward_cuda(void *grad_input, const void *grad_output,
                                                              const void *output, int64_t outer, int64_t cols,
                                                              int64_t inner, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    return run_path(table,
                    SoftmaxCall{true, grad_input, grad_output, output, outer * inner, cols, inner, 1.0, dtype, stream});
}
