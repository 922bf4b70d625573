/* attention of halves by AMX. Scores are computed transposed, keys times queries: 16 queries lie beside each other in a
 * vector register, so that a softmax needs no sums across lanes, and each operand is packed at most once for a part:
 *
 *     S^T = K Q^T     of 32 keys and 32 queries: two row tiles of K, packed as they lie, and two column tiles of Q
 *     P^T = 2^(c S^T - b), c = scale / ln 2, b the largest of a query so far (and what makes the exponent cheap)
 *     O^T += V^T P^T  with V turned while it is packed; the pairs of keys that a tile wants are made in registers
 *
 * A float16 is the sum of two bfloat16 (gemm/tiles.h), as P is then. Bound by the exponentials: 2^x takes 11 instructions
 * for 16 numbers, where the tile registers take a product of 64 in a quarter of that time. */
#include "cuda_ops/attention_halves_cpu.h"

#include "attention/seen.h"
#include "attention/sequences.h"
#include "common/common.h"
#include "gemm/tiles.h"

int cuda_ops_attention_takes_halves_cpu(const cuda_ops_attention *call, int backward, int with_grad_mask,
                                        cuda_ops_dtype dtype)
{
    const bool plain = call->mask_kind == CUDA_OPS_ATTENTION_MASK_NONE && !call->alibi_slopes && call->softcap == 0 &&
                       call->dropout == 0 && !call->sequences.block_table && !with_grad_mask;
    const bool half = dtype == CUDA_OPS_BFLOAT16 || (dtype == CUDA_OPS_FLOAT16 && !backward);
    return half && plain && call->scale > 0 && call->scale < INFINITY && call->head_dim > 0 && call->value_dim > 0 &&
           cuda_ops_has_tiles();
}

#if CUDA_OPS_WITH_AMX
#include "gemm/tile_packing.h"

enum {
    QUERIES = 128, /* of a part */
    KEYS = 128,    /* of a block: its scores with 32 queries have 16 KB of the first-level cache */
    PAIR = 2 * SIDE
};

static int64_t round_up(int64_t x, int64_t to)
{
    return (x + to - 1) / to * to;
}

/* Elements of a packed operand of `lines` lines along `depth`. */
static int64_t packed_elements(int64_t lines, int64_t depth, bool split)
{
    return round_up(lines, PAIR) * round_up(depth, STEP) * (split ? 2 : 1);
}

static int64_t query_parts(const cuda_ops_attention *call)
{
    return (call->queries + QUERIES - 1) / QUERIES;
}

/* A thread's memory, in this order; all of whole tiles. */
struct forward_memory {
    uint16_t *query, *key, *value, *weights;
    float *scores, *output; /* output: of all queries of a part, transposed */
};

static int64_t plan_forward(struct forward_memory *memory, void *workspace, const cuda_ops_attention *call, bool split)
{
    char *next = workspace;
    const int64_t queries = min_i64(QUERIES, round_up(call->queries, PAIR));
    const int64_t sizes[] = {2 * packed_elements(queries, call->head_dim, split),
                             2 * packed_elements(KEYS, call->head_dim, split),
                             2 * packed_elements(call->value_dim, KEYS, split),
                             2 * packed_elements(PAIR, KEYS, split),
                             (int64_t)sizeof(float) * KEYS * PAIR,
                             (int64_t)sizeof(float) * queries * round_up(call->value_dim, PAIR)};
    void *starts[6];
    for (int n = 0; n < 6; n++) {
        starts[n] = next;
        next += sizes[n];
    }
    if (workspace)
        *memory = (struct forward_memory){starts[0], starts[1], starts[2], starts[3], starts[4], starts[5]};
    return next - (char *)workspace;
}

/* Two streams of 16 lines beside each other, and so on, all along `depth`. Returns whether something is not finite that
 * has to be. */
static bool pack_operand(cuda_ops_dtype dtype, bool as_b, uint16_t *to, const uint16_t *from, int64_t line,
                         int64_t along, int64_t lines, int64_t depth)
{
    const bool split = dtype == CUDA_OPS_FLOAT16;
    const int64_t stream = round_up(depth, STEP) * SIDE * (split ? 2 : 1);
    bool special = false;
    for (int64_t first = 0; first < lines; first += PAIR)
        special |= pack_streams(dtype, split, as_b, to + first / SIDE * stream, stream, from + first * line, line, along,
                                min_i64(PAIR, lines - first), depth);
    return special;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

/* 2^(x + 1/2) for x up to about 0, off by 3e-6 of it; 0 below 2^-126. x is the sum of an integer and a rest from -1/2 to
 * 1/2, for which the polynomial is from 1 to 2: the integer is added to its exponent. */
CUDA_OPS_INLINE __m512 power_of_two(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(12582912.0f);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ); /* of NaN too */
    const __m512 sum = _mm512_add_ps(x, magic);
    const __m512 r = _mm512_sub_ps(x, _mm512_sub_ps(sum, magic));
    __m512 y = _mm512_set1_ps(0.0135341678f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0790797994f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.339761198f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.980222285f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.41421247f));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(sum), 23);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(counts, _mm512_castps_si512(y), power));
}

/* sums = or, if add, += a times b over `steps`, of two streams each; of the second ones only if they are there. */
CUDA_OPS_INLINE void multiply_pair(const bool split, const bool lower, const bool right, float *sums, bool add,
                                   const uint16_t *a, int64_t a_stream, const uint16_t *b, int64_t b_stream,
                                   int64_t steps)
{
    const int64_t step = split ? 2 * TILE : TILE;
    begin_sums(sums, add);
    for (int64_t s = 0; s < steps; s++)
        add_square(lower, right, split, false, a + s * step, 64, a + a_stream + s * step, 64, TILE, b + s * step,
                   b + b_stream + s * step);
    end_sums(sums);
}

static void multiply_streams(bool split, bool lower, bool right, float *sums, bool add, const uint16_t *a,
                             int64_t a_stream, const uint16_t *b, int64_t b_stream, int64_t steps)
{
    /* GCC's tile loads do not declare that they read memory, nor its stores that they write it. */
    __asm__ volatile("" : : : "memory");
    if (split) {
        if (lower && right)
            multiply_pair(true, true, true, sums, add, a, a_stream, b, b_stream, steps);
        else if (lower)
            multiply_pair(true, true, false, sums, add, a, a_stream, b, b_stream, steps);
        else if (right)
            multiply_pair(true, false, true, sums, add, a, a_stream, b, b_stream, steps);
        else
            multiply_pair(true, false, false, sums, add, a, a_stream, b, b_stream, steps);
    } else {
        if (lower && right)
            multiply_pair(false, true, true, sums, add, a, a_stream, b, b_stream, steps);
        else if (lower)
            multiply_pair(false, true, false, sums, add, a, a_stream, b, b_stream, steps);
        else if (right)
            multiply_pair(false, false, true, sums, add, a, a_stream, b, b_stream, steps);
        else
            multiply_pair(false, false, false, sums, add, a, a_stream, b, b_stream, steps);
    }
    __asm__ volatile("" : : : "memory");
}

/* Scores of keys that are not seen become -inf: those of 32 keys from j on, 32 queries from i on. */
static void hide_scores(float *scores, const cuda_ops_attention *call, int64_t i, int64_t j)
{
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    for (int64_t key = 0; key < PAIR; key++)
        for (int64_t half = 0; half < 2; half++) {
            float *const row = scores + (key / SIDE * 2 + half) * SIDE * SIDE + key % SIDE * SIDE;
            _mm512_mask_storeu_ps(row, (__mmask16)~queries_that_see(call, i + half * SIDE, j + key), hidden);
        }
}

/* What is known of 16 queries. */
struct softmax_state {
    __m512 largest, base, sum;
};

/* One half of scores (16 queries) of `pairs` times 32 keys become weights. Returns by what sums so far are multiplied. */
CUDA_OPS_INLINE __m512 half_softmax(const bool split, struct softmax_state *state, uint16_t *weights,
                                    const float *scores, int64_t pairs, __m512 factor)
{
    __m512 most[4];
    for (int n = 0; n < 4; n++)
        most[n] = _mm512_set1_ps(-INFINITY);
    for (int64_t pair = 0; pair < pairs; pair++) {
        const float *const from = scores + pair * SUMS;
        for (int64_t key = 0; key < SIDE; key += 2)
            for (int n = 0; n < 4; n++)
                most[n] = _mm512_max_ps(
                    _mm512_loadu_ps(from + (key + n % 2) * SIDE + n / 2 * 2 * SIDE * SIDE), most[n]);
    }
    const __m512 largest = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])),
                                         state->largest);
    const __mmask16 none = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 half = _mm512_set1_ps(0.5f);
    /* Where all are -inf, 0, so that no infinities are subtracted. */
    const __m512 base = _mm512_mask_mov_ps(_mm512_fmadd_ps(largest, factor, half), none, _mm512_setzero_ps());
    const __m512 rescale = power_of_two(_mm512_sub_ps(_mm512_sub_ps(state->base, base), half));
    uint16_t order[2 * SIDE];
    for (int n = 0; n < SIDE; n++)
        order[2 * n] = (uint16_t)n, order[2 * n + 1] = (uint16_t)(SIDE + n);
    const __m512i interleave = _mm512_loadu_si512(order);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t key = 0; key < PAIR; key += 2) {
            const float *const from = scores + pair * SUMS + key / SIDE * 2 * SIDE * SIDE + key % SIDE * SIDE;
            const __m512 first = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(from), factor, base));
            const __m512 second = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(from + SIDE), factor, base));
            sums[0] = _mm512_add_ps(sums[0], first), sums[1] = _mm512_add_ps(sums[1], second);
            const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            uint16_t *const to = weights + pair * (split ? 2 * TILE : TILE) + key * SIDE;
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, high));
            if (split) {
                const __m512 rest = _mm512_sub_ps(first, widened_pairs(_mm512_castsi512_si256(high)));
                const __m512 other = _mm512_sub_ps(second, widened_pairs(_mm512_extracti64x4_epi64(high, 1)));
                _mm512_storeu_si512(
                    to + TILE, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(other, rest)));
            }
        }
    state->sum = _mm512_fmadd_ps(state->sum, rescale, _mm512_add_ps(sums[0], sums[1]));
    state->largest = largest, state->base = base;
    return rescale;
}

/* Tiles of output, 32 of depth after 32, of the half. */
static void scale_half(float *output, int64_t half, int64_t value_dim, __m512 factor)
{
    for (int64_t d = 0; d < round_up(value_dim, SIDE); d++) {
        float *const row = output + d / PAIR * SUMS + (d / SIDE % 2 * 2 + half) * SIDE * SIDE + d % SIDE * SIDE;
        _mm512_storeu_ps(row, _mm512_mul_ps(_mm512_loadu_ps(row), factor));
    }
}

/* The output of 16 queries, of which `rows` are there, in their dtype. */
static void store_output(uint16_t *to, int64_t to_row, float *output, int64_t half, int64_t rows, int64_t value_dim,
                         cuda_ops_dtype dtype)
{
    for (int64_t d = 0; d < value_dim; d += PAIR) {
        uint32_t *const first = (uint32_t *)output + d / PAIR * SUMS + half * SIDE * SIDE;
        uint32_t *const second = first + 2 * SIDE * SIDE;
        const __mmask32 mask = first_lanes_32(value_dim - d);
        transpose_16(first, SIDE, first, SIDE);
        if (value_dim - d > SIDE)
            transpose_16(second, SIDE, second, SIDE);
        for (int64_t r = 0; r < rows; r++) {
            const __m512 low = _mm512_loadu_ps((const float *)first + r * SIDE);
            const __m512 high = _mm512_loadu_ps((const float *)second + r * SIDE);
            __m512i halves;
            if (dtype == CUDA_OPS_BFLOAT16)
                halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            else
                halves = _mm512_inserti64x4(
                    _mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
                    _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
            _mm512_mask_storeu_epi16(to + r * to_row + d, mask, halves);
        }
    }
}

/* Queries [i, i + rows) with all keys that they see. */
static bool forward_part(uint16_t *output, int64_t output_row, float *logsumexp, const uint16_t *query,
                         const uint16_t *key, const uint16_t *value, const struct forward_memory *memory,
                         const cuda_ops_attention *call, int64_t i, int64_t rows, cuda_ops_dtype dtype)
{
    const bool split = dtype == CUDA_OPS_FLOAT16;
    const int64_t parts = split ? 2 : 1;
    const int64_t depth_steps = round_up(call->head_dim, STEP) / STEP, depth_stream = depth_steps * TILE * parts;
    const int64_t value_tiles = round_up(call->value_dim, PAIR) * PAIR; /* floats of output of 32 queries */
    const __m512 factor = _mm512_set1_ps((float)(call->scale * 1.44269504088896340736));
    struct softmax_state states[QUERIES / SIDE];
    for (int64_t n = 0; n < QUERIES / SIDE; n++)
        states[n] = (struct softmax_state){_mm512_set1_ps(-INFINITY), _mm512_setzero_ps(), _mm512_setzero_ps()};
    bool begun[QUERIES / PAIR] = {false};
    bool special = pack_operand(dtype, true, memory->query, query + i * call->query.row, call->query.row, 1, rows,
                                call->head_dim);
    const int64_t start = cuda_ops_attention_first_key(call, i);
    const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
    for (int64_t j = start; j < last; j += KEYS) {
        const int64_t count = min_i64(KEYS, last - j), value_stream = round_up(count, STEP) * SIDE * parts;
        special |= pack_operand(dtype, false, memory->key, key + j * call->key.row, call->key.row, 1, count,
                                call->head_dim);
        special |= pack_operand(dtype, false, memory->value, value + j * call->value.row, 1, call->value.row,
                                call->value_dim, count);
        for (int64_t r = 0; r < rows; r += PAIR) {
            const int64_t here = min_i64(PAIR, rows - r);
            /* The keys of the block that these queries see, by 32. */
            const int64_t from = max_i64(cuda_ops_attention_first_key(call, i + r) - j, 0) / PAIR;
            const int64_t seen = min_i64(cuda_ops_attention_last_key(call, i + r + here - 1) - j, count);
            const int64_t pairs = (seen + PAIR - 1) / PAIR - from;
            if (pairs <= 0)
                continue;
            const bool right = here > SIDE;
            for (int64_t p = 0; p < pairs; p++) {
                const int64_t first = (from + p) * PAIR;
                multiply_streams(split, count - first > SIDE, right, memory->scores + p * SUMS, false,
                                 memory->key + (from + p) * 2 * depth_stream, depth_stream,
                                 memory->query + r / SIDE * depth_stream, depth_stream, depth_steps);
                if (!all_seen(call, i + r, here, j + first, PAIR))
                    hide_scores(memory->scores + p * SUMS, call, i + r, j + first);
            }
            float *const sums = memory->output + r / PAIR * value_tiles;
            for (int64_t half = 0; half < (right ? 2 : 1); half++) {
                struct softmax_state *const state = &states[r / SIDE + half];
                uint16_t *const weights = memory->weights + half * KEYS * SIDE * parts;
                const float *const scores = memory->scores + half * SIDE * SIDE;
                const __m512 rescale = split ? half_softmax(true, state, weights, scores, pairs, factor)
                                             : half_softmax(false, state, weights, scores, pairs, factor);
                if (begun[r / PAIR] && _mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
                    scale_half(sums, half, call->value_dim, rescale);
            }
            for (int64_t d = 0; d < call->value_dim; d += PAIR)
                multiply_streams(split, call->value_dim - d > SIDE, right, sums + d / PAIR * SUMS, begun[r / PAIR],
                                 memory->value + d / SIDE * value_stream + from * TILE * parts, value_stream,
                                 memory->weights, KEYS * SIDE * parts, pairs);
            begun[r / PAIR] = true;
        }
    }
    for (int64_t r = 0; r < rows; r += SIDE) {
        const int64_t here = min_i64(SIDE, rows - r), half = r / SIDE % 2;
        const struct softmax_state *const state = &states[r / SIDE];
        float *const sums = memory->output + r / PAIR * value_tiles;
        float largest[SIDE], base[SIDE], sum[SIDE];
        _mm512_storeu_ps(largest, state->largest);
        _mm512_storeu_ps(base, state->base);
        _mm512_storeu_ps(sum, state->sum);
        for (int64_t n = 0; n < here; n++)
            logsumexp[i + r + n] = largest[n] == -INFINITY
                                       ? -INFINITY
                                       : (float)((base[n] - 0.5) * 0.693147180559945309417 + log(sum[n]));
        if (!begun[r / PAIR])
            memset(sums, 0, (size_t)value_tiles * sizeof(float));
        /* A query that sees no key has output 0. */
        const __mmask16 any = _mm512_cmp_ps_mask(state->largest, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        begun[r / PAIR] = true;
        scale_half(sums, half, call->value_dim, _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), state->sum));
        store_output(output + (i + r) * output_row, output_row, sums, half, here, call->value_dim, dtype);
    }
    return special;
}
#pragma GCC pop_options

int64_t cuda_ops_attention_halves_forward_parts_cpu(const cuda_ops_attention *call)
{
    return call->batch * call->heads * query_parts(call);
}

int64_t cuda_ops_attention_halves_forward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype)
{
    return plan_forward(NULL, NULL, call, dtype == CUDA_OPS_FLOAT16);
}

cuda_ops_status cuda_ops_attention_halves_forward_cpu(void *output, void *logsumexp, const void *query, const void *key,
                                                      const void *value, void *workspace, int *not_finite,
                                                      const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    if (!cuda_ops_attention_takes_halves_cpu(call, false, false, dtype))
        return CUDA_OPS_INVALID_ARGUMENT;
    struct forward_memory memory;
    plan_forward(&memory, workspace, call, dtype == CUDA_OPS_FLOAT16);
    struct tile_configuration before;
    bool special = false;
    configure_tiles(&before);
    for (int64_t part = begin; part < end; part++) {
        const int64_t parts = query_parts(call), i = in_turn(part % parts, parts) * QUERIES;
        const int64_t head = part / parts % call->heads, b = part / parts / call->heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(call, b);
        const cuda_ops_attention one = call_of_sequence(call, &s);
        const int64_t rows = min_i64(QUERIES, one.queries - i), key_head = head_of_keys(call, head);
        if (rows <= 0)
            continue; /* of a sequence that is shorter than others */
        special |= forward_part(
            (uint16_t *)output + b * one.output.batch + head * one.output.head + s.first_query * one.output.row,
            one.output.row, (float *)logsumexp + first_row_of(call, &s, b, head),
            (const uint16_t *)query + b * one.query.batch + head * one.query.head + s.first_query * one.query.row,
            (const uint16_t *)key + b * one.key.batch + key_head * one.key.head + s.first_key * one.key.row,
            (const uint16_t *)value + b * one.value.batch + key_head * one.value.head + s.first_key * one.value.row,
            &memory, &one, i, rows, dtype);
    }
    release_tiles(&before);
    if (special)
        __atomic_store_n(not_finite, 1, __ATOMIC_RELAXED);
    return CUDA_OPS_SUCCESS;
}

#else

int64_t cuda_ops_attention_halves_forward_parts_cpu(const cuda_ops_attention *call)
{
    (void)call;
    return 0;
}

int64_t cuda_ops_attention_halves_forward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype)
{
    (void)call, (void)dtype;
    return 0;
}

cuda_ops_status cuda_ops_attention_halves_forward_cpu(void *output, void *logsumexp, const void *query, const void *key,
                                                      const void *value, void *workspace, int *not_finite,
                                                      const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    (void)output, (void)logsumexp, (void)query, (void)key, (void)value, (void)workspace, (void)not_finite, (void)call;
    (void)begin, (void)end, (void)dtype;
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
