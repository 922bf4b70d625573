/* index_add and scatter_add on the CPU: output[index[k]] += source[k], of rows and of elements, and their gradients.
 * Bound by memory: index_add's rows are added up, each thread its own rows of output, in the order of the indices;
 * scatter_add's threads have lines of their own, along which indices point. */
#ifndef REAL

#include "cuda_ops/scatter.h"

#include "common/half.h"
#include "common/indices.h"
#include "cuda_ops/halves_cpu.h"

enum { ADD_TILE = 256 }; /* columns that are added up together, in double, or are widened */

CUDA_OPS_SIMD static void add_piece(double *restrict sum, const float *restrict piece, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sum[i] += (double)piece[i];
}

CUDA_OPS_SIMD static void add_sums(float *restrict piece, const double *restrict sum, double alpha, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        piece[i] = (float)((double)piece[i] + alpha * sum[i]);
}

/* As FN(index_add), a piece of a row at a time. */
static void index_add_halves(uint16_t *output, const uint16_t *input, const uint16_t *source, const int64_t *starts,
                             const int64_t *slots, cuda_ops_scatter_sizes sizes, double alpha, int64_t begin,
                             int64_t end, cuda_ops_dtype dtype)
{
    double sum[ADD_TILE];
    float piece[ADD_TILE];
    for (int64_t row = begin; row < end; row++) {
        const int64_t part = row / sizes.rows, first = starts[row % sizes.rows], last = starts[row % sizes.rows + 1];
        for (int64_t c = 0; c < sizes.inner; c += ADD_TILE) {
            const int64_t width = min_i64(ADD_TILE, sizes.inner - c), at = row * sizes.inner + c;
            if (first == last) {
                memmove(output + at, input + at, (size_t)width * sizeof(uint16_t));
                continue;
            }
            memset(sum, 0, sizeof sum);
            for (int64_t k = first; k < last; k++) {
                (void)cuda_ops_widen_cpu(piece, source + (part * sizes.count + slots[k]) * sizes.inner + c, width,
                                         dtype);
                add_piece(sum, piece, width);
            }
            (void)cuda_ops_widen_cpu(piece, input + at, width, dtype);
            add_sums(piece, sum, alpha, width);
            (void)cuda_ops_round_cpu(output + at, piece, width, dtype);
        }
    }
}

/* As FN(take_rows): bits alone where there is nothing to multiply by. */
static void take_rows_of_halves(uint16_t *grad_source, const uint16_t *grad_output, const void *index, int index_bytes,
                                cuda_ops_scatter_sizes sizes, float alpha, int64_t begin, int64_t end,
                                cuda_ops_dtype dtype)
{
    float piece[ADD_TILE];
    for (int64_t slot = begin; slot < end; slot++) {
        const int64_t row = index_at(index, index_bytes, slot % sizes.count);
        const bool good = 0 <= row && row < sizes.rows;
        const uint16_t *from = grad_output + (slot / sizes.count * sizes.rows + (good ? row : 0)) * sizes.inner;
        uint16_t *to = grad_source + slot * sizes.inner;
        if (!good || alpha == 1.0f) {
            if (good)
                memcpy(to, from, (size_t)sizes.inner * sizeof(uint16_t));
            else
                memset(to, 0, (size_t)sizes.inner * sizeof(uint16_t));
            continue;
        }
        for (int64_t c = 0; c < sizes.inner; c += ADD_TILE) {
            const int64_t width = min_i64(ADD_TILE, sizes.inner - c);
            (void)cuda_ops_widen_cpu(piece, from + c, width, dtype);
            for (int64_t i = 0; i < width; i++)
                piece[i] *= alpha;
            (void)cuda_ops_round_cpu(to + c, piece, width, dtype);
        }
    }
}

#define REAL float
#define FN(name) name##_f32
#include "scatter.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "scatter.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_index_add_cpu(void *output, const void *input, const void *source, const int64_t *starts,
                                       const int64_t *slots, cuda_ops_scatter_sizes sizes, double alpha, int64_t begin,
                                       int64_t end, cuda_ops_dtype dtype)
{
    if (is_half(dtype)) {
        index_add_halves(output, input, source, starts, slots, sizes, alpha, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    const cuda_ops_status status = check_indexed(8, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        index_add_f32(output, input, source, starts, slots, sizes, alpha, begin, end);
    else
        index_add_f64(output, input, source, starts, slots, sizes, alpha, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_index_add_backward_cpu(void *grad_source, const void *grad_output, const void *index,
                                                int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_indexed(index_bytes, computed_in(dtype));
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (is_half(dtype))
        take_rows_of_halves(grad_source, grad_output, index, index_bytes, sizes, (float)alpha, begin, end, dtype);
    else if (dtype == CUDA_OPS_FLOAT32)
        take_rows_f32(grad_source, grad_output, index, index_bytes, sizes, (float)alpha, begin, end);
    else
        take_rows_f64(grad_source, grad_output, index, index_bytes, sizes, alpha, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_scatter_add_cpu(void *output, const void *source, const void *index, int index_bytes,
                                         cuda_ops_scatter_sizes sizes, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_indexed(index_bytes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        scatter_add_f32(output, source, index, index_bytes, sizes, begin, end);
    else
        scatter_add_f64(output, source, index, index_bytes, sizes, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_scatter_add_backward_cpu(void *grad_source, const void *grad_output, const void *index,
                                                  int index_bytes, cuda_ops_scatter_sizes sizes, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_indexed(index_bytes, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32)
        take_elements_f32(grad_source, grad_output, index, index_bytes, sizes, begin, end);
    else
        take_elements_f64(grad_source, grad_output, index, index_bytes, sizes, begin, end);
    return CUDA_OPS_SUCCESS;
}

#else

CUDA_OPS_SIMD static void FN(index_add)(REAL *output, const REAL *input, const REAL *source, const int64_t *starts,
                                        const int64_t *slots, cuda_ops_scatter_sizes sizes, double alpha, int64_t begin,
                                        int64_t end)
{
    double sum[ADD_TILE];
    const int64_t inner = sizes.inner;
    for (int64_t row = begin; row < end; row++) {
        const int64_t part = row / sizes.rows, first = starts[row % sizes.rows], last = starts[row % sizes.rows + 1];
        for (int64_t c = 0; c < inner; c += ADD_TILE) {
            const int64_t width = min_i64(ADD_TILE, inner - c), at = row * inner + c;
            for (int64_t i = 0; i < width; i++)
                sum[i] = 0;
            for (int64_t k = first; k < last; k++) {
                const REAL *from = source + (part * sizes.count + slots[k]) * inner + c;
                for (int64_t i = 0; i < width; i++)
                    sum[i] += from[i];
            }
            for (int64_t i = 0; i < width; i++)
                output[at + i] = first < last ? (REAL)(input[at + i] + alpha * sum[i]) : input[at + i];
        }
    }
}

CUDA_OPS_SIMD static void FN(take_rows)(REAL *grad_source, const REAL *grad_output, const void *index, int index_bytes,
                                        cuda_ops_scatter_sizes sizes, REAL alpha, int64_t begin, int64_t end)
{
    for (int64_t slot = begin; slot < end; slot++) {
        const int64_t row = index_at(index, index_bytes, slot % sizes.count);
        const bool good = 0 <= row && row < sizes.rows;
        const REAL *from = grad_output + (slot / sizes.count * sizes.rows + (good ? row : 0)) * sizes.inner;
        for (int64_t i = 0; i < sizes.inner; i++)
            grad_source[slot * sizes.inner + i] = good ? alpha * from[i] : 0;
    }
}

static void FN(scatter_add)(REAL *output, const REAL *source, const void *index, int index_bytes,
                            cuda_ops_scatter_sizes sizes, int64_t begin, int64_t end)
{
    const int64_t inner = sizes.inner;
    for (int64_t line = begin; line < end;) {
        /* Neighbouring lines lie side by side, and are gone along together. */
        const int64_t part = line / inner, first = line % inner, last = min_i64(inner, first + end - line);
        for (int64_t k = 0; k < sizes.count; k++)
            for (int64_t i = first; i < last; i++) {
                const int64_t slot = (part * sizes.count + k) * inner + i;
                const int64_t row = index_at(index, index_bytes, slot);
                if (0 <= row && row < sizes.rows)
                    output[(part * sizes.rows + row) * inner + i] += source[slot];
            }
        line += last - first;
    }
}

static void FN(take_elements)(REAL *grad_source, const REAL *grad_output, const void *index, int index_bytes,
                              cuda_ops_scatter_sizes sizes, int64_t begin, int64_t end)
{
    for (int64_t slot = begin; slot < end; slot++)
        for (int64_t i = 0; i < sizes.inner; i++) {
            const int64_t at = slot * sizes.inner + i, row = index_at(index, index_bytes, at);
            const bool good = 0 <= row && row < sizes.rows;
            grad_source[at] = good ? grad_output[(slot / sizes.count * sizes.rows + row) * sizes.inner + i] : (REAL)0;
        }
}

#endif
