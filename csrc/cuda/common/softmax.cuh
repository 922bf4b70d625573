// softmax and log_softmax along the middle dimension of [outer, cols, inner], in one text: LOG says which.
//   softmax:     output = exp(input - max) / sum(exp(input - max)); grad_input = output * (grad_output - sum(grad_output *
//                output)) * scale
//   log_softmax: output = (input - max) - log(sum(exp(input - max))); grad_input = grad_output - exp(output) *
//                sum(grad_output)
// Rows (inner = 1) of whole aligned vectors that fit into the registers of 32 to 1024 threads are read once, by 16-byte
// loads, and kept there; so are rows of up to 32 elements by eight threads, and of up to 256 by sixteen, one element a
// load. Everything else goes to a group of threads (common/thread_group.cuh) a column, which it reads twice: once for
// the largest and the sum at one go (the sum is rescaled when a larger element turns up), once, from cache where columns
// are short, to write the result; rows by 16-byte pieces, wherever they start (rows.cuh). Paths for other rows and for
// few columns are in softmax/. Bound by memory: one read, one write forward; two reads, one write backward.
#ifndef CUDA_OPS_COMMON_SOFTMAX_CUH
#define CUDA_OPS_COMMON_SOFTMAX_CUH

#include "common/aligned_vector.cuh"
#include "softmax/arithmetic.cuh"
#include "softmax/paths.h"

// `vectors`: columns are rows, and the arrays lie alike.
template <bool LOG, typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_forward_kernel(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner, bool vectors)
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
        const A divisor = softmax_divisor<LOG>(state);
        if (!STRIDED && vectors) {
            const T *const inputs[1] = {input + offset};
            for_row(output + offset, inputs, length, position.rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] = softmax_of<LOG, T>(x[0][e], state.maximum, divisor);
            });
            continue;
        }
        for (int64_t c = position.rank; c < length; c += GROUP) {
            const int64_t at = offset + c * inner;
            output[at] =
                store_from_accumulate<T>(softmax_of<LOG, T>(load_as_accumulate(input[at]), state.maximum, divisor));
        }
    }
}

template <bool LOG, typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_backward_kernel(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                            int64_t inner, bool vectors, accumulate_type<T> scale)
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
            if constexpr (LOG)
                for_row((T *)nullptr, grads, length, position.rank, GROUP, [&](int64_t, const auto &g) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(g[0]) / sizeof(A)); e++)
                        sum += g[0][e];
                });
            else
                for_row((T *)nullptr, both, length, position.rank, GROUP, [&](int64_t, const auto &x) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                        sum += x[0][e] * x[1][e];
                });
            sum = group_reduce<GROUP, STRIDED>(sum, scratch);
            for_row(grad_input + offset, both, length, position.rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] = softmax_gradient<LOG, T>(x[0][e], x[1][e], sum, scale);
            });
            continue;
        }
        for (int64_t c = position.rank; c < length; c += GROUP)
            sum += softmax_summand<LOG>(load_as_accumulate(grad_output[offset + c * inner]),
                                        LOG ? A(0) : load_as_accumulate(output[offset + c * inner]));
        sum = group_reduce<GROUP, STRIDED>(sum, scratch);
        for (int64_t c = position.rank; c < length; c += GROUP) {
            const int64_t at = offset + c * inner;
            grad_input[at] = store_from_accumulate<T>(softmax_gradient<LOG, T>(
                load_as_accumulate(grad_output[at]), load_as_accumulate(output[at]), sum, scale));
        }
    }
}

// --- rows in registers ----------------------------------------------------------------------------------------------

static constexpr int ROW_BLOCK = 128; // threads of a block at the least: several rows, or one

// Sum, or largest with NaN passed over, over the THREADS that share a row; all of them get it. One row a block if
// THREADS > 32, and then nobody may write `scratch` again before another barrier.
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

// Pieces are 16 bytes, or single elements where a row has a part of a warp.
template <typename T>
__host__ __device__ constexpr int elements_of_piece(int threads)
{
    return threads < WARP_SIZE ? 1 : vector16<T>::size;
}

// Rows of at most THREADS * PIECES pieces, and of whole ones alone.
// Whole warps go through the loop together, with rows past the end as rows without elements.
template <bool LOG, typename T, int THREADS, int PIECES>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    softmax_forward_row_kernel(T *output, const T *input, int64_t rows, int cols)
{
    typedef accumulate_type<T> A;
    constexpr int COUNT = elements_of_piece<T>(THREADS);
    typedef aligned_vector<T, COUNT> P;
    __shared__ A scratch[2][(THREADS + WARP_SIZE - 1) / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, rows_a_block = blockDim.x / THREADS;
    const P none = vector_of_equal<T, COUNT>(-A(CUDART_INF));
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * rows_a_block; first < rows; first += (int64_t)gridDim.x * rows_a_block) {
        const int64_t row = first + threadIdx.x / THREADS;
        const int pieces = row < rows ? cols / COUNT : 0;
        const P *const from = reinterpret_cast<const P *>(input + row * cols);
        P *const to = reinterpret_cast<P *>(output + row * cols);
        P x[PIECES];
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            x[v] = load_vector_or(from + rank + v * THREADS, rank + v * THREADS < pieces, none);
        A maximum = -A(CUDART_INF);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                maximum = fmax(maximum, element_of(x[v], e)); // passes over NaN, which the sum takes up
        maximum = row_reduce<THREADS, true>(maximum, scratch[0]);
        const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum; // all -inf: NaN comes of the subtraction below
        A sum = 0;
#pragma unroll
        for (int v = 0; v < PIECES; v++) {
            A part = 0;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                part += exp_for<T>(element_of(x[v], e) - shift);
            sum += part;
        }
        const log_sum_exp<A> state = {maximum, row_reduce<THREADS, false>(sum, scratch[1])};
        const A divisor = softmax_divisor<LOG>(state);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * THREADS < pieces) {
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = softmax_of<LOG, T>(element_of(x[v], e), maximum, divisor);
                to[rank + v * THREADS] = vector_of<T>(result);
            }
    }
}

template <bool LOG, typename T, int THREADS, int PIECES>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    softmax_backward_row_kernel(T *grad_input, const T *grad_output, const T *output, int64_t rows, int cols,
                                accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    constexpr int COUNT = elements_of_piece<T>(THREADS);
    typedef aligned_vector<T, COUNT> P;
    __shared__ A scratch[2][(THREADS + WARP_SIZE - 1) / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, rows_a_block = blockDim.x / THREADS;
    int turn = 0; // of the two scratches, so that a row's barrier is enough
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * rows_a_block; first < rows; first += (int64_t)gridDim.x * rows_a_block) {
        const int64_t row = first + threadIdx.x / THREADS;
        const int pieces = row < rows ? cols / COUNT : 0;
        const P *const grads = reinterpret_cast<const P *>(grad_output + row * cols);
        const P *const outputs = reinterpret_cast<const P *>(output + row * cols);
        P *const to = reinterpret_cast<P *>(grad_input + row * cols);
        P g[PIECES], y[PIECES]; // both loaded before the sum, so that all loads of a row are under way together
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * THREADS < pieces) {
                g[v] = grads[rank + v * THREADS];
                y[v] = outputs[rank + v * THREADS];
            }
        A sum = 0;
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * THREADS < pieces) {
                A part = 0;
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    part += softmax_summand<LOG>(element_of(g[v], e), element_of(y[v], e));
                sum += part;
            }
        sum = row_reduce<THREADS, false>(sum, scratch[turn]);
        turn ^= 1;
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * THREADS < pieces) {
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = softmax_gradient<LOG, T>(element_of(g[v], e), element_of(y[v], e), sum, scale);
                to[rank + v * THREADS] = vector_of<T>(result);
            }
    }
}

// How many threads share a row, and how many pieces each holds; 0 threads where rows do not fit or are not aligned.
// Backward holds two arrays' pieces: with eight of each, 512 threads would be all that a multiprocessor has room for.
struct row_shape {
    int threads, pieces;
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
            shape.pieces = 8; // few kernels: its exponentials are long
        else if (backward && shape.threads * shape.pieces == 512 * 8)
            shape = {1024, 4};
        if (cols / SIZE <= (int64_t)shape.threads * shape.pieces)
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

// Launches the kernel for rows of this shape, if they are.
template <bool LOG, typename T, int THREADS, int PIECES>
static void forward_rows(row_shape shape, T *output, const T *input, int64_t rows, int64_t cols, cudaStream_t stream)
{
    if (shape.threads == THREADS && shape.pieces == PIECES)
        launch_dependent(softmax_forward_row_kernel<LOG, T, THREADS, PIECES>, row_grid(rows, shape), row_block(shape),
                         0, stream, output, input, rows, (int)cols);
}

template <bool LOG, typename T, int THREADS, int PIECES>
static void backward_rows(row_shape shape, T *grad_input, const T *grad_output, const T *output, int64_t rows,
                          int64_t cols, double scale, cudaStream_t stream)
{
    if (shape.threads == THREADS && shape.pieces == PIECES)
        launch_dependent(softmax_backward_row_kernel<LOG, T, THREADS, PIECES>, row_grid(rows, shape), row_block(shape),
                         0, stream, grad_input, grad_output, output, rows, (int)cols, (accumulate_type<T>)scale);
}

// A row in the registers of its threads.
template <bool LOG, typename T>
static cuda_ops_status forward_row(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                   cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, false, output, input, input);
    forward_rows<LOG, T, 8, 4>(row, output, input, columns, cols, stream);
    forward_rows<LOG, T, 16, 16>(row, output, input, columns, cols, stream);
    forward_rows<LOG, T, 32, 8>(row, output, input, columns, cols, stream);
    forward_rows<LOG, T, 128, 8>(row, output, input, columns, cols, stream);
    forward_rows<LOG, T, 512, 8>(row, output, input, columns, cols, stream);
    if constexpr (sizeof(T) < sizeof(double)) {
        forward_rows<LOG, T, 32, 2>(row, output, input, columns, cols, stream);
        forward_rows<LOG, T, 32, 4>(row, output, input, columns, cols, stream);
        forward_rows<LOG, T, 128, 4>(row, output, input, columns, cols, stream);
        forward_rows<LOG, T, 512, 4>(row, output, input, columns, cols, stream);
    }
    return launch_status();
}

// A row or column of any length, read twice.
template <bool LOG, typename T>
static cuda_ops_status forward_group(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                     cudaStream_t stream)
{
    const group_shape shape = choose_group(cols, inner, longest_of_warp(columns, 4));
    const dim3 grid(clamp_grid(group_blocks(columns, shape)));
    CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED,
                            if constexpr (STRIDED || GROUP >= WARP_SIZE) // shorter rows: above
                            launch_dependent(softmax_forward_kernel<LOG, T, GROUP, STRIDED>, grid, dim3(GROUP_THREADS),
                                             0, stream, output, input, columns, cols, inner,
                                             same_alignment(output, input)));
    return launch_status();
}

template <bool LOG, typename T>
static cuda_ops_status backward_row(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                                    int64_t inner, double scale, cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, true, grad_input, grad_output, output);
    backward_rows<LOG, T, 8, 4>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    backward_rows<LOG, T, 16, 16>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    backward_rows<LOG, T, 32, 8>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    backward_rows<LOG, T, 128, 8>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    if constexpr (sizeof(T) < sizeof(double)) {
        backward_rows<LOG, T, 32, 2>(row, grad_input, grad_output, output, columns, cols, scale, stream);
        backward_rows<LOG, T, 32, 4>(row, grad_input, grad_output, output, columns, cols, scale, stream);
        backward_rows<LOG, T, 128, 4>(row, grad_input, grad_output, output, columns, cols, scale, stream);
        backward_rows<LOG, T, 512, 4>(row, grad_input, grad_output, output, columns, cols, scale, stream);
        backward_rows<LOG, T, 1024, 4>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    } else {
        backward_rows<LOG, T, 512, 8>(row, grad_input, grad_output, output, columns, cols, scale, stream);
    }
    return launch_status();
}

template <bool LOG, typename T>
static cuda_ops_status backward_group(T *grad_input, const T *grad_output, const T *output, int64_t columns,
                                      int64_t cols, int64_t inner, double scale, cudaStream_t stream)
{
    const group_shape shape = choose_group(cols, inner, longest_of_warp(columns, 2));
    const dim3 grid(clamp_grid(group_blocks(columns, shape)));
    const bool vectors = same_alignment(grad_input, grad_output) && same_alignment(grad_input, output);
    CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED,
                            if constexpr (STRIDED || GROUP >= WARP_SIZE) // shorter rows: above
                            launch_dependent(softmax_backward_kernel<LOG, T, GROUP, STRIDED>, grid, dim3(GROUP_THREADS),
                                             0, stream, grad_input, grad_output, output, columns, cols, inner, vectors,
                                             (accumulate_type<T>)scale));
    return launch_status();
}

static Answer softmax_row_supports(const SoftmaxCall &call, const Device &)
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
    return call.inner != 1 ? no("rows do not lie in one piece: dim is not the last")
                           : no("rows are too long for registers, or not whole vectors aligned to 16 bytes");
}

template <bool LOG>
static cuda_ops_status softmax_row(const SoftmaxCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.backward
                                 ? backward_row<LOG>((T *)call.a, (const T *)call.b, (const T *)call.c, call.columns,
                                                     call.cols, call.inner, call.scale, call.stream)
                                 : forward_row<LOG>((T *)call.a, (const T *)call.b, call.columns, call.cols, call.inner,
                                                    call.stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

// What rows of up to 32 values take is the other path always, and there is no kernel for them here.
static Answer softmax_group_supports(const SoftmaxCall &call, const Device &)
{
    const group_shape shape = choose_group(call.cols, call.inner);
    return shape.strided || shape.threads >= WARP_SIZE ? YES : no("has no kernel for rows of up to 32 values");
}

template <bool LOG>
static cuda_ops_status softmax_group(const SoftmaxCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.backward
                                 ? backward_group<LOG>((T *)call.a, (const T *)call.b, (const T *)call.c, call.columns,
                                                       call.cols, call.inner, call.scale, call.stream)
                                 : forward_group<LOG>((T *)call.a, (const T *)call.b, call.columns, call.cols,
                                                      call.inner, call.stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
