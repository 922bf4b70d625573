/* prelu on the CPU: output = input > 0 ? input : weight * input. A unit of backward is some SHORT elements of one run of
 * a channel, or with inner == 1 some rows of all channels; its sums are in double, and added unit by unit. Bound by
 * memory. */
#ifndef REAL

#include "cuda_ops/prelu.h"

#include "common/common.h"

enum { SHORT = 4096 };

/* Where there are units by rows, `rows` of each; else `parts` to a run of a channel. */
typedef struct {
    int64_t rows, parts, units;
} cut;

static cut cut_of(int64_t outer, int64_t channels, int64_t inner)
{
    if (inner == 1 && channels > 1) {
        const int64_t rows = max_i64(1, SHORT / channels);
        return (cut){rows, 0, (outer + rows - 1) / rows};
    }
    const int64_t parts = (inner + SHORT - 1) / SHORT;
    return (cut){0, parts, outer * channels * parts};
}

int64_t cuda_ops_prelu_units_cpu(int64_t outer, int64_t channels, int64_t inner)
{
    return cut_of(outer, channels, inner).units;
}

int64_t cuda_ops_prelu_workspace_cpu(int64_t outer, int64_t channels, int64_t inner)
{
    const cut c = cut_of(outer, channels, inner);
    return c.units * (c.rows > 0 ? channels : 1) * (int64_t)sizeof(double);
}

#define REAL float
#define FN(name) name##_f32
#include "prelu.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "prelu.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_prelu_forward_cpu(void *output, const void *input, const void *weight, int64_t channels,
                                           int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        prelu_forward_f32(output, input, weight, channels, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        prelu_forward_f64(output, input, weight, channels, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_prelu_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                            const void *input, const void *weight, int64_t outer, int64_t channels,
                                            int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        prelu_backward_f32(grad_input, workspace, grad_output, input, weight, outer, channels, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        prelu_backward_f64(grad_input, workspace, grad_output, input, weight, outer, channels, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_prelu_backward_weight_cpu(void *grad_weight, const void *workspace, int64_t outer,
                                                   int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                   cuda_ops_dtype dtype)
{
    const cut cut = cut_of(outer, channels, inner);
    const double *sums = workspace;
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    for (int64_t c = begin; c < end; c++) {
        double total = 0;
        if (cut.rows > 0) {
            for (int64_t unit = 0; unit < cut.units; unit++)
                total += sums[unit * channels + c];
        } else {
            for (int64_t o = 0; o < outer; o++)
                for (int64_t part = 0; part < cut.parts; part++)
                    total += sums[(o * channels + c) * cut.parts + part];
        }
        if (dtype == CUDA_OPS_FLOAT32)
            ((float *)grad_weight)[c] = (float)total;
        else
            ((double *)grad_weight)[c] = total;
    }
    return CUDA_OPS_SUCCESS;
}

#else

CUDA_OPS_SIMD static void FN(prelu_forward)(REAL *output, const REAL *input, const REAL *weight, int64_t channels,
                                            int64_t inner, int64_t begin, int64_t end)
{
    for (int64_t at = begin; at < end;) {
        const int64_t run = at / inner, c = run % channels;
        if (inner == 1) { /* a row of channels, or the rest of it */
            const int64_t count = min_i64(channels - c, end - at);
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                output[at + i] = input[at + i] > 0 ? input[at + i] : weight[c + i] * input[at + i];
            at += count;
            continue;
        }
        const int64_t stop = min_i64((run + 1) * inner, end);
        const REAL slope = weight[c];
#pragma omp simd
        for (int64_t i = at; i < stop; i++)
            output[i] = input[i] > 0 ? input[i] : slope * input[i];
        at = stop;
    }
}

CUDA_OPS_SIMD static void FN(prelu_backward)(REAL *grad_input, double *workspace, const REAL *grad_output,
                                             const REAL *input, const REAL *weight, int64_t outer, int64_t channels,
                                             int64_t inner, int64_t begin, int64_t end)
{
    const cut cut = cut_of(outer, channels, inner);
    for (int64_t unit = begin; unit < end; unit++) {
        if (cut.rows > 0) {
            double *sums = workspace + unit * channels;
            memset(sums, 0, (size_t)channels * sizeof(double));
            for (int64_t row = unit * cut.rows; row < min_i64((unit + 1) * cut.rows, outer); row++)
#pragma omp simd
                for (int64_t c = 0; c < channels; c++) {
                    const REAL x = input[row * channels + c], g = grad_output[row * channels + c];
                    grad_input[row * channels + c] = x > 0 ? g : weight[c] * g;
                    sums[c] += x > 0 ? 0 : (double)(x * g);
                }
            continue;
        }
        const int64_t run = unit / cut.parts, first = unit % cut.parts * SHORT, base = run * inner;
        const REAL slope = weight[run % channels];
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = base + first; i < base + min_i64(first + SHORT, inner); i++) {
            const REAL x = input[i], g = grad_output[i];
            grad_input[i] = x > 0 ? g : slope * g;
            sum += x > 0 ? 0 : (double)(x * g);
        }
        workspace[unit] = sum;
    }
}

#endif
