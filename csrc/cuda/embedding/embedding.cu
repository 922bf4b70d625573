// embedding: output[i] = weight[indices[i]]; token_position_embedding: output[b, t] = token_weight[tokens[b, t]] +
// position_weight[t].
// Maps a group of threads to a row (rows.cuh): its index is read once, then up to 64 bytes a thread are in flight
// together, 16 bytes a load where rows and addresses are multiples of that. embedding copies bytes, whatever the dtype;
// the other one loads the weights in theirs, and rounds once to that of the output.
// Bound by memory: a read and a write of the output, 8 bytes an index beside it; the position's rows come from the cache.
#include "cuda_ops/embedding.h"

#include "common/loss.cuh"
#include "embedding/rows.cuh"

static constexpr int COPIES = 4, SUMS = 2; // vectors of a thread that are in flight together

// Piece: what one load moves; all bits set are NaN in every dtype.
template <typename Piece>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(Piece *output, cuda_ops_index_error *error, const Piece *weight, const void *indices,
                             int index_bytes, int64_t rows, const RowTasks tasks)
{
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const int64_t index = index_at(indices, index_bytes, task.row);
        const bool good = is_class(index, rows);
        if (!good && task.first)
            record_bad_index(error, task.row, index, rows);
        const Piece *const from = weight + (good ? index : 0) * tasks.vectors;
        Piece *const to = output + task.row * tasks.vectors;
        Piece pieces[COPIES];
        memset(pieces, 0xff, sizeof(pieces));
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (good && task.begin + i * group < task.end)
                pieces[i] = from[task.begin + i * group];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (task.begin + i * group < task.end)
                to[task.begin + i * group] = pieces[i];
    }
}

// W: of the weights, O: of the output.
template <typename W, typename O, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    token_position_embedding_kernel(O *output, cuda_ops_index_error *error, const W *token_weight,
                                    const W *position_weight, const void *tokens, int index_bytes, int64_t positions,
                                    int64_t rows, const RowTasks tasks)
{
    typedef accumulate_type<W> A;
    typedef aligned_vector<W, SIZE> In;
    typedef aligned_vector<O, SIZE> Out;
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const int64_t index = index_at(tokens, index_bytes, task.row);
        const bool good = is_class(index, rows);
        if (!good && task.first)
            record_bad_index(error, task.row, index, rows);
        const In *const token = (const In *)token_weight + (good ? index : 0) * tasks.vectors;
        const In *const position = (const In *)position_weight + task.row % positions * tasks.vectors;
        Out *const to = (Out *)output + task.row * tasks.vectors;
        In a[SUMS], b[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (good && task.begin + i * group < task.end) {
                a[i] = token[task.begin + i * group];
                b[i] = position[task.begin + i * group];
            }
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            if (task.begin + i * group >= task.end)
                continue;
            A sum[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                sum[e] = good ? element_of(a[i], e) + element_of(b[i], e) : A(CUDART_NAN);
            to[task.begin + i * group] = vector_of<O>(sum);
        }
    }
}

template <typename Piece>
static cuda_ops_status launch_copy(void *output, cuda_ops_index_error *error, const void *weight, const void *indices,
                                   int index_bytes, int64_t count, int64_t rows, int64_t row_bytes, cudaStream_t stream)
{
    const RowTasks tasks = row_tasks(count, row_bytes / (int64_t)sizeof(Piece), COPIES);
    launch_dependent(embedding_forward_kernel<Piece>, row_tasks_grid(tasks), EMBEDDING_THREADS, 0, stream,
                     (Piece *)output, error, (const Piece *)weight, indices, index_bytes, rows, tasks);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_embedding_forward_cuda(void *output, cuda_ops_index_error *error,
                                                           const void *weight, const void *indices, int index_bytes,
                                                           int64_t count, int64_t rows, int64_t cols,
                                                           cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (index_bytes != 4 && index_bytes != 8)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype < CUDA_OPS_FLOAT32 || dtype > CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (count == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    const int64_t row_bytes = cols * dtype_size(dtype);
    // The most that addresses and rows are multiples of.
    const uintptr_t bits = (uintptr_t)output | (uintptr_t)weight | (uintptr_t)row_bytes;
    const auto launch = bits % 16 == 0  ? launch_copy<uint4>
                        : bits % 8 == 0 ? launch_copy<uint2>
                        : bits % 4 == 0 ? launch_copy<uint32_t>
                                        : launch_copy<uint16_t>;
    return launch(output, error, weight, indices, index_bytes, count, rows, row_bytes, stream);
}

template <typename W, typename O>
static cuda_ops_status launch_sum(O *output, cuda_ops_index_error *error, const W *token_weight,
                                  const W *position_weight, const void *tokens, int index_bytes, int64_t batch,
                                  int64_t positions, int64_t rows, int64_t cols, cudaStream_t stream)
{
    constexpr int SIZE = vector16<O>::size;
    const bool vectors =
        cols % SIZE == 0 && is_aligned_16(output) && is_aligned_16(token_weight) && is_aligned_16(position_weight);
    const RowTasks tasks = row_tasks(batch * positions, vectors ? cols / SIZE : cols, SUMS);
    const dim3 grid(row_tasks_grid(tasks)), block(EMBEDDING_THREADS);
    if (vectors)
        launch_dependent(token_position_embedding_kernel<W, O, SIZE>, grid, block, 0, stream, output, error,
                         token_weight, position_weight, tokens, index_bytes, positions, rows, tasks);
    else
        launch_dependent(token_position_embedding_kernel<W, O, 1>, grid, block, 0, stream, output, error, token_weight,
                         position_weight, tokens, index_bytes, positions, rows, tasks);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_token_position_embedding_forward_cuda(
    void *output, cuda_ops_index_error *error, const void *token_weight, const void *position_weight,
    const void *tokens, int index_bytes, int64_t batch, int64_t positions, int64_t rows, int64_t cols,
    cuda_ops_dtype dtype, cuda_ops_dtype output_dtype, cuda_ops_stream stream)
{
    if (index_bytes != 4 && index_bytes != 8)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype != output_dtype && !(dtype == CUDA_OPS_FLOAT32 && dtype_size(output_dtype) == 2))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (batch == 0 || positions == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(output_dtype, O, {
        if constexpr (sizeof(O) == 2)
            if (dtype == CUDA_OPS_FLOAT32)
                return launch_sum((O *)output, error, (const float *)token_weight, (const float *)position_weight,
                                  tokens, index_bytes, batch, positions, rows, cols, stream);
        return launch_sum((O *)output, error, (const O *)token_weight, (const O *)position_weight, tokens, index_bytes,
                          batch, positions, rows, cols, stream);
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}
