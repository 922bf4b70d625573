// linear_cross_entropy: logits = input * weight^T + bias, loss = logsumexp(logits) - sum(q * logits) a row, and with
// grad_logits = row_scale * (softmax(logits) - q)
//     grad_input = grad_logits * weight,   grad_weight = grad_logits^T * input,   grad_bias = sum of grad_logits
// Few classes (up to 16): one kernel for all of it, bound by latency. On an H200, 128 features and ten classes, bf16
// beside float32 parameters: 7.8 us for 64 rows and 29.5 us for 16384, a fifteenth of a copy's 4.3 TB/s.
// Any number of classes: chunks of rows, a product, a kernel that turns logits into their gradient, and two products,
// which bound it: 768 features, 50257 classes, 1024 rows in bf16 take 4.9 ms on an H200, 49 TFLOP/s.
#include "common/elementwise.cuh"
#include "linear_cross_entropy/chunks.cuh"
#include "linear_cross_entropy/few_classes.cuh"

static PathTable<HeadCall, 2> table = {
    {"CUDA_OPS_LINEAR_CROSS_ENTROPY_PATH"},
    {{"few_classes", "linear_cross_entropy/few_classes.cuh",
      "linear_cross_entropy_kernel linear_cross_entropy_sums_kernel", few_classes_supports, nullptr,
      few_classes_workspace, few_classes},
     {"chunks", "linear_cross_entropy/chunks.cuh", "skinny_gemm_kernel grad_logits_kernel", chunks_supports, nullptr,
      chunks_workspace, chunks}}};

static HeadCall call_of_sizes(int64_t rows, int64_t in_features, int64_t classes, cuda_ops_dtype dtype)
{
    HeadCall call = {};
    call.rows = rows, call.in_features = in_features, call.classes = classes;
    call.dtype = call.parameter_dtype = dtype;
    return call;
}

// The choice depends on these sizes alone, so that the workspace of one path is enough.
extern "C" size_t cuda_ops_linear_cross_entropy_workspace_cuda(int64_t rows, int64_t in_features, int64_t classes,
                                                               cuda_ops_dtype dtype)
{
    const HeadCall call = call_of_sizes(rows, in_features, classes, dtype);
    const Device device = current_device();
    const int row = find_path(table, call, device);
    return rows == 0 || row == 2 ? 0 : (size_t)table.rows[row].workspace(call, device);
}

extern "C" int cuda_ops_linear_cross_entropy_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows,
                                                        int64_t in_features, int64_t classes, cuda_ops_dtype dtype,
                                                        const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of_sizes(rows, in_features, classes, dtype), device);
}

extern "C" cuda_ops_status
cuda_ops_linear_cross_entropy_cuda(void *losses, void *total_weight, void *grad_input, void *grad_weight,
                                   void *grad_bias, void *workspace, cuda_ops_index_error *error, const void *input,
                                   const void *weight, const void *bias, const int64_t *target, const void *row_scale,
                                   int64_t rows, int64_t in_features, int64_t classes, int64_t ignore_index,
                                   double label_smoothing, cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                   cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (rows == 0)
        return CUDA_OPS_SUCCESS;
    const HeadCall call = {losses, total_weight,    grad_input, grad_weight,  grad_bias,       workspace,
                           error,  input,           weight,     bias,         row_scale,       target,
                           rows,   in_features,     classes,    ignore_index, label_smoothing, reduction,
                           dtype,  parameter_dtype, stream};
    const Device device = current_device();
    const int row = find_path(table, call, device);
    return row == 2 ? no_path(table) : table.rows[row].launch(call, device);
}

// ---- The gradients for grad_output = 1, scaled by grad_output ----

template <typename T, typename A>
__device__ __forceinline__ void scale_array(T *output, const A *input, int64_t count, accumulate_type<T> factor)
{
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const accumulate_type<T> x = load_as_accumulate(input[i]);
        output[i] = store_from_accumulate<T>(x == 0 ? x : x * factor);
    }
}

template <typename T, typename P>
__global__ void __launch_bounds__(THREADS)
    linear_cross_entropy_scale_kernel(T *output_input, P *output_weight, P *output_bias, const T *grad_input,
                                      const accumulate_type<T> *grad_weight, const accumulate_type<T> *grad_bias,
                                      const P *grad_output, const accumulate_type<T> *total_weight, int64_t input_count,
                                      int64_t weight_count, int64_t bias_count, int64_t vectors)
{
    typedef accumulate_type<T> A;
    release_successor();
    wait_for_predecessor();
    A factor = load_as_accumulate(*grad_output);
    if (total_weight)
        factor /= *total_weight; // where all weights are zero every gradient is zero, and stays so
    const T *const inputs[] = {grad_input};
    for_elements(output_input, inputs, input_count, vectors, [&](int64_t, const auto &x, auto &y) {
#pragma unroll
        for (int e = 0; e < y.size; e++) {
            const A value = load_as_accumulate(x[0].element[e]);
            y.element[e] = value == A(0) ? x[0].element[e] : store_from_accumulate<T>(value * factor);
        }
    });
    scale_array(output_weight, grad_weight, weight_count, (accumulate_type<P>)factor);
    scale_array(output_bias, grad_bias, bias_count, (accumulate_type<P>)factor);
}

extern "C" cuda_ops_status
cuda_ops_linear_cross_entropy_scale_cuda(void *output_input, void *output_weight, void *output_bias,
                                         const void *grad_input, const void *grad_weight, const void *grad_bias,
                                         const void *grad_output, const void *total_weight, int64_t input_count,
                                         int64_t weight_count, int64_t bias_count, cuda_ops_reduction reduction,
                                         cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    input_count = output_input ? input_count : 0;
    weight_count = output_weight ? weight_count : 0;
    bias_count = output_bias ? bias_count : 0;
    if (input_count + weight_count + bias_count == 0)
        return CUDA_OPS_SUCCESS;
    const void *const divisor = reduction == CUDA_OPS_REDUCTION_MEAN ? total_weight : nullptr;
    CUDA_OPS_MIXED_DISPATCH(dtype, parameter_dtype, T, P, {
        typedef accumulate_type<T> A;
        const int64_t vectors = vectors_of(input_count, (const T *)output_input, (const T *)grad_input);
        const int64_t items = vectors > 0 ? vectors : input_count;
        const int64_t others = weight_count > bias_count ? weight_count : bias_count;
        launch_dependent(linear_cross_entropy_scale_kernel<T, P>,
                         dim3(clamp_grid(ceil_div(items > others ? items : others, THREADS))), dim3(THREADS), 0, stream,
                         (T *)output_input, (P *)output_weight, (P *)output_bias, (const T *)grad_input,
                         (const A *)grad_weight, (const A *)grad_bias, (const P *)grad_output, (const A *)divisor,
                         input_count, weight_count, bias_count, vectors);
        return launch_status();
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
