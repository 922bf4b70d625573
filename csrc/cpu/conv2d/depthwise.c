/* Depthwise convolution on the CPU: each channel with a kernel of its own. Lanes of a vector are channels whatever the
 * format: a strip of rows of one image and one vector of channels is staged with its padding (of contiguous tensors by
 * transposing blocks in registers, which costs a cycle or so an element, less than lanes of pixels would waste in rows
 * of 4, 7 or 14), all taps of a phase are then loads at one offset, and the results are written back the same way.
 *
 *   forward, backward_input   out[pixel] = sum over taps of weight[tap] * staged[pixel + offset[tap]], up to eight
 *                             pixels at a time; backward_input a stride phase after the other (conv2d/plan.h)
 *   backward_weight           sums[tap] = sum over pixels of grad_output[pixel] * staged[pixel + offset[tap]]
 *
 * Of channels_last, with at least a vector of channels, nothing is staged: rows of the result are made one after the
 * other in all channels, from the source where it lies. A vector of channels at a time would read a line of each pixel,
 * which no prefetcher follows. Pixels of which some taps fall into the padding take the others alone.
 *
 * float16 and bfloat16 are widened as they are loaded, and rounded as they are stored; in place, whole rows are widened
 * before they are read. Sums are of float.
 *
 * Bound by loads, one for each multiply-add, out of the first-level cache. */
#ifndef REAL

#include "common/half.h"
#include "conv2d/paths.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/halves_cpu.h"

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>
#endif

/* Where a tap reads, in vectors (of channels_last in elements), and which of the kernel's it is. */
struct tap {
    int64_t offset, index;
};

/* Where a column of the kernel reads, in elements, and the pixels that it reads the source for. */
struct span {
    int64_t offset, begin, end;
};

#define VECTOR_BYTES 16
#define TARGET(name) name##_any
#include "conv2d/depthwise_passes.h"

#if CUDA_OPS_WITH_TARGETS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define VECTOR_BYTES 32
#define TARGET(name) name##_avx2
#include "conv2d/depthwise_passes.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
#define VECTOR_BYTES 64
#define TARGET(name) name##_avx512
#include "conv2d/depthwise_passes.h"
#pragma GCC pop_options
#endif

enum {
    STRIP_BYTES = 1 << 16,    /* of a staged strip, or of the one row that there must be */
    MOST_PHASES = 16,         /* of an axis */
    MOST_ROW_BYTES = 1 << 22, /* of that row; wider ones are gathered.c's */
    FEWEST_UNITS = 16,        /* of backward_weight, and of channels_last */
    FEWEST_STAGED_PIXELS = 6, /* of a row of the target that is staged for its edges */
    UNIT_BLOCKS = 8           /* vectors of channels of a unit of backward_weight in channels_last */
};

static int64_t lanes_of(cuda_ops_dtype dtype)
{
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    const int64_t bytes = isa >= CUDA_OPS_CPU_AVX512 ? 64 : isa == CUDA_OPS_CPU_AVX2 ? 32 : 16;
    return bytes / (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

/* The strips of an image and what is staged of each. Distances are those of tap_row and tap_column. */
struct strips {
    int64_t low_y, low_x, extent_y, extent_x; /* the least distance, and how many there are up to the greatest */
    int64_t rows, count;                      /* of a phase of the target in a strip; strips of an image */
    int64_t staged_rows, staged_columns;
    int64_t lanes, channel_blocks, kernel;
};

static void extent_of(const struct product *p, bool rows, int64_t *low, int64_t *extent)
{
    int64_t least = INT64_MAX, most = INT64_MIN;
    for (int64_t phase = 0; phase < (rows ? p->phases_y : p->phases_x); phase++) {
        const struct axis axis = axis_of(p, rows, phase);
        if (axis.count == 0)
            continue;
        const int64_t last = axis.distance + (axis.count - 1) * axis.distance_step;
        least = min_i64(least, min_i64(axis.distance, last));
        most = max_i64(most, max_i64(axis.distance, last));
    }
    *low = least <= most ? least : 0;
    *extent = least <= most ? most - least + 1 : 1;
}

static struct strips strips_of(const struct product *p, cuda_ops_dtype dtype)
{
    struct strips s = {.lanes = lanes_of(dtype), .kernel = p->kernel_height * p->kernel_width};
    extent_of(p, true, &s.low_y, &s.extent_y);
    extent_of(p, false, &s.low_x, &s.extent_x);
    const int64_t rows = max_i64(1, ceil_div_i64(p->target_height, p->target_step_y));
    const int64_t columns = max_i64(1, ceil_div_i64(p->target_width, p->target_step_x));
    s.staged_columns = (columns - 1) * p->step_x + s.extent_x;
    const int64_t vector = s.lanes * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
    const int64_t most = (STRIP_BYTES / vector / s.staged_columns - s.extent_y) / p->step_y + 1;
    s.rows = max_i64(1, min_i64(rows, most));
    s.count = ceil_div_i64(rows, s.rows);
    s.rows = ceil_div_i64(rows, s.count);
    s.staged_rows = (s.rows - 1) * p->step_y + s.extent_y;
    s.channel_blocks = ceil_div_i64(p->groups, s.lanes);
    return s;
}

/* Whether both tensors are channels_last, and have a vector of channels. */
static bool in_place(const struct product *p, const struct strips *s)
{
    return p->source.channel == 1 && p->target.channel == 1 && p->groups >= s->lanes;
}

/* The same of forward and backward_input, which in place take pixels at the edges one by one: where most are, they are
 * staged with their padding, unless there would be far more of that. */
static bool runs_in_place(const struct product *p, const struct strips *s)
{
    const int64_t edges = s->extent_x - 1;
    const bool edgy = edges >= 4 && p->step_x == 1 && p->target_step_x == 1 && p->target_width >= edges &&
                      p->target_width >= FEWEST_STAGED_PIXELS && p->target_width < 3 * edges;
    return in_place(p, s) && !edgy;
}

/* The first channel of a block. In place the last block overlaps the one before rather than being filled up. */
static int64_t first_channel(const struct product *p, const struct strips *s, int64_t block, bool is_in_place)
{
    return is_in_place ? min_i64(block * s->lanes, p->groups - s->lanes) : block * s->lanes;
}

/* In place: the strips of an image. */
static int64_t strip_count(const struct product *p)
{
    return min_i64(p->target_height, ceil_div_i64(FEWEST_UNITS, max_i64(1, p->images)));
}

/* In place: the units that backward_weight cuts the channels into. */
static int64_t channel_units(const struct strips *s)
{
    return ceil_div_i64(s->channel_blocks, UNIT_BLOCKS);
}

static int64_t weight_splits(const struct product *p, const struct strips *s)
{
    if (in_place(p, s))
        return max_i64(1, min_i64(p->images * p->target_height, FEWEST_UNITS / channel_units(s)));
    return max_i64(1, min_i64(p->images, FEWEST_UNITS / s->channel_blocks));
}

static int64_t staged_elements(const struct strips *s)
{
    return s->staged_rows * s->staged_columns * s->lanes;
}

static int64_t target_elements(const struct product *p, const struct strips *s)
{
    return s->rows * p->target_step_y * p->target_width * s->lanes;
}

/* In place, of halves: rows of the source that are widened at a time, and the distance between two pixels of them, an odd
 * number of cache lines. Of 256 channels that lie close together, pixels and rows would share a few sets of the first-level
 * cache. */
static int64_t widened_rows(const struct strips *s)
{
    return s->extent_y + 4;
}

/* Of the taps before these rows, which begin with a cache line. */
static int64_t taps_bytes(const struct strips *s)
{
    return round_up_i64(s->kernel * (int64_t)sizeof(struct tap), 64);
}

static int64_t widened_pixel(const struct product *p)
{
    return (p->groups + 15) / 16 * 16 + ((p->groups + 15) / 16 % 2 ? 0 : 16);
}

bool cuda_ops_conv2d_depthwise_takes(const struct product *p, cuda_ops_dtype dtype)
{
    if (p->source_channels != 1 || p->target_channels != 1 || p->groups < 4 || p->target_step_y > MOST_PHASES ||
        p->target_step_x > MOST_PHASES || p->target_height * p->target_width == 0)
        return false;
    const struct strips s = strips_of(p, dtype);
    return s.extent_y * s.staged_columns * s.lanes * 8 <= MOST_ROW_BYTES;
}

void cuda_ops_conv2d_depthwise_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                    cuda_ops_dtype dtype)
{
    const struct strips s = strips_of(p, dtype);
    const size_t element = dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
    const int64_t blocks = s.channel_blocks * s.kernel * s.lanes;
    *plan = (cuda_ops_conv2d_plan){0};
    if (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        plan->count = (in_place(p, &s) ? channel_units(&s) : s.channel_blocks) * weight_splits(p, &s);
        plan->reduce_count = p->groups;
        plan->prepared_bytes = (size_t)(weight_splits(p, &s) * blocks) * element;
    } else {
        plan->prepare_count = s.channel_blocks;
        plan->count = p->images * (runs_in_place(p, &s) ? strip_count(p) : s.channel_blocks * s.count);
        plan->prepared_bytes = (size_t)blocks * element;
    }
    int64_t elements = staged_elements(&s) + target_elements(p, &s) + 3 * s.lanes;
    if (is_half(dtype) && pass != CUDA_OPS_CONV2D_BACKWARD_WEIGHT && runs_in_place(p, &s))
        elements = widened_rows(&s) * p->source_width * widened_pixel(p) + (p->target_width + 1) * p->groups;
    const int64_t bytes =
        s.kernel * (int64_t)(sizeof(struct tap) + sizeof(struct span)) + 64 + elements * (int64_t)element;
    plan->workspace_bytes = (size_t)round_up_i64(bytes, 64);
}

/* The taps of a phase; returns how many. */
static int64_t list_taps(struct tap *taps, const struct product *p, const struct strips *s, int64_t y, int64_t x)
{
    const struct axis rows = axis_of(p, true, y), columns = axis_of(p, false, x);
    struct tap *tap = taps;
    for (int64_t i = 0; i < rows.count; i++)
        for (int64_t j = 0; j < columns.count; j++, tap++) {
            const int64_t row = rows.distance + i * rows.distance_step - s->low_y;
            const int64_t column = columns.distance + j * columns.distance_step - s->low_x;
            tap->offset = row * s->staged_columns + column;
            tap->index = (rows.first + i * rows.step) * p->kernel_width + columns.first + j * columns.step;
        }
    return tap - taps;
}

/* The pixels of a phase that all taps, or with `j` one column of the kernel, read the source for: [begin, end). */
static struct span reach(const struct product *p, const struct axis *columns, int64_t j, int64_t count, int64_t pixels)
{
    const int64_t a = columns->distance + j * columns->distance_step;
    const int64_t b = a + (count - 1) * columns->distance_step, low = min_i64(a, b), high = max_i64(a, b);
    struct span span = {.offset = a * p->source.column};
    span.begin = low >= 0 ? 0 : min_i64(pixels, ceil_div_i64(-low, p->step_x));
    span.end = high >= p->source_width
                   ? span.begin
                   : max_i64(span.begin, min_i64(pixels, (p->source_width - 1 - high) / p->step_x + 1));
    return span;
}

#define REAL float
#define FN(name) name##_f32
#define FN_FOR(set, name) name##_f32_##set
#define DTYPE CUDA_OPS_FLOAT32
#include "conv2d/depthwise.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef DTYPE
#define REAL double
#define FN(name) name##_f64
#define FN_FOR(set, name) name##_f64_##set
#define DTYPE CUDA_OPS_FLOAT64
#include "conv2d/depthwise.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef DTYPE
#define REAL float
#define FN(name) name##_bf16
#define FN_FOR(set, name) name##_bf16_##set
#define DTYPE CUDA_OPS_BFLOAT16
#define HALF DTYPE
#include "conv2d/depthwise.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef DTYPE
#define REAL float
#define FN(name) name##_f16
#define FN_FOR(set, name) name##_f16_##set
#define DTYPE CUDA_OPS_FLOAT16
#include "conv2d/depthwise.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef DTYPE
#undef HALF

#define BY_DTYPE(name, ...)                                                                                            \
    do {                                                                                                               \
        if (dtype == CUDA_OPS_FLOAT32)                                                                                 \
            name##_f32(__VA_ARGS__);                                                                                   \
        else if (dtype == CUDA_OPS_FLOAT64)                                                                            \
            name##_f64(__VA_ARGS__);                                                                                   \
        else if (dtype == CUDA_OPS_BFLOAT16)                                                                           \
            name##_bf16(__VA_ARGS__);                                                                                  \
        else                                                                                                           \
            name##_f16(__VA_ARGS__);                                                                                   \
    } while (0)

void cuda_ops_conv2d_depthwise_prepare(void *prepared, const void *weight, const struct product *p, int64_t begin,
                                       int64_t end, cuda_ops_dtype dtype)
{
    BY_DTYPE(prepare, prepared, weight, p, begin, end);
}

void cuda_ops_conv2d_depthwise_run(void *target, const void *source, const void *prepared, const void *bias,
                                   const struct product *p, int64_t begin, int64_t end, void *workspace,
                                   cuda_ops_dtype dtype)
{
    BY_DTYPE(run, target, source, prepared, bias, p, begin, end, workspace);
}

void cuda_ops_conv2d_depthwise_weight(void *prepared, const void *grad_output, const void *input,
                                      const struct product *p, int64_t begin, int64_t end, void *workspace,
                                      cuda_ops_dtype dtype)
{
    BY_DTYPE(run_weight, prepared, grad_output, input, p, begin, end, workspace);
}

void cuda_ops_conv2d_depthwise_reduce(void *grad_weight, const void *prepared, const struct product *p, int64_t begin,
                                      int64_t end, cuda_ops_dtype dtype)
{
    BY_DTYPE(reduce, grad_weight, prepared, p, begin, end);
}

#else

#ifdef HALF
#define STORED uint16_t
#define LOAD_ONE(x) widened_half(x, DTYPE)
#define STORE_ONE(x) rounded_half(x, DTYPE)
#else
#define STORED REAL
#define LOAD_ONE(x) (x)
#define STORE_ONE(x) (x)
#endif

#if CUDA_OPS_WITH_TARGETS
#define CALL(name, ...)                                                                                                \
    do {                                                                                                               \
        const cuda_ops_cpu_isa isa_ = cuda_ops_cpu_isa_current();                                                      \
        if (isa_ >= CUDA_OPS_CPU_AVX512)                                                                               \
            FN_FOR(avx512, name)(__VA_ARGS__);                                                                         \
        else if (isa_ == CUDA_OPS_CPU_AVX2)                                                                            \
            FN_FOR(avx2, name)(__VA_ARGS__);                                                                           \
        else                                                                                                           \
            FN_FOR(any, name)(__VA_ARGS__);                                                                            \
    } while (0)
#else
#define CALL(name, ...) FN_FOR(any, name)(__VA_ARGS__)
#endif

/* Blocks of channels [begin, end): prepared[block][tap][channel], zero beyond the last channel. */
static void FN(prepare)(REAL *prepared, const STORED *weight, const struct product *p, int64_t begin, int64_t end)
{
    const struct strips s = strips_of(p, DTYPE);
    const int64_t lanes = s.lanes, kernel = s.kernel;
    const bool is_in_place = runs_in_place(p, &s);
    for (int64_t block = begin; block < end; block++) {
        const int64_t first = first_channel(p, &s, block, is_in_place), channels = min_i64(lanes, p->groups - first);
        REAL *const to = prepared + block * kernel * lanes;
        const STORED *const from = weight + first * kernel;
        for (int64_t t = 0; t < kernel; t++) {
            for (int64_t l = 0; l < channels; l++)
                to[t * lanes + l] = LOAD_ONE(from[l * kernel + t]);
            for (int64_t l = channels; l < lanes; l++)
                to[t * lanes + l] = 0;
        }
    }
}

/* The strip's rows and columns of the source, with zeros around: staged row i is source row first + i. */
static void FN(stage)(REAL *staged, const STORED *source, const struct product *p, const struct strips *s,
                      int64_t first, int64_t rows, int lanes)
{
    const int64_t begin_y = max_i64(0, first), end_y = max_i64(begin_y, min_i64(p->source_height, first + rows));
    const int64_t begin_x = max_i64(0, s->low_x);
    const int64_t end_x = max_i64(begin_x, min_i64(p->source_width, s->low_x + s->staged_columns));
    if (begin_y > first || end_y < first + rows || begin_x > s->low_x || end_x < s->low_x + s->staged_columns)
        memset(staged, 0, (size_t)(rows * s->staged_columns * s->lanes) * sizeof(REAL));
    if (begin_x == end_x)
        return;
    const int64_t row = s->staged_columns * s->lanes, width = end_x - begin_x;
    REAL *const to = staged + (begin_y - first) * row + (begin_x - s->low_x) * s->lanes;
    const STORED *const from = source + begin_y * p->source.row + begin_x * p->source.column;
    if (width == p->source_width) /* rows follow each other */
        CALL(stage_pixels, to, row, width, from, p->source.channel, p->source.column, lanes, (end_y - begin_y) * width);
    else
        for (int64_t y = begin_y; y < end_y; y++)
            CALL(stage_pixels, to + (y - begin_y) * row, row, width, from + (y - begin_y) * p->source.row,
                 p->source.channel, p->source.column, lanes, width);
}

#ifndef HALF
/* A row of the target, in place, of which `source` and `target` are the images. */
static void FN(run_row)(REAL *target, const REAL *source, const REAL *prepared, const REAL *bias,
                        const struct product *p, struct tap *taps, const struct axis *rows, const struct axis *columns,
                        int64_t row)
{
    const int64_t u = row / p->target_step_y, kernel = p->kernel_height * p->kernel_width;
    const int64_t step = p->step_x * p->source.column, out_step = p->target_step_x * p->target.column;
    const struct axis *const y = &rows[row % p->target_step_y];
    for (int64_t phase = 0; phase < p->phases_x; phase++) {
        const struct axis *const x = &columns[phase];
        const int64_t pixels = ceil_div_i64(p->target_width - phase, p->target_step_x);
        const struct span inside = x->count ? reach(p, x, 0, x->count, pixels) : (struct span){.end = pixels};
        REAL *const out = target + row * p->target.row + phase * p->target.column;
        for (int64_t v = 0, end; v < pixels; v = end) {
            const bool all = inside.begin <= v && v < inside.end;
            end = all ? inside.end : v + 1;
            int64_t count = 0;
            for (int64_t i = 0; i < y->count; i++) {
                const int64_t source_row = u * p->step_y + y->distance + i * y->distance_step;
                for (int64_t j = 0; j < x->count && 0 <= source_row && source_row < p->source_height; j++) {
                    const int64_t distance = x->distance + j * x->distance_step, column = v * p->step_x + distance;
                    if (all || (0 <= column && column < p->source_width))
                        taps[count++] =
                            (struct tap){source_row * p->source.row + column * p->source.column,
                                         (y->first + i * y->step) * p->kernel_width + x->first + j * x->step};
                }
            }
            CALL(convolve_pixels, out + v * out_step, out_step, source, step, prepared, kernel, bias, taps, count,
                 end - v, p->groups);
        }
    }
}

/* In place a unit is an image and a strip of rows. */
static void FN(run_in_place)(REAL *target, const REAL *source, const REAL *prepared, const REAL *bias,
                             const struct product *p, int64_t begin, int64_t end, struct tap *taps)
{
    const int64_t strips = strip_count(p);
    struct axis rows[MOST_PHASES], columns[MOST_PHASES];
    for (int64_t y = 0; y < p->phases_y; y++)
        rows[y] = axis_of(p, true, y);
    for (int64_t x = 0; x < p->phases_x; x++)
        columns[x] = axis_of(p, false, x);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t image = unit / strips, strip = unit % strips;
        for (int64_t row = strip * p->target_height / strips; row < (strip + 1) * p->target_height / strips; row++)
            FN(run_row)(target + image * p->target.image, source + image * p->source.image, prepared, bias, p, taps,
                        rows, columns, row);
    }
}
#else
/* The same: rows of the source are widened once, and wait in a buffer for the rows of the target that read them. */
static void FN(run_in_place)(uint16_t *target, const uint16_t *source, const float *prepared, const uint16_t *bias,
                             const struct product *p, int64_t begin, int64_t end, struct tap *taps)
{
    const struct strips s = strips_of(p, DTYPE);
    const int64_t strips = strip_count(p), capacity = widened_rows(&s);
    const int64_t pixel = widened_pixel(p), source_row = p->source_width * pixel;
    const int64_t target_row = p->target_width * p->groups;
    float *const widened = (float *)((char *)taps + taps_bytes(&s)), *const out = widened + capacity * source_row;
    float *const widened_bias = out + target_row;
    struct axis rows[MOST_PHASES], columns[MOST_PHASES];
    for (int64_t y = 0; y < p->phases_y; y++)
        rows[y] = axis_of(p, true, y);
    for (int64_t x = 0; x < p->phases_x; x++)
        columns[x] = axis_of(p, false, x);
    if (bias)
        (void)cuda_ops_widen_cpu(widened_bias, bias, p->groups, DTYPE);
    struct product of_floats = *p;
    of_floats.source.row = source_row;
    of_floats.source.column = pixel;
    of_floats.target.row = 0;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t image = unit / strips, strip = unit % strips;
        const uint16_t *const from = source + image * p->source.image;
        int64_t first = 0, last = 0; /* rows of the source that are there */
        for (int64_t row = strip * p->target_height / strips; row < (strip + 1) * p->target_height / strips; row++) {
            const int64_t low = row / p->target_step_y * p->step_y + s.low_y;
            const int64_t wanted = max_i64(0, low), until = min_i64(p->source_height, low + s.extent_y);
            if (wanted >= last)
                first = last = wanted;
            if (until - first > capacity) {
                memmove(widened, widened + (wanted - first) * source_row,
                        (size_t)((last - wanted) * source_row) * sizeof(float));
                first = wanted;
            }
            for (; last < until; last++)
                for (int64_t x = 0; x < p->source_width; x++)
                    (void)cuda_ops_widen_cpu(widened + (last - first) * source_row + x * pixel,
                                             from + last * p->source.row + x * p->groups, p->groups, DTYPE);
            /* The address at which the image would begin if all of it were there. */
            const uintptr_t begins = (uintptr_t)widened - (uintptr_t)(first * source_row) * sizeof(float);
            run_row_f32(out, (const float *)begins, prepared, bias ? widened_bias : NULL, &of_floats, taps, rows,
                        columns, row);
            (void)cuda_ops_round_cpu(target + image * p->target.image + row * p->target.row, out, target_row, DTYPE);
        }
    }
}
#endif

/* A unit is an image, a block of channels, and a strip. */
static void FN(run)(STORED *target, const STORED *source, const REAL *prepared, const STORED *bias,
                    const struct product *p, int64_t begin, int64_t end, void *workspace)
{
    const struct strips s = strips_of(p, DTYPE);
    if (runs_in_place(p, &s)) {
        FN(run_in_place)(target, source, prepared, bias, p, begin, end, workspace);
        return;
    }
    REAL *const staged = workspace, *const out = staged + staged_elements(&s);
    REAL *const block_bias = out + target_elements(p, &s);
    struct tap *const taps = (struct tap *)(block_bias + s.lanes);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t u0 = unit % s.count * s.rows, block = unit / s.count % s.channel_blocks;
        const int64_t image = unit / s.count / s.channel_blocks, channel = block * s.lanes;
        const int lanes = (int)min_i64(s.lanes, p->groups - channel);
        const int64_t rows = min_i64(s.rows, ceil_div_i64(p->target_height, p->target_step_y) - u0);
        for (int l = 0; l < s.lanes && bias; l++)
            block_bias[l] = l < lanes ? LOAD_ONE(bias[channel + l]) : 0;
        FN(stage)(staged, source + image * p->source.image + channel * p->source.channel, p, &s,
                  u0 * p->step_y + s.low_y, (rows - 1) * p->step_y + s.extent_y, lanes);
        for (int64_t y = 0; y < p->phases_y; y++)
            for (int64_t x = 0; x < p->phases_x; x++) {
                const int64_t count = list_taps(taps, p, &s, y, x);
                const int64_t u_count = min_i64(rows, ceil_div_i64(p->target_height - y, p->target_step_y) - u0);
                CALL(convolve, out + (y * p->target_width + x) * s.lanes, p->target_step_y * p->target_width,
                     p->target_step_x, staged, p->step_y * s.staged_columns, p->step_x,
                     prepared + block * s.kernel * s.lanes, bias ? block_bias : NULL, taps, count, u_count,
                     ceil_div_i64(p->target_width - x, p->target_step_x));
            }
        const int64_t first = u0 * p->target_step_y;
        const int64_t pixels = min_i64(rows * p->target_step_y, p->target_height - first) * p->target_width;
        CALL(write_pixels, target + image * p->target.image + channel * p->target.channel + first * p->target.row, out,
             p->target.channel, p->target.column, lanes, pixels);
    }
}

/* In place a unit is a split of all rows and a few blocks of channels: sums[split][block][tap][channel]. */
static void FN(run_weight_in_place)(REAL *sums, const STORED *grad_output, const STORED *input, const struct product *p,
                                    int64_t begin, int64_t end, struct span *spans)
{
    const struct strips s = strips_of(p, DTYPE);
    const int64_t splits = weight_splits(p, &s), units = channel_units(&s), all = p->images * p->target_height;
    const struct axis y = axis_of(p, true, 0), x = axis_of(p, false, 0);
    for (int64_t j = 0; j < x.count; j++)
        spans[j] = reach(p, &x, j, 1, p->target_width);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t split = unit / units, first = unit % units * s.channel_blocks / units;
        const int64_t blocks = (unit % units + 1) * s.channel_blocks / units - first;
        const int64_t channel = first_channel(p, &s, first, true);
        const int64_t last = first_channel(p, &s, first + blocks - 1, true) - channel;
        REAL *const to = sums + (split * s.channel_blocks + first) * s.kernel * s.lanes;
        memset(to, 0, (size_t)(blocks * s.kernel * s.lanes) * sizeof(REAL));
        for (int64_t row = split * all / splits; row < (split + 1) * all / splits; row++) {
            const int64_t image = row / p->target_height, u = row % p->target_height,
                          start = u * p->step_y + y.distance;
            /* The rows of the kernel that read the source, which follow each other. */
            int64_t from = 0, until = y.count;
            while (from < until && start + from * y.distance_step < 0)
                from++;
            while (from < until && start + (until - 1) * y.distance_step >= p->source_height)
                until--;
            if (from < until)
                CALL(weight_pixels, to + from * p->kernel_width * s.lanes, s.kernel,
                     grad_output + image * p->target.image + u * p->target.row + channel, p->target.column,
                     input + image * p->source.image + (start + from * y.distance_step) * p->source.row + channel,
                     y.distance_step * p->source.row, until - from, p->step_x * p->source.column, spans, x.count,
                     p->target_width, blocks, last);
        }
    }
}

/* A unit is a split of the images and a block of channels: sums[split][block][tap][channel]. */
static void FN(run_weight)(REAL *sums, const STORED *grad_output, const STORED *input, const struct product *p,
                           int64_t begin, int64_t end, void *workspace)
{
    const struct strips s = strips_of(p, DTYPE);
    if (in_place(p, &s)) {
        FN(run_weight_in_place)(sums, grad_output, input, p, begin, end, workspace);
        return;
    }
    REAL *const staged = workspace, *const grad = staged + staged_elements(&s);
    struct tap *const taps = (struct tap *)(grad + target_elements(p, &s));
    const int64_t count = list_taps(taps, p, &s, 0, 0), splits = weight_splits(p, &s);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t split = unit / s.channel_blocks, block = unit % s.channel_blocks, channel = block * s.lanes;
        const int lanes = (int)min_i64(s.lanes, p->groups - channel);
        REAL *const to = sums + unit * s.kernel * s.lanes;
        memset(to, 0, (size_t)(s.kernel * s.lanes) * sizeof(REAL));
        for (int64_t image = split * p->images / splits; image < (split + 1) * p->images / splits; image++)
            for (int64_t u0 = 0; u0 < p->target_height; u0 += s.rows) {
                const int64_t rows = min_i64(s.rows, p->target_height - u0);
                FN(stage)(staged, input + image * p->source.image + channel * p->source.channel, p, &s,
                          u0 * p->step_y + s.low_y, (rows - 1) * p->step_y + s.extent_y, lanes);
                const STORED *const from =
                    grad_output + image * p->target.image + channel * p->target.channel + u0 * p->target.row;
                CALL(stage_pixels, grad, p->target_width * s.lanes, p->target_width, from, p->target.channel,
                     p->target.column, lanes, rows * p->target_width);
                CALL(weight_sums, to, taps, count, grad, staged, p->step_y * s.staged_columns, p->step_x, rows,
                     p->target_width);
            }
    }
}

/* Channels [begin, end): adds the splits' sums in order. */
static void FN(reduce)(STORED *grad_weight, const REAL *sums, const struct product *p, int64_t begin, int64_t end)
{
    const struct strips s = strips_of(p, DTYPE);
    const int64_t splits = weight_splits(p, &s), size = s.channel_blocks * s.kernel * s.lanes;
    for (int64_t channel = begin; channel < end; channel++)
        for (int64_t t = 0; t < s.kernel; t++) {
            const int64_t block = channel / s.lanes, lane = channel - first_channel(p, &s, block, in_place(p, &s));
            const REAL *const from = sums + (block * s.kernel + t) * s.lanes + lane;
            REAL sum = 0;
            for (int64_t split = 0; split < splits; split++)
                sum += from[split * size];
            grad_weight[channel * s.kernel + t] = STORE_ONE(sum);
        }
}

#undef CALL
#undef STORED
#undef LOAD_ONE
#undef STORE_ONE

#endif
