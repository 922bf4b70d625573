/* Shared by conv2d.c and conv2d/kernel.h: what the three products of a convolution have in common.
 *
 * A product writes a target from a source: output from input in forward, grad_input from grad_output in
 * backward_input. (backward_weight reads both, laid out as in forward.) With u, v counting rows and columns of target,
 *
 *   target[m][u][v] = sum over taps (c, r, s) of weight[m][c][r][s] * source[c][u * step + dy(r)][v * step + dx(s)]
 *
 * Forward has step = stride and dy(r) = r * dilation - padding. In backward_input the rows of target that have the same
 * remainder modulo the stride read the same taps, so that each such stride phase is a product of its own, of
 * step 1.
 *
 * The source is staged: a block of its rows is copied, with zero padding, into planes in which a tap is one offset, the
 * same for all u and v, so that a target row reads contiguous addresses and the innermost loop checks no bounds. For
 * step > 1 rows and columns are distributed over step * step planes by their remainders. */
#ifndef CUDA_OPS_CPU_CONV2D_PLAN_H
#define CUDA_OPS_CPU_CONV2D_PLAN_H

#include "common/common.h"
#include "cuda_ops/conv2d.h"

enum {
    TILE_ROWS = 8,        /* target channels of forward's micro-tile */
    WEIGHT_TILE_ROWS = 9, /* taps of backward_weight's micro-tile: all of a 3 x 3 kernel */
    MAX_LANES = 16
};

struct image_layout {
    int64_t image, channel, row, column; /* strides in elements */
};

struct product {
    int64_t groups, images;

    int64_t source_channels, source_height, source_width; /* channels of one group */
    struct image_layout source;
    int64_t step_y, step_x;
    int64_t first_y, first_x;           /* the smallest dy and dx */
    int64_t remainders_y, remainders_x; /* how many of the step remainders are read by any tap */

    int64_t target_channels, target_height, target_width; /* channels of one group */
    struct image_layout target;
    int64_t target_step_y, target_step_x; /* rows and columns of target have stride phases modulo these */
    int64_t phases_y, phases_x;           /* phases with any row or column */

    /* A staged plane has `pitch` columns and rows for `block_rows` rows of each phase of target. */
    int64_t block_rows, blocks, pitch, plane;

    int64_t kernel_height, kernel_width;
    struct {
        int64_t group, target_channel, source_channel, row, column;
    } weight;
    int64_t depth; /* source_channels * kernel_height * kernel_width: at least the taps of all phases together */

    /* dy(r) = (tap_y + phase + r * tap_step_y) / target_step_y where that divides, and r is left out where not. */
    int64_t tap_y, tap_x, tap_step_y, tap_step_x;
};

static inline int64_t ceil_div_i64(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t round_up_i64(int64_t value, int64_t multiple)
{
    return ceil_div_i64(value, multiple) * multiple;
}

/* Whether row r of the kernel contributes to phase y of target, and its dy. */
static inline bool tap_row(const struct product *p, int64_t y, int64_t r, int64_t *dy)
{
    const int64_t distance = p->tap_y + y + r * p->tap_step_y;
    *dy = distance / p->target_step_y;
    return *dy * p->target_step_y == distance;
}

static inline bool tap_column(const struct product *p, int64_t x, int64_t s, int64_t *dx)
{
    const int64_t distance = p->tap_x + x + s * p->tap_step_x;
    *dx = distance / p->target_step_x;
    return *dx * p->target_step_x == distance;
}

/* Taps of phase (y, x). */
static inline int64_t phase_depth(const struct product *p, int64_t y, int64_t x)
{
    int64_t rows = 0, columns = 0, distance;
    for (int64_t r = 0; r < p->kernel_height; r++)
        rows += tap_row(p, y, r, &distance);
    for (int64_t s = 0; s < p->kernel_width; s++)
        columns += tap_column(p, x, s, &distance);
    return rows * columns * p->source_channels;
}

/* The taps of an axis that reach a phase are every `step`-th from `first` on: `count` of them, at `distance`,
 * distance + distance_step ... */
struct axis {
    int64_t count, first, step, distance, distance_step;
};

static inline struct axis axis_of(const struct product *p, bool rows, int64_t phase)
{
    struct axis axis = {.step = 1, .distance_step = 1};
    const int64_t kernel = rows ? p->kernel_height : p->kernel_width;
    for (int64_t r = 0, distance; r < kernel; r++) {
        if (!(rows ? tap_row(p, phase, r, &distance) : tap_column(p, phase, r, &distance)))
            continue;
        if (axis.count == 0) {
            axis.first = r;
            axis.distance = distance;
        } else if (axis.count == 1) {
            axis.step = r - axis.first;
            axis.distance_step = distance - axis.distance;
        }
        axis.count++;
    }
    return axis;
}

/* Rows of the micro-tile that starts with `remaining` target channels left. */
static inline int tile_rows(int64_t remaining)
{
    return remaining >= 8 ? 8 : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

/* Rows of backward_weight's micro-tile that starts with `remaining` taps left. */
static inline int weight_tile_rows(int64_t remaining)
{
    return remaining % 9 == 0 ? 9 : tile_rows(remaining);
}

/* Sizes of the buffers' sections: of the first in bytes (it holds int64_t), of the others in elements. */
static inline size_t offsets_bytes(const struct product *p)
{
    return (size_t)round_up_i64(p->depth * (int64_t)sizeof(int64_t), 64);
}

static inline int64_t staged_size(const struct product *p)
{
    /* The last tile reads up to two vectors past the end of the last plane. */
    return round_up_i64(p->source_channels * p->remainders_y * p->remainders_x * p->plane + 2 * MAX_LANES, MAX_LANES);
}

static inline int64_t panel_pitch(const struct product *p)
{
    return round_up_i64(p->block_rows * p->pitch, 2 * MAX_LANES);
}

#endif
