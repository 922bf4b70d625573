// cross_entropy: loss = sum(q * (logsumexp - input)) for each column; grad_input = scale * (sum(q) * softmax - q),
// where q is each class' share of the target (see the header).
// Maps a group of threads (common/thread_group.cuh) to a column, which it reads by aligned vectors where the column is
// a row (rows.cuh). Forward reads a column once for the maximum and the sum of exponentials; for class indices without
// smoothing the loss then takes one more element, else one more pass, mostly from cache. It keeps three numbers a
// column, from which backward recomputes the softmax in one pass.
// Bound by memory: one read forward, one read and one write backward.
#include "cuda_ops/cross_entropy.h"

#include "common/loss.cuh"
#include "common/paths.h"
#include "common/thread_group.cuh"

// What forward and backward share. Names as in the header.
template <typename T>
struct problem {
    const T *input;
    const int64_t *target;
    const T *probabilities;
    const T *weight;
    int64_t columns, classes, inner, ignore_index;
    accumulate_type<T> keep;   // 1 - label_smoothing: the target's share
    accumulate_type<T> spread; // label_smoothing / classes: every class' share
};

template <typename T>
__device__ __forceinline__ accumulate_type<T> class_weight(const problem<T> &p, int64_t c)
{
    return p.weight ? load_as_accumulate(p.weight[c]) : accumulate_type<T>(1);
}

// q of class c, of its probability (if there are any) and smoothing; `at` is its element's offset.
template <typename T>
__device__ __forceinline__ accumulate_type<T> share_of_class(const problem<T> &p, int64_t c, int64_t at)
{
    const accumulate_type<T> share =
        p.probabilities ? load_as_accumulate(p.probabilities[at]) * p.keep + p.spread : p.spread;
    return class_weight(p, c) * share;
}

// Without a reduction `losses` has a loss for each column. With one, a grid of one block writes the loss and
// total_weight; a larger grid writes `partials`. ALL_COUNT: classes other than the target count too.
template <typename T, int GROUP, bool STRIDED, bool ALL_COUNT>
__global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) < 8 && !ALL_COUNT ? 4 : 2)
    cross_entropy_forward_kernel(T *losses, accumulate_type<T> *statistics, accumulate_type<T> *total_weight,
                                 double *partials, cuda_ops_index_error *error, problem<T> p,
                                 cuda_ops_reduction reduction)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    __shared__ A sum_scratch[GROUP_THREADS];
    __shared__ double partial_scratch[WARP_SIZE];
    const group_position position = position_in_group(GROUP, STRIDED);
    double loss_sum = 0, weight_sum = 0;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < p.columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + position.slot;
        const int64_t offset = column_offset(column, p.classes, STRIDED ? p.inner : 1);
        const int64_t length = column < p.columns ? p.classes : 0;
        const bool finishes = position.rank == 0 && column < p.columns;
        // The target's load overlaps with reading the column, its input's and weight's with the reduction.
        int64_t t = -1;
        if (finishes && !p.probabilities)
            t = p.target[column];
        log_sum_exp<A> state = column_log_sum_exp<GROUP, STRIDED>(p.input + offset, length, p.inner, position.rank);
        A target_input = 0, target_weight = 0;
        if (finishes && !p.probabilities && t != p.ignore_index && is_class(t, p.classes)) {
            target_input = load_as_accumulate(p.input[offset + t * p.inner]);
            target_weight = class_weight(p, t);
        }
        state = group_reduce<GROUP, STRIDED>(state, scratch);
        const A log_sum = log_of_sum(state);
        A loss = 0, q_sum = 0;
        if (ALL_COUNT) {
            if (!STRIDED && !p.probabilities && !p.weight) { // all classes but the target count the same
                const T *const inputs[1] = {p.input + offset};
                for_row((T *)nullptr, inputs, length, position.rank, GROUP, [&](int64_t, const auto &x) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                        loss += log_sum - (x[0][e] - state.maximum);
                });
                loss *= p.spread;
                q_sum = position.rank == 0 ? p.spread * (A)length : A(0);
            } else {
#pragma unroll 4
                for (int64_t c = position.rank; c < length; c += GROUP) {
                    const int64_t at = offset + c * p.inner;
                    const A share = share_of_class(p, c, at);
                    loss += share * (log_sum - (load_as_accumulate(p.input[at]) - state.maximum));
                    q_sum += share;
                }
            }
            loss = group_reduce<GROUP, STRIDED>(loss, sum_scratch);
            q_sum = group_reduce<GROUP, STRIDED>(q_sum, sum_scratch);
        }
        // No barrier from here to the end of the loop: one thread of each group finishes its column.
        if (!finishes)
            continue;
        A column_weight = 1;
        if (!p.probabilities) {
            column_weight = target_weight;
            if (t == p.ignore_index) {
                loss = q_sum = 0;
            } else if (!is_class(t, p.classes)) {
                record_bad_index(error, column, t, p.classes);
                loss = A(CUDART_NAN);
                q_sum = 0;
            } else {
                const A q = p.keep * column_weight;
                loss += q * (log_sum - (target_input - state.maximum));
                q_sum += q;
            }
        }
        statistics[column] = state.maximum;
        statistics[p.columns + column] = log_sum;
        statistics[2 * p.columns + column] = q_sum;
        if (reduction == CUDA_OPS_REDUCTION_NONE)
            losses[column] = store_from_accumulate<T>(loss);
        loss_sum += loss;
        weight_sum += column_weight;
    }
    if (reduction == CUDA_OPS_REDUCTION_NONE)
        return;
    if (gridDim.x > 1) {
        write_partials(partials, loss_sum, weight_sum, partial_scratch);
        return;
    }
    loss_sum = block_sum(loss_sum, partial_scratch);
    weight_sum = block_sum(weight_sum, partial_scratch);
    if (threadIdx.x == 0)
        write_loss(losses, total_weight, loss_sum, weight_sum, reduction == CUDA_OPS_REDUCTION_MEAN);
}

// total_weight is null unless the reduction was a mean. `vectors`: columns are rows, read and written as aligned
// vectors; all classes but the target count the same.
template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) < 8 ? 4 : 2)
    cross_entropy_backward_kernel(T *grad_input, const T *grad_output, const accumulate_type<T> *statistics,
                                  const accumulate_type<T> *total_weight, problem<T> p, bool grad_per_column,
                                  group_shape shape, bool vectors)
{
    typedef accumulate_type<T> A;
    const group_position position = position_in_group(shape.threads, shape.strided);
    const int slots = GROUP_THREADS / shape.threads;
    const bool all_classes_count = p.probabilities || p.spread > 0;
    wait_for_predecessor();
    release_successor();
    for (int64_t column = (int64_t)blockIdx.x * slots + position.slot; column < p.columns;
         column += (int64_t)gridDim.x * slots) {
        // None of these loads depends on another: all are in flight at once.
        const int64_t t = p.probabilities ? -1 : p.target[column];
        const A grad = load_as_accumulate(grad_output[grad_per_column ? column : 0]);
        const A divisor = total_weight ? *total_weight : A(1);
        const A maximum = statistics[column], log_sum = statistics[p.columns + column];
        const A q_sum = statistics[2 * p.columns + column];
        const bool bad = !p.probabilities && t != p.ignore_index && !is_class(t, p.classes);
        const bool counts = p.probabilities || (t != p.ignore_index && !bad);
        // Zero for an ignored column, even where grad_output is NaN. The mean itself is 0 / 0 where all weights are
        // zero.
        const A scale = !counts ? A(0) : divisor == A(0) ? A(CUDART_NAN) : grad / divisor;
        const A factor = counts ? scale * q_sum : A(0);
        const A target_share = counts && !p.probabilities ? p.keep * class_weight(p, t) : A(0);
        const int64_t offset = column_offset(column, p.classes, p.inner);
        if (vectors) {
            const T *const inputs[1] = {p.input + offset};
            const A even_share = p.spread > A(0) ? scale * p.spread : A(0), share_of_target = scale * target_share;
            for_row(grad_input + offset, inputs, p.classes, position.rank, shape.threads, [&](int64_t c, auto &x) {
                constexpr int COUNT = (int)(sizeof(x[0]) / sizeof(A));
                const int target = c <= t && t < c + COUNT ? (int)(t - c) : -1;
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    x[0][e] = factor * exp_for<T>((x[0][e] - maximum) - log_sum) - even_share;
                if (target >= 0 || bad)
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        x[0][e] = bad ? A(0) : e == target ? x[0][e] - share_of_target : x[0][e];
            });
            continue;
        }
#pragma unroll 4
        for (int64_t c = position.rank; c < p.classes; c += shape.threads) {
            const int64_t at = offset + c * p.inner;
            A value = factor * exp_for<T>((load_as_accumulate(p.input[at]) - maximum) - log_sum);
            if (all_classes_count)
                value -= scale * share_of_class(p, c, at);
            if (c == t)
                value -= scale * target_share;
            grad_input[at] = store_from_accumulate<T>(bad ? A(0) : value);
        }
    }
}

// Few short columns: one block is faster, in several rounds, than several blocks and a second kernel.
static constexpr int64_t ROUNDS_OF_ONE_BLOCK = 4;

static group_shape forward_group(int64_t columns, int64_t classes, int64_t inner)
{
    return choose_group(classes, inner, longest_of_warp(columns, 4));
}

static int64_t forward_blocks(int64_t columns, int64_t classes, int64_t inner)
{
    return group_blocks(columns, forward_group(columns, classes, inner));
}

template <typename T>
static problem<T> make_problem(const void *input, const int64_t *target, const void *probabilities, const void *weight,
                               int64_t outer, int64_t classes, int64_t inner, int64_t ignore_index,
                               double label_smoothing)
{
    typedef accumulate_type<T> A;
    return {(const T *)input,
            target,
            (const T *)probabilities,
            (const T *)weight,
            outer * inner,
            classes,
            inner,
            ignore_index,
            A(1 - label_smoothing),
            A(label_smoothing / (double)classes)};
}

template <typename T>
static cuda_ops_status cross_entropy_forward(T *losses, void *statistics, void *total_weight, double *partials,
                                             cuda_ops_index_error *error, const problem<T> &p,
                                             cuda_ops_reduction reduction, unsigned int grid, cudaStream_t stream)
{
    const group_shape shape = forward_group(p.columns, p.classes, p.inner);
    const bool reduced = reduction != CUDA_OPS_REDUCTION_NONE;
    CUDA_OPS_GROUP_DISPATCH(
        shape, GROUP, STRIDED,
        launch_dependent(p.probabilities || p.spread > 0 ? cross_entropy_forward_kernel<T, GROUP, STRIDED, true>
                                                         : cross_entropy_forward_kernel<T, GROUP, STRIDED, false>,
                         dim3(grid), dim3(GROUP_THREADS), 0, stream, losses, (accumulate_type<T> *)statistics,
                         (accumulate_type<T> *)total_weight, partials, error, p, reduction));
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !reduced || grid == 1)
        return status;
    return launch_loss_reduce(losses, total_weight, partials, grid, reduction, stream);
}

template <typename T>
static cuda_ops_status cross_entropy_backward(T *grad_input, const T *grad_output, const void *statistics,
                                              const void *total_weight, const problem<T> &p,
                                              cuda_ops_reduction reduction, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const group_shape shape = choose_group(p.classes, p.inner, longest_of_warp(p.columns, 2));
    const void *divisor = reduction == CUDA_OPS_REDUCTION_MEAN ? total_weight : nullptr;
    const bool vectors = p.inner == 1 && p.classes > WARP_SIZE && !p.probabilities && !(p.weight && p.spread > 0) &&
                         same_alignment(grad_input, p.input);
    launch_dependent(cross_entropy_backward_kernel<T>, dim3(clamp_grid(group_blocks(p.columns, shape))),
                     dim3(GROUP_THREADS), 0, stream, grad_input, grad_output, (const A *)statistics, (const A *)divisor,
                     p, reduction == CUDA_OPS_REDUCTION_NONE, shape, vectors);
    return launch_status();
}

// The forward pass as a launcher gets it.
struct CrossEntropyCall {
    void *losses, *statistics, *total_weight, *workspace;
    cuda_ops_index_error *error;
    const void *input, *probabilities, *weight;
    const int64_t *target;
    int64_t outer, classes, inner, ignore_index;
    double label_smoothing;
    cuda_ops_reduction reduction;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

static cuda_ops_status forward(const CrossEntropyCall &call, unsigned int grid)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return cross_entropy_forward(
                          (T *)call.losses, call.statistics, call.total_weight, (double *)call.workspace, call.error,
                          make_problem<T>(call.input, call.target, call.probabilities, call.weight, call.outer,
                                          call.classes, call.inner, call.ignore_index, call.label_smoothing),
                          call.reduction, grid, call.stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

static Answer one_block_supports(const CrossEntropyCall &call, const Device &)
{
    return call.reduction != CUDA_OPS_REDUCTION_NONE ? YES : no("there is no reduction");
}

static Answer one_block_is_fast(const CrossEntropyCall &call, const Device &)
{
    return call.classes <= WARP_SIZE &&
                   forward_blocks(call.outer * call.inner, call.classes, call.inner) <= ROUNDS_OF_ONE_BLOCK
               ? YES
               : no("more than 32 classes, or work for more than 4 rounds of a block");
}

static int64_t one_block_workspace(const CrossEntropyCall &, const Device &)
{
    return (int64_t)partials_bytes(1);
}

static cuda_ops_status one_block(const CrossEntropyCall &call, const Device &)
{
    return forward(call, 1);
}

static Answer blocks_supports(const CrossEntropyCall &, const Device &)
{
    return YES;
}

static unsigned int grid_of(const CrossEntropyCall &call)
{
    const int64_t blocks = forward_blocks(call.outer * call.inner, call.classes, call.inner);
    return call.reduction != CUDA_OPS_REDUCTION_NONE ? clamp_to_partials(blocks) : clamp_grid(blocks);
}

static int64_t blocks_workspace(const CrossEntropyCall &call, const Device &)
{
    return (int64_t)partials_bytes(grid_of(call));
}

static cuda_ops_status blocks(const CrossEntropyCall &call, const Device &)
{
    return forward(call, grid_of(call));
}

static PathTable<CrossEntropyCall, 2> table = {
    {"CUDA_OPS_CROSS_ENTROPY_PATH"},
    {{"one_block", "cross_entropy.cu", "cross_entropy_forward_kernel", one_block_supports, one_block_is_fast,
      one_block_workspace, one_block},
     {"blocks", "cross_entropy.cu", "cross_entropy_forward_kernel loss_reduce_kernel", blocks_supports, nullptr,
      blocks_workspace, blocks}}};

static CrossEntropyCall call_of_sizes(int64_t outer, int64_t classes, int64_t inner, cuda_ops_reduction reduction,
                                      cuda_ops_dtype dtype)
{
    CrossEntropyCall call = {};
    call.outer = outer, call.classes = classes, call.inner = inner;
    call.reduction = reduction, call.dtype = dtype;
    return call;
}

extern "C" size_t cuda_ops_cross_entropy_workspace_cuda(int64_t outer, int64_t classes, int64_t inner)
{
    const CrossEntropyCall call = call_of_sizes(outer, classes, inner, CUDA_OPS_REDUCTION_MEAN, CUDA_OPS_FLOAT32);
    return outer == 0 || inner == 0 ? 0 : (size_t)path_workspace(table, call);
}

extern "C" int cuda_ops_cross_entropy_paths_cuda(cuda_ops_path_report *reports, int room, int64_t outer,
                                                 int64_t classes, int64_t inner, cuda_ops_reduction reduction,
                                                 cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of_sizes(outer, classes, inner, reduction, dtype), device);
}

extern "C" cuda_ops_status
cuda_ops_cross_entropy_forward_cuda(void *losses, void *statistics, void *total_weight, void *workspace,
                                    cuda_ops_index_error *error, const void *input, const int64_t *target,
                                    const void *probabilities, const void *weight, int64_t outer, int64_t classes,
                                    int64_t inner, int64_t ignore_index, double label_smoothing,
                                    cuda_ops_reduction reduction, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    return run_path(table, CrossEntropyCall{losses, statistics, total_weight, workspace, error, input, probabilities,
                                            weight, target, outer, classes, inner, ignore_index, label_smoothing,
                                            reduction, dtype, stream});
}

extern "C" cuda_ops_status
cuda_ops_cross_entropy_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                     const int64_t *target, const void *probabilities, const void *weight,
                                     const void *statistics, const void *total_weight, int64_t outer, int64_t classes,
                                     int64_t inner, int64_t ignore_index, double label_smoothing,
                                     cuda_ops_reduction reduction, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (outer == 0 || classes == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return cross_entropy_backward((T *)grad_input, (const T *)grad_output, statistics, total_weight,
                                                    make_problem<T>(input, target, probabilities, weight, outer,
                                                                    classes, inner, ignore_index, label_smoothing),
                                                    reduction, stream));
    return CUDA_OPS_SUCCESS;
}
