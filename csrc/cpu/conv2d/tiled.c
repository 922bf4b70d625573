/* Convolution of halves by AMX's tile registers, or vectors of AVX512-BF16 (gemm/tile_packing.h), without an im2col matrix: a row of a tile is a
 * pixel, its 32 of depth are channels, and a tap is an address.
 *
 * Forward and backward_input stage a block of the source with its padding, channels innermost and filled up to whole
 * steps of depth, such that all taps of a pixel are at fixed distances (conv2d/plan.h). Pixels are counted through rows
 * with their padding, so that 16 that follow each other are a tile; those that fall into the padding are left out when
 * sums are stored. With few channels (`thin`) a row of the kernel is one run of depth instead, and tiles end with rows.
 * The weight is packed once, in panels of 32 target channels.
 *
 * backward_weight stages the input channel by channel: a row of a tile is a channel, its depth are 32 pixels, and a tap
 * is an address again. grad_output is packed in pairs of pixels, with zeros where there is padding. Blocks of pixels
 * are cut into splits whose sums are added in order.
 *
 * All is cut by sizes alone, so that results repeat for any number of threads. Bound by the tile registers where there
 * are many channels, else by staging and storing. */
#include "common/common.h"
#include "conv2d/paths.h"
#include "gemm/tiles.h"

#if CUDA_OPS_WITH_AMX
#include "gemm/tile_packing.h"

enum {
    PANEL = 2 * SIDE,
    STAGED_BYTES = 384 << 10, /* of a block: a part of the second-level cache */
    FEWEST_BLOCKS = 4,
    THIN_CHANNELS = 8,
    MOST_RUNS = 1024,
    MOST_SPLITS = 8,
    PARTIAL_BYTES = 1 << 20 /* of sums of a weight up to which pixels are split, rather than channels cut */
};

/* How a product is cut and staged. */
struct tiling {
    bool split, thin;
    int parts;
    int64_t pixel;         /* staged elements of a pixel */
    int64_t halo, pitch;   /* rows of a plane beyond a block's, and its columns */
    int64_t planes, plane; /* pixels of a plane */
    int64_t rows, blocks;  /* of target, of a phase: of a block */
    int64_t images;        /* of a block */
    int64_t groups_of_images;
    int64_t staged;         /* elements of one part */
    int64_t panels;         /* of target channels, of a group */
    int64_t runs, steps;    /* of all phases, and steps of depth of a run */
    int64_t step_y, step_x; /* of what is staged: 1 where thin, as nothing is distributed over planes */
};

static bool is_thin(const struct product *p, cuda_ops_conv2d_pass pass)
{
    return pass == CUDA_OPS_CONV2D_FORWARD && p->source_channels <= THIN_CHANNELS && p->tap_step_x == 1;
}

static struct tiling tiling_of(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    struct tiling t = {.split = dtype == CUDA_OPS_FLOAT16, .thin = is_thin(p, pass)};
    const bool planar = pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    t.parts = t.split ? 2 : 1;
    t.pixel = t.thin ? p->source_channels : round_up_i64(p->source_channels, STEP);
    t.step_y = p->step_y, t.step_x = p->step_x;
    t.halo = p->plane / p->pitch - p->block_rows;
    t.pitch = p->pitch;
    t.planes = p->remainders_y * p->remainders_x;
    const int64_t rows = max_i64(1, ceil_div_i64(p->target_height, p->target_step_y));
    if (t.thin) {
        const int64_t columns = max_i64(1, ceil_div_i64(p->target_width, p->target_step_x));
        t.planes = 1;
        t.halo = (p->kernel_height - 1) * p->tap_step_y;
        t.pitch = (columns - 1) * p->step_x + p->kernel_width;
    }
    const int64_t row_bytes = t.planes * t.pitch * t.pixel * t.parts * 2 * (t.thin ? p->step_y : 1);
    const int64_t fitting = max_i64(1, STAGED_BYTES / row_bytes - t.halo);
    if (fitting >= rows) {
        t.images = max_i64(1, min_i64(STAGED_BYTES / (row_bytes * (rows + t.halo)), p->images / FEWEST_BLOCKS));
        t.blocks = max_i64(1, min_i64(ceil_div_i64(FEWEST_BLOCKS, max_i64(1, p->images)), rows / 4));
    } else {
        t.images = 1;
        t.blocks = ceil_div_i64(rows, max_i64(fitting, min_i64(rows, 4)));
    }
    t.rows = ceil_div_i64(rows, t.blocks);
    t.blocks = ceil_div_i64(rows, t.rows);
    t.groups_of_images = ceil_div_i64(p->images, t.images);
    const int64_t staged_rows = t.thin ? (t.rows - 1) * p->step_y + 1 + t.halo : t.rows + t.halo;
    t.plane = staged_rows * t.pitch;
    /* Tiles read on behind the last pixel. */
    const int64_t slack = t.thin ? (PANEL * p->step_x + STEP) * t.pixel + STEP : PANEL * t.pixel;
    t.staged =
        planar ? t.pixel * (t.images * t.planes * t.plane + 2 * STEP) : t.images * t.planes * t.plane * t.pixel + slack;
    t.staged = round_up_i64(t.staged, STEP);
    t.panels = ceil_div_i64(p->target_channels, PANEL);
    t.runs = t.thin ? p->kernel_height : p->kernel_height * p->kernel_width;
    t.steps = t.thin ? ceil_div_i64(p->source_channels * p->kernel_width, STEP) : t.pixel / STEP;
    return t;
}

bool cuda_ops_conv2d_tiled_takes(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    /* Of few input channels a tile's rows would be as few. */
    if (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT && p->source_channels <= THIN_CHANNELS)
        return false;
    /* Vectors are no faster than float32's where more than half of a row of the kernel would be zeros. */
    if (is_thin(p, pass) && 2 * p->source_channels * p->kernel_width < STEP && !has_tile_registers())
        return false;
    return cuda_ops_has_tiles(dtype) && p->source_channels > 0 && p->target_channels > 0 &&
           (p->groups == 1 || (p->source_channels >= SIDE && p->target_channels >= SIDE)) &&
           p->kernel_height * p->kernel_width <= MOST_RUNS;
}

bool cuda_ops_conv2d_tiled_needs_finite(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 || pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT || is_thin(p, pass);
}

/* Packed elements of a panel of the weight with so many runs. */
static int64_t panel_elements(const struct tiling *t, int64_t runs)
{
    return 2 * runs * t->steps * TILE * t->parts;
}

/* How backward_weight is cut: into splits of the blocks of pixels, or pieces of the output channels. */
struct weight_cut {
    int64_t splits, pieces, piece; /* piece: panels */
    int64_t partial;               /* floats of a split's sums */
    int64_t source_panels;
};

static struct weight_cut weight_cut(const struct product *p, const struct tiling *t)
{
    struct weight_cut cut = {.splits = 1, .pieces = 1, .source_panels = t->pixel / PANEL};
    cut.partial = p->groups * t->runs * cut.source_panels * t->panels * SUMS;
    const int64_t blocks = t->groups_of_images * t->blocks;
    if (cut.partial * (int64_t)sizeof(float) <= PARTIAL_BYTES)
        cut.splits = min_i64(blocks, MOST_SPLITS);
    else
        cut.pieces = min_i64(4, max_i64(1, t->panels / 2));
    cut.piece = ceil_div_i64(t->panels, cut.pieces);
    cut.pieces = ceil_div_i64(t->panels, cut.piece);
    return cut;
}

/* Pixels of a phase's rows, counted through the padding behind each; in whole steps. */
static int64_t depth_of_rows(const struct tiling *t, int64_t rows)
{
    return round_up_i64(rows * t->pitch, STEP);
}

void cuda_ops_conv2d_tiled_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                cuda_ops_dtype dtype)
{
    const struct tiling t = tiling_of(p, pass, dtype);
    *plan = (cuda_ops_conv2d_plan){0};
    const size_t staged = (size_t)(t.staged * t.parts * 2 + 64);
    if (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        const struct weight_cut cut = weight_cut(p, &t);
        plan->count = p->groups * cut.splits * cut.pieces;
        plan->reduce_count = p->groups * t.panels;
        plan->prepared_bytes = (size_t)(cut.splits * cut.partial) * sizeof(float);
        const int64_t depth = t.images * depth_of_rows(&t, t.rows), lines = cut.piece * PANEL;
        plan->workspace_bytes = (staged + (size_t)(depth * lines * (t.parts + 1) * 2 + 128) + 63) / 64 * 64;
        return;
    }
    plan->prepare_count = p->groups * t.panels;
    plan->count = p->groups * t.groups_of_images * t.blocks;
    plan->prepared_bytes = (size_t)(p->groups * t.panels * panel_elements(&t, t.runs)) * 2;
    plan->workspace_bytes = (staged + 63) / 64 * 64;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

/* Panels [begin, end) of target channels: prepared[phase][group][panel], and in it two streams of [run][step]. */
void cuda_ops_conv2d_tiled_prepare(uint16_t *prepared, const uint16_t *weight, const struct product *p,
                                   cuda_ops_conv2d_pass pass, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const struct tiling t = tiling_of(p, pass, dtype);
    const int64_t line = p->weight.target_channel, along = p->weight.source_channel, of_run = t.steps * TILE * t.parts;
    for (int64_t number = begin; number < end; number++) {
        const int64_t group = number / t.panels, first = number % t.panels * PANEL;
        const int64_t lines = min_i64(PANEL, p->target_channels - first);
        const uint16_t *const from = weight + group * p->weight.group + first * line;
        int64_t taps_before = 0;
        for (int64_t y = 0; y < p->phases_y; y++)
            for (int64_t x = 0; x < p->phases_x; x++) {
                const struct axis rows = axis_of(p, true, y), columns = axis_of(p, false, x);
                const int64_t taps = t.thin ? rows.count : rows.count * columns.count;
                uint16_t *const panel = prepared + p->groups * t.panels * panel_elements(&t, taps_before) +
                                        number * panel_elements(&t, taps);
                const int64_t stream = taps * of_run;
                for (int64_t tap = 0; tap < taps; tap++) {
                    uint16_t *const to = panel + tap * of_run;
                    uint16_t copy[PANEL * STEP];
                    if (t.thin) {
                        const int64_t depth = p->kernel_width * p->source_channels;
                        for (int64_t q = 0; q < depth; q += STEP) {
                            const int64_t length = min_i64(STEP, depth - q);
                            for (int64_t i = 0; i < lines; i++)
                                for (int64_t k = 0; k < length; k++)
                                    copy[i * STEP + k] =
                                        from[i * line + (q + k) % p->source_channels * along + tap * p->weight.row +
                                             (q + k) / p->source_channels * p->weight.column];
                            pack_streams(dtype, t.split, true, to + q / STEP * TILE * t.parts, stream, copy, STEP, 1,
                                         lines, length);
                        }
                        continue;
                    }
                    const int64_t r = rows.first + tap / columns.count * rows.step;
                    const int64_t s = columns.first + tap % columns.count * columns.step;
                    const uint16_t *const of_tap = from + r * p->weight.row + s * p->weight.column;
                    if (line == 1 || along == 1) {
                        pack_streams(dtype, t.split, true, to, stream, of_tap, line, along, lines, p->source_channels);
                        continue;
                    }
                    for (int64_t c = 0; c < p->source_channels; c += STEP) {
                        const int64_t length = min_i64(STEP, p->source_channels - c);
                        /* In the order in which it lies. */
                        const bool by_lines = line > along;
                        for (int64_t i = 0; i < (by_lines ? lines : length); i++)
                            for (int64_t k = 0; k < (by_lines ? length : lines); k++)
                                copy[i * STEP + k] =
                                    by_lines ? of_tap[i * line + (c + k) * along] : of_tap[(c + i) * along + k * line];
                        pack_streams(dtype, t.split, true, to + c / STEP * TILE * t.parts, stream, copy,
                                     by_lines ? STEP : 1, by_lines ? 1 : STEP, lines, length);
                    }
                }
                taps_before += taps;
            }
    }
}

/* Where a pixel of the source is staged: plane, row and column by the steps' remainders. */
static int64_t staged_pixel(const struct tiling *t, const struct product *p, int64_t row, int64_t column)
{
    if (t->thin)
        return row * t->pitch + column;
    const int64_t plane = row % p->step_y * p->remainders_x + column % p->step_x;
    return plane * t->plane + row / p->step_y * t->pitch + column / p->step_x;
}

/* Of a plane's columns those that exist in the source: column k is x = x0 + k * step. */
static void columns_within(int64_t x0, int64_t step, int64_t pitch, int64_t width, int64_t *first, int64_t *last)
{
    *first = x0 < 0 ? ceil_div_i64(-x0, step) : 0;
    *last = max_i64(*first, min_i64(pitch, width > x0 ? ceil_div_i64(width - x0, step) : 0));
}

/* Stages `rows` rows of target, from `first` on, of an image: `source` is the image's, with the group's channels.
 * Columns of padding are zeros before. */
static void stage_pixels(const struct tiling *t, const struct product *p, cuda_ops_dtype dtype, uint16_t *to,
                         const uint16_t *source, int64_t first, int64_t rows)
{
    const int64_t steps_y = t->thin ? 1 : p->step_y, remainders_y = t->thin ? 1 : p->remainders_y;
    const int64_t steps_x = t->thin ? 1 : p->step_x, remainders_x = t->thin ? 1 : p->remainders_x;
    const int64_t plane_rows = t->thin ? (rows - 1) * p->step_y + 1 + t->halo : rows + t->halo;
    const int64_t y0 = first * p->step_y + (t->thin ? p->tap_y : p->first_y);
    const int64_t x0 = t->thin ? p->tap_x : p->first_x, channels = p->source_channels;
    bool special = false;
    for (int64_t index = 0; index < plane_rows * remainders_y; index++) {
        const int64_t y = y0 + index / remainders_y * steps_y + index % remainders_y;
        /* Of the row's first plane. */
        uint16_t *const to_row =
            to + (index % remainders_y * remainders_x * t->plane + index / remainders_y * t->pitch) * t->pixel;
        const uint16_t *const row = source + y * p->source.row;
        if (y < 0 || y >= p->source_height) {
            for (int64_t plane = 0; plane < remainders_x; plane++)
                for (int part = 0; part < t->parts; part++)
                    memset(to_row + plane * t->plane * t->pixel + part * t->staged, 0,
                           (size_t)(t->pitch * t->pixel) * sizeof(uint16_t));
            continue;
        }
        if (p->source.channel == 1) {
            for (int64_t plane = 0; plane < remainders_x; plane++) {
                int64_t k, last;
                columns_within(x0 + plane, steps_x, t->pitch, p->source_width, &k, &last);
                const uint16_t *from = row + (x0 + plane + k * steps_x) * p->source.column;
                uint16_t *pixel = to_row + (plane * t->plane + k) * t->pixel;
                for (; k < last; k++, pixel += t->pixel, from += steps_x * p->source.column)
                    for (int64_t c = 0; c < channels; c += STEP) {
                        const __mmask32 mask = first_lanes_32(channels - c);
                        if (!t->split) {
                            _mm512_mask_storeu_epi16(pixel + c, mask, _mm512_maskz_loadu_epi16(mask, from + c));
                            continue;
                        }
                        const struct parts parts = load_parts(CUDA_OPS_FLOAT16, true, from + c, mask, &special);
                        _mm512_mask_storeu_epi16(pixel + c, mask, parts.high);
                        _mm512_mask_storeu_epi16(pixel + t->staged + c, mask, parts.low);
                    }
            }
            continue;
        }
        for (int64_t x = 0; x < p->source_width; x += PANEL) {
            const int64_t lines = min_i64(PANEL, p->source_width - x);
            int64_t places[PANEL]; /* of the pixels in the row, or -1 */
            for (int64_t i = 0; i < lines; i++) {
                const int64_t distance = x + i - x0, plane = steps_x == 1 ? 0 : distance % steps_x;
                const int64_t k = steps_x == 1 ? distance : distance / steps_x;
                places[i] = distance >= 0 && plane < remainders_x && k < t->pitch ? plane * t->plane + k : -1;
            }
            for (int64_t c = 0; c < channels; c += STEP) {
                uint16_t tiles[2 * 2 * TILE] __attribute__((aligned(64)));
                const int64_t depth = min_i64(STEP, channels - c);
                pack_streams(dtype, t->split, false, tiles, TILE * t->parts,
                             row + x * p->source.column + c * p->source.channel, p->source.column, p->source.channel,
                             lines, depth);
                const __mmask32 mask = first_lanes_32(depth);
                for (int64_t i = 0; i < lines; i++) {
                    if (places[i] < 0)
                        continue;
                    uint16_t *const pixel = to_row + places[i] * t->pixel + c;
                    const uint16_t *const tile = tiles + i / SIDE * TILE * t->parts + i % SIDE * STEP;
                    _mm512_mask_storeu_epi16(pixel, mask, _mm512_loadu_si512(tile));
                    if (t->split)
                        _mm512_mask_storeu_epi16(pixel + t->staged, mask, _mm512_loadu_si512(tile + TILE));
                }
            }
        }
    }
}

/* sums = all runs of two tiles of pixels times a panel of the weight. */
CUDA_OPS_INLINE void sum_runs(const bool right, const bool split, float *sums, const uint16_t *pixels, size_t pitch,
                              int64_t low, const uint16_t *b0, const uint16_t *b1, const int64_t *offsets, int64_t runs,
                              int64_t steps)
{
    const int64_t lower = SIDE * (int64_t)(pitch / 2), next = split ? 2 * TILE : TILE;
    if (!has_tile_registers()) {
        clear_others(true, right, sums);
        for (int row = 0; row < PANEL; row += rows_at_once(right)) {
            const uint16_t *of_b0 = b0, *of_b1 = b1;
            __m512 vectors[VECTORS];
            begin_rows(right, vectors, NULL, false);
            for (int64_t run = 0; run < runs; run++) {
                const uint16_t *a = pixels + offsets[run] + row * (int64_t)(pitch / 2);
                for (int64_t s = 0; s < steps; s++, a += STEP, of_b0 += next, of_b1 += next)
                    add_rows(right, split, false, vectors, a, pitch, low, of_b0, of_b1);
            }
            end_rows(right, vectors, sums + row / SIDE * 2 * SIDE * SIDE + row % SIDE * SIDE);
        }
        return;
    }
    __asm__ volatile("" : : : "memory");
    begin_sums(NULL, false);
    for (int64_t run = 0; run < runs; run++) {
        const uint16_t *a = pixels + offsets[run];
        for (int64_t s = 0; s < steps; s++, a += STEP, b0 += next, b1 += next)
            add_square(true, right, split, false, a, pitch, a + lower, pitch, low, b0, b1);
    }
    end_sums(sums);
    __asm__ volatile("" : : : "memory");
}

/* 16 numbers rounded. */
CUDA_OPS_INLINE __m256i rounded(__m512 x, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? (__m256i)_mm512_cvtneps_pbh(x) : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

CUDA_OPS_INLINE __m512 widened_16(__m256i x, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? widened_pairs(x) : _mm512_cvtph_ps(x);
}

/* Pixels of a panel that follow each other in target: from the panel's `first` on. */
struct pixel_run {
    int64_t first, count, offset;
};

/* Stores `channels` target channels (at most 32) of a panel's sums. */
static void store_pixels(const struct product *p, cuda_ops_dtype dtype, uint16_t *target, const uint16_t *bias,
                         const float *sums, const struct pixel_run *runs, int count, int64_t channels)
{
    const int64_t column = p->target_step_x * p->target.column;
    if (p->target.channel == 1) {
        const __mmask16 lower = (__mmask16)first_lanes_32(channels),
                        upper = (__mmask16)(first_lanes_32(channels) >> SIDE);
        const __m512 zero = _mm512_setzero_ps();
        const __m512 first = bias ? widened_16(_mm256_maskz_loadu_epi16(lower, bias), dtype) : zero;
        const __m512 second = bias ? widened_16(_mm256_maskz_loadu_epi16(upper, bias + SIDE), dtype) : zero;
        for (int i = 0; i < count; i++)
            for (int64_t q = 0; q < runs[i].count; q++) {
                const int64_t row = runs[i].first + q;
                const float *const from = sums + row / SIDE * 2 * SIDE * SIDE + row % SIDE * SIDE;
                uint16_t *const to = target + runs[i].offset + q * column;
                _mm256_mask_storeu_epi16(to, lower, rounded(_mm512_add_ps(_mm512_loadu_ps(from), first), dtype));
                if (upper)
                    _mm256_mask_storeu_epi16(
                        to + SIDE, upper, rounded(_mm512_add_ps(_mm512_loadu_ps(from + SIDE * SIDE), second), dtype));
            }
        return;
    }
    for (int64_t c0 = 0; c0 < channels; c0 += SIDE) {
        uint32_t turned[SIDE * PANEL + PANEL] __attribute__((aligned(64)));
        const float *const from = sums + c0 / SIDE * SIDE * SIDE;
        transpose_16(turned, PANEL, (const uint32_t *)from, SIDE);
        transpose_16(turned + SIDE, PANEL, (const uint32_t *)(from + 2 * SIDE * SIDE), SIDE);
        for (int64_t c = 0; c < min_i64(SIDE, channels - c0); c++) {
            const float *const row = (const float *)turned + c * PANEL;
            const __m512 b = _mm512_set1_ps(bias ? widened_half(bias[c0 + c], dtype) : 0);
            uint16_t *const of_channel = target + (c0 + c) * p->target.channel;
            for (int i = 0; i < count; i++) {
                uint16_t *const to = of_channel + runs[i].offset;
                for (int64_t q = 0; q < runs[i].count; q += SIDE) {
                    const __mmask16 mask = (__mmask16)first_lanes_32(min_i64(SIDE, runs[i].count - q));
                    const __m256i halves =
                        rounded(_mm512_add_ps(_mm512_maskz_loadu_ps(mask, row + runs[i].first + q), b), dtype);
                    if (column == 1) {
                        _mm256_mask_storeu_epi16(to + q, mask, halves);
                        continue;
                    }
                    uint16_t values[SIDE];
                    _mm256_storeu_si256((__m256i *)values, halves);
                    for (int64_t l = 0; l < min_i64(SIDE, runs[i].count - q); l++)
                        to[(q + l) * column] = values[l];
                }
            }
        }
    }
}

/* Whether pixels are read where they lie: what would be staged is the source. */
static bool is_direct(const struct product *p, const struct tiling *t)
{
    return !t->split && !t->thin && p->kernel_height * p->kernel_width == 1 && p->phases_y * p->phases_x == 1 &&
           p->step_y * p->step_x == 1 && p->first_y == 0 && p->first_x == 0 && p->source.channel == 1 &&
           p->source_channels % STEP == 0 && p->target_height == p->source_height &&
           p->target_width == p->source_width && p->target_step_y * p->target_step_x == 1 &&
           p->source.column * PANEL <= t->staged;
}

void cuda_ops_conv2d_tiled_run(uint16_t *target, const uint16_t *source, const uint16_t *prepared, const uint16_t *bias,
                               const struct product *p, cuda_ops_conv2d_pass pass, int64_t begin, int64_t end,
                               void *workspace, cuda_ops_dtype dtype)
{
    const struct tiling t = tiling_of(p, pass, dtype);
    uint16_t *const staged = workspace;
    const bool direct = is_direct(p, &t);
    struct tile_configuration before;
    configure_tiles(&before);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t group = unit % p->groups, block = unit / p->groups % t.blocks;
        const int64_t first_image = unit / p->groups / t.blocks * t.images, first = block * t.rows;
        const int64_t images = min_i64(t.images, p->images - first_image);
        const int64_t all_rows = max_i64(1, ceil_div_i64(p->target_height, p->target_step_y));
        const int64_t rows = min_i64(t.rows, all_rows - first);
        if (unit == begin && !direct) /* columns of padding, and channels that are missing, stay */
            memset(staged, 0, (size_t)(t.staged * t.parts) * sizeof(uint16_t));
        for (int64_t i = 0; i < images && !direct; i++)
            stage_pixels(&t, p, dtype, staged + i * t.planes * t.plane * t.pixel,
                         source + (first_image + i) * p->source.image + group * p->source_channels * p->source.channel,
                         first, rows);
        int64_t taps_before = 0;
        for (int64_t y = 0; y < p->phases_y; y++)
            for (int64_t x = 0; x < p->phases_x; x++) {
                const struct axis of_rows = axis_of(p, true, y), of_columns = axis_of(p, false, x);
                const int64_t taps = t.thin ? of_rows.count : of_rows.count * of_columns.count;
                const int64_t height = min_i64(rows, ceil_div_i64(p->target_height - y, p->target_step_y) - first);
                const int64_t width = ceil_div_i64(p->target_width - x, p->target_step_x);
                int64_t offsets[MOST_RUNS];
                for (int64_t tap = 0; tap < taps; tap++) {
                    if (t.thin) {
                        offsets[tap] = tap * p->tap_step_y * t.pitch * t.pixel;
                        continue;
                    }
                    const int64_t i = tap / of_columns.count, j = tap % of_columns.count;
                    offsets[tap] =
                        t.pixel * staged_pixel(&t, p, of_rows.distance + i * of_rows.distance_step - p->first_y,
                                               of_columns.distance + j * of_columns.distance_step - p->first_x);
                }
                /* Pixels through the padding, or panels of each row. */
                const int64_t row_panels = ceil_div_i64(width, PANEL);
                const int64_t positions = height > 0 ? (height - 1) * t.pitch + width : 0;
                const int64_t panels = height <= 0 ? 0 : t.thin ? height * row_panels : ceil_div_i64(positions, PANEL);
                const size_t pitch =
                    (size_t)(direct ? p->source.column : (t.thin ? p->step_x : 1) * t.pixel) * sizeof(uint16_t);
                for (int64_t j = 0; j < t.panels; j++) {
                    const uint16_t *const b0 = prepared + p->groups * t.panels * panel_elements(&t, taps_before) +
                                               (group * t.panels + j) * panel_elements(&t, taps);
                    const uint16_t *const b1 = b0 + panel_elements(&t, taps) / 2;
                    const int64_t channel = group * p->target_channels + j * PANEL;
                    const int64_t channels = min_i64(PANEL, p->target_channels - j * PANEL);
                    for (int64_t number = 0; number < images * panels; number++) {
                        const int64_t image = number / panels, panel = number % panels;
                        struct pixel_run runs[PANEL];
                        int count = 0;
                        int64_t start;
                        if (t.thin) {
                            const int64_t u = panel / row_panels, v = panel % row_panels * PANEL;
                            start = u * p->step_y * t.pitch + v * p->step_x;
                            runs[count++] = (struct pixel_run){0, min_i64(PANEL, width - v),
                                                               (first + u) * p->target_step_y * p->target.row +
                                                                   v * p->target_step_x * p->target.column};
                        } else {
                            start = panel * PANEL;
                            const int64_t stop = min_i64(positions, start + PANEL);
                            for (int64_t q = start; q < stop;) {
                                const int64_t u = q / t.pitch, v = q % t.pitch, row_end = q - v + t.pitch;
                                if (v < width)
                                    runs[count++] = (struct pixel_run){q - start, min_i64(stop - q, width - v),
                                                                       (first + u) * p->target_step_y * p->target.row +
                                                                           v * p->target_step_x * p->target.column};
                                q = row_end;
                            }
                        }
                        const uint16_t *pixels = staged + (image * t.planes * t.plane + start) * t.pixel;
                        if (direct) {
                            const int64_t number_of_pixel =
                                ((first_image + image) * p->source_height + first) * p->source_width + start;
                            const int64_t left = p->images * p->source_height * p->source_width - number_of_pixel;
                            pixels = source + number_of_pixel * p->source.column + group * p->source_channels;
                            if (left < PANEL) { /* tiles would be read from behind the tensor */
                                for (int64_t q = 0; q < left; q++)
                                    memcpy(staged + q * p->source.column, pixels + q * p->source.column,
                                           (size_t)p->source_channels * sizeof(uint16_t));
                                pixels = staged;
                            }
                        }
                        float sums[SUMS] __attribute__((aligned(64)));
                        if (t.split && channels > SIDE)
                            sum_runs(true, true, sums, pixels, pitch, t.staged, b0, b1, offsets, taps, t.steps);
                        else if (t.split)
                            sum_runs(false, true, sums, pixels, pitch, t.staged, b0, b1, offsets, taps, t.steps);
                        else if (channels > SIDE)
                            sum_runs(true, false, sums, pixels, pitch, t.staged, b0, b1, offsets, taps, t.steps);
                        else
                            sum_runs(false, false, sums, pixels, pitch, t.staged, b0, b1, offsets, taps, t.steps);
                        store_pixels(p, dtype,
                                     target + (first_image + image) * p->target.image + channel * p->target.channel +
                                         y * p->target.row + x * p->target.column,
                                     bias ? bias + channel : NULL, sums, runs, count, channels);
                    }
                }
                taps_before += taps;
            }
    }
    release_tiles(&before);
}

/* Stages an image channel by channel: element q of channel c's planes goes to to[c * pitch + q]. Columns of padding are
 * zeros before. */
static void stage_channels(const struct tiling *t, const struct product *p, cuda_ops_dtype dtype, uint16_t *to,
                           int64_t pitch, const uint16_t *source, int64_t first, int64_t rows)
{
    const int64_t y0 = first * p->step_y + p->first_y, x0 = p->first_x, channels = p->source_channels;
    uint16_t lanes[STEP];
    for (int q = 0; q < STEP; q++)
        lanes[q] = (uint16_t)(q * p->step_x);
    const __m512i every = _mm512_loadu_si512(lanes);
    for (int64_t index = 0; index < (rows + t->halo) * p->remainders_y; index++) {
        const int64_t y = y0 + index / p->remainders_y * p->step_y + index % p->remainders_y;
        uint16_t *const to_row =
            to + index % p->remainders_y * p->remainders_x * t->plane + index / p->remainders_y * t->pitch;
        if (y < 0 || y >= p->source_height) {
            for (int part = 0; part < t->parts; part++)
                for (int64_t c = 0; c < channels; c++)
                    for (int64_t plane = 0; plane < p->remainders_x; plane++)
                        memset(to_row + part * t->staged + c * pitch + plane * t->plane, 0,
                               (size_t)t->pitch * sizeof(uint16_t));
            continue;
        }
        for (int64_t x = 0; x < p->source_width; x += STEP)
            for (int64_t c = 0; c < channels; c += PANEL) {
                uint16_t tiles[2 * 2 * TILE] __attribute__((aligned(64)));
                const int64_t lines = min_i64(PANEL, channels - c), depth = min_i64(STEP, p->source_width - x);
                pack_streams(dtype, t->split, false, tiles, TILE * t->parts,
                             source + y * p->source.row + x * p->source.column + c * p->source.channel,
                             p->source.channel, p->source.column, lines, depth);
                for (int64_t plane = 0; plane < p->remainders_x; plane++) {
                    /* Of this plane columns [k, last) are among these pixels, from the q-th on. */
                    int64_t k, last;
                    columns_within(x0 + plane - x, p->step_x, t->pitch, depth, &k, &last);
                    const int64_t q = x0 + plane - x + k * p->step_x;
                    if (k >= last)
                        continue;
                    const __mmask32 mask = first_lanes_32(last - k);
                    const __m512i taken = _mm512_add_epi16(every, _mm512_set1_epi16((int16_t)q));
                    for (int part = 0; part < t->parts; part++)
                        for (int64_t i = 0; i < lines; i++) {
                            const uint16_t *const tile = tiles + (i / SIDE * t->parts + part) * TILE + i % SIDE * STEP;
                            _mm512_mask_storeu_epi16(to_row + part * t->staged + (c + i) * pitch + plane * t->plane + k,
                                                     mask, _mm512_permutexvar_epi16(taken, _mm512_loadu_si512(tile)));
                        }
                }
            }
    }
}

CUDA_OPS_INLINE void add_products(const bool right, const bool split, float *sums, bool add, const uint16_t *a,
                                  size_t pitch, int64_t low, int64_t image, const uint16_t *b0, const uint16_t *b1,
                                  int64_t images, int64_t steps)
{
    const int64_t lower = SIDE * (int64_t)(pitch / 2), next = split ? 2 * TILE : TILE;
    if (!has_tile_registers()) {
        if (!add)
            clear_others(true, right, sums);
        for (int row = 0; row < PANEL; row += rows_at_once(right)) {
            float *const at = sums + row / SIDE * 2 * SIDE * SIDE + row % SIDE * SIDE;
            const uint16_t *of_b0 = b0, *of_b1 = b1;
            __m512 vectors[VECTORS];
            begin_rows(right, vectors, at, add);
            for (int64_t i = 0; i < images; i++) {
                const uint16_t *from = a + i * image + row * (int64_t)(pitch / 2);
                for (int64_t s = 0; s < steps; s++, from += STEP, of_b0 += next, of_b1 += next)
                    add_rows(right, split, false, vectors, from, pitch, low, of_b0, of_b1);
            }
            end_rows(right, vectors, at);
        }
        return;
    }
    __asm__ volatile("" : : : "memory");
    begin_sums(sums, add);
    for (int64_t i = 0; i < images; i++) {
        const uint16_t *from = a + i * image;
        for (int64_t s = 0; s < steps; s++, from += STEP, b0 += next, b1 += next)
            add_square(true, right, split, false, from, pitch, from + lower, pitch, low, b0, b1);
    }
    end_sums(sums);
    __asm__ volatile("" : : : "memory");
}

/* A unit is a group, a split of the blocks of pixels, or a piece of the output channels. partial[group][panel of output
 * channels][panel of input channels][tap]: tiles whose rows are input channels. */
void cuda_ops_conv2d_tiled_weight(float *partial, const uint16_t *grad_output, const uint16_t *input,
                                  const struct product *p, int64_t begin, int64_t end, void *workspace,
                                  cuda_ops_dtype dtype)
{
    const struct tiling t = tiling_of(p, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, dtype);
    const struct weight_cut cut = weight_cut(p, &t);
    const int64_t image_pixels = t.planes * t.plane, channel_pitch = t.staged / t.pixel, taps = t.runs;
    uint16_t *const staged = workspace;
    const int64_t most_depth = t.images * depth_of_rows(&t, t.rows);
    uint16_t *const packed = staged + round_up_i64(t.staged * t.parts + STEP, STEP);
    uint16_t *const padded = packed + most_depth * cut.piece * PANEL * t.parts;
    int64_t padded_images = 0, padded_rows = 0, padded_lines = 0; /* what its zeros are for */
    int64_t offsets[MOST_RUNS];
    for (int64_t tap = 0; tap < taps; tap++) {
        int64_t dy, dx;
        tap_row(p, 0, tap / p->kernel_width, &dy);
        tap_column(p, 0, tap % p->kernel_width, &dx);
        offsets[tap] = staged_pixel(&t, p, dy - p->first_y, dx - p->first_x);
    }
    struct tile_configuration before;
    configure_tiles(&before);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t piece = unit % cut.pieces, split = unit / cut.pieces % cut.splits;
        const int64_t group = unit / cut.pieces / cut.splits, first_panel = piece * cut.piece;
        const int64_t panels = min_i64(cut.piece, t.panels - first_panel);
        const int64_t lines = min_i64(panels * PANEL, p->target_channels - first_panel * PANEL);
        const int64_t blocks = t.groups_of_images * t.blocks, first_block = split * blocks / cut.splits;
        float *const sums =
            partial + split * cut.partial + (group * t.panels + first_panel) * cut.source_panels * taps * SUMS;
        for (int64_t block = first_block; block < (split + 1) * blocks / cut.splits; block++) {
            const int64_t first_image = block / t.blocks * t.images, first = block % t.blocks * t.rows;
            const int64_t images = min_i64(t.images, p->images - first_image);
            const int64_t rows = min_i64(t.rows, p->target_height - first), depth = depth_of_rows(&t, rows);
            if (unit == begin && block == first_block) /* columns of padding, and channels that are missing, stay */
                memset(staged, 0, (size_t)(t.staged * t.parts) * sizeof(uint16_t));
            if (images != padded_images || rows != padded_rows || lines != padded_lines)
                memset(padded, 0, (size_t)(images * depth * lines) * sizeof(uint16_t));
            padded_images = images, padded_rows = rows, padded_lines = lines;
            for (int64_t i = 0; i < images; i++) {
                stage_channels(&t, p, dtype, staged + i * image_pixels, channel_pitch,
                               input + (first_image + i) * p->source.image +
                                   group * p->source_channels * p->source.channel,
                               first, rows);
                const uint16_t *const g = grad_output + (first_image + i) * p->target.image +
                                          (group * p->target_channels + first_panel * PANEL) * p->target.channel +
                                          first * p->target.row;
                const bool by_pixels = p->target.channel == 1;
                for (int64_t y = 0; y < rows; y++)
                    if (by_pixels && p->target.column == lines)
                        memcpy(padded + (i * depth + y * t.pitch) * lines, g + y * p->target.row,
                               (size_t)(p->target_width * lines) * sizeof(uint16_t));
                    else if (by_pixels)
                        for (int64_t x = 0; x < p->target_width; x++)
                            memcpy(padded + (i * depth + y * t.pitch + x) * lines,
                                   g + y * p->target.row + x * p->target.column, (size_t)lines * sizeof(uint16_t));
                    else
                        for (int64_t o = 0; o < lines; o++)
                            memcpy(padded + o * images * depth + i * depth + y * t.pitch,
                                   g + o * p->target.channel + y * p->target.row,
                                   (size_t)p->target_width * sizeof(uint16_t));
            }
            const int64_t stream = images * depth / STEP * TILE * t.parts;
            for (int64_t j = 0; j < panels; j++) {
                const bool by_pixels = p->target.channel == 1;
                pack_streams(dtype, t.split, true, packed + 2 * j * stream, stream,
                             padded + j * PANEL * (by_pixels ? 1 : images * depth), by_pixels ? 1 : images * depth,
                             by_pixels ? lines : 1, min_i64(PANEL, lines - j * PANEL), images * depth);
            }
            const size_t pitch = (size_t)channel_pitch * sizeof(uint16_t);
            for (int64_t j = 0; j < panels; j++)
                for (int64_t c = 0; c < cut.source_panels; c++)
                    for (int64_t tap = 0; tap < taps; tap++) {
                        const uint16_t *const a = staged + c * PANEL * channel_pitch + offsets[tap];
                        const uint16_t *const b0 = packed + 2 * j * stream, *const b1 = b0 + stream;
                        float *const to = sums + ((j * cut.source_panels + c) * taps + tap) * SUMS;
                        const bool add = block > first_block, right = lines - j * PANEL > SIDE;
                        const int64_t steps = depth / STEP;
                        if (t.split && right)
                            add_products(true, true, to, add, a, pitch, t.staged, image_pixels, b0, b1, images, steps);
                        else if (t.split)
                            add_products(false, true, to, add, a, pitch, t.staged, image_pixels, b0, b1, images, steps);
                        else if (right)
                            add_products(true, false, to, add, a, pitch, t.staged, image_pixels, b0, b1, images, steps);
                        else
                            add_products(false, false, to, add, a, pitch, t.staged, image_pixels, b0, b1, images,
                                         steps);
                    }
        }
    }
    release_tiles(&before);
}

/* Panels [begin, end) of output channels: adds the splits' sums in order, and rounds. */
void cuda_ops_conv2d_tiled_reduce(uint16_t *grad_weight, const float *partial, const struct product *p, int64_t begin,
                                  int64_t end, cuda_ops_dtype dtype)
{
    const struct tiling t = tiling_of(p, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, dtype);
    const struct weight_cut cut = weight_cut(p, &t);
    for (int64_t number = begin; number < end; number++) {
        const int64_t group = number / t.panels, panel = number % t.panels;
        for (int64_t c0 = 0; c0 < p->source_channels; c0 += SIDE)
            for (int64_t o0 = panel * PANEL; o0 < min_i64(p->target_channels, (panel + 1) * PANEL); o0 += SIDE)
                for (int64_t tap = 0; tap < t.runs; tap++) {
                    const int64_t tile = ((number * cut.source_panels + c0 / PANEL) * t.runs + tap) * SUMS +
                                         (c0 % PANEL / SIDE * 2 + o0 % PANEL / SIDE) * SIDE * SIDE;
                    uint32_t total[SIDE * SIDE] __attribute__((aligned(64)));
                    for (int r = 0; r < SIDE; r++) {
                        __m512 sum = _mm512_loadu_ps(partial + tile + r * SIDE);
                        for (int64_t split = 1; split < cut.splits; split++)
                            sum = _mm512_add_ps(sum, _mm512_loadu_ps(partial + split * cut.partial + tile + r * SIDE));
                        _mm512_storeu_ps((float *)total + r * SIDE, sum);
                    }
                    transpose_16(total, SIDE, total, SIDE);
                    const int64_t inputs = min_i64(SIDE, p->source_channels - c0);
                    uint16_t *const to = grad_weight + group * p->weight.group + o0 * p->weight.target_channel +
                                         c0 * p->weight.source_channel + tap / p->kernel_width * p->weight.row +
                                         tap % p->kernel_width * p->weight.column;
                    for (int64_t o = 0; o < min_i64(SIDE, p->target_channels - o0); o++) {
                        const __m256i halves = rounded(_mm512_loadu_ps((const float *)total + o * SIDE), dtype);
                        uint16_t *const row = to + o * p->weight.target_channel;
                        if (p->weight.source_channel == 1) {
                            _mm256_mask_storeu_epi16(row, (__mmask16)first_lanes_32(inputs), halves);
                            continue;
                        }
                        uint16_t values[SIDE];
                        _mm256_storeu_si256((__m256i *)values, halves);
                        for (int64_t c = 0; c < inputs; c++)
                            row[c * p->weight.source_channel] = values[c];
                    }
                }
    }
}
#pragma GCC pop_options

#else

bool cuda_ops_conv2d_tiled_takes(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    (void)p, (void)pass, (void)dtype;
    return false;
}

bool cuda_ops_conv2d_tiled_needs_finite(const struct product *p, cuda_ops_conv2d_pass pass, cuda_ops_dtype dtype)
{
    (void)p, (void)pass, (void)dtype;
    return false;
}

void cuda_ops_conv2d_tiled_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                cuda_ops_dtype dtype)
{
    (void)plan, (void)p, (void)pass, (void)dtype;
}

void cuda_ops_conv2d_tiled_prepare(uint16_t *prepared, const uint16_t *weight, const struct product *p,
                                   cuda_ops_conv2d_pass pass, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    (void)prepared, (void)weight, (void)p, (void)pass, (void)begin, (void)end, (void)dtype;
}

void cuda_ops_conv2d_tiled_run(uint16_t *target, const uint16_t *source, const uint16_t *prepared, const uint16_t *bias,
                               const struct product *p, cuda_ops_conv2d_pass pass, int64_t begin, int64_t end,
                               void *workspace, cuda_ops_dtype dtype)
{
    (void)target, (void)source, (void)prepared, (void)bias, (void)p, (void)pass, (void)begin, (void)end;
    (void)workspace, (void)dtype;
}

void cuda_ops_conv2d_tiled_weight(float *partial, const uint16_t *grad_output, const uint16_t *input,
                                  const struct product *p, int64_t begin, int64_t end, void *workspace,
                                  cuda_ops_dtype dtype)
{
    (void)partial, (void)grad_output, (void)input, (void)p, (void)begin, (void)end, (void)workspace, (void)dtype;
}

void cuda_ops_conv2d_tiled_reduce(uint16_t *grad_weight, const float *partial, const struct product *p, int64_t begin,
                                  int64_t end, cuda_ops_dtype dtype)
{
    (void)grad_weight, (void)partial, (void)p, (void)begin, (void)end, (void)dtype;
}

#endif
