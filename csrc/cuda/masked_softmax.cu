// masked_softmax: output = softmax(input * scale + mask) along rows, of the columns that take part; 0 where none does.
// Rows of whole aligned 16-byte pieces that fit into the registers of 32, 128 or 512 threads are read once: scores, then
// exponentials, stay there in float32. Any other row goes to a warp or a block, element by element, which reads it
// twice: for the largest score and the sum at one go, then, mostly from cache, for the result. Long rows that are too few
// to fill the GPU are cut into parts, and two kernels do the same with those. Of what causality hides nothing is read. The
// mask is read by pieces where it lies alike, and comes from the caches if rows share it. Bound by memory: one read, one
// write.
#include "cuda_ops/masked_softmax.h"

#include "common/aligned_vector.cuh"
#include "common/paths.h"
#include "common/thread_group.cuh"

// What the kernels need of a call.
template <typename T>
struct MaskedRows {
    T *output;
    const T *input;
    int64_t rows, cols;
    accumulate_type<T> scale;
    cuda_ops_mask mask;
    bool mask_pieces; // the mask of every whole piece is one, aligned
};

// A row's mask.
template <typename T>
struct RowMask {
    const uint8_t *takes_part; // or nullptr
    const T *summand;          // or nullptr
    int64_t col_stride, seen;  // columns from `seen` on do not take part
};

template <typename T>
__device__ __forceinline__ RowMask<T> row_mask(const MaskedRows<T> &call, int64_t row)
{
    RowMask<T> mask = {nullptr, nullptr, call.mask.col_stride, call.cols};
    if (call.mask.kind != CUDA_OPS_MASK_NONE) {
        const int64_t offset = cuda_ops_mask_offset(&call.mask, row);
        if (call.mask.kind == CUDA_OPS_MASK_BOOLEAN)
            mask.takes_part = (const uint8_t *)call.mask.values + offset;
        else
            mask.summand = (const T *)call.mask.values + offset;
    }
    if (call.mask.queries > 0) {
        const int64_t seen = row % call.mask.queries + 1;
        mask.seen = seen < call.cols ? seen : call.cols;
    }
    return mask;
}

template <typename T>
__device__ __forceinline__ accumulate_type<T> score_of(accumulate_type<T> x, const RowMask<T> &mask, int64_t c,
                                                       accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    A score = x * scale;
    if (mask.summand)
        score += load_as_accumulate(mask.summand[c * mask.col_stride]);
    return mask.takes_part && !mask.takes_part[c * mask.col_stride] ? -A(CUDART_INF) : score;
}

// What the exponentials are shifted and multiplied by. Where no score is above -inf and none is NaN, by 0.
template <typename A>
struct Quotient {
    A shift, factor;
};
template <typename A>
__device__ __forceinline__ Quotient<A> quotient_of(log_sum_exp<A> state)
{
    const bool none = state.maximum == -A(CUDART_INF);
    if (state.maximum == A(CUDART_INF))
        return {A(0), A(CUDART_NAN)};
    return {none ? A(0) : state.maximum, none && state.sum == state.sum ? A(0) : A(1) / state.sum};
}

// Over the THREADS that share a row, a warp or a block; they all get it. `scratch`: a value a warp, which nobody may
// write again before another barrier.
template <int THREADS, bool MAXIMUM, typename A>
__device__ __forceinline__ A masked_row_reduce(A value, A *scratch)
{
    constexpr int WARPS = THREADS / WARP_SIZE;
    static_assert((WARPS & (WARPS - 1)) == 0 && WARPS <= WARP_SIZE, "the warps' values are added by a butterfly");
    const auto combine_with = [](A a, A b) { return MAXIMUM ? A(fmax(a, b)) : a + b; };
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
        value = combine_with(value, __shfl_xor_sync(FULL_WARP, value, offset));
    if constexpr (WARPS > 1) {
        if (threadIdx.x % WARP_SIZE == 0)
            scratch[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        value = scratch[threadIdx.x % WARPS];
#pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2)
            value = combine_with(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    return value;
}

static constexpr int ROW_BLOCK = 128; // threads of a block at the least: four rows of a warp each, or one

// Rows of at most THREADS * PIECES pieces.
template <typename T, int THREADS, int PIECES>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS)
    masked_softmax_row_kernel(const __grid_constant__ MaskedRows<T> call)
{
    typedef accumulate_type<T> A;
    constexpr int COUNT = vector16<T>::size;
    typedef vector16<T> P;
    typedef aligned_vector<uint8_t, COUNT> Flags;
    __shared__ A scratch[2][THREADS / WARP_SIZE];
    const int rank = threadIdx.x % THREADS, rows_a_block = blockDim.x / THREADS;
    const P none = vector_of_equal<T, COUNT>(A(0));
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * rows_a_block; first < call.rows;
         first += (int64_t)gridDim.x * rows_a_block) {
        const int64_t row = first + threadIdx.x / THREADS;
        const bool there = row < call.rows;
        const RowMask<T> mask = row_mask(call, there ? row : 0);
        const int pieces = there ? (int)call.cols / COUNT : 0;
        const P *const from = reinterpret_cast<const P *>(call.input + row * call.cols);
        P x[PIECES];
#pragma unroll
        for (int v = 0; v < PIECES; v++) {
            const int piece = rank + v * THREADS;
            x[v] = load_vector_or(from + piece, piece < pieces && (int64_t)piece * COUNT < mask.seen, none);
        }
        A score[PIECES][COUNT], maximum = -A(CUDART_INF);
#pragma unroll
        for (int v = 0; v < PIECES; v++) {
            const int piece = rank + v * THREADS;
            const int64_t c = (int64_t)piece * COUNT;
            const bool is_seen = piece < pieces && c < mask.seen;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                score[v][e] = is_seen ? element_of(x[v], e) * call.scale : -A(CUDART_INF);
            if (is_seen && mask.summand) {
                if (call.mask_pieces) {
                    const P summands = *reinterpret_cast<const P *>(mask.summand + c);
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        score[v][e] += element_of(summands, e);
                } else {
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        score[v][e] += load_as_accumulate(mask.summand[(c + e) * mask.col_stride]);
                }
            }
            if (is_seen && mask.takes_part) {
                Flags flags;
                if (call.mask_pieces) {
                    flags = *reinterpret_cast<const Flags *>(mask.takes_part + c);
                } else {
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        flags.element[e] = mask.takes_part[(c + e) * mask.col_stride];
                }
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    score[v][e] = flags.element[e] ? score[v][e] : -A(CUDART_INF);
            }
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                score[v][e] = c + e < mask.seen ? score[v][e] : -A(CUDART_INF);
                maximum = fmax(maximum, score[v][e]); // passes over NaN, which the sum takes up
            }
        }
        maximum = masked_row_reduce<THREADS, true>(maximum, scratch[0]);
        const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum;
        A sum = 0;
#pragma unroll
        for (int v = 0; v < PIECES; v++) {
            A part = 0;
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                score[v][e] = exp_for<T>(score[v][e] - shift);
                part += score[v][e];
            }
            sum += part;
        }
        sum = masked_row_reduce<THREADS, false>(sum, scratch[1]);
        const A factor = quotient_of(log_sum_exp<A>{maximum, sum}).factor;
        P *const to = reinterpret_cast<P *>(call.output + row * call.cols);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * THREADS < pieces) {
                A result[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    result[e] = score[v][e] * factor;
                to[rank + v * THREADS] = vector_of<T>(result);
            }
    }
}

// A row of any length, at any address, read twice.
template <typename T, int GROUP>
__global__ void __launch_bounds__(GROUP_THREADS) masked_softmax_group_kernel(const __grid_constant__ MaskedRows<T> call)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = GROUP_THREADS / GROUP;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    const group_position position = position_in_group(GROUP, false);
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < call.rows; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t row = first + position.slot;
        const bool there = row < call.rows;
        const RowMask<T> mask = row_mask(call, there ? row : 0);
        const int64_t seen = there ? mask.seen : 0, length = there ? call.cols : 0;
        const T *const x = call.input + row * call.cols;
        T *const y = call.output + row * call.cols;
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t c = position.rank; c < seen; c += GROUP)
            add_element(state, score_of(load_as_accumulate(x[c]), mask, c, call.scale));
        state = group_reduce<GROUP, false>(state, scratch);
        const Quotient<A> quotient = quotient_of(state);
        for (int64_t c = position.rank; c < length; c += GROUP) {
            const A score = c < seen ? score_of(load_as_accumulate(x[c]), mask, c, call.scale) : -A(CUDART_INF);
            y[c] = store_from_accumulate<T>(exp_for<T>(score - quotient.shift) * quotient.factor);
        }
    }
}

// --- rows in parts --------------------------------------------------------------------------------------------------

// Part p of a row has the columns from p * part on; a block has a part.
struct MaskedParts {
    int64_t parts, part;
};

// states: of all parts, [rows, parts].
template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS)
    masked_softmax_states_kernel(log_sum_exp<accumulate_type<T>> *states, const __grid_constant__ MaskedRows<T> call,
                                 const MaskedParts cut)
{
    typedef accumulate_type<T> A;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for (int64_t task = blockIdx.x; task < call.rows * cut.parts; task += gridDim.x) {
        const int64_t row = task / cut.parts, begin = (task - row * cut.parts) * cut.part;
        const RowMask<T> mask = row_mask(call, row);
        const int64_t end = begin + cut.part < mask.seen ? begin + cut.part : mask.seen;
        const T *const x = call.input + row * call.cols;
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t c = begin + threadIdx.x; c < end; c += GROUP_THREADS)
            add_element(state, score_of(load_as_accumulate(x[c]), mask, c, call.scale));
        state = group_reduce<GROUP_THREADS, false>(state, scratch);
        if (threadIdx.x == 0)
            states[task] = state;
    }
}

template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS)
    masked_softmax_parts_kernel(const log_sum_exp<accumulate_type<T>> *states,
                                const __grid_constant__ MaskedRows<T> call, const MaskedParts cut)
{
    typedef accumulate_type<T> A;
    __shared__ log_sum_exp<A> scratch[GROUP_THREADS];
    wait_for_predecessor();
    release_successor();
    for (int64_t task = blockIdx.x; task < call.rows * cut.parts; task += gridDim.x) {
        const int64_t row = task / cut.parts, begin = (task - row * cut.parts) * cut.part;
        const RowMask<T> mask = row_mask(call, row);
        const int64_t end = begin + cut.part < call.cols ? begin + cut.part : call.cols;
        log_sum_exp<A> state = log_sum_exp_of_none<A>();
        for (int64_t p = threadIdx.x; p < cut.parts; p += GROUP_THREADS)
            state = combine(state, states[row * cut.parts + p]);
        const Quotient<A> quotient = quotient_of(group_reduce<GROUP_THREADS, false>(state, scratch));
        const T *const x = call.input + row * call.cols;
        T *const y = call.output + row * call.cols;
        for (int64_t c = begin + threadIdx.x; c < end; c += GROUP_THREADS) {
            const A score = c < mask.seen ? score_of(load_as_accumulate(x[c]), mask, c, call.scale) : -A(CUDART_INF);
            y[c] = store_from_accumulate<T>(exp_for<T>(score - quotient.shift) * quotient.factor);
        }
    }
}

// --- launchers ------------------------------------------------------------------------------------------------------

struct MaskedSoftmaxCall {
    void *output, *workspace;
    const void *input;
    cuda_ops_mask mask;
    double scale;
    int64_t rows, cols;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

template <typename T>
static MaskedRows<T> masked_rows(const MaskedSoftmaxCall &call)
{
    constexpr int COUNT = vector16<T>::size;
    const cuda_ops_mask &mask = call.mask;
    bool pieces = mask.col_stride == 1 && is_aligned_16(mask.values);
    for (int d = 0; d < mask.dims; d++)
        pieces = pieces && mask.strides[d] % COUNT == 0;
    return {
        (T *)call.output, (const T *)call.input, call.rows, call.cols, (accumulate_type<T>)call.scale, mask, pieces};
}

static int64_t pieces_of(const MaskedSoftmaxCall &call)
{
    return call.cols * dtype_size(call.dtype) / 16;
}

static Answer row_supports(const MaskedSoftmaxCall &call, const Device &)
{
    if (!is_aligned_16(call.output) || !is_aligned_16(call.input) || call.cols * dtype_size(call.dtype) % 16 != 0)
        return no("rows are not whole vectors aligned to 16 bytes");
    return pieces_of(call) <= 512 * 4 ? YES : no("rows are too long for registers");
}

template <typename T, int THREADS, int PIECES>
static cuda_ops_status launch_row(const MaskedSoftmaxCall &call)
{
    constexpr int BLOCK = THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS;
    launch_dependent(masked_softmax_row_kernel<T, THREADS, PIECES>,
                     dim3(clamp_grid(ceil_div(call.rows, BLOCK / THREADS))), dim3(BLOCK), 0, call.stream,
                     masked_rows<T>(call));
    return launch_status();
}

static cuda_ops_status row(const MaskedSoftmaxCall &call, const Device &)
{
    const int64_t pieces = pieces_of(call);
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return pieces <= 32        ? launch_row<T, 32, 1>(call)
                             : pieces <= 32 * 4  ? launch_row<T, 32, 4>(call)
                             : pieces <= 128 * 4 ? launch_row<T, 128, 4>(call)
                                                 : launch_row<T, 512, 4>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}

// As softmax/split.cu has it.
static constexpr int WANTED_BLOCKS = 4; // of a multiprocessor
static constexpr int64_t SHORTEST_PART = 4096;

static MaskedParts cut_rows(const MaskedSoftmaxCall &call, const Device &device)
{
    const int64_t most = call.cols / SHORTEST_PART, target = WANTED_BLOCKS * (int64_t)device.multiprocessors;
    const int64_t wanted = call.rows > 0 ? target / call.rows : 1, parts = wanted < most ? wanted : most;
    if (parts <= 1)
        return {1, call.cols};
    const int64_t part = ceil_div(call.cols, parts);
    return {ceil_div(call.cols, part), part};
}

static Answer split_supports(const MaskedSoftmaxCall &, const Device &)
{
    return YES;
}

// By sizes alone: for what lies where, the workspace has been asked for before it is known.
static Answer split_is_fast(const MaskedSoftmaxCall &call, const Device &device)
{
    if (pieces_of(call) <= 512 * 4)
        return no("rows are short enough for registers");
    return cut_rows(call, device).parts >= WANTED_BLOCKS ? YES : no("rows are many");
}

static int64_t split_workspace(const MaskedSoftmaxCall &call, const Device &device)
{
    return 2 * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) * call.rows * cut_rows(call, device).parts;
}

template <typename T>
static cuda_ops_status launch_split(const MaskedSoftmaxCall &call, const MaskedParts &cut)
{
    typedef log_sum_exp<accumulate_type<T>> State;
    const dim3 grid(clamp_grid(call.rows * cut.parts)), block(GROUP_THREADS);
    const MaskedRows<T> rows = masked_rows<T>(call);
    launch_dependent(masked_softmax_states_kernel<T>, grid, block, 0, call.stream, (State *)call.workspace, rows, cut);
    launch_dependent(masked_softmax_parts_kernel<T>, grid, block, 0, call.stream, (const State *)call.workspace, rows,
                     cut);
    return launch_status();
}

static cuda_ops_status split(const MaskedSoftmaxCall &call, const Device &device)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_split<T>(call, cut_rows(call, device)));
    return CUDA_OPS_INVALID_ARGUMENT;
}

static Answer group_supports(const MaskedSoftmaxCall &, const Device &)
{
    return YES;
}

template <typename T, int GROUP>
static cuda_ops_status launch_group(const MaskedSoftmaxCall &call)
{
    launch_dependent(masked_softmax_group_kernel<T, GROUP>,
                     dim3(clamp_grid(ceil_div(call.rows, GROUP_THREADS / GROUP))), dim3(GROUP_THREADS), 0, call.stream,
                     masked_rows<T>(call));
    return launch_status();
}

static cuda_ops_status group(const MaskedSoftmaxCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.cols <= SHORT_ROW ? launch_group<T, WARP_SIZE>(call)
                                                    : launch_group<T, GROUP_THREADS>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}

static PathTable<MaskedSoftmaxCall, 3> table = {
    {"CUDA_OPS_MASKED_SOFTMAX_PATH"},
    {{"row", "masked_softmax.cu", "masked_softmax_row_kernel", row_supports, nullptr, nullptr, row},
     {"split", "masked_softmax.cu", "masked_softmax_states_kernel masked_softmax_parts_kernel", split_supports,
      split_is_fast, split_workspace, split},
     {"thread_group", "masked_softmax.cu", "masked_softmax_group_kernel", group_supports, nullptr, nullptr, group}}};

static MaskedSoftmaxCall call_of(int64_t rows, int64_t cols, cuda_ops_dtype dtype)
{
    return {nullptr, nullptr, nullptr, {}, 1, rows, cols, dtype, nullptr};
}

extern "C" int cuda_ops_masked_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows, int64_t cols,
                                                  cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of(rows, cols, dtype), device);
}

extern "C" size_t cuda_ops_masked_softmax_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype)
{
    return rows == 0 || cols == 0 ? 0 : (size_t)path_workspace(table, call_of(rows, cols, dtype));
}

extern "C" cuda_ops_status cuda_ops_masked_softmax_forward_cuda(void *output, void *workspace, const void *input,
                                                                const cuda_ops_mask *mask, double scale, int64_t rows,
                                                                int64_t cols, cuda_ops_dtype dtype,
                                                                cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    if (mask->dims > CUDA_OPS_MASK_DIMS)
        return CUDA_OPS_INVALID_ARGUMENT;
    return run_path(table, MaskedSoftmaxCall{output, workspace, input, *mask, scale, rows, cols, dtype, stream});
}
