/* attention on the CPU: for each block of queries, blocks of keys one after the other. The products are gemm's, between
 * them a block of scores stays in the second-level cache. Bound by the products, at small head dimensions by exp.
 *
 * Forward (online softmax): with m the largest score of a row so far, l = sum of exp(score - m) and
 * O = sum of exp(score - m) * value; where a block has a larger one, l and O are multiplied by exp(m - new m).
 * Backward: the exponentials are computed again from logsumexp, and what of it a REAL does not hold (attention.h). */
#ifndef REAL

#include "cuda_ops/attention.h"

#include "attention/lanes.h"
#include "attention/sequences.h"
#include "common/common.h"
#include "common/exponential.h"
#include "gemm/single_thread.h"
#include "gemm/tiles.h"

/* Rows and columns of a block of scores: 64 is as many as gemm takes without packing the keys, and 64 x 512 floats are
 * a part of the second-level cache. */
enum { QUERY_BLOCK = LANES_QUERIES, KEY_BLOCK = 512, MOST_QUERIES = 128 };
/* Between rows of scores, which would else lie at powers of two. */
enum { ROW_GAP = 16 };

/* What a part works on. */
struct attention_block {
    const cuda_ops_attention *call; /* of the sequence alone */
    int64_t batch, head;            /* of query */
    int64_t pitch;                  /* between rows of scores */
    int64_t first_row;              /* of logsumexp */
};

static int64_t products_workspace(void)
{
    return max_i64(GEMM_WORKSPACE_BYTES, cuda_ops_tiles_workspace());
}

/* Large enough, and not more than KEY_BLOCK. */
static int64_t key_block(const cuda_ops_attention *call)
{
    return min_i64(KEY_BLOCK, (call->keys + ROW_GAP - 1) / ROW_GAP * ROW_GAP);
}

/* Products by tiles pack the keys for each block of queries. */
static int64_t query_block(const cuda_ops_attention *call)
{
    return call->products != CUDA_OPS_FLOAT32 && cuda_ops_has_tiles(call->products) ? MOST_QUERIES : QUERY_BLOCK;
}

static int64_t query_blocks(const cuda_ops_attention *call)
{
    return (call->queries + query_block(call) - 1) / query_block(call);
}

/* Elements of a block of scores. */
static int64_t block_elements(const cuda_ops_attention *call)
{
    return query_block(call) * (key_block(call) + ROW_GAP);
}

/* The row of logsumexp. */
static int64_t row_of(const struct attention_block *block, int64_t i)
{
    return block->first_row + i;
}

/* Where key j of a sequence is, in rows of the batch's stride: the sequence itself, or a page of a cache. */
static int64_t page_of_key(const cuda_ops_attention *call, int64_t batch, int64_t j)
{
    const cuda_ops_attention_sequences *const q = &call->sequences;
    if (!q->block_table)
        return batch;
    return cuda_ops_attention_clamp(q->block_table[batch * q->table_row + j / q->page_size], 0, q->pages - 1);
}

/* Of `count` keys from j on, those that lie below each other in memory. */
static int64_t keys_of_page(const cuda_ops_attention *call, int64_t j, int64_t count)
{
    return call->sequences.block_table ? min_i64(count, call->sequences.page_size - j % call->sequences.page_size)
                                       : count;
}
static int64_t row_of_page(const cuda_ops_attention *call, int64_t j)
{
    return call->sequences.block_table ? j % call->sequences.page_size : j;
}

/* Keys whose numbers are drawn together, in blocks side by side, so that the compiler vectorises Philox's rounds. */
enum { DROPOUT_KEYS = 128, DROPOUT_BLOCKS = DROPOUT_KEYS / 4 };

/* Dropout's numbers of query i and keys [first, first + DROPOUT_KEYS), first a multiple of that. A block has those of
 * keys k, k + 1, k + 8 and k + 9, k even. */
CUDA_OPS_INLINE void dropout_numbers(uint16_t numbers[DROPOUT_KEYS], const cuda_ops_attention *call, int64_t head_index,
                                     int64_t i, int64_t first)
{
    const uint64_t row = cuda_ops_attention_dropout_row(head_index, call->queries, i), offset = call->philox.offset / 4;
    const bool lower = i % 16 < 8;
    uint32_t near[DROPOUT_BLOCKS], far[DROPOUT_BLOCKS];
    for (int n = 0; n < DROPOUT_BLOCKS; n++) {
        uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32) + (uint32_t)(row >> 32);
        uint32_t c2 = (uint32_t)row + (uint32_t)(n % 4), c3 = (uint32_t)(first / 16) + (uint32_t)(n / 4);
        uint32_t key0 = (uint32_t)call->philox.seed, key1 = (uint32_t)(call->philox.seed >> 32);
        /* Only a body without a loop is vectorised over n. */
#pragma GCC unroll 7
        for (int round = 0; round < CUDA_OPS_ATTENTION_DROPOUT_ROUNDS; round++) {
            cuda_ops_philox_round(&c0, &c1, &c2, &c3, key0, key1);
            key0 += CUDA_OPS_PHILOX_WEYL_0;
            key1 += CUDA_OPS_PHILOX_WEYL_1;
        }
        near[n] = lower ? c0 : c1;
        far[n] = lower ? c2 : c3;
    }
    for (int n = 0; n < DROPOUT_BLOCKS; n++) {
        uint16_t *const of_block = numbers + n / 4 * 16 + n % 4 * 2;
        of_block[0] = (uint16_t)near[n];
        of_block[1] = (uint16_t)(near[n] >> 16);
        of_block[8] = (uint16_t)far[n];
        of_block[9] = (uint16_t)(far[n] >> 16);
    }
}

#define REAL float
#define FN(name) name##_f32
#define EXPM1_OF_NEGATIVE expm1_of_negative_f32
#define MASK_DTYPE CUDA_OPS_FLOAT32
#include "attention.c"

#include "common/undef_real.h"
#undef EXPM1_OF_NEGATIVE
#undef MASK_DTYPE
#define REAL double
#define FN(name) name##_f64
#define EXPM1_OF_NEGATIVE expm1_of_negative_f64
#define MASK_DTYPE CUDA_OPS_FLOAT64
#include "attention.c"

#include "common/undef_real.h"

static cuda_ops_status check_call(const cuda_ops_attention *call, bool backward, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    const bool mask = call->mask_kind != CUDA_OPS_ATTENTION_MASK_ADDITIVE || call->mask_dtype == dtype ||
                      call->mask_dtype == CUDA_OPS_FLOAT32;
    return mask && attention_is_sound(call, backward) ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
}

int64_t cuda_ops_attention_forward_parts_cpu(const cuda_ops_attention *call)
{
    return call->batch * call->heads * query_blocks(call);
}

int64_t cuda_ops_attention_forward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype)
{
    const int64_t bytes = products_workspace() + block_elements(call) * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
    return max_i64(bytes, cuda_ops_attention_lanes_workspace(call, false));
}

cuda_ops_status cuda_ops_attention_forward_cpu(void *output, void *logsumexp, const void *query, const void *key,
                                               const void *value, void *workspace, const cuda_ops_attention *call,
                                               int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_call(call, false, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT32 && cuda_ops_attention_lanes_takes(call, call->keys, false, false))
        cuda_ops_attention_lanes_forward(output, logsumexp, query, key, value, workspace, call, begin, end);
    else if (dtype == CUDA_OPS_FLOAT32)
        attention_forward_f32(output, logsumexp, query, key, value, workspace, call, begin, end);
    else
        attention_forward_f64(output, logsumexp, query, key, value, workspace, call, begin, end);
    return CUDA_OPS_SUCCESS;
}

int64_t cuda_ops_attention_backward_parts_cpu(const cuda_ops_attention *call)
{
    return call->batch * call->key_heads;
}

/* The exponentials, the gradients of the scores, and with a softcap its derivatives. */
int64_t cuda_ops_attention_backward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype)
{
    const int64_t bytes =
        products_workspace() + (call->softcap > 0 ? 3 : 2) * block_elements(call) * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
    return max_i64(bytes, cuda_ops_attention_lanes_workspace(call, true));
}

cuda_ops_status cuda_ops_attention_backward_cpu(void *grad_query, void *grad_key, void *grad_value, void *grad_mask,
                                                const void *grad_output, const void *grad_logsumexp, const void *query,
                                                const void *key, const void *value, const void *output,
                                                const void *logsumexp, void *workspace, const cuda_ops_attention *call,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_status status = check_call(call, true, dtype);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (dtype == CUDA_OPS_FLOAT64) {
        attention_backward_f64(grad_query, grad_key, grad_value, grad_mask, grad_output, grad_logsumexp, query, key,
                               value, output, logsumexp, workspace, call, begin, end);
        return CUDA_OPS_SUCCESS;
    }
    /* By each sequence's keys, so that its bits do not depend on those beside it. */
    for (int64_t part = begin; part < end; part++) {
        const int64_t keys = cuda_ops_attention_sequence_of(call, part / call->key_heads).keys;
        if (cuda_ops_attention_lanes_takes(call, keys, true, grad_mask != NULL))
            cuda_ops_attention_lanes_backward(grad_query, grad_key, grad_value, grad_output, grad_logsumexp, query, key,
                                              value, logsumexp, workspace, call, part, part + 1);
        else
            attention_backward_f32(grad_query, grad_key, grad_value, grad_mask, grad_output, grad_logsumexp, query, key,
                                   value, output, logsumexp, workspace, call, part, part + 1);
    }
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_attention_dropout_factors_cpu(void *factors, const cuda_ops_attention *call, int64_t begin,
                                                       int64_t end, cuda_ops_dtype dtype)
{
    const bool sound = call->batch >= 0 && call->heads >= 0 && call->queries >= 0 && call->keys >= 0 &&
                       call->dropout >= 0 && call->dropout <= 1;
    if (!sound)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        dropout_factors_f32(factors, call, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        dropout_factors_f64(factors, call, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"
#include "common/row_exponentials.h"

/* scores[c] += what an additive mask has for it. */
CUDA_OPS_INLINE void FN(add_mask)(REAL *scores, const cuda_ops_attention *call, int64_t offset, int64_t count)
{
    const int64_t step = call->mask_column;
    if (call->mask_dtype == MASK_DTYPE) {
        const REAL *const mask = (const REAL *)call->mask + offset;
        if (step == 1)
            for (int64_t c = 0; c < count; c++)
                scores[c] += mask[c];
        else
            for (int64_t c = 0; c < count; c++)
                scores[c] += mask[c * step];
    } else {
        const float *const mask = (const float *)call->mask + offset;
        for (int64_t c = 0; c < count; c++)
            scores[c] += (REAL)mask[c * step];
    }
}

/* Products of query i and keys [first, first + count) become scores, in place. cap: where the derivatives of the cap
 * go, NULL if they are not wanted. */
CUDA_OPS_INLINE void FN(row_scores)(const struct attention_block *block, REAL *scores, REAL *cap, int64_t i,
                                    int64_t first, int64_t count)
{
    const cuda_ops_attention *const call = block->call;
    const REAL scale = (REAL)call->scale;
    if (call->softcap > 0) {
        /* tanh(x) = sign(x) * -e / (2 + e), e = exp(-2 |x|) - 1, keeps the digits of a small x. */
        const REAL softcap = (REAL)call->softcap, factor = (REAL)(call->scale / call->softcap);
        for (int64_t c = 0; c < count; c++) {
            const REAL x = scores[c] * factor, size = x < 0 ? -x : x;
            const REAL e = EXPM1_OF_NEGATIVE(-2 * size);
            const REAL tanh_of_size = -e / (2 + e), tanh_of_x = x < 0 ? -tanh_of_size : tanh_of_size;
            scores[c] = x != x ? x : softcap * tanh_of_x;
            if (cap)
                cap[c] = 1 - tanh_of_x * tanh_of_x;
        }
    } else {
        for (int64_t c = 0; c < count; c++)
            scores[c] *= scale;
    }
    if (call->alibi_slopes) {
        const REAL slope = (REAL)call->alibi_slopes[block->batch * call->alibi_batch + block->head];
        const int64_t diagonal = i + call->diagonal;
        for (int64_t c = 0; c < count; c++) {
            const REAL distance = (REAL)(diagonal - (first + c));
            scores[c] -= slope * (distance < 0 ? -distance : distance);
        }
    }
    const int64_t offset = block->batch * call->mask_batch + block->head * call->mask_head + i * call->mask_row +
                           first * call->mask_column;
    if (call->mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE) {
        FN(add_mask)(scores, call, offset, count);
    } else if (call->mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN) {
        const uint8_t *const seen = (const uint8_t *)call->mask + offset;
        for (int64_t c = 0; c < count; c++)
            scores[c] = seen[c * call->mask_column] ? scores[c] : -(REAL)INFINITY;
    }
}

CUDA_OPS_SIMD static void FN(dropout_factors)(REAL *factors, const cuda_ops_attention *call, int64_t begin, int64_t end)
{
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(call->dropout);
    const REAL kept = (REAL)cuda_ops_attention_dropout_scale(call->dropout);
    for (int64_t row = begin; row < end; row++)
        for (int64_t start = 0; start < call->keys; start += DROPOUT_KEYS) {
            uint16_t numbers[DROPOUT_KEYS];
            dropout_numbers(numbers, call, row / call->queries, row % call->queries, start);
            for (int64_t j = start; j < min_i64(start + DROPOUT_KEYS, call->keys); j++)
                factors[row * call->keys + j] = numbers[j - start] >= dropped ? kept : 0;
        }
}

/* weights[c] *= 0 or 1 / (1 - p), and likewise other[c] unless that is NULL. */
CUDA_OPS_INLINE void FN(row_dropout)(const struct attention_block *block, REAL *weights, REAL *other, int64_t i,
                                     int64_t first, int64_t count)
{
    const cuda_ops_attention *const call = block->call;
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(call->dropout);
    const REAL kept = (REAL)cuda_ops_attention_dropout_scale(call->dropout);
    const int64_t head_index = row_of(block, 0) / call->queries;
    for (int64_t start = first / DROPOUT_KEYS * DROPOUT_KEYS; start < first + count; start += DROPOUT_KEYS) {
        uint16_t numbers[DROPOUT_KEYS];
        dropout_numbers(numbers, call, head_index, i, start);
        for (int64_t j = max_i64(start, first); j < min_i64(start + DROPOUT_KEYS, first + count); j++) {
            const REAL factor = numbers[j - start] >= dropped ? kept : 0;
            weights[j - first] *= factor;
            if (other)
                other[j - first] *= factor;
        }
    }
}

CUDA_OPS_INLINE void FN(fill)(REAL *row, int64_t begin, int64_t end, REAL value)
{
    for (int64_t c = begin; c < end; c++)
        row[c] = value;
}

/* Of query i, those of keys [first, last) that windows let it see: columns [*from, *to) of the block. */
CUDA_OPS_INLINE void FN(columns_seen)(const cuda_ops_attention *call, int64_t i, int64_t first, int64_t last,
                                      int64_t *from, int64_t *to)
{
    const int64_t begin = cuda_ops_attention_first_key(call, i), end = cuda_ops_attention_last_key(call, i);
    *from = min_i64(max_i64(begin, first), last) - first;
    *to = max_i64(min_i64(end, last) - first, *from);
}

/* Makes the products of queries [i, i + rows) with keys [first, last) exponentials, and brings each row's maximum, sum
 * and output up to date. */
CUDA_OPS_SIMD static void FN(online_softmax)(const struct attention_block *block, REAL *scores, int64_t i, int64_t rows,
                                             int64_t first, int64_t last, REAL *maxima, double *sums, REAL *output)
{
    const cuda_ops_attention *const call = block->call;
    const bool is_plain =
        !(call->softcap > 0) && !call->alibi_slopes && call->mask_kind == CUDA_OPS_ATTENTION_MASK_NONE;
    for (int64_t r = 0; r < rows; r++) {
        REAL *const row = scores + r * block->pitch;
        int64_t from, to;
        FN(columns_seen)(call, i + r, first, last, &from, &to);
        FN(fill)(row, 0, from, 0);
        FN(fill)(row, to, last - first, 0);
        if (from == to)
            continue;
        REAL largest;
        if (is_plain) {
            largest = FN(row_scaled_maximum)(row + from, to - from, (REAL)call->scale);
        } else {
            FN(row_scores)(block, row + from, NULL, i + r, first + from, to - from);
            largest = FN(row_maximum)(row + from, to - from);
        }
        const REAL before = maxima[r];
        const REAL maximum = largest > before ? largest : before;
        /* Of -inf alone the exponentials are 0. */
        const REAL base = maximum == -(REAL)INFINITY ? 0 : maximum;
        const REAL sum =
            call->products == CUDA_OPS_FLOAT32
                ? FN(row_exponentials_within)(row + from, row + from, to - from, base, NO_MORE_THAN_0)
                : FN(row_exponentials_within)(row + from, row + from, to - from, base, ROUGHLY_NO_MORE_THAN_0);
        if (maximum > before && sums[r] != 0) {
            const REAL factor = FN(exponential)(before - maximum);
            sums[r] *= factor;
            FN(row_scale)(output + r * call->output.row, call->value_dim, factor);
        }
        maxima[r] = maximum;
        sums[r] += sum;
        if (call->dropout > 0)
            FN(row_dropout)(block, row + from, NULL, i + r, first + from, to - from);
    }
}

static void FN(gemm_product)(const cuda_ops_attention *call, REAL *output, int64_t output_row, const REAL *a,
                             int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row, int64_t b_column, int64_t m,
                             int64_t n, int64_t k, bool accumulate, void *workspace)
{
    _Static_assert(sizeof(REAL) == 4 || sizeof(REAL) == 8, "float or double");
    if (sizeof(REAL) == 4 && call->products != CUDA_OPS_FLOAT32 && cuda_ops_has_tiles(call->products)) {
        const struct tile_product product = {
            .a = {a, a_row, a_column},
            .b = {b, b_column, b_row},
            .output = {.data = output, .row = output_row, .dtype = CUDA_OPS_FLOAT32, .accumulate = accumulate},
            .m = m,
            .n = n,
            .k = k,
            .dtype = CUDA_OPS_FLOAT32,
            .split = call->products == CUDA_OPS_FLOAT16};
        cuda_ops_multiply_tiles(&product, workspace);
        return;
    }
    if (sizeof(REAL) == 4)
        cuda_ops_gemm_f32((float *)output, output_row, (const float *)a, a_row, a_column, (const float *)b, b_row,
                          b_column, m, n, k, accumulate, workspace);
    else
        cuda_ops_gemm_f64((double *)output, output_row, (const double *)a, a_row, a_column, (const double *)b, b_row,
                          b_column, m, n, k, accumulate, workspace);
}

static void FN(attention_forward)(REAL *output, REAL *logsumexp, const REAL *query, const REAL *key, const REAL *value,
                                  void *workspace, const cuda_ops_attention *all, int64_t begin, int64_t end)
{
    REAL *const scores = (REAL *)((char *)workspace + products_workspace());
    const int64_t blocks = query_blocks(all), columns = key_block(all);
    struct attention_block block = {.pitch = columns + ROW_GAP};
    for (int64_t part = begin; part < end; part++) {
        const int64_t i = in_turn(part % blocks, blocks) * query_block(all);
        block.head = part / blocks % all->heads;
        block.batch = part / blocks / all->heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(all, block.batch);
        const cuda_ops_attention one = call_of_sequence(all, &s), *const call = &one;
        const int64_t rows = min_i64(query_block(call), call->queries - i);
        if (rows <= 0)
            continue; /* of a sequence that is shorter than others */
        block.call = call;
        block.first_row = first_row_of(all, &s, block.batch, block.head);
        const int64_t key_head = head_of_keys(call, block.head);
        const REAL *const q =
            query + block.batch * call->query.batch + block.head * call->query.head + s.first_query * call->query.row;
        REAL *const o = output + block.batch * call->output.batch + block.head * call->output.head +
                        (s.first_query + i) * call->output.row;
        REAL maxima[MOST_QUERIES];
        double sums[MOST_QUERIES];
        for (int64_t r = 0; r < rows; r++) {
            maxima[r] = -(REAL)INFINITY;
            sums[r] = 0;
            FN(fill)(o + r * call->output.row, 0, call->value_dim, 0);
        }
        const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
        const int64_t start = cuda_ops_attention_first_key(call, i);
        for (int64_t j = start, count; j < last; j += count) {
            count = keys_of_page(call, j, min_i64(columns, last - j));
            const int64_t page = page_of_key(call, block.batch, j), row = s.first_key + row_of_page(call, j);
            const REAL *const k = key + page * call->key.batch + key_head * call->key.head + row * call->key.row;
            const REAL *const v =
                value + page * call->value.batch + key_head * call->value.head + row * call->value.row;
            FN(gemm_product)(call, scores, block.pitch, q + i * call->query.row, call->query.row, 1, k, 1,
                             call->key.row, rows, count, call->head_dim, false, workspace);
            FN(online_softmax)(&block, scores, i, rows, j, j + count, maxima, sums, o);
            FN(gemm_product)(call, o, call->output.row, scores, block.pitch, 1, v, call->value.row, 1, rows,
                             call->value_dim, count, j > start, workspace);
        }
        for (int64_t r = 0; r < rows; r++) {
            REAL *const row = o + r * call->output.row;
            logsumexp[row_of(&block, i + r)] = sums[r] == 0 ? -(REAL)INFINITY : (REAL)(maxima[r] + log(sums[r]));
            if (sums[r] == 0)
                FN(fill)(row, 0, call->value_dim, 0);
            else
                FN(row_scale)(row, call->value_dim, (REAL)(1 / sums[r]));
        }
    }
}

/* Whether it has a remainder that counts (attention.h). */
static bool FN(is_large_logsumexp)(REAL logsumexp)
{
    const REAL size = logsumexp < 0 ? -logsumexp : logsumexp;
    return size >= CUDA_OPS_ATTENTION_LARGE_LOGSUMEXP && size < (REAL)INFINITY;
}

/* sums[r] += exp(score - logsumexp[r]), from the products of queries [i, i + rows) with keys [first, last). */
CUDA_OPS_SIMD static void FN(add_exponentials)(double *sums, const struct attention_block *block, REAL *scores,
                                               int64_t i, int64_t rows, int64_t first, int64_t last,
                                               const REAL *logsumexp)
{
    for (int64_t r = 0; r < rows; r++) {
        REAL *const row = scores + r * block->pitch;
        int64_t from, to;
        FN(columns_seen)(block->call, i + r, first, last, &from, &to);
        if (from == to || !FN(is_large_logsumexp)(logsumexp[r]))
            continue;
        FN(row_scores)(block, row + from, NULL, i + r, first + from, to - from);
        sums[r] += FN(row_exponentials)(row + from, row + from, to - from, logsumexp[r]);
    }
}

/* The remainders of the logsumexps of queries [i, i + rows), where keys are taken in parts: else P is made to add up to
 * 1 without them. */
static void FN(find_remainders)(REAL *remainders, const struct attention_block *block, REAL *scores, int64_t i,
                                int64_t rows, const REAL *query, const REAL *key, const REAL *logsumexp, bool in_parts,
                                void *workspace)
{
    const cuda_ops_attention *const call = block->call;
    const int64_t columns = block->pitch - ROW_GAP, last = cuda_ops_attention_last_key(call, i + rows - 1);
    double sums[MOST_QUERIES] = {0};
    bool any = false;
    for (int64_t r = 0; r < rows; r++) {
        remainders[r] = 0;
        any = any || FN(is_large_logsumexp)(logsumexp[r]);
    }
    if (call->mask_kind != CUDA_OPS_ATTENTION_MASK_ADDITIVE || !any || !in_parts)
        return;
    for (int64_t j = cuda_ops_attention_first_key(call, i); j < last; j += columns) {
        const int64_t count = min_i64(columns, last - j);
        FN(gemm_product)(call, scores, block->pitch, query + i * call->query.row, call->query.row, 1,
                         key + j * call->key.row, 1, call->key.row, rows, count, call->head_dim, false, workspace);
        FN(add_exponentials)(sums, block, scores, i, rows, j, j + count, logsumexp);
    }
    for (int64_t r = 0; r < rows; r++)
        if (FN(is_large_logsumexp)(logsumexp[r]))
            remainders[r] = (REAL)log(sums[r]);
}

CUDA_OPS_INLINE REAL FN(dot)(const REAL *a, const REAL *b, int64_t count)
{
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < count; c++)
        sum += a[c] * b[c];
    return sum;
}

/* Weights are made to add up to 1, unless all are 0. */
CUDA_OPS_INLINE void FN(normalize)(REAL *weights, int64_t count)
{
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < count; c++)
        sum += weights[c];
    if (sum != 0)
        FN(row_scale)(weights, count, 1 / sum);
}

/* scores: products of queries [i, i + rows) with keys [first, last), which become the weights of the values, D P.
 * gradients: products of grad_output and values, which become scale * dS. deltas: NULL where the keys are all that the
 * queries see. Then P is made to add up to 1, and delta is the mean of the very dP that it is subtracted from: rounded
 * apart from them, as grad_output . output is, it would leave a sum of dS that is not grad_logsumexp, which is most of
 * the error where keys are alike, or one has nearly all of the weight. */
CUDA_OPS_SIMD static void FN(softmax_gradient)(const struct attention_block *block, REAL *scores, REAL *gradients,
                                               REAL *caps, REAL *grad_mask, int64_t i, int64_t rows, int64_t first,
                                               int64_t last, const REAL *logsumexp, const REAL *remainders,
                                               const REAL *deltas, const REAL *grad_logsumexp)
{
    const cuda_ops_attention *const call = block->call;
    for (int64_t r = 0; r < rows; r++) {
        REAL *const row = scores + r * block->pitch, *const gradient = gradients + r * block->pitch;
        REAL *const cap = caps ? caps + r * block->pitch : NULL;
        int64_t from, to;
        FN(columns_seen)(call, i + r, first, last, &from, &to);
        FN(fill)(row, 0, from, 0);
        FN(fill)(gradient, 0, from, 0);
        FN(fill)(row, to, last - first, 0);
        FN(fill)(gradient, to, last - first, 0);
        if (from == to)
            continue;
        FN(row_scores)(block, row + from, cap, i + r, first + from, to - from);
        const REAL base = logsumexp[r] == -(REAL)INFINITY ? 0 : logsumexp[r];
        const REAL remainder = remainders[r], minus = !deltas && grad_logsumexp ? grad_logsumexp[r] : 0;
        if (call->dropout > 0) {
            /* P is wanted with and without the factors. */
            for (int64_t c = from; c < to; c++)
                row[c] -= base;
            FN(row_exponentials)(row + from, row + from, to - from, remainder);
            if (!deltas)
                FN(normalize)(row + from, to - from);
            REAL weights[KEY_BLOCK];
            memcpy(weights + from, row + from, (size_t)(to - from) * sizeof(REAL));
            FN(row_dropout)(block, row + from, gradient + from, i + r, first + from, to - from);
            const REAL delta = deltas ? deltas[r] : FN(dot)(weights + from, gradient + from, to - from) - minus;
            for (int64_t c = from; c < to; c++)
                gradient[c] = weights[c] * (gradient[c] - delta);
        } else {
            for (int64_t c = from; c < to; c++)
                row[c] = FN(exponential)(row[c] - base - remainder);
            if (!deltas)
                FN(normalize)(row + from, to - from);
            const REAL delta = deltas ? deltas[r] : FN(dot)(row + from, gradient + from, to - from) - minus;
            for (int64_t c = from; c < to; c++)
                gradient[c] = row[c] * (gradient[c] - delta);
        }
        if (grad_mask)
            memcpy(grad_mask + row_of(block, i + r) * call->keys + first + from, gradient + from,
                   (size_t)(to - from) * sizeof(REAL));
        const REAL scale = (REAL)call->scale;
        if (cap)
            for (int64_t c = from; c < to; c++)
                gradient[c] *= cap[c - from];
        for (int64_t c = from; c < to; c++)
            gradient[c] *= scale;
    }
}

/* One head of queries: writes its grad_query (and rows of grad_mask), and adds to grad_key and grad_value. */
static void FN(head_gradients)(struct attention_block *block, REAL *grad_query, REAL *grad_key, REAL *grad_value,
                               REAL *grad_mask, const REAL *grad_output, const REAL *grad_logsumexp, const REAL *query,
                               const REAL *key, const REAL *value, const REAL *output, const REAL *logsumexp,
                               void *workspace)
{
    const cuda_ops_attention *const call = block->call;
    REAL *const scores = (REAL *)((char *)workspace + products_workspace());
    REAL *const gradients = scores + query_block(call) * block->pitch;
    REAL *const caps = call->softcap > 0 ? gradients + query_block(call) * block->pitch : NULL;
    const int64_t columns = block->pitch - ROW_GAP;
    for (int64_t i = 0; i < call->queries; i += query_block(call)) {
        const int64_t rows = min_i64(query_block(call), call->queries - i);
        const REAL *const q = query + i * call->query.row, *const g = grad_output + i * call->grad_output.row;
        REAL *const grad_q = grad_query + i * call->grad_query.row;
        const int64_t start = cuda_ops_attention_first_key(call, i);
        const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
        const bool in_parts = last - start > columns;
        REAL deltas[MOST_QUERIES], remainders[MOST_QUERIES];
        FN(find_remainders)(remainders, block, scores, i, rows, query, key, logsumexp + row_of(block, i), in_parts,
                            workspace);
        for (int64_t r = 0; r < rows; r++) {
            if (in_parts) {
                deltas[r] =
                    FN(dot)(g + r * call->grad_output.row, output + (i + r) * call->output.row, call->value_dim);
                if (grad_logsumexp)
                    deltas[r] -= grad_logsumexp[row_of(block, i + r)];
            }
            FN(fill)(grad_q + r * call->grad_query.row, 0, call->head_dim, 0);
            if (grad_mask)
                FN(fill)(grad_mask + row_of(block, i + r) * call->keys, 0, call->keys, 0);
        }
        for (int64_t j = start; j < last; j += columns) {
            const int64_t count = min_i64(columns, last - j);
            const REAL *const k = key + j * call->key.row, *const v = value + j * call->value.row;
            FN(gemm_product)(call, scores, block->pitch, q, call->query.row, 1, k, 1, call->key.row, rows, count,
                             call->head_dim, false, workspace);
            FN(gemm_product)(call, gradients, block->pitch, g, call->grad_output.row, 1, v, 1, call->value.row, rows,
                             count, call->value_dim, false, workspace);
            FN(softmax_gradient)(block, scores, gradients, caps, grad_mask, i, rows, j, j + count,
                                 logsumexp + row_of(block, i), remainders, in_parts ? deltas : NULL,
                                 grad_logsumexp ? grad_logsumexp + row_of(block, i) : NULL);
            FN(gemm_product)(call, grad_value + j * call->grad_value.row, call->grad_value.row, scores, 1, block->pitch,
                             g, call->grad_output.row, 1, count, call->value_dim, rows, true, workspace);
            FN(gemm_product)(call, grad_key + j * call->grad_key.row, call->grad_key.row, gradients, 1, block->pitch, q,
                             call->query.row, 1, count, call->head_dim, rows, true, workspace);
            FN(gemm_product)(call, grad_q, call->grad_query.row, gradients, block->pitch, 1, k, call->key.row, 1, rows,
                             call->head_dim, count, true, workspace);
        }
    }
}

static void FN(attention_backward)(REAL *grad_query, REAL *grad_key, REAL *grad_value, REAL *grad_mask,
                                   const REAL *grad_output, const REAL *grad_logsumexp, const REAL *query,
                                   const REAL *key, const REAL *value, const REAL *output, const REAL *logsumexp,
                                   void *workspace, const cuda_ops_attention *all, int64_t begin, int64_t end)
{
    struct attention_block block = {.pitch = key_block(all) + ROW_GAP};
    for (int64_t part = begin; part < end; part++) {
        const int64_t b = part / all->key_heads, key_head = part % all->key_heads;
        const int64_t group = all->heads / all->key_heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(all, b);
        const cuda_ops_attention one = call_of_sequence(all, &s), *const call = &one;
        REAL *const grad_k =
            grad_key + b * call->grad_key.batch + key_head * call->grad_key.head + s.first_key * call->grad_key.row;
        REAL *const grad_v = grad_value + b * call->grad_value.batch + key_head * call->grad_value.head +
                             s.first_key * call->grad_value.row;
        for (int64_t j = 0; j < call->keys; j++) {
            FN(fill)(grad_k + j * call->grad_key.row, 0, call->head_dim, 0);
            FN(fill)(grad_v + j * call->grad_value.row, 0, call->value_dim, 0);
        }
        block.call = call;
        block.batch = b;
        for (block.head = key_head * group; block.head < (key_head + 1) * group; block.head++) {
            block.first_row = first_row_of(all, &s, b, block.head);
            FN(head_gradients)(
                &block,
                grad_query + b * call->grad_query.batch + block.head * call->grad_query.head +
                    s.first_query * call->grad_query.row,
                grad_k, grad_v, grad_mask,
                grad_output + b * call->grad_output.batch + block.head * call->grad_output.head +
                    s.first_query * call->grad_output.row,
                grad_logsumexp,
                query + b * call->query.batch + block.head * call->query.head + s.first_query * call->query.row,
                key + b * call->key.batch + key_head * call->key.head + s.first_key * call->key.row,
                value + b * call->value.batch + key_head * call->value.head + s.first_key * call->value.row,
                output + b * call->output.batch + block.head * call->output.head + s.first_query * call->output.row,
                logsumexp, workspace);
        }
    }
}

#endif
