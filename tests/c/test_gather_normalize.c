#include "cuda_ops/gather_normalize.h"

#include "check.h"

enum { COUNT = 7, ROWS = 9 };
static const double MEAN = 0.1307, STD = 0.3081;

static void check_rows(int64_t row_size, int index_bytes, int label_bytes, int64_t bad, cuda_ops_dtype dtype)
{
    uint8_t *images = guarded_bytes(COUNT * row_size, 1);
    for (int64_t i = 0; i < COUNT * row_size; i++)
        images[i] = (uint8_t)(i * 37 + 11);
    int64_t indices[ROWS], *labels = guarded_new_i64(COUNT), *output_labels = guarded_new_i64(ROWS);
    int32_t narrow_indices[ROWS];
    uint8_t narrow_labels[COUNT];
    for (int64_t i = 0; i < COUNT; i++) {
        labels[i] = 100 - i;
        narrow_labels[i] = (uint8_t)labels[i];
    }
    for (int64_t row = 0; row < ROWS; row++) {
        indices[row] = row == 4 ? bad : row * 3 % COUNT;
        narrow_indices[row] = (int32_t)indices[row];
        output_labels[row] = 77;
    }
    const void *i = index_bytes == 4 ? (const void *)narrow_indices : (const void *)indices;
    const void *l = label_bytes == 0 ? NULL : label_bytes == 1 ? (const void *)narrow_labels : (const void *)labels;
    void *output = guarded_new(ROWS * row_size, dtype);
    const bool good = 0 <= bad && bad < COUNT;
    CHECK(cuda_ops_gather_normalize_find_bad_index_cpu(i, index_bytes, ROWS, COUNT) == (good ? -1 : 4), "index %lld",
          (long long)bad);
    IN_TWO_PIECES(ROWS, begin, end,
                  cuda_ops_gather_normalize_cpu(output, output_labels, images, i, index_bytes, l, label_bytes, COUNT,
                                                row_size, begin, end, MEAN, STD, dtype));
    for (int64_t row = 0; row < ROWS; row++) {
        const bool there = good || row != 4;
        for (int64_t e = 0; e < row_size; e++) {
            if (there)
                CHECK_NEAR(output, row * row_size + e, (images[indices[row] * row_size + e] / 255.0 - MEAN) / STD,
                           rounding(dtype), dtype);
            else
                CHECK_UNWRITTEN(output, row * row_size + e, dtype); /* NaN all the same */
        }
        const int64_t expected = label_bytes == 0 ? 77 : there ? labels[indices[row]] : -1;
        CHECK(output_labels[row] == expected, "label %lld", (long long)output_labels[row]);
    }
    guarded_free_bytes(images, COUNT * row_size, 1);
    guarded_free_i64(labels, COUNT);
    guarded_free_i64(output_labels, ROWS);
    guarded_free(output, ROWS * row_size, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 16, 33, 784};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            check_rows(sizes[s], 8, 8, 3, dtype);
            check_rows(sizes[s], 4, 1, 0, dtype);
            check_rows(sizes[s], 8, 0, -1, dtype);
            check_rows(sizes[s], 4, 8, COUNT, dtype);
        }
        CHECK_OK(cuda_ops_gather_normalize_cpu(NULL, NULL, NULL, NULL, 8, NULL, 0, 0, 0, 0, 0, MEAN, STD, dtype));
    }
    const int64_t zero = 0;
    CHECK_STATUS(
        cuda_ops_gather_normalize_cpu(NULL, NULL, NULL, &zero, 2, NULL, 0, 1, 1, 0, 1, MEAN, STD, CUDA_OPS_FLOAT32),
        CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(
        cuda_ops_gather_normalize_cpu(NULL, NULL, NULL, &zero, 8, NULL, 0, 1, 1, 0, 1, MEAN, STD, CUDA_OPS_FLOAT16),
        CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
