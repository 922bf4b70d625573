// softmax and log_softmax of columns that are long and too few to fill the GPU: they are cut into parts, one for each
// group of threads (common/thread_group.cuh), and two kernels go over them.
//     first:  a part's largest element and sum of exponentials, or its sum of grad_output * output, to the workspace
//     second: combines those of all of a column's parts, in order, and writes its part of the result
// The second kernel reads from the L2 cache what the first one has read from memory. Bound by two launches' latency.
#include "common/aligned_vector.cuh"
#include "softmax/arithmetic.cuh"
#include "softmax/paths.h"

// A (column, part) pair: part p has the elements from p * part on. Neighbouring tasks have neighbouring columns, which
// lie side by side where they are strided.
struct SplitColumns {
    int64_t columns, cols, inner, parts, part;
};

struct SplitTask {
    int64_t column, offset, length; // of the part's first element; of the part, 0 beyond the last task
};

__device__ __forceinline__ SplitTask task_at(const SplitColumns &split, int64_t task, bool strided)
{
    const int64_t p = task / split.columns, column = task - p * split.columns, left = split.cols - p * split.part;
    return {column, column_offset(column, split.cols, strided ? split.inner : 1) + p * split.part * split.inner,
            p >= split.parts    ? 0
            : left < split.part ? left
                                : split.part};
}

// Calls function(task, rank) for all tasks; all threads of a block together.
template <int GROUP, bool STRIDED, typename F>
__device__ __forceinline__ void for_tasks(const SplitColumns &split, F function)
{
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    const group_position position = position_in_group(GROUP, STRIDED);
    const int64_t tasks = split.columns * split.parts;
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < tasks; first += (int64_t)gridDim.x * SLOTS)
        function(first + position.slot, position.rank);
}

// Of the values of a column's parts, [parts, columns], those of all together; its whole group gets the same bits.
template <int GROUP, bool STRIDED, typename V>
__device__ __forceinline__ V combine_parts(V none, const V *values, const SplitColumns &split, const SplitTask &task,
                                           int rank, V *scratch)
{
    V value = none;
    for (int64_t p = task.length > 0 ? rank : split.parts; p < split.parts; p += GROUP)
        value = combine(value, values[p * split.columns + task.column]);
    return group_reduce<GROUP, STRIDED>(value, scratch);
}

template <typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_states_kernel(log_sum_exp<accumulate_type<T>> *states, const T *input, const SplitColumns split)
{
    typedef accumulate_type<T> A;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for_tasks<GROUP, STRIDED>(split, [&](int64_t index, int rank) {
        const SplitTask task = task_at(split, index, STRIDED);
        const log_sum_exp<A> state =
            group_log_sum_exp<GROUP, STRIDED>(input + task.offset, task.length, split.inner, rank, scratch);
        if (rank == 0 && task.length > 0)
            states[index] = state;
    });
}

// `vectors`: columns are rows, and the arrays lie alike.
template <bool LOG, typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_forward_parts_kernel(T *output, const T *input, const log_sum_exp<accumulate_type<T>> *states,
                                 const SplitColumns split, bool vectors)
{
    typedef accumulate_type<T> A;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for_tasks<GROUP, STRIDED>(split, [&](int64_t index, int rank) {
        const SplitTask task = task_at(split, index, STRIDED);
        const log_sum_exp<A> state =
            combine_parts<GROUP, STRIDED>(log_sum_exp_of_none<A>(), states, split, task, rank, scratch);
        const A divisor = softmax_divisor<LOG>(state);
        if (!STRIDED && vectors) {
            const T *const inputs[1] = {input + task.offset};
            for_row(output + task.offset, inputs, task.length, rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] = softmax_of<LOG, T>(x[0][e], state.maximum, divisor);
            });
            return;
        }
        for (int64_t c = rank; c < task.length; c += GROUP) {
            const int64_t at = task.offset + c * split.inner;
            output[at] =
                store_from_accumulate<T>(softmax_of<LOG, T>(load_as_accumulate(input[at]), state.maximum, divisor));
        }
    });
}

template <bool LOG, typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_sums_kernel(accumulate_type<T> *sums, const T *grad_output, const T *output, const SplitColumns split,
                        bool vectors)
{
    typedef accumulate_type<T> A;
    __shared__ A scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for_tasks<GROUP, STRIDED>(split, [&](int64_t index, int rank) {
        const SplitTask task = task_at(split, index, STRIDED);
        A sum = 0;
        if (!STRIDED && vectors) {
            const T *const inputs[2] = {grad_output + task.offset, output + task.offset};
            const T *const grads[1] = {inputs[0]};
            if constexpr (LOG)
                for_row((T *)nullptr, grads, task.length, rank, GROUP, [&](int64_t, const auto &g) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(g[0]) / sizeof(A)); e++)
                        sum += g[0][e];
                });
            else
                for_row((T *)nullptr, inputs, task.length, rank, GROUP, [&](int64_t, const auto &x) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                        sum += x[0][e] * x[1][e];
                });
        } else {
            for (int64_t c = rank; c < task.length; c += GROUP)
                sum += softmax_summand<LOG>(load_as_accumulate(grad_output[task.offset + c * split.inner]),
                                            LOG ? A(0) : load_as_accumulate(output[task.offset + c * split.inner]));
        }
        sum = group_reduce<GROUP, STRIDED>(sum, scratch);
        if (rank == 0 && task.length > 0)
            sums[index] = sum;
    });
}

template <bool LOG, typename T, int GROUP, bool STRIDED>
__global__ void __launch_bounds__(GROUP_THREADS)
    softmax_backward_parts_kernel(T *grad_input, const T *grad_output, const T *output, const accumulate_type<T> *sums,
                                  const SplitColumns split, bool vectors, accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    __shared__ A scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for_tasks<GROUP, STRIDED>(split, [&](int64_t index, int rank) {
        const SplitTask task = task_at(split, index, STRIDED);
        const A sum = combine_parts<GROUP, STRIDED>(A(0), sums, split, task, rank, scratch);
        if (!STRIDED && vectors) {
            const T *const inputs[2] = {grad_output + task.offset, output + task.offset};
            for_row(grad_input + task.offset, inputs, task.length, rank, GROUP, [&](int64_t, auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    x[0][e] = softmax_gradient<LOG, T>(x[0][e], x[1][e], sum, scale);
            });
            return;
        }
        for (int64_t c = rank; c < task.length; c += GROUP) {
            const int64_t at = task.offset + c * split.inner;
            grad_input[at] = store_from_accumulate<T>(softmax_gradient<LOG, T>(
                load_as_accumulate(grad_output[at]), load_as_accumulate(output[at]), sum, scale));
        }
    });
}

// --- launchers ------------------------------------------------------------------------------------------------------

// A row has a block, neighbouring columns eight threads each.
static constexpr int STRIDED_GROUP = 8;
// As many parts as give a multiprocessor so many blocks, but none shorter than is worth a block's while: of a row, what
// its threads load at one go.
static constexpr int WANTED_BLOCKS = 4;
static constexpr int64_t SHORTEST_STRIDED = 128;

// In one part where there is nothing to cut, nor a column.
static SplitColumns split_columns(const SoftmaxCall &call, const Device &device)
{
    const bool rows = call.inner == 1;
    const int64_t blocks = rows ? call.columns : ceil_div(call.columns, GROUP_THREADS / STRIDED_GROUP);
    const int64_t shortest = rows ? VECTORS_IN_FLIGHT * GROUP_THREADS * 16 / dtype_size(call.dtype) : SHORTEST_STRIDED;
    const int64_t most = call.cols / shortest, target = WANTED_BLOCKS * (int64_t)device.multiprocessors;
    const int64_t wanted = blocks > 0 ? target / blocks : 1, parts = wanted < most ? wanted : most;
    if (parts <= 1)
        return {call.columns, call.cols, call.inner, 1, call.cols};
    // Whole vectors, so that all parts lie as their rows do.
    const int64_t part = ceil_div(ceil_div(call.cols, parts), 16) * 16;
    return {call.columns, call.cols, call.inner, ceil_div(call.cols, part), part};
}

Answer softmax_split_supports(const SoftmaxCall &, const Device &)
{
    return YES;
}

// By sizes alone: for what lies where, the workspace has been asked for before it is known.
Answer softmax_split_is_fast(const SoftmaxCall &call, const Device &device)
{
    if (split_columns(call, device).parts < WANTED_BLOCKS)
        return no(call.inner == 1 ? "rows are many, or short" : "columns are many, or short");
    // What registers hold is read once, by one kernel.
    if (call.inner == 1 && row_vectors(call) <= (device.capability >= 90 ? MOST_OF_CLUSTER : MOST_OF_BLOCK))
        return no("rows are short enough for registers");
    return YES;
}

int64_t softmax_split_workspace(const SoftmaxCall &call, const Device &device)
{
    const int64_t values = call.backward ? 1 : 2;
    return values * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) * split_columns(call, device).parts * call.columns;
}

template <bool LOG, typename T, int GROUP, bool STRIDED>
static cuda_ops_status launch(const SoftmaxCall &call, const SplitColumns &split)
{
    typedef accumulate_type<T> A;
    T *const a = (T *)call.a;
    const T *const b = (const T *)call.b, *const c = (const T *)call.c;
    const bool vectors = same_alignment(a, b) && (!call.backward || same_alignment(a, c));
    const dim3 grid(clamp_grid(ceil_div(split.columns * split.parts, GROUP_THREADS / GROUP))), block(GROUP_THREADS);
    if (call.backward) {
        A *const sums = (A *)call.workspace;
        launch_dependent(softmax_sums_kernel<LOG, T, GROUP, STRIDED>, grid, block, 0, call.stream, sums, b, c, split,
                         vectors);
        launch_dependent(softmax_backward_parts_kernel<LOG, T, GROUP, STRIDED>, grid, block, 0, call.stream, a, b, c,
                         (const A *)sums, split, vectors, (A)call.scale);
    } else {
        log_sum_exp<A> *const states = (log_sum_exp<A> *)call.workspace;
        launch_dependent(softmax_states_kernel<T, GROUP, STRIDED>, grid, block, 0, call.stream, states, b, split);
        launch_dependent(softmax_forward_parts_kernel<LOG, T, GROUP, STRIDED>, grid, block, 0, call.stream, a, b,
                         (const log_sum_exp<A> *)states, split, vectors);
    }
    return launch_status();
}

template <typename T, int GROUP, bool STRIDED>
static cuda_ops_status launch(const SoftmaxCall &call, const Device &device)
{
    const SplitColumns split = split_columns(call, device);
    return call.log ? launch<true, T, GROUP, STRIDED>(call, split) : launch<false, T, GROUP, STRIDED>(call, split);
}

cuda_ops_status softmax_split(const SoftmaxCall &call, const Device &device)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.inner == 1 ? launch<T, GROUP_THREADS, false>(call, device)
                                             : launch<T, STRIDED_GROUP, true>(call, device));
    return CUDA_OPS_INVALID_ARGUMENT;
}
