/* attention of float32 with AVX-512: scores are computed transposed, so that 16 queries lie beside each other in a
 * vector register. A softmax then needs no sums across lanes, and no operand but the queries has to be turned:
 * elements of keys and values are broadcast from where they lie.
 *
 *     S^T = K Q^T,  P^T = 2^(c S^T - b) with c = scale / ln 2 and b the largest of a query so far,  O^T += V^T P^T
 *
 * A product sums 8 rows x 32 columns in registers. Backward has the scores of 32 queries with all keys at once: it
 * makes P add up to 1, and takes delta as the mean of the very dP that it is subtracted from (attention.c says why).
 *
 * Bound by the multiply-adds; with few keys and short rows gemm's packing, and rows of exponentials that are shorter
 * than a vector, cost more than they did. */
#include "attention/lanes.h"

#include "attention/seen.h"
#include "attention/sequences.h"
#include "common/common.h"
#include "cuda_ops/cpu_isa.h"
#include "gemm/tiles.h"

enum { CHUNK = 32 /* queries: two vectors */, KEYS = 128 /* of a block, forward */, MOST_KEYS = 512 /* backward */ };

bool cuda_ops_attention_lanes_takes(const cuda_ops_attention *call, int64_t keys, bool backward, bool with_grad_mask)
{
    const bool plain = call->mask_kind == CUDA_OPS_ATTENTION_MASK_NONE && !call->alibi_slopes && call->softcap == 0 &&
                       call->dropout == 0 && !call->sequences.block_table && !with_grad_mask;
    const bool products = call->products == CUDA_OPS_FLOAT32 || !cuda_ops_has_tiles(call->products);
    return CUDA_OPS_WITH_TARGETS && plain && products && call->scale > 0 && call->scale < INFINITY &&
           (!backward || keys <= MOST_KEYS) && cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512;
}

#if CUDA_OPS_WITH_TARGETS
#include "common/transpose_16.h"

enum { SIDE = 16 };

static int64_t whole_lanes(int64_t x)
{
    return (x + SIDE - 1) / SIDE * SIDE;
}

/* A thread's memory: rows of CHUNK floats, a query in each lane. */
struct lanes_memory {
    float *query, *scores, *output; /* output: forward's, and backward's grad_query */
    float *grad_output, *gradients; /* backward alone */
    float *copy;                    /* of values forward, of keys backward: rows without gaps */
};

static int64_t plan(struct lanes_memory *memory, void *workspace, const cuda_ops_attention *call, bool backward)
{
    const int64_t dim = whole_lanes(call->head_dim), value_dim = whole_lanes(call->value_dim);
    const int64_t keys = backward ? min_i64(MOST_KEYS, call->keys) : KEYS;
    const int64_t copied = (keys * (backward ? dim : value_dim) + CHUNK - 1) / CHUNK;
    const int64_t rows[] = {dim,   keys, backward ? dim : value_dim, backward ? value_dim : 0, backward ? keys : 0,
                            copied};
    float *starts[6], *next = workspace;
    int64_t sum = 0;
    for (int n = 0; n < 6; n++) {
        starts[n] = workspace ? next + sum * CHUNK : NULL;
        sum += rows[n];
    }
    if (memory)
        *memory = (struct lanes_memory){starts[0], starts[1], starts[2], starts[3], starts[4], starts[5]};
    return sum * CHUNK * (int64_t)sizeof(float);
}

int64_t cuda_ops_attention_lanes_workspace(const cuda_ops_attention *call, bool backward)
{
    return plan(NULL, NULL, call, backward);
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,fma")

/* 2^(x + 1/2) for x up to about 0, to the last digits; 0 below 2^-126. x is the sum of an integer, which the addition of
 * 1.5 * 2^23 leaves in the last bits, and a rest from -1/2 to 1/2, for which there is a minimax polynomial. */
CUDA_OPS_INLINE __m512 power_of_two(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(12582912.0f + 127); /* with what an exponent is stored more by */
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ); /* of NaN too */
    const __m512 sum = _mm512_add_ps(x, magic);
    const __m512 r = _mm512_sub_ps(x, _mm512_sub_ps(sum, magic));
    __m512 y = _mm512_set1_ps(0.000217022549f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.00189503643f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0136025976f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0784935057f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.339731544f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.980258167f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.41421354f));
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(sum), 23));
    return _mm512_maskz_mul_ps(counts, y, power);
}

/* A matrix: element [i][p] is at data[i * row + p * step]. */
struct matrix {
    const float *data;
    int64_t row, step;
};

/* c[i][j] = or, if add, += sum over p of a[i][p] * b[p][j], of `rows` rows and the columns of two masks. */
CUDA_OPS_INLINE void multiply_rows(const int rows, float *c, int64_t c_row, bool add, const struct matrix *a,
                                   const float *b, int64_t b_row, int64_t depth, __mmask16 left, __mmask16 right)
{
    __m512 sums[8][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    const float *from = a->data;
    for (int64_t p = 0; p < depth; p++, from += a->step, b += b_row) {
        const __m512 first = _mm512_maskz_loadu_ps(left, b), second = _mm512_maskz_loadu_ps(right, b + SIDE);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const __m512 factor = _mm512_set1_ps(from[i * a->row]);
            sums[i][0] = _mm512_fmadd_ps(factor, first, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(factor, second, sums[i][1]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++, c += c_row) {
        if (add) {
            sums[i][0] = _mm512_add_ps(sums[i][0], _mm512_maskz_loadu_ps(left, c));
            sums[i][1] = _mm512_add_ps(sums[i][1], _mm512_maskz_loadu_ps(right, c + SIDE));
        }
        _mm512_mask_storeu_ps(c, left, sums[i][0]);
        _mm512_mask_storeu_ps(c + SIDE, right, sums[i][1]);
    }
}

/* Likewise of any number of rows, and of at most 32 columns. */
static void multiply_columns(float *c, int64_t c_row, bool add, struct matrix a, const float *b, int64_t b_row,
                             int64_t rows, int64_t columns, int64_t depth)
{
    const __mmask16 left = (__mmask16)(columns < SIDE ? (1u << columns) - 1 : 0xffffu);
    const __mmask16 right = (__mmask16)(columns >= 2 * SIDE ? 0xffffu
                                        : columns <= SIDE   ? 0
                                                            : (1u << (columns - SIDE)) - 1);
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8, a.data += 8 * a.row, c += 8 * c_row)
        multiply_rows(8, c, c_row, add, &a, b, b_row, depth, left, right);
    if (i + 4 <= rows) {
        multiply_rows(4, c, c_row, add, &a, b, b_row, depth, left, right);
        i += 4, a.data += 4 * a.row, c += 4 * c_row;
    }
    for (; i < rows; i++, a.data += a.row, c += c_row)
        multiply_rows(1, c, c_row, add, &a, b, b_row, depth, left, right);
}

/* Of any number of columns. */
static void multiply(float *c, int64_t c_row, bool add, struct matrix a, const float *b, int64_t b_row, int64_t rows,
                     int64_t columns, int64_t depth)
{
    for (int64_t j = 0; j < columns; j += CHUNK)
        multiply_columns(c + j, c_row, add, a, b + j, b_row, rows, min_i64(CHUNK, columns - j), depth);
}

/* The transposed matrix of rows whose elements are broadcast, a few of each at a time. Rows that lie far apart are
 * copied: at powers of two they would map to the same few sets of the first-level cache. */
static struct matrix turned_rows(float *copy, const float *from, int64_t row, int64_t rows, int64_t dim)
{
    enum { CLOSE = 128 };
    if (row <= CLOSE || rows <= SIDE)
        return (struct matrix){from, 1, row};
    for (int64_t r = 0; r < rows; r++)
        memcpy(copy + r * dim, from + r * row, (size_t)dim * sizeof(float));
    return (struct matrix){copy, 1, dim};
}

/* Rows of at most 32 queries become columns; of those that are not there 0. */
static void turn_queries(float *to, const float *from, int64_t row, int64_t rows, int64_t dim)
{
    for (int64_t d = 0; d < dim; d += SIDE) {
        const __mmask16 mask = (__mmask16)(dim - d < SIDE ? (1u << (dim - d)) - 1 : 0xffffu);
        for (int64_t half = 0; half < CHUNK; half += SIDE) {
            uint32_t lines[SIDE * SIDE] __attribute__((aligned(64)));
            for (int64_t r = 0; r < SIDE; r++)
                _mm512_store_ps((float *)lines + r * SIDE,
                                half + r < rows ? _mm512_maskz_loadu_ps(mask, from + (half + r) * row + d)
                                                : _mm512_setzero_ps());
            transpose_16((uint32_t *)to + d * CHUNK + half, CHUNK, lines, SIDE);
        }
    }
}

/* The other way round: columns, times a factor of each, become rows. */
static void turn_back(float *to, int64_t row, const float *from, int64_t rows, int64_t dim, const __m512 factors[2])
{
    for (int64_t d = 0; d < dim; d += SIDE) {
        const __mmask16 mask = (__mmask16)(dim - d < SIDE ? (1u << (dim - d)) - 1 : 0xffffu);
        for (int64_t half = 0; half < min_i64(CHUNK, rows); half += SIDE) {
            uint32_t lines[SIDE * SIDE] __attribute__((aligned(64)));
            for (int64_t c = 0; c < SIDE; c++)
                _mm512_store_ps((float *)lines + c * SIDE,
                                _mm512_mul_ps(_mm512_loadu_ps(from + (d + c) * CHUNK + half), factors[half / SIDE]));
            transpose_16(lines, SIDE, lines, SIDE);
            for (int64_t r = 0; r < min_i64(SIDE, rows - half); r++)
                _mm512_mask_storeu_ps(to + (half + r) * row + d, mask, _mm512_load_ps((const float *)lines + r * SIDE));
        }
    }
}

/* Scores of keys [j, j + count) that queries [i, i + rows) do not see become -inf. */
static void hide_scores(float *scores, const cuda_ops_attention *call, int64_t i, int64_t rows, int64_t j,
                        int64_t count)
{
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    if (all_seen(call, i, rows, j, count))
        return;
    for (int64_t key = 0; key < count; key++, scores += CHUNK) {
        _mm512_mask_storeu_ps(scores, (__mmask16)~queries_that_see(call, i, j + key), hidden);
        _mm512_mask_storeu_ps(scores + SIDE, (__mmask16)~queries_that_see(call, i + SIDE, j + key), hidden);
    }
}

/* What is known of 16 queries. */
struct softmax_state {
    __m512 largest, base, sum;
};

/* Scores of `count` keys become weights. Returns by what sums so far are multiplied. */
static __m512 online_softmax(struct softmax_state *state, float *scores, int64_t count, __m512 factor)
{
    __m512 most[2] = {state->largest, state->largest};
    int64_t key = 0;
    for (; key + 2 <= count; key += 2) {
        most[0] = _mm512_max_ps(_mm512_loadu_ps(scores + key * CHUNK), most[0]);
        most[1] = _mm512_max_ps(_mm512_loadu_ps(scores + (key + 1) * CHUNK), most[1]);
    }
    if (key < count)
        most[0] = _mm512_max_ps(_mm512_loadu_ps(scores + key * CHUNK), most[0]);
    const __m512 largest = _mm512_max_ps(most[0], most[1]), half = _mm512_set1_ps(0.5f);
    const __mmask16 none = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    /* Where all are -inf, 0, so that no infinities are subtracted. */
    const __m512 base = _mm512_mask_mov_ps(_mm512_fmadd_ps(largest, factor, half), none, _mm512_setzero_ps());
    /* Queries that have seen nothing have no sums, and a base from which power_of_two may be asked for too much. */
    const __mmask16 unseen = _mm512_cmp_ps_mask(state->largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 rescale = _mm512_mask_mov_ps(power_of_two(_mm512_sub_ps(_mm512_sub_ps(state->base, base), half)),
                                              unseen, _mm512_set1_ps(1.0f));
    __m512 sum = _mm512_setzero_ps();
    for (key = 0; key < count; key += SIDE) {
        const int64_t here = min_i64(SIDE, count - key);
        __m512 here_sum = _mm512_setzero_ps(); /* of a few at a time, so that roundings do not add up */
        for (int64_t k = 0; k < here; k++) {
            float *const row = scores + (key + k) * CHUNK;
            const __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row), factor, base));
            _mm512_storeu_ps(row, weight);
            here_sum = _mm512_add_ps(here_sum, weight);
        }
        sum = _mm512_add_ps(sum, here_sum);
    }
    state->sum = _mm512_fmadd_ps(state->sum, rescale, sum);
    state->largest = largest, state->base = base;
    return rescale;
}

/* Queries [i, i + rows), at most 32, with all keys that they see. */
static void forward_chunk(float *output, float *logsumexp, const float *query, const float *key, const float *value,
                          const struct lanes_memory *memory, const cuda_ops_attention *call, int64_t i, int64_t rows)
{
    const __m512 factor = _mm512_set1_ps((float)(call->scale * 1.44269504088896340736));
    const int halves = rows > SIDE ? 2 : 1;
    struct softmax_state states[2];
    for (int half = 0; half < 2; half++)
        states[half] = (struct softmax_state){_mm512_set1_ps(-INFINITY), _mm512_setzero_ps(), _mm512_setzero_ps()};
    turn_queries(memory->query, query + i * call->query.row, call->query.row, rows, call->head_dim);
    const int64_t start = cuda_ops_attention_first_key(call, i);
    const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
    for (int64_t j = start; j < last; j += KEYS) {
        const int64_t count = min_i64(KEYS, last - j);
        multiply_columns(memory->scores, CHUNK, false, (struct matrix){key + j * call->key.row, call->key.row, 1},
                         memory->query, CHUNK, count, CHUNK, call->head_dim);
        hide_scores(memory->scores, call, i, rows, j, count);
        for (int half = 0; half < halves; half++) {
            const __m512 rescale = online_softmax(&states[half], memory->scores + half * SIDE, count, factor);
            if (j > start && _mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
                for (int64_t d = 0; d < call->value_dim; d++) {
                    float *const row = memory->output + d * CHUNK + half * SIDE;
                    _mm512_storeu_ps(row, _mm512_mul_ps(_mm512_loadu_ps(row), rescale));
                }
        }
        multiply_columns(
            memory->output, CHUNK, j > start,
            turned_rows(memory->copy, value + j * call->value.row, call->value.row, count, call->value_dim),
            memory->scores, CHUNK, call->value_dim, CHUNK, count);
    }
    if (start >= last)
        memset(memory->output, 0, (size_t)(whole_lanes(call->value_dim) * CHUNK) * sizeof(float));
    __m512 inverse[2];
    for (int half = 0; half < 2; half++) {
        const struct softmax_state *const state = &states[half];
        const __mmask16 any = _mm512_cmp_ps_mask(state->sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        inverse[half] = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), state->sum);
        float base[SIDE], sum[SIDE];
        _mm512_storeu_ps(base, state->base);
        _mm512_storeu_ps(sum, state->sum);
        for (int64_t n = 0; n < min_i64(SIDE, rows - half * SIDE); n++)
            logsumexp[i + half * SIDE + n] =
                sum[n] == 0 ? -INFINITY : (float)((base[n] - 0.5) * 0.693147180559945309417 + log(sum[n]));
    }
    turn_back(output + i * call->output.row, call->output.row, memory->output, rows, call->value_dim, inverse);
}

/* Scores and dP of 16 queries with `count` keys become P and scale * dS. */
static void softmax_gradient(float *scores, float *gradients, int64_t count, __m512 factor, __m512 base,
                             __m512 grad_logsumexp, __m512 scale)
{
    __m512 sum = _mm512_setzero_ps(), products = sum;
    for (int64_t key = 0; key < count; key += SIDE) {
        __m512 here_sum = _mm512_setzero_ps(), here_products = here_sum;
        for (int64_t k = key; k < min_i64(key + SIDE, count); k++) {
            float *const row = scores + k * CHUNK;
            const __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row), factor, base));
            _mm512_storeu_ps(row, weight);
            here_sum = _mm512_add_ps(here_sum, weight);
            here_products = _mm512_fmadd_ps(weight, _mm512_loadu_ps(gradients + k * CHUNK), here_products);
        }
        sum = _mm512_add_ps(sum, here_sum), products = _mm512_add_ps(products, here_products);
    }
    /* Of a query that sees no key all weights are 0, and stay so. */
    const __mmask16 any = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 inverse = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), sum);
    const __m512 delta = _mm512_fmsub_ps(products, inverse, grad_logsumexp);
    for (int64_t key = 0; key < count; key++) {
        float *const row = scores + key * CHUNK, *const gradient = gradients + key * CHUNK;
        const __m512 weight = _mm512_mul_ps(_mm512_loadu_ps(row), inverse);
        _mm512_storeu_ps(row, weight);
        _mm512_storeu_ps(gradient,
                         _mm512_mul_ps(_mm512_mul_ps(weight, scale), _mm512_sub_ps(_mm512_loadu_ps(gradient), delta)));
    }
}

/* The head of queries: writes its grad_query, and adds to grad_key and grad_value. */
static void head_gradients(float *grad_query, float *grad_key, float *grad_value, const float *grad_output,
                           const float *grad_logsumexp, const float *query, const float *key, const float *value,
                           const float *logsumexp, const struct lanes_memory *memory, const cuda_ops_attention *call)
{
    const __m512 factor = _mm512_set1_ps((float)(call->scale * 1.44269504088896340736));
    const __m512 scale = _mm512_set1_ps((float)call->scale);
    const __m512 ones[2] = {_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f)};
    for (int64_t i = 0; i < call->queries; i += CHUNK) {
        const int64_t rows = min_i64(CHUNK, call->queries - i);
        const int64_t j = cuda_ops_attention_first_key(call, i);
        const int64_t count = cuda_ops_attention_last_key(call, i + rows - 1) - j;
        const float *const q = query + i * call->query.row, *const g = grad_output + i * call->grad_output.row;
        const float *const k = key + j * call->key.row, *const v = value + j * call->value.row;
        turn_queries(memory->query, q, call->query.row, rows, call->head_dim);
        turn_queries(memory->grad_output, g, call->grad_output.row, rows, call->value_dim);
        multiply_columns(memory->scores, CHUNK, false, (struct matrix){k, call->key.row, 1}, memory->query, CHUNK,
                         count, CHUNK, call->head_dim);
        multiply_columns(memory->gradients, CHUNK, false, (struct matrix){v, call->value.row, 1}, memory->grad_output,
                         CHUNK, count, CHUNK, call->value_dim);
        hide_scores(memory->scores, call, i, rows, j, count);
        for (int64_t half = 0; half < CHUNK; half += SIDE) {
            /* Lanes without a query have scores and dP of 0, and rows that nothing reads. */
            const __mmask16 lanes = (__mmask16)(rows - half >= SIDE ? 0xffffu
                                                : rows > half       ? (1u << (rows - half)) - 1
                                                                    : 0);
            const __m512 sums = _mm512_maskz_loadu_ps(lanes, logsumexp + i + half);
            const __mmask16 none = _mm512_cmp_ps_mask(sums, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
            const __m512 base =
                _mm512_maskz_fmadd_ps((__mmask16)~none, sums, _mm512_set1_ps(1.44269504f), _mm512_set1_ps(0.5f));
            const __m512 minus =
                grad_logsumexp ? _mm512_maskz_loadu_ps(lanes, grad_logsumexp + i + half) : _mm512_setzero_ps();
            softmax_gradient(memory->scores + half, memory->gradients + half, count, factor, base, minus, scale);
        }
        multiply(grad_value + j * call->grad_value.row, call->grad_value.row, true,
                 (struct matrix){memory->scores, CHUNK, 1}, g, call->grad_output.row, count, call->value_dim, rows);
        multiply(grad_key + j * call->grad_key.row, call->grad_key.row, true,
                 (struct matrix){memory->gradients, CHUNK, 1}, q, call->query.row, count, call->head_dim, rows);
        multiply_columns(memory->output, CHUNK, false,
                         turned_rows(memory->copy, k, call->key.row, count, call->head_dim), memory->gradients, CHUNK,
                         call->head_dim, CHUNK, count);
        turn_back(grad_query + i * call->grad_query.row, call->grad_query.row, memory->output, rows, call->head_dim,
                  ones);
    }
}
#pragma GCC pop_options

void cuda_ops_attention_lanes_forward(float *output, float *logsumexp, const float *query, const float *key,
                                      const float *value, void *workspace, const cuda_ops_attention *all, int64_t begin,
                                      int64_t end)
{
    const int64_t parts = (all->queries + LANES_QUERIES - 1) / LANES_QUERIES;
    struct lanes_memory memory;
    plan(&memory, workspace, all, false);
    for (int64_t part = begin; part < end; part++) {
        const int64_t first = in_turn(part % parts, parts) * LANES_QUERIES;
        const int64_t head = part / parts % all->heads, b = part / parts / all->heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(all, b);
        const cuda_ops_attention call = call_of_sequence(all, &s);
        const int64_t key_head = head_of_keys(&call, head);
        for (int64_t i = first; i < min_i64(first + LANES_QUERIES, call.queries); i += CHUNK)
            forward_chunk(output + b * call.output.batch + head * call.output.head + s.first_query * call.output.row,
                          logsumexp + first_row_of(all, &s, b, head),
                          query + b * call.query.batch + head * call.query.head + s.first_query * call.query.row,
                          key + b * call.key.batch + key_head * call.key.head + s.first_key * call.key.row,
                          value + b * call.value.batch + key_head * call.value.head + s.first_key * call.value.row,
                          &memory, &call, i, min_i64(CHUNK, call.queries - i));
    }
}

void cuda_ops_attention_lanes_backward(float *grad_query, float *grad_key, float *grad_value, const float *grad_output,
                                       const float *grad_logsumexp, const float *query, const float *key,
                                       const float *value, const float *logsumexp, void *workspace,
                                       const cuda_ops_attention *all, int64_t begin, int64_t end)
{
    struct lanes_memory memory;
    plan(&memory, workspace, all, true);
    for (int64_t part = begin; part < end; part++) {
        const int64_t b = part / all->key_heads, key_head = part % all->key_heads, group = all->heads / all->key_heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(all, b);
        const cuda_ops_attention call = call_of_sequence(all, &s);
        float *const grad_k =
            grad_key + b * call.grad_key.batch + key_head * call.grad_key.head + s.first_key * call.grad_key.row;
        float *const grad_v = grad_value + b * call.grad_value.batch + key_head * call.grad_value.head +
                              s.first_key * call.grad_value.row;
        for (int64_t j = 0; j < call.keys; j++) {
            memset(grad_k + j * call.grad_key.row, 0, (size_t)call.head_dim * sizeof(float));
            memset(grad_v + j * call.grad_value.row, 0, (size_t)call.value_dim * sizeof(float));
        }
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
            const int64_t row = first_row_of(all, &s, b, head);
            head_gradients(grad_query + b * call.grad_query.batch + head * call.grad_query.head +
                               s.first_query * call.grad_query.row,
                           grad_k, grad_v,
                           grad_output + b * call.grad_output.batch + head * call.grad_output.head +
                               s.first_query * call.grad_output.row,
                           grad_logsumexp ? grad_logsumexp + row : NULL,
                           query + b * call.query.batch + head * call.query.head + s.first_query * call.query.row,
                           key + b * call.key.batch + key_head * call.key.head + s.first_key * call.key.row,
                           value + b * call.value.batch + key_head * call.value.head + s.first_key * call.value.row,
                           logsumexp + row, &memory, &call);
        }
    }
}

#else

int64_t cuda_ops_attention_lanes_workspace(const cuda_ops_attention *call, bool backward)
{
    (void)call, (void)backward;
    return 0;
}

void cuda_ops_attention_lanes_forward(float *output, float *logsumexp, const float *query, const float *key,
                                      const float *value, void *workspace, const cuda_ops_attention *call,
                                      int64_t begin, int64_t end)
{
    (void)output, (void)logsumexp, (void)query, (void)key, (void)value, (void)workspace, (void)call;
    (void)begin, (void)end;
}

void cuda_ops_attention_lanes_backward(float *grad_query, float *grad_key, float *grad_value, const float *grad_output,
                                       const float *grad_logsumexp, const float *query, const float *key,
                                       const float *value, const float *logsumexp, void *workspace,
                                       const cuda_ops_attention *call, int64_t begin, int64_t end)
{
    (void)grad_query, (void)grad_key, (void)grad_value, (void)grad_output, (void)grad_logsumexp, (void)query;
    (void)key, (void)value, (void)logsumexp, (void)workspace, (void)call, (void)begin, (void)end;
}

#endif
