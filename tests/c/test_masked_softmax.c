#include "cuda_ops/masked_softmax.h"

#include "check.h"

static void check_range(int64_t rows, int64_t cols, cuda_ops_mask_kind kind, int broadcast, int64_t queries,
                        int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t count = rows * cols, outer = rows / 3; /* rows are [outer, 3] */
    const double scale = 0.5;
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(count, dtype);
    void *additive = guarded_numbers(count, 2, dtype);
    uint8_t *boolean = guarded_bytes(count, 1);
    for (int64_t i = 0; i < count; i++)
        boolean[i] = number((uint64_t)i) > -1.5 && i / cols != 1; /* row 1 has none */
    cuda_ops_mask mask = {.values = kind == CUDA_OPS_MASK_BOOLEAN ? (void *)boolean : additive,
                          .kind = kind,
                          .dims = 2,
                          .sizes = {outer, 3},
                          .strides = {broadcast & 1 ? 0 : 3 * cols, broadcast & 2 ? 0 : cols},
                          .col_stride = broadcast & 4 ? 0 : 1,
                          .queries = queries};
    CHECK_OK(cuda_ops_masked_softmax_forward_cpu(output, input, &mask, scale, cols, begin, end, dtype));
    for (int64_t row = 0; row < rows; row++) {
        const int64_t offset = row / 3 * mask.strides[0] + row % 3 * mask.strides[1];
        CHECK(cuda_ops_mask_offset(&mask, row) == offset, "offset of row %lld", (long long)row);
        double score[200], largest = -INFINITY, sum = 0;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = offset + c * mask.col_stride;
            score[c] = get(input, row * cols + c, dtype) * scale;
            if (kind == CUDA_OPS_MASK_ADDITIVE)
                score[c] += get(additive, at, dtype);
            if ((kind == CUDA_OPS_MASK_BOOLEAN && !boolean[at]) || (queries > 0 && c > row % queries))
                score[c] = -INFINITY;
            largest = fmax(largest, score[c]);
        }
        for (int64_t c = 0; c < cols && largest > -INFINITY; c++)
            sum += exp(score[c] - largest);
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = row * cols + c;
            if (row < begin || end <= row)
                CHECK_UNWRITTEN(output, i, dtype);
            else
                CHECK_NEAR(output, i, largest > -INFINITY ? exp(score[c] - largest) / sum : 0, rounding(dtype), dtype);
        }
    }
    /* In place. */
    CHECK_OK(cuda_ops_masked_softmax_forward_cpu(input, input, &mask, scale, cols, begin, end, dtype));
    for (int64_t i = begin * cols; i < end * cols; i++)
        CHECK(get(input, i, dtype) == get(output, i, dtype), "in place differs");
    guarded_free(input, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(additive, count, dtype);
    guarded_free_bytes(boolean, count, 1);
}

static void check_nonfinite(cuda_ops_dtype dtype)
{
    enum { COLS = 19 };
    const double bad[] = {NAN, INFINITY};
    const cuda_ops_mask mask = {.kind = CUDA_OPS_MASK_NONE, .queries = COLS};
    for (int b = 0; b < 2; b++) {
        void *x = guarded_numbers(COLS * COLS, 1, dtype);
        for (int64_t row = 0; row < COLS; row++)
            set(x, row * COLS + 11, bad[b], dtype);
        CHECK_OK(cuda_ops_masked_softmax_forward_cpu(x, x, &mask, 1, COLS, 0, COLS, dtype));
        for (int64_t i = 0; i < COLS * COLS; i++)
            CHECK((i / COLS >= 11) == (isnan(get(x, i, dtype)) != 0), "row %lld", (long long)(i / COLS));
        guarded_free(x, COLS * COLS, dtype);
    }
}

int main(void)
{
    const int64_t lengths[] = {1, 15, 16, 33, 100};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++)
            for (int kind = 0; kind < 3; kind++)
                for (int broadcast = 0; broadcast < 8; broadcast++)
                    for (int64_t queries = 0; queries < 7; queries += 6)
                        check_range(6, lengths[l], (cuda_ops_mask_kind)kind, broadcast, queries, broadcast % 2,
                                    6 - broadcast % 3, dtype);
        check_nonfinite(dtype);
    }
    const cuda_ops_mask none = {.kind = CUDA_OPS_MASK_NONE};
    CHECK_STATUS(cuda_ops_masked_softmax_forward_cpu(NULL, NULL, &none, 1, 1, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
