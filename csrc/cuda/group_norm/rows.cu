// group_norm forward where an image's group is contiguous, by layer_norm's kernel: a row is a group, which stays in
// registers, and weight and bias belong to runs of its elements (layer_norm/forward.cuh). Bound by memory: one read, one
// write.
#include "group_norm/paths.h"

#include "layer_norm/forward.cuh"

static LayerNormCall as_layer_norm(const GroupNormCall &call)
{
    LayerNormCall rows = {};
    rows.output = call.output, rows.input = call.input;
    rows.rows = call.rows(), rows.cols = call.cols(), rows.dtype = call.dtype;
    return rows;
}

static Answer takes(const GroupNormCall &call)
{
    return call.sizes.channels_last ? no("a group's values are not contiguous (channels_last)") : YES;
}

Answer group_norm_registers_supports(const GroupNormCall &call, const Device &device)
{
    const Answer contiguous = takes(call);
    return contiguous ? layer_norm_registers_supports(as_layer_norm(call), device) : contiguous;
}

Answer group_norm_cluster_supports(const GroupNormCall &call, const Device &device)
{
    const Answer contiguous = takes(call);
    return contiguous ? layer_norm_cluster_supports(as_layer_norm(call), device) : contiguous;
}

template <typename T, int COUNT, int VECTORS, bool CLUSTER>
static void launch(const RowShape &shape, const ForwardRows<T> &a, cudaStream_t stream)
{
    if (shape.elements == COUNT && shape.vectors == VECTORS && (shape.cluster > 1) == CLUSTER)
        launch_forward_rows<CLUSTER, T>(layer_norm_forward_kernel<T, COUNT, VECTORS, false, CLUSTER, true>, shape, a,
                                        stream);
}

template <typename T>
static void launch_rows(const GroupNormCall &call, const RowShape &shape)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size;
    ForwardRows<T> a = {};
    a.output = (T *)call.output, a.mean = call.new_mean, a.variance = call.new_variance;
    a.input = call.input, a.weight = call.weight, a.bias = call.bias;
    a.rows = call.rows(), a.cols = (int)call.cols();
    a.threads = shape.threads, a.cluster = shape.cluster, a.eps = (A)call.eps, a.inverse_cols = A(1) / (A)a.cols;
    a.full_parameters = call.parameter_dtype != call.dtype;
    a.groups = call.sizes.groups, a.group_channels = call.group_channels();
    a.length = (int)call.sizes.inner, a.by_length = divider_by((uint32_t)a.length);
    launch<T, SIZE, 8, false>(shape, a, call.stream);
    launch<T, 1, 8, false>(shape, a, call.stream);
    if constexpr (sizeof(T) < sizeof(double)) {
        launch<T, SIZE, 2, false>(shape, a, call.stream);
        launch<T, SIZE, 4, false>(shape, a, call.stream);
        launch<T, SIZE, 8, true>(shape, a, call.stream);
    }
}

cuda_ops_status group_norm_rows(const GroupNormCall &call, const Device &device)
{
    const RowShape shape = layer_norm_forward_shape(as_layer_norm(call), device);
    CUDA_OPS_DISPATCH(call.dtype, T, launch_rows<T>(call, shape));
    return launch_status();
}
