// layer_norm and rms_norm backward of rows of more vectors than backward.cu's blocks have threads, by backward.cu's
// formulas, with input and grad_output read once. On Hopper. Shared memory holds three rows of up to 2048 vectors of
// 16 bytes of each: a block works on one while the next two are under way (cp.async). A thread has the same four
// vectors of every row: it copies them, waits for them and reads them back itself, so that no barrier stands between
// the copies and the work, and keeps its sums over rows in registers; a row's one barrier is that of its two sums.
// Longer rows, and those that are too few to fill the device, have a cluster of up to eight blocks. Bound by memory.
#include "common/device.h"
#include "layer_norm/backward.cuh"
#include "layer_norm/rows.cuh"
#include "ptx/cp_async.cuh"

static constexpr int MOST_THREADS = 512, LEAST_THREADS = 64;
static constexpr int VECTORS = 4; // of a thread
static constexpr int STAGES = 3;  // rows of the ring
static constexpr int64_t THREAD_BYTES = (int64_t)STAGES * 2 * VECTORS * 16;
static constexpr int64_t STATIC_BYTES = 1024; // that the kernel's other shared memory may take

template <typename T, bool CLUSTER>
__global__ void __launch_bounds__(MOST_THREADS, 1) layer_norm_backward_ring_kernel(const BackwardRows<T> a)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> P;
    constexpr int COUNT = P::size;
    extern __shared__ float4 ring[]; // [row of the ring][input, grad_output][vector][thread]
    __shared__ RowScratch<A, 2> scratch;
    static_assert(sizeof(scratch) <= STATIC_BYTES, "beside the ring");
    int turn = 0;
    const int cluster = CLUSTER ? a.cluster : 1, block = (int)(blockIdx.x % cluster);
    const int rank = threadIdx.x + block * a.threads, stride = a.threads * cluster, vectors = a.cols / COUNT;
    const int64_t part = blockIdx.x / cluster, step = gridDim.x / cluster;
    const auto place = [&](int stage, int which, int v) {
        return ring + ((stage * 2 + which) * VECTORS + v) * a.threads + threadIdx.x;
    };
    // A group for every row, of no copies past the last one, so that the newest STAGES - 1 are always those ahead.
    const auto copy = [&](int stage, int64_t row) {
        if (row < a.rows)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int64_t at = row * a.cols + (int64_t)(rank + v * stride) * COUNT;
                if (rank + v * stride < vectors) {
                    cp_async_16(shared_address(place(stage, 0, v)), a.input + at);
                    cp_async_16(shared_address(place(stage, 1, v)), a.grad_output + at);
                }
            }
        cp_async_commit_group();
    };
    const auto load = [&](double &mean, A &rstd, int64_t row) {
        mean = row < a.rows && !a.rms ? a.mean[row] : 0.0;
        rstd = row < a.rows ? a.rstd[row] : A(0);
    };
    const auto load_weight = [&](A(&weight)[COUNT], int v) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            weight[e] = A(1);
        if (a.weight)
            load_parameters<T>(weight, a.weight, a.full_parameters, (int64_t)(rank + v * stride) * COUNT);
    };
    A grad_weight[VECTORS][COUNT] = {}, grad_bias[VECTORS][COUNT] = {};
    prepare_row_sums<CLUSTER>(scratch);
    wait_for_predecessor();
    release_successor();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        copy(i, part + i * step);
    double mean;
    A rstd;
    load(mean, rstd, part);
    int stage = 0;
    for (int64_t row = part; row < a.rows; row += step) {
        copy(stage > 0 ? stage - 1 : STAGES - 1, row + (STAGES - 1) * step); // where the row before was
        double next_mean;
        A next_rstd;
        load(next_mean, next_rstd, row + step);
        P more[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            more[v] = load_vector_or(reinterpret_cast<const P *>(a.grad_sum + row * a.cols) + rank + v * stride,
                                     a.grad_sum && rank + v * stride < vectors, vector_of_equal<T, COUNT>(A(0)));
        const A center = (A)mean, shift = (A)((double)center - mean) * rstd;
        A sums[2] = {0, 0};
        cp_async_wait_group<STAGES - 1>();
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * stride < vectors) {
                const P x = *reinterpret_cast<const P *>(place(stage, 0, v));
                const P g = *reinterpret_cast<const P *>(place(stage, 1, v));
                A weight[COUNT];
                load_weight(weight, v);
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    const A xhat = (element_of(x, e) - center) * rstd + shift, grad = element_of(g, e);
                    const A h = grad * weight[e];
                    sums[0] += h;
                    sums[1] += h * xhat;
                    grad_weight[v][e] += grad * xhat;
                    grad_bias[v][e] += grad;
                }
            }
        if (a.grad_input) {
            row_sums<CLUSTER>(sums, a.threads, cluster, scratch, turn);
            const A mean_h = a.rms ? A(0) : sums[0] * a.inverse_cols, slope = sums[1] * a.inverse_cols;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (rank + v * stride < vectors) {
                    const P x = *reinterpret_cast<const P *>(place(stage, 0, v));
                    const P g = *reinterpret_cast<const P *>(place(stage, 1, v));
                    A weight[COUNT], result[COUNT];
                    load_weight(weight, v);
#pragma unroll
                    for (int e = 0; e < COUNT; e++) {
                        const A xhat = (element_of(x, e) - center) * rstd + shift;
                        result[e] = rstd * (element_of(g, e) * weight[e] - mean_h - xhat * slope);
                        if (a.grad_sum)
                            result[e] += element_of(more[v], e);
                    }
                    store_vector(reinterpret_cast<P *>(a.grad_input + row * a.cols) + rank + v * stride,
                                 vector_of<T>(result));
                }
        }
        mean = next_mean, rstd = next_rstd;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    if (CLUSTER && a.grad_input)
        cluster_sync(); // others may still send it their sums
    if (!a.partials)
        return;
    A *const to = a.partials + 2 * part * a.cols; // [part][weight, bias][column]
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (rank + v * stride < vectors)
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                to[(rank + v * stride) * COUNT + e] = grad_weight[v][e];
                to[a.cols + (rank + v * stride) * COUNT + e] = grad_bias[v][e];
            }
}

// As few blocks a row as hold it, but as many as there are multiprocessors for.
RowShape layer_norm_backward_ring_shape(const LayerNormCall &call, bool vectorised, const Device &device)
{
    RowShape shape = {vectorised ? (int)(16 / dtype_size(call.dtype)) : 1, VECTORS, 0, 1, 1, true};
    const int64_t room = (device.shared_bytes - STATIC_BYTES) / THREAD_BYTES / WARP_SIZE * WARP_SIZE;
    const int64_t most = room < MOST_THREADS ? room : MOST_THREADS;
    const int64_t threads = ceil_div(call.cols / shape.elements, VECTORS); // in all blocks of a row
    while (shape.cluster < MOST_CLUSTER &&
           (threads > most * shape.cluster ||
            (threads >= 2 * LEAST_THREADS * shape.cluster && call.rows * shape.cluster * 2 <= device.multiprocessors)))
        shape.cluster *= 2;
    if (vectorised && call.dtype != CUDA_OPS_FLOAT64 && threads <= most * shape.cluster)
        shape.threads = (int)(ceil_div(threads, WARP_SIZE * shape.cluster) * WARP_SIZE);
    return shape;
}

// Calls what(kernel) with the kernel of that shape.
template <typename What>
static cuda_ops_status with_kernel(const LayerNormCall &call, const RowShape &shape, What what)
{
    CUDA_OPS_DISPATCH(call.dtype, T, {
        if constexpr (sizeof(T) < sizeof(double)) {
            if (shape.cluster > 1)
                what(layer_norm_backward_ring_kernel<T, true>, T());
            else
                what(layer_norm_backward_ring_kernel<T, false>, T());
        }
    });
    return CUDA_OPS_SUCCESS;
}

int64_t layer_norm_backward_ring_parts(const LayerNormCall &call, const RowShape &shape, const Device &device)
{
    int64_t parts = 0;
    if (shape.threads == 0)
        return parts;
    // One block a multiprocessor: two of the longest rings do not fit, and of shorter rows one has enough under way.
    with_kernel(call, shape, [&](auto kernel, auto) {
        parts = device.multiprocessors / shape.cluster;
        if (shape.cluster > 1) {
            const int64_t active = active_clusters(kernel, MOST_THREADS, shape.cluster);
            parts = active < parts ? active : parts;
        }
        parts = call.rows < parts ? call.rows : (parts > 0 ? parts : 1);
    });
    return parts;
}

int64_t layer_norm_backward_ring(const LayerNormCall &call, const RowShape &shape, const Device &device, bool partials)
{
    const int64_t parts = layer_norm_backward_ring_parts(call, shape, device), bytes = shape.threads * THREAD_BYTES;
    with_kernel(call, shape, [&](auto kernel, auto element) {
        const auto a = backward_rows<decltype(element)>(call, shape, partials);
        launch_dependent_clusters(kernel, parts * shape.cluster, shape.threads, shape.cluster, (int)bytes, call.stream,
                                  a);
    });
    return parts;
}
