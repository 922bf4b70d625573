#include "cuda_ops/embedding.h"

#include "check.h"

enum { ROWS = 7, COUNT = 12 };

/* `bad`: the index at position 4; of which 3 is a good one. */
static void check_embedding(int64_t cols, int index_bytes, int64_t bad, int64_t padding, bool scale,
                            cuda_ops_dtype dtype)
{
    int64_t indices[COUNT], starts[ROWS + 2], slots[COUNT];
    int32_t narrow[COUNT];
    for (int64_t i = 0; i < COUNT; i++) {
        indices[i] = i == 4 ? bad : i * i % 5;
        narrow[i] = (int32_t)indices[i];
    }
    const void *from = index_bytes == 4 ? (const void *)narrow : (const void *)indices;
    const bool good = 0 <= bad && bad < ROWS;
    CHECK(cuda_ops_embedding_find_bad_index_cpu(from, index_bytes, COUNT, ROWS) == (good ? -1 : 4), "index %lld",
          (long long)bad);
    void *weight = guarded_numbers(ROWS * cols, 1, dtype), *output = guarded_new(COUNT * cols, dtype);
    void *grad_output = guarded_numbers(COUNT * cols, 2, dtype), *grad_weight = guarded_new(ROWS * cols, dtype);
    IN_TWO_PIECES(COUNT, begin, end,
                  cuda_ops_embedding_forward_cpu(output, weight, from, index_bytes, ROWS, cols, begin, end, dtype));
    CHECK_OK(cuda_ops_embedding_sort_cpu(starts, slots, from, index_bytes, COUNT, ROWS, padding));
    IN_TWO_PIECES(
        ROWS, begin, end,
        cuda_ops_embedding_backward_cpu(grad_weight, grad_output, starts, slots, cols, scale, begin, end, dtype));
    for (int64_t i = 0; i < COUNT; i++)
        for (int64_t c = 0; c < cols; c++) {
            if (i == 4 && !good)
                CHECK_UNWRITTEN(output, i * cols + c, dtype); /* NaN all the same */
            else
                CHECK_NEAR(output, i * cols + c, get(weight, indices[i] * cols + c, dtype), 0, dtype);
        }
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t c = 0; c < cols; c++) {
            double sum = 0;
            int named = 0;
            for (int64_t i = 0; i < COUNT; i++)
                if (indices[i] == row && row != padding) {
                    sum += get(grad_output, i * cols + c, dtype);
                    named++;
                }
            CHECK_NEAR(grad_weight, row * cols + c, scale && named > 0 ? sum / named : sum, rounding(dtype), dtype);
        }
    guarded_free(weight, ROWS * cols, dtype);
    guarded_free(output, COUNT * cols, dtype);
    guarded_free(grad_output, COUNT * cols, dtype);
    guarded_free(grad_weight, ROWS * cols, dtype);
}

static void check_positions(int64_t batch, int64_t positions, int64_t places, int64_t cols, cuda_ops_dtype dtype)
{
    const int64_t count = batch * positions;
    int64_t *tokens = guarded_new_i64(count);
    for (int64_t i = 0; i < count; i++)
        tokens[i] = i * 5 % ROWS;
    void *token_weight = guarded_numbers(ROWS * cols, 1, dtype);
    void *position_weight = guarded_numbers(places * cols, 2, dtype), *output = guarded_new(count * cols, dtype);
    void *grad_output = guarded_numbers(count * cols, 3, dtype), *grad = guarded_new(places * cols, dtype);
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_token_position_embedding_forward_cpu(output, token_weight, position_weight, tokens, 8, ROWS,
                                                                cols, positions, begin, end, dtype));
    IN_TWO_PIECES(
        places, begin, end,
        cuda_ops_position_embedding_backward_cpu(grad, grad_output, batch, positions, cols, begin, end, dtype));
    for (int64_t i = 0; i < count * cols; i++) {
        const int64_t row = i / cols, c = i % cols;
        CHECK_NEAR(output, i,
                   get(token_weight, tokens[row] * cols + c, dtype) +
                       get(position_weight, row % positions * cols + c, dtype),
                   rounding(dtype), dtype);
    }
    for (int64_t i = 0; i < places * cols; i++) {
        double sum = 0;
        for (int64_t b = 0; b < batch && i / cols < positions; b++)
            sum += get(grad_output, b * positions * cols + i, dtype);
        CHECK_NEAR(grad, i, sum, rounding(dtype), dtype);
    }
    guarded_free_i64(tokens, count);
    guarded_free(token_weight, ROWS * cols, dtype);
    guarded_free(position_weight, places * cols, dtype);
    guarded_free(output, count * cols, dtype);
    guarded_free(grad_output, count * cols, dtype);
    guarded_free(grad, places * cols, dtype);
}

int main(void)
{
    const int64_t sizes[] = {1, 16, 33, 300};
    FOR_STORED_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        check_embedding(sizes[s], 8, 3, -1, false, dtype);
        check_embedding(sizes[s], 4, 3, 1, true, dtype);
        check_embedding(sizes[s], 8, -1, 4, true, dtype);
        check_embedding(sizes[s], 4, ROWS, -1, false, dtype);
    }
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            check_positions(3, 5, 5, sizes[s], dtype);
            check_positions(1, 2, 9, sizes[s], dtype);
            check_positions(0, 2, 4, sizes[s], dtype);
        }
        CHECK_OK(cuda_ops_embedding_forward_cpu(NULL, NULL, NULL, 8, 0, 4, 0, 0, dtype));
        CHECK_OK(cuda_ops_embedding_backward_cpu(NULL, NULL, NULL, NULL, 4, 0, 0, 0, dtype));
        CHECK_OK(cuda_ops_position_embedding_backward_cpu(NULL, NULL, 0, 0, 4, 0, 0, dtype));
    }
    const int64_t zero = 0;
    CHECK_STATUS(cuda_ops_embedding_forward_cpu(NULL, NULL, &zero, 2, 1, 1, 0, 1, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_embedding_forward_cpu(NULL, NULL, &zero, 2, 1, 1, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_embedding_backward_cpu(NULL, NULL, NULL, NULL, 1, 0, 0, 1, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    const uint16_t table[] = {1, 2, 3, 4, 5, 6};
    const int32_t rows[] = {2, 0, 3};
    uint16_t copied[6] = {0};
    CHECK_OK(cuda_ops_embedding_forward_cpu(copied, table, rows, 4, 3, 2, 0, 3, CUDA_OPS_BFLOAT16));
    CHECK(copied[0] == 5 && copied[1] == 6 && copied[2] == 1 && copied[3] == 2, "rows of halves are others");
    CHECK(copied[4] == 0xffff && copied[5] == 0xffff, "a row that is not there is no NaN");
    return 0;
}
