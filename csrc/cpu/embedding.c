/* embedding on the CPU: output[i] = weight[indices[i]], the gradient of which is a sum of rows of grad_output.
 * Bound by memory: rows are copied, or added up; each thread adds up the rows of the table that are its own, in the order
 * of the indices, which it reads for that from the first to the last. */
#ifndef REAL

#include "cuda_ops/embedding.h"

#include "common/common.h"

static int64_t embedding_index(const void *indices, int index_bytes, int64_t i)
{
    return index_bytes == 4 ? ((const int32_t *)indices)[i] : ((const int64_t *)indices)[i];
}

#define REAL float
#define FN(name) name##_f32
#include "embedding.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "embedding.c"

#include "common/undef_real.h"

static cuda_ops_status check(int index_bytes, cuda_ops_dtype dtype)
{
    if (index_bytes != 4 && index_bytes != 8)
        return CUDA_OPS_INVALID_ARGUMENT;
    return dtype == CUDA_OPS_FLOAT32 || dtype == CUDA_OPS_FLOAT64 ? CUDA_OPS_SUCCESS : CUDA_OPS_UNSUPPORTED_DTYPE;
}

int64_t cuda_ops_embedding_find_bad_index_cpu(const void *indices, int index_bytes, int64_t count, int64_t rows)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = embedding_index(indices, index_bytes, i);
        if (index < 0 || index >= rows)
            return i;
    }
    return -1;
}

cuda_ops_status cuda_ops_embedding_forward_cpu(void *output, const void *weight, const void *indices, int index_bytes,
                                               int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                               cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check(index_bytes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        embedding_forward_f32(output, weight, NULL, indices, index_bytes, rows, cols, 1, begin, end);
    else
        embedding_forward_f64(output, weight, NULL, indices, index_bytes, rows, cols, 1, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_token_position_embedding_forward_cpu(void *output, const void *token_weight,
                                                              const void *position_weight, const void *tokens,
                                                              int index_bytes, int64_t rows, int64_t cols,
                                                              int64_t positions, int64_t begin, int64_t end,
                                                              cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check(index_bytes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        embedding_forward_f32(output, token_weight, position_weight, tokens, index_bytes, rows, cols, positions, begin,
                              end);
    else
        embedding_forward_f64(output, token_weight, position_weight, tokens, index_bytes, rows, cols, positions, begin,
                              end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_embedding_backward_cpu(void *grad_weight, int64_t *frequencies, const void *grad_output,
                                                const void *indices, int index_bytes, int64_t count, int64_t cols,
                                                int64_t padding_index, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check(index_bytes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        embedding_backward_f32(grad_weight, frequencies, grad_output, indices, index_bytes, count, cols, padding_index,
                               begin, end);
    else
        embedding_backward_f64(grad_weight, frequencies, grad_output, indices, index_bytes, count, cols, padding_index,
                               begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_position_embedding_backward_cpu(void *grad_position_weight, const void *grad_output,
                                                         int64_t batch, int64_t positions, int64_t cols, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check(8, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        position_embedding_backward_f32(grad_position_weight, grad_output, batch, positions, cols, begin, end);
    else
        position_embedding_backward_f64(grad_position_weight, grad_output, batch, positions, cols, begin, end);
    return CUDA_OPS_SUCCESS;
}

#else

CUDA_OPS_INLINE void FN(add_row)(REAL *restrict sum, const REAL *restrict row, int64_t cols)
{
    for (int64_t c = 0; c < cols; c++)
        sum[c] += row[c];
}

/* position_weight may be NULL. */
CUDA_OPS_SIMD static void FN(embedding_forward)(REAL *output, const REAL *weight, const REAL *position_weight,
                                                const void *indices, int index_bytes, int64_t rows, int64_t cols,
                                                int64_t positions, int64_t begin, int64_t end)
{
    for (int64_t i = begin; cols > 0 && i < end; i++) {
        const int64_t index = embedding_index(indices, index_bytes, i);
        REAL *row = output + i * cols;
        if (index < 0 || index >= rows) {
            for (int64_t c = 0; c < cols; c++)
                row[c] = (REAL)NAN;
            continue;
        }
        memcpy(row, weight + index * cols, (size_t)cols * sizeof(REAL));
        if (position_weight)
            FN(add_row)(row, position_weight + i % positions * cols, cols);
    }
}

CUDA_OPS_SIMD static void FN(embedding_backward)(REAL *grad_weight, int64_t *frequencies, const REAL *grad_output,
                                                 const void *indices, int index_bytes, int64_t count, int64_t cols,
                                                 int64_t padding_index, int64_t begin, int64_t end)
{
    if (cols == 0 || begin >= end)
        return;
    memset(grad_weight + begin * cols, 0, (size_t)((end - begin) * cols) * sizeof(REAL));
    if (frequencies)
        memset(frequencies + begin, 0, (size_t)(end - begin) * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = embedding_index(indices, index_bytes, i);
        if (index < begin || index >= end || index == padding_index)
            continue;
        FN(add_row)(grad_weight + index * cols, grad_output + i * cols, cols);
        if (frequencies)
            frequencies[index]++;
    }
    for (int64_t row = begin; frequencies && row < end; row++)
        for (int64_t c = 0; frequencies[row] > 1 && c < cols; c++)
            grad_weight[row * cols + c] /= (REAL)frequencies[row];
}

CUDA_OPS_SIMD static void FN(position_embedding_backward)(REAL *grad_position_weight, const REAL *grad_output,
                                                          int64_t batch, int64_t positions, int64_t cols, int64_t begin,
                                                          int64_t end)
{
    if (cols == 0 || begin >= end)
        return;
    memset(grad_position_weight + begin * cols, 0, (size_t)((end - begin) * cols) * sizeof(REAL));
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = begin; t < min_i64(end, positions); t++)
            FN(add_row)(grad_position_weight + t * cols, grad_output + (b * positions + t) * cols, cols);
}

#endif
