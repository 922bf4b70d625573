/* gather_normalize on the CPU: output[b] = (images[indices[b]] / 255 - mean) / std.
 * Bound by memory: one byte read and one element written each. The loop is left plain for the compiler to vectorise. */
#ifndef REAL

#include "cuda_ops/gather_normalize.h"

#include "common/indices.h"

#define REAL float
#define FN(name) name##_f32
#include "gather_normalize.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "gather_normalize.c"

#include "common/undef_real.h"

static bool known_widths(int index_bytes, const void *labels, int label_bytes)
{
    return (index_bytes == 4 || index_bytes == 8) && (labels == NULL || label_bytes == 1 || label_bytes == 8);
}

int64_t cuda_ops_gather_normalize_find_bad_index_cpu(const void *indices, int index_bytes, int64_t rows, int64_t count)
{
    for (int64_t row = 0; row < rows; row++) {
        const int64_t index = index_at(indices, index_bytes, row);
        if (index < 0 || index >= count)
            return row;
    }
    return -1;
}

cuda_ops_status cuda_ops_gather_normalize_cpu(void *output, int64_t *output_labels, const uint8_t *images,
                                              const void *indices, int index_bytes, const void *labels, int label_bytes,
                                              int64_t count, int64_t row_size, int64_t begin, int64_t end, double mean,
                                              double std, cuda_ops_dtype dtype)
{
    if (!known_widths(index_bytes, labels, label_bytes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    for (int64_t row = begin; row < end; row++) {
        const int64_t index = index_at(indices, index_bytes, row);
        const bool good = 0 <= index && index < count;
        const uint8_t *image = good ? images + index * row_size : NULL;
        if (dtype == CUDA_OPS_FLOAT32)
            normalize_row_f32((float *)output + row * row_size, image, row_size, mean, std);
        else
            normalize_row_f64((double *)output + row * row_size, image, row_size, mean, std);
        if (labels != NULL)
            output_labels[row] = !good              ? -1
                                 : label_bytes == 1 ? ((const uint8_t *)labels)[index]
                                                    : ((const int64_t *)labels)[index];
    }
    return CUDA_OPS_SUCCESS;
}

#else

/* A null image, whose index was out of bounds, is all NaN. */
CUDA_OPS_SIMD static void FN(normalize_row)(REAL *output, const uint8_t *image, int64_t row_size, double mean,
                                            double std)
{
    const REAL center = (REAL)(255 * mean), scale = (REAL)(1 / (255 * std));
    if (image == NULL) {
        for (int64_t i = 0; i < row_size; i++)
            output[i] = (REAL)NAN;
        return;
    }
    for (int64_t i = 0; i < row_size; i++)
        output[i] = ((REAL)image[i] - center) * scale;
}

#endif
