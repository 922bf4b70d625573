// logsumexp: output = max + log(sum(exp(input - max))) along the middle dimension of [outer, cols, inner], and grad_input =
// grad_output * exp(input - output).
// Forward maps a group of threads to a column (common/thread_group.cuh), which reads it once: the sum is rescaled when a
// larger element turns up. Where columns are too few to fill the GPU, they are cut into parts, whose states (the largest
// element and the sum) a second kernel combines in order. Backward is elementwise, by rows where they are.
// Bound by memory: one read forward, a read and a write backward.
#include "cuda_ops/logsumexp.h"

#include "common/row_blocks.cuh"
#include "common/thread_group.cuh"

// Of a state whose sum is in order where its maximum is +inf (see below). -inf + log(0) is -inf.
template <typename A>
__device__ __forceinline__ A value_of(const log_sum_exp<A> &state)
{
    if (state.sum != state.sum)
        return state.sum;
    return state.maximum == A(CUDART_INF) ? state.maximum : state.maximum + log(state.sum);
}

// One (column, part) pair for each group: part p has the elements from p * part on. states: where the parts of several
// go, [parts, columns]; NULL where a part is a column.
template <typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    logsumexp_forward_kernel(T *output, log_sum_exp<accumulate_type<T>> *states, const T *input, int64_t columns,
                             int64_t cols, int64_t inner, int64_t parts, int64_t part)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    const group_position position = position_in_group(GROUP, STRIDED);
    wait_for_predecessor();
    release_successor();
    // Neighbouring groups have neighbouring columns, which lie side by side where they are strided.
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns * parts; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t task = first + position.slot, p = parts == 1 ? 0 : task / columns, column = task - p * columns;
        const int64_t left = cols - p * part;
        const int64_t length = task >= columns * parts ? 0 : left < part ? left : part;
        const T *const from = input + column_offset(column, cols, STRIDED ? inner : 1) + p * part * inner;
        log_sum_exp<A> state = group_log_sum_exp<GROUP, STRIDED>(from, length, inner, position.rank, scratch);
        // With a +inf the sum may be NaN of a difference of infinities; it is one of its own only if there is a NaN.
        const bool infinite = state.maximum == A(CUDART_INF);
        if (__syncthreads_or(infinite)) {
            A found = 0;
            for (int64_t c = position.rank; infinite && c < length; c += GROUP) {
                const A x = load_as_accumulate(from[c * inner]);
                if (x != x)
                    found = x;
            }
            found = group_reduce<GROUP, STRIDED>(found, reinterpret_cast<A *>(scratch));
            if (infinite)
                state.sum = found != found ? found : A(1);
        }
        if (position.rank == 0 && task < columns * parts) {
            if (states)
                states[task] = state;
            else
                output[column] = store_from_accumulate<T>(value_of(state));
        }
    }
}

// A warp a column.
template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS)
    combine_parts_kernel(T *output, const log_sum_exp<accumulate_type<T>> *states, int64_t columns, int64_t parts)
{
    typedef accumulate_type<T> A;
    const int lane = threadIdx.x % WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t column = global_thread_index() / WARP_SIZE; column < columns;
         column += global_thread_count() / WARP_SIZE) {
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t p = lane; p < parts; p += WARP_SIZE)
            state = combine(state, states[p * columns + column]);
#pragma unroll
        for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
            const log_sum_exp<A> other = {__shfl_xor_sync(FULL_WARP, state.maximum, offset),
                                          __shfl_xor_sync(FULL_WARP, state.sum, offset)};
            state = combine(state, other);
        }
        if (lane == 0)
            output[column] = store_from_accumulate<T>(value_of(state));
    }
}

// Columns that are rows: a group of threads has a row, or, where rows are few, its part from blockIdx.y * part on.
// `vectors`: input and grad_input lie alike.
template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS)
    logsumexp_backward_kernel(T *grad_input, const T *grad_output, const T *input, const T *output, int64_t rows,
                              int64_t cols, int64_t part, bool vectors, int group)
{
    typedef accumulate_type<T> A;
    const int rank = threadIdx.x % group;
    const int64_t begin = blockIdx.y * part, length = cols - begin < part ? cols - begin : part;
    for (int64_t row = global_thread_index() / group; row < rows; row += global_thread_count() / group) {
        const A g = load_as_accumulate(grad_output[row]), y = load_as_accumulate(output[row]);
        const T *const x = input + row * cols + begin;
        T *const to = grad_input + row * cols + begin;
        if (vectors) {
            const T *const inputs[1] = {x};
            for_row(to, inputs, length, rank, group, [&](int64_t, auto &values) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(values[0]) / sizeof(A)); e++)
                    values[0][e] = g * exp_for<T>(values[0][e] - y);
            });
        } else {
            for (int64_t c = rank; c < length; c += group)
                to[c] = store_from_accumulate<T>(g * exp_for<T>(load_as_accumulate(x[c]) - y));
        }
    }
}

// Columns side by side: lines of `inner` elements, `lines` of them, each with the columns of its outer index.
template <typename T>
__global__ void __launch_bounds__(ROW_BLOCK_THREADS)
    logsumexp_backward_strided_kernel(T *grad_input, const T *grad_output, const T *input, const T *output,
                                      int64_t lines, int64_t cols, int64_t inner, int64_t vectors)
{
    for_rows<T>(lines, inner, vectors, [&](int64_t line, int64_t i, auto none) {
        typedef decltype(none) V;
        const int64_t column = line / cols * inner + i;
        const V x = *reinterpret_cast<const V *>(input + line * inner + i);
        const V g = *reinterpret_cast<const V *>(grad_output + column);
        const V y = *reinterpret_cast<const V *>(output + column);
        accumulate_type<T> results[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++)
            results[e] = element_of(g, e) * exp_for<T>(element_of(x, e) - element_of(y, e));
        *reinterpret_cast<V *>(grad_input + line * inner + i) = vector_of<T>(results);
    });
}

// Into how many parts columns are cut, and how long one is: where blocks are fewer than fill the GPU twice, but none
// shorter than is worth a block's while.
struct ColumnParts {
    int64_t parts, part;
};

static ColumnParts parts_of(int64_t columns, int64_t cols, int64_t inner, int64_t element_bytes)
{
    const int64_t blocks = group_blocks(columns, choose_group(cols, inner));
    // Of a row what a block loads at one go.
    const int64_t shortest = inner == 1 ? VECTORS_IN_FLIGHT * GROUP_THREADS * 16 / element_bytes : 256;
    const int64_t wanted = 2 * (int64_t)current_device().multiprocessors / blocks, most = cols / shortest;
    const int64_t parts = wanted < most ? wanted : most;
    if (parts <= 1)
        return {1, cols};
    // Whole vectors, so that all parts lie as their rows do.
    const int64_t part = ceil_div(ceil_div(cols, parts), 16) * 16;
    return {ceil_div(cols, part), part};
}

extern "C" size_t cuda_ops_logsumexp_workspace_cuda(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return 0;
    const ColumnParts cut = parts_of(outer * inner, cols, inner, dtype_size(dtype));
    const size_t state = dtype == CUDA_OPS_FLOAT64 ? sizeof(log_sum_exp<double>) : sizeof(log_sum_exp<float>);
    return cut.parts == 1 ? 0 : (size_t)(cut.parts * outer * inner) * state;
}

template <typename T>
static cuda_ops_status forward(T *output, void *workspace, const T *input, int64_t columns, int64_t cols, int64_t inner,
                               cudaStream_t stream)
{
    typedef log_sum_exp<accumulate_type<T>> State;
    const ColumnParts cut = parts_of(columns, cols, inner, sizeof(T));
    State *const states = cut.parts == 1 ? nullptr : (State *)workspace;
    const group_shape shape = choose_group(cut.part, inner, longest_of_warp(columns * cut.parts, 4));
    const dim3 grid(clamp_grid(group_blocks(columns * cut.parts, shape)));
    CUDA_OPS_GROUP_DISPATCH(shape, GROUP, STRIDED,
                            launch_dependent(logsumexp_forward_kernel<T, GROUP, STRIDED>, grid, dim3(GROUP_THREADS), 0,
                                             stream, output, states, input, columns, cols, inner, cut.parts, cut.part));
    if (states)
        launch_dependent(combine_parts_kernel<T>, dim3(clamp_grid(ceil_div(columns, GROUP_THREADS / WARP_SIZE))),
                         dim3(GROUP_THREADS), 0, stream, output, (const State *)states, columns, cut.parts);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(T *grad_input, const T *grad_output, const T *input, const T *output, int64_t outer,
                                int64_t cols, int64_t inner, cudaStream_t stream)
{
    if (inner == 1) {
        const ColumnParts cut = parts_of(outer, cols, 1, sizeof(T));
        const group_shape shape = choose_group(cut.part, 1, longest_of_warp(outer * cut.parts, 4));
        const dim3 grid(clamp_grid(group_blocks(outer, shape)), (unsigned int)cut.parts);
        logsumexp_backward_kernel<<<grid, GROUP_THREADS, 0, stream>>>(grad_input, grad_output, input, output, outer,
                                                                      cols, cut.part, same_alignment(grad_input, input),
                                                                      shape.threads);
        return launch_status();
    }
    const RowBlocks l = row_blocks<T>(outer * cols, inner, inner,
                                      is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(input) &&
                                          is_aligned_16(output));
    logsumexp_backward_strided_kernel<<<l.grid, l.block, 0, stream>>>(grad_input, grad_output, input, output,
                                                                      outer * cols, cols, inner, l.vectors);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_logsumexp_forward_cuda(void *output, void *workspace, const void *input,
                                                           int64_t outer, int64_t cols, int64_t inner,
                                                           cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return forward((T *)output, workspace, (const T *)input, outer * inner, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_logsumexp_backward_cuda(void *grad_input, const void *grad_output,
                                                            const void *input, const void *output, int64_t outer,
                                                            int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                            cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward((T *)grad_input, (const T *)grad_output, (const T *)input, (const T *)output,
                                      outer, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}
