// window_attention: attention among the pixels of each window of images whose channels are innermost,
//     output[i] = sum over j of softmax_j(scale * query[i] . key[j] + bias[head][i][j] + apart(i, j)) * value[j]
// The table of paths, the launchers, and the sum of bias's gradient over what blocks have left of it.
#include "window_attention/paths.h"

#include "common/common.cuh"

static Answer simt_supports(const WindowCall &, const Device &)
{
    return YES;
}

static int64_t workspace(const WindowCall &call, const Device &device)
{
    if (!call.backward || !call.grad_bias)
        return 0;
    const int64_t positions = cuda_ops_window_positions(&call.windows);
    const int64_t elements = window_slots(call.windows, device) * call.windows.heads * positions * positions;
    return elements * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

static PathTable<WindowCall, 2> table = {
    {"CUDA_OPS_WINDOW_ATTENTION_PATH"},
    {{"mma", "window_attention/mma/", "window_attention_mma_forward_kernel window_attention_mma_backward_kernel",
      window_attention_mma_supports, nullptr, workspace, window_attention_mma},
     {"simt", "window_attention/simt.cu", "window_attention_forward_kernel window_attention_backward_kernel",
      simt_supports, nullptr, workspace, window_attention_simt}}};

// Eight threads have an element each, every eighth slot.
static constexpr int SUM_THREADS = 256, SUM_ELEMENTS = 32, SUM_GROUPS = SUM_THREADS / SUM_ELEMENTS;

template <typename A>
__global__ void __launch_bounds__(SUM_THREADS)
    window_bias_sums_kernel(A *grad_bias, const A *partials, int64_t elements, int64_t slots)
{
    __shared__ A sums[SUM_GROUPS][SUM_ELEMENTS];
    const int column = (int)threadIdx.x % SUM_ELEMENTS, group = (int)threadIdx.x / SUM_ELEMENTS;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * SUM_ELEMENTS; first < elements;
         first += (int64_t)gridDim.x * SUM_ELEMENTS) {
        const int64_t element = first + column;
        A sum = 0;
        if (element < elements) {
#pragma unroll 4
            for (int64_t slot = group; slot < slots; slot += SUM_GROUPS)
                sum += partials[slot * elements + element];
        }
        sums[group][column] = sum;
        __syncthreads();
        if (group == 0 && element < elements) {
#pragma unroll
            for (int other = 1; other < SUM_GROUPS; other++)
                sum += sums[other][column];
            grad_bias[element] = sum;
        }
        __syncthreads();
    }
}

cuda_ops_status window_bias_sums(const WindowCall &call, int64_t slots)
{
    const int64_t positions = cuda_ops_window_positions(&call.windows);
    const int64_t elements = call.windows.heads * positions * positions;
    const dim3 grid(clamp_grid(ceil_div(elements, SUM_ELEMENTS))), block(SUM_THREADS);
    if (call.dtype == CUDA_OPS_FLOAT64)
        launch_dependent(window_bias_sums_kernel<double>, grid, block, 0, call.stream, (double *)call.grad_bias,
                         (const double *)call.workspace, elements, slots);
    else
        launch_dependent(window_bias_sums_kernel<float>, grid, block, 0, call.stream, (float *)call.grad_bias,
                         (const float *)call.workspace, elements, slots);
    return launch_status();
}

static WindowCall call_of(const cuda_ops_windows &windows, bool backward, cuda_ops_dtype dtype)
{
    WindowCall call = {};
    call.windows = windows, call.backward = backward, call.dtype = dtype;
    return call;
}

static bool has_work(const cuda_ops_windows &w)
{
    return cuda_ops_window_count(&w) > 0 && w.heads > 0 && w.head_dim > 0;
}

extern "C" int64_t cuda_ops_window_attention_workspace_cuda(const cuda_ops_windows *windows, int with_grad_bias,
                                                            cuda_ops_dtype dtype)
{
    WindowCall call = call_of(*windows, true, dtype);
    static char wanted; // an address that is not NULL, of which only that is read
    call.grad_bias = with_grad_bias ? &wanted : nullptr;
    return has_work(*windows) ? path_workspace(table, call) : 0;
}

extern "C" int cuda_ops_window_attention_paths_cuda(cuda_ops_path_report *reports, int room, int backward,
                                                    const cuda_ops_windows *windows, cuda_ops_dtype dtype,
                                                    const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of(*windows, backward != 0, dtype), device);
}

extern "C" cuda_ops_status cuda_ops_window_attention_forward_cuda(void *output, const void *qkv, const void *bias,
                                                                  const cuda_ops_windows *windows, cuda_ops_dtype dtype,
                                                                  cuda_ops_stream stream)
{
    if (!has_work(*windows))
        return CUDA_OPS_SUCCESS;
    WindowCall call = call_of(*windows, false, dtype);
    call.output = output;
    call.qkv = qkv, call.bias = bias, call.stream = stream;
    return run_path(table, call);
}

extern "C" cuda_ops_status cuda_ops_window_attention_backward_cuda(void *grad_qkv, void *grad_bias, void *workspace,
                                                                   const void *grad_output, const void *qkv,
                                                                   const void *bias, const cuda_ops_windows *windows,
                                                                   cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!has_work(*windows))
        return CUDA_OPS_SUCCESS;
    WindowCall call = call_of(*windows, true, dtype);
    call.grad_qkv = grad_qkv, call.grad_bias = grad_bias;
    call.workspace = workspace, call.grad_output = grad_output;
    call.qkv = qkv, call.bias = bias, call.stream = stream;
    return run_path(table, call);
}
