/* index_add and scatter_add on the CPU: output[index[k]] += source[k], of rows and of elements, and their gradients.
 * Bound by memory: index_add's rows are added up, each thread its own rows of output, in the order of the indices;
 * scatter_add's threads have lines of their own, along which indices point. */
#ifndef REAL

#include "cuda_ops/scatter.h"

#include "common/half.h"
#include "common/indices.h"
#include "cuda_ops/halves_cpu.h"

enum { ADD_TILE = 256 }; /* columns that are added up together, in double, or are widened */

/* Of elements that are added as they come. */
enum {
    SUMS_BYTES =
        1 << 20, /* of a unit's sums, unless a line of each row's has more: they stay in the second-level cache */
    FEWEST_COLUMNS = 16,
    VALUES = 2048 /* that are widened together */
};

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
            memset(sum, 0, (size_t)width * sizeof *sum);
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
    const int64_t part_elements = sizes.rows * sizes.inner;
    for (int64_t slot = begin, k = begin % max_i64(1, sizes.count), part = begin / max_i64(1, sizes.count); slot < end;
         slot++) {
        const int64_t row = index_at(index, index_bytes, k);
        const bool good = 0 <= row && row < sizes.rows;
        const uint16_t *from = grad_output + part * part_elements + (good ? row : 0) * sizes.inner;
        uint16_t *to = grad_source + slot * sizes.inner;
        if (++k == sizes.count)
            k = 0, part++;
        if (!good || alpha == 1.0f) {
            if (sizes.inner == 1)
                *to = good ? *from : 0;
            else if (good)
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

/* sums[index][i] += alpha * values[k][i] of `count` k and `width` i, for indices below `rows`. Between indices of one k and
 * the next lie `index_row` of them, and between those of a row's elements `index_column`. */
#define ADD_VALUES(name, SUM, VALUE)                                                                                   \
    CUDA_OPS_INLINE void name##_of(SUM *restrict sums, const VALUE *restrict values, const void *restrict index,       \
                                   const int index_bytes, int64_t index_row, const int64_t index_column,               \
                                   int64_t count, const int64_t width, uint64_t rows, SUM alpha)                       \
    {                                                                                                                  \
        for (int64_t k = 0; k < count; k++)                                                                            \
            for (int64_t i = 0; i < width; i++) {                                                                      \
                const uint64_t row = (uint64_t)index_at(index, index_bytes, k * index_row + i * index_column);         \
                if (row < rows)                                                                                        \
                    sums[row * (uint64_t)width + (uint64_t)i] += alpha * (SUM)values[k * width + i];                   \
            }                                                                                                          \
    }                                                                                                                  \
    static void name(SUM *sums, const VALUE *values, const void *index, int index_bytes, int64_t index_row,            \
                     int64_t index_column, int64_t count, int64_t width, int64_t rows, SUM alpha)                      \
    {                                                                                                                  \
        if (index_bytes == 4)                                                                                          \
            name##_of(sums, values, index, 4, index_row, index_column, count, width, (uint64_t)rows, alpha);           \
        else if (width == 1 && index_row == 1)                                                                         \
            name##_of(sums, values, index, 8, 1, 0, count, 1, (uint64_t)rows, alpha);                                  \
        else if (index_column == 0)                                                                                    \
            name##_of(sums, values, index, 8, index_row, 0, count, width, (uint64_t)rows, alpha);                      \
        else                                                                                                           \
            name##_of(sums, values, index, 8, index_row, 1, count, width, (uint64_t)rows, alpha);                      \
    }

ADD_VALUES(add_values_f32, float, float)
ADD_VALUES(add_values_to_double_f32, double, float)
ADD_VALUES(add_values_to_double_f64, double, double)

/* As FN(take_elements): bits alone. */
static void take_elements_of_halves(uint16_t *grad_source, const uint16_t *grad_output, const void *index,
                                    int index_bytes, cuda_ops_scatter_sizes sizes, int64_t begin, int64_t end)
{
    for (int64_t slot = begin; slot < end; slot++) {
        const uint16_t *const part = grad_output + slot / sizes.count * sizes.rows * sizes.inner;
        for (int64_t i = 0, at = slot * sizes.inner; i < sizes.inner; i++, at++) {
            const int64_t row = index_at(index, index_bytes, at);
            grad_source[at] = 0 <= row && row < sizes.rows ? part[row * sizes.inner + i] : 0;
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

/* `width` columns of `count` rows that are `pitch` elements apart, from or to dense ones. */
static void widen_columns(float *to, const uint16_t *from, int64_t pitch, int64_t width, int64_t count,
                          cuda_ops_dtype dtype)
{
    if (width == pitch)
        (void)cuda_ops_widen_cpu(to, from, count * width, dtype);
    for (int64_t k = 0; width != pitch && k < count; k++)
        (void)cuda_ops_widen_cpu(to + k * width, from + k * pitch, width, dtype);
}

static void round_columns(uint16_t *to, const float *from, int64_t pitch, int64_t width, int64_t count,
                          cuda_ops_dtype dtype)
{
    if (width == pitch)
        (void)cuda_ops_round_cpu(to, from, count * width, dtype);
    for (int64_t k = 0; width != pitch && k < count; k++)
        (void)cuda_ops_round_cpu(to + k * pitch, from + k * width, width, dtype);
}

/* Of a part, columns from `column` on. index_column: 0 where a row has one index, else 1. */
static void add_unit_of_halves(uint16_t *output, const uint16_t *input, const uint16_t *source, const void *index,
                               int index_bytes, int64_t index_column, cuda_ops_scatter_sizes sizes, float alpha,
                               int64_t part, int64_t column, int64_t width, float *sums, cuda_ops_dtype dtype)
{
    float values[VALUES];
    const int64_t inner = sizes.inner, at = part * sizes.rows * inner + column;
    const int64_t together = VALUES / width, index_row = index_column ? inner : 1;
    widen_columns(sums, input + at, inner, width, sizes.rows, dtype);
    for (int64_t k = 0; k < sizes.count; k += together) {
        const int64_t count = min_i64(together, sizes.count - k), from = (part * sizes.count + k) * inner + column;
        widen_columns(values, source + from, inner, width, count, dtype);
        add_values_f32(sums, values, (const char *)index + (index_column ? from : k) * index_bytes, index_bytes,
                       index_row, index_column, count, width, sizes.rows, alpha);
    }
    round_columns(output + at, sums, inner, width, sizes.rows, dtype);
}

cuda_ops_scatter_plan cuda_ops_scatter_plan_cpu(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype)
{
    const int64_t element = is_half(dtype) ? sizeof(float) : sizeof(double);
    const int64_t rows = max_i64(1, sizes.rows), inner = max_i64(1, sizes.inner);
    cuda_ops_scatter_plan plan = {.columns = max_i64(FEWEST_COLUMNS, SUMS_BYTES / element / rows)};
    plan.columns = min_i64(inner, min_i64(VALUES, plan.columns / FEWEST_COLUMNS * FEWEST_COLUMNS));
    plan.tiles = (inner + plan.columns - 1) / plan.columns;
    plan.count = sizes.rows * sizes.inner > 0 ? sizes.outer * plan.tiles : 0;
    plan.workspace_bytes = (size_t)(rows * plan.columns * element);
    return plan;
}

cuda_ops_status cuda_ops_index_add_elements_cpu(void *output, const void *input, const void *source, const void *index,
                                                int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                const cuda_ops_scatter_plan *plan, int64_t begin, int64_t end,
                                                void *workspace, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_indexed(index_bytes, computed_in(dtype));
    for (int64_t unit = begin; status == CUDA_OPS_SUCCESS && unit < end; unit++) {
        const int64_t part = unit / plan->tiles, column = unit % plan->tiles * plan->columns;
        const int64_t width = min_i64(plan->columns, sizes.inner - column);
        if (is_half(dtype))
            add_unit_of_halves(output, input, source, index, index_bytes, 0, sizes, (float)alpha, part, column, width,
                               workspace, dtype);
        else if (dtype == CUDA_OPS_FLOAT32)
            add_unit_f32(output, input, source, index, index_bytes, sizes, alpha, part, column, width, workspace);
        else
            add_unit_f64(output, input, source, index, index_bytes, sizes, alpha, part, column, width, workspace);
    }
    return status;
}

cuda_ops_status cuda_ops_scatter_add_halves_cpu(void *output, const void *source, const void *index, int index_bytes,
                                                cuda_ops_scatter_sizes sizes, const cuda_ops_scatter_plan *plan,
                                                int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    if (!is_half(dtype))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    const cuda_ops_status status = check_indexed(index_bytes, CUDA_OPS_FLOAT32);
    for (int64_t unit = begin; status == CUDA_OPS_SUCCESS && unit < end; unit++) {
        const int64_t part = unit / plan->tiles, column = unit % plan->tiles * plan->columns;
        add_unit_of_halves(output, output, source, index, index_bytes, 1, sizes, 1.0f, part, column,
                           min_i64(plan->columns, sizes.inner - column), workspace, dtype);
    }
    return status;
}

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
    const cuda_ops_status status = check_indexed(index_bytes, computed_in(dtype));
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (is_half(dtype))
        take_elements_of_halves(grad_source, grad_output, index, index_bytes, sizes, begin, end);
    else if (dtype == CUDA_OPS_FLOAT32)
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
    const int64_t part_elements = sizes.rows * sizes.inner;
    for (int64_t slot = begin, k = begin % max_i64(1, sizes.count), part = begin / max_i64(1, sizes.count); slot < end;
         slot++) {
        const int64_t row = index_at(index, index_bytes, k);
        const bool good = 0 <= row && row < sizes.rows;
        const REAL *from = grad_output + part * part_elements + (good ? row : 0) * sizes.inner;
        for (int64_t i = 0; i < sizes.inner; i++)
            grad_source[slot * sizes.inner + i] = good ? alpha * from[i] : 0;
        if (++k == sizes.count)
            k = 0, part++;
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

/* As add_unit_of_halves, of one index a row, with sums of double. */
static void FN(add_unit)(REAL *output, const REAL *input, const REAL *source, const void *index, int index_bytes,
                         cuda_ops_scatter_sizes sizes, double alpha, int64_t part, int64_t column, int64_t width,
                         double *sums)
{
    const int64_t inner = sizes.inner, at = part * sizes.rows * inner + column;
    const REAL *const from = source + part * sizes.count * inner + column;
    for (int64_t row = 0; row < sizes.rows; row++)
        for (int64_t i = 0; i < width; i++)
            sums[row * width + i] = input[at + row * inner + i];
    if (width == inner)
        FN(add_values_to_double)(sums, from, index, index_bytes, 1, 0, sizes.count, inner, sizes.rows, alpha);
    for (int64_t k = 0; width != inner && k < sizes.count; k++)
        FN(add_values_to_double)(sums, from + k * inner, (const char *)index + k * index_bytes, index_bytes, 1, 0, 1,
                                 width, sizes.rows, alpha);
    for (int64_t row = 0; row < sizes.rows; row++)
        for (int64_t i = 0; i < width; i++)
            output[at + row * inner + i] = (REAL)sums[row * width + i];
}

#endif
