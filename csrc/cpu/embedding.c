/* embedding on the CPU: output[i] = weight[indices[i]], the gradient of which is a sum of rows of grad_output.
 * Bound by memory: rows are copied, or added up, each thread its own rows of the table, in the order of the indices. */
#ifndef REAL

#include "cuda_ops/embedding.h"

#include "common/half.h"
#include "common/indices.h"
#include "cuda_ops/halves_cpu.h"

enum { SUM_TILE = 256 }; /* columns that are added up together, in double */

#define REAL float
#define FN(name) name##_f32
#include "embedding.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "embedding.c"

#include "common/undef_real.h"

/* Whether all of them are: the sign of an index, and of what is left to the last one, where it is not. */
CUDA_OPS_SIMD static bool are_indices_i64(const int64_t *indices, int64_t count, int64_t rows)
{
    uint64_t signs = 0;
    for (int64_t i = 0; i < count; i++)
        signs |= (uint64_t)indices[i] | ((uint64_t)(rows - 1) - (uint64_t)indices[i]);
    return signs >> 63 == 0;
}

CUDA_OPS_SIMD static bool are_indices_i32(const int32_t *indices, int64_t count, int64_t rows)
{
    uint64_t signs = 0;
    for (int64_t i = 0; i < count; i++)
        signs |= (uint64_t)indices[i] | ((uint64_t)(rows - 1) - (uint64_t)indices[i]);
    return signs >> 63 == 0;
}

int64_t cuda_ops_embedding_find_bad_index_cpu(const void *indices, int index_bytes, int64_t count, int64_t rows)
{
    enum { AT_ONCE = 4096 };
    for (int64_t first = 0; first < count; first += AT_ONCE) {
        const int64_t end = min_i64(count, first + AT_ONCE);
        if (index_bytes == 4 ? are_indices_i32((const int32_t *)indices + first, end - first, rows)
                             : are_indices_i64((const int64_t *)indices + first, end - first, rows))
            continue;
        for (int64_t i = first; i < end; i++) {
            const int64_t index = index_at(indices, index_bytes, i);
            if (index < 0 || index >= rows)
                return i;
        }
    }
    return -1;
}

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* Rows are copied, whatever their bits mean, but for a row that is not there. */
static void copy_rows_of_halves(uint16_t *output, const uint16_t *weight, const void *indices, int index_bytes,
                                int64_t rows, int64_t cols, int64_t begin, int64_t end)
{
    enum { AHEAD = 8, MOST = 256 }; /* rows, and elements of one, of a prefetch */
    for (int64_t i = begin; cols > 0 && i < end; i++) {
        const int64_t index = index_at(indices, index_bytes, i);
        uint16_t *const row = output + i * cols;
        const int64_t next = i + AHEAD < end ? index_at(indices, index_bytes, i + AHEAD) : -1;
        for (int64_t c = 0; 0 <= next && next < rows && c < min_i64(cols, MOST); c += 32)
            PREFETCH(weight + next * cols + c);
        if (0 <= index && index < rows)
            memcpy(row, weight + index * cols, (size_t)cols * sizeof *row);
        else
            memset(row, 0xff, (size_t)cols * sizeof *row); /* a NaN in both types */
    }
}

cuda_ops_status cuda_ops_embedding_forward_cpu(void *output, const void *weight, const void *indices, int index_bytes,
                                               int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                               cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16) {
        const cuda_ops_status status = check_indexed(index_bytes, CUDA_OPS_FLOAT32);
        if (status == CUDA_OPS_SUCCESS)
            copy_rows_of_halves(output, weight, indices, index_bytes, rows, cols, begin, end);
        return status;
    }
    const cuda_ops_status status = check_indexed(index_bytes, dtype);
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
    const cuda_ops_status status = check_indexed(index_bytes, dtype);
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

cuda_ops_status cuda_ops_embedding_sort_cpu(int64_t *starts, int64_t *slots, const void *indices, int index_bytes,
                                            int64_t count, int64_t rows, int64_t padding_index)
{
    if (index_bytes != 4 && index_bytes != 8)
        return CUDA_OPS_INVALID_ARGUMENT;
    /* A row's slots are counted where the next row's begin; then these places move up to their ends. */
    memset(starts, 0, (size_t)(rows + 2) * sizeof(int64_t));
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = index_at(indices, index_bytes, i);
            if (index < 0 || index >= rows || index == padding_index)
                continue;
            if (pass == 0)
                starts[index + 2]++;
            else
                slots[starts[index + 1]++] = i;
        }
        for (int64_t row = 0; pass == 0 && row < rows; row++)
            starts[row + 2] += starts[row + 1];
    }
    return CUDA_OPS_SUCCESS;
}

CUDA_OPS_SIMD static void add_to_sums(double *restrict sums, const float *restrict values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sums[i] += (double)values[i];
}

CUDA_OPS_SIMD static void divide_sums(float *restrict values, const double *restrict sums, double divisor,
                                      int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)(sums[i] / divisor);
}

/* As FN(sum_rows), of the rows that slots names. Most rows have none or one, which are bits alone. */
static void sum_rows_of_halves(uint16_t *output, const uint16_t *grad_output, const int64_t *slots, int64_t count,
                               int64_t cols, int mean, cuda_ops_dtype dtype)
{
    if (count == 0)
        memset(output, 0, (size_t)cols * sizeof *output);
    if (count == 1)
        memcpy(output, grad_output + slots[0] * cols, (size_t)cols * sizeof *output);
    if (count <= 1)
        return;
    double sums[SUM_TILE];
    float piece[SUM_TILE];
    for (int64_t c = 0; c < cols; c += SUM_TILE) {
        const int64_t width = min_i64(SUM_TILE, cols - c);
        memset(sums, 0, (size_t)width * sizeof *sums);
        for (int64_t k = 0; k < count; k++) {
            (void)cuda_ops_widen_cpu(piece, grad_output + slots[k] * cols + c, width, dtype);
            add_to_sums(sums, piece, width);
        }
        divide_sums(piece, sums, mean ? (double)count : 1, width);
        (void)cuda_ops_round_cpu(output + c, piece, width, dtype);
    }
}

cuda_ops_status cuda_ops_embedding_backward_cpu(void *grad_weight, const void *grad_output, const int64_t *starts,
                                                const int64_t *slots, int64_t cols, int scale_by_frequency,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const bool of_halves = is_half(dtype);
    const cuda_ops_status status = check_indexed(8, computed_in(dtype));
    for (int64_t row = begin; status == CUDA_OPS_SUCCESS && row < end; row++) {
        const int64_t count = starts[row + 1] - starts[row];
        const int64_t *const from = count > 0 ? slots + starts[row] : NULL;
        if (of_halves && cols > 0)
            sum_rows_of_halves((uint16_t *)grad_weight + row * cols, grad_output, from, count, cols, scale_by_frequency,
                               dtype);
        else if (of_halves || dtype == CUDA_OPS_FLOAT32)
            sum_rows_f32((float *)grad_weight + row * cols, grad_output, from, 0, 0, count, cols, scale_by_frequency);
        else
            sum_rows_f64((double *)grad_weight + row * cols, grad_output, from, 0, 0, count, cols, scale_by_frequency);
    }
    return status;
}

cuda_ops_status cuda_ops_position_embedding_backward_cpu(void *grad_position_weight, const void *grad_output,
                                                         int64_t batch, int64_t positions, int64_t cols, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_indexed(8, dtype);
    for (int64_t row = begin; status == CUDA_OPS_SUCCESS && row < end; row++) {
        const int64_t count = row < positions ? batch : 0;
        if (dtype == CUDA_OPS_FLOAT32)
            sum_rows_f32((float *)grad_position_weight + row * cols, grad_output, NULL, row, positions, count, cols, 0);
        else
            sum_rows_f64((double *)grad_position_weight + row * cols, grad_output, NULL, row, positions, count, cols,
                         0);
    }
    return status;
}

#else

/* position_weight may be NULL. */
CUDA_OPS_SIMD static void FN(embedding_forward)(REAL *output, const REAL *weight, const REAL *position_weight,
                                                const void *indices, int index_bytes, int64_t rows, int64_t cols,
                                                int64_t positions, int64_t begin, int64_t end)
{
    for (int64_t i = begin; cols > 0 && i < end; i++) {
        const int64_t index = index_at(indices, index_bytes, i);
        REAL *row = output + i * cols;
        if (index < 0 || index >= rows) {
            for (int64_t c = 0; c < cols; c++)
                row[c] = (REAL)NAN;
            continue;
        }
        memcpy(row, weight + index * cols, (size_t)cols * sizeof(REAL));
        const REAL *position = position_weight ? position_weight + i % positions * cols : NULL;
        for (int64_t c = 0; position && c < cols; c++)
            row[c] += position[c];
    }
}

/* The sum, or the mean, of `count` rows of grad_output: those that slots names, or first, first + step, ... */
CUDA_OPS_SIMD static void FN(sum_rows)(REAL *output, const REAL *grad_output, const int64_t *slots, int64_t first,
                                       int64_t step, int64_t count, int64_t cols, int mean)
{
    double sum[SUM_TILE];
    for (int64_t c = 0; c < cols; c += SUM_TILE) {
        const int64_t width = min_i64(SUM_TILE, cols - c);
        for (int64_t i = 0; i < width; i++)
            sum[i] = 0;
        for (int64_t k = 0; k < count; k++) {
            const REAL *row = grad_output + (slots ? slots[k] : first + k * step) * cols + c;
            for (int64_t i = 0; i < width; i++)
                sum[i] += row[i];
        }
        for (int64_t i = 0; i < width; i++)
            output[c + i] = (REAL)(mean && count > 1 ? sum[i] / (double)count : sum[i]);
    }
}

#endif
