// layer_norm and rms_norm forward of rows that are no whole vectors, and so start anywhere within one: layer_norm of
// forward.cu with a row's body in aligned 16-byte vectors of a thread's registers, and at most one element of either end.
// Where a vector's columns are not those of a vector of weight and bias, these are read by single elements: from shared
// memory, where a block keeps them in float, skewed so that threads eight columns apart meet other banks. So a block
// goes down many rows, by a grid as large as the device runs at once. Bound by memory: one read, one write.
#include "common/device.h"
#include "common/rows.cuh"
#include "layer_norm/forward.cuh"

static constexpr int ROW_THREADS = 256;         // of a block
static constexpr int FEWEST_THREADS = 8;        // of a row: as many as an end has elements, and more
static constexpr int64_t MOST_BYTES = 46 << 10; // of shared memory for parameters
static constexpr int64_t MANY_ROWS = 8;         // of a multiprocessor
static constexpr int PARAMETERS_OF_THREAD = 4;  // that it brings to shared memory, where rows are fewer

// Where column c's parameter lies.
__host__ __device__ __forceinline__ constexpr int64_t skewed(int64_t c)
{
    return c + c / 32;
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(ROW_THREADS, VECTORS > 4 ? 3 : 4)
    layer_norm_forward_unaligned_kernel(const __grid_constant__ ForwardRows<T> a)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> P;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ RowScratch<A, 2> scratch;
    A *const weight = (A *)memory, *const bias = weight + skewed(a.cols);
    int turn = 0;
    const int slots = blockDim.x / a.threads, rank = threadIdx.x % a.threads;
    const P zeros = vector_of_equal<T, P::size>(A(0));
    wait_for_predecessor();
    release_successor();
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
        weight[skewed(c)] = a.weight ? parameter_at<T>(a.weight, a.full_parameters, c) : A(1);
        bias[skewed(c)] = a.bias ? parameter_at<T>(a.bias, a.full_parameters, c) : A(0);
    }
    __syncthreads();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < a.rows; first += (int64_t)gridDim.x * slots) {
        const int64_t row = first + threadIdx.x / a.threads, start = row * a.cols;
        const int cols = row < a.rows ? a.cols : 0;
        const T *const input = (const T *)a.input + start;
        const row_split split = split_row(input, cols);
        const int vectors = (int)split.vectors;
        // An element of the end before the body, and one of that behind it; -1 for none.
        const int end[2] = {rank < split.head ? rank : -1, split.tail + rank < cols ? (int)split.tail + rank : -1};
        const P *const from = reinterpret_cast<const P *>(input + split.head) + rank;
        P x[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = load_vector_or(from + v * a.threads, rank + v * a.threads < vectors, zeros);
        A ends[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            ends[i] = end[i] >= 0 ? load_as_accumulate(input[end[i]]) : A(0);
        A mean[1] = {0};
        if (!a.rms) {
            mean[0] = ends[0] * a.inverse_cols + ends[1] * a.inverse_cols;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    mean[0] += element_of(x[v], e) * a.inverse_cols;
            row_sums<false>(mean, a.threads, 1, scratch, turn);
        }
        A sums[2] = {0, 0};
        const auto add = [&](A element) {
            const A difference = element - mean[0];
            sums[0] += difference * difference;
            sums[1] += difference * a.inverse_cols;
        };
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * a.threads < vectors)
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    add(element_of(x[v], e));
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (end[i] >= 0)
                add(ends[i]);
        row_sums<false>(sums, a.threads, 1, scratch, turn);
        const A rest = a.rms ? A(0) : sums[1];
        const A rstd = rstd_of(sums[0] * a.inverse_cols, rest, a.eps), shift = -rest * rstd;
        if (rank == 0 && cols > 0) {
            if (a.mean)
                a.mean[row] = (double)mean[0] + (double)rest;
            a.rstd[row] = rstd;
        }
        const auto result_of = [&](A element, int64_t c) {
            return ((element - mean[0]) * rstd + shift) * weight[skewed(c)] + bias[skewed(c)];
        };
        T *const to = a.output + start;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * a.threads < vectors) {
                const int at = split.head + (rank + v * a.threads) * P::size;
                A result[P::size];
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    result[e] = result_of(element_of(x[v], e), at + e);
                store_vector(reinterpret_cast<P *>(to + at), vector_of<T>(result));
            }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (end[i] >= 0)
                to[end[i]] = store_from_accumulate<T>(result_of(ends[i], end[i]));
    }
}

static int64_t shared_bytes_of(const LayerNormCall &call)
{
    return (2 * skewed(call.cols) + 2) * (int64_t)sizeof(float);
}

Answer layer_norm_unaligned_row_supports(const LayerNormCall &call, const Device &)
{
    if (call.backward)
        return no("takes only forward");
    if (call.residual)
        return no("has no addition before the norm");
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("has no kernel for float64");
    if (!same_alignment(call.input, call.output))
        return no("input and output are not aligned alike within 16 bytes");
    return shared_bytes_of(call) <= MOST_BYTES ? YES : no("weight and bias do not fit into shared memory");
}

// How rows are laid on threads: a row's, its vectors of each, and the rows of a block.
struct Share {
    int threads, vectors, slots;
};

static Share share_of(const LayerNormCall &call, const Device &device)
{
    const int64_t vectors = call.cols * dtype_size(call.dtype) / 16;
    const int each = vectors <= 4 * WARP_SIZE ? 4 : 8, threads = round_threads(ceil_div(vectors, each));
    Share share = {threads < FEWEST_THREADS ? FEWEST_THREADS : threads, each, 1};
    share.slots = choose_slots(share.threads, ROW_THREADS, call.rows, device.multiprocessors);
    return share;
}

// A block that has few rows has few threads too, and takes long to bring the parameters to shared memory.
Answer layer_norm_unaligned_row_is_fast(const LayerNormCall &call, const Device &device)
{
    if (call.cols <= WARP_SIZE)
        return no("rows of up to 32 elements are read by single ones");
    if (call.cols * dtype_size(call.dtype) % 16 == 0 && is_aligned_16(call.input))
        return no("rows are whole vectors, aligned to 16 bytes");
    const Share share = share_of(call, device);
    const int threads = share.threads * share.slots;
    return call.rows >= MANY_ROWS * device.multiprocessors ||
                   (threads >= ROW_THREADS / 2 && call.cols <= PARAMETERS_OF_THREAD * threads)
               ? YES
               : no("rows are too few for what their blocks do before");
}

template <typename T, int VECTORS>
static void launch(const LayerNormCall &call, const ForwardRows<T> &a, int slots, const Device &device)
{
    const auto kernel = layer_norm_forward_unaligned_kernel<T, VECTORS>;
    const int threads = a.threads * slots;
    const size_t bytes = (size_t)shared_bytes_of(call);
    const int64_t groups = ceil_div(call.rows, slots);
    const int64_t there = (int64_t)device.multiprocessors * active_blocks(kernel, threads, bytes);
    launch_dependent(kernel, dim3((unsigned int)(groups < there ? groups : there)), dim3((unsigned int)threads), bytes,
                     call.stream, a);
}

template <typename T>
static void launch_rows(const LayerNormCall &call, const Device &device)
{
    typedef accumulate_type<T> A;
    const Share share = share_of(call, device);
    ForwardRows<T> a = {};
    a.output = (T *)call.output, a.mean = call.mean, a.rstd = (A *)call.rstd, a.input = call.input;
    a.weight = call.weight, a.bias = call.bias, a.rows = call.rows, a.cols = (int)call.cols;
    a.threads = share.threads, a.eps = (A)call.eps, a.inverse_cols = A(1) / (A)call.cols;
    a.rms = call.rms, a.full_parameters = call.parameter_dtype != call.dtype;
    if (share.vectors == 4)
        launch<T, 4>(call, a, share.slots, device);
    else
        launch<T, 8>(call, a, share.slots, device);
}

cuda_ops_status layer_norm_unaligned_row(const LayerNormCall &call, const Device &device)
{
    switch (call.dtype) {
    case CUDA_OPS_FLOAT32:
        launch_rows<float>(call, device);
        break;
    case CUDA_OPS_FLOAT16:
        launch_rows<__half>(call, device);
        break;
    default:
        launch_rows<__nv_bfloat16>(call, device);
    }
    return launch_status();
}
