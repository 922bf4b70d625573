// How groups of threads share the rows of embedding's tables and outputs: a group, a power of two of at most a warp, takes
// a row, or one of the equal segments of a long one, and a thread every group'th vector of it.
#ifndef CUDA_OPS_EMBEDDING_ROWS_CUH
#define CUDA_OPS_EMBEDDING_ROWS_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int EMBEDDING_THREADS = 128;

// `rows` of `vectors` vectors, in `segments` of at most `segment`, by groups of 1 << group_bits.
struct RowTasks {
    int64_t rows, vectors, segments, segment;
    int group_bits;
};

struct RowTask {
    int64_t row, begin, end; // this thread's vectors: begin, begin + group, ... below end
    bool first;              // of the group, and of the row
};

// A thread takes at most `most` vectors of a segment. vectors is not 0.
static inline RowTasks row_tasks(int64_t rows, int64_t vectors, int most)
{
    RowTasks tasks = {rows, vectors, 1, vectors, 0};
    while (tasks.group_bits < 5 && (int64_t)1 << tasks.group_bits < vectors)
        tasks.group_bits++;
    tasks.segments = ceil_div(vectors, (int64_t)most << tasks.group_bits);
    tasks.segment = ceil_div(vectors, tasks.segments);
    return tasks;
}

static inline unsigned int row_tasks_grid(const RowTasks &tasks)
{
    return clamp_grid(ceil_div(tasks.rows * tasks.segments, EMBEDDING_THREADS >> tasks.group_bits));
}

// The tasks of a thread are its group's in a grid-stride loop.
__device__ __forceinline__ int64_t first_task(const RowTasks &tasks)
{
    return global_thread_index() >> tasks.group_bits;
}
__device__ __forceinline__ int64_t task_step(const RowTasks &tasks)
{
    return global_thread_count() >> tasks.group_bits;
}

__device__ __forceinline__ RowTask task_of(const RowTasks &tasks, int64_t number)
{
    const int rank = (int)threadIdx.x & ((1 << tasks.group_bits) - 1);
    RowTask task;
    task.row = tasks.segments == 1 ? number : number / tasks.segments;
    const int64_t start = (number - task.row * tasks.segments) * tasks.segment, end = start + tasks.segment;
    task.begin = start + rank;
    task.end = end < tasks.vectors ? end : tasks.vectors;
    task.first = task.begin == 0;
    return task;
}

__device__ __forceinline__ int64_t index_at(const void *indices, int index_bytes, int64_t i)
{
    return index_bytes == 4 ? ((const int32_t *)indices)[i] : ((const int64_t *)indices)[i];
}

#endif
