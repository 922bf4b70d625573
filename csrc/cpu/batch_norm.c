/* batch_norm on the CPU. With n values in a channel, rstd = 1 / sqrt(variance + eps), normalised = (x - mean) * rstd:
 *
 *     output      = normalised * weight + bias
 *     grad_bias   = sum of grad_output,   grad_weight = sum of grad_output * normalised
 *     grad_input  = weight * rstd * (grad_output - grad_bias / n - normalised * grad_weight / n)
 *
 * with running statistics, without the last two terms.
 *
 * Each elementwise step has the form (x - center) * scale + offset, where center is the mean rounded to the dtype and
 * offset makes up for the rounding. So x - center is exact for values near the mean, however large the mean is, and
 * nothing is lost to a mean that the dtype cannot represent.
 *
 * Reductions take blocks of about BLOCK_ELEMENTS, small enough that the second of their two passes (the mean, then
 * squared differences from it) hits the cache. Sums of up to SHORT elements are in the dtype, sums of those in double.
 * Reductions widen float16 and bfloat16 by pieces, which stay in the first-level cache, again for each of their passes.
 * Bound by memory: the moments read input, the normalisation reads and writes it; backward reads two arrays, twice, and
 * writes one. */
#ifndef REAL

#include "cuda_ops/batch_norm.h"

#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/halves_cpu.h"

typedef cuda_ops_batch_norm_epilogue epilogue;

enum {
    BLOCK_ELEMENTS = 32768, /* 128 kB of floats */
    SHORT = 256,            /* elements that one sum in the dtype covers */
    PIECE = 1024,           /* halves that are widened at a time: some SHORT */
    PIECE_ROWS = 16,        /* and rows of them, for inner = 1: PIECE / CHANNEL_TILE, some four */
    LEAST_ROWS = 32,        /* of a block for inner = 1, such that a block has far more elements than it has sums */
    CHANNEL_TILE = 64       /* channels whose sums stay in the first-level cache, for inner = 1 */
};

typedef struct shape {
    int64_t outer, channels, inner;
} shape;

static int64_t outer_per_block(shape s)
{
    if (s.inner == 1)
        return min_i64(SHORT, max_i64(LEAST_ROWS, BLOCK_ELEMENTS / s.channels));
    return max_i64(1, BLOCK_ELEMENTS / s.inner);
}

static int64_t split_count(shape s)
{
    const int64_t step = outer_per_block(s);
    return (s.outer + step - 1) / step;
}

static int64_t values_of_split(shape s, int64_t split)
{
    const int64_t step = outer_per_block(s);
    return min_i64(step, s.outer - split * step) * s.inner;
}

/* The workspace: two doubles for each split and channel, then four coefficients in the dtype for each channel. */
static double *partials_of(const void *workspace, shape s, int64_t split, int which)
{
    return (double *)workspace + (2 * split + which) * s.channels;
}

static void *coefficients_of(const void *workspace, shape s)
{
    return partials_of(workspace, s, split_count(s), 0);
}

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "batch_norm.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "batch_norm.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#include "batch_norm_normalize.h"

#include "common/undef_real.h"

/* Calls the version of a function for the dtype. */
#define DISPATCH(dtype, function, ...)                                                                                 \
    switch (dtype) {                                                                                                   \
    case CUDA_OPS_FLOAT32:                                                                                             \
        function##_f32(__VA_ARGS__);                                                                                   \
        return CUDA_OPS_SUCCESS;                                                                                       \
    case CUDA_OPS_FLOAT64:                                                                                             \
        function##_f64(__VA_ARGS__);                                                                                   \
        return CUDA_OPS_SUCCESS;                                                                                       \
    default:                                                                                                           \
        return CUDA_OPS_UNSUPPORTED_DTYPE;                                                                             \
    }

static bool is_empty(shape s)
{
    return s.outer == 0 || s.channels == 0 || s.inner == 0;
}

int64_t cuda_ops_batch_norm_blocks_cpu(int64_t outer, int64_t channels, int64_t inner)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return 0;
    return inner == 1 ? split_count(s) : split_count(s) * channels;
}

int64_t cuda_ops_batch_norm_rows_cpu(int64_t outer, int64_t channels, int64_t inner)
{
    return inner == 1 ? outer : outer * channels;
}

int64_t cuda_ops_batch_norm_workspace_cpu(int64_t outer, int64_t channels, int64_t inner)
{
    const shape s = {outer, channels, inner};
    return is_empty(s) ? 0 : (2 * split_count(s) + 4) * channels * (int64_t)sizeof(double);
}

cuda_ops_status cuda_ops_batch_norm_moments_cpu(void *workspace, const void *input, int64_t outer, int64_t channels,
                                                int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(computed_in(dtype), moments, workspace, input, s, begin, end, dtype)
}

cuda_ops_status cuda_ops_batch_norm_prepare_training_cpu(double *mean, double *variance, void *workspace,
                                                         const void *weight, const void *bias, int64_t outer,
                                                         int64_t channels, int64_t inner, double eps,
                                                         cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, prepare_training, mean, variance, workspace, weight, bias, s, eps)
}

cuda_ops_status cuda_ops_batch_norm_prepare_inference_cpu(void *workspace, const void *weight, const void *bias,
                                                          const void *running_mean, const void *running_var,
                                                          int64_t outer, int64_t channels, int64_t inner, double eps,
                                                          cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, prepare_inference, workspace, weight, bias, running_mean, running_var, s, eps)
}

cuda_ops_status cuda_ops_batch_norm_normalize_cpu(void *output, const void *workspace, const void *input, int64_t outer,
                                                  int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    if (dtype == CUDA_OPS_BFLOAT16) {
        normalize_bf16(output, coefficients_of(workspace, s), input, s, begin, end);
        return CUDA_OPS_SUCCESS;
    }
    DISPATCH(dtype, normalize, output, coefficients_of(workspace, s), input, s, begin, end)
}

cuda_ops_status cuda_ops_batch_norm_act_normalize_cpu(void *output, const void *workspace, const void *input,
                                                      const cuda_ops_batch_norm_epilogue *f, int64_t outer,
                                                      int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, normalize_act, output, coefficients_of(workspace, s), input, f, s, begin, end)
}

cuda_ops_status cuda_ops_batch_norm_act_prepare_gate_cpu(void *workspace, const void *weight, const void *bias,
                                                         const void *mean, const void *variance, int64_t outer,
                                                         int64_t channels, int64_t inner, double eps, int training,
                                                         cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, prepare_gate, workspace, weight, bias, mean, variance, s, eps, training)
}

cuda_ops_status cuda_ops_batch_norm_act_gate_cpu(void *grad_sum, const void *workspace, const void *grad_output,
                                                 const void *input, const cuda_ops_batch_norm_epilogue *f,
                                                 int64_t outer, int64_t channels, int64_t inner, int64_t begin,
                                                 int64_t end, cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, gate, grad_sum, coefficients_of(workspace, s), grad_output, input, f, s, begin, end)
}

cuda_ops_status cuda_ops_batch_norm_sums_cpu(void *workspace, const void *grad_output, const void *input,
                                             const void *mean, int64_t outer, int64_t channels, int64_t inner,
                                             int training, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(computed_in(dtype), sums, workspace, grad_output, input, mean, s, training, begin, end, dtype)
}

cuda_ops_status cuda_ops_batch_norm_prepare_backward_cpu(void *grad_weight, void *grad_bias, void *workspace,
                                                         const void *weight, const void *mean, const void *variance,
                                                         int64_t outer, int64_t channels, int64_t inner, double eps,
                                                         int training, cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, prepare_backward, grad_weight, grad_bias, workspace, weight, mean, variance, s, eps, training)
}

cuda_ops_status cuda_ops_batch_norm_grad_input_cpu(void *grad_input, const void *workspace, const void *grad_output,
                                                   const void *input, int64_t outer, int64_t channels, int64_t inner,
                                                   int training, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const shape s = {outer, channels, inner};
    if (is_empty(s))
        return CUDA_OPS_SUCCESS;
    DISPATCH(dtype, grad_input, grad_input, coefficients_of(workspace, s), grad_output, input, s, training, begin, end)
}

cuda_ops_status cuda_ops_batch_norm_update_cpu(void *running_mean, void *running_var, const double *mean,
                                               const double *variance, int64_t channels, int64_t count, double momentum,
                                               cuda_ops_dtype statistics_dtype)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    DISPATCH(statistics_dtype, update, running_mean, running_var, mean, variance, channels, count, momentum)
}

#else

#include "common/activation_functions.h"

/* Elements [at, at + count) of x: where they are, or of halves widened, in `piece`. */
CUDA_OPS_INLINE const REAL *FN(elements_of)(const void *x, int64_t at, int64_t count, REAL *piece, cuda_ops_dtype dtype)
{
    if (sizeof(REAL) == 8 || !is_half(dtype))
        return (const REAL *)x + at;
    (void)cuda_ops_widen_cpu((float *)piece, (const uint16_t *)x + at, count, dtype);
    return piece;
}

/* Likewise `rows` rows of `count` <= CHANNEL_TILE elements, `stride` apart; *pitch is how far apart they are then. */
CUDA_OPS_INLINE const REAL *FN(rows_of)(const void *x, int64_t at, int64_t rows, int64_t stride, int64_t count,
                                        REAL *piece, int64_t *pitch, cuda_ops_dtype dtype)
{
    *pitch = stride;
    if (sizeof(REAL) == 8 || !is_half(dtype))
        return (const REAL *)x + at;
    *pitch = CHANNEL_TILE;
    for (int64_t r = 0; r < rows; r++)
        (void)cuda_ops_widen_cpu((float *)piece + r * CHANNEL_TILE, (const uint16_t *)x + at + r * stride, count,
                                 dtype);
    return piece;
}

/* How much is taken at a time: of what is not widened, all. */
static int64_t FN(piece_of)(int64_t all, int64_t piece, cuda_ops_dtype dtype)
{
    return is_half(dtype) ? piece : all;
}

/* For inner > 1, a block is one channel of one split. */
CUDA_OPS_INLINE double FN(sum_run)(const REAL *x, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i += SHORT) {
        const int64_t end = min_i64(count, i + SHORT);
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t j = i; j < end; j++)
            part += x[j];
        sum += (double)part;
    }
    return sum;
}

/* Adds the sums of x - center and of its squares. */
CUDA_OPS_INLINE void FN(add_differences)(double *sum, double *squares, const REAL *x, int64_t count, REAL center)
{
    for (int64_t i = 0; i < count; i += SHORT) {
        const int64_t end = min_i64(count, i + SHORT);
        REAL part = 0, part_squares = 0;
#pragma omp simd reduction(+ : part, part_squares)
        for (int64_t j = i; j < end; j++) {
            const REAL difference = x[j] - center;
            part += difference;
            part_squares += difference * difference;
        }
        *sum += (double)part;
        *squares += (double)part_squares;
    }
}

/* Adds the sums of g and of g * (x - center). */
CUDA_OPS_INLINE void FN(add_products)(double *sum, double *products, const REAL *g, const REAL *x, int64_t count,
                                      REAL center)
{
    for (int64_t i = 0; i < count; i += SHORT) {
        const int64_t end = min_i64(count, i + SHORT);
        REAL part = 0, part_products = 0;
#pragma omp simd reduction(+ : part, part_products)
        for (int64_t j = i; j < end; j++) {
            part += g[j];
            part_products += g[j] * (x[j] - center);
        }
        *sum += (double)part;
        *products += (double)part_products;
    }
}

/* Mean and sum of squared differences of a block, from differences to a first, rounded mean. The sum of the differences
 * tells the error of that mean, and corrects both. */
CUDA_OPS_INLINE void FN(moments_of_plane)(double *mean, double *squares, const void *x, int64_t at, int64_t rows,
                                          int64_t stride, int64_t inner, cuda_ops_dtype dtype)
{
    REAL piece[PIECE];
    const int64_t step = FN(piece_of)(inner, PIECE, dtype);
    const double count = (double)(rows * inner);
    double total = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i += step) {
            const int64_t length = min_i64(step, inner - i);
            total += FN(sum_run)(FN(elements_of)(x, at + r * stride + i, length, piece, dtype), length);
        }
    const REAL center = (REAL)(total / count);
    double sum = 0, sum_squares = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i += step) {
            const int64_t length = min_i64(step, inner - i);
            FN(add_differences)
            (&sum, &sum_squares, FN(elements_of)(x, at + r * stride + i, length, piece, dtype), length, center);
        }
    *mean = (double)center + sum / count;
    *squares = sum_squares - sum * sum / count;
}

/* The same for `channels` <= CHANNEL_TILE neighbouring channels, for inner = 1. The sums over the block, of at most
 * SHORT rows, are in the dtype; four rows at a time, so that the sums are loaded and stored once for four elements. */
CUDA_OPS_INLINE void FN(moments_of_rows)(double *mean, double *squares, const void *x, int64_t at, int64_t rows,
                                         int64_t stride, int64_t channels, cuda_ops_dtype dtype)
{
    REAL center[CHANNEL_TILE], sum[CHANNEL_TILE] = {0}, sum_squares[CHANNEL_TILE] = {0}, piece[PIECE];
    const int64_t step = FN(piece_of)(rows, PIECE_ROWS, dtype);
    int64_t pitch;
    for (int64_t first = 0; first < rows; first += step) {
        const int64_t count = min_i64(step, rows - first);
        const REAL *from = FN(rows_of)(x, at + first * stride, count, stride, channels, piece, &pitch, dtype);
        int64_t r = 0;
        for (; r + 4 <= count; r += 4) {
            const REAL *a = from + r * pitch, *b = a + pitch, *c = b + pitch, *d = c + pitch;
            for (int64_t k = 0; k < channels; k++)
                sum[k] += (a[k] + b[k]) + (c[k] + d[k]);
        }
        for (; r < count; r++)
            for (int64_t k = 0; k < channels; k++)
                sum[k] += from[r * pitch + k];
    }
    for (int64_t k = 0; k < channels; k++) {
        center[k] = sum[k] / (REAL)rows;
        sum[k] = 0;
    }
    for (int64_t first = 0; first < rows; first += step) {
        const int64_t count = min_i64(step, rows - first);
        const REAL *from = FN(rows_of)(x, at + first * stride, count, stride, channels, piece, &pitch, dtype);
        int64_t r = 0;
        for (; r + 4 <= count; r += 4) {
            const REAL *a = from + r * pitch, *b = a + pitch, *c = b + pitch, *d = c + pitch;
            for (int64_t k = 0; k < channels; k++) {
                const REAL da = a[k] - center[k], db = b[k] - center[k], dc = c[k] - center[k], dd = d[k] - center[k];
                sum[k] += (da + db) + (dc + dd);
                sum_squares[k] += (da * da + db * db) + (dc * dc + dd * dd);
            }
        }
        for (; r < count; r++)
            for (int64_t k = 0; k < channels; k++) {
                const REAL difference = from[r * pitch + k] - center[k];
                sum[k] += difference;
                sum_squares[k] += difference * difference;
            }
    }
    for (int64_t k = 0; k < channels; k++) {
        mean[k] = (double)center[k] + (double)sum[k] / (double)rows;
        squares[k] = (double)sum_squares[k] - (double)sum[k] * (double)sum[k] / (double)rows;
    }
}

CUDA_OPS_SIMD static void FN(moments)(void *workspace, const void *input, shape s, int64_t begin, int64_t end,
                                      cuda_ops_dtype dtype)
{
    const int64_t step = outer_per_block(s);
    for (int64_t block = begin; block < end; block++) {
        const int64_t split = s.inner == 1 ? block : block / s.channels;
        const int64_t first = split * step, rows = min_i64(step, s.outer - first), stride = s.channels * s.inner;
        double *mean = partials_of(workspace, s, split, 0), *squares = partials_of(workspace, s, split, 1);
        if (s.inner == 1) {
            for (int64_t c = 0; c < s.channels; c += CHANNEL_TILE)
                FN(moments_of_rows)
            (mean + c, squares + c, input, first * stride + c, rows, stride, min_i64(CHANNEL_TILE, s.channels - c),
             dtype);
        } else {
            const int64_t c = block % s.channels;
            FN(moments_of_plane)
            (mean + c, squares + c, input, first * stride + c * s.inner, rows, stride, s.inner, dtype);
        }
    }
}

/* Writes (x - center) * scale + offset for a channel. */
static void FN(set_forward_coefficients)(void *workspace, const REAL *weight, const REAL *bias, double mean,
                                         double variance, double eps, shape s, int64_t c)
{
    REAL *center = coefficients_of(workspace, s), *scale = center + s.channels, *offset = scale + s.channels;
    const double factor = (weight ? (double)weight[c] : 1.0) / sqrt(variance + eps);
    center[c] = (REAL)mean;
    scale[c] = (REAL)factor;
    offset[c] = (REAL)((bias ? (double)bias[c] : 0.0) - (mean - (double)center[c]) * factor);
}

static void FN(prepare_training)(double *mean, double *variance, void *workspace, const REAL *weight, const REAL *bias,
                                 shape s, double eps)
{
    const int64_t splits = split_count(s);
    const double count = (double)(s.outer * s.inner);
    for (int64_t c = 0; c < s.channels; c++) {
        double total = 0, squares = 0;
        for (int64_t split = 0; split < splits; split++)
            total += partials_of(workspace, s, split, 0)[c] * (double)values_of_split(s, split);
        mean[c] = total / count;
        for (int64_t split = 0; split < splits; split++) {
            const double difference = partials_of(workspace, s, split, 0)[c] - mean[c];
            squares += partials_of(workspace, s, split, 1)[c];
            squares += difference * difference * (double)values_of_split(s, split);
        }
        variance[c] = squares / count;
        FN(set_forward_coefficients)(workspace, weight, bias, mean[c], variance[c], eps, s, c);
    }
}

static void FN(prepare_inference)(void *workspace, const REAL *weight, const REAL *bias, const REAL *running_mean,
                                  const REAL *running_var, shape s, double eps)
{
    for (int64_t c = 0; c < s.channels; c++)
        FN(set_forward_coefficients)(workspace, weight, bias, (double)running_mean[c], (double)running_var[c], eps, s,
                                     c);
}

#include "batch_norm_normalize.h"

/* mean and variance are doubles in training, else of the dtype. */
CUDA_OPS_INLINE double FN(statistic)(const void *statistics, int training, int64_t c)
{
    return training ? ((const double *)statistics)[c] : (double)((const REAL *)statistics)[c];
}

CUDA_OPS_INLINE void FN(sums_of_rows)(double *sums, double *products, const void *grad_output, const void *input,
                                      int64_t at, const REAL *center, int64_t rows, int64_t stride, int64_t channels,
                                      cuda_ops_dtype dtype)
{
    REAL sum[CHANNEL_TILE] = {0}, product[CHANNEL_TILE] = {0}, grad_piece[PIECE], piece[PIECE];
    const int64_t step = FN(piece_of)(rows, PIECE_ROWS, dtype);
    int64_t pitch;
    for (int64_t first = 0; first < rows; first += step) {
        const int64_t count = min_i64(step, rows - first), from = at + first * stride;
        const REAL *g = FN(rows_of)(grad_output, from, count, stride, channels, grad_piece, &pitch, dtype);
        const REAL *x = FN(rows_of)(input, from, count, stride, channels, piece, &pitch, dtype);
        int64_t r = 0;
        for (; r + 4 <= count; r += 4) {
            const REAL *ga = g + r * pitch, *gb = ga + pitch, *gc = gb + pitch, *gd = gc + pitch;
            const REAL *xa = x + r * pitch, *xb = xa + pitch, *xc = xb + pitch, *xd = xc + pitch;
            for (int64_t k = 0; k < channels; k++) {
                const REAL m = center[k];
                sum[k] += (ga[k] + gb[k]) + (gc[k] + gd[k]);
                product[k] += (ga[k] * (xa[k] - m) + gb[k] * (xb[k] - m)) + (gc[k] * (xc[k] - m) + gd[k] * (xd[k] - m));
            }
        }
        for (; r < count; r++)
            for (int64_t k = 0; k < channels; k++) {
                sum[k] += g[r * pitch + k];
                product[k] += g[r * pitch + k] * (x[r * pitch + k] - center[k]);
            }
    }
    for (int64_t k = 0; k < channels; k++) {
        sums[k] = (double)sum[k];
        products[k] = (double)product[k];
    }
}

CUDA_OPS_SIMD static void FN(sums)(void *workspace, const void *grad_output, const void *input, const void *mean,
                                   shape s, int training, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t step = outer_per_block(s), length = FN(piece_of)(s.inner, PIECE, dtype);
    REAL grad_piece[PIECE], piece[PIECE];
    for (int64_t block = begin; block < end; block++) {
        const int64_t split = s.inner == 1 ? block : block / s.channels;
        const int64_t first = split * step, rows = min_i64(step, s.outer - first), stride = s.channels * s.inner;
        double *sums = partials_of(workspace, s, split, 0), *products = partials_of(workspace, s, split, 1);
        if (s.inner == 1) {
            for (int64_t c = 0; c < s.channels; c += CHANNEL_TILE) {
                const int64_t channels = min_i64(CHANNEL_TILE, s.channels - c);
                REAL center[CHANNEL_TILE];
                for (int64_t k = 0; k < channels; k++)
                    center[k] = (REAL)FN(statistic)(mean, training, c + k);
                FN(sums_of_rows)
                (sums + c, products + c, grad_output, input, first * stride + c, center, rows, stride, channels, dtype);
            }
        } else {
            const int64_t c = block % s.channels;
            const REAL center = (REAL)FN(statistic)(mean, training, c);
            double sum = 0, product = 0;
            for (int64_t r = first; r < first + rows; r++)
                for (int64_t i = 0; i < s.inner; i += length) {
                    const int64_t at = r * stride + c * s.inner + i, count = min_i64(length, s.inner - i);
                    const REAL *g = FN(elements_of)(grad_output, at, count, grad_piece, dtype);
                    FN(add_products)(&sum, &product, g, FN(elements_of)(input, at, count, piece, dtype), count, center);
                }
            sums[c] = sum;
            products[c] = product;
        }
    }
}

/* Writes grad_output * scale + (x - center) * slope + offset for each channel; with running statistics slope and offset
 * are not read. */
static void FN(prepare_backward)(REAL *grad_weight, REAL *grad_bias, void *workspace, const REAL *weight,
                                 const void *mean, const void *variance, shape s, double eps, int training)
{
    REAL *center = coefficients_of(workspace, s), *scale = center + s.channels;
    REAL *slope = scale + s.channels, *offset = slope + s.channels;
    const int64_t splits = training || grad_weight ? split_count(s) : 0;
    const double count = (double)(s.outer * s.inner);
    for (int64_t c = 0; c < s.channels; c++) {
        const double m = FN(statistic)(mean, training, c);
        const double rstd = 1.0 / sqrt(FN(statistic)(variance, training, c) + eps);
        const double factor = (weight ? (double)weight[c] : 1.0) * rstd;
        double sum = 0, product = 0;
        for (int64_t split = 0; split < splits; split++) {
            sum += partials_of(workspace, s, split, 0)[c];
            product += partials_of(workspace, s, split, 1)[c];
        }
        center[c] = (REAL)m;
        const double rounding = m - (double)center[c];
        const double dot = (product - rounding * sum) * rstd; /* of grad_output with the normalised input */
        const double incline = -factor * rstd * dot / count;
        scale[c] = (REAL)factor;
        slope[c] = (REAL)incline;
        offset[c] = (REAL)(-factor * sum / count - incline * rounding);
        if (grad_weight) {
            grad_weight[c] = (REAL)dot;
            grad_bias[c] = (REAL)sum;
        }
    }
}

CUDA_OPS_SIMD static void FN(grad_input)(REAL *restrict grad_input, const REAL *restrict coefficients,
                                         const REAL *restrict grad_output, const REAL *restrict input, shape s,
                                         int training, int64_t begin, int64_t end)
{
    const REAL *center = coefficients, *scale = center + s.channels;
    const REAL *slope = scale + s.channels, *offset = slope + s.channels;
    const int64_t length = s.inner == 1 ? s.channels : s.inner;
    for (int64_t row = begin; row < end; row++) {
        const REAL *x = input + row * length, *g = grad_output + row * length;
        REAL *y = grad_input + row * length;
        if (s.inner == 1 && training) {
            for (int64_t c = 0; c < length; c++)
                y[c] = g[c] * scale[c] + (x[c] - center[c]) * slope[c] + offset[c];
        } else if (s.inner == 1) {
            for (int64_t c = 0; c < length; c++)
                y[c] = g[c] * scale[c];
        } else if (training) {
            const int64_t channel = row % s.channels;
            const REAL m = center[channel], a = scale[channel], b = slope[channel], c = offset[channel];
            for (int64_t i = 0; i < length; i++)
                y[i] = g[i] * a + (x[i] - m) * b + c;
        } else {
            const REAL a = scale[row % s.channels];
            for (int64_t i = 0; i < length; i++)
                y[i] = g[i] * a;
        }
    }
}

static void FN(prepare_gate)(void *workspace, const REAL *weight, const REAL *bias, const void *mean,
                             const void *variance, shape s, double eps, int training)
{
    for (int64_t c = 0; c < s.channels; c++)
        FN(set_forward_coefficients)(workspace, weight, bias, FN(statistic)(mean, training, c),
                                     FN(statistic)(variance, training, c), eps, s, c);
}

/* A row of batch_norm_act: z = (x - m) * a + b + r, forward y = f(z), and backward y = g * f'(z). Where `each`, m, a and
 * b are of an element each, and else one. r: NULL for no residual, and then `zero` stands for it, a row of one 0. */
#define FOR_ROW(each, result)                                                                                          \
    _Pragma("omp simd") for (int64_t i = 0; i < length; i++)                                                           \
    {                                                                                                                  \
        const int64_t c = (each) ? i : 0;                                                                              \
        const REAL z = (x[i] - m[c]) * a[c] + b[c] + (r ? r[i] : (REAL)0);                                             \
        y[i] = (result);                                                                                               \
    }
#define FOR_ACT_ROW(result)                                                                                            \
    do {                                                                                                               \
        if (each && r)                                                                                                 \
            FOR_ROW(1, result) else if (each) FOR_ROW(1, result) else FOR_ROW(0, result)                               \
    } while (0)

CUDA_OPS_SIMD static void FN(act_row)(REAL *y, const REAL *x, const REAL *r, const REAL *m, const REAL *a,
                                      const REAL *b, bool each, int64_t length, const epilogue *f)
{
    const REAL low = (REAL)f->first, high = (REAL)f->second;
    switch (f->function) {
    case CUDA_OPS_ACTIVATION_SILU:
        FOR_ACT_ROW(FN(silu)(z));
        return;
    case CUDA_OPS_ACTIVATION_HARDSWISH:
        FOR_ACT_ROW(FN(hardswish)(z));
        return;
    default:
        FOR_ACT_ROW(FN(hardtanh)(z, low, high));
    }
}

CUDA_OPS_SIMD static void FN(gate_row)(REAL *y, const REAL *g, const REAL *x, const REAL *r, const REAL *m,
                                       const REAL *a, const REAL *b, bool each, int64_t length, const epilogue *f)
{
    const REAL low = (REAL)f->first, high = (REAL)f->second;
    switch (f->function) {
    case CUDA_OPS_ACTIVATION_SILU:
        FOR_ACT_ROW(g[i] * FN(silu_slope)(z));
        return;
    case CUDA_OPS_ACTIVATION_HARDSWISH:
        FOR_ACT_ROW(g[i] * FN(hardswish_slope)(z));
        return;
    default:
        FOR_ACT_ROW(z <= low || z >= high ? (REAL)0 : g[i]);
    }
}
#undef FOR_ACT_ROW
#undef FOR_ROW

static void FN(normalize_act)(REAL *output, const REAL *coefficients, const REAL *input, const epilogue *f, shape s,
                              int64_t begin, int64_t end)
{
    const REAL *center = coefficients, *scale = center + s.channels, *offset = scale + s.channels;
    const bool each = s.inner == 1;
    const int64_t length = each ? s.channels : s.inner;
    for (int64_t row = begin; row < end; row++) {
        const int64_t c = each ? 0 : row % s.channels, start = row * length;
        const REAL *r = f->residual ? (const REAL *)f->residual + start : NULL;
        FN(act_row)(output + start, input + start, r, center + c, scale + c, offset + c, each, length, f);
    }
}

static void FN(gate)(REAL *grad_sum, const REAL *coefficients, const REAL *grad_output, const REAL *input,
                     const epilogue *f, shape s, int64_t begin, int64_t end)
{
    const REAL *center = coefficients, *scale = center + s.channels, *offset = scale + s.channels;
    const bool each = s.inner == 1;
    const int64_t length = each ? s.channels : s.inner;
    for (int64_t row = begin; row < end; row++) {
        const int64_t c = each ? 0 : row % s.channels, start = row * length;
        const REAL *r = f->residual ? (const REAL *)f->residual + start : NULL;
        FN(gate_row)(grad_sum + start, grad_output + start, input + start, r, center + c, scale + c, offset + c, each,
                     length, f);
    }
}

static void FN(update)(REAL *running_mean, REAL *running_var, const double *mean, const double *variance,
                       int64_t channels, int64_t count, double momentum)
{
    const double unbiased = (double)count / (double)(count - 1);
    for (int64_t c = 0; c < channels; c++) {
        running_mean[c] = (REAL)((1 - momentum) * (double)running_mean[c] + momentum * mean[c]);
        running_var[c] = (REAL)((1 - momentum) * (double)running_var[c] + momentum * variance[c] * unbiased);
    }
}

#endif
