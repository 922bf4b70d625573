#include "cuda_ops/rotary_embedding.h"

#include "check.h"

/* Rows [begin, end) of batch * length; the others must not be touched. `heads_within_rows`: how both tensors lie. */
static void check_range(int64_t batch, int64_t heads, int64_t length, int64_t features, int heads_within_rows,
                        int tables, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t count = batch * heads * length * features, half = features / 2;
    const int64_t table_count = tables * length * features;
    cuda_ops_rotary_embedding_call call = {batch, heads, length, features, {0}, {0}, tables > 1 ? length * features : 0,
                                           0,     dtype, dtype,  dtype};
    call.input_strides[0] = call.output_strides[0] = heads * length * features;
    call.input_strides[1] = call.output_strides[1] = heads_within_rows ? features : length * features;
    call.input_strides[2] = call.output_strides[2] = heads_within_rows ? heads * features : features;
    void *input = guarded_numbers(count, 1, dtype);
    void *cosine = guarded_numbers(table_count, 2, dtype), *sine = guarded_numbers(table_count, 3, dtype);
    void *output = guarded_new(count, dtype), *back = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_rotary_embedding_cpu(output, input, cosine, sine, &call, begin, end));
    call.transposed = 1;
    CHECK_OK(cuda_ops_rotary_embedding_cpu(back, input, cosine, sine, &call, begin, end));
    for (int64_t n = 0; n < batch; n++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t position = 0; position < length; position++)
                for (int64_t e = 0; e < features; e++) {
                    const int64_t row = n * length + position, table = n * call.table_stride + position * features;
                    const int64_t start =
                        n * call.input_strides[0] + head * call.input_strides[1] + position * call.input_strides[2];
                    const int64_t i = start + e, other = e < half ? e + half : e - half;
                    if (begin > row || row >= end) {
                        CHECK_UNWRITTEN(output, i, dtype);
                        CHECK_UNWRITTEN(back, i, dtype);
                        continue;
                    }
                    const double own = get(input, i, dtype) * get(cosine, table + e, dtype);
                    const double paired = get(input, start + other, dtype), sign = e < half ? -1 : 1;
                    CHECK_NEAR(output, i, own + sign * paired * get(sine, table + e, dtype), 4 * rounding(dtype),
                               dtype);
                    CHECK_NEAR(back, i, own - sign * paired * get(sine, table + other, dtype), 4 * rounding(dtype),
                               dtype);
                }
    guarded_free(input, count, dtype);
    guarded_free(cosine, table_count, dtype);
    guarded_free(sine, table_count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(back, count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        check_range(1, 1, 1, 2, 0, 1, 0, 1, dtype);
        check_range(2, 3, 5, 16, 0, 1, 0, 10, dtype);
        check_range(2, 3, 5, 16, 1, 2, 0, 10, dtype);
        check_range(2, 3, 5, 6, 1, 2, 3, 8, dtype);
        check_range(3, 2, 4, 66, 0, 3, 5, 5, dtype);
        cuda_ops_rotary_embedding_call call = {1, 1, 1, 2, {2, 2, 2}, {2, 2, 2}, 0, 0, dtype, CUDA_OPS_FLOAT16, dtype};
        CHECK_STATUS(cuda_ops_rotary_embedding_cpu(NULL, NULL, NULL, NULL, &call, 0, 1), CUDA_OPS_UNSUPPORTED_DTYPE);
        call.table_dtype = dtype;
        CHECK_OK(cuda_ops_rotary_embedding_cpu(NULL, NULL, NULL, NULL, &call, 0, 0));
    }
    return 0;
}
