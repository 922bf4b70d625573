#include "cuda_ops/embedding.h"
#include "cuda_ops/scatter.h"

#include "check.h"

enum { OUTER = 2, ROWS = 5, COUNT = 9 };

/* `bad`: the index at position 4, of which 3 is a good one. */
static void check_scatter(int64_t inner, int index_bytes, int64_t bad, cuda_ops_dtype dtype)
{
    const cuda_ops_scatter_sizes sizes = {OUTER, ROWS, COUNT, inner};
    const int64_t outputs = OUTER * ROWS * inner, sources = OUTER * COUNT * inner;
    const double alpha = -0.5;
    int64_t rows[COUNT], starts[ROWS + 2], slots[COUNT], *elements = guarded_new_i64(sources);
    int32_t narrow_rows[COUNT], *narrow = guarded_bytes(sources, sizeof(int32_t));
    for (int64_t k = 0; k < COUNT; k++) {
        rows[k] = k == 4 ? bad : k * k % 4;
        narrow_rows[k] = (int32_t)rows[k];
    }
    for (int64_t i = 0; i < sources; i++) {
        elements[i] = i == 4 ? bad : i * i % ROWS;
        narrow[i] = (int32_t)elements[i];
    }
    const void *index = index_bytes == 4 ? (const void *)narrow_rows : (const void *)rows;
    const void *places = index_bytes == 4 ? (const void *)narrow : (const void *)elements;
    void *input = guarded_numbers(outputs, 1, dtype), *source = guarded_numbers(sources, 2, dtype);
    void *added = guarded_new(outputs, dtype), *scattered = guarded_numbers(outputs, 1, dtype);
    void *grad_rows = guarded_new(sources, dtype), *grad_elements = guarded_new(sources, dtype);
    CHECK_OK(cuda_ops_embedding_sort_cpu(starts, slots, index, index_bytes, COUNT, ROWS, -1));
    IN_TWO_PIECES(OUTER * ROWS, begin, end,
                  cuda_ops_index_add_cpu(added, input, source, starts, slots, sizes, alpha, begin, end, dtype));
    IN_TWO_PIECES(
        OUTER * COUNT, begin, end,
        cuda_ops_index_add_backward_cpu(grad_rows, input, index, index_bytes, sizes, alpha, begin, end, dtype));
    IN_TWO_PIECES(OUTER * inner, begin, end,
                  cuda_ops_scatter_add_cpu(scattered, source, places, index_bytes, sizes, begin, end, dtype));
    IN_TWO_PIECES(
        OUTER * COUNT, begin, end,
        cuda_ops_scatter_add_backward_cpu(grad_elements, input, places, index_bytes, sizes, begin, end, dtype));
    for (int64_t o = 0; o < OUTER; o++)
        for (int64_t i = 0; i < inner; i++) {
            for (int64_t row = 0; row < ROWS; row++) {
                const int64_t at = (o * ROWS + row) * inner + i;
                double of_rows = 0, of_elements = 0;
                for (int64_t k = 0; k < COUNT; k++) {
                    const int64_t from = (o * COUNT + k) * inner + i;
                    of_rows += rows[k] == row ? get(source, from, dtype) : 0;
                    of_elements += elements[from] == row ? get(source, from, dtype) : 0;
                }
                CHECK_NEAR(added, at, get(input, at, dtype) + alpha * of_rows, rounding(dtype), dtype);
                CHECK_NEAR(scattered, at, get(input, at, dtype) + of_elements, rounding(dtype), dtype);
            }
            for (int64_t k = 0; k < COUNT; k++) {
                const int64_t at = (o * COUNT + k) * inner + i, row = rows[k], place = elements[at];
                const bool good = row >= 0 && row < ROWS, has_place = place >= 0 && place < ROWS;
                CHECK_NEAR(grad_rows, at, good ? alpha * get(input, (o * ROWS + row) * inner + i, dtype) : 0,
                           rounding(dtype), dtype);
                CHECK_NEAR(grad_elements, at, has_place ? get(input, (o * ROWS + place) * inner + i, dtype) : 0, 0,
                           dtype);
            }
        }
    guarded_free(input, outputs, dtype);
    guarded_free(source, sources, dtype);
    guarded_free(added, outputs, dtype);
    guarded_free(scattered, outputs, dtype);
    guarded_free(grad_rows, sources, dtype);
    guarded_free(grad_elements, sources, dtype);
    guarded_free_i64(elements, sources);
    guarded_free_bytes(narrow, sources, sizeof(int32_t));
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    for (int64_t inner = 1; inner < 600; inner = inner * 8 + 1)
        for (int index_bytes = 4; index_bytes <= 8; index_bytes += 4) {
            check_scatter(inner, index_bytes, 3, dtype);
            check_scatter(inner, index_bytes, -1, dtype);
            check_scatter(inner, index_bytes, ROWS, dtype);
        }
    const cuda_ops_scatter_sizes none = {0, 0, 0, 0};
    CHECK_OK(cuda_ops_scatter_add_cpu(NULL, NULL, NULL, 8, none, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_scatter_add_cpu(NULL, NULL, NULL, 2, none, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_index_add_cpu(NULL, NULL, NULL, NULL, NULL, none, 1, 0, 0, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
