// embedding's gradient: grad_weight[r] = the sum of grad_output[i] over the i whose index is r; and position_embedding's,
// where these are the r + k * positions.
// The positions of each row are found by a stable sort of the indices (sort.cuh; those of the position are known). A
// group of threads then adds up a row, or a segment of its columns, in that order and in float32, two rows of
// grad_output under way together, and writes it once; rows that no index names are written as zeros. Rows of more than
// CHUNK summands, as every letter of a text is, are first added up by chunks, each by a group of its own, then the
// chunks' sums in order. No atomics on floats: results repeat bit by bit.
// Bound by memory: grad_output is read once and grad_weight written once; the sort moves 40 bytes an index.
#include "common/loss.cuh"
#include "cuda_ops/embedding.h"
#include "embedding/sort.cuh"

static constexpr int CHUNK = 64;
static constexpr int HELD = 3;     // vectors of a row that a thread adds up at a time
static constexpr int RESIDENT = 6; // blocks of a multiprocessor at the least

// Which rows of grad_output belong to a row of the table. Sorted: its slots are slots[p] for p in its range. Else, for
// positions, [batch, positions] seen as sorted: p = row * batch + b stands for b * positions + row.
struct RowSlots {
    const int2 *ranges; // NULL for positions
    const int *keys, *slots;
    int64_t count, batch, positions;
};

struct SlotRange {
    int64_t begin, end;
};

__device__ __forceinline__ SlotRange range_of(const RowSlots &of, int64_t row)
{
    if (of.ranges) {
        const int2 range = of.ranges[row];
        return {range.x, range.y};
    }
    return row < of.positions ? SlotRange{row * of.batch, (row + 1) * of.batch} : SlotRange{0, 0};
}

__device__ __forceinline__ int64_t slot_at(const RowSlots &of, int64_t row, int64_t p)
{
    return of.ranges ? of.slots[p] : (p - row * of.batch) * of.positions + row;
}

// A row's chunks begin at range.begin + k * CHUNK. Of CHUNK neighbouring positions, a window, at most one is the
// beginning of the first chunk of a long row (which does not end in it), and one that of a later chunk; so the sum of a
// chunk has a place of its own: two for each window.
__device__ __forceinline__ int64_t place_of_chunk(const SlotRange &range, int64_t k)
{
    return 2 * ((range.begin + k * CHUNK) / CHUNK) + (k == 0 ? 1 : 0);
}

template <typename T, int SIZE>
struct HeldSums {
    accumulate_type<T> sum[HELD][SIZE];
};

// A thread's vectors of a row, zeros for those that are not there, so that all are added without a question.
template <typename V>
__device__ __forceinline__ void load_vectors(V (&x)[HELD], const V *row, const RowTask &task, int group, bool there)
{
    V zero;
    memset(&zero, 0, sizeof(zero));
    const int left = there ? (int)(task.end - task.begin) : 0;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        x[i] = load_vector_or(row + task.begin + i * group, i * group < left, zero);
}

template <typename V, typename T, int SIZE>
__device__ __forceinline__ void add_vectors(HeldSums<T, SIZE> &held, const V (&x)[HELD])
{
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            held.sum[i][e] += element_of(x[i], e);
}

template <typename T, int SIZE>
__device__ __forceinline__ HeldSums<T, SIZE> sum_of_slots(const T *grad_output, const RowSlots &of, int64_t row,
                                                          int64_t begin, int64_t end, int64_t vectors,
                                                          const RowTask &task, int group)
{
    typedef aligned_vector<T, SIZE> V;
    const V *const rows = (const V *)grad_output;
    HeldSums<T, SIZE> held = {};
    // The next slots are read before the rows of these are waited for.
    int64_t slot = begin < end ? slot_at(of, row, begin) : 0, other = begin + 1 < end ? slot_at(of, row, begin + 1) : 0;
#pragma unroll 1
    for (int64_t p = begin; p < end; p += 2) {
        V x[HELD], y[HELD];
        load_vectors(x, rows + slot * vectors, task, group, true);
        load_vectors(y, rows + other * vectors, task, group, p + 1 < end);
        slot = p + 2 < end ? slot_at(of, row, p + 2) : 0;
        other = p + 3 < end ? slot_at(of, row, p + 3) : 0;
        add_vectors(held, x);
        add_vectors(held, y);
    }
    return held;
}

// The sums of the chunks of rows of more than CHUNK slots: chunks[place] is a row of the accumulation type. tasks.rows
// are the places.
template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS, RESIDENT)
    sum_chunks_kernel(accumulate_type<T> *chunks, const T *grad_output, const RowSlots of, int64_t rows,
                      const RowTasks tasks)
{
    typedef aligned_vector<accumulate_type<T>, SIZE> Sum;
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const int64_t window = task.row / 2 * CHUNK;
        const bool is_first = task.row % 2 == 1;
        // A long row whose first chunk begins in the window goes beyond it; one of another chunk has come from before.
        const int64_t probe = is_first ? window + CHUNK : window;
        if (probe >= of.count)
            continue;
        const int64_t row = of.ranges ? of.keys[probe] : probe / of.batch;
        if (row >= rows)
            continue;
        const SlotRange range = range_of(of, row);
        if (range.end - range.begin <= CHUNK || is_first != (range.begin >= window) || range.begin >= window + CHUNK)
            continue;
        const int64_t begin = is_first ? range.begin : range.begin + ceil_div(window - range.begin, CHUNK) * CHUNK;
        if (begin >= range.end)
            continue;
        const int64_t end = begin + CHUNK < range.end ? begin + CHUNK : range.end;
        const HeldSums<T, SIZE> held =
            sum_of_slots<T, SIZE>(grad_output, of, row, begin, end, tasks.vectors, task, group);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (task.begin + i * group < task.end)
                ((Sum *)chunks)[task.row * tasks.vectors + task.begin + i * group] =
                    vector_of<accumulate_type<T>>(held.sum[i]);
    }
}

// is_wide: grad_weight is float32 beside a half grad_output.
template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS, RESIDENT)
    embedding_backward_kernel(void *grad_weight, const accumulate_type<T> *chunks, const T *grad_output,
                              const RowSlots of, bool scale_by_frequency, bool is_wide, const RowTasks tasks)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<A, SIZE> Sum;
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const SlotRange range = range_of(of, task.row);
        const int64_t summands = range.end - range.begin;
        HeldSums<T, SIZE> held = {};
        if (summands <= CHUNK)
            held = sum_of_slots<T, SIZE>(grad_output, of, task.row, range.begin, range.end, tasks.vectors, task, group);
        else
#pragma unroll 1
            for (int64_t k = 0; k * CHUNK < summands; k++) {
                Sum x[HELD];
                load_vectors(x, (const Sum *)chunks + place_of_chunk(range, k) * tasks.vectors, task, group, true);
                add_vectors(held, x);
            }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int64_t v = task.begin + i * group;
            if (v >= task.end)
                continue;
            if (scale_by_frequency && summands > 1)
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    held.sum[i][e] /= A(summands);
            if (sizeof(T) == 2 && is_wide)
                ((Sum *)grad_weight)[task.row * tasks.vectors + v] = vector_of<A>(held.sum[i]);
            else
                ((aligned_vector<T, SIZE> *)grad_weight)[task.row * tasks.vectors + v] = vector_of<T>(held.sum[i]);
        }
    }
}

template <typename T, int SIZE>
static cuda_ops_status launch_sums(void *grad_weight, void *chunks, const T *grad_output, const RowSlots &of,
                                   int64_t rows, int64_t cols, bool may_be_long, bool scale_by_frequency, bool is_wide,
                                   cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const RowTasks tasks = row_tasks(rows, cols / SIZE, HELD);
    RowTasks of_chunks = tasks;
    of_chunks.rows = 2 * ceil_div(of.count, CHUNK);
    if (may_be_long)
        launch_dependent(sum_chunks_kernel<T, SIZE>, row_tasks_grid(of_chunks), EMBEDDING_THREADS, 0, stream,
                         (A *)chunks, grad_output, of, rows, of_chunks);
    launch_dependent(embedding_backward_kernel<T, SIZE>, row_tasks_grid(tasks), EMBEDDING_THREADS, 0, stream,
                     grad_weight, (const A *)chunks, grad_output, of, scale_by_frequency, is_wide, tasks);
    return launch_status();
}

static cuda_ops_status sums(void *grad_weight, void *chunks, const void *grad_output, const RowSlots &of, int64_t rows,
                            int64_t cols, bool may_be_long, bool scale_by_frequency, cuda_ops_dtype dtype,
                            cuda_ops_dtype output_dtype, cudaStream_t stream)
{
    const bool is_wide = dtype != output_dtype;
    CUDA_OPS_DISPATCH(output_dtype, T, {
        constexpr int SIZE = vector16<T>::size;
        const bool vectors = cols % SIZE == 0 && is_aligned_16(grad_weight) && is_aligned_16(grad_output);
        return vectors ? launch_sums<T, SIZE>(grad_weight, chunks, (const T *)grad_output, of, rows, cols, may_be_long,
                                              scale_by_frequency, is_wide, stream)
                       : launch_sums<T, 1>(grad_weight, chunks, (const T *)grad_output, of, rows, cols, may_be_long,
                                           scale_by_frequency, is_wide, stream);
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

// --- workspaces -----------------------------------------------------------------------------------------------------

static int64_t padded(int64_t bytes)
{
    return ceil_div(bytes, 16) * 16;
}

static int64_t chunks_bytes(int64_t count, int64_t cols, cuda_ops_dtype dtype)
{
    return count <= CHUNK ? 0 : 2 * ceil_div(count, CHUNK) * cols * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

// Two buffers of keys and of slots, the counts of digits, the ranges, then the chunks.
static int64_t sort_bytes(int64_t count, int64_t rows)
{
    return 4 * padded(4 * count) + 4 * MAX_TILES * DIGITS + padded(8 * rows);
}

extern "C" size_t cuda_ops_embedding_backward_workspace_cuda(int64_t count, int64_t rows, int64_t cols,
                                                             cuda_ops_dtype dtype)
{
    return (size_t)(sort_bytes(count, rows) + chunks_bytes(count, cols, dtype));
}

extern "C" size_t cuda_ops_position_embedding_backward_workspace_cuda(int64_t batch, int64_t positions, int64_t cols,
                                                                      cuda_ops_dtype dtype)
{
    return batch <= CHUNK ? 0 : (size_t)chunks_bytes(batch * positions, cols, dtype);
}

// --- launchers ------------------------------------------------------------------------------------------------------

static bool known_dtypes(cuda_ops_dtype dtype, cuda_ops_dtype output_dtype)
{
    return dtype == output_dtype || (dtype == CUDA_OPS_FLOAT32 && dtype_size(output_dtype) == 2);
}

extern "C" cuda_ops_status cuda_ops_embedding_backward_cuda(void *grad_weight, void *workspace, const void *grad_output,
                                                            const void *indices, int index_bytes, int64_t count,
                                                            int64_t rows, int64_t cols, int64_t padding_index,
                                                            int scale_by_frequency, cuda_ops_dtype dtype,
                                                            cuda_ops_dtype output_dtype, cuda_ops_stream stream)
{
    if ((index_bytes != 4 && index_bytes != 8) || count > INT32_MAX || rows >= INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (!known_dtypes(dtype, output_dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    char *at = (char *)workspace;
    const auto take = [&](int64_t bytes) {
        char *const taken = at;
        at += padded(bytes);
        return taken;
    };
    int *keys[2], *slots[2];
    for (int i = 0; i < 2; i++) {
        keys[i] = (int *)take(4 * count);
        slots[i] = (int *)take(4 * count);
    }
    int *const counts = (int *)take(4 * MAX_TILES * DIGITS);
    int2 *const ranges = (int2 *)take(8 * rows);
    // Keys go up to `rows`.
    int bits = 1;
    while (rows >> bits != 0)
        bits++;
    const int passes = (int)ceil_div(bits, DIGIT_BITS), digit_bits = (int)ceil_div(bits, passes);
    const int64_t tile = count == 0 ? ROUND : sort_tile(count);
    const int tiles = count == 0 ? 1 : (int)ceil_div(count, tile);
    SortInput in = {nullptr, nullptr, indices, index_bytes, count, rows, padding_index};
    for (int pass = 0; pass < passes; pass++) {
        const int shift = pass * digit_bits, mask = (1 << digit_bits) - 1, to = pass % 2;
        launch_dependent(count_digits_kernel, tiles, DIGITS, 0, stream, counts, pass == 0 ? ranges : nullptr, in, tile,
                         shift, mask);
        launch_dependent(place_by_digit_kernel, tiles, DIGITS, 0, stream, keys[to], slots[to], (const int *)counts, in,
                         tiles, tile, shift, mask);
        in.keys = keys[to];
        in.slots = slots[to];
    }
    launch_dependent(find_ranges_kernel, clamp_grid(ceil_div(count == 0 ? 1 : count, DIGITS)), DIGITS, 0, stream,
                     ranges, in.keys, count, rows);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const RowSlots of = {ranges, in.keys, in.slots, count, 0, 0};
    return sums(grad_weight, at, grad_output, of, rows, cols, count > CHUNK, scale_by_frequency != 0, dtype,
                output_dtype, stream);
}

extern "C" cuda_ops_status cuda_ops_position_embedding_backward_cuda(void *grad_position_weight, void *workspace,
                                                                     const void *grad_output, int64_t batch,
                                                                     int64_t positions, int64_t rows, int64_t cols,
                                                                     cuda_ops_dtype dtype, cuda_ops_dtype output_dtype,
                                                                     cuda_ops_stream stream)
{
    if (positions > rows)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (!known_dtypes(dtype, output_dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    const RowSlots of = {nullptr, nullptr, nullptr, batch * positions, batch, positions};
    return sums(grad_position_weight, workspace, grad_output, of, rows, cols, batch > CHUNK, false, dtype, output_dtype,
                stream);
}
