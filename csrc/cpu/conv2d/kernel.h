/* The convolution for one instruction set and element type (see conv2d.c, which includes it, and conv2d/plan.h).
 * A micro-tile is VECTORS vectors of VECTOR_BYTES wide. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))

typedef REAL FN(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INDEX FN(index) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL FN(half_vector) __attribute__((vector_size(VECTOR_BYTES / 2), aligned(sizeof(REAL)), may_alias));

/* A row of an image is a few vectors long, too short for a call of memcpy: whole vectors, the last of which overlaps
 * the one before. */
CUDA_OPS_INLINE void FN(copy_run)(REAL *restrict to, const REAL *restrict from, int64_t count)
{
    if (count >= LANES) {
        for (int64_t i = 0; i < count - LANES; i += LANES)
            *(FN(vector) *)(to + i) = *(const FN(vector) *)(from + i);
        *(FN(vector) *)(to + count - LANES) = *(const FN(vector) *)(from + count - LANES);
    } else if (count >= LANES / 2) {
        *(FN(half_vector) *)to = *(const FN(half_vector) *)from;
        *(FN(half_vector) *)(to + count - LANES / 2) = *(const FN(half_vector) *)(from + count - LANES / 2);
    } else {
        for (int64_t i = 0; i < count; i++)
            to[i] = from[i];
    }
}

CUDA_OPS_INLINE void FN(zero_run)(REAL *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = 0;
}

/* Columns first, first + step, first + 2 * step ... of a row of `width`, zeros where they are out of bounds. */
static void FN(stage_row)(REAL *restrict to, int64_t count, const REAL *restrict row, int64_t column_stride,
                          int64_t width, int64_t first, int64_t step)
{
    const int64_t begin = min_i64(first >= 0 ? 0 : ceil_div_i64(-first, step), count);
    const int64_t end = first >= width ? begin : max_i64(begin, min_i64(count, (width - 1 - first) / step + 1));
    FN(zero_run)(to, begin);
    if (step * column_stride == 1)
        FN(copy_run)(to + begin, row + first + begin, end - begin);
    else
        for (int64_t i = begin; i < end; i++)
            to[i] = row[(first + i * step) * column_stride];
    FN(zero_run)(to + end, count - end);
}

/* The planes that target rows u0 and following (of each phase) read; `source` is the group's first channel. */
static void FN(stage)(REAL *restrict staged, const REAL *restrict source, const struct product *p, int64_t u0)
{
    const int64_t rows = p->plane / p->pitch, planes = p->remainders_y * p->remainders_x;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t fy = 0; fy < p->remainders_y; fy++) {
            const int64_t y = p->first_y + (u0 + i) * p->step_y + fy;
            const bool inside = 0 <= y && y < p->source_height;
            for (int64_t c = 0; c < p->source_channels; c++)
                for (int64_t fx = 0; fx < p->remainders_x; fx++) {
                    REAL *const to = staged + (c * planes + fy * p->remainders_x + fx) * p->plane + i * p->pitch;
                    if (inside)
                        FN(stage_row)(to, p->pitch, source + c * p->source.channel + y * p->source.row,
                                      p->source.column, p->source_width, p->first_x + fx, p->step_x);
                    else
                        FN(zero_run)(to, p->pitch);
                }
        }
    const int64_t used = p->source_channels * planes * p->plane;
    FN(zero_run)(staged + used, staged_size(p) - used);
}

/* target[i][l] = bias[i] + sum over k of weight[k * rows + i] * source[offsets[k] + l], for one vector of l or all of a
 * tile. rows and vectors are constants wherever this is inlined, so that `sum` is registers. */
CUDA_OPS_INLINE void FN(tile)(const int rows, const int vectors, REAL *restrict target, int64_t target_row,
                              const REAL *restrict weight, const REAL *restrict bias, const REAL *restrict source,
                              const int64_t *restrict offsets, int64_t depth)
{
    FN(vector) sum[TILE_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = (FN(vector)){0} + (bias ? bias[i] : 0);
    for (int64_t k = 0; k < depth; k++) {
        const REAL *const from = source + offsets[k];
        FN(vector) right[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            right[v] = *(const FN(vector) *)(from + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[i][v] += weight[k * rows + i] * right[v];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FN(vector) *)(target + i * target_row + v * LANES) = sum[i][v];
}

/* All `count` columns of a panel of `rows` target channels. */
CUDA_OPS_INLINE void FN(panel_of)(const int rows, REAL *panel, int64_t pitch, int64_t count, const REAL *weight,
                                  const REAL *bias, const REAL *staged, const int64_t *offsets, int64_t depth)
{
    int64_t l = 0;
    for (; l + (VECTORS - 1) * LANES < count; l += VECTORS * LANES)
        FN(tile)(rows, VECTORS, panel + l, pitch, weight, bias, staged + l, offsets, depth);
    if (l < count)
        FN(tile)(rows, 1, panel + l, pitch, weight, bias, staged + l, offsets, depth);
}

static void FN(panel)(int rows, REAL *panel, int64_t pitch, int64_t count, const REAL *weight, const REAL *bias,
                      const REAL *staged, const int64_t *offsets, int64_t depth)
{
    if (rows == 8)
        FN(panel_of)(8, panel, pitch, count, weight, bias, staged, offsets, depth);
    else if (rows == 4)
        FN(panel_of)(4, panel, pitch, count, weight, bias, staged, offsets, depth);
    else if (rows == 2)
        FN(panel_of)(2, panel, pitch, count, weight, bias, staged, offsets, depth);
    else
        FN(panel_of)(1, panel, pitch, count, weight, bias, staged, offsets, depth);
}

/* A panel's u_count x v_count elements, without what the pitch adds to a row, to `target` of the given strides. */
static void FN(write_panel)(REAL *restrict target, int64_t channel, int64_t row, int64_t column,
                            const REAL *restrict panel, int64_t panel_row, int64_t pitch, int rows, int64_t u_count,
                            int64_t v_count)
{
    if (column == 1) {
        for (int i = 0; i < rows; i++)
            for (int64_t u = 0; u < u_count; u++)
                FN(copy_run)(target + i * channel + u * row, panel + i * panel_row + u * pitch, v_count);
        return;
    }
    for (int64_t u = 0; u < u_count; u++)
        for (int64_t v = 0; v < v_count; v++)
            for (int i = 0; i < rows; i++)
                target[i * channel + u * row + v * column] = panel[i * panel_row + u * pitch + v];
}

/* Units [begin, end) of images x blocks of target rows, of forward or of backward_input. */
static void FN(run)(const struct product *p, REAL *target, const REAL *source, const int64_t *offsets,
                    const REAL *weight, const REAL *bias, int64_t begin, int64_t end, REAL *workspace)
{
    REAL *const staged = workspace, *const panel = workspace + staged_size(p);
    const int64_t panel_row = panel_pitch(p);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t image = unit / p->blocks, u0 = unit % p->blocks * p->block_rows;
        for (int64_t group = 0; group < p->groups; group++) {
            FN(stage)(staged, source + image * p->source.image + group * p->source_channels * p->source.channel, p, u0);
            int64_t first_tap = 0;
            for (int64_t y = 0; y < p->phases_y; y++)
                for (int64_t x = 0; x < p->phases_x; x++) {
                    const int64_t depth = phase_depth(p, y, x);
                    const int64_t height = ceil_div_i64(p->target_height - y, p->target_step_y);
                    const int64_t u_count = min_i64(p->block_rows, height - u0);
                    const int64_t v_count = ceil_div_i64(p->target_width - x, p->target_step_x);
                    /* The weights of the previous phases, of all groups, then those of the previous groups. */
                    const REAL *const packed = weight + p->target_channels * (p->groups * first_tap + group * depth);
                    if (u_count > 0 && v_count > 0)
                        for (int64_t m = 0; m < p->target_channels;) {
                            const int rows = tile_rows(p->target_channels - m);
                            const int64_t channel = group * p->target_channels + m;
                            FN(panel)(rows, panel, panel_row, (u_count - 1) * p->pitch + v_count, packed + m * depth,
                                      bias ? bias + channel : NULL, staged, offsets + first_tap, depth);
                            FN(write_panel)(target + image * p->target.image + channel * p->target.channel +
                                                (u0 * p->target_step_y + y) * p->target.row + x * p->target.column,
                                            p->target.channel, p->target_step_y * p->target.row,
                                            p->target_step_x * p->target.column, panel, panel_row, p->pitch, rows,
                                            u_count, v_count);
                            m += rows;
                        }
                    first_tap += depth;
                }
        }
    }
}

/* sums[i][l] += sum over u, v of source[offsets[i] + u * pitch + v] * grad[u][v][l]. What this call adds is summed
 * apart first, so that rounding grows with the size of a block and the number of blocks, not with their product. */
CUDA_OPS_INLINE void FN(weight_tile)(const int rows, const int vectors, REAL *restrict sums,
                                     const REAL *restrict source, const int64_t *restrict offsets,
                                     const REAL *restrict grad, int64_t u_count, int64_t v_count, int64_t pitch)
{
    FN(vector) sum[WEIGHT_TILE_ROWS][VECTORS];
    const REAL *from[WEIGHT_TILE_ROWS];
#pragma GCC unroll 9
    for (int i = 0; i < rows; i++) {
        from[i] = source + offsets[i];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = (FN(vector)){0};
    }
    for (int64_t u = 0; u < u_count; u++)
        for (int64_t l = u * pitch; l < u * pitch + v_count; l++) {
            FN(vector) right[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                right[v] = *(const FN(vector) *)(grad + v * LANES);
            grad += vectors * LANES;
#pragma GCC unroll 9
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    sum[i][v] += from[i][l] * right[v];
        }
#pragma GCC unroll 9
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FN(vector) *)(sums + (i * vectors + v) * LANES) += sum[i][v];
}

/* All taps against one block of up to `vectors * LANES` output channels. */
CUDA_OPS_INLINE void FN(weight_panel)(const int vectors, REAL *sums, const REAL *staged, const int64_t *offsets,
                                      int64_t depth, const REAL *grad, int64_t u_count, int64_t v_count, int64_t pitch)
{
    for (int64_t k = 0; k < depth;) {
        const int rows = weight_tile_rows(depth - k);
        REAL *const to = sums + k * vectors * LANES;
        if (rows == 9)
            FN(weight_tile)(9, vectors, to, staged, offsets + k, grad, u_count, v_count, pitch);
        else if (rows == 8)
            FN(weight_tile)(8, vectors, to, staged, offsets + k, grad, u_count, v_count, pitch);
        else if (rows == 4)
            FN(weight_tile)(4, vectors, to, staged, offsets + k, grad, u_count, v_count, pitch);
        else if (rows == 2)
            FN(weight_tile)(2, vectors, to, staged, offsets + k, grad, u_count, v_count, pitch);
        else
            FN(weight_tile)(1, vectors, to, staged, offsets + k, grad, u_count, v_count, pitch);
        k += rows;
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#include "conv2d/transpose_vectors.h"

/* to[i * width + l] = from[l * channel + i] for as many i below `count` as there are whole vectors of, and all `width`
 * lanes, with zeros from `lanes` on. Returns how many i that were. */
static int64_t FN(transpose_blocks)(REAL *restrict to, int64_t width, const REAL *restrict from, int64_t lanes,
                                    int64_t channel, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t l = 0; l < width; l += LANES) {
            FN(vector) rows[LANES];
#pragma GCC unroll 16
            for (int q = 0; q < LANES; q++)
                rows[q] = l + q < lanes ? *(const FN(vector) *)(from + (l + q) * channel + i) : (FN(vector)){0};
            FN(transpose)(rows);
#pragma GCC unroll 16
            for (int q = 0; q < LANES; q++)
                *(FN(vector) *)(to + (i + q) * width + l) = rows[q];
        }
    return i;
}
#else
static int64_t FN(transpose_blocks)(REAL *restrict to, int64_t width, const REAL *restrict from, int64_t lanes,
                                    int64_t channel, int64_t count)
{
    (void)to, (void)width, (void)from, (void)lanes, (void)channel, (void)count;
    return 0;
}
#endif

/* to[i * width + l] = from[channel l][pixel i], zero for lanes <= l < width. In either layout the pixels of a block of
 * rows have one stride. */
static void FN(transpose_grad)(REAL *restrict to, int64_t width, const REAL *restrict from, int64_t lanes,
                               int64_t channel, int64_t pixel, int64_t count)
{
    int64_t i = pixel == 1 ? FN(transpose_blocks)(to, width, from, lanes, channel, count) : 0;
    for (; i < count; i++) {
        if (channel == 1)
            FN(copy_run)(to + i * width, from + i * pixel, lanes);
        else
            for (int64_t l = 0; l < lanes; l++)
                to[i * width + l] = from[l * channel + i * pixel];
        FN(zero_run)(to + i * width + lanes, width - lanes);
    }
}

/* Splits [begin, end) of `splits` of backward_weight: a split takes its share of images x blocks of rows, in order, and
 * leaves sums[group][block of output channels][tap][output channel]. */
static void FN(run_weight)(const struct product *p, REAL *partial, int64_t partial_size, int64_t splits,
                           const int64_t *offsets, const REAL *grad_output, const REAL *input, int64_t begin,
                           int64_t end, REAL *workspace)
{
    REAL *const staged = workspace, *const grad = workspace + staged_size(p);
    const int64_t units = p->images * p->blocks, depth = p->depth;
    for (int64_t split = begin; split < end; split++) {
        REAL *const sums = partial + split * partial_size;
        FN(zero_run)(sums, partial_size);
        for (int64_t unit = split * units / splits; unit < (split + 1) * units / splits; unit++) {
            const int64_t image = unit / p->blocks, u0 = unit % p->blocks * p->block_rows;
            const int64_t u_count = min_i64(p->block_rows, p->target_height - u0), v_count = p->target_width;
            REAL *to = sums;
            for (int64_t group = 0; group < p->groups; group++) {
                FN(stage)(staged, input + image * p->source.image + group * p->source_channels * p->source.channel, p,
                          u0);
                for (int64_t m = 0; m < p->target_channels; m += VECTORS * LANES) {
                    const int64_t lanes = min_i64(p->target_channels - m, VECTORS * LANES);
                    const int64_t width = round_up_i64(lanes, LANES);
                    FN(transpose_grad)(grad, width,
                                       grad_output + image * p->target.image +
                                           (group * p->target_channels + m) * p->target.channel + u0 * p->target.row,
                                       lanes, p->target.channel, p->target.column, u_count * v_count);
                    if (width == VECTORS * LANES)
                        FN(weight_panel)(VECTORS, to, staged, offsets, depth, grad, u_count, v_count, p->pitch);
                    else
                        FN(weight_panel)(1, to, staged, offsets, depth, grad, u_count, v_count, p->pitch);
                    to += depth * width;
                }
            }
        }
    }
}

#undef LANES
