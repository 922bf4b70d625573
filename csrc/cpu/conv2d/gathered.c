/* Convolution on the CPU as products of matrices, without an im2col tensor. A block of at most MOST_PIXELS pixels and of
 * as many of their taps as fit the second-level cache is gathered from the image (conv2d/gather.h) and multiplied there
 * by gemm (gemm/single_thread.h), before the next one. With k = (channel, tap), in the weight's own order:
 *
 *   forward          output[o][pixel]     = sum over k of weight[o][k] * gathered[k][pixel]
 *   backward_input   grad_input[c][pixel] = sum over k = (o, tap) of weight'[k][c] * gathered[k][pixel], a stride phase
 *                    at a time (conv2d/plan.h)
 *   backward_weight  grad_weight[o][k]    = sum over pixels of grad_output[o][pixel] * gathered[k][pixel]
 *
 * and in channels_last with gathered[pixel][k], k = (tap, channel), and pixels as rows: nothing is transposed but by
 * gemm, as it packs; with a small weight nothing is gathered either (conv2d/indirect.h). A 1x1 kernel of stride 1 is
 * multiplied where it lies. Units of work are blocks of pixels, cut further by output channels if there are few; of
 * backward_weight blocks of k, cut further into splits of pixels whose sums are added in order. How much is cut depends
 * on sizes alone, so that results repeat for any number of threads.
 *
 * Bound by gemm's multiply-adds; gathering an element costs a fraction of a cycle to a cycle, and serves all
 * output channels of the group. */
#ifndef REAL

#include "conv2d/paths.h"

#include "cuda_ops/cpu_isa.h"
#include "gemm/single_thread.h"

#ifdef __GNUC__
#define NOINLINE __attribute__((noinline))
#else
#define NOINLINE
#endif

/* Products that gather nothing (conv2d/indirect.h). */
enum {
    INDIRECT_DEPTH = 2304,        /* taps times channels, at most */
    MOST_INDIRECT_TAPS = 64,      /* whose pointers are on the stack */
    GROUPS_BYTES = 1 << 17,       /* of the weights of groups that are taken together */
    GROUPS_CHANNELS = 256,        /* and their channels */
    FEWEST_INDIRECT_CHANNELS = 8, /* of one tap: fewer do not pay for its pointers */
    INDIRECT_BYTES = 3 << 16,     /* of a group's weight, which each tile of pixels reads from the second-level cache */
    INDIRECT_BYTES_AVX512 = 3 << 18
};

/* Products of contiguous tensors, and of few channels in channels_last, that gather nothing: units of whole images, or
 * of rows of one, whose source is laid out anew in the second-level cache as channels_last, with its padding. */
struct relaid {
    int64_t images, rows, groups; /* of a unit, of the target */
    int64_t column, row, image;   /* distances in the source that is laid out */
    int64_t height, width;        /* of it: for `rows` */
    int64_t low_y, low_x;         /* where it begins in the source's coordinates, for the target's first row */
    bool merged;                  /* a kernel's row is one tap, of its columns' channels side by side */
};

/* How a source of so many channels is laid out; returns how many of its rows one of the target reads. */
static int64_t relaid_geometry(struct relaid *cut, const struct lattice *l, int64_t column)
{
    const int64_t last_x = (l->tap_columns - 1) * l->tap_x, last_y = (l->tap_rows - 1) * l->tap_y;
    cut->column = column;
    cut->merged = l->tap_x == 1 && column == l->channels;
    cut->low_x = l->first_x + min_i64(0, last_x);
    cut->low_y = l->first_y + min_i64(0, last_y);
    cut->width = (l->v_count - 1) * l->step_x + (last_x < 0 ? -last_x : last_x) + 1;
    cut->row = cut->width * cut->column;
    return (last_y < 0 ? -last_y : last_y) + 1;
}

#define VECTOR_BYTES 16
#define TARGET(name) name##_any
#define MULTIPLY_ADD_F32(a, b, sum) ((a) * (b) + (sum))
#define MULTIPLY_ADD_F64(a, b, sum) ((a) * (b) + (sum))
#include "conv2d/gather_passes.h"

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")
/* All ones in the lanes whose bit is set. */
CUDA_OPS_INLINE __m256i lanes_of_bits_32(uint32_t bits)
{
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
}
CUDA_OPS_INLINE __m256i lanes_of_bits_64(uint32_t bits)
{
    const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((int)bits), lane), lane);
}
#define VECTOR_BYTES 32
#define TARGET(name) name##_avx2
/* Intrinsics, as in gemm.c: left to the compiler, a pixel's bits would depend on its tile. */
#define MULTIPLY_ADD_F32(a, b, sum) (vector_f32_avx2) _mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)(b), (__m256)(sum))
#define MULTIPLY_ADD_F64(a, b, sum) (vector_f64_avx2) _mm256_fmadd_pd(_mm256_set1_pd(a), (__m256d)(b), (__m256d)(sum))
#define LOAD_BITS_F32(from, bits) ((vector_f32_avx2)_mm256_maskload_ps(from, lanes_of_bits_32(bits)))
#define LOAD_BITS_F64(from, bits) ((vector_f64_avx2)_mm256_maskload_pd(from, lanes_of_bits_64(bits)))
#include "conv2d/gather_passes.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
#define VECTOR_BYTES 64
#define TARGET(name) name##_avx512
#define MULTIPLY_ADD_F32(a, b, sum) (vector_f32_avx512) _mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)(b), (__m512)(sum))
#define MULTIPLY_ADD_F64(a, b, sum) (vector_f64_avx512) _mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)(b), (__m512d)(sum))
#define LOAD_BITS_F32(from, bits) ((vector_f32_avx512)_mm512_maskz_loadu_ps((__mmask16)(bits), from))
#define LOAD_BITS_F64(from, bits) ((vector_f64_avx512)_mm512_maskz_loadu_pd((__mmask8)(bits), from))
#include "conv2d/gather_passes.h"
#pragma GCC pop_options
#endif

enum {
    GATHERED_BYTES = 1 << 18,  /* of a gathered block: it, and a block of the weight, fit the second-level cache */
    PITCH_SLACK = 16,          /* between gathered rows: gather_rows writes beyond, and they map to other cache sets */
    FEWEST_UNITS = 16,         /* of work, so that several threads have some */
    FEWEST_CHANNELS = 64,      /* of a unit that takes part of the output channels: fewer do not pay for gathering */
    FEWEST_SPLIT_PIXELS = 512, /* of a split of backward_weight, whose sums are written and read once more */
    MOST_INDIRECT_WEIGHT_CHANNELS = 16, /* with more, taps side by side fill vectors better than channels do */
    FEW_INDIRECT_OUTPUTS = 32,          /* with so few, two vectors of channels: gathering serves no more than them */
    FEWEST_INDIRECT_PIXELS = 128,       /* ... that gathers nothing */
    INDIRECT_PIXELS = 256,              /* of rows that are read again and again by it, from a cache */
    MOST_GATHERED_ROWS = 1024,
    FEWEST_RELAID_PIXELS = 192, /* of the target, of a unit that may take several images */
    FEW_ROWS = 32
};

static size_t size_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
}

/* The size of equal blocks, at most `most`, and if that is a unit or more a multiple of `unit` (or all there is). */
static int64_t even_block(int64_t size, int64_t most, int64_t unit)
{
    const int64_t step = most < unit ? 1 : unit, blocks = ceil_div_i64(size, max_i64(1, most / step * step));
    return max_i64(1, min_i64(size, round_up_i64(ceil_div_i64(size, max_i64(1, blocks)), step)));
}

/* A stride phase: its lattice, and where its taps are in the weight. */
struct phase {
    struct lattice lattice;
    struct axis y, x;
    int64_t taps, depth, pixels;
    int64_t first_tap; /* how many taps the phases before it have */
    bool direct;       /* gathered would be what the source is */
};

static struct phase phase_of(const struct product *p, int64_t y, int64_t x, int64_t first_tap)
{
    struct phase phase = {.y = axis_of(p, true, y), .x = axis_of(p, false, x), .first_tap = first_tap};
    phase.lattice = (struct lattice){
        .source = p->source,
        .height = p->source_height,
        .width = p->source_width,
        .channels = p->source_channels,
        .step_y = p->step_y,
        .step_x = p->step_x,
        .u_count = ceil_div_i64(p->target_height - y, p->target_step_y),
        .v_count = ceil_div_i64(p->target_width - x, p->target_step_x),
        .tap_rows = phase.y.count,
        .tap_columns = phase.x.count,
        .first_y = phase.y.distance,
        .tap_y = phase.y.distance_step,
        .first_x = phase.x.distance,
        .tap_x = phase.x.distance_step,
    };
    const struct lattice *const l = &phase.lattice;
    phase.taps = l->tap_rows * l->tap_columns;
    phase.depth = phase.taps * l->channels;
    phase.pixels = p->images * l->u_count * l->v_count;
    phase.direct = phase.taps == 1 && l->step_y == 1 && l->step_x == 1 && l->first_y == 0 && l->first_x == 0 &&
                   l->u_count == l->height && l->v_count == l->width;
    return phase;
}

/* How the pixels of a phase are cut: into blocks of `size`, which if `per_image` end with an image. */
struct blocks {
    int64_t size, per_image, count; /* per_image: blocks of one image; 0: blocks go on into the next image */
};

static struct blocks pixel_blocks(const struct product *p, const struct phase *phase, bool channels_last)
{
    const int64_t image = phase->lattice.u_count * phase->lattice.v_count;
    const int64_t most = phase->pixels >= 4096 ? 256 : 128;
    struct blocks blocks = {0};
    /* Tiles are two vectors of pixels wide: what is missing in an image's last one must be little, or be gathered. */
    if (!channels_last && image >= (phase->direct ? 32 : 96) && (round_up_i64(image, 16) - image) * 12 <= image) {
        blocks.size = even_block(image, most, 32);
        blocks.per_image = ceil_div_i64(image, blocks.size);
        blocks.count = p->images * blocks.per_image;
    } else {
        blocks.size = even_block(phase->pixels, channels_last ? most / 12 * 12 : most, channels_last ? 12 : 32);
        blocks.count = ceil_div_i64(phase->pixels, blocks.size);
    }
    return blocks;
}

static void block_range(const struct blocks *blocks, const struct phase *phase, int64_t block, int64_t *begin,
                        int64_t *end)
{
    if (blocks->per_image) {
        const int64_t image = phase->lattice.u_count * phase->lattice.v_count;
        const int64_t first = block / blocks->per_image * image, within = block % blocks->per_image * blocks->size;
        *begin = first + within;
        *end = first + min_i64(image, within + blocks->size);
    } else {
        *begin = block * blocks->size;
        *end = min_i64(phase->pixels, *begin + blocks->size);
    }
}

static int64_t depth_block(int64_t depth, int64_t pixels, cuda_ops_dtype dtype)
{
    const int64_t most = GATHERED_BYTES / (int64_t)size_of(dtype) / (pixels + PITCH_SLACK);
    return even_block(depth, min_i64(most, MOST_GATHERED_ROWS), 8);
}

/* Into how many pieces of how many channels the target's are cut. They are rows of tiles, or columns if channels_last. */
static int64_t channel_block(const struct product *p, const struct blocks *blocks, bool channels_last)
{
    const int64_t units = blocks->count * p->groups;
    const int64_t pieces =
        min_i64(ceil_div_i64(FEWEST_UNITS, max_i64(1, units)), max_i64(1, p->target_channels / (2 * FEWEST_CHANNELS)));
    return max_i64(1, min_i64(p->target_channels,
                              round_up_i64(ceil_div_i64(p->target_channels, pieces), channels_last ? 32 : 12)));
}

static int64_t pitch_of(const struct product *p)
{
    const int64_t pitch = round_up_i64(p->target_channels, 16);
    return pitch % 64 == 0 ? pitch + 16 : pitch; /* rows a power of two apart would map to the same cache sets */
}

static bool fits_indirect(const struct product *p, const struct phase *phase, cuda_ops_dtype dtype)
{
    const int64_t bytes = phase->depth * pitch_of(p) * (int64_t)size_of(dtype);
    return !phase->direct && phase->taps > 0 && phase->taps <= MOST_INDIRECT_TAPS && phase->depth <= INDIRECT_DEPTH &&
           bytes <= (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512 ? INDIRECT_BYTES_AVX512 : INDIRECT_BYTES);
}

/* Whether a phase's product of channels_last gathers nothing. */
static bool is_indirect(const struct product *p, const struct phase *phase, cuda_ops_dtype dtype)
{
    return fits_indirect(p, phase, dtype) && phase->lattice.channels >= FEWEST_INDIRECT_CHANNELS;
}

/* The same of the weight's gradient, which loads parts of vectors; only with AVX2 are there instructions for that.
 * Contiguous tensors are laid out anew. */
static bool is_indirect_weight(const struct product *p, const struct phase *phase, cuda_ops_dtype dtype)
{
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    const bool few_outputs = p->target_channels <= FEW_INDIRECT_OUTPUTS && isa >= CUDA_OPS_CPU_AVX512;
    const int64_t most = few_outputs ? 2 * 64 / (int64_t)size_of(dtype) : MOST_INDIRECT_WEIGHT_CHANNELS;
    return is_indirect(p, phase, dtype) && phase->lattice.channels <= most && isa >= CUDA_OPS_CPU_AVX2;
#else
    (void)p, (void)phase, (void)dtype;
    return false;
#endif
}

/* Groups that a unit of `units` without them takes together, so that where taps lie is found once for all of them: as
 * many as have a small weight. */
static int64_t groups_together(const struct product *p, const struct phase *phase, int64_t units, cuda_ops_dtype dtype)
{
    const int64_t bytes = max_i64(1, phase->depth * pitch_of(p) * (int64_t)size_of(dtype));
    const int64_t most =
        min_i64(GROUPS_BYTES / bytes, GROUPS_CHANNELS / max_i64(p->source_channels, p->target_channels));
    return even_block(p->groups, max_i64(1, min_i64(most, p->groups * units / FEWEST_UNITS)), 1);
}

static int64_t relaid_units(const struct product *p, const struct phase *phase, const struct relaid *cut)
{
    return ceil_div_i64(p->images, cut->images) * ceil_div_i64(phase->lattice.u_count, cut->rows) *
           ceil_div_i64(p->groups, cut->groups);
}

/* Whether a product is made so, and how. */
static bool relaid_cut(struct relaid *cut, const struct product *p, bool channels_last, cuda_ops_dtype dtype)
{
    if (p->target_step_y != 1 || p->target_step_x != 1)
        return false;
    const struct phase phase = phase_of(p, 0, 0, 0);
    const struct lattice *const l = &phase.lattice;
    const bool few = l->channels < FEWEST_INDIRECT_CHANNELS;
    if (!fits_indirect(p, &phase, dtype) || channels_last != few || l->v_count > MOST_PIXELS || p->images == 0)
        return false;
    if (few && (p->groups > 1 || l->tap_x != 1 || l->tap_columns * l->channels < FEWEST_INDIRECT_CHANNELS))
        return false;
    cut->groups = groups_together(p, &phase, ceil_div_i64(phase.pixels, FEWEST_RELAID_PIXELS), dtype);
    const int64_t span_y = relaid_geometry(cut, l, few ? l->channels : round_up_i64(cut->groups * l->channels, 16));
    const int64_t most = GATHERED_BYTES / (int64_t)size_of(dtype) / cut->row; /* rows of the source */
    const int64_t all = (l->u_count - 1) * l->step_y + span_y,
                  wanted = ceil_div_i64(FEWEST_UNITS, ceil_div_i64(p->groups, cut->groups));
    if (most < span_y + 3 * l->step_y && all > most)
        return false;
    const int64_t halo = (span_y - 1) / l->step_y;
    cut->images = 1;
    cut->rows = all <= most ? l->u_count : (most - span_y) / l->step_y + 1;
    if (p->images < wanted) { /* fewer rows, but not many more of them twice */
        const int64_t pieces = ceil_div_i64(wanted, p->images);
        cut->rows = min_i64(cut->rows, max_i64(4 * (halo + 1), ceil_div_i64(l->u_count, pieces)));
    } else if (cut->rows == l->u_count) {
        const int64_t together = ceil_div_i64(FEWEST_RELAID_PIXELS, l->u_count * l->v_count);
        cut->images = max_i64(1, min_i64(min_i64(together, most / all), p->images / wanted));
    }
    cut->rows = ceil_div_i64(l->u_count, ceil_div_i64(l->u_count, cut->rows));
    cut->height = (cut->rows - 1) * l->step_y + span_y;
    cut->image = cut->height * cut->row;
    return true;
}

/* Whether the product reads `prepared`, a matrix [k][target channel] for each phase and group, or the weight itself. */
static bool prepares(const struct product *p, cuda_ops_conv2d_pass pass, bool channels_last, bool relaid)
{
    const bool one_tap = p->kernel_height * p->kernel_width == 1;
    const bool few_channels = !one_tap && p->source_channels >= FEWEST_INDIRECT_CHANNELS && p->depth <= 512;
    if (relaid)
        return true;
    if (pass == CUDA_OPS_CONV2D_FORWARD)
        return channels_last && p->images * p->target_height * p->target_width > (few_channels ? 16 : 256);
    return !one_tap;
}

/* Groups of a unit of a phase that is not laid out anew. */
static int64_t group_block(const struct product *p, const struct phase *phase, const struct blocks *blocks,
                           bool indirect, cuda_ops_dtype dtype)
{
    return indirect && p->groups > 1 ? groups_together(p, phase, blocks->count, dtype) : 1;
}

/* `indirect`: whether nothing is gathered. */
static int64_t phase_units(const struct product *p, const struct phase *phase, bool channels_last, bool indirect,
                           cuda_ops_dtype dtype)
{
    const struct blocks blocks = pixel_blocks(p, phase, channels_last);
    return blocks.count * ceil_div_i64(p->groups, group_block(p, phase, &blocks, indirect, dtype)) *
           ceil_div_i64(p->target_channels, channel_block(p, &blocks, channels_last));
}

struct weight_cut {
    struct blocks blocks;
    int64_t depth_block, depth_blocks, splits;
    bool indirect;     /* nothing is gathered */
    bool gathers_grad; /* blocks go over the ends of images in contiguous tensors */
};

/* The target's rows that backward_weight takes of contiguous tensors at a time, 0 if they are too long. */
static int64_t relaid_weight_rows(const struct product *p, const struct lattice *l, cuda_ops_dtype dtype)
{
    struct relaid cut;
    const int64_t span = relaid_geometry(&cut, l, round_up_i64(l->channels, 16)), size = (int64_t)size_of(dtype);
    const int64_t most = GATHERED_BYTES / size / cut.row; /* rows of the source */
    if (most < span || l->v_count > MOST_PIXELS || p->target_channels * p->depth * size > GEMM_WORKSPACE_BYTES)
        return 0;
    return min_i64((most - span) / l->step_y + 1, max_i64(1, INDIRECT_PIXELS / l->v_count));
}

static struct weight_cut weight_cut(const struct product *p, const struct phase *phase, bool channels_last,
                                    cuda_ops_dtype dtype)
{
    const int64_t image = phase->lattice.u_count * phase->lattice.v_count;
    struct weight_cut cut = {0};
    if (is_indirect_weight(p, phase, dtype) && (channels_last || relaid_weight_rows(p, &phase->lattice, dtype) > 0)) {
        cut.indirect = true;
        const int64_t rows = p->images * phase->lattice.u_count, wanted = ceil_div_i64(FEWEST_UNITS, p->groups);
        cut.depth_block = phase->depth;
        cut.depth_blocks = 1;
        cut.splits = max_i64(1, min_i64(min_i64(wanted, rows), phase->pixels / FEWEST_INDIRECT_PIXELS));
        return cut;
    }
    if (!channels_last && image >= (phase->direct ? 64 : 128)) {
        cut.blocks.size = even_block(image, 256, 1);
        cut.blocks.per_image = ceil_div_i64(image, cut.blocks.size);
        cut.blocks.count = p->images * cut.blocks.per_image;
    } else {
        cut.blocks.size = even_block(phase->pixels, 256, 1);
        cut.blocks.count = ceil_div_i64(phase->pixels, cut.blocks.size);
        cut.gathers_grad = !channels_last;
    }
    cut.depth_block = depth_block(phase->depth, cut.blocks.size, dtype);
    if (phase->depth >= 8 * 96)
        cut.depth_block = min_i64(cut.depth_block, round_up_i64(ceil_div_i64(phase->depth, 8), 96));
    else
        cut.depth_block = even_block(phase->depth, cut.depth_block, 96);
    cut.depth_blocks = ceil_div_i64(phase->depth, cut.depth_block);
    const int64_t wanted = ceil_div_i64(FEWEST_UNITS, max_i64(1, cut.depth_blocks * p->groups));
    cut.splits = max_i64(1, min_i64(min_i64(wanted, cut.blocks.count), phase->pixels / FEWEST_SPLIT_PIXELS));
    return cut;
}

static size_t round_up_bytes(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int64_t weight_size(const struct product *p)
{
    return round_up_i64(p->groups * p->target_channels * p->depth, 16);
}

void cuda_ops_conv2d_gathered_plan(cuda_ops_conv2d_plan *plan, const struct product *p, cuda_ops_conv2d_pass pass,
                                   bool channels_last, cuda_ops_dtype dtype)
{
    const size_t element = size_of(dtype);
    *plan = (cuda_ops_conv2d_plan){0};
    if (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        const struct phase phase = phase_of(p, 0, 0, 0);
        const struct weight_cut cut = weight_cut(p, &phase, channels_last, dtype);
        plan->count = p->groups * cut.depth_blocks * cut.splits;
        plan->reduce_count = cut.splits > 1 ? p->groups * p->target_channels : 0;
        plan->prepared_bytes = cut.splits > 1 ? (size_t)(cut.splits * weight_size(p)) * element : 0;
    } else {
        struct relaid cut;
        const bool relaid = relaid_cut(&cut, p, channels_last, dtype);
        const bool prepared = prepares(p, pass, channels_last, relaid);
        int64_t first_tap = 0;
        for (int64_t y = 0; y < p->phases_y; y++)
            for (int64_t x = 0; x < p->phases_x; x++) {
                const struct phase phase = phase_of(p, y, x, first_tap);
                const bool indirect = channels_last && prepared && is_indirect(p, &phase, dtype);
                plan->count +=
                    relaid ? relaid_units(p, &phase, &cut) : phase_units(p, &phase, channels_last, indirect, dtype);
                first_tap += phase.taps;
            }
        if (prepared) {
            plan->prepare_count =
                p->groups * (pass == CUDA_OPS_CONV2D_FORWARD ? p->target_channels : p->source_channels);
            /* The last panel of a piece of the channels is read beyond them. */
            plan->prepared_bytes = (size_t)(p->groups * p->depth * pitch_of(p) + 2 * MAX_LANES) * element;
        }
    }
    /* gemm's, the gathered block, grad_output's or the target's block. */
    plan->workspace_bytes =
        GEMM_WORKSPACE_BYTES +
        round_up_bytes((size_t)(GATHERED_BYTES + MOST_GATHERED_ROWS * PITCH_SLACK * (int64_t)element)) +
        round_up_bytes((size_t)(max_i64(p->target_channels, p->groups > 1 ? GROUPS_CHANNELS : 0) + PITCH_SLACK) *
                       (MOST_PIXELS + PITCH_SLACK) * element);
}

#define REAL float
#define FN(name) name##_f32
#define FN_FOR(set, name) name##_f32_##set
#define GEMM cuda_ops_gemm_f32
#define DTYPE CUDA_OPS_FLOAT32
#include "conv2d/gathered.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef GEMM
#undef DTYPE
#define REAL double
#define FN(name) name##_f64
#define FN_FOR(set, name) name##_f64_##set
#define GEMM cuda_ops_gemm_f64
#define DTYPE CUDA_OPS_FLOAT64
#include "conv2d/gathered.c"

#include "common/undef_real.h"
#undef FN_FOR
#undef GEMM
#undef DTYPE

void cuda_ops_conv2d_gathered_prepare(void *prepared, const void *weight, const struct product *p,
                                      cuda_ops_conv2d_pass pass, bool channels_last, int64_t begin, int64_t end,
                                      cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_FLOAT32)
        prepare_f32(prepared, weight, p, pass, channels_last, begin, end);
    else
        prepare_f64(prepared, weight, p, pass, channels_last, begin, end);
}

void cuda_ops_conv2d_gathered_run(void *target, const void *source, const void *weight, const void *prepared,
                                  const void *bias, const struct product *p, cuda_ops_conv2d_pass pass,
                                  bool channels_last, int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_FLOAT32)
        run_f32(target, source, weight, prepared, bias, p, pass, channels_last, begin, end, workspace);
    else
        run_f64(target, source, weight, prepared, bias, p, pass, channels_last, begin, end, workspace);
}

void cuda_ops_conv2d_gathered_weight(void *grad_weight, void *prepared, const void *grad_output, const void *input,
                                     const struct product *p, bool channels_last, int64_t begin, int64_t end,
                                     void *workspace, cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_FLOAT32)
        run_weight_f32(grad_weight, prepared, grad_output, input, p, channels_last, begin, end, workspace);
    else
        run_weight_f64(grad_weight, prepared, grad_output, input, p, channels_last, begin, end, workspace);
}

void cuda_ops_conv2d_gathered_reduce(void *grad_weight, const void *prepared, const struct product *p,
                                     bool channels_last, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (dtype == CUDA_OPS_FLOAT32)
        reduce_f32(grad_weight, prepared, p, channels_last, begin, end);
    else
        reduce_f64(grad_weight, prepared, p, channels_last, begin, end);
}

#else

static void FN(gather)(REAL *to, int64_t pitch, const REAL *source, const struct lattice *l, bool channels_last,
                       int64_t k_begin, int64_t k_end, int64_t begin, int64_t end)
{
    void (*rows)(REAL *, int64_t, const REAL *, const struct lattice *, int64_t, int64_t, int64_t, int64_t) =
        FN_FOR(any, gather_rows);
    void (*pixels)(REAL *, int64_t, const REAL *, const struct lattice *, int64_t, int64_t, int64_t, int64_t) =
        FN_FOR(any, gather_pixels);
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512) {
        rows = FN_FOR(avx512, gather_rows);
        pixels = FN_FOR(avx512, gather_pixels);
    } else if (isa == CUDA_OPS_CPU_AVX2) {
        rows = FN_FOR(avx2, gather_rows);
        pixels = FN_FOR(avx2, gather_pixels);
    }
#endif
    (channels_last ? pixels : rows)(to, pitch, source, l, k_begin, k_end, begin, end);
}

static void FN(multiply_taps)(REAL *to, struct image_layout target, const REAL *source, const struct lattice *l,
                              const REAL *weight, int64_t pitch, const REAL *bias, int64_t groups, int64_t columns,
                              int64_t begin, int64_t end)
{
    void (*multiply)(REAL *, struct image_layout, const REAL *, const struct lattice *, const REAL *, int64_t,
                     const REAL *, int64_t, int64_t, int64_t, int64_t) = FN_FOR(any, multiply_taps);
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        multiply = FN_FOR(avx512, multiply_taps);
    else if (isa == CUDA_OPS_CPU_AVX2)
        multiply = FN_FOR(avx2, multiply_taps);
#endif
    multiply(to, target, source, l, weight, pitch, bias, groups, columns, begin, end);
}

static void FN(multiply_relaid)(REAL *target, const REAL *source, const struct product *p, const struct lattice *l,
                                const struct relaid *cut, bool channels_last, const REAL *weight, int64_t pitch,
                                const REAL *bias, int64_t groups, int64_t images, int64_t u0, int64_t rows,
                                REAL *staged, REAL *block)
{
    void (*multiply)(REAL *, const REAL *, const struct product *, const struct lattice *, const struct relaid *, bool,
                     const REAL *, int64_t, const REAL *, int64_t, int64_t, int64_t, int64_t, REAL *, REAL *) =
        FN_FOR(any, multiply_relaid);
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        multiply = FN_FOR(avx512, multiply_relaid);
    else if (isa == CUDA_OPS_CPU_AVX2)
        multiply = FN_FOR(avx2, multiply_relaid);
#endif
    multiply(target, source, p, l, cut, channels_last, weight, pitch, bias, groups, images, u0, rows, staged, block);
}

static void FN(prepare_forward)(REAL *to, int64_t pitch, const REAL *weight, int64_t channels, int64_t depth,
                                int64_t taps)
{
    void (*prepare)(REAL *, int64_t, const REAL *, int64_t, int64_t, int64_t) = FN_FOR(any, prepare_forward);
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        prepare = FN_FOR(avx512, prepare_forward);
    else if (isa == CUDA_OPS_CPU_AVX2)
        prepare = FN_FOR(avx2, prepare_forward);
#endif
    prepare(to, pitch, weight, channels, depth, taps);
}

static void FN(prepare_backward)(REAL *to, int64_t pitch, const REAL *weight, int64_t channels, int64_t taps,
                                 const int64_t *rows)
{
    void (*prepare)(REAL *, int64_t, const REAL *, int64_t, int64_t, const int64_t *) = FN_FOR(any, prepare_backward);
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        prepare = FN_FOR(avx512, prepare_backward);
    else if (isa == CUDA_OPS_CPU_AVX2)
        prepare = FN_FOR(avx2, prepare_backward);
#endif
    prepare(to, pitch, weight, channels, taps, rows);
}

/* Forward: output channels [begin, end) are columns of prepared[group][tap][c][o].
 * Backward: output channels [begin, end) are rows of it: [phase][group][o][tap][c], or [phase][group][tap][o][c] if
 * channels_last or relaid. */
static void FN(prepare)(REAL *prepared, const REAL *weight, const struct product *p, cuda_ops_conv2d_pass pass,
                        bool channels_last, int64_t begin, int64_t end)
{
    const int64_t pitch = pitch_of(p), all_taps = p->kernel_height * p->kernel_width;
    struct relaid cut;
    const bool tap_first = channels_last || relaid_cut(&cut, p, channels_last, DTYPE);
    if (pass == CUDA_OPS_CONV2D_FORWARD) {
        enum { BLOCK = 16 };
        const int64_t taps = channels_last ? 1 : all_taps; /* a contiguous weight has them side by side */
        for (int64_t first = begin; first < end;) {
            const int64_t group = first / p->target_channels, o = first % p->target_channels;
            const int64_t count = min_i64(min_i64(BLOCK - o % BLOCK, p->target_channels - o), end - first);
            const REAL *const from = weight + first * p->depth;
            REAL *const to = prepared + group * p->depth * pitch + o;
            /* Whole vectors, of which nothing is another range's. */
            if (o % BLOCK == 0 && (count == BLOCK || o + count == p->target_channels))
                FN(prepare_forward)(to, pitch, from, count, p->depth, taps);
            else
                for (int64_t k = 0; k < p->depth; k++)
                    for (int64_t i = 0; i < count; i++)
                        to[(k % taps * (p->depth / taps) + k / taps) * pitch + i] = from[i * p->depth + k];
            first += count;
        }
        return;
    }
    const int64_t channels = p->target_channels;
    const bool exchanges = !channels_last && all_taps <= MOST_INDIRECT_TAPS;
    /* Of each tap: its phase's first tap, how many that has, and its place among them. */
    int64_t first_of[MOST_INDIRECT_TAPS], taps_of[MOST_INDIRECT_TAPS], place_of[MOST_INDIRECT_TAPS];
    for (int64_t tap = 0; tap < all_taps && exchanges; tap++)
        taps_of[tap] = 0;
    int64_t first_tap = 0;
    for (int64_t y = 0; y < p->phases_y; y++)
        for (int64_t x = 0; x < p->phases_x; x++) {
            const struct axis rows = axis_of(p, true, y), columns = axis_of(p, false, x);
            const int64_t taps = rows.count * columns.count;
            for (int64_t tap = 0; tap < taps; tap++) {
                const int64_t r = rows.first + tap / columns.count * rows.step;
                const int64_t s = columns.first + tap % columns.count * columns.step;
                if (exchanges) {
                    first_of[r * p->kernel_width + s] = first_tap;
                    taps_of[r * p->kernel_width + s] = taps;
                    place_of[r * p->kernel_width + s] = tap;
                    continue;
                }
                for (int64_t o = begin; o < end; o++) {
                    const int64_t group = o / p->source_channels, k = o % p->source_channels;
                    const REAL *const from = weight + group * p->weight.group + k * p->weight.source_channel +
                                             r * p->weight.row + s * p->weight.column;
                    REAL *const phase = prepared + (first_tap * p->groups + group * taps) * p->source_channels * pitch;
                    REAL *const to = phase + (tap_first ? tap * p->source_channels + k : k * taps + tap) * pitch;
                    if (p->weight.target_channel == 1)
                        memcpy(to, from, (size_t)channels * sizeof(REAL));
                    else
                        for (int64_t c = 0; c < channels; c++)
                            to[c] = from[c * p->weight.target_channel];
                    for (int64_t c = channels; c < round_up_i64(channels, 16); c++)
                        to[c] = 0;
                }
            }
            first_tap += taps;
        }
    for (int64_t o = begin; o < end && exchanges; o++) {
        const int64_t group = o / p->source_channels, k = o % p->source_channels;
        int64_t rows[MOST_INDIRECT_TAPS];
        for (int64_t tap = 0; tap < all_taps; tap++)
            rows[tap] = taps_of[tap] == 0 ? -1
                                          : (first_of[tap] * p->groups + group * taps_of[tap]) * p->source_channels +
                                                (tap_first ? place_of[tap] * p->source_channels + k
                                                           : k * taps_of[tap] + place_of[tap]);
        FN(prepare_backward)(prepared, pitch, weight + group * p->weight.group + k * p->weight.source_channel, channels,
                             all_taps, rows);
    }
}

/* The block of the target that a unit computes: in the target itself, or in `to` and copied from there. */
static void FN(scatter)(REAL *target, const REAL *from, int64_t pitch, const struct product *p,
                        const struct phase *phase, bool channels_last, int64_t channels, int64_t begin, int64_t end)
{
    const struct lattice *const l = &phase->lattice;
    const int64_t row = p->target_step_y * p->target.row, column = p->target_step_x * p->target.column;
    int64_t v = begin % l->v_count, u = begin / l->v_count % l->u_count, image = begin / l->v_count / l->u_count;
    for (int64_t pixel = begin; pixel < end;) {
        const int64_t count = min_i64(l->v_count - v, end - pixel);
        REAL *const to = target + image * p->target.image + u * row + v * column;
        const int64_t offset = pixel - begin;
        if (channels_last)
            for (int64_t i = 0; i < count; i++)
                memcpy(to + i * column, from + (offset + i) * pitch, (size_t)channels * sizeof(REAL));
        else
            for (int64_t c = 0; c < channels; c++)
                for (int64_t i = 0; i < count; i++)
                    to[c * p->target.channel + i * column] = from[c * pitch + offset + i];
        pixel += count;
        v = 0;
        if (++u == l->u_count) {
            u = 0;
            image++;
        }
    }
}

static void FN(fill_bias)(REAL *to, int64_t pitch, const REAL *bias, bool channels_last, int64_t channels,
                          int64_t pixels)
{
    if (channels_last)
        for (int64_t i = 0; i < pixels; i++)
            memcpy(to + i * pitch, bias, (size_t)channels * sizeof(REAL));
    else
        for (int64_t c = 0; c < channels; c++)
            for (int64_t i = 0; i < pixels; i++)
                to[c * pitch + i] = bias[c];
}

static void FN(run)(REAL *target, const REAL *source, const REAL *weight, const REAL *prepared, const REAL *bias,
                    const struct product *p, cuda_ops_conv2d_pass pass, bool channels_last, int64_t begin, int64_t end,
                    char *workspace)
{
    REAL *const gathered = (REAL *)(workspace + GEMM_WORKSPACE_BYTES);
    REAL *const block_target =
        gathered + round_up_bytes(GATHERED_BYTES + MOST_GATHERED_ROWS * PITCH_SLACK * sizeof(REAL)) / sizeof(REAL);
    struct relaid cut;
    const bool relaid = relaid_cut(&cut, p, channels_last, DTYPE);
    const bool prepared_weight = prepares(p, pass, channels_last, relaid), forward = pass == CUDA_OPS_CONV2D_FORWARD;
    if (relaid) {
        const struct phase phase = phase_of(p, 0, 0, 0);
        const int64_t pieces = ceil_div_i64(phase.lattice.u_count, cut.rows);
        const int64_t blocks = ceil_div_i64(p->groups, cut.groups);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t group = unit % blocks * cut.groups, image = unit / blocks / pieces * cut.images;
            const int64_t u0 = unit / blocks % pieces * cut.rows, channel = group * p->target_channels;
            FN(multiply_relaid)(target + image * p->target.image + channel * p->target.channel + u0 * p->target.row,
                                source + image * p->source.image + group * p->source_channels * p->source.channel, p,
                                &phase.lattice, &cut, channels_last, prepared + group * p->depth * pitch_of(p),
                                pitch_of(p), bias ? bias + channel : NULL, min_i64(cut.groups, p->groups - group),
                                min_i64(cut.images, p->images - image), u0,
                                min_i64(cut.rows, phase.lattice.u_count - u0), gathered, block_target);
        }
        return;
    }
    const bool one_phase = p->target_step_y == 1 && p->target_step_x == 1;
    int64_t first_unit = 0, first_tap = 0;
    for (int64_t number = 0; number < p->phases_y * p->phases_x && first_unit < end; number++) {
        const struct phase phase = phase_of(p, number / p->phases_x, number % p->phases_x, first_tap);
        const struct lattice *const l = &phase.lattice;
        const struct blocks blocks = pixel_blocks(p, &phase, channels_last);
        const int64_t most_channels = channel_block(p, &blocks, channels_last);
        const int64_t pieces = ceil_div_i64(p->target_channels, most_channels);
        const bool indirect = channels_last && prepared_weight && is_indirect(p, &phase, DTYPE);
        const int64_t together = group_block(p, &phase, &blocks, indirect, DTYPE);
        const int64_t group_blocks = ceil_div_i64(p->groups, together);
        const int64_t units = blocks.count * group_blocks * pieces, image_pixels = l->u_count * l->v_count;
        REAL *const phase_target =
            target + number / p->phases_x * p->target.row + number % p->phases_x * p->target.column;
        for (int64_t unit = max_i64(begin, first_unit) - first_unit; unit < min_i64(units, end - first_unit); unit++) {
            const int64_t block = unit / pieces / group_blocks, group = unit / pieces % group_blocks * together;
            const int64_t first = unit % pieces * most_channels;
            const int64_t channels = min_i64(most_channels, p->target_channels - first);
            const int64_t channel = group * p->target_channels + first;
            int64_t from, to;
            block_range(&blocks, &phase, block, &from, &to);
            const REAL *const group_source = source + group * p->source_channels * p->source.channel;
            if (indirect) {
                const struct image_layout layout = {.image = p->target.image,
                                                    .row = p->target_step_y * p->target.row,
                                                    .column = p->target_step_x * p->target.column};
                FN(multiply_taps)(phase_target + channel, layout, group_source, l,
                                  prepared + first +
                                      (phase.first_tap * p->groups + group * phase.taps) * p->source_channels *
                                          pitch_of(p),
                                  pitch_of(p), bias ? bias + channel : NULL, min_i64(together, p->groups - group),
                                  channels, from, to);
                continue;
            }
            const int64_t pixels = to - from, image = from / image_pixels;
            const bool within = channels_last || image == (to - 1) / image_pixels;
            const bool in_place = one_phase && within, multiply_in_place = phase.direct && within;

            REAL *out = phase_target + channel * p->target.channel;
            int64_t out_pitch = channels_last ? p->target.column : p->target.channel;
            if (in_place)
                out += channels_last ? from * p->target.column : image * p->target.image + from % image_pixels;
            else {
                out = block_target;
                out_pitch = channels_last ? round_up_i64(channels, 16) : blocks.size + PITCH_SLACK;
            }
            if (bias)
                FN(fill_bias)(out, out_pitch, bias + channel, channels_last, channels, pixels);

            int64_t most_depth = multiply_in_place ? phase.depth : depth_block(phase.depth, blocks.size, DTYPE);
            /* Few rows read the weight once, where it lies: a few of its rows at a time, from end to end. */
            if (multiply_in_place && channels_last && !forward && pixels <= FEW_ROWS)
                most_depth = FEW_ROWS;
            for (int64_t k = 0; k < phase.depth || k == 0; k += max_i64(1, most_depth)) {
                const int64_t depth = min_i64(most_depth, phase.depth - k);
                const bool accumulate = bias || k > 0;
                const REAL *pixel_matrix = gathered;
                int64_t pitch = channels_last ? round_up_i64(most_depth, 16) + PITCH_SLACK : blocks.size + PITCH_SLACK;
                if (multiply_in_place) {
                    pixel_matrix =
                        group_source + k * p->source.channel +
                        (channels_last ? from * p->source.column : image * p->source.image + from % image_pixels);
                    pitch = channels_last ? p->source.column : p->source.channel;
                } else if (depth > 0)
                    FN(gather)(gathered, pitch, group_source, l, channels_last, k, k + depth, from, to);

                /* The weight as [k][target channel]. */
                const REAL *matrix;
                int64_t k_stride, channel_stride;
                if (prepared_weight) {
                    k_stride = pitch_of(p);
                    channel_stride = 1;
                    matrix =
                        prepared + (phase.first_tap * p->groups + group * phase.taps) * p->source_channels * k_stride;
                } else {
                    matrix = weight + group * p->weight.group;
                    k_stride = forward ? 1 : p->weight.source_channel;
                    channel_stride = p->weight.target_channel;
                }
                matrix += k * k_stride + first * channel_stride;
                if (channels_last)
                    GEMM(out, out_pitch, pixel_matrix, pitch, 1, matrix, k_stride, channel_stride, pixels, channels,
                         depth, accumulate, workspace);
                else
                    GEMM(out, out_pitch, matrix, channel_stride, k_stride, pixel_matrix, pitch, 1, channels, pixels,
                         depth, accumulate, workspace);
            }
            if (!in_place)
                FN(scatter)(phase_target + channel * p->target.channel, out, out_pitch, p, &phase, channels_last,
                            channels, from, to);
        }
        first_unit += units;
        first_tap += phase.taps;
    }
}

/* With AVX2 or more (is_indirect_weight). */
static void FN(weight_of_rows)(REAL *to, int64_t to_row, const REAL *grad, const struct image_layout *target,
                               int64_t channels, const REAL *source, const struct lattice *l, int64_t begin,
                               int64_t end, bool accumulate)
{
#if CUDA_OPS_WITH_TARGETS
    if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512)
        FN_FOR(avx512, weight_of_rows)(to, to_row, grad, target, channels, source, l, begin, end, accumulate);
    else
        FN_FOR(avx2, weight_of_rows)(to, to_row, grad, target, channels, source, l, begin, end, accumulate);
#else
    (void)to, (void)to_row, (void)grad, (void)target, (void)channels, (void)source, (void)l, (void)begin, (void)end;
    (void)accumulate;
#endif
}

/* The same of contiguous tensors. */
static void FN(weight_relaid)(REAL *to, const REAL *grad, const REAL *source, const struct product *p,
                              const struct lattice *l, int64_t together, int64_t begin, int64_t end, REAL *staged,
                              REAL *staged_grad, REAL *sums)
{
#if CUDA_OPS_WITH_TARGETS
    if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512)
        FN_FOR(avx512, weight_relaid)(to, grad, source, p, l, together, begin, end, staged, staged_grad, sums);
    else
        FN_FOR(avx2, weight_relaid)(to, grad, source, p, l, together, begin, end, staged, staged_grad, sums);
#else
    (void)to, (void)grad, (void)source, (void)p, (void)l, (void)together, (void)begin, (void)end, (void)staged;
    (void)staged_grad, (void)sums;
#endif
}

/* A unit is a group, a split of the blocks of pixels, and a block of k. */
static void FN(run_weight)(REAL *grad_weight, REAL *prepared, const REAL *grad_output, const REAL *input,
                           const struct product *p, bool channels_last, int64_t begin, int64_t end, char *workspace)
{
    REAL *const gathered = (REAL *)(workspace + GEMM_WORKSPACE_BYTES);
    REAL *const gathered_grad =
        gathered + round_up_bytes(GATHERED_BYTES + MOST_GATHERED_ROWS * PITCH_SLACK * sizeof(REAL)) / sizeof(REAL);
    const struct phase phase = phase_of(p, 0, 0, 0);
    const struct weight_cut cut = weight_cut(p, &phase, channels_last, DTYPE);
    const int64_t image_pixels = phase.lattice.u_count * phase.lattice.v_count;
    const struct lattice grad_lattice = {.source = p->target,
                                         .height = p->target_height,
                                         .width = p->target_width,
                                         .channels = p->target_channels,
                                         .step_y = 1,
                                         .step_x = 1,
                                         .u_count = p->target_height,
                                         .v_count = p->target_width,
                                         .tap_rows = 1,
                                         .tap_columns = 1};
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t k = unit % cut.depth_blocks * cut.depth_block, split = unit / cut.depth_blocks % cut.splits;
        const int64_t group = unit / cut.depth_blocks / cut.splits;
        const int64_t depth = min_i64(cut.depth_block, phase.depth - k);
        REAL *const out = (cut.splits > 1 ? prepared + split * weight_size(p) : grad_weight) +
                          group * p->target_channels * p->depth + k;
        const REAL *const x = input + group * p->source_channels * p->source.channel;
        const REAL *const g = grad_output + group * p->target_channels * p->target.channel;
        if (cut.indirect) {
            const int64_t rows = p->images * phase.lattice.u_count, first_row = split * rows / cut.splits;
            const int64_t end_row = (split + 1) * rows / cut.splits;
            if (!channels_last) {
                FN(weight_relaid)(out, g, x, p, &phase.lattice, relaid_weight_rows(p, &phase.lattice, DTYPE), first_row,
                                  end_row, gathered, gathered_grad, (REAL *)workspace);
                continue;
            }
            const int64_t together = max_i64(1, INDIRECT_PIXELS / phase.lattice.v_count);
            for (int64_t row = first_row; row < end_row; row += together)
                FN(weight_of_rows)(out, p->depth, g, &p->target, p->target_channels, x, &phase.lattice, row,
                                   min_i64(end_row, row + together), row > first_row);
            continue;
        }
        const int64_t first = split * cut.blocks.count / cut.splits;
        for (int64_t block = first; block < (split + 1) * cut.blocks.count / cut.splits; block++) {
            int64_t from, to;
            block_range(&cut.blocks, &phase, block, &from, &to);
            const int64_t image = from / image_pixels;
            const bool accumulate = block > first;
            const REAL *pixels = gathered, *grad = g;
            int64_t pitch = channels_last ? round_up_i64(depth, 16) + PITCH_SLACK : cut.blocks.size + PITCH_SLACK;
            int64_t grad_pitch = channels_last ? p->target.column : p->target.channel;
            if (phase.direct && !cut.gathers_grad) {
                pixels = x + (channels_last ? from * p->source.column + k
                                            : image * p->source.image + k * p->source.channel + from % image_pixels);
                pitch = channels_last ? p->source.column : p->source.channel;
            } else
                FN(gather)(gathered, pitch, x, &phase.lattice, channels_last, k, k + depth, from, to);
            if (cut.gathers_grad) {
                grad_pitch = cut.blocks.size + PITCH_SLACK;
                FN(gather)(gathered_grad, grad_pitch, g, &grad_lattice, false, 0, p->target_channels, from, to);
                grad = gathered_grad;
            } else
                grad += channels_last ? from * p->target.column : image * p->target.image + from % image_pixels;
            if (channels_last)
                GEMM(out, p->depth, grad, 1, grad_pitch, pixels, pitch, 1, p->target_channels, depth, to - from,
                     accumulate, workspace);
            else
                GEMM(out, p->depth, grad, grad_pitch, 1, pixels, 1, pitch, p->target_channels, depth, to - from,
                     accumulate, workspace);
        }
    }
}

/* Output channels [begin, end): adds the splits' sums in order. */
CUDA_OPS_SIMD static void FN(reduce)(REAL *restrict grad_weight, const REAL *restrict prepared, const struct product *p,
                                     bool channels_last, int64_t begin, int64_t end)
{
    const struct phase phase = phase_of(p, 0, 0, 0);
    const int64_t splits = weight_cut(p, &phase, channels_last, DTYPE).splits, size = weight_size(p);
    for (int64_t i = begin * p->depth; i < end * p->depth; i++) {
        REAL sum = 0;
        for (int64_t split = 0; split < splits; split++)
            sum += prepared[split * size + i];
        grad_weight[i] = sum;
    }
}

#endif
