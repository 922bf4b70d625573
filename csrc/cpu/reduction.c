/* Reductions on the CPU: output = finish(of all input[batch, outer, cols, inner]) over batch and cols.
 *
 * A unit is a part of one row, or of the same part of up to TILE neighbouring columns, of one element of batch; what is
 * kept of it are up to three doubles for each column. Sums of up to SHORT elements are in the dtype, sums of those in
 * double; variances are of differences from a part's own mean, and merged (Chan's formula). How rows are cut depends on
 * the sizes alone, so that results do not depend on the number of threads. float16 and bfloat16 are widened by small pieces,
 * which stay in the first-level cache. Bound by memory: one read. */
#ifndef REAL

#include "cuda_ops/reduction.h"

#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/halves_cpu.h"

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>
#endif

enum {
    SHORT = 256,        /* elements, or rows, that one sum in the dtype covers */
    LONG = 1024,        /* elements of a row that four such sums cover, side by side */
    TILE = 256,         /* columns of a unit */
    SEARCHED = 32,      /* elements of which one is found at a time */
    PIECE = 4096,       /* halves of columns that are widened at a time */
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
    bool smallest, absolute, indexed; /* of an extreme; its index is wanted */
    double p;
} family;

static family family_of(cuda_ops_reduction_kind kind, double parameter)
{
    family f = {MAP_SUM, false, false, false, parameter};
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
        f.indexed = kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
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
#define WITH_PIECES /* of halves */
#include "reduction.c"
#undef WITH_PIECES

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "reduction.c"

#include "common/undef_real.h"

/* Sums of bfloat16, or of its squares, of rows that follow each other: of two elements that are read as one number, one is a
 * float when it is moved up, the other when the first is cleared. As many are added up in float as of ADD_MAPPED. */
CUDA_OPS_SIMD static void sum_rows_bf16_portable(state *states, const uint16_t *input, int64_t rows, int64_t cols,
                                                 bool squares)
{
    typedef uint32_t pair __attribute__((aligned(2), may_alias));
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *const x = input + row * cols;
        double all = cols % 2 ? (double)widened_bfloat16(x[cols - 1]) : 0;
        all = squares ? all * all : all;
        for (int64_t first = 0; first < cols / 2; first += LONG / 2) {
            const pair *const pairs = (const pair *)(x + 2 * first);
            const int64_t count = min_i64(LONG / 2, cols / 2 - first);
            float low = 0, high = 0;
            if (squares)
#pragma omp simd reduction(+ : low, high)
                for (int64_t i = 0; i < count; i++) {
                    const float a = float_of(pairs[i] << 16), b = float_of(pairs[i] & 0xffff0000u);
                    low += a * a;
                    high += b * b;
                }
            else
#pragma omp simd reduction(+ : low, high)
                for (int64_t i = 0; i < count; i++) {
                    low += float_of(pairs[i] << 16);
                    high += float_of(pairs[i] & 0xffff0000u);
                }
            all += (double)(low + high);
        }
        states[row] = (state){all, 0, 0};
    }
}

#if CUDA_OPS_WITH_TARGETS
/* The last `count` of 32 elements that end where a row does: less than 32, of at least `before` + count. Not by a load under
 * a mask, which took longer than all else. */
__attribute__((target("avx512f,avx512bw,avx512vl"))) static inline __m512i last_elements(const uint16_t *x,
                                                                                         int64_t count, int64_t before)
{
    if (before + count >= 32) {
        const __m512i pairs = _mm512_loadu_si512(x + count - 32);
        return _mm512_maskz_mov_epi16(~(__mmask32)0 << (32 - count), pairs);
    }
    uint16_t padded[32] = {0};
    memcpy(padded, x, (size_t)count * sizeof *x);
    return _mm512_loadu_si512(padded);
}

/* The same by whole vectors. */
__attribute__((target("avx512f,avx512bw,avx512vl"))) static void
sum_rows_bf16_avx512(state *states, const uint16_t *input, int64_t rows, int64_t cols, bool squares)
{
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
    for (int64_t row = 0; row < rows; row++) {
        double all = 0;
        for (int64_t first = 0; first < cols; first += LONG) {
            const uint16_t *const x = input + row * cols + first;
            const int64_t count = min_i64(LONG, cols - first);
            __m512 low = _mm512_setzero_ps(), high = low;
            for (int64_t c = 0; c < count; c += 32) {
                const __m512i pairs =
                    count - c >= 32 ? _mm512_loadu_si512(x + c) : last_elements(x + c, count - c, first + c);
                const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
                const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
                low = squares ? _mm512_fmadd_ps(a, a, low) : _mm512_add_ps(a, low);
                high = squares ? _mm512_fmadd_ps(b, b, high) : _mm512_add_ps(b, high);
            }
            all += (double)_mm512_reduce_add_ps(_mm512_add_ps(low, high));
        }
        states[row] = (state){all, 0, 0};
    }
}
#endif

static void sum_rows_bf16(state *states, const uint16_t *input, int64_t rows, int64_t cols, bool squares)
{
#if CUDA_OPS_WITH_TARGETS
    if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512) {
        sum_rows_bf16_avx512(states, input, rows, cols, squares);
        return;
    }
#endif
    sum_rows_bf16_portable(states, input, rows, cols, squares);
}

/* The f32 kernels over pieces that are widened: of a row LONG elements, whose sums are cut as those of floats are, of
 * columns as many rows as fit PIECE. */
static void accumulate_halves(state *workspace, const uint16_t *input, const cuda_ops_reduction_sizes *sizes,
                              const family *f, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cut c = cut_of(sizes);
    const int64_t inner = sizes->inner, cols = sizes->cols;
    float piece[PIECE];
    state some[TILE];
    const bool is_sum = (f->map == MAP_SUM || f->map == MAP_SQUARE) && dtype == CUDA_OPS_BFLOAT16 && inner == 1;
    if (is_sum && c.parts == 1) {
        sum_rows_bf16(workspace + begin, input + begin * cols, end - begin, cols, f->map == MAP_SQUARE);
        return;
    }
    if (inner == 1 && cols <= LONG) { /* several rows at a time; none has more than one part */
        for (int64_t row = begin, rows; row < end; row += rows) {
            rows = min_i64(PIECE / cols, end - row);
            (void)cuda_ops_widen_cpu(piece, input + row * cols, rows * cols, dtype);
            rows_piece_f32(workspace + row, piece, rows, cols, f);
        }
        return;
    }
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t tile = unit % c.tiles * TILE, part = unit / c.tiles, row = part / c.parts;
        const int64_t width = min_i64(TILE, inner - tile), step = inner == 1 ? LONG : max_i64(1, PIECE / width);
        const int64_t at = part % c.parts * c.step, count = min_i64(c.step, sizes->cols - at);
        const uint16_t *x = input + (row * sizes->cols + at) * inner + tile;
        state *all = workspace + part * inner + tile;
        if (is_sum) {
            sum_rows_bf16(all, x, 1, count, f->map == MAP_SQUARE);
            continue;
        }
        for (int64_t first = 0; first < count; first += step) {
            const int64_t rows = min_i64(step, count - first);
            if (width == inner)
                (void)cuda_ops_widen_cpu(piece, x + first * inner, rows * inner, dtype);
            else
                for (int64_t r = 0; r < rows; r++)
                    (void)cuda_ops_widen_cpu(piece + r * width, x + (first + r) * inner, width, dtype);
            state *to = first == 0 ? all : some;
            if (inner == 1)
                row_piece_f32(to, piece, rows, at + first, f);
            else
                columns_piece_f32(to, piece, rows, width, at + first, f);
            for (int64_t i = 0; i < width && first > 0; i++)
                merge(f, all + i, some + i);
        }
    }
}

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
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        if (!is_empty(&sizes))
            accumulate_halves(workspace, input, &sizes, &f, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

static bool is_plain(cuda_ops_reduction_kind kind, const family *f)
{
    return kind == CUDA_OPS_SUM || kind == CUDA_OPS_MEAN || kind == CUDA_OPS_PROD || f->map == MAP_SQUARE;
}

/* Of many outputs with few elements each, what finish_value does. */
CUDA_OPS_SIMD static void finish_plain(float *restrict output, const state *restrict states, double divisor,
                                       bool is_root, int64_t begin, int64_t end)
{
    if (is_root)
        for (int64_t at = begin; at < end; at++)
            output[at] = (float)sqrt(states[at].value);
    else
        for (int64_t at = begin; at < end; at++)
            output[at] = (float)(states[at].value / divisor);
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
    const bool is_whole = sizes.batch * parts == 1; /* one state for each output */
    if (is_whole && dtype == CUDA_OPS_FLOAT32 && is_plain(kind, &f)) {
        finish_plain(output, workspace, kind == CUDA_OPS_MEAN ? (double)count : 1, f.map == MAP_SQUARE, begin, end);
        return CUDA_OPS_SUCCESS;
    }
    for (int64_t at = begin; at < end; at++) {
        state all = is_whole ? ((const state *)workspace)[at] : none(&f);
        if (!is_whole) {
            const int64_t o = at / sizes.inner, i = at % sizes.inner;
            for (int64_t b = 0; b < sizes.batch; b++)
                for (int64_t part = 0; part < parts; part++)
                    merge(&f, &all,
                          (const state *)workspace + ((b * sizes.outer + o) * parts + part) * sizes.inner + i);
        }
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

/* Adds what `expression` makes of x to s.value: of LONG elements in four sums at once, whose additions do not wait for each
 * other, of what is left SHORT elements at a time. */
#define ADD_MAPPED(expression)                                                                                         \
    {                                                                                                                  \
        int64_t first = 0;                                                                                             \
        for (; first + LONG <= count; first += LONG) {                                                                 \
            REAL part0 = 0, part1 = 0, part2 = 0, part3 = 0;                                                           \
            _Pragma("omp simd reduction(+ : part0, part1, part2, part3)") for (int64_t c = 0; c < LONG / 4; c++)       \
            {                                                                                                          \
                REAL v = x[first + c];                                                                                 \
                part0 += (expression);                                                                                 \
                v = x[first + c + LONG / 4];                                                                           \
                part1 += (expression);                                                                                 \
                v = x[first + c + LONG / 2];                                                                           \
                part2 += (expression);                                                                                 \
                v = x[first + c + 3 * LONG / 4];                                                                       \
                part3 += (expression);                                                                                 \
            }                                                                                                          \
            s.value += (double)((part0 + part1) + (part2 + part3));                                                    \
        }                                                                                                              \
        for (; first < count; first += SHORT) {                                                                        \
            const int64_t last = min_i64(first + SHORT, count);                                                        \
            REAL part = 0;                                                                                             \
            _Pragma("omp simd reduction(+ : part)") for (int64_t c = first; c < last; c++)                             \
            {                                                                                                          \
                const REAL v = x[c];                                                                                   \
                part += (expression);                                                                                  \
            }                                                                                                          \
            s.value += (double)part;                                                                                   \
        }                                                                                                              \
    }

CUDA_OPS_INLINE REAL FN(absolute)(REAL v)
{
    return v < 0 ? -v : v; /* NaN stays */
}

CUDA_OPS_INLINE double FN(row_product)(const REAL *x, int64_t count)
{
    double a = 1, b = 1, d = 1, e = 1;
    const int64_t quarter = count / 4;
#pragma omp simd reduction(* : a, b, d, e)
    for (int64_t c = 0; c < quarter; c++) {
        a *= (double)x[c];
        b *= (double)x[c + quarter];
        d *= (double)x[c + 2 * quarter];
        e *= (double)x[c + 3 * quarter];
    }
    for (int64_t c = 4 * quarter; c < count; c++)
        a *= (double)x[c];
    return (a * b) * (d * e);
}

/* What an extreme compares: the largest of these is looked for. */
CUDA_OPS_INLINE REAL FN(rank_of)(REAL v, bool absolute, bool smallest)
{
    const REAL size = absolute ? FN(absolute)(v) : v;
    return smallest ? -size : size;
}

/* The largest rank of a row, or NaN if there is one. Compiled once for each of the four ranks. */
CUDA_OPS_INLINE REAL FN(largest_rank)(const REAL *x, int64_t count, bool absolute, bool smallest)
{
    REAL best0 = (REAL)-INFINITY, best1 = best0, best2 = best0, best3 = best0;
    int is_nan = 0;
    const int64_t quarter = count / 4;
#pragma omp simd reduction(max : best0, best1, best2, best3) reduction(| : is_nan)
    for (int64_t c = 0; c < quarter; c++) {
        const REAL a = FN(rank_of)(x[c], absolute, smallest), b = FN(rank_of)(x[c + quarter], absolute, smallest);
        const REAL d = FN(rank_of)(x[c + 2 * quarter], absolute, smallest);
        const REAL e = FN(rank_of)(x[c + 3 * quarter], absolute, smallest);
        best0 = a > best0 ? a : best0;
        best1 = b > best1 ? b : best1;
        best2 = d > best2 ? d : best2;
        best3 = e > best3 ? e : best3;
        is_nan |= (a != a) | (b != b) | (d != d) | (e != e);
    }
    for (int64_t c = 4 * quarter; c < count; c++) {
        const REAL v = FN(rank_of)(x[c], absolute, smallest);
        best0 = v > best0 ? v : best0;
        is_nan |= v != v;
    }
    best0 = best1 > best0 ? best1 : best0;
    best2 = best3 > best2 ? best3 : best2;
    best0 = best2 > best0 ? best2 : best0;
    return is_nan ? (REAL)NAN : best0;
}

/* Where x has the first `value`, or NaN, which one of its elements is. Of SEARCHED elements it is first asked whether it is
 * among them. */
CUDA_OPS_INLINE int64_t FN(place_of)(const REAL *x, int64_t count, REAL value)
{
    int64_t first = 0;
    for (; first + SEARCHED <= count; first += SEARCHED) {
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int c = 0; c < SEARCHED; c++)
            any |= (x[first + c] == value) | (x[first + c] != x[first + c]);
        if (any)
            break;
    }
    while (x[first] != value && x[first] == x[first])
        first++;
    return first;
}

/* Blocks of LONG elements are searched for the index only where they have a larger rank than those before. */
CUDA_OPS_INLINE state FN(row_extreme)(const REAL *x, int64_t count, int64_t at, const family *f)
{
    REAL best = (REAL)-INFINITY;
    double where = NOWHERE;
    for (int64_t first = 0; first < count && best == best; first += LONG) {
        const int64_t length = min_i64(LONG, count - first);
        const REAL *from = x + first;
        const REAL largest = f->absolute   ? (f->smallest ? FN(largest_rank)(from, length, true, true)
                                                          : FN(largest_rank)(from, length, true, false))
                             : f->smallest ? FN(largest_rank)(from, length, false, true)
                                           : FN(largest_rank)(from, length, false, false);
        if (largest <= best)
            continue;
        best = largest;
        if (!f->indexed)
            continue;
        where = (double)(at + first + FN(place_of)(from, length, f->smallest ? -best : best));
    }
    return (state){(double)best, where, 0};
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
        s.value = FN(row_product)(x, count);
        break;
    case MAP_POWER:
        for (int64_t c = 0; c < count; c++)
            s.value += pow((double)FN(absolute)(x[c]), f->p);
        break;
    case MAP_EXTREME:
        return FN(row_extreme)(x, count, at, f);
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

CUDA_OPS_INLINE void FN(largest_of_columns)(REAL *restrict best, const REAL *restrict x, int64_t count, int64_t inner,
                                            int64_t width, bool absolute, bool smallest)
{
    for (int64_t c = 0; c < count; c++)
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            const REAL rank = FN(rank_of)(x[c * inner + i], absolute, smallest), largest = best[i];
            best[i] = rank <= largest || largest != largest ? largest : rank; /* a NaN comes in, and stays */
        }
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
        if (!f->indexed) {
            for (int64_t i = 0; i < width; i++)
                best[i] = (REAL)-INFINITY;
            if (f->absolute)
                FN(largest_of_columns)(best, x, count, inner, width, true, f->smallest);
            else if (f->smallest)
                FN(largest_of_columns)(best, x, count, inner, width, false, true);
            else
                FN(largest_of_columns)(best, x, count, inner, width, false, false);
            for (int64_t i = 0; i < width; i++)
                s[i].value = (double)best[i];
            break;
        }
        int64_t where[TILE];
        for (int64_t i = 0; i < width; i++) {
            best[i] = (REAL)-INFINITY;
            where[i] = -1;
        }
        for (int64_t c = 0; c < count; c++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                const REAL rank = FN(rank_of)(x[c * inner + i], f->absolute, f->smallest);
                const bool above = !(rank <= best[i]) && best[i] == best[i];
                best[i] = above ? rank : best[i];
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

#ifdef WITH_PIECES
CUDA_OPS_SIMD static void FN(row_piece)(state *s, const REAL *x, int64_t count, int64_t at, const family *f)
{
    *s = FN(row_state)(x, count, at, f);
}

CUDA_OPS_SIMD static void FN(rows_piece)(state *s, const REAL *x, int64_t rows, int64_t cols, const family *f)
{
    for (int64_t row = 0; row < rows; row++)
        s[row] = FN(row_state)(x + row * cols, cols, 0, f);
}

CUDA_OPS_SIMD static void FN(columns_piece)(state *s, const REAL *x, int64_t count, int64_t width, int64_t at,
                                            const family *f)
{
    FN(column_states)(s, x, count, width, width, at, f);
}
#endif

#undef ADD_MAPPED
#undef ADD_COLUMNS

#endif
