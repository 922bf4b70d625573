#include "cuda_ops/attention_halves_cpu.h"

#include "check.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/halves_cpu.h"

enum { BATCH = 2, HEADS = 4, KEY_HEADS = 2 };

static const int64_t NO_BOUND = CUDA_OPS_ATTENTION_UNBOUNDED;

static double rounding_of(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? 0x1p-8 : 0x1p-11;
}

/* A tensor as halves, and as the float32 that they are. */
typedef struct tensor {
    uint16_t *halves;
    float *floats;
    int64_t count;
} tensor;

static tensor new_tensor(int64_t count, uint64_t seed, cuda_ops_dtype dtype)
{
    tensor t = {guarded_bytes(count, sizeof(uint16_t)), guarded_new(count, CUDA_OPS_FLOAT32), count};
    for (int64_t i = 0; i < count; i++)
        t.floats[i] = seed ? (float)number(seed * 1000003 + (uint64_t)i) : NAN;
    CHECK_OK(cuda_ops_round_cpu(t.halves, t.floats, count, dtype));
    CHECK_OK(cuda_ops_widen_cpu(t.floats, t.halves, count, dtype));
    return t;
}

/* The halves are near to the floats, relative to the largest of them; what neither has written is left out. */
static void check_and_free(tensor *t, double tolerance, cuda_ops_dtype dtype)
{
    float *const found = malloc((size_t)t->count * sizeof *found);
    CHECK_OK(cuda_ops_widen_cpu(found, t->halves, t->count, dtype));
    double largest = 1e-3;
    for (int64_t i = 0; i < t->count; i++)
        largest = fmax(largest, fabs((double)t->floats[i]));
    for (int64_t i = 0; i < t->count; i++)
        CHECK((isnan(found[i]) && isnan(t->floats[i])) ||
                  fabs((double)found[i] - (double)t->floats[i]) <= tolerance * largest,
              "element %lld is %g, expected %g", (long long)i, (double)found[i], (double)t->floats[i]);
    free(found);
    guarded_free_bytes(t->halves, t->count, sizeof(uint16_t));
    guarded_free(t->floats, t->count, CUDA_OPS_FLOAT32);
}

static void *new_workspace(int64_t bytes)
{
    void *const workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(workspace != NULL, "out of memory");
    return workspace;
}

/* Tensors [batch, length, heads, dim] whose rows have a gap behind them. */
static cuda_ops_attention_strides strides_of(int64_t length, int64_t heads, int64_t dim)
{
    return (cuda_ops_attention_strides){.batch = length * heads * (dim + 3), .head = dim + 3, .row = heads * (dim + 3)};
}

static int64_t count_of(int64_t batch, cuda_ops_attention_strides strides)
{
    return batch * strides.batch;
}

/* Against the functions for float32, which tests/c/test_attention.c checks. */
static void check_call(cuda_ops_attention call, int64_t queries, int64_t keys, cuda_ops_dtype dtype)
{
    const bool packed = call.sequences.query_starts != NULL, backward = dtype == CUDA_OPS_BFLOAT16;
    const int64_t batch = packed ? 1 : BATCH;
    call.query = call.grad_query = strides_of(queries, HEADS, call.head_dim);
    call.key = call.grad_key = strides_of(keys, KEY_HEADS, call.head_dim);
    call.value = call.grad_value = strides_of(keys, KEY_HEADS, call.value_dim);
    call.output = call.grad_output = strides_of(queries, HEADS, call.value_dim);
    tensor query = new_tensor(count_of(batch, call.query), 1, dtype),
           key = new_tensor(count_of(batch, call.key), 2, dtype);
    tensor value = new_tensor(count_of(batch, call.value), 3, dtype);
    tensor grad_output = new_tensor(count_of(batch, call.output), 4, dtype);
    tensor output = new_tensor(count_of(batch, call.output), 0, dtype);
    tensor grad_query = new_tensor(count_of(batch, call.query), 0, dtype);
    tensor grad_key = new_tensor(count_of(batch, call.key), 0, dtype);
    tensor grad_value = new_tensor(count_of(batch, call.value), 0, dtype);
    const int64_t rows = batch * HEADS * queries;
    float *const found = guarded_new(rows, CUDA_OPS_FLOAT32), *const expected = guarded_new(rows, CUDA_OPS_FLOAT32);
    float *const grad_logsumexp = guarded_numbers(rows, 5, CUDA_OPS_FLOAT32);

    void *workspace = new_workspace(cuda_ops_attention_forward_workspace_cpu(&call, CUDA_OPS_FLOAT32));
    CHECK_OK(cuda_ops_attention_forward_cpu(output.floats, expected, query.floats, key.floats, value.floats, workspace,
                                            &call, 0, cuda_ops_attention_forward_parts_cpu(&call), CUDA_OPS_FLOAT32));
    free(workspace);
    workspace = new_workspace(cuda_ops_attention_halves_forward_workspace_cpu(&call, dtype));
    int not_finite = 0;
    IN_TWO_PIECES(cuda_ops_attention_halves_forward_parts_cpu(&call), begin, end,
                  cuda_ops_attention_halves_forward_cpu(output.halves, found, query.halves, key.halves, value.halves,
                                                        workspace, &not_finite, &call, begin, end, dtype));
    CHECK(!not_finite, "all operands are finite");
    free(workspace);
    for (int64_t i = 0; i < rows; i++)
        CHECK(found[i] == expected[i] || (isnan(found[i]) && isnan(expected[i])) ||
                  fabsf(found[i] - expected[i]) <= 2e-5f * (1 + fabsf(expected[i])),
              "logsumexp %lld is %g, expected %g", (long long)i, (double)found[i], (double)expected[i]);
    if (backward) {
        CHECK_OK(cuda_ops_widen_cpu(output.floats, output.halves, output.count, dtype));
        workspace = new_workspace(cuda_ops_attention_backward_workspace_cpu(&call, CUDA_OPS_FLOAT32));
        CHECK_OK(cuda_ops_attention_backward_cpu(grad_query.floats, grad_key.floats, grad_value.floats, NULL,
                                                 grad_output.floats, grad_logsumexp, query.floats, key.floats,
                                                 value.floats, output.floats, expected, workspace, &call, 0,
                                                 cuda_ops_attention_backward_parts_cpu(&call), CUDA_OPS_FLOAT32));
        free(workspace);
        workspace = new_workspace(cuda_ops_attention_halves_backward_workspace_cpu(&call));
        IN_TWO_PIECES(cuda_ops_attention_backward_parts_cpu(&call), begin, end,
                      cuda_ops_attention_halves_backward_cpu(grad_query.halves, grad_key.halves, grad_value.halves,
                                                             grad_output.halves, grad_logsumexp, query.halves,
                                                             key.halves, value.halves, output.halves, found, workspace,
                                                             &call, begin, end, dtype));
        free(workspace);
    }
    const double tolerance = 3 * rounding_of(dtype);
    check_and_free(&query, 0, dtype);
    check_and_free(&key, 0, dtype);
    check_and_free(&value, 0, dtype);
    check_and_free(&grad_output, 0, dtype);
    check_and_free(&output, tolerance, dtype);
    check_and_free(&grad_query, tolerance, dtype);
    check_and_free(&grad_key, tolerance, dtype);
    check_and_free(&grad_value, tolerance, dtype);
    guarded_free(found, rows, CUDA_OPS_FLOAT32);
    guarded_free(expected, rows, CUDA_OPS_FLOAT32);
    guarded_free(grad_logsumexp, rows, CUDA_OPS_FLOAT32);
}

/* An operand that two bfloat16 do not add up to is told. */
static void check_not_finite(cuda_ops_attention call)
{
    enum { COUNT = 4 * 16 };
    call.batch = call.heads = call.key_heads = 1, call.queries = call.keys = 4, call.head_dim = call.value_dim = 16;
    call.query = call.key = call.value = call.output = (cuda_ops_attention_strides){.batch = COUNT, .row = 16};
    uint16_t ones[COUNT], infinity[COUNT], output[COUNT];
    float logsumexp[4];
    for (int i = 0; i < COUNT; i++)
        ones[i] = infinity[i] = 0x3c00;
    infinity[COUNT - 1] = 0x7c00;
    void *const workspace = new_workspace(cuda_ops_attention_halves_forward_workspace_cpu(&call, CUDA_OPS_FLOAT16));
    for (int which = 0; which < 4; which++) {
        int not_finite = 0;
        CHECK_OK(cuda_ops_attention_halves_forward_cpu(output, logsumexp, which == 0 ? infinity : ones,
                                                       which == 1 ? infinity : ones, which == 2 ? infinity : ones,
                                                       workspace, &not_finite, &call, 0, 1, CUDA_OPS_FLOAT16));
        CHECK(not_finite == (which < 3), "operand %d", which);
    }
    free(workspace);
}

/* What the set in use takes: AMX both halves, AVX512-BF16 bfloat16. */
static void check_set(cuda_ops_attention plain)
{
    cuda_ops_attention call;
    const int64_t lengths[][2] = {{1, 1}, {3, 70}, {65, 2}, {150, 141}, {17, 300}};
    const int64_t windows[][2] = {{NO_BOUND, NO_BOUND}, {NO_BOUND, 0}, {20, 1}, {0, NO_BOUND}};
    for (cuda_ops_dtype dtype = CUDA_OPS_FLOAT16; dtype <= CUDA_OPS_BFLOAT16; dtype++) {
        if (!cuda_ops_attention_takes_halves_cpu(&plain, 0, 0, dtype))
            continue;
        for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++)
            for (size_t w = 0; w < sizeof(windows) / sizeof(windows[0]); w++)
                for (int bottom = 0; bottom < 2; bottom++) {
                    call = plain;
                    call.queries = lengths[l][0], call.keys = lengths[l][1];
                    call.window_left = windows[w][0], call.window_right = windows[w][1];
                    call.diagonal = bottom ? call.keys - call.queries : 0;
                    check_call(call, call.queries, call.keys, dtype);
                }
        const int32_t starts[] = {0, 3, 3, 70, 71, 110}, key_starts[] = {0, 2, 7, 7, 172, 180};
        call = plain;
        call.batch = 5, call.queries = 67, call.keys = 165, call.window_right = 0;
        call.sequences = (cuda_ops_attention_sequences){
            .query_starts = starts, .key_starts = key_starts, .query_rows = 110, .key_rows = 180, .bottom_right = 1};
        check_call(call, 110, 180, dtype);
    }
    if (cuda_ops_attention_takes_halves_cpu(&plain, 0, 0, CUDA_OPS_FLOAT16))
        check_not_finite(plain);
}

int main(void)
{
    const cuda_ops_attention plain = {.batch = BATCH,
                                      .heads = HEADS,
                                      .key_heads = KEY_HEADS,
                                      .head_dim = 20,
                                      .value_dim = 37,
                                      .scale = 0.3,
                                      .window_left = NO_BOUND,
                                      .window_right = NO_BOUND};
    cuda_ops_attention call = plain;
    call.queries = call.keys = 8;
    CHECK(!cuda_ops_attention_takes_halves_cpu(&call, 0, 0, CUDA_OPS_FLOAT32), "float32 is no half");
    CHECK(!cuda_ops_attention_takes_halves_cpu(&call, 1, 1, CUDA_OPS_BFLOAT16), "a grad_mask");
    CHECK(!cuda_ops_attention_takes_halves_cpu(&call, 1, 0, CUDA_OPS_FLOAT16), "backward of float16");
    call.scale = -1;
    CHECK(!cuda_ops_attention_takes_halves_cpu(&call, 0, 0, CUDA_OPS_BFLOAT16), "a scale below 0");
    int not_finite = 0;
    CHECK_STATUS(cuda_ops_attention_halves_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, &not_finite, &call, 0, 0,
                                                       CUDA_OPS_BFLOAT16),
                 CUDA_OPS_INVALID_ARGUMENT);
    call.scale = 1;
    if (!cuda_ops_attention_takes_halves_cpu(&call, 0, 0, CUDA_OPS_BFLOAT16))
        return 0; /* a processor with neither AMX nor AVX512-BF16 */
    call.key_heads = 3;
    CHECK_STATUS(cuda_ops_attention_halves_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, &not_finite, &call, 0, 0,
                                                       CUDA_OPS_BFLOAT16),
                 CUDA_OPS_INVALID_ARGUMENT);
    for (cuda_ops_cpu_isa isa = CUDA_OPS_CPU_AVX512_BF16; isa <= cuda_ops_cpu_isa_widest(); isa++) {
        CHECK_OK(cuda_ops_cpu_isa_select(cuda_ops_cpu_isa_name(isa)));
        check_set(plain);
    }
    return 0;
}
