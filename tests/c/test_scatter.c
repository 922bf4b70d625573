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

/* Values that are added as they come: of rows that share an index in all dtypes, and of halves that have one each. */
static void check_elements(int64_t rows, int64_t count, int64_t inner, int index_bytes, int64_t bad,
                           cuda_ops_dtype dtype)
{
    const cuda_ops_scatter_sizes sizes = {OUTER, rows, count, inner};
    const int64_t outputs = OUTER * rows * inner, sources = OUTER * count * inner;
    const double alpha = -0.5;
    int64_t *places = guarded_new_i64(sources);
    int32_t *narrow = guarded_bytes(sources, sizeof(int32_t));
    for (int64_t i = 0; i < sources; i++) {
        places[i] = i == 1 ? bad : i * i % rows;
        narrow[i] = (int32_t)places[i];
    }
    const void *index = index_bytes == 4 ? (const void *)narrow : (const void *)places;
    void *input = guarded_numbers(outputs, 1, dtype), *source = guarded_numbers(sources, 2, dtype);
    void *added = guarded_new(outputs, dtype), *scattered = guarded_numbers(outputs, 1, dtype);
    const cuda_ops_scatter_plan plan = cuda_ops_scatter_plan_cpu(sizes, dtype);
    CHECK(plan.columns * plan.tiles >= inner && plan.columns * (plan.tiles - 1) < inner, "%d", (int)plan.columns);
    void *workspace = guarded_bytes((int64_t)plan.workspace_bytes, 1);
    IN_TWO_PIECES(plan.count, begin, end,
                  cuda_ops_index_add_elements_cpu(added, input, source, index, index_bytes, sizes, alpha, &plan, begin,
                                                  end, workspace, dtype));
    const bool is_half = dtype == CUDA_OPS_BFLOAT16;
    if (is_half)
        IN_TWO_PIECES(plan.count, begin, end,
                      cuda_ops_scatter_add_halves_cpu(scattered, source, index, index_bytes, sizes, &plan, begin, end,
                                                      workspace, dtype));
    double *of_rows = calloc((size_t)outputs + 1, sizeof(double)), *terms = calloc((size_t)outputs + 1, sizeof(double));
    double *of_elements = calloc((size_t)outputs + 1, sizeof(double));
    CHECK(of_rows && of_elements && terms, "out of memory");
    for (int64_t o = 0; o < OUTER; o++)
        for (int64_t k = 0; k < count; k++)
            for (int64_t i = 0; i < inner; i++) {
                const int64_t from = (o * count + k) * inner + i;
                if (places[k] >= 0 && places[k] < rows) {
                    of_rows[(o * rows + places[k]) * inner + i] += alpha * get(source, from, dtype);
                    terms[(o * rows + places[k]) * inner + i]++;
                }
                if (places[from] >= 0 && places[from] < rows)
                    of_elements[(o * rows + places[from]) * inner + i] += get(source, from, dtype);
            }
    /* A float's rounding is added at each term, of 2 at the most, to that of the result. */
    for (int64_t at = 0; at < outputs; at++) {
        const double least = rounding(dtype) + (is_half ? 1e-6 * (double)count : 0);
        CHECK_NEAR(added, at, get(input, at, dtype) + of_rows[at], terms[at] > 0 ? least : 0, dtype);
        if (is_half)
            CHECK_NEAR(scattered, at, get(input, at, dtype) + of_elements[at], least, dtype);
    }
    free(of_rows);
    free(of_elements);
    free(terms);
    guarded_free(input, outputs, dtype);
    guarded_free(source, sources, dtype);
    guarded_free(added, outputs, dtype);
    guarded_free(scattered, outputs, dtype);
    guarded_free_i64(places, sources);
    guarded_free_bytes(narrow, sources, sizeof(int32_t));
    guarded_free_bytes(workspace, (int64_t)plan.workspace_bytes, 1);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    for (int index_bytes = 4; index_bytes <= 8; index_bytes += 4) {
        check_elements(5, 9, 1, index_bytes, 3, dtype);
        check_elements(5, 2500, 1, index_bytes, -1, dtype); /* more than are widened together */
        check_elements(7, 40, 100, index_bytes, 7, dtype);
        check_elements(30000, 50, 19, index_bytes, 2, dtype); /* columns in two pieces */
        check_elements(3, 4, 2100, index_bytes, 1, dtype);    /* more columns than are widened together */
    }
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
    const cuda_ops_scatter_plan plan = cuda_ops_scatter_plan_cpu(none, CUDA_OPS_FLOAT16);
    CHECK(plan.count == 0, "%d units of nothing", (int)plan.count);
    CHECK_OK(cuda_ops_scatter_add_halves_cpu(NULL, NULL, NULL, 8, none, &plan, 0, 0, NULL, CUDA_OPS_FLOAT16));
    CHECK_STATUS(cuda_ops_scatter_add_halves_cpu(NULL, NULL, NULL, 8, none, &plan, 0, 0, NULL, CUDA_OPS_FLOAT32),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_index_add_cpu(NULL, NULL, NULL, NULL, NULL, none, 1, 0, 0, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
