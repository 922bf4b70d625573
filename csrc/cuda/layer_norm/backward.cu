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
#include "layer_norm/paths.h"
#include "layer_norm/rows.cuh"

static constexpr int MOST_THREADS = 1024;
static constexpr int SLOT_THREADS = 512; // of a block of several rows, or in a cluster: two such a multiprocessor

template <typename T>
struct BackwardRows {
    typedef accumulate_type<T> A;
    T *grad_input, *grad_dropped;
    A *partials;
    const T *grad_output, *grad_sum, *input;
    const double *mean;
    const A *rstd;
    const void *weight;
    const uint8_t *mask;
    int64_t rows;
    int cols, threads, cluster;
    A inverse_cols, scale;            // scale: of what dropout keeps
    bool rms, full_parameters, apart; // apart: several rows of warps of their own side by side
};

template <typename T, int COUNT, int VECTORS, bool CLUSTER, bool SUMS, bool DROPS = false>
__global__ void __launch_bounds__(MOST_THREADS) layer_norm_backward_kernel(const BackwardRows<T> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    constexpr int SHARE = COUNT * VECTORS;                           // columns of a thread
    constexpr bool AHEAD = COUNT > 1, SUM_AHEAD = AHEAD && !CLUSTER; // as far as there are registers
    __shared__ RowScratch<A, 2> scratch;
    __shared__ __align__(16) A exchange[SLOT_THREADS * SHARE];
    int turn = 0;
    const int cluster = CLUSTER ? a.cluster : 1, block = (int)(blockIdx.x % cluster);
    const int slots = blockDim.x / a.threads, rank = threadIdx.x % a.threads + block * a.threads;
    const int stride = a.threads * cluster, vectors = a.cols / COUNT;
    const int64_t part = blockIdx.x / cluster, step = (int64_t)(gridDim.x / cluster) * slots;
    const P zeros = vector_of_equal<T, COUNT>(A(0));
    A grad_weight[SHARE] = {}, grad_bias[SHARE] = {};
    // Of grad_input: four of a thread's sums behind those of its neighbours, so that banks do not conflict.
    float4 *const input_sums = reinterpret_cast<float4 *>(exchange) + threadIdx.x;
    static_assert(!SUMS || (SHARE == 8 && sizeof(A) == sizeof(float)), "two vectors of a thread in `exchange`");
    if constexpr (SUMS)
        input_sums[0] = input_sums[SLOT_THREADS] = make_float4(0, 0, 0, 0);
    P x[VECTORS], g[VECTORS];
    double mean = 0;
    A rstd = 0;
    const auto load = [&](P(&x)[VECTORS], P(&g)[VECTORS], double &mean, A &rstd, int64_t row) {
        const bool there = row < a.rows;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int at = rank + v * stride;
            x[v] =
                load_vector_or(reinterpret_cast<const P *>(a.input + row * a.cols) + at, there && at < vectors, zeros);
            g[v] = load_vector_or(reinterpret_cast<const P *>(a.grad_output + row * a.cols) + at, there && at < vectors,
                                  zeros);
        }
        mean = there && !a.rms ? a.mean[row] : 0.0;
        rstd = there ? a.rstd[row] : A(0);
    };
    prepare_row_sums<CLUSTER>(scratch);
    wait_for_predecessor();
    release_successor();
    load(x, g, mean, rstd, part * slots + threadIdx.x / a.threads);
    for (int64_t first = part * slots; first < a.rows; first += step) {
        const int64_t row = first + threadIdx.x / a.threads;
        P next_x[VECTORS], next_g[VECTORS];
        double next_mean;
        A next_rstd;
        if constexpr (AHEAD)
            load(next_x, next_g, next_mean, next_rstd, row + step);
        P more[VECTORS];
        if constexpr (SUM_AHEAD) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                more[v] = load_vector_or(reinterpret_cast<const P *>(a.grad_sum + row * a.cols) + rank + v * stride,
                                         a.grad_sum && row < a.rows && rank + v * stride < vectors, zeros);
        }
        uint32_t kept = 0;
        if constexpr (DROPS)
            if (row < a.rows && rank < vectors)
                kept = a.mask[row * vectors + rank];
        const A center = (A)mean, shift = (A)((double)center - mean) * rstd;
        A sums[2] = {0, 0}, h[SHARE];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            A weight[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                weight[e] = A(1);
            if (a.weight && rank + v * stride < vectors)
                load_parameters<T>(weight, a.weight, a.full_parameters, (int64_t)(rank + v * stride) * COUNT);
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                const A xhat = (element_of(x[v], e) - center) * rstd + shift, grad = element_of(g[v], e);
                h[v * COUNT + e] = grad * weight[e];
                sums[0] += h[v * COUNT + e];
                sums[1] += h[v * COUNT + e] * xhat;
                grad_weight[v * COUNT + e] += grad * xhat;
                grad_bias[v * COUNT + e] += grad;
            }
        }
        if (a.grad_input) {
            row_sums<CLUSTER>(sums, a.threads, cluster, scratch, turn, !CLUSTER && a.apart);
            const A mean_h = a.rms ? A(0) : sums[0] * a.inverse_cols, slope = sums[1] * a.inverse_cols;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (row < a.rows && rank + v * stride < vectors) {
                    const int64_t at = row * a.cols + (int64_t)(rank + v * stride) * COUNT;
                    A result[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++) {
                        const A xhat = (element_of(x[v], e) - center) * rstd + shift;
                        result[e] = rstd * (h[v * COUNT + e] - mean_h - xhat * slope);
                    }
                    if (a.grad_sum) {
                        if constexpr (!SUM_AHEAD)
                            more[v] = *reinterpret_cast<const P *>(a.grad_sum + at);
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] += element_of(more[v], e);
                    }
                    if constexpr (SUMS) {
#pragma unroll
                        for (int e = 0; e < COUNT; e += 4) {
                            float4 &sum = input_sums[e / 4 * SLOT_THREADS];
                            const float4 before = sum;
                            sum = make_float4(before.x + result[e], before.y + result[e + 1], before.z + result[e + 2],
                                              before.w + result[e + 3]);
                        }
                    }
                    store_vector(reinterpret_cast<P *>(a.grad_input + at), vector_of<T>(result));
                    if constexpr (DROPS) {
                        static_assert(COUNT == 8 && VECTORS == 1 && !SUMS, "a byte of the mask a thread");
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            result[e] *= kept >> e & 1 ? a.scale : A(0);
                        store_vector(reinterpret_cast<P *>(a.grad_dropped + at), vector_of<T>(result));
                    }
                }
        }
        if constexpr (!AHEAD)
            load(next_x, next_g, next_mean, next_rstd, row + step);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = next_x[v], g[v] = next_g[v];
        mean = next_mean, rstd = next_rstd;
    }
    if (CLUSTER && a.grad_input)
        cluster_sync(); // others may still send it their sums
    if (!a.partials)
        return;
    // The rows that the block had side by side, added in their order; then [part][weight, bias or input][column].
    constexpr int KINDS = SUMS ? 3 : 2;
    A of_input[SHARE] = {};
    if constexpr (SUMS) {
#pragma unroll
        for (int e = 0; e < SHARE; e += 4) {
            const float4 sum = input_sums[e / 4 * SLOT_THREADS];
            of_input[e] = sum.x, of_input[e + 1] = sum.y, of_input[e + 2] = sum.z, of_input[e + 3] = sum.w;
        }
    }
#pragma unroll
    for (int which = 0; which < KINDS; which++) {
        A *const to = a.partials + (KINDS * part + which) * a.cols;
        A sums[SHARE];
#pragma unroll
        for (int k = 0; k < SHARE; k++)
            sums[k] = which == 0 ? grad_weight[k] : which == 1 ? grad_bias[k] : of_input[k];
        if (slots == 1) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    if (rank + v * stride < vectors)
                        to[(rank + v * stride) * COUNT + e] = sums[v * COUNT + e];
            continue;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SHARE; k++)
            exchange[threadIdx.x * SHARE + k] = sums[k];
        __syncthreads();
        for (int i = threadIdx.x; i < a.threads * SHARE; i += blockDim.x) {
            A total = 0;
            for (int slot = 0; slot < slots; slot++)
                total += exchange[slot * a.threads * SHARE + i];
            const int vector = i / SHARE + i % SHARE / COUNT * stride; // slots > 1: no cluster, rank = i / SHARE
            if (vector < vectors)
                to[vector * COUNT + i % COUNT] = total;
        }
    }
}

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
    if (threads <= MOST_THREADS) {
        shape.threads = round_threads(threads);
        if (shape.threads < SLOT_THREADS)
            shape.slots = choose_slots(shape.threads, SLOT_THREADS, call.rows, device.multiprocessors);
        return shape;
    }
    const int64_t block = threads <= MOST_CLUSTER * SLOT_THREADS ? SLOT_THREADS : MOST_THREADS;
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
