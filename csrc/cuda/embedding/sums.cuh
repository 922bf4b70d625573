// Sums of the rows that indices name: a group of threads adds up those of one row of the result, or a segment of their
// columns, in the order in which a stable sort (sort.cuh) has put them, in the accumulation type and two rows under way
// together. Rows of more than CHUNK summands are first added up by chunks, each by a group of its own, then the chunks'
// sums in order.
#ifndef CUDA_OPS_EMBEDDING_SUMS_CUH
#define CUDA_OPS_EMBEDDING_SUMS_CUH

#include "embedding/sort.cuh"

static constexpr int CHUNK = 64;
static constexpr int HELD = 3;     // vectors of a row that a thread adds up at a time
static constexpr int RESIDENT = 6; // blocks of a multiprocessor at the least

// Which of the rows that are added up, the slots, belong to a row of the result. Sorted: slots[p] for p in the row's
// range; where both have a dimension outside of these rows, `outer` times `of_table` and `of_index` rows, the same in
// each. Else, for positions, [batch, positions] seen as sorted: p = row * batch + b stands for b * positions + row.
struct RowSlots {
    SortedIndices sorted; // keys, slots and ranges are NULL for positions
    int64_t count;        // of all slots
    int64_t outer, of_table, of_index;
    int64_t batch, positions;
};

struct SlotRange {
    int64_t begin, end;
    int64_t row, first; // the row, and the first slot of its part of `outer`
};

__device__ __forceinline__ SlotRange range_of(const RowSlots &of, int64_t row)
{
    if (of.sorted.ranges) {
        const int64_t part = of.outer == 1 ? 0 : row / of.of_table, first = part * of.of_index;
        const int2 range = of.sorted.ranges[row - part * of.of_table];
        return {first + range.x, first + range.y, row, first};
    }
    return row < of.positions ? SlotRange{row * of.batch, (row + 1) * of.batch, row, 0} : SlotRange{0, 0, row, 0};
}

__device__ __forceinline__ int64_t slot_at(const RowSlots &of, const SlotRange &range, int64_t p)
{
    return of.sorted.ranges ? range.first + of.sorted.slots[p - range.first]
                            : (p - range.row * of.batch) * of.positions + range.row;
}

// The row to which position p belongs, or -1.
__device__ __forceinline__ int64_t row_at(const RowSlots &of, int64_t p)
{
    if (!of.sorted.ranges)
        return p / of.batch;
    const int64_t part = of.outer == 1 ? 0 : p / of.of_index;
    const int64_t key = of.sorted.keys[p - part * of.of_index];
    return key < of.of_table ? part * of.of_table + key : -1;
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
__device__ __forceinline__ HeldSums<T, SIZE> sum_of_slots(const T *source, const RowSlots &of, const SlotRange &range,
                                                          int64_t begin, int64_t end, int64_t vectors,
                                                          const RowTask &task, int group)
{
    typedef aligned_vector<T, SIZE> V;
    const V *const rows = (const V *)source;
    HeldSums<T, SIZE> held = {};
    // The next slots are read before the rows of these are waited for.
    int64_t slot = begin < end ? slot_at(of, range, begin) : 0,
            other = begin + 1 < end ? slot_at(of, range, begin + 1) : 0;
#pragma unroll 1
    for (int64_t p = begin; p < end; p += 2) {
        V x[HELD], y[HELD];
        load_vectors(x, rows + slot * vectors, task, group, true);
        load_vectors(y, rows + other * vectors, task, group, p + 1 < end);
        slot = p + 2 < end ? slot_at(of, range, p + 2) : 0;
        other = p + 3 < end ? slot_at(of, range, p + 3) : 0;
        add_vectors(held, x);
        add_vectors(held, y);
    }
    return held;
}

// The sums of the chunks of rows of more than CHUNK slots: chunks[place] is a row of the accumulation type. tasks.rows
// are the places.
template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS, RESIDENT)
    sum_chunks_kernel(accumulate_type<T> *chunks, const T *source, const RowSlots of, const RowTasks tasks)
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
        const int64_t row = row_at(of, probe);
        if (row < 0)
            continue;
        const SlotRange range = range_of(of, row);
        if (range.end - range.begin <= CHUNK || is_first != (range.begin >= window) || range.begin >= window + CHUNK)
            continue;
        const int64_t begin = is_first ? range.begin : range.begin + ceil_div(window - range.begin, CHUNK) * CHUNK;
        if (begin >= range.end)
            continue;
        const int64_t end = begin + CHUNK < range.end ? begin + CHUNK : range.end;
        const HeldSums<T, SIZE> held = sum_of_slots<T, SIZE>(source, of, range, begin, end, tasks.vectors, task, group);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (task.begin + i * group < task.end)
                ((Sum *)chunks)[task.row * tasks.vectors + task.begin + i * group] =
                    vector_of<accumulate_type<T>>(held.sum[i]);
    }
}

// The sum of a row's slots, once sum_chunks_kernel has run where there are more than CHUNK of them.
template <typename T, int SIZE>
__device__ __forceinline__ HeldSums<T, SIZE> sum_of_row(const accumulate_type<T> *chunks, const T *source,
                                                        const RowSlots &of, const SlotRange &range, int64_t vectors,
                                                        const RowTask &task, int group)
{
    typedef aligned_vector<accumulate_type<T>, SIZE> Sum;
    const int64_t summands = range.end - range.begin;
    if (summands <= CHUNK)
        return sum_of_slots<T, SIZE>(source, of, range, range.begin, range.end, vectors, task, group);
    HeldSums<T, SIZE> held = {};
#pragma unroll 1
    for (int64_t k = 0; k * CHUNK < summands; k++) {
        Sum x[HELD];
        load_vectors(x, (const Sum *)chunks + place_of_chunk(range, k) * vectors, task, group, true);
        add_vectors(held, x);
    }
    return held;
}

// Bytes of the chunks' sums.
static inline int64_t chunks_bytes(int64_t count, int64_t cols, cuda_ops_dtype dtype)
{
    return count <= CHUNK ? 0 : 2 * ceil_div(count, CHUNK) * cols * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

template <typename T, int SIZE>
static void launch_chunk_sums(void *chunks, const T *source, const RowSlots &of, const RowTasks &tasks,
                              cudaStream_t stream)
{
    RowTasks of_chunks = tasks;
    of_chunks.rows = 2 * ceil_div(of.count, CHUNK);
    launch_dependent(sum_chunks_kernel<T, SIZE>, row_tasks_grid(of_chunks), EMBEDDING_THREADS, 0, stream,
                     (accumulate_type<T> *)chunks, source, of, of_chunks);
}

#endif
