// linear_cross_entropy: logits = input * weight^T + bias, loss = logsumexp(logits) - sum(q * logits) a row, and with
// grad_logits = row_scale * (softmax(logits) - q)
//     grad_input = grad_logits * weight,   grad_weight = grad_logits^T * input,   grad_bias = sum of grad_logits
// Few classes (up to 16): one kernel for all of it, bound by latency. On an H200, 128 features and ten classes, bf16
// beside float32 parameters: 7.8 us for 64 rows and 29.5 us for 16384, a fifteenth of a copy's 4.3 TB/s.
// Many classes in fp16 and bf16 on Hopper: three products by wgmma (sm90/sm90.cu).
// Any other number of classes: chunks of rows, a product, a kernel that turns logits into their gradient, and two
// products, which bound it: 768 features, 50257 classes, 1024 rows in bf16 take 4.9 ms on an H200, 49 TFLOP/s.
#include "common/elementwise.cuh"
#include "linear_cross_entropy/chunks.cuh"
#include "linear_cross_entropy/few_classes.cuh"
#include "linear_cross_entropy/sm90/sm90.h"

static PathTable<HeadCall, 3> table = {
    {"CUDA_OPS_LINEAR_CROSS_ENTROPY_PATH"},
    {{"few_classes", "linear_cross_entropy/few_classes.cuh",
      "linear_cross_entropy_kernel linear_cross_entropy_sums_kernel", few_classes_supports, nullptr,
      few_classes_workspace, few_classes},
     {"sm90", "linear_cross_entropy/sm90/", "linear_cross_entropy_sm90_kernel head_rows_kernel", head_sm90_supports,
      head_sm90_is_fast, head_sm90_workspace, head_sm90},
     {"chunks", "linear_cross_entropy/chunks.cuh", "skinny_gemm_kernel grad_logits_kernel", chunks_supports, nullptr,
      chunks_workspace, chunks}}};

static HeadCall call_of_sizes(int64_t rows, int64_t in_features, int64_t classes, double label_smoothing, double z_loss,
                              double softcap, bool with_gradient, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype)
{
    HeadCall call = {};
    call.rows = rows, call.in_features = in_features, call.classes = classes;
    call.label_smoothing = label_smoothing, call.z_loss = z_loss, call.softcap = softcap;
    call.with_gradient = with_gradient;
    call.dtype = dtype, call.parameter_dtype = parameter_dtype;
    return call;
}

extern "C" size_t cuda_ops_linear_cross_entropy_workspace_cuda(int64_t rows, int64_t in_features, int64_t classes,
                                                               double label_smoothing, double z_loss, double softcap,
                                                               bool with_gradient, cuda_ops_dtype dtype,
                                                               cuda_ops_dtype parameter_dtype)
{
    if (rows == 0)
        return 0;
    return (size_t)path_workspace(table, call_of_sizes(rows, in_features, classes, label_smoothing, z_loss, softcap,
                                                       with_gradient, dtype, parameter_dtype));
}

extern "C" int cuda_ops_linear_cross_entropy_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows,
                                                        int64_t in_features, int64_t classes, double label_smoothing,
                                                        double z_loss, double softcap, cuda_ops_dtype dtype,
                                                        const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table,
                        call_of_sizes(rows, in_features, classes, label_smoothing, z_loss, softcap, true, dtype, dtype),
                        device);
}

extern "C" cuda_ops_status
cuda_ops_linear_cross_entropy_cuda(void *losses, void *total_weight, void *grad_input, void *grad_weight,
                                   void *grad_bias, void *workspace, cuda_ops_index_error *error, const void *input,
                                   const void *weight, const void *bias, const int64_t *target, const void *row_scale,
                                   int64_t rows, int64_t in_features, int64_t classes, int64_t ignore_index,
                                   double label_smoothing, double z_loss, double softcap, cuda_ops_reduction reduction,
                                   cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    if (rows == 0)
        return CUDA_OPS_SUCCESS;
    HeadCall call = call_of_sizes(rows, in_features, classes, label_smoothing, z_loss, softcap,
                                  grad_input || grad_weight || grad_bias, dtype, parameter_dtype);
    call.losses = losses, call.total_weight = total_weight, call.workspace = workspace, call.error = error;
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.input = input, call.weight = weight, call.bias = bias, call.row_scale = row_scale, call.target = target;
    call.ignore_index = ignore_index, call.reduction = reduction, call.stream = stream;
    return run_path(table, call);
}

// ---- The sums over rows ----

template <typename P>
__global__ void __launch_bounds__(1024)
    reduce_rows_kernel(P *loss, accumulate_type<P> *total_weight, const double *row_losses, int64_t rows, bool mean)
{
    __shared__ double scratch[WARP_SIZE];
    release_successor();
    wait_for_predecessor();
    double sum = 0, weight = 0;
    for (int64_t i = threadIdx.x; i < rows; i += 1024) {
        sum += row_losses[2 * i];
        weight += row_losses[2 * i + 1];
    }
    sum = block_sum(sum, scratch);
    weight = block_sum(weight, scratch);
    if (threadIdx.x == 0) {
        *loss = store_from_accumulate<P>((accumulate_type<P>)(mean ? sum / weight : sum));
        *total_weight = (accumulate_type<P>)weight;
    }
}

cuda_ops_status head_reduce_rows(const HeadCall &call, const double *row_losses)
{
    CUDA_OPS_DISPATCH(call.parameter_dtype, P, {
        launch_dependent(reduce_rows_kernel<P>, dim3(1), dim3(1024), 0, call.stream, (P *)call.losses,
                         (accumulate_type<P> *)call.total_weight, row_losses, call.rows,
                         call.reduction == CUDA_OPS_REDUCTION_MEAN);
        return launch_status();
    });
}

// ---- The gradient of weight from its sums ----

static constexpr int SCALED_TOGETHER = 8; // elements of a parameter's gradient

template <typename T, typename S>
__device__ __forceinline__ void scale_array(T *output, const S *input, int64_t count, accumulate_type<T> factor)
{
    typedef accumulate_type<T> A;
    const bool aligned = (reinterpret_cast<uintptr_t>(output) | reinterpret_cast<uintptr_t>(input)) % 16 == 0;
    const int64_t vectors = aligned ? count / SCALED_TOGETHER : 0;
    for (int64_t i = global_thread_index(); i < vectors; i += global_thread_count()) {
        const auto x = reinterpret_cast<const aligned_vector<S, SCALED_TOGETHER> *>(input)[i];
        A values[SCALED_TOGETHER];
#pragma unroll
        for (int e = 0; e < SCALED_TOGETHER; e++) {
            const A value = element_of(x, e);
            values[e] = value == 0 ? value : value * factor;
        }
        reinterpret_cast<aligned_vector<T, SCALED_TOGETHER> *>(output)[i] = vector_of<T>(values);
    }
    for (int64_t i = vectors * SCALED_TOGETHER + global_thread_index(); i < count; i += global_thread_count()) {
        const A x = load_as_accumulate(input[i]);
        output[i] = store_from_accumulate<T>(x == 0 ? x : x * factor);
    }
}

__global__ void __launch_bounds__(THREADS)
    round_weight_gradient_kernel(__nv_bfloat16 *grad_weight, const float *sums, int64_t count)
{
    release_successor();
    wait_for_predecessor();
    scale_array(grad_weight, sums, count, 1.0f);
}

cuda_ops_status head_round_weight_gradient(const HeadCall &call, const float *sums)
{
    const int64_t count = call.classes * call.in_features;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    launch_dependent(round_weight_gradient_kernel, dim3(clamp_grid(ceil_div(count, THREADS * SCALED_TOGETHER))),
                     dim3(THREADS), 0, call.stream, (__nv_bfloat16 *)call.grad_weight, sums, count);
    return launch_status();
}

// ---- The gradients for grad_output = 1, scaled by grad_output ----

template <typename T, typename P>
__global__ void __launch_bounds__(THREADS)
    linear_cross_entropy_scale_kernel(T *output_input, P *output_weight, P *output_bias, const T *grad_input,
                                      const weight_gradient_type<T, P> *grad_weight,
                                      const accumulate_type<T> *grad_bias, const P *grad_output,
                                      const accumulate_type<T> *total_weight, int64_t input_count, int64_t weight_count,
                                      int64_t bias_count, int64_t vectors)
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
        const int64_t others = ceil_div(weight_count > bias_count ? weight_count : bias_count, SCALED_TOGETHER);
        launch_dependent(linear_cross_entropy_scale_kernel<T, P>,
                         dim3(clamp_grid(ceil_div(items > others ? items : others, THREADS))), dim3(THREADS), 0, stream,
                         (T *)output_input, (P *)output_weight, (P *)output_bias, (const T *)grad_input,
                         (const weight_gradient_type<T, P> *)grad_weight, (const A *)grad_bias, (const P *)grad_output,
                         (const A *)divisor, input_count, weight_count, bias_count, vectors);
        return launch_status();
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
