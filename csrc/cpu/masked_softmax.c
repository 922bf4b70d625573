/* masked_softmax on the CPU: a row's scores, their exponentials, their quotients, each in place of the one before, while
 * the row is in the cache. Bound by exp and by memory. */
#ifndef REAL

#include "cuda_ops/masked_softmax.h"

#include "common/common.h"
#include "common/exponential.h"

#define REAL float
#define FN(name) name##_f32
#include "masked_softmax.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "masked_softmax.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_masked_softmax_forward_cpu(void *output, const void *input, const cuda_ops_mask *mask,
                                                    double scale, int64_t cols, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        masked_softmax_forward_f32(output, input, mask, (float)scale, cols, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        masked_softmax_forward_f64(output, input, mask, scale, cols, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"
#include "common/row_exponentials.h"

/* The first `cols` scores of a row. */
CUDA_OPS_INLINE void FN(row_scores)(REAL *scores, const REAL *x, const cuda_ops_mask *mask, int64_t row, REAL scale,
                                    int64_t cols)
{
    const int64_t offset = cuda_ops_mask_offset(mask, row);
    if (mask->kind == CUDA_OPS_MASK_BOOLEAN) {
        const uint8_t *const takes_part = (const uint8_t *)mask->values + offset;
        if (mask->col_stride == 0)
            for (int64_t c = 0; c < cols; c++)
                scores[c] = *takes_part ? x[c] * scale : -(REAL)INFINITY;
        else
            for (int64_t c = 0; c < cols; c++)
                scores[c] = takes_part[c] ? x[c] * scale : -(REAL)INFINITY;
    } else if (mask->kind == CUDA_OPS_MASK_ADDITIVE) {
        const REAL *const summand = (const REAL *)mask->values + offset;
        if (mask->col_stride == 0)
            for (int64_t c = 0; c < cols; c++)
                scores[c] = x[c] * scale + *summand;
        else
            for (int64_t c = 0; c < cols; c++)
                scores[c] = x[c] * scale + summand[c];
    } else {
        for (int64_t c = 0; c < cols; c++)
            scores[c] = x[c] * scale;
    }
}

CUDA_OPS_SIMD static void FN(masked_softmax_forward)(REAL *output, const REAL *input, const cuda_ops_mask *mask,
                                                     REAL scale, int64_t cols, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        REAL *const y = output + row * cols;
        const int64_t seen = mask->queries == 0 ? cols : min_i64(row % mask->queries + 1, cols);
        FN(row_scores)(y, input + row * cols, mask, row, scale, seen);
        /* Of -inf alone the exponentials are 0, and so are the quotients; of NaN they are NaN. */
        const REAL maximum = FN(row_maximum)(y, seen);
        const REAL sum = FN(row_exponentials)(y, y, seen, maximum == -(REAL)INFINITY ? (REAL)0 : maximum);
        FN(row_scale)(y, seen, sum == 0 ? (REAL)0 : 1 / sum);
        const REAL rest = sum != sum ? (REAL)NAN : (REAL)0;
        for (int64_t c = seen; c < cols; c++)
            y[c] = rest;
    }
}

#endif
