// log_softmax: output = (input - max) - log(sum(exp(input - max))); grad_input = grad_output - exp(output) *
// sum(grad_output); sums along the middle dimension of [outer, cols, inner].
// Path row: rows (inner = 1) that fit into registers are read once: aligned vectors of 16 bytes by 32 to 1024 threads,
// rows of up to 32 elements by eight threads and unaligned ones of up to 256 by sixteen, an element a load.
// Path thread_group: a group of threads (common/thread_group.cuh) reads a column twice: for the maximum and the sum
// together (rescaled when a larger element is found), then, mostly from cache, for the result. Rows go by aligned
// vectors, wherever they start (rows.cuh).
// Bound by memory: one read and one write forward; two reads and one write backward.
#include "cuda_ops/log_softmax.h"

#include "common/aligned_vector.cuh"
#include "common/paths.h"
#include "common/thread_group.cuh"

// `vectors`: columns are rows, and all arrays have the same alignment modulo 16 bytes.
template <typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    log_softmax_forward_kernel(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner, bool vectors)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    const group_position position = position_in_group(GROUP, STRIDED);
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + position.slot;
        const int64_t offset = column_offset(column, cols, STRIDED ? inner : 1);
        const int64_t length = column < columns ? cols : 0;
        const log_sum_exp<A> state =
            group_log_sum_exp<GROUP, STRIDED>(input + offset, length, inner, position.rank, scratch);
        const A log_sum = log_of_sum(state);
        if (!STRIDED && vectors) {
            const T *const inputs[1] = {input + offset};
            for_row(output + offset, inputs, length, position.rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] = (x[0][e] - state.maximum) - log_sum;
            });
            continue;
        }
        for (int64_t c = position.rank; c < length; c += GROUP) {
            const int64_t at = offset + c * inner;
            output[at] = store_from_accumulate<T>((load_as_accumulate(input[at]) - state.maximum) - log_sum);
        }
    }
}

template <typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    log_softmax_backward_kernel(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                                int64_t inner, bool vectors)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    __shared__ A scratch[GROUP_THREADS];
    const group_position position = position_in_group(GROUP, STRIDED);
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + position.slot;
        const int64_t offset = column_offset(column, cols, STRIDED ? inner : 1);
        const int64_t length = column < columns ? cols : 0;
        A sum = 0;
        if (!STRIDED && vectors) {
            const T *const grads[1] = {grad_output + offset}, *const both[2] = {grad_output + offset, output + offset};
            for_row((T *)nullptr, grads, length, position.rank, GROUP, [&](int64_t, const auto &g) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(g[0]) / sizeof(A)); e++)
                    sum += g[0][e];
            });
            sum = group_reduce<GROUP, STRIDED>(sum, scratch);
            for_row(grad_input + offset, both, length, position.rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] -= exp_for<T>(x[1][e]) * sum;
            });
            continue;
        }
        for (int64_t c = position.rank; c < length; c += GROUP)
            sum += load_as_accumulate(grad_output[offset + c * inner]);
        sum = group_reduce<GROUP, STRIDED>(sum, scratch);
        for (int64_t c = position.rank; c < length; c += GROUP) {
            const int64_t at = offset + c * inner;
            const A softmax = exp_for<T>(load_as_accumulate(output[at]));
            grad_input[at] = store_from_accumulate<T>(load_as_accumulate(grad_output[at]) - softmax * sum);
        }
    }
}

// --- Rows in registers ----------------------------------------------------------------------------------------------

static constexpr int ROW_BLOCK = 128; // the least threads of a block, which has one row or several

// Sum, or maximum ignoring NaN, over the THREADS that share a row; all of them get it. With THREADS > 32 a block has
// one row, and a barrier has to come before `scratch` is written again.
template <int THREADS, bool MAXIMUM, typename A>
__device__ __forceinline__ A row_reduce(A value, A *scratch)
{
    constexpr int WARPS = THREADS / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int offset = (THREADS < WARP_SIZE ? THREADS : WARP_SIZE) / 2; offset > 0; offset /= 2) {
        const A other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = MAXIMUM ? fmax(value, other) : value + other;
    }
    if constexpr (THREADS > WARP_SIZE) {
        static_assert((WARPS & (WARPS - 1)) == 0, "the warps' values are added by a butterfly");
        if (lane == 0)
            scratch[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        value = scratch[lane % WARPS];
#pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2) {
            const A other = __shfl_xor_sync(FULL_WARP, value, offset);
            value = MAXIMUM ? fmax(value, other) : value + other;
        }
    }
    return value;
}

// Vectors are 16 bytes, or single elements where a row has only part of a warp.
template <typename T>
__host__ __device__ constexpr int vector_width(int threads)
{
    return threads < WARP_SIZE ? 1 : vector16<T>::size;
}

// Rows of at most THREADS * VECTORS whole vectors. Warps stay together in the loop: rows past the end have no elements.
template <typename T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    log_softmax_forward_row_kernel(T *output, const T *input, int64_t rows, int cols)
{
    typedef accumulate_type<T> A;
    constexpr int COUNT = vector_width<T>(THREADS);
    typedef aligned_vector<T, COUNT> P;
    __shared__ A scratch[2][(THREADS + WARP_SIZE - 1) / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, rows_a_block = blockDim.x / THREADS;
    const P none = vector_of_equal<T, COUNT>(-A(CUDART_INF));
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * rows_a_block; first < rows; first += (int64_t)gridDim.x * rows_a_block) {
        const int64_t row = first + threadIdx.x / THREADS;
        const int vectors = row < rows ? cols / COUNT : 0;
        const P *const from = reinterpret_cast<const P *>(input + row * cols);
        P *const to = reinterpret_cast<P *>(output + row * cols);
        P x[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = load_vector_or(from + rank + v * THREADS, rank + v * THREADS < vectors, none);
        A maximum = -A(CUDART_INF);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                maximum = fmax(maximum, element_of(x[v], e)); // ignores NaN, which the sum propagates
        maximum = row_reduce<THREADS, true>(maximum, scratch[0]);
        const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum; // all -inf: the subtraction below gives NaN
        A sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            A part = 0;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                part += exp_for<T>(element_of(x[v], e) - shift);
            sum += part;
        }
        const log_sum_exp<A> state = {maximum, row_reduce<THREADS, false>(sum, scratch[1])};
        const A log_sum = log_of_sum(state);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = (element_of(x[v], e) - maximum) - log_sum;
                to[rank + v * THREADS] = vector_of<T>(result);
            }
    }
}

template <typename T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    log_softmax_backward_row_kernel(T *grad_input, const T *grad_output, const T *output, int64_t rows, int cols)
{
    typedef accumulate_type<T> A;
    constexpr int COUNT = vector_width<T>(THREADS);
    typedef aligned_vector<T, COUNT> P;
    __shared__ A scratch[2][(THREADS + WARP_SIZE - 1) / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, rows_a_block = blockDim.x / THREADS;
    int buffer = 0; // alternates, so that one barrier a row is enough
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * rows_a_block; first < rows; first += (int64_t)gridDim.x * rows_a_block) {
        const int64_t row = first + threadIdx.x / THREADS;
        const int vectors = row < rows ? cols / COUNT : 0;
        const P *const grads = reinterpret_cast<const P *>(grad_output + row * cols);
        const P *const outputs = reinterpret_cast<const P *>(output + row * cols);
        P *const to = reinterpret_cast<P *>(grad_input + row * cols);
        P g[VECTORS], y[VECTORS]; // both loaded before the sum, so that all loads of a row are in flight
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                g[v] = grads[rank + v * THREADS];
                y[v] = outputs[rank + v * THREADS];
            }
        A sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                A part = 0;
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    part += element_of(g[v], e);
                sum += part;
            }
        sum = row_reduce<THREADS, false>(sum, scratch[buffer]);
        buffer ^= 1;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = element_of(g[v], e) - exp_for<T>(element_of(y[v], e)) * sum;
                to[rank + v * THREADS] = vector_of<T>(result);
            }
    }
}

// How many threads share a row, and how many vectors each holds; 0 threads where rows do not fit or are not aligned.
// Backward holds two arrays' vectors: with eight of each, a multiprocessor would have room for 512 threads only.
struct row_shape {
    int threads, vectors;
};

template <typename T>
static row_shape choose_row(int64_t cols, int64_t inner, bool backward, const void *a, const void *b, const void *c)
{
    constexpr int SIZE = vector16<T>::size;
    if (inner == 1 && cols <= 8 * 4)
        return {8, 4};
    if (inner != 1 || cols % SIZE != 0 || !is_aligned_16(a) || !is_aligned_16(b) || !is_aligned_16(c))
        return inner == 1 && cols <= 16 * 16 ? row_shape{16, 16} : row_shape{0, 0};
    static constexpr row_shape shapes[] = {{32, 2}, {32, 4}, {32, 8}, {128, 4}, {128, 8}, {512, 4}, {512, 8}};
    for (row_shape shape : shapes) {
        if (sizeof(T) == sizeof(double))
            shape.vectors = 8; // few instances: its exponentials are long code
        else if (backward && shape.threads * shape.vectors == 512 * 8)
            shape = {1024, 4};
        if (cols / SIZE <= (int64_t)shape.threads * shape.vectors)
            return shape;
    }
    return {0, 0};
}

static inline dim3 row_grid(int64_t rows, row_shape shape)
{
    return dim3(clamp_grid(shape.threads < ROW_BLOCK ? ceil_div(rows, ROW_BLOCK / shape.threads) : rows));
}

static inline dim3 row_block(row_shape shape)
{
    return dim3(shape.threads < ROW_BLOCK ? ROW_BLOCK : shape.threads);
}

// Launches this instance if `shape` is its own.
template <typename T, int THREADS, int VECTORS>
static void forward_rows(row_shape shape, T *output, const T *input, int64_t rows, int64_t cols, cudaStream_t stream)
{
    if (shape.threads == THREADS && shape.vectors == VECTORS)
        launch_dependent(log_softmax_forward_row_kernel<T, THREADS, VECTORS>, row_grid(rows, shape), row_block(shape),
                         0, stream, output, input, rows, (int)cols);
}

template <typename T, int THREADS, int VECTORS>
static void backward_rows(row_shape shape, T *grad_input, const T *grad_output, const T *output, int64_t rows,
                          int64_t cols, cudaStream_t stream)
{
    if (shape.threads == THREADS && shape.vectors == VECTORS)
        launch_dependent(log_softmax_backward_row_kernel<T, THREADS, VECTORS>, row_grid(rows, shape), row_block(shape),
                         0, stream, grad_input, grad_output, output, rows, (int)cols);
}

// The path row.
template <typename T>
static cuda_ops_status forward_row(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                   cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, false, output, input, input);
    forward_rows<T, 8, 4>(row, output, input, columns, cols, stream);
    forward_rows<T, 16, 16>(row, output, input, columns, cols, stream);
    forward_rows<T, 32, 8>(row, output, input, columns, cols, stream);
    forward_rows<T, 128, 8>(row, output, input, columns, cols, stream);
    forward_rows<T, 512, 8>(row, output, input, columns, cols, stream);
    if constexpr (sizeof(T) < sizeof(double)) {
        forward_rows<T, 32, 2>(row, output, input, columns, cols, stream);
        forward_rows<T, 32, 4>(row, output, input, columns, cols, stream);
        forward_rows<T, 128, 4>(row, output, input, columns, cols, stream);
        forward_rows<T, 512, 4>(row, output, input, columns, cols, stream);
    }
    return launch_status();
}

// The path thread_group.
template <typename T>
static cuda_ops_status forward_thread_group(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                            cudaStream_t stream)
{
    const group_shape shape = choose_group(cols, inner, longest_of_warp(columns, 4));
    const dim3 grid(clamp_grid(group_blocks(columns, shape)));
    CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED,
                            if constexpr (STRIDED || GROUP >= WARP_SIZE) // shorter rows: above
                            launch_dependent(log_softmax_forward_kernel<T, GROUP, STRIDED>, grid, dim3(GROUP_THREADS),
                                             0, stream, output, input, columns, cols, inner,
                                             same_alignment(output, input)));
    return launch_status();
}

template <typename T>
static cuda_ops_status backward_row(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                                    int64_t inner, cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, true, grad_input, grad_output, output);
    backward_rows<T, 8, 4>(row, grad_input, grad_output, output, columns, cols, stream);
    backward_rows<T, 16, 16>(row, grad_input, grad_output, output, columns, cols, stream);
    backward_rows<T, 32, 8>(row, grad_input, grad_output, output, columns, cols, stream);
    backward_rows<T, 128, 8>(row, grad_input, grad_output, output, columns, cols, stream);
    if constexpr (sizeof(T) < sizeof(double)) {
        backward_rows<T, 32, 2>(row, grad_input, grad_output, output, columns, cols, stream);
        backward_rows<T, 32, 4>(row, grad_input, grad_output, output, columns, cols, stream);
        backward_rows<T, 128, 4>(row, grad_input, grad_output, output, columns, cols, stream);
        backward_rows<T, 512, 4>(row, grad_input, grad_output, output, columns, cols, stream);
        backward_rows<T, 1024, 4>(row, grad_input, grad_output, output, columns, cols, stream);
    } else {
        backward_rows<T, 512, 8>(row, grad_input, grad_output, output, columns, cols, stream);
    }
    return launch_status();
}

template <typename T>
static cuda_ops_status backward_thread_group(T *grad_input, const T *grad_output, const T *output, int64_t columns,
                                             int64_t cols, int64_t inner, cudaStream_t stream)
{
    const group_shape shape = choose_group(cols, inner, longest_of_warp(columns, 2));
    const dim3 grid(clamp_grid(group_blocks(columns, shape)));
    const bool vectors = same_alignment(grad_input, grad_output) && same_alignment(grad_input, output);
    CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED,
                            if constexpr (STRIDED || GROUP >= WARP_SIZE) // shorter rows: above
                            launch_dependent(log_softmax_backward_kernel<T, GROUP, STRIDED>, grid, dim3(GROUP_THREADS),
                                             0, stream, grad_input, grad_output, output, columns, cols, inner,
                                             vectors));
    return launch_status();
}

// One pass as a launcher gets it; a is output or grad_input, b input or grad_output, c backward's output.
struct LogSoftmaxCall {
    bool backward;
    void *a;
    const void *b, *c;
    int64_t columns, cols, inner;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

static Answer row_supports(const LogSoftmaxCall &call, const Device &)
{
    const auto threads = [&](auto zero) {
        typedef decltype(zero) T;
        return choose_row<T>(call.cols, call.inner, call.backward, call.a, call.b, call.backward ? call.c : call.b)
            .threads;
    };
    const bool fits = call.dtype == CUDA_OPS_FLOAT64   ? threads(0.0) != 0
                      : call.dtype == CUDA_OPS_FLOAT32 ? threads(0.0f) != 0
                                                       : threads(__half()) != 0;
    if (fits)
        return YES;
    return call.inner != 1 ? no("rows are not contiguous: dim is not the last")
                           : no("rows are too long for registers, or not whole vectors aligned to 16 bytes");
}

static cuda_ops_status row(const LogSoftmaxCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.backward ? backward_row((T *)call.a, (const T *)call.b, (const T *)call.c,
                                                          call.columns, call.cols, call.inner, call.stream)
                                           : forward_row((T *)call.a, (const T *)call.b, call.columns, call.cols,
                                                         call.inner, call.stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

// Contiguous rows of up to 32 values always take the other path, so that there is no instance for them here.
static Answer thread_group_supports(const LogSoftmaxCall &call, const Device &)
{
    const group_shape shape = choose_group(call.cols, call.inner);
    return shape.strided || shape.threads >= WARP_SIZE ? YES : no("has no kernel for rows of up to 32 values");
}

static cuda_ops_status thread_group(const LogSoftmaxCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.backward ? backward_thread_group((T *)call.a, (const T *)call.b, (const T *)call.c,
                                                                   call.columns, call.cols, call.inner, call.stream)
                                           : forward_thread_group((T *)call.a, (const T *)call.b, call.columns,
                                                                  call.cols, call.inner, call.stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

static PathTable<LogSoftmaxCall, 2> table = {
    {"CUDA_OPS_LOG_SOFTMAX_PATH"},
    {{"row", "log_softmax.cu", "log_softmax_forward_row_kernel log_softmax_backward_row_kernel", row_supports, nullptr,
      nullptr, row},
     {"thread_group", "log_softmax.cu", "log_softmax_forward_kernel log_softmax_backward_kernel", thread_group_supports,
      nullptr, nullptr, thread_group}}};

extern "C" int cuda_ops_log_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t outer,
                                               int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                               const cuda_ops_device_facts *device)
{
    return report_paths(
        reports, room, table,
        LogSoftmaxCall{backward != 0, nullptr, nullptr, nullptr, outer * inner, cols, inner, dtype, nullptr}, device);
}

extern "C" cuda_ops_status cuda_ops_log_softmax_forward_cuda(void *output, const void *input, int64_t outer,
                                                             int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    return run_path(table, LogSoftmaxCall{false, output, input, nullptr, outer * inner, cols, inner, dtype, stream});
}

extern "C" cuda_ops_status cuda_ops_log_softmax_backward_cuda(void *grad_input, const void *grad_output,
                                                              const void *output, int64_t outer, int64_t cols,
                                                              int64_t inner, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    return run_path(table,
                    LogSoftmaxCall{true, grad_input, grad_output, output, outer * inner, cols, inner, dtype, stream});
}
