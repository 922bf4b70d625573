/* permute_contiguous on the CPU: rows of output one after the other, in blocks of BLOCK times BLOCK where a row is a
 * column of input, so that each cache line that is read is used whole. Bound by memory: one read, one write. */
#ifndef REAL

#include "cuda_ops/permute_contiguous.h"

#include "common/common.h"

enum { BLOCK = 16 };

int cuda_ops_permute_collapse(cuda_ops_permutation *permutation, int dims, const int64_t *sizes, const int64_t *strides)
{
    int count = 0;
    for (int d = 0; d < dims; d++) {
        if (sizes[d] == 1)
            continue;
        if (count > 0 && permutation->strides[count - 1] == sizes[d] * strides[d]) {
            permutation->sizes[count - 1] *= sizes[d];
            permutation->strides[count - 1] = strides[d];
            continue;
        }
        if (count == CUDA_OPS_PERMUTE_DIMS)
            return 0;
        permutation->sizes[count] = sizes[d];
        permutation->strides[count] = strides[d];
        count++;
    }
    permutation->dims = count;
    return 1;
}

#define REAL uint16_t
#define FN(name) name##_u16
#include "permute_contiguous.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_f32
#include "permute_contiguous.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "permute_contiguous.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_permute_contiguous_cpu(void *output, const void *input,
                                                const cuda_ops_permutation *permutation, int64_t begin, int64_t end,
                                                int element_bytes)
{
    if (permutation->dims < 0 || permutation->dims > CUDA_OPS_PERMUTE_DIMS)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    for (int d = 0; d < permutation->dims; d++)
        if (permutation->sizes[d] == 0)
            return CUDA_OPS_SUCCESS;
    if (element_bytes == 2)
        permute_u16(output, input, permutation, begin, end);
    else if (element_bytes == 4)
        permute_f32(output, input, permutation, begin, end);
    else
        permute_f64(output, input, permutation, begin, end);
    return CUDA_OPS_SUCCESS;
}

#else

/* A row at a time, of which the first and the last may be a part. Of rows that are columns of input, as many neighbours
 * as lie side by side there are copied together. */
CUDA_OPS_SIMD static void FN(permute)(REAL *restrict output, const REAL *restrict input, const cuda_ops_permutation *p,
                                      int64_t begin, int64_t end)
{
    const int last = p->dims - 1;
    const int64_t cols = last < 0 ? 1 : p->sizes[last], step = last < 0 ? 1 : p->strides[last];
    /* Neighbouring rows lie side by side in input if the dimension before the last one is contiguous there. */
    const int64_t beside = last > 0 && p->strides[last - 1] == 1 ? p->sizes[last - 1] : 1;
    for (int64_t at = begin; at < end;) {
        const int64_t row = at / cols, first = at % cols, count = min_i64(cols - first, end - at);
        int64_t index = row, offset = first * step;
        for (int d = last - 1; d >= 0; d--) {
            offset += index % p->sizes[d] * p->strides[d];
            index /= p->sizes[d];
        }
        const int64_t rows = min_i64(min_i64(BLOCK, beside - row % beside), (end - at) / cols);
        if (first > 0 || rows < 2) {
            if (step == 1) {
                memcpy(output + at, input + offset, (size_t)count * sizeof(REAL));
            } else {
                for (int64_t c = 0; c < count; c++)
                    output[at + c] = input[offset + c * step];
            }
            at += count;
            continue;
        }
        for (int64_t c0 = 0; c0 < cols; c0 += BLOCK)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = c0; c < min_i64(c0 + BLOCK, cols); c++)
                    output[at + r * cols + c] = input[offset + c * step + r];
        at += rows * cols;
    }
}

#endif
