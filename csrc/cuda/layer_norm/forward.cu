// layer_norm and rms_norm forward, with or without an addition before, of rows that stay in registers:
//
//     output = (input - mean) * rstd * weight + bias
//
// A row has from one thread to a block, or on Hopper a cluster of up to eight blocks, whose threads hold up to eight
// 16-byte vectors each, or as many single elements where rows are not whole vectors at aligned addresses. The mean comes
// of one sum, variance and the mean's own rounding of a second one, over registers. Bound by memory: one read, one
// write (two and two with an addition); weight and bias stay in the cache.
#include "layer_norm/forward.cuh"

static constexpr int SHORT_BLOCK = 128; // threads of a block of several rows
// Threads of a multiprocessor, with two vectors each, that leave it waiting for memory: fewer than where they have four
// otherwise, and than where they have eight.
static constexpr int64_t FEW_OF_FOUR = 1024, FEW_OF_EIGHT = 1536;

RowShape layer_norm_forward_shape(const LayerNormCall &call, const Device &device)
{
    const int size = (int)(16 / dtype_size(call.dtype));
    const bool vectorised = call.cols % size == 0 && is_aligned_16(call.output) && is_aligned_16(call.sum) &&
                            is_aligned_16(call.input) && is_aligned_16(call.residual) && is_aligned_16(call.weight) &&
                            is_aligned_16(call.bias);
    RowShape shape = {vectorised ? size : 1, 8, 0, 1, 1};
    const int64_t vectors = call.cols / shape.elements, most = (int64_t)MOST_THREADS * shape.vectors;
    if (vectors > most) {
        while (vectors > most * shape.cluster && shape.cluster < MOST_CLUSTER)
            shape.cluster *= 2;
        if (vectorised && call.dtype != CUDA_OPS_FLOAT64 && vectors <= most * shape.cluster)
            shape.threads = (int)(ceil_div(vectors, WARP_SIZE * shape.vectors * shape.cluster) * WARP_SIZE);
        return shape;
    }
    if (vectorised && call.dtype != CUDA_OPS_FLOAT64) {
        const bool four = vectors <= 4 * WARP_SIZE || (8 * WARP_SIZE < vectors && vectors <= 1024);
        const int64_t two = round_threads(ceil_div(vectors, 2)), few = four ? FEW_OF_FOUR : FEW_OF_EIGHT;
        const bool are_few = two <= MOST_THREADS && call.rows * two <= few * device.multiprocessors;
        // Three vectors for each of half a warp's threads, where two for a warp's would leave a quarter of it idle.
        if (WARP_SIZE < vectors && vectors <= 3 * WARP_SIZE / 2 && !are_few)
            shape.vectors = 4;
        else if (vectors <= 2 * WARP_SIZE || are_few)
            shape.vectors = 2;
        else if (four)
            shape.vectors = 4;
    }
    // Single elements that are few go to more threads, which then read neighbours.
    shape.threads = round_threads(ceil_div(vectors, !vectorised && vectors <= 4 * WARP_SIZE ? 4 : shape.vectors));
    if (shape.threads <= WARP_SIZE)
        shape.slots = choose_slots(shape.threads, SHORT_BLOCK, call.rows, device.multiprocessors);
    return shape;
}

template <typename T, int COUNT, int VECTORS, bool CLUSTER>
static void launch(const LayerNormCall &call, const RowShape &shape, const ForwardRows<T> &a)
{
    if (shape.elements != COUNT || shape.vectors != VECTORS || (shape.cluster > 1) != CLUSTER)
        return;
    launch_forward_rows<CLUSTER, T>(call.residual ? layer_norm_forward_kernel<T, COUNT, VECTORS, true, CLUSTER>
                                                  : layer_norm_forward_kernel<T, COUNT, VECTORS, false, CLUSTER>,
                                    shape, a, call.stream);
}

cuda_ops_status layer_norm_forward(const LayerNormCall &call, const RowShape &shape)
{
    CUDA_OPS_DISPATCH(
        call.dtype, T, typedef accumulate_type<T> A; constexpr int SIZE = vector16<T>::size; ForwardRows<T> a = {};
        a.output = (T *)call.output, a.sum = (T *)call.sum, a.mean = call.mean, a.rstd = (A *)call.rstd;
        a.state = call.state, a.mask = call.new_mask, a.input = call.input, a.residual = (const T *)call.residual;
        a.weight = call.weight, a.bias = call.bias, a.rows = call.rows, a.cols = (int)call.cols;
        a.threads = shape.threads, a.cluster = shape.cluster, a.eps = (A)call.eps, a.inverse_cols = A(1) / (A)call.cols;
        a.rms = call.rms, a.full_parameters = call.parameter_dtype != call.dtype, a.drops = call.state != nullptr;
        a.threshold = cuda_ops_dropout_threshold(call.p), a.scale = (A)cuda_ops_dropout_scale(call.p);
        a.philox = call.philox; launch<T, SIZE, 8, false>(call, shape, a); launch<T, 1, 8, false>(call, shape, a);
        if constexpr (sizeof(T) < sizeof(double)) {
            launch<T, SIZE, 2, false>(call, shape, a);
            launch<T, SIZE, 4, false>(call, shape, a);
            launch<T, SIZE, 8, true>(call, shape, a);
        });
    return launch_status();
}
