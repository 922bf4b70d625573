#include "cuda_ops/attention.h"

#include <float.h>

#include "check.h"

enum { BATCH = 2, HEADS = 4, KEY_HEADS = 2, HEAD_DIM = 5, VALUE_DIM = 3, MOST_KEYS = 600 };

static const int64_t NO_BOUND = CUDA_OPS_ATTENTION_UNBOUNDED;

/* Rows are longer than their elements, so that strides are not those of dense tensors. */
enum { ROW = 8 };

static cuda_ops_attention_strides strides_of(int64_t heads, int64_t rows)
{
    return (cuda_ops_attention_strides){.batch = heads * rows * ROW, .head = rows * ROW, .row = ROW};
}

static int64_t element(cuda_ops_attention_strides strides, int64_t b, int64_t h, int64_t row, int64_t d)
{
    return b * strides.batch + h * strides.head + row * strides.row + d;
}

typedef struct weights {
    double score[MOST_KEYS], weight[MOST_KEYS], logsumexp;
} weights;

/* The reference: one query's scores and weights in double. */
static void weigh(weights *w, const cuda_ops_attention *call, const void *query, const void *key, int64_t b, int64_t h,
                  int64_t i, cuda_ops_dtype dtype)
{
    const int64_t key_head = h / (call->heads / call->key_heads);
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < call->keys; j++) {
        double x = 0;
        for (int64_t d = 0; d < call->head_dim; d++)
            x += get(query, element(call->query, b, h, i, d), dtype) *
                 get(key, element(call->key, b, key_head, j, d), dtype);
        x *= call->scale;
        if (call->softcap > 0)
            x = call->softcap * tanh(x / call->softcap);
        const int64_t at = i + call->diagonal;
        if (call->alibi_slopes)
            x -= (double)call->alibi_slopes[b * call->alibi_batch + h] * fabs((double)(at - j));
        const int64_t mask = b * call->mask_batch + h * call->mask_head + i * call->mask_row + j * call->mask_column;
        if (call->mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE)
            x += get(call->mask, mask, call->mask_dtype);
        const bool seen = call->mask_kind != CUDA_OPS_ATTENTION_MASK_BOOLEAN || ((const uint8_t *)call->mask)[mask];
        const bool left = call->window_left == NO_BOUND || j >= at - call->window_left;
        const bool right = call->window_right == NO_BOUND || j <= at + call->window_right;
        CHECK((left && right) ==
                  (cuda_ops_attention_first_key(call, i) <= j && j < cuda_ops_attention_last_key(call, i)),
              "key %lld of query %lld", (long long)j, (long long)i);
        CHECK((left && right) ==
                  (cuda_ops_attention_first_query(call, j) <= i && i < cuda_ops_attention_last_query(call, j)),
              "query %lld of key %lld", (long long)i, (long long)j);
        w->score[j] = seen && left && right ? x : -INFINITY;
        largest = fmax(largest, w->score[j]);
    }
    for (int64_t j = 0; j < call->keys && largest > -INFINITY; j++)
        sum += exp(w->score[j] - largest);
    w->logsumexp = largest > -INFINITY ? largest + log(sum) : -INFINITY;
    /* Of the largest score, not of logsumexp, which may be rounded to it. */
    for (int64_t j = 0; j < call->keys; j++)
        w->weight[j] = w->score[j] > -INFINITY ? exp(w->score[j] - largest) / sum : 0;
}

typedef struct tensors {
    void *query, *key, *value, *output, *logsumexp, *grad_output, *grad_logsumexp;
    void *grad_query, *grad_key, *grad_value, *grad_mask;
} tensors;

static void check_values(const cuda_ops_attention *call, const tensors *t, cuda_ops_dtype dtype)
{
    const int64_t group = call->heads / call->key_heads, keys = call->keys;
    const int64_t key_elements = BATCH * KEY_HEADS * keys * ROW;
    double *const grad_key = calloc((size_t)key_elements, sizeof(double));
    double *const grad_value = calloc((size_t)key_elements, sizeof(double));
    weights *const w = malloc(sizeof *w);
    const double tolerance = 4 * rounding(dtype);
    /* Of p = 0 all are 1. */
    const int64_t rows = BATCH * HEADS * call->queries;
    void *const factors = guarded_new(rows * keys, dtype);
    IN_TWO_PIECES(rows, begin, end, cuda_ops_attention_dropout_factors_cpu(factors, call, begin, end, dtype));
    for (int64_t row = 0; row < rows; row++) {
        const int64_t i = row % call->queries, h = row / call->queries % HEADS, b = row / call->queries / HEADS;
        weigh(w, call, t->query, t->key, b, h, i, dtype);
        if (w->logsumexp == -INFINITY)
            CHECK(get(t->logsumexp, row, dtype) == -INFINITY, "logsumexp of a query that sees no key");
        else
            CHECK_NEAR(t->logsumexp, row, w->logsumexp, tolerance, dtype);
        double output[VALUE_DIM] = {0}, grad_query[HEAD_DIM] = {0};
        double delta = -get(t->grad_logsumexp, row, dtype);
        for (int64_t d = 0; d < call->value_dim; d++) {
            for (int64_t j = 0; j < keys; j++)
                output[d] += get(factors, row * keys + j, dtype) * w->weight[j] *
                             get(t->value, element(call->value, b, h / group, j, d), dtype);
            CHECK_NEAR(t->output, element(call->output, b, h, i, d), output[d], tolerance, dtype);
            delta += output[d] * get(t->grad_output, element(call->grad_output, b, h, i, d), dtype);
        }
        for (int64_t j = 0; j < keys; j++) {
            const double factor = get(factors, row * keys + j, dtype);
            double gradient = -delta;
            for (int64_t d = 0; d < call->value_dim; d++) {
                const double g = get(t->grad_output, element(call->grad_output, b, h, i, d), dtype);
                gradient += factor * g * get(t->value, element(call->value, b, h / group, j, d), dtype);
                grad_value[element(call->value, b, h / group, j, d)] += factor * w->weight[j] * g;
            }
            gradient *= w->weight[j];
            CHECK_NEAR(t->grad_mask, row * keys + j, gradient, tolerance, dtype);
            if (call->softcap > 0 && w->weight[j] > 0) {
                double x = 0;
                for (int64_t d = 0; d < call->head_dim; d++)
                    x += get(t->query, element(call->query, b, h, i, d), dtype) *
                         get(t->key, element(call->key, b, h / group, j, d), dtype);
                const double y = tanh(x * call->scale / call->softcap);
                gradient *= 1 - y * y;
            }
            for (int64_t d = 0; d < call->head_dim; d++) {
                grad_query[d] += call->scale * gradient * get(t->key, element(call->key, b, h / group, j, d), dtype);
                grad_key[element(call->key, b, h / group, j, d)] +=
                    call->scale * gradient * get(t->query, element(call->query, b, h, i, d), dtype);
            }
        }
        for (int64_t d = 0; d < ROW; d++) {
            const int64_t at = element(call->grad_query, b, h, i, d);
            if (d < call->head_dim)
                CHECK_NEAR(t->grad_query, at, grad_query[d], tolerance, dtype);
            else
                CHECK_UNWRITTEN(t->grad_query, at, dtype);
            if (d >= call->value_dim)
                CHECK_UNWRITTEN(t->output, element(call->output, b, h, i, d), dtype);
        }
    }
    for (int64_t at = 0; at < key_elements; at++) {
        if (at % ROW < call->head_dim)
            CHECK_NEAR(t->grad_key, at, grad_key[at], 4 * tolerance, dtype);
        else
            CHECK_UNWRITTEN(t->grad_key, at, dtype);
        if (at % ROW < call->value_dim)
            CHECK_NEAR(t->grad_value, at, grad_value[at], 4 * tolerance, dtype);
        else
            CHECK_UNWRITTEN(t->grad_value, at, dtype);
    }
    free(grad_key);
    free(grad_value);
    free(w);
    guarded_free(factors, rows * keys, dtype);
}

static void check_call(cuda_ops_attention call, cuda_ops_dtype dtype)
{
    call.batch = BATCH, call.heads = HEADS, call.key_heads = KEY_HEADS;
    call.head_dim = HEAD_DIM, call.value_dim = VALUE_DIM;
    call.query = call.output = call.grad_output = call.grad_query = strides_of(HEADS, call.queries);
    call.key = call.value = call.grad_key = call.grad_value = strides_of(KEY_HEADS, call.keys);
    const int64_t rows = BATCH * HEADS * call.queries, key_elements = BATCH * KEY_HEADS * call.keys * ROW;
    tensors t = {.query = guarded_numbers(rows * ROW, 1, dtype),
                 .key = guarded_numbers(key_elements, 2, dtype),
                 .value = guarded_numbers(key_elements, 3, dtype),
                 .output = guarded_new(rows * ROW, dtype),
                 .logsumexp = guarded_new(rows, dtype),
                 .grad_output = guarded_numbers(rows * ROW, 4, dtype),
                 .grad_logsumexp = guarded_numbers(rows, 5, dtype),
                 .grad_query = guarded_new(rows * ROW, dtype),
                 .grad_key = guarded_new(key_elements, dtype),
                 .grad_value = guarded_new(key_elements, dtype),
                 .grad_mask = guarded_new(rows * call.keys, dtype)};
    const int64_t forward_bytes = cuda_ops_attention_forward_workspace_cpu(&call, dtype);
    const int64_t backward_bytes = cuda_ops_attention_backward_workspace_cpu(&call, dtype);
    /* gemm's part is to be aligned. */
    void *const workspace = aligned_alloc(64, (size_t)(backward_bytes + forward_bytes + 63) / 64 * 64);
    CHECK(workspace != NULL, "out of memory");
    IN_TWO_PIECES(cuda_ops_attention_forward_parts_cpu(&call), begin, end,
                  cuda_ops_attention_forward_cpu(t.output, t.logsumexp, t.query, t.key, t.value, workspace, &call,
                                                 begin, end, dtype));
    IN_TWO_PIECES(cuda_ops_attention_backward_parts_cpu(&call), begin, end,
                  cuda_ops_attention_backward_cpu(t.grad_query, t.grad_key, t.grad_value, t.grad_mask, t.grad_output,
                                                  t.grad_logsumexp, t.query, t.key, t.value, t.output, t.logsumexp,
                                                  workspace, &call, begin, end, dtype));
    check_values(&call, &t, dtype);
    free(workspace);
    guarded_free(t.query, rows * ROW, dtype);
    guarded_free(t.key, key_elements, dtype);
    guarded_free(t.value, key_elements, dtype);
    guarded_free(t.output, rows * ROW, dtype);
    guarded_free(t.logsumexp, rows, dtype);
    guarded_free(t.grad_output, rows * ROW, dtype);
    guarded_free(t.grad_logsumexp, rows, dtype);
    guarded_free(t.grad_query, rows * ROW, dtype);
    guarded_free(t.grad_key, key_elements, dtype);
    guarded_free(t.grad_value, key_elements, dtype);
    guarded_free(t.grad_mask, rows * call.keys, dtype);
}

static const cuda_ops_attention PLAIN = {
    .scale = 0.4, .window_left = CUDA_OPS_ATTENTION_UNBOUNDED, .window_right = CUDA_OPS_ATTENTION_UNBOUNDED};

/* Masks whose rows of keys are in memory, and those that broadcast. */
static void check_masks(int64_t queries, int64_t keys, cuda_ops_dtype dtype)
{
    const int64_t count = BATCH * HEADS * queries * keys;
    uint8_t *const boolean = guarded_bytes(count, 1);
    for (int64_t i = 0; i < count; i++)
        boolean[i] = number((uint64_t)i) > -1 && i / keys % queries != 1; /* query 1 sees none */
    enum { OF_DTYPE, OF_FLOAT32, LOWEST, BOOLEAN, KINDS };
    for (int broadcast = 0; broadcast < 16; broadcast++)
        for (int kind = 0; kind < KINDS; kind++) {
            const cuda_ops_dtype mask_dtype = kind == OF_FLOAT32 ? CUDA_OPS_FLOAT32 : dtype;
            void *const additive = guarded_numbers(count, 9, mask_dtype);
            /* The lowest number hides a key beside others; where all have it, as query 0's do, it hides none. */
            for (int64_t i = 0; kind == LOWEST && i < count; i++)
                if (i / keys % queries == 0 || i % 3 == 0)
                    set(additive, i, dtype == CUDA_OPS_FLOAT32 ? -FLT_MAX : -DBL_MAX, mask_dtype);
            cuda_ops_attention call = PLAIN;
            call.queries = queries, call.keys = keys;
            call.mask_kind = kind == BOOLEAN ? CUDA_OPS_ATTENTION_MASK_BOOLEAN : CUDA_OPS_ATTENTION_MASK_ADDITIVE;
            call.mask_dtype = mask_dtype;
            call.mask = kind == BOOLEAN ? (void *)boolean : additive;
            call.mask_batch = broadcast & 1 ? 0 : HEADS * queries * keys;
            call.mask_head = broadcast & 2 ? 0 : queries * keys;
            call.mask_row = broadcast & 4 ? 0 : keys;
            call.mask_column = broadcast & 8 ? 0 : 1;
            check_call(call, dtype);
            if (kind == LOWEST) {
                call.dropout = 0.4, call.philox.seed = 17, call.philox.offset = 8;
                check_call(call, dtype);
            }
            guarded_free(additive, count, mask_dtype);
        }
    guarded_free_bytes(boolean, count, 1);
}

/* Rows of packed tensors: [rows, heads, dim], dense. */
static cuda_ops_attention_strides packed_strides(int64_t heads, int64_t elements)
{
    return (cuda_ops_attention_strides){.batch = 0, .head = elements, .row = heads * elements};
}

static void *at_row(void *tensor, int64_t row, cuda_ops_attention_strides strides, cuda_ops_dtype dtype)
{
    return (char *)tensor + row * strides.row * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

static void run_forward(const cuda_ops_attention *call, void *output, void *logsumexp, const void *query,
                        const void *key, const void *value, cuda_ops_dtype dtype)
{
    const int64_t bytes = cuda_ops_attention_forward_workspace_cpu(call, dtype);
    void *const workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(workspace != NULL, "out of memory");
    IN_TWO_PIECES(
        cuda_ops_attention_forward_parts_cpu(call), begin, end,
        cuda_ops_attention_forward_cpu(output, logsumexp, query, key, value, workspace, call, begin, end, dtype));
    free(workspace);
}

static void run_backward(const cuda_ops_attention *call, const tensors *t, cuda_ops_dtype dtype)
{
    const int64_t bytes = cuda_ops_attention_backward_workspace_cpu(call, dtype);
    void *const workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(workspace != NULL, "out of memory");
    IN_TWO_PIECES(cuda_ops_attention_backward_parts_cpu(call), begin, end,
                  cuda_ops_attention_backward_cpu(t->grad_query, t->grad_key, t->grad_value, NULL, t->grad_output, NULL,
                                                  t->query, t->key, t->value, t->output, t->logsumexp, workspace, call,
                                                  begin, end, dtype));
    free(workspace);
}

/* Packed sequences against a call for each of them, which is checked above. The last rows are no sequence's.
 * with_queries: else the sequences have keys alone. */
static void check_packed(cuda_ops_attention call, int bottom_right, int with_queries, cuda_ops_dtype dtype)
{
    enum { SEQUENCES = 5, MORE = 2 };
    int32_t starts[SEQUENCES + 1] = {0, 3, 3, 70, 71, 76}, key_starts[SEQUENCES + 1] = {0, 2, 7, 7, 72, 80};
    for (int b = 0; b <= SEQUENCES && !with_queries; b++)
        starts[b] = 0;
    const int64_t rows = starts[SEQUENCES] + MORE, key_rows = key_starts[SEQUENCES] + MORE;
    call.batch = SEQUENCES, call.heads = HEADS, call.key_heads = KEY_HEADS;
    call.head_dim = HEAD_DIM, call.value_dim = VALUE_DIM;
    call.queries = 67, call.keys = 65;
    call.query = call.grad_query = packed_strides(HEADS, HEAD_DIM);
    call.output = call.grad_output = packed_strides(HEADS, VALUE_DIM);
    call.key = call.grad_key = packed_strides(KEY_HEADS, HEAD_DIM);
    call.value = call.grad_value = packed_strides(KEY_HEADS, VALUE_DIM);
    const int64_t queries = rows * HEADS * HEAD_DIM, outputs = rows * HEADS * VALUE_DIM;
    const int64_t keys = key_rows * KEY_HEADS * HEAD_DIM, values = key_rows * KEY_HEADS * VALUE_DIM;
    tensors t = {.query = guarded_numbers(queries, 1, dtype),
                 .key = guarded_numbers(keys, 2, dtype),
                 .value = guarded_numbers(values, 3, dtype),
                 .output = guarded_new(outputs, dtype),
                 .logsumexp = guarded_new(rows * HEADS, dtype),
                 .grad_output = guarded_numbers(outputs, 4, dtype),
                 .grad_query = guarded_new(queries, dtype),
                 .grad_key = guarded_new(keys, dtype),
                 .grad_value = guarded_new(values, dtype)};
    cuda_ops_attention packed = call; /* whose strides of the batch are not looked at */
    packed.query.batch = packed.key.batch = packed.value.batch = packed.output.batch = INT64_MAX / 4;
    packed.grad_output.batch = packed.grad_query.batch = packed.grad_key.batch = packed.grad_value.batch = -1;
    packed.sequences = (cuda_ops_attention_sequences){.query_starts = starts,
                                                      .key_starts = key_starts,
                                                      .query_rows = rows,
                                                      .key_rows = key_rows,
                                                      .bottom_right = bottom_right};
    run_forward(&packed, t.output, t.logsumexp, t.query, t.key, t.value, dtype);
    run_backward(&packed, &t, dtype);
    for (int b = 0; b < SEQUENCES; b++) {
        cuda_ops_attention one = call;
        one.batch = 1, one.queries = starts[b + 1] - starts[b], one.keys = key_starts[b + 1] - key_starts[b];
        one.diagonal = bottom_right ? one.keys - one.queries : 0;
        const int64_t q = one.queries * HEADS, k = one.keys * KEY_HEADS;
        tensors s = {.query = at_row(t.query, starts[b], call.query, dtype),
                     .key = at_row(t.key, key_starts[b], call.key, dtype),
                     .value = at_row(t.value, key_starts[b], call.value, dtype),
                     .output = guarded_new(q * VALUE_DIM, dtype),
                     .logsumexp = guarded_new(q, dtype),
                     .grad_output = at_row(t.grad_output, starts[b], call.output, dtype),
                     .grad_query = guarded_new(q * HEAD_DIM, dtype),
                     .grad_key = guarded_new(k * HEAD_DIM, dtype),
                     .grad_value = guarded_new(k * VALUE_DIM, dtype)};
        run_forward(&one, s.output, s.logsumexp, s.query, s.key, s.value, dtype);
        run_backward(&one, &s, dtype);
        for (int64_t i = 0; i < q * VALUE_DIM; i++)
            CHECK_NEAR(t.output, starts[b] * HEADS * VALUE_DIM + i, get(s.output, i, dtype), rounding(dtype), dtype);
        for (int64_t i = 0; i < q * HEAD_DIM; i++)
            CHECK_NEAR(t.grad_query, starts[b] * HEADS * HEAD_DIM + i, get(s.grad_query, i, dtype), rounding(dtype),
                       dtype);
        for (int64_t i = 0; i < k * HEAD_DIM; i++)
            CHECK_NEAR(t.grad_key, key_starts[b] * KEY_HEADS * HEAD_DIM + i, get(s.grad_key, i, dtype), rounding(dtype),
                       dtype);
        for (int64_t i = 0; i < k * VALUE_DIM; i++)
            CHECK_NEAR(t.grad_value, key_starts[b] * KEY_HEADS * VALUE_DIM + i, get(s.grad_value, i, dtype),
                       rounding(dtype), dtype);
        for (int64_t i = 0; i < q; i++) {
            const double expected = get(s.logsumexp, i, dtype);
            const int64_t at = i / one.queries * rows + starts[b] + i % one.queries;
            if (expected == -INFINITY)
                CHECK(get(t.logsumexp, at, dtype) == -INFINITY, "logsumexp of a query that sees no key");
            else
                CHECK_NEAR(t.logsumexp, at, expected, rounding(dtype), dtype);
        }
        guarded_free(s.output, q * VALUE_DIM, dtype);
        guarded_free(s.logsumexp, q, dtype);
        guarded_free(s.grad_query, q * HEAD_DIM, dtype);
        guarded_free(s.grad_key, k * HEAD_DIM, dtype);
        guarded_free(s.grad_value, k * VALUE_DIM, dtype);
    }
    for (int64_t i = starts[SEQUENCES] * HEADS * VALUE_DIM; i < outputs; i++)
        CHECK_UNWRITTEN(t.output, i, dtype);
    guarded_free(t.query, queries, dtype);
    guarded_free(t.key, keys, dtype);
    guarded_free(t.value, values, dtype);
    guarded_free(t.output, outputs, dtype);
    guarded_free(t.logsumexp, rows * HEADS, dtype);
    guarded_free(t.grad_output, outputs, dtype);
    guarded_free(t.grad_query, queries, dtype);
    guarded_free(t.grad_key, keys, dtype);
    guarded_free(t.grad_value, values, dtype);
}

/* A cache in pages against the same keys below each other; and keys that are appended to both. */
static void check_cache(int64_t page_size, cuda_ops_dtype dtype)
{
    enum { CAPACITY = 64, NEW = 3, QUERIES = 4 };
    const int32_t lengths[BATCH] = {61, 5};
    const int64_t columns = CAPACITY / page_size, pages = BATCH * columns;
    int32_t *const table = malloc((size_t)pages * sizeof *table);
    for (int64_t i = 0; i < pages; i++)
        table[i] = (int32_t)(pages - 1 - i);
    const cuda_ops_attention_strides strides = {
        .batch = CAPACITY * KEY_HEADS * ROW, .head = ROW, .row = KEY_HEADS * ROW};
    cuda_ops_attention call = {.batch = BATCH,
                               .heads = HEADS,
                               .key_heads = KEY_HEADS,
                               .queries = QUERIES,
                               .keys = CAPACITY,
                               .head_dim = HEAD_DIM,
                               .value_dim = VALUE_DIM,
                               .key = strides,
                               .value = strides,
                               .scale = 0.4,
                               .window_left = NO_BOUND,
                               .window_right = 0};
    call.query = call.output = strides_of(HEADS, QUERIES);
    call.sequences = (cuda_ops_attention_sequences){.key_lengths = lengths, .new_keys = NEW, .bottom_right = 1};
    cuda_ops_attention paged = call;
    paged.key.batch = paged.value.batch = page_size * KEY_HEADS * ROW;
    paged.sequences.block_table = table, paged.sequences.table_row = columns;
    paged.sequences.pages = pages, paged.sequences.page_size = page_size;
    const int64_t count = BATCH * CAPACITY * KEY_HEADS * ROW, queries = BATCH * HEADS * QUERIES * ROW;
    const int64_t fresh = BATCH * NEW * KEY_HEADS * ROW;
    void *key = guarded_numbers(count, 1, dtype), *value = guarded_numbers(count, 2, dtype);
    void *key_pages = guarded_new(count, dtype), *value_pages = guarded_new(count, dtype);
    const size_t size = dtype == CUDA_OPS_FLOAT64 ? 8 : 4, page = (size_t)(page_size * KEY_HEADS * ROW) * size;
    for (int64_t i = 0; i < pages; i++) {
        memcpy((char *)key_pages + (size_t)table[i] * page, (char *)key + (size_t)i * page, page);
        memcpy((char *)value_pages + (size_t)table[i] * page, (char *)value + (size_t)i * page, page);
    }
    void *const query = guarded_numbers(queries, 3, dtype);
    void *const new_key = guarded_numbers(fresh, 4, dtype), *const new_value = guarded_numbers(fresh, 5, dtype);
    const cuda_ops_attention_strides new_strides = {
        .batch = NEW * KEY_HEADS * ROW, .head = ROW, .row = KEY_HEADS * ROW};
    CHECK_OK(cuda_ops_attention_append_cpu(key, value, new_key, new_value, new_strides, new_strides, &call, 0, BATCH,
                                           dtype));
    CHECK_OK(cuda_ops_attention_append_cpu(key_pages, value_pages, new_key, new_value, new_strides, new_strides, &paged,
                                           0, BATCH, dtype));
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t row = 0; row < NEW; row++)
            for (int64_t d = 0; d < HEAD_DIM; d++)
                CHECK_NEAR(key, element(strides, b, 1, lengths[b] + row, d),
                           get(new_key, element(new_strides, b, 1, row, d), dtype), 0, dtype);
    void *const output = guarded_new(queries, dtype), *const output_pages = guarded_new(queries, dtype);
    void *const logsumexp = guarded_new(BATCH * HEADS * QUERIES, dtype);
    run_forward(&call, output, logsumexp, query, key, value, dtype);
    run_forward(&paged, output_pages, logsumexp, query, key_pages, value_pages, dtype);
    /* The reference: each sequence by itself. */
    weights *const w = malloc(sizeof *w);
    for (int64_t b = 0; b < BATCH; b++) {
        cuda_ops_attention one = call;
        one.sequences = (cuda_ops_attention_sequences){0};
        one.keys = lengths[b] + NEW, one.diagonal = one.keys - QUERIES;
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t i = 0; i < QUERIES; i++) {
                weigh(w, &one, query, key, b, h, i, dtype);
                for (int64_t d = 0; d < VALUE_DIM; d++) {
                    double expected = 0;
                    for (int64_t j = 0; j < one.keys; j++)
                        expected += w->weight[j] * get(value, element(strides, b, h / 2, j, d), dtype);
                    CHECK_NEAR(output, element(call.output, b, h, i, d), expected, 4 * rounding(dtype), dtype);
                    CHECK_NEAR(output_pages, element(call.output, b, h, i, d), expected, 4 * rounding(dtype), dtype);
                }
            }
    }
    free(w);
    guarded_free(key, count, dtype);
    guarded_free(value, count, dtype);
    guarded_free(key_pages, count, dtype);
    guarded_free(value_pages, count, dtype);
    guarded_free(query, queries, dtype);
    guarded_free(new_key, fresh, dtype);
    guarded_free(new_value, fresh, dtype);
    guarded_free(output, queries, dtype);
    guarded_free(output_pages, queries, dtype);
    guarded_free(logsumexp, BATCH * HEADS * QUERIES, dtype);
    free(table);
}

int main(void)
{
    /* Without queries, keys have gradients of 0. */
    const int64_t lengths[][2] = {{1, 1}, {3, 70}, {65, 2}, {70, 66}, {5, 530}, {0, 7}, {3, 0}};
    const int64_t windows[][2] = {{NO_BOUND, NO_BOUND}, {NO_BOUND, 0}, {2, 1}, {0, NO_BOUND}, {600, 600}};
    const float slopes[BATCH * HEADS] = {0.5f, 0.25f, 1.0f, 0.0f, 0.125f, 2.0f, 0.75f, 0.3f};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
            cuda_ops_attention call = PLAIN;
            call.queries = lengths[l][0], call.keys = lengths[l][1];
            for (size_t w = 0; w < sizeof(windows) / sizeof(windows[0]); w++)
                for (int bottom = 0; bottom < 2; bottom++) {
                    call.window_left = windows[w][0], call.window_right = windows[w][1];
                    call.diagonal = bottom ? call.keys - call.queries : 0;
                    check_call(call, dtype);
                }
            call.softcap = 1.5;
            check_call(call, dtype);
            call.alibi_slopes = slopes;
            check_call(call, dtype);
            call.alibi_batch = HEADS;
            call.softcap = 0;
            check_call(call, dtype);
            call.dropout = 0.4, call.philox.seed = 17, call.philox.offset = 8;
            check_call(call, dtype);
        }
        check_masks(3, 21, dtype);
        for (int bottom = 0; bottom < 2; bottom++) {
            cuda_ops_attention packed = PLAIN;
            check_packed(packed, bottom, 1, dtype);
            check_packed(packed, bottom, 0, dtype);
            packed.window_left = 20, packed.window_right = 3;
            packed.softcap = 1.5, packed.alibi_slopes = slopes;
            check_packed(packed, bottom, 1, dtype);
        }
        for (int64_t page_size = 1; page_size <= 64; page_size *= 8)
            check_cache(page_size, dtype);
    }
    cuda_ops_attention call = PLAIN;
    CHECK_STATUS(cuda_ops_attention_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, &call, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    call.heads = 3, call.key_heads = 2;
    CHECK_STATUS(cuda_ops_attention_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, &call, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_attention_dropout_factors_cpu(NULL, &call, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    call.dropout = 1.5;
    CHECK_STATUS(cuda_ops_attention_dropout_factors_cpu(NULL, &call, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    call.dropout = 0;
    call.key_heads = 1, call.window_right = INT64_MAX;
    CHECK_STATUS(cuda_ops_attention_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, &call, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    call.window_right = 0, call.window_left = -1;
    CHECK_STATUS(cuda_ops_attention_backward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                                                 &call, 0, 0, CUDA_OPS_FLOAT64),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
