// layer_norm and rms_norm backward in one pass over input and grad_output. With xhat = (input - mean) * rstd and
// h = grad_output * weight:
//
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)) + grad_sum      (rms_norm: without mean(h))
//     grad_weight = sum over rows of grad_output * xhat,  grad_bias = sum over rows of grad_output
//
// The grid is as large as the device runs at once. A block goes down the rows, several at a time where they are short;
// on Hopper a row may have a cluster of up to eight blocks. A thread has the same 16-byte vector (or up to four single
// elements) of every row, so that the sums over rows stay in its registers, and it asks for its vector of the next row
// before it waits for the sums of this one (for single elements there are no registers left). Each block leaves a row
// of sums, and a second kernel adds these in a fixed order. The sums over rows of grad_input itself, the gradient of a
// bias before the norm, come from the same pass (SUMS) in halves of whole vectors, in shared memory, where each thread
// has its own. DROPS: grad_input is stored once more, by the mask of the dropout before the norm. Bound by memory: two
// reads and one write, and with grad_sum a third read.
#include "common/column_sums.cuh"
#include "common/device.h"
#include "common/value.cuh"
#include "cuda_ops/dropout.h"
#include "layer_norm/backward.cuh"

// Single elements of a thread: as many as there are registers for.
static constexpr int single_elements(int64_t element_bytes)
{
    return element_bytes == sizeof(double) ? 2 : 4;
}

RowShape layer_norm_backward_shape(const LayerNormCall &call, const Device &device)
{
    const int size = (int)(16 / dtype_size(call.dtype));
    const bool vectorised = call.cols % size == 0 && is_aligned_16(call.grad_input) &&
                            is_aligned_16(call.grad_output) && is_aligned_16(call.grad_sum) &&
                            is_aligned_16(call.input) && is_aligned_16(call.weight) && is_aligned_16(call.grad_dropped);
    RowShape shape = {vectorised ? size : 1, vectorised ? 1 : single_elements(dtype_size(call.dtype)), 0, 1, 1};
    const int64_t vectors = call.cols / shape.elements, threads = ceil_div(vectors, shape.vectors);
    if (threads <= MOST_BACKWARD_THREADS) {
        shape.threads = round_threads(threads);
        if (shape.threads < SLOT_THREADS)
            shape.slots = choose_slots(shape.threads, SLOT_THREADS, call.rows, device.multiprocessors);
        return shape;
    }
    const int64_t block = threads <= MOST_CLUSTER * SLOT_THREADS ? SLOT_THREADS : MOST_BACKWARD_THREADS;
    while (threads > block * shape.cluster && shape.cluster < MOST_CLUSTER)
        shape.cluster *= 2;
    shape.cluster = shape.cluster > 1 ? shape.cluster : 2;
    if (vectorised && call.dtype != CUDA_OPS_FLOAT64 && threads <= block * shape.cluster)
        shape.threads = (int)(ceil_div(threads, WARP_SIZE * shape.cluster) * WARP_SIZE);
    return shape;
}

// Whether grad_input's sums come of the kernel of that shape, where they are wanted.
static bool sums_in_kernel(const LayerNormCall &call, const RowShape &shape)
{
    const bool halves = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    return call.grad_input_sums && halves && shape.elements > 1 && shape.cluster == 1 &&
           shape.threads * shape.slots <= SLOT_THREADS;
}

// Calls what(kernel) with the kernel of that shape.
template <typename T, typename What>
static void with_kernel(const RowShape &shape, bool sums, bool drops, What what)
{
    if (shape.elements == 1) {
        what(layer_norm_backward_kernel<T, 1, single_elements(sizeof(T)), false, false>);
    } else if (shape.cluster == 1) {
        if constexpr (sizeof(T) == 2)
            if (sums || drops) {
                what(drops ? layer_norm_backward_kernel<T, vector16<T>::size, 1, false, false, true>
                           : layer_norm_backward_kernel<T, vector16<T>::size, 1, false, true>);
                return;
            }
        what(layer_norm_backward_kernel<T, vector16<T>::size, 1, false, false>);
    } else if constexpr (sizeof(T) < sizeof(double)) {
        what(layer_norm_backward_kernel<T, vector16<T>::size, 1, true, false>);
    }
}

// Groups of rows: as many as run at once, since a second round would take as long as the first. The kernels with
// grad_input's sums, with a mask and without have as many, so that what they leave of the parameters' gradients is the
// same.
template <typename T>
static int64_t groups_of(int64_t rows, const RowShape &shape, const Device &device)
{
    int64_t groups = ceil_div(rows, shape.slots);
    for (const int kind : {0, 1, 2})
        with_kernel<T>(shape, kind == 1, kind == 2, [&](auto kernel) {
            const int64_t there = shape.cluster > 1 ? active_clusters(kernel, shape.threads, shape.cluster)
                                                    : (int64_t)device.multiprocessors *
                                                          active_blocks(kernel, shape.threads * shape.slots, 0);
            groups = groups < there ? groups : there;
        });
    return groups > 0 ? groups : 1;
}

int64_t layer_norm_backward_parts(const LayerNormCall &call, const Device &device)
{
    const RowShape shape = layer_norm_backward_shape(call, device);
    if (shape.threads > 0)
        CUDA_OPS_DISPATCH(call.dtype, T, return groups_of<T>(call.rows, shape, device));
    return 0;
}

template <typename T>
static int64_t launch(const LayerNormCall &call, const RowShape &shape, const Device &device, bool partials)
{
    BackwardRows<T> a = {};
    typedef accumulate_type<T> A;
    a.grad_input = (T *)call.grad_input, a.partials = partials ? (A *)call.workspace : nullptr;
    a.grad_output = (const T *)call.grad_output, a.grad_sum = (const T *)call.grad_sum;
    a.input = (const T *)call.input, a.mean = call.saved_mean, a.rstd = (const A *)call.saved_rstd;
    a.weight = call.weight, a.rows = call.rows, a.cols = (int)call.cols;
    a.threads = shape.threads, a.cluster = shape.cluster, a.inverse_cols = A(1) / (A)call.cols;
    a.rms = call.rms, a.full_parameters = call.parameter_dtype != call.dtype;
    a.mask = call.mask, a.grad_dropped = (T *)call.grad_dropped, a.scale = (A)cuda_ops_dropout_scale(call.p);
    a.apart = shape.slots > 1 && shape.threads > WARP_SIZE;
    const int64_t parts = groups_of<T>(call.rows, shape, device);
    with_kernel<T>(shape, sums_in_kernel(call, shape), call.mask != nullptr, [&](auto kernel) {
        const int threads = shape.threads * shape.slots;
        if (shape.cluster > 1)
            launch_dependent_clusters(kernel, parts * shape.cluster, threads, shape.cluster, 0, call.stream, a);
        else
            launch_dependent(kernel, dim3((unsigned int)parts), dim3((unsigned int)threads), 0, call.stream, a);
    });
    return parts;
}

cuda_ops_status layer_norm_backward(const LayerNormCall &call, const RowShape &shape, const Device &device)
{
    const bool of_input = sums_in_kernel(call, shape), partials = call.grad_weight || call.grad_bias || of_input;
    int64_t parts = 0;
    CUDA_OPS_DISPATCH(call.dtype, T, parts = launch<T>(call, shape, device, partials));
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS && partials)
        status = layer_norm_sum_partials(call, parts, of_input);
    return status == CUDA_OPS_SUCCESS && call.grad_input_sums && !of_input ? layer_norm_sum_grad_input(call) : status;
}

// --- the blocks' sums -----------------------------------------------------------------------------------------------

static constexpr int SUM_THREADS = 512;
static constexpr int UNDER_WAY = 8;           // loads of a thread
static constexpr int FEWEST_COLUMNS = 8;      // of a block: a sector of floats
static constexpr int64_t WANTED_BLOCKS = 132; // of large GPUs

// grad_weight's and grad_bias's columns (and those of grad_input's sums) lie behind each other in each row of sums. A
// block has `width` neighbouring ones, 8 to 32, and SUM_THREADS / width rows at a time: the fewer columns, the more
// blocks read at once.
template <typename A>
__global__ void __launch_bounds__(SUM_THREADS)
    layer_norm_sum_partials_kernel(void *grad_weight, void *grad_bias, void *grad_input_sums, const A *partials,
                                   int64_t parts, int64_t cols, int kinds, int width, cuda_ops_dtype parameter_dtype)
{
    constexpr int WARPS = SUM_THREADS / WARP_SIZE;
    __shared__ A shared[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, rows = SUM_THREADS / width;
    const int64_t columns = kinds * cols;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * width; first < columns; first += (int64_t)gridDim.x * width) {
        const int64_t column = first + threadIdx.x % width;
        A sum = 0;
        if (column < columns)
            for (int64_t i = threadIdx.x / width; i < parts; i += UNDER_WAY * rows) {
                A row[UNDER_WAY];
#pragma unroll
                for (int k = 0; k < UNDER_WAY; k++)
                    row[k] = i + k * rows < parts ? partials[(i + k * rows) * columns + column] : A(0);
#pragma unroll
                for (int k = 0; k < UNDER_WAY; k++)
                    sum += row[k];
            }
        for (int offset = width; offset < WARP_SIZE; offset *= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        shared[warp][lane] = sum;
        __syncthreads();
        if ((int)threadIdx.x < width && column < columns) {
            A total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += shared[w][lane];
            void *const to = column < cols ? grad_weight : column < 2 * cols ? grad_bias : grad_input_sums;
            if (to)
                store_value(to, parameter_dtype, column % cols, (double)total);
        }
        __syncthreads();
    }
}

cuda_ops_status layer_norm_sum_partials(const LayerNormCall &call, int64_t parts, bool of_input)
{
    const int kinds = of_input ? 3 : 2;
    // Chosen for two kinds, since the order in which rows are added up depends on it: that of grad_weight and grad_bias
    // is the same beside grad_input's sums.
    int width = WARP_SIZE;
    while (width > FEWEST_COLUMNS && ceil_div(2 * call.cols, width) < WANTED_BLOCKS)
        width /= 2;
    const dim3 grid(clamp_grid(ceil_div(kinds * call.cols, width)));
    if (call.dtype == CUDA_OPS_FLOAT64)
        launch_dependent(layer_norm_sum_partials_kernel<double>, grid, dim3(SUM_THREADS), 0, call.stream,
                         call.grad_weight, call.grad_bias, call.grad_input_sums, (const double *)call.workspace, parts,
                         call.cols, kinds, width, call.parameter_dtype);
    else
        launch_dependent(layer_norm_sum_partials_kernel<float>, grid, dim3(SUM_THREADS), 0, call.stream,
                         call.grad_weight, call.grad_bias, call.grad_input_sums, (const float *)call.workspace, parts,
                         call.cols, kinds, width, call.parameter_dtype);
    return launch_status();
}

int64_t layer_norm_sum_grad_input_workspace(const LayerNormCall &call)
{
    return column_sums_workspace(call.rows, call.cols, call.dtype);
}

cuda_ops_status layer_norm_sum_grad_input(const LayerNormCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, {
        const T *const input = (const T *)call.grad_input;
        if constexpr (sizeof(T) == 2)
            if (call.parameter_dtype == CUDA_OPS_FLOAT32)
                return column_sums((float *)call.grad_input_sums, call.workspace, input, call.rows, call.cols,
                                   call.stream);
        return column_sums((T *)call.grad_input_sums, call.workspace, input, call.rows, call.cols, call.stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
