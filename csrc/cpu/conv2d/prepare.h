/* A weight's rows and columns exchanged for one instruction set and element type, in registers (gather.h includes
 * this). */

#if defined(__GNUC__) && !defined(__clang__)
#include "conv2d/transpose_vectors.h"

/* to[k * pitch + i] = from[i * row + k] for i < channels <= LANES, k < depth, and zeros for i up to LANES. */
static void FN(exchange)(REAL *restrict to, int64_t pitch, const REAL *restrict from, int64_t row, int64_t channels,
                         int64_t depth)
{
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t count = min_i64(LANES, depth - k);
        const uint32_t bits = (1u << count) - 1;
        FN(vector) rows[LANES];
        /* Unrolled: as loops these would be copies to and from memory. */
        if (count == LANES && channels == LANES) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                rows[i] = *(const FN(vector) *)(from + i * row + k);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                rows[i] = i < channels ? FN(load_bits)(from + i * row + k, bits) : (FN(vector)){0};
        }
        FN(transpose)(rows);
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++)
            if (q < count)
                *(FN(vector) *)(to + (k + q) * pitch) = rows[q];
    }
}
#else
static void FN(exchange)(REAL *restrict to, int64_t pitch, const REAL *restrict from, int64_t row, int64_t channels,
                         int64_t depth)
{
    for (int64_t k = 0; k < depth; k++)
        for (int64_t i = 0; i < LANES; i++)
            to[k * pitch + i] = i < channels ? from[i * row + k] : 0;
}
#endif

/* At most 16 output channels as columns of `to`, and zeros up to 16: element (c, tap) of weight[channel][c][tap] is row
 * (tap, c). */
static void FN(prepare_forward)(REAL *restrict to, int64_t pitch, const REAL *restrict weight, int64_t channels,
                                int64_t depth, int64_t taps)
{
    REAL exchanged[16 * 16];
    for (int64_t i = 0; i < 16; i += LANES) {
        const int64_t lanes = max_i64(0, min_i64(LANES, channels - i));
        if (taps == 1) {
            FN(exchange)(to + i, pitch, weight + i * depth, depth, lanes, depth);
            continue;
        }
        for (int64_t k = 0; k < depth; k += 16) {
            const int64_t count = min_i64(16, depth - k);
            FN(exchange)(exchanged, LANES, weight + i * depth + k, depth, lanes, count);
            int64_t row = k % taps * (depth / taps) + k / taps;
            for (int64_t q = 0, tap = k % taps; q < count; q++) {
                *(FN(vector) *)(to + row * pitch + i) = *(const FN(vector) *)(exchanged + q * LANES);
                row += depth / taps;
                if (++tap == taps) {
                    tap = 0;
                    row -= depth - 1;
                }
            }
        }
    }
}

/* An output channel's weight[c][tap], c < channels, as row rows[tap] of `to`, where that is not negative. */
static void FN(prepare_backward)(REAL *restrict to, int64_t pitch, const REAL *restrict weight, int64_t channels,
                                 int64_t taps, const int64_t *rows)
{
    REAL exchanged[MOST_INDIRECT_TAPS * 16];
    for (int64_t c = 0; c < channels; c += LANES) {
#ifdef __GNUC__
        for (int64_t next = 0; next < LANES * taps; next += (int64_t)(64 / sizeof(REAL)))
            __builtin_prefetch(weight + (c + 2 * LANES) * taps + next);
#endif
        FN(exchange)(exchanged, LANES, weight + c * taps, taps, min_i64(LANES, channels - c), taps);
        for (int64_t tap = 0; tap < taps; tap++)
            if (rows[tap] >= 0)
                *(FN(vector) *)(to + rows[tap] * pitch + c) = *(const FN(vector) *)(exchanged + tap * LANES);
    }
}

/* Some channels of images' rows from `low_y + u0 * step_y` on, as channels_last and with their padding, to `staged`. */
static void FN(stage_relaid)(REAL *restrict staged, const REAL *restrict source, const struct product *p,
                             const struct lattice *l, const struct relaid *cut, bool channels_last, int64_t channels,
                             int64_t images, int64_t u0, int64_t height)
{
    const int64_t x0 = max_i64(0, min_i64(cut->width, -cut->low_x));
    const int64_t x1 = max_i64(x0, min_i64(cut->width, l->width - cut->low_x));
    for (int64_t i = 0; i < images; i++)
        for (int64_t j = 0; j < height; j++) {
            REAL *const to = staged + i * cut->image + j * cut->row;
            const int64_t y = u0 * l->step_y + cut->low_y + j, count = x1 - x0;
            if (y < 0 || y >= l->height || count == 0) {
                memset(to, 0, (size_t)cut->row * sizeof(REAL));
                continue;
            }
            memset(to, 0, (size_t)(x0 * cut->column) * sizeof(REAL));
            memset(to + x1 * cut->column, 0, (size_t)((cut->width - x1) * cut->column) * sizeof(REAL));
            REAL *const inside = to + x0 * cut->column;
            const REAL *const from =
                source + i * p->source.image + y * p->source.row + (x0 + cut->low_x) * p->source.column;
            if (channels_last)
                memcpy(inside, from, (size_t)(count * cut->column) * sizeof(REAL));
            else
                for (int64_t c = 0; c < channels; c += LANES)
                    FN(exchange)(inside + c, cut->column, from + c * p->source.channel, p->source.channel,
                                 min_i64(LANES, channels - c), count);
        }
}

/* to[c * channel + pixel] = from[pixel * pitch + c]. */
static void FN(write_pixels)(REAL *restrict to, int64_t channel, const REAL *restrict from, int64_t pitch,
                             int64_t channels, int64_t pixels)
{
    int64_t pixel = 0;
    for (; pixel + LANES <= pixels; pixel += LANES)
        FN(exchange)(to + pixel, channel, from + pixel * pitch, pitch, LANES, channels);
    if (pixel == pixels)
        return;
    REAL exchanged[16 * 16];
    for (int64_t c = 0; c < channels; c += 16) {
        const int64_t count = min_i64(16, channels - c);
        FN(exchange)(exchanged, LANES, from + pixel * pitch + c, pitch, pixels - pixel, count);
        for (int64_t q = 0; q < count; q++)
            memcpy(to + (c + q) * channel + pixel, exchanged + q * LANES, (size_t)(pixels - pixel) * sizeof(REAL));
    }
}

/* A unit: `rows` rows of the target from u0 on, where `target` is, of some images and groups, from the source's. */
static void FN(multiply_relaid)(REAL *target, const REAL *source, const struct product *p, const struct lattice *whole,
                                const struct relaid *cut, bool channels_last, const REAL *weight, int64_t pitch,
                                const REAL *bias, int64_t groups, int64_t images, int64_t u0, int64_t rows,
                                REAL *staged, REAL *block)
{
    struct lattice l = *whole;
    const int64_t height = (rows - 1) * l.step_y + cut->height - (cut->rows - 1) * l.step_y;
    FN(stage_relaid)(staged, source, p, &l, cut, channels_last, groups * l.channels, images, u0, height);
    l.source = (struct image_layout){.image = cut->image, .channel = 1, .row = cut->row, .column = cut->column};
    l.height = height;
    l.width = cut->width;
    l.first_y -= cut->low_y;
    l.first_x -= cut->low_x;
    if (cut->merged) {
        l.channels *= l.tap_columns;
        l.tap_columns = 1;
    }
    l.u_count = rows;
    if (channels_last) {
        const struct image_layout layout = {.image = p->target.image, .row = p->target.row, .column = p->target.column};
        FN(multiply_taps)(target, layout, staged, &l, weight, pitch, bias, groups, p->target_channels, 0,
                          images * rows * l.v_count);
        return;
    }
    const int64_t channels = groups * p->target_channels, block_pitch = round_up_i64(channels, 16), first_y = l.first_y;
    const int64_t most = images > 1 ? rows : max_i64(1, 240 / l.v_count);
    for (int64_t u = 0; u < rows; u += most) {
        l.u_count = min_i64(most, rows - u);
        l.first_y = first_y + u * l.step_y;
        const int64_t pixels = l.u_count * l.v_count;
        const struct image_layout layout = {
            .image = pixels * block_pitch, .row = l.v_count * block_pitch, .column = block_pitch};
        FN(multiply_taps)(block, layout, staged, &l, weight, pitch, bias, groups, p->target_channels, 0,
                          images * pixels);
        for (int64_t i = 0; i < images; i++)
            FN(write_pixels)(target + i * p->target.image + u * p->target.row, p->target.channel,
                             block + i * pixels * block_pitch, block_pitch, channels, pixels);
    }
}

#ifdef LOAD_BITS
/* grad_weight[o][c][tap] of a group from rows [begin, end) of all images of contiguous tensors, at most `together` at a
 * time; `sums` are [o][tap][c] meanwhile. */
static void FN(weight_relaid)(REAL *to, const REAL *grad, const REAL *source, const struct product *p,
                              const struct lattice *whole, int64_t together, int64_t begin, int64_t end, REAL *staged,
                              REAL *staged_grad, REAL *sums)
{
    struct lattice l = *whole;
    struct relaid cut = {0};
    const int64_t span = relaid_geometry(&cut, whole, round_up_i64(l.channels, 16)), channels = p->target_channels;
    const int64_t pitch = round_up_i64(channels, 16), taps = l.tap_rows * l.tap_columns;
    const struct image_layout layout = {.row = l.v_count * pitch, .column = pitch};
    l.source = (struct image_layout){.channel = 1, .row = cut.row, .column = cut.column};
    l.width = cut.width;
    l.first_y -= cut.low_y;
    l.first_x -= cut.low_x;
    for (int64_t row = begin; row < end; row += l.u_count) {
        const int64_t image = row / whole->u_count, u = row % whole->u_count;
        l.u_count = min_i64(min_i64(together, whole->u_count - u), end - row);
        l.height = (l.u_count - 1) * l.step_y + span;
        FN(stage_relaid)(staged, source + image * p->source.image, p, whole, &cut, false, l.channels, 1, u, l.height);
        for (int64_t o = 0; o < channels; o += LANES)
            FN(exchange)(staged_grad + o, pitch,
                         grad + image * p->target.image + o * p->target.channel + u * p->target.row, p->target.channel,
                         min_i64(LANES, channels - o), l.u_count * l.v_count);
        FN(weight_of_rows)(sums, p->depth, staged_grad, &layout, channels, staged, &l, 0, l.u_count, row > begin);
    }
    for (int64_t o = 0; o < channels; o++)
        for (int64_t c = 0; c < l.channels; c++)
            for (int64_t tap = 0; tap < taps; tap++)
                to[o * p->depth + c * taps + tap] = sums[o * p->depth + tap * l.channels + c];
}
#endif
