// layer_norm, rms_norm and both after an addition, of float32, whose output is rounded to a half, for layers that compute
// with halves right behind the norm, and whose addend may be one: by the kernels of forward.cuh and backward.cuh, with rows
// in whole vectors of four, each in the registers of one block. Bound by memory: 6 bytes an element (0.78 of memory's
// speed), with an addition 12 (0.83); backward 10, with a gradient of the sum 14, with one of the addend 16 (0.82).
#include "layer_norm/backward.cuh"
#include "layer_norm/forward.cuh"

static constexpr int VECTOR = 4; // elements: 16 bytes of float

static LayerNormCall rounded_call(bool backward, int64_t rows, int64_t cols)
{
    LayerNormCall call = {};
    call.backward = backward, call.rows = rows, call.cols = cols;
    call.dtype = call.parameter_dtype = CUDA_OPS_FLOAT32;
    return call;
}

static bool fits(const RowShape &shape)
{
    return shape.elements == VECTOR && shape.threads > 0 && shape.cluster == 1;
}

extern "C" int cuda_ops_layer_norm_rounds_cuda(int64_t rows, int64_t cols)
{
    const Device &device = current_device();
    return fits(layer_norm_forward_shape(rounded_call(false, rows, cols), device)) &&
           fits(layer_norm_backward_shape(rounded_call(true, rows, cols), device));
}

template <typename H, int VECTORS>
static void launch(const LayerNormCall &call, const RowShape &shape, const ForwardRows<float, H> &a)
{
    if (shape.vectors == VECTORS)
        launch_forward_rows<false, float, H>(
            call.residual ? layer_norm_forward_kernel<float, VECTOR, VECTORS, true, false, false, H>
                          : layer_norm_forward_kernel<float, VECTOR, VECTORS, false, false, false, H>,
            shape, a, call.stream);
}

template <typename H>
static cuda_ops_status forward(const LayerNormCall &call, const RowShape &shape)
{
    ForwardRows<float, H> a = {};
    a.output = (H *)call.output, a.sum = (float *)call.sum, a.mean = call.mean, a.rstd = (float *)call.rstd;
    a.input = call.input, a.residual = (const float *)call.residual, a.weight = call.weight, a.bias = call.bias;
    a.rows = call.rows, a.cols = (int)call.cols, a.threads = shape.threads, a.cluster = 1;
    a.eps = (float)call.eps, a.inverse_cols = 1.0f / (float)call.cols, a.rms = !call.mean;
    launch<H, 2>(call, shape, a);
    launch<H, 4>(call, shape, a);
    launch<H, 8>(call, shape, a);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_layer_norm_rounded_forward_cuda(void *output, float *sum, double *mean, float *rstd,
                                                                    const void *input, const float *residual,
                                                                    const float *weight, const float *bias,
                                                                    int64_t rows, int64_t cols, double eps,
                                                                    cuda_ops_dtype half, cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = rounded_call(false, rows, cols);
    call.output = output, call.sum = sum, call.mean = mean, call.rstd = rstd, call.input = input;
    call.residual = residual, call.weight = weight, call.bias = bias, call.eps = eps, call.stream = stream;
    const RowShape shape = layer_norm_forward_shape(call, current_device());
    if (!fits(shape) || (residual != nullptr) != (sum != nullptr))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (half) {
    case CUDA_OPS_FLOAT16:
        return forward<__half>(call, shape);
    case CUDA_OPS_BFLOAT16:
        return forward<__nv_bfloat16>(call, shape);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

// Groups of rows: as many as run at once.
template <typename H>
static int64_t groups_of(int64_t rows, const RowShape &shape, const Device &device)
{
    const int64_t groups = ceil_div(rows, shape.slots);
    const int64_t there = (int64_t)device.multiprocessors *
                          active_blocks(layer_norm_backward_kernel<float, VECTOR, 1, false, false, false, H>,
                                        shape.threads * shape.slots, 0);
    return there < groups ? (there > 0 ? there : 1) : groups;
}

extern "C" int64_t cuda_ops_layer_norm_rounded_workspace_cuda(int64_t rows, int64_t cols)
{
    if (rows == 0 || cols == 0)
        return 0;
    const Device &device = current_device();
    const RowShape shape = layer_norm_backward_shape(rounded_call(true, rows, cols), device);
    if (!fits(shape))
        return 0;
    const int64_t half = groups_of<__half>(rows, shape, device),
                  bfloat16 = groups_of<__nv_bfloat16>(rows, shape, device);
    return (half > bfloat16 ? half : bfloat16) * 2 * cols * (int64_t)sizeof(float);
}

template <typename H>
static cuda_ops_status backward(const LayerNormCall &call, const RowShape &shape, const Device &device)
{
    const bool partials = call.grad_weight || call.grad_bias;
    BackwardRows<float, H> a = {};
    a.grad_input = (float *)call.grad_input, a.grad_dropped = (H *)call.grad_dropped;
    a.partials = partials ? (float *)call.workspace : nullptr;
    a.grad_output = (const H *)call.grad_output, a.grad_sum = (const float *)call.grad_sum;
    a.input = (const float *)call.input, a.mean = call.saved_mean, a.rstd = (const float *)call.saved_rstd;
    a.weight = call.weight, a.rows = call.rows, a.cols = (int)call.cols, a.threads = shape.threads, a.cluster = 1;
    a.inverse_cols = 1.0f / (float)call.cols, a.rms = !call.saved_mean;
    a.apart = shape.slots > 1 && shape.threads > WARP_SIZE;
    const int64_t parts = groups_of<H>(call.rows, shape, device);
    launch_dependent(layer_norm_backward_kernel<float, VECTOR, 1, false, false, false, H>, dim3((unsigned int)parts),
                     dim3((unsigned int)(shape.threads * shape.slots)), 0, call.stream, a);
    const cuda_ops_status status = launch_status();
    return status == CUDA_OPS_SUCCESS && partials ? layer_norm_sum_partials(call, parts, false) : status;
}

extern "C" cuda_ops_status cuda_ops_layer_norm_rounded_backward_cuda(
    float *grad_input, void *grad_addend, float *grad_weight, float *grad_bias, void *workspace,
    const void *grad_output, const float *grad_sum, const float *input, const float *weight, const double *mean,
    const float *rstd, int64_t rows, int64_t cols, cuda_ops_dtype half, cuda_ops_stream stream)
{
    if (grad_addend && !grad_input)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0 || (!grad_input && !grad_weight && !grad_bias))
        return CUDA_OPS_SUCCESS;
    LayerNormCall call = rounded_call(true, rows, cols);
    call.grad_input = grad_input, call.grad_dropped = grad_addend, call.grad_weight = grad_weight;
    call.grad_bias = grad_bias, call.workspace = workspace, call.grad_output = grad_output, call.grad_sum = grad_sum;
    call.input = input, call.weight = weight, call.saved_mean = mean, call.saved_rstd = rstd, call.stream = stream;
    const Device &device = current_device();
    const RowShape shape = layer_norm_backward_shape(call, device);
    if (!fits(shape))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (half) {
    case CUDA_OPS_FLOAT16:
        return backward<__half>(call, shape, device);
    case CUDA_OPS_BFLOAT16:
        return backward<__nv_bfloat16>(call, shape, device);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
