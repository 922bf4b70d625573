// embedding's gradient: grad_weight[r] = the sum of grad_output[i] over the i whose index is r; and position_embedding's,
// where these are the r + k * positions.
// The positions of each row are found by a stable sort of the indices (sort.cuh; those of the position are known). A
// group of threads then adds up a row, or a segment of its columns, in that order and in float32 (sums.cuh), and writes it
// once; rows that no index names are written as zeros, or left alone where the sums are added to what is there. No
// atomics on floats: results repeat bit by bit.
// Bound by memory: grad_output is read once and grad_weight written once; the sort moves 40 bytes an index.
#include "common/loss.cuh"
#include "cuda_ops/embedding.h"
#include "embedding/sums.cuh"

template <typename T, typename A, int SIZE>
__device__ __forceinline__ void store_sums(aligned_vector<T, SIZE> *to, A (&sum)[SIZE], bool accumulate)
{
    if (accumulate) {
        const aligned_vector<T, SIZE> before = *to;
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            sum[e] += element_of(before, e);
    }
    *to = vector_of<T>(sum);
}

// is_wide: grad_weight is float32 beside a half grad_output.
template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS, RESIDENT)
    embedding_backward_kernel(void *grad_weight, const accumulate_type<T> *chunks, const T *grad_output,
                              const RowSlots of, bool scale_by_frequency, bool accumulate, bool is_wide,
                              const RowTasks tasks)
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
        if (accumulate && summands == 0)
            continue;
        HeldSums<T, SIZE> held = sum_of_row<T, SIZE>(chunks, grad_output, of, range, tasks.vectors, task, group);
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
                store_sums<A>((Sum *)grad_weight + task.row * tasks.vectors + v, held.sum[i], accumulate);
            else
                store_sums<T>((aligned_vector<T, SIZE> *)grad_weight + task.row * tasks.vectors + v, held.sum[i],
                              accumulate);
        }
    }
}

template <typename T, int SIZE>
static cuda_ops_status launch_sums(void *grad_weight, void *chunks, const T *grad_output, const RowSlots &of,
                                   int64_t rows, int64_t cols, bool may_be_long, bool scale_by_frequency,
                                   bool accumulate, bool is_wide, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const RowTasks tasks = row_tasks(rows, cols / SIZE, HELD);
    if (may_be_long)
        launch_chunk_sums<T, SIZE>(chunks, grad_output, of, tasks, stream);
    launch_dependent(embedding_backward_kernel<T, SIZE>, row_tasks_grid(tasks), EMBEDDING_THREADS, 0, stream,
                     grad_weight, (const A *)chunks, grad_output, of, scale_by_frequency, accumulate, is_wide, tasks);
    return launch_status();
}

static cuda_ops_status sums(void *grad_weight, void *chunks, const void *grad_output, const RowSlots &of, int64_t rows,
                            int64_t cols, bool may_be_long, bool scale_by_frequency, bool accumulate,
                            cuda_ops_dtype dtype, cuda_ops_dtype output_dtype, cudaStream_t stream)
{
    const bool is_wide = dtype != output_dtype;
    CUDA_OPS_DISPATCH(output_dtype, T, {
        constexpr int SIZE = vector16<T>::size;
        const bool vectors = cols % SIZE == 0 && is_aligned_16(grad_weight) && is_aligned_16(grad_output);
        return vectors ? launch_sums<T, SIZE>(grad_weight, chunks, (const T *)grad_output, of, rows, cols, may_be_long,
                                              scale_by_frequency, accumulate, is_wide, stream)
                       : launch_sums<T, 1>(grad_weight, chunks, (const T *)grad_output, of, rows, cols, may_be_long,
                                           scale_by_frequency, accumulate, is_wide, stream);
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

// --- workspaces -----------------------------------------------------------------------------------------------------

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
                                                            int scale_by_frequency, int accumulate,
                                                            cuda_ops_dtype dtype, cuda_ops_dtype output_dtype,
                                                            cuda_ops_stream stream)
{
    if ((index_bytes != 4 && index_bytes != 8) || count > INT32_MAX || rows >= INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (!known_dtypes(dtype, output_dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    const SortedIndices sorted = sort_indices(workspace, indices, index_bytes, count, rows, padding_index, stream);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const RowSlots of = {sorted, count, 1, rows, count, 0, 0};
    char *const at = (char *)workspace + sort_bytes(count, rows);
    return sums(grad_weight, at, grad_output, of, rows, cols, count > CHUNK, scale_by_frequency != 0, accumulate != 0,
                dtype, output_dtype, stream);
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
    const RowSlots of = {{}, batch * positions, 1, rows, 0, batch, positions};
    return sums(grad_position_weight, workspace, grad_output, of, rows, cols, batch > CHUNK, false, false, dtype,
                output_dtype, stream);
}
