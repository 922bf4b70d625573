/* Gradients of reductions on the CPU: grad_input = slope * grad_output, the slope by an element x and up to three values of
 * its output, which are found first. Bound by memory: one read for these values where they are sums over the elements
 * (prod, amax, amin), one read and one write for the gradient. */
#ifndef REAL

#include "cuda_ops/reduction.h"

#include "common/common.h"

/* What an element x gets, by the factors of its output. */
typedef enum slope {
    SLOPE_DIFFERENCE, /* (x - first) * second */
    SLOPE_QUOTIENT,   /* x / first * second */
    SLOPE_EQUAL,      /* x == first ? second : third */
    SLOPE_OTHERS      /* x == 0 ? second : first / x */
} slope;

static slope slope_of(cuda_ops_reduction_kind kind)
{
    switch (kind) {
    case CUDA_OPS_VAR:
    case CUDA_OPS_STD:
        return SLOPE_DIFFERENCE;
    case CUDA_OPS_NORM:
        return SLOPE_QUOTIENT;
    case CUDA_OPS_PROD:
        return SLOPE_OTHERS;
    default:
        return SLOPE_EQUAL;
    }
}

static bool has_slope(cuda_ops_reduction_kind kind, double parameter)
{
    return kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD || kind == CUDA_OPS_PROD || kind == CUDA_OPS_AMAX ||
           kind == CUDA_OPS_AMIN || (kind == CUDA_OPS_NORM && parameter == 2);
}

static bool is_of_rows(cuda_ops_reduction_kind kind)
{
    return kind == CUDA_OPS_PROD || kind == CUDA_OPS_AMAX || kind == CUDA_OPS_AMIN;
}

#define REAL float
#define FN(name) name##_f32
#include "reduction_backward.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "reduction_backward.c"

#include "common/undef_real.h"

int cuda_ops_reduction_has_backward_cpu(cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind, double parameter)
{
    return has_slope(kind, parameter) && (!is_of_rows(kind) || (sizes.batch == 1 && sizes.inner == 1));
}

cuda_ops_status cuda_ops_reduction_backward_factors_cpu(double *factors, const void *grad_output, const void *output,
                                                        const void *mean, const void *input,
                                                        cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind,
                                                        double parameter, int64_t begin, int64_t end,
                                                        cuda_ops_dtype dtype)
{
    if (!cuda_ops_reduction_has_backward_cpu(sizes, kind, parameter))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        factors_f32(factors, grad_output, output, mean, input, &sizes, kind, parameter, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        factors_f64(factors, grad_output, output, mean, input, &sizes, kind, parameter, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_reduction_backward_cpu(void *grad_input, const void *input, const double *factors,
                                                cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        backward_f32(grad_input, input, factors, &sizes, slope_of(kind), begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        backward_f64(grad_input, input, factors, &sizes, slope_of(kind), begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static int64_t FN(count_equal)(const REAL *x, int64_t count, REAL value)
{
    int64_t equal = 0;
    for (int64_t i = 0; i < count; i++)
        equal += x[i] == value;
    return equal;
}

/* The product of all elements but zeros, and how many these are. */
CUDA_OPS_SIMD static double FN(product_of_others)(const REAL *x, int64_t count, int64_t *zeros)
{
    double product = 1;
    int64_t found = 0;
#pragma omp simd reduction(* : product) reduction(+ : found)
    for (int64_t i = 0; i < count; i++) {
        product *= x[i] == 0 ? 1.0 : (double)x[i];
        found += x[i] == 0;
    }
    *zeros = found;
    return product;
}

/* Of outputs [begin, end), in three arrays of outer * inner each. */
static void FN(factors)(double *factors, const REAL *grad_output, const REAL *output, const REAL *mean,
                        const REAL *input, const cuda_ops_reduction_sizes *sizes, cuda_ops_reduction_kind kind,
                        double correction, int64_t begin, int64_t end)
{
    const int64_t outputs = sizes->outer * sizes->inner;
    double *const first = factors, *const second = first + outputs, *const third = second + outputs;
    const double divisor = (double)(sizes->batch * sizes->cols) - correction;
    for (int64_t i = begin; i < end; i++) {
        const double grad = grad_output[i], result = output[i];
        third[i] = 0;
        if (kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD) {
            first[i] = mean[i];
            second[i] = grad * (2 / divisor);
            if (kind == CUDA_OPS_STD)
                second[i] = result == 0 ? 0 : second[i] / (2 * result);
        } else if (kind == CUDA_OPS_NORM) { /* not by 1 / result, which underflows where that is large */
            first[i] = result == 0 ? 1 : result;
            second[i] = result == 0 ? 0 : grad;
        } else if (kind == CUDA_OPS_PROD) {
            int64_t zeros;
            const double product = FN(product_of_others)(input + i * sizes->cols, sizes->cols, &zeros);
            first[i] = (zeros == 0 ? product : 0) * grad;
            second[i] = (zeros == 1 ? product : 0) * grad;
            third[i] = product;
        } else {
            const double count = (double)FN(count_equal)(input + i * sizes->cols, sizes->cols, output[i]);
            first[i] = result;
            second[i] = 1 / count * grad;
            third[i] = 0 / count * grad; /* NaN where the result is one, which nothing equals */
        }
    }
}

/* `count` elements of one output, or of outputs side by side, whose factors follow each other. */
CUDA_OPS_SIMD static void FN(apply)(REAL *grad_input, const REAL *input, const double *first, const double *second,
                                    const double *third, slope slope, bool is_one, int64_t count)
{
    const int64_t step = is_one ? 0 : 1;
    const REAL a = (REAL)first[0], b = (REAL)second[0], c = (REAL)third[0];
    if (slope == SLOPE_DIFFERENCE && is_one)
        for (int64_t i = 0; i < count; i++)
            grad_input[i] = (input[i] - a) * b;
    else if (slope == SLOPE_DIFFERENCE)
        for (int64_t i = 0; i < count; i++)
            grad_input[i] = (input[i] - (REAL)first[i]) * (REAL)second[i];
    else if (slope == SLOPE_QUOTIENT && is_one)
        for (int64_t i = 0; i < count; i++)
            grad_input[i] = input[i] / a * b;
    else if (slope == SLOPE_QUOTIENT)
        for (int64_t i = 0; i < count; i++)
            grad_input[i] = input[i] / (REAL)first[i] * (REAL)second[i];
    else if (slope == SLOPE_EQUAL)
        for (int64_t i = 0; i < count; i++)
            grad_input[i] = input[i] == a ? b : c;
    else
        for (int64_t i = 0; i < count; i++) /* in double: the product of a row may be too large or small for a float */
            grad_input[i] = (REAL)(input[i] == 0 ? second[i * step] : first[i * step] / (double)input[i]);
}

/* Elements [begin, end) in the order of memory. */
static void FN(backward)(REAL *grad_input, const REAL *input, const double *factors,
                         const cuda_ops_reduction_sizes *sizes, slope slope, int64_t begin, int64_t end)
{
    const int64_t inner = sizes->inner, outputs = sizes->outer * inner;
    const bool is_one = inner == 1;
    for (int64_t at = begin, count; at < end; at += count) {
        const int64_t line = at / inner, row = line / sizes->cols % sizes->outer;
        const double *const of_output = factors + row * inner + at % inner;
        count = is_one ? sizes->cols - at % sizes->cols : inner - at % inner;
        count = min_i64(count, end - at);
        FN(apply)(grad_input + at, input + at, of_output, of_output + outputs, of_output + 2 * outputs, slope, is_one,
                  count);
    }
}

#endif
