/* Reductions on the CPU: output = finish(of all input[batch, outer, cols, inner]) over batch and cols.
 *
 * A unit is a part of one row, or of the same part of up to TILE neighbouring columns, of one element of batch; what is
 * kept of it are up to three doubles for each column. Sums of up to SHORT elements are in the dtype, sums of those in
 * double; variances are of differences from a part's own mean, and merged (Chan's formula). How rows are cut depends on
 * the sizes alone, so that results do not depend on the number of threads. Bound by memory: one read. */
#ifndef REAL

#include "cuda_ops/reduction.h"

#include "common/common.h"

enum {
    SHORT = 256,        /* elements, or rows, that one sum in the dtype covers */
    TILE = 256,         /* columns of a unit */
    PART_ROW = 32768,   /* elements of a part of a row */
    PART_COLUMNS = 1024 /* rows of a part of columns */
};

/* Of some elements: of a sum or product `value`; of an extreme value and the index of the first; of a variance the
 * mean, the count and the sum of squared differences. */
typedef struct state {
    double value, second, squares;
} state;

typedef struct cut {
    int64_t parts, step, tiles;
} cut;

static cut cut_of(const cuda_ops_reduction_sizes *sizes)
{
    cut c = {1, sizes->inner == 1 ? PART_ROW : PART_COLUMNS, (sizes->inner + TILE - 1) / TILE};
    c.parts = (sizes->cols + c.step - 1) / c.step;
    return c;
}

static bool is_empty(const cuda_ops_reduction_sizes *sizes)
{
    return sizes->batch == 0 || sizes->outer == 0 || sizes->cols == 0 || sizes->inner == 0;
}

int64_t cuda_ops_reduction_units_cpu(cuda_ops_reduction_sizes sizes)
{
    if (is_empty(&sizes))
        return 0;
    const cut c = cut_of(&sizes);
    return sizes.batch * sizes.outer * c.parts * c.tiles;
}

int64_t cuda_ops_reduction_workspace_cpu(cuda_ops_reduction_sizes sizes)
{
    if (is_empty(&sizes))
        return 0;
    return sizes.batch * sizes.outer * cut_of(&sizes).parts * sizes.inner * (int64_t)sizeof(state);
}

/* What an element counts as. */
typedef enum map { MAP_SUM, MAP_PROD, MAP_ABSOLUTE, MAP_SQUARE, MAP_POWER, MAP_NONZERO, MAP_EXTREME, MAP_MOMENTS } map;

typedef struct family {
    map map;
    bool smallest, absolute; /* of an extreme */
    double p;
} family;

static family family_of(cuda_ops_reduction_kind kind, double parameter)
{
    family f = {MAP_SUM, false, false, parameter};
    switch (kind) {
    case CUDA_OPS_SUM:
    case CUDA_OPS_MEAN:
        break;
    case CUDA_OPS_PROD:
        f.map = MAP_PROD;
        break;
    case CUDA_OPS_NORM:
        f.absolute = isinf(parameter);
        f.smallest = f.absolute && parameter < 0;
        f.map = f.absolute       ? MAP_EXTREME
                : parameter == 0 ? MAP_NONZERO
                : parameter == 1 ? MAP_ABSOLUTE
                : parameter == 2 ? MAP_SQUARE
                                 : MAP_POWER;
        break;
    case CUDA_OPS_VAR:
    case CUDA_OPS_STD:
        f.map = MAP_MOMENTS;
        break;
    default:
        f.map = MAP_EXTREME;
        f.smallest = kind == CUDA_OPS_AMIN || kind == CUDA_OPS_ARGMIN;
    }
    return f;
}

/* `second` of an extreme that nothing was above: all are -inf, and the first one is the largest. */
static const double NOWHERE = -1;

static inline state none(const family *f)
{
    switch (f->map) {
    case MAP_PROD:
        return (state){1, 0, 0};
    case MAP_EXTREME:
        return (state){(double)-INFINITY, NOWHERE, 0};
    default:
        return (state){0, 0, 0};
    }
}

static inline void merge_moments(state *a, double mean, double count, double squares)
{
    const double both = a->second + count, difference = mean - a->value;
    if (both == 0)
        return;
    a->value += difference * (count / both);
    a->squares += squares + difference * difference * a->second * (count / both);
    a->second = both;
}

/* Parts come in the order of their elements. */
static inline void merge(const family *f, state *a, const state *b)
{
    switch (f->map) {
    case MAP_PROD:
        a->value *= b->value;
        break;
    case MAP_EXTREME:
        if (!(b->value <= a->value) && a->value == a->value)
            *a = *b;
        break;
    case MAP_MOMENTS:
        merge_moments(a, b->value, b->second, b->squares);
        break;
    default:
        a->value += b->value;
    }
}

static double finish_value(cuda_ops_reduction_kind kind, double parameter, const family *f, const state *s,
                           int64_t count)
{
    const double rest = s->second - parameter;
    switch (kind) {
    case CUDA_OPS_MEAN:
        return s->value / (double)count;
    case CUDA_OPS_VAR:
        return s->squares / (rest > 0 ? rest : 0);
    case CUDA_OPS_STD:
        return sqrt(s->squares / (rest > 0 ? rest : 0));
    default:
        if (f->map == MAP_EXTREME)
            return f->smallest ? -s->value : s->value;
        return f->map == MAP_SQUARE ? sqrt(s->value) : f->map == MAP_POWER ? pow(s->value, 1 / parameter) : s->value;
    }
}

#define REAL float
#define FN(name) name##_f32
#include "reduction.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "reduction.c"

#include "common/undef_real.h"

static bool is_extreme(cuda_ops_reduction_kind kind, double parameter)
{
    return family_of(kind, parameter).map == MAP_EXTREME;
}

static bool is_index(cuda_ops_reduction_kind kind)
{
    return kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
}

cuda_ops_status cuda_ops_reduction_accumulate_cpu(void *workspace, const void *input, cuda_ops_reduction_sizes sizes,
                                                  cuda_ops_reduction_kind kind, double parameter, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype)
{
    if (kind < CUDA_OPS_SUM || kind > CUDA_OPS_STD || (is_index(kind) && sizes.batch != 1))
        return CUDA_OPS_INVALID_ARGUMENT;
    const family f = family_of(kind, parameter);
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        if (!is_empty(&sizes))
            accumulate_f32(workspace, input, &sizes, &f, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        if (!is_empty(&sizes))
            accumulate_f64(workspace, input, &sizes, &f, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_reduction_finish_cpu(void *output, const void *workspace, cuda_ops_reduction_sizes sizes,
                                              cuda_ops_reduction_kind kind, double parameter, int64_t begin,
                                              int64_t end, cuda_ops_dtype dtype)
{
    if (kind < CUDA_OPS_SUM || kind > CUDA_OPS_STD)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (sizes.outer == 0 || sizes.inner == 0)
        return CUDA_OPS_SUCCESS;
    const int64_t count = sizes.batch * sizes.cols;
    if (count == 0 && is_extreme(kind, parameter))
        return CUDA_OPS_INVALID_ARGUMENT;
    const family f = family_of(kind, parameter);
    const int64_t parts = cut_of(&sizes).parts;
    for (int64_t at = begin; at < end; at++) {
        const int64_t o = at / sizes.inner, i = at % sizes.inner;
        state all = none(&f);
        for (int64_t b = 0; b < sizes.batch; b++)
            for (int64_t part = 0; part < parts; part++)
                merge(&f, &all, (const state *)workspace + ((b * sizes.outer + o) * parts + part) * sizes.inner + i);
        if (is_index(kind)) {
            ((int64_t *)output)[at] = all.second == NOWHERE ? 0 : (int64_t)all.second;
            continue;
        }
        double value = finish_value(kind, parameter, &f, &all, count);
        if (count == 0 && (kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD))
            value = (double)NAN;
        if (dtype == CUDA_OPS_FLOAT32)
            ((float *)output)[at] = (float)value;
        else
            ((double *)output)[at] = value;
    }
    return CUDA_OPS_SUCCESS;
}

#else

/* Adds what `of` makes of x, SHORT elements at a time. */
#define ADD_MAPPED(expression)                                                                                         \
    for (int64_t first = 0; first < count; first += SHORT) {                                                           \
        const int64_t last = min_i64(first + SHORT, count);                                                            \
        REAL part = 0;                                                                                                 \
        _Pragma("omp simd reduction(+ : part)") for (int64_t c = first; c < last; c++)                                 \
        {                                                                                                              \
            const REAL v = x[c];                                                                                       \
            part += (expression);                                                                                      \
        }                                                                                                              \
        s.value += (double)part;                                                                                       \
    }

CUDA_OPS_INLINE REAL FN(absolute)(REAL v)
{
    return v < 0 ? -v : v; /* NaN stays */
}

/* Of `count` neighbouring elements, the first of which has the index `at`. */
CUDA_OPS_INLINE state FN(row_state)(const REAL *x, int64_t count, int64_t at, const family *f)
{
    state s = none(f);
    switch (f->map) {
    case MAP_SUM:
        ADD_MAPPED(v)
        break;
    case MAP_ABSOLUTE:
        ADD_MAPPED(FN(absolute)(v))
        break;
    case MAP_SQUARE:
        ADD_MAPPED(v * v)
        break;
    case MAP_NONZERO:
        ADD_MAPPED(v != 0 ? (REAL)1 : (REAL)0)
        break;
    case MAP_PROD:
        for (int64_t c = 0; c < count; c++)
            s.value *= (double)x[c];
        break;
    case MAP_POWER:
        for (int64_t c = 0; c < count; c++)
            s.value += pow((double)FN(absolute)(x[c]), f->p);
        break;
    case MAP_EXTREME: {
        REAL best = (REAL)-INFINITY;
        int64_t where = -1;
        for (int64_t c = 0; c < count; c++) {
            const REAL v = f->absolute ? FN(absolute)(x[c]) : x[c], signed_value = f->smallest ? -v : v;
            if (!(signed_value <= best)) {
                best = signed_value;
                where = c;
                if (best != best) /* NaN, which nothing is above */
                    break;
            }
        }
        s.value = (double)best;
        s.second = where < 0 ? NOWHERE : (double)(at + where);
        break;
    }
    case MAP_MOMENTS:
        for (int64_t first = 0; first < count; first += SHORT) {
            const int64_t last = min_i64(first + SHORT, count);
            const REAL origin = x[first];
            REAL sum = 0, off = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = first; c < last; c++)
                sum += x[c] - origin;
            const REAL mean = origin + sum / (REAL)(last - first);
#pragma omp simd reduction(+ : off, squares)
            for (int64_t c = first; c < last; c++) {
                off += x[c] - mean;
                squares += (x[c] - mean) * (x[c] - mean);
            }
            const double n = (double)(last - first), rest = (double)off / n;
            const double least = (double)squares - rest * rest * n;
            merge_moments(&s, (double)mean + rest, n, least < 0 ? 0 : least);
        }
        break;
    }
    return s;
}

/* Adds `expression` of each v to the states of `width` columns, SHORT rows at a time. */
#define ADD_COLUMNS(expression)                                                                                        \
    for (int64_t first = 0; first < count; first += SHORT) {                                                           \
        REAL part[TILE] = {0};                                                                                         \
        for (int64_t c = first; c < min_i64(first + SHORT, count); c++)                                                \
            _Pragma("omp simd") for (int64_t i = 0; i < width; i++)                                                    \
            {                                                                                                          \
                const REAL v = x[c * inner + i];                                                                       \
                part[i] += (expression);                                                                               \
            }                                                                                                          \
        for (int64_t i = 0; i < width; i++)                                                                            \
            s[i].value += (double)part[i];                                                                             \
    }

CUDA_OPS_INLINE void FN(column_states)(state *restrict s, const REAL *restrict x, int64_t count, int64_t inner,
                                       int64_t width, int64_t at, const family *f)
{
    for (int64_t i = 0; i < width; i++)
        s[i] = none(f);
    switch (f->map) {
    case MAP_SUM:
        ADD_COLUMNS(v)
        break;
    case MAP_ABSOLUTE:
        ADD_COLUMNS(FN(absolute)(v))
        break;
    case MAP_SQUARE:
        ADD_COLUMNS(v * v)
        break;
    case MAP_NONZERO:
        ADD_COLUMNS(v != 0 ? (REAL)1 : (REAL)0)
        break;
    case MAP_PROD:
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < width; i++)
                s[i].value *= (double)x[c * inner + i];
        break;
    case MAP_POWER:
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < width; i++)
                s[i].value += pow((double)FN(absolute)(x[c * inner + i]), f->p);
        break;
    case MAP_EXTREME: {
        REAL best[TILE];
        int64_t where[TILE];
        for (int64_t i = 0; i < width; i++) {
            best[i] = (REAL)-INFINITY;
            where[i] = -1;
        }
        for (int64_t c = 0; c < count; c++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                const REAL v = f->absolute ? FN(absolute)(x[c * inner + i]) : x[c * inner + i];
                const REAL signed_value = f->smallest ? -v : v;
                const bool above = !(signed_value <= best[i]) && best[i] == best[i];
                best[i] = above ? signed_value : best[i];
                where[i] = above ? at + c : where[i];
            }
        for (int64_t i = 0; i < width; i++) {
            s[i].value = (double)best[i];
            s[i].second = where[i] < 0 ? NOWHERE : (double)where[i];
        }
        break;
    }
    case MAP_MOMENTS:
        for (int64_t first = 0; first < count; first += SHORT) {
            const int64_t last = min_i64(first + SHORT, count);
            REAL sum[TILE] = {0}, mean[TILE], off[TILE] = {0}, squares[TILE] = {0};
            for (int64_t c = first; c < last; c++)
#pragma omp simd
                for (int64_t i = 0; i < width; i++)
                    sum[i] += x[c * inner + i] - x[first * inner + i];
            for (int64_t i = 0; i < width; i++)
                mean[i] = x[first * inner + i] + sum[i] / (REAL)(last - first);
            for (int64_t c = first; c < last; c++)
#pragma omp simd
                for (int64_t i = 0; i < width; i++) {
                    const REAL difference = x[c * inner + i] - mean[i];
                    off[i] += difference;
                    squares[i] += difference * difference;
                }
            for (int64_t i = 0; i < width; i++) {
                const double n = (double)(last - first), rest = (double)off[i] / n;
                const double least = (double)squares[i] - rest * rest * n;
                merge_moments(&s[i], (double)mean[i] + rest, n, least < 0 ? 0 : least);
            }
        }
        break;
    }
}

CUDA_OPS_SIMD static void FN(accumulate)(state *restrict workspace, const REAL *restrict input,
                                         const cuda_ops_reduction_sizes *sizes, const family *f, int64_t begin,
                                         int64_t end)
{
    const cut c = cut_of(sizes);
    const int64_t inner = sizes->inner;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t tile = unit % c.tiles * TILE, part = unit / c.tiles, row = part / c.parts;
        const int64_t at = part % c.parts * c.step, count = min_i64(c.step, sizes->cols - at);
        const REAL *x = input + (row * sizes->cols + at) * inner + tile;
        if (inner == 1)
            workspace[part] = FN(row_state)(x, count, at, f);
        else
            FN(column_states)(workspace + part * inner + tile, x, count, inner, min_i64(TILE, inner - tile), at, f);
    }
}

#undef ADD_MAPPED
#undef ADD_COLUMNS

#endif
