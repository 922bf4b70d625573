// log_softmax: output = (input - max) - log(sum(exp(input - max))); grad_input = grad_output - exp(output) *
// sum(grad_output); sums along the middle dimension of [outer, cols, inner].
// Rows (inner = 1) that fit into the registers of 32, 128 or 512 threads are read once, by 16-byte loads, and kept
// there. Everything else goes to a team of threads (team.cuh) a column, which it reads twice: once for the largest and
// the sum at one go (the sum is rescaled when a larger element turns up), once, mostly from cache, to write the result.
// Bound by memory: one read, one write forward; two reads, one write backward.
#include "cuda_ops/log_softmax.h"

#include "team.cuh"

template <typename T, int TEAM, bool STRIDED>
__global__ void __launch_bounds__(TEAM_THREADS)
    log_softmax_forward_kernel(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = TEAM_THREADS / TEAM;
    __shared__ log_sum_exp<A> scratch[TEAM_THREADS];
    const team_place place = place_in_team(TEAM, STRIDED);
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + place.slot;
        const int64_t offset = column_offset(column, cols, inner);
        const int64_t length = column < columns ? cols : 0;
        const log_sum_exp<A> state =
            team_log_sum_exp<TEAM, STRIDED>(input + offset, length, inner, place.rank, scratch);
        const A log_sum = log_of_sum(state);
        for (int64_t c = place.rank; c < length; c += TEAM) {
            const int64_t at = offset + c * inner;
            output[at] = store_from_accumulate<T>((load_as_accumulate(input[at]) - state.maximum) - log_sum);
        }
    }
}

template <typename T, int TEAM, bool STRIDED>
__global__ void __launch_bounds__(TEAM_THREADS)
    log_softmax_backward_kernel(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                                int64_t inner)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = TEAM_THREADS / TEAM;
    __shared__ A scratch[TEAM_THREADS];
    const team_place place = place_in_team(TEAM, STRIDED);
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + place.slot;
        const int64_t offset = column_offset(column, cols, inner);
        const int64_t length = column < columns ? cols : 0;
        A sum = 0;
        for (int64_t c = place.rank; c < length; c += TEAM)
            sum += load_as_accumulate(grad_output[offset + c * inner]);
        sum = team_reduce<TEAM, STRIDED>(sum, scratch);
        for (int64_t c = place.rank; c < length; c += TEAM) {
            const int64_t at = offset + c * inner;
            const A softmax = exp(load_as_accumulate(output[at]));
            grad_input[at] = store_from_accumulate<T>(load_as_accumulate(grad_output[at]) - softmax * sum);
        }
    }
}

// --- rows in registers ----------------------------------------------------------------------------------------------

static constexpr int ROW_BLOCK = 128; // threads of a block at the least: 4 rows of a warp each, or one row

// Sum or largest over the THREADS that share a row; all of them get it. One row a block if THREADS > 32.
template <int THREADS, bool MAXIMUM, typename A>
__device__ __forceinline__ A row_reduce(A value, A *scratch)
{
    value = MAXIMUM ? warp_max(value) : warp_sum(value);
    if constexpr (THREADS > WARP_SIZE) {
        constexpr int WARPS = THREADS / WARP_SIZE;
        if (threadIdx.x % WARP_SIZE == 0)
            scratch[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        value = scratch[0];
#pragma unroll
        for (int warp = 1; warp < WARPS; warp++) {
            const A other = scratch[warp];
            if (MAXIMUM)
                value = (other > value || other != other) ? other : value;
            else
                value += other;
        }
        __syncthreads(); // nobody may write the next values while another still reads these
    }
    return value;
}

// `cols` is a multiple of a vector's elements, and at most THREADS * VECTORS vectors. A warp-wide row's warp may end
// early: nothing waits for it.
template <typename T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    log_softmax_forward_row_kernel(T *output, const T *input, int64_t rows, int cols)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    __shared__ A scratch[THREADS / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, vectors = cols / V::size, rows_a_block = blockDim.x / THREADS;
    for (int64_t row = (int64_t)blockIdx.x * rows_a_block + threadIdx.x / THREADS; row < rows;
         row += (int64_t)gridDim.x * rows_a_block) {
        const V *from = reinterpret_cast<const V *>(input + row * cols);
        V *to = reinterpret_cast<V *>(output + row * cols);
        V x[VECTORS];
        A maximum = -A(CUDART_INF);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors)
                x[v] = from[rank + v * THREADS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors)
#pragma unroll
                for (int i = 0; i < V::size; i++) {
                    const A element = load_as_accumulate(x[v].element[i]);
                    maximum = element > maximum ? element : maximum; // passes over NaN, which the sum takes up
                }
        maximum = row_reduce<THREADS, true>(maximum, scratch);
        A sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors)
#pragma unroll
                for (int i = 0; i < V::size; i++) {
                    const A element = load_as_accumulate(x[v].element[i]);
                    sum += element == maximum ? A(1) : exp(element - maximum);
                }
        const log_sum_exp<A> state = {maximum, row_reduce<THREADS, false>(sum, scratch)};
        const A log_sum = log_of_sum(state);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                V result;
#pragma unroll
                for (int i = 0; i < V::size; i++)
                    result.element[i] =
                        store_from_accumulate<T>((load_as_accumulate(x[v].element[i]) - maximum) - log_sum);
                to[rank + v * THREADS] = result;
            }
    }
}

template <typename T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    log_softmax_backward_row_kernel(T *grad_input, const T *grad_output, const T *output, int64_t rows, int cols)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    __shared__ A scratch[THREADS / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, vectors = cols / V::size, rows_a_block = blockDim.x / THREADS;
    for (int64_t row = (int64_t)blockIdx.x * rows_a_block + threadIdx.x / THREADS; row < rows;
         row += (int64_t)gridDim.x * rows_a_block) {
        const V *grads = reinterpret_cast<const V *>(grad_output + row * cols);
        const V *outputs = reinterpret_cast<const V *>(output + row * cols);
        V *to = reinterpret_cast<V *>(grad_input + row * cols);
        V g[VECTORS], y[VECTORS]; // both loaded before the sum, so that all loads of a row are under way together
        A sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                g[v] = grads[rank + v * THREADS];
                y[v] = outputs[rank + v * THREADS];
            }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors)
#pragma unroll
                for (int i = 0; i < V::size; i++)
                    sum += load_as_accumulate(g[v].element[i]);
        sum = row_reduce<THREADS, false>(sum, scratch);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (rank + v * THREADS < vectors) {
                V result;
#pragma unroll
                for (int i = 0; i < V::size; i++) {
                    const A softmax = exp(load_as_accumulate(y[v].element[i]));
                    result.element[i] = store_from_accumulate<T>(load_as_accumulate(g[v].element[i]) - softmax * sum);
                }
                to[rank + v * THREADS] = result;
            }
    }
}

// How many threads share a row, and how many vectors each holds; 0 threads where rows do not fit or are not aligned.
struct row_shape {
    int threads, vectors;
};

template <typename T>
static row_shape choose_row(int64_t cols, int64_t inner, const void *a, const void *b, const void *c)
{
    constexpr int SIZE = vector16<T>::size;
    if (inner != 1 || cols % SIZE != 0 || !is_aligned_16(a) || !is_aligned_16(b) || !is_aligned_16(c))
        return {0, 0};
    const int64_t vectors = cols / SIZE;
    for (row_shape shape : {row_shape{32, 2}, {32, 4}, {32, 8}, {128, 4}, {128, 8}, {512, 4}, {512, 8}})
        if (vectors <= (int64_t)shape.threads * shape.vectors && (sizeof(T) < sizeof(double) || shape.vectors == 8))
            return shape;
    return {0, 0};
}

// Runs the statement with the constants THREADS and VECTORS that the shape names, one of those that T has above:
// float64 has few, since its exponentials are long.
#define DISPATCH_THREADS(shape, THREADS, ...)                                                                          \
    if ((shape).threads == 32) {                                                                                       \
        constexpr int THREADS = 32;                                                                                    \
        __VA_ARGS__;                                                                                                   \
    } else if ((shape).threads == 128) {                                                                               \
        constexpr int THREADS = 128;                                                                                   \
        __VA_ARGS__;                                                                                                   \
    } else {                                                                                                           \
        constexpr int THREADS = 512;                                                                                   \
        __VA_ARGS__;                                                                                                   \
    }
#define DISPATCH_ROW(T, shape, THREADS, VECTORS, ...)                                                                  \
    constexpr bool any_vectors = sizeof(T) < sizeof(double);                                                           \
    if (any_vectors && (shape).vectors == 2) {                                                                         \
        constexpr int THREADS = 32, VECTORS = any_vectors ? 2 : 8;                                                     \
        __VA_ARGS__;                                                                                                   \
    } else if (any_vectors && (shape).vectors == 4) {                                                                  \
        constexpr int VECTORS = any_vectors ? 4 : 8;                                                                   \
        DISPATCH_THREADS(shape, THREADS, __VA_ARGS__)                                                                  \
    } else {                                                                                                           \
        constexpr int VECTORS = 8;                                                                                     \
        DISPATCH_THREADS(shape, THREADS, __VA_ARGS__)                                                                  \
    }

static inline unsigned int row_grid(int64_t rows, row_shape shape)
{
    return clamp_grid(shape.threads < ROW_BLOCK ? ceil_div(rows, ROW_BLOCK / shape.threads) : rows);
}

static inline int row_block(row_shape shape)
{
    return shape.threads < ROW_BLOCK ? ROW_BLOCK : shape.threads;
}

template <typename T>
static cuda_ops_status log_softmax_forward(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                           cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, output, input, input);
    if (row.threads != 0) {
        DISPATCH_ROW(T, row, THREADS, VECTORS,
                     (log_softmax_forward_row_kernel<T, THREADS, VECTORS>
                      <<<row_grid(columns, row), row_block(row), 0, stream>>>(output, input, columns, (int)cols)));
        return launch_status();
    }
    const team_shape shape = choose_team(cols, inner);
    const unsigned int grid = clamp_grid(team_blocks(columns, shape));
    CUDA_OPS_TEAM_DISPATCH(shape, TEAM, STRIDED,
                           (log_softmax_forward_kernel<T, TEAM, STRIDED>
                            <<<grid, TEAM_THREADS, 0, stream>>>(output, input, columns, cols, inner)));
    return launch_status();
}

template <typename T>
static cuda_ops_status log_softmax_backward(T *grad_input, const T *grad_output, const T *output, int64_t columns,
                                            int64_t cols, int64_t inner, cudaStream_t stream)
{
    const row_shape row = choose_row<T>(cols, inner, grad_input, grad_output, output);
    if (row.threads != 0) {
        DISPATCH_ROW(T, row, THREADS, VECTORS,
                     (log_softmax_backward_row_kernel<T, THREADS, VECTORS>
                      <<<row_grid(columns, row), row_block(row), 0, stream>>>(grad_input, grad_output, output, columns,
                                                                              (int)cols)));
        return launch_status();
    }
    const team_shape shape = choose_team(cols, inner);
    const unsigned int grid = clamp_grid(team_blocks(columns, shape));
    CUDA_OPS_TEAM_DISPATCH(shape, TEAM, STRIDED,
                           (log_softmax_backward_kernel<T, TEAM, STRIDED><<<grid, TEAM_THREADS, 0, stream>>>(
                               grad_input, grad_output, output, columns, cols, inner)));
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_log_softmax_forward_cuda(void *output, const void *input, int64_t outer,
                                                             int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return log_softmax_forward((T *)output, (const T *)input, outer * inner, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_log_softmax_backward_cuda(void *grad_input, const void *grad_output,
                                                              const void *output, int64_t outer, int64_t cols,
                                                              int64_t inner, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return log_softmax_backward((T *)grad_input, (const T *)grad_output, (const T *)output,
                                                  outer * inner, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}
