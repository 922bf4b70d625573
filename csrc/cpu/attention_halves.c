/* attention of halves by AMX, or of bfloat16 by vectors of AVX512-BF16 (gemm/tile_packing.h). Scores are computed transposed, keys times queries: 16 queries lie beside each other in a
 * vector register, so that a softmax needs no sums across lanes, and each operand is packed at most once for a part:
 *
 *     S^T = K Q^T     of 32 keys and 32 queries: two row tiles of K, packed as they lie, and two column tiles of Q
 *     P^T = 2^(c S^T - b), c = scale / ln 2, b the largest of a query so far (and what makes the exponent cheap)
 *     O^T += V^T P^T  with V turned while it is packed; the pairs of keys that a tile wants are made in registers
 *
 * A float16 is the sum of two bfloat16 (gemm/tiles.h), as P is then. Bound by the exponentials: 2^x takes 11
 * instructions for 16 numbers, where the tile registers take a product of 64 in a quarter of that time. */
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
           cuda_ops_has_tiles(dtype);
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

/* Where arrays of so many bytes, whole tiles, begin in a workspace; they may be NULL. Returns their sum. */
static int64_t place(void **starts, const int64_t *sizes, int count, void *workspace)
{
    int64_t sum = 0;
    for (int n = 0; n < count; n++) {
        starts[n] = workspace ? (char *)workspace + sum : NULL;
        sum += sizes[n];
    }
    return sum;
}

/* A thread's memory, in this order. */
struct forward_memory {
    uint16_t *query, *key, *value, *weights;
    float *scores, *output; /* output: of all queries of a part, transposed */
};

static int64_t plan_forward(struct forward_memory *memory, void *workspace, const cuda_ops_attention *call, bool split)
{
    const int64_t queries = min_i64(QUERIES, round_up(call->queries, PAIR));
    const int64_t sizes[] = {2 * packed_elements(queries, call->head_dim, split),
                             2 * packed_elements(KEYS, call->head_dim, split),
                             2 * packed_elements(call->value_dim, KEYS, split),
                             2 * packed_elements(PAIR, KEYS, split),
                             (int64_t)sizeof(float) * KEYS * PAIR,
                             (int64_t)sizeof(float) * queries * round_up(call->value_dim, PAIR)};
    void *starts[6];
    const int64_t bytes = place(starts, sizes, 6, workspace);
    if (workspace)
        *memory = (struct forward_memory){starts[0], starts[1], starts[2], starts[3], starts[4], starts[5]};
    return bytes;
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
        special |= pack_streams(dtype, split, as_b, to + first / SIDE * stream, stream, from + first * line, line,
                                along, min_i64(PAIR, lines - first), depth);
    return special;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

/* 2^(x + 1/2) for x up to about 0, off by 3e-6 of it; 0 below 2^-126. x is the sum of an integer, which the addition of
 * 1.5 * 2^23 leaves in the last bits, and a rest from -1/2 to 1/2, for which there is a minimax polynomial. */
CUDA_OPS_INLINE __m512 power_of_two(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(12582912.0f + 127); /* with what an exponent is stored more by */
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ); /* of NaN too */
    const __m512 sum = _mm512_add_ps(x, magic);
    const __m512 r = _mm512_sub_ps(x, _mm512_sub_ps(sum, magic));
    __m512 y = _mm512_set1_ps(0.0135341678f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0790797994f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.339761198f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.980222285f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.41421247f));
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(sum), 23));
    return _mm512_maskz_mul_ps(counts, y, power);
}

/* sums = or, if add, += a times b over `steps`, of two streams each; of the second ones only if they are there. */
CUDA_OPS_INLINE void multiply_pair(const bool split, const bool lower, const bool right, float *sums, bool add,
                                   const uint16_t *a, int64_t a_stream, const uint16_t *b, int64_t b_stream,
                                   int64_t steps)
{
    const int64_t step = split ? 2 * TILE : TILE;
    if (!has_tile_registers()) {
        if (!add)
            clear_others(lower, right, sums);
        for (int row = 0; row < (lower ? PAIR : SIDE); row += rows_at_once(right)) {
            float *const at = sums + row / SIDE * 2 * SIDE * SIDE + row % SIDE * SIDE;
            const uint16_t *from = a + row / SIDE * a_stream + row % SIDE * STEP;
            __m512 vectors[VECTORS];
            begin_rows(right, vectors, at, add);
            for (int64_t s = 0; s < steps; s++)
                add_rows(right, split, false, vectors, from + s * step, 64, TILE, b + s * step,
                         b + b_stream + s * step);
            end_rows(right, vectors, at);
        }
        return;
    }
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

/* One half of scores (16 queries) of `pairs` times 32 keys become weights. Returns by what sums so far are multiplied.
 * */
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
                most[n] =
                    _mm512_max_ps(_mm512_loadu_ps(from + (key + n % 2) * SIDE + n / 2 * 2 * SIDE * SIDE), most[n]);
    }
    const __m512 largest =
        _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])), state->largest);
    const __mmask16 none = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 half = _mm512_set1_ps(0.5f);
    /* Where all are -inf, 0, so that no infinities are subtracted. */
    const __m512 base = _mm512_mask_mov_ps(_mm512_fmadd_ps(largest, factor, half), none, _mm512_setzero_ps());
    /* Queries that have seen nothing have no sums, and a base from which power_of_two may be asked for too much. */
    const __mmask16 unseen = _mm512_cmp_ps_mask(state->largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 rescale = _mm512_mask_mov_ps(power_of_two(_mm512_sub_ps(_mm512_sub_ps(state->base, base), half)),
                                              unseen, _mm512_set1_ps(1.0f));
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
                _mm512_storeu_si512(to + TILE,
                                    _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(other, rest)));
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
                halves = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
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
    bool special =
        pack_operand(dtype, true, memory->query, query + i * call->query.row, call->query.row, 1, rows, call->head_dim);
    const int64_t start = cuda_ops_attention_first_key(call, i);
    const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
    for (int64_t j = start; j < last; j += KEYS) {
        const int64_t count = min_i64(KEYS, last - j), value_stream = round_up(count, STEP) * SIDE * parts;
        special |=
            pack_operand(dtype, false, memory->key, key + j * call->key.row, call->key.row, 1, count, call->head_dim);
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
        float base[SIDE], sum[SIDE];
        _mm512_storeu_ps(base, state->base);
        _mm512_storeu_ps(sum, state->sum);
        for (int64_t n = 0; n < here; n++)
            logsumexp[i + r + n] =
                sum[n] == 0 ? -INFINITY : (float)((base[n] - 0.5) * 0.693147180559945309417 + log(sum[n]));
        if (!begun[r / PAIR])
            memset(sums, 0, (size_t)value_tiles * sizeof(float));
        /* A query that sees no key has output 0. */
        const __mmask16 any = _mm512_cmp_ps_mask(state->sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        begun[r / PAIR] = true;
        scale_half(sums, half, call->value_dim, _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), state->sum));
        store_output(output + (i + r) * output_row, output_row, sums, half, here, call->value_dim, dtype);
    }
    return special;
}

/* A thread's memory for backward. Of all keys: packed keys, keys turned, values; sums of grad_key and grad_value. Of a
 * block of queries: queries and grad_output, along their dimension and along queries; sums of grad_query, turned. Of it
 * and a block of keys: P and dS with queries as the depth, and dS with keys as the depth. */
struct backward_memory {
    uint16_t *key, *turned_key, *value, *query, *grad_output, *queries, *grad_outputs, *weights, *gradients, *turned;
    float *grad_key, *grad_value, *grad_query;
};

static int64_t plan_backward(struct backward_memory *memory, void *workspace, const cuda_ops_attention *call)
{
    const int64_t dim = call->head_dim, value_dim = call->value_dim, keys = round_up(call->keys, PAIR);
    const int64_t sizes[] = {2 * packed_elements(keys, dim, false),
                             2 * packed_elements(dim, keys, false),
                             2 * packed_elements(keys, value_dim, false),
                             2 * packed_elements(QUERIES, dim, false),
                             2 * packed_elements(QUERIES, value_dim, false),
                             2 * packed_elements(dim, QUERIES, false),
                             2 * packed_elements(value_dim, QUERIES, false),
                             2 * KEYS * QUERIES,
                             2 * KEYS * QUERIES,
                             2 * KEYS * QUERIES,
                             (int64_t)sizeof(float) * keys * round_up(dim, PAIR),
                             (int64_t)sizeof(float) * keys * round_up(value_dim, PAIR),
                             (int64_t)sizeof(float) * QUERIES * round_up(dim, PAIR)};
    void *at[13];
    const int64_t bytes = place(at, sizes, 13, workspace);
    if (workspace)
        *memory = (struct backward_memory){at[0], at[1], at[2], at[3],  at[4],  at[5], at[6],
                                           at[7], at[8], at[9], at[10], at[11], at[12]};
    return bytes;
}

/* What is known of 16 queries. */
struct gradient_state {
    __m512 base, delta;
};

/* Of a block of queries [i, i + rows): delta = grad_output . output - grad_logsumexp, and what scores are lessened by.
 * Of queries that are not there the weights are 0. */
static void begin_gradients(struct gradient_state *states, const uint16_t *grad_output, int64_t grad_row,
                            const uint16_t *output, int64_t output_row, const float *logsumexp,
                            const float *grad_logsumexp, int64_t rows, int64_t value_dim)
{
    for (int64_t first = 0; first < QUERIES; first += SIDE) {
        float base[SIDE], delta[SIDE];
        for (int64_t n = 0; n < SIDE; n++) {
            const int64_t r = first + n;
            base[n] = INFINITY, delta[n] = 0;
            if (r >= rows)
                continue;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = 0; d < value_dim; d += SIDE) {
                const __mmask16 mask = (__mmask16)first_lanes_32(min_i64(value_dim - d, SIDE));
                sum = _mm512_fmadd_ps(widened_pairs(_mm256_maskz_loadu_epi16(mask, grad_output + r * grad_row + d)),
                                      widened_pairs(_mm256_maskz_loadu_epi16(mask, output + r * output_row + d)), sum);
            }
            delta[n] = _mm512_reduce_add_ps(sum) - (grad_logsumexp ? grad_logsumexp[r] : 0);
            base[n] = logsumexp[r] == -INFINITY ? 0 : fmaf(logsumexp[r], 1.44269504f, 0.5f);
        }
        states[first / SIDE] = (struct gradient_state){_mm512_loadu_ps(base), _mm512_loadu_ps(delta)};
    }
}

/* Scores and dP of 32 keys and 32 queries become tiles of P and dS. The second row tile is `next` elements behind the
 * first, and the second column tile of `turned` likewise `next_turned`. */
static void pair_gradients(uint16_t *weights, uint16_t *gradients, int64_t next, uint16_t *turned, int64_t next_turned,
                           const float *scores, const float *products, const struct gradient_state *states,
                           __m512 factor)
{
    uint16_t left[2 * SIDE], right[2 * SIDE];
    for (int n = 0; n < SIDE; n++) {
        left[2 * n] = (uint16_t)n, left[2 * n + 1] = (uint16_t)(2 * SIDE + n);
        right[2 * n] = (uint16_t)(SIDE + n), right[2 * n + 1] = (uint16_t)(3 * SIDE + n);
    }
    const __m512i take_left = _mm512_loadu_si512(left), take_right = _mm512_loadu_si512(right);
    for (int64_t key = 0; key < PAIR; key += 2) {
        __m512i rows[2];
        for (int64_t odd = 0; odd < 2; odd++) {
            const int64_t at = (key + odd) / SIDE * 2 * SIDE * SIDE + (key + odd) % SIDE * SIDE;
            __m512 weight[2], gradient[2];
            for (int half = 0; half < 2; half++) {
                const int64_t from = at + half * SIDE * SIDE;
                weight[half] = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + from), factor, states[half].base));
                gradient[half] =
                    _mm512_mul_ps(weight[half], _mm512_sub_ps(_mm512_loadu_ps(products + from), states[half].delta));
            }
            const int64_t to = (key + odd) / SIDE * next + (key + odd) % SIDE * STEP;
            rows[odd] = (__m512i)_mm512_cvtne2ps_pbh(gradient[1], gradient[0]);
            _mm512_storeu_si512(weights + to, (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
            _mm512_storeu_si512(gradients + to, rows[odd]);
        }
        _mm512_storeu_si512(turned + key * SIDE, _mm512_permutex2var_epi16(rows[0], take_left, rows[1]));
        _mm512_storeu_si512(turned + next_turned + key * SIDE, _mm512_permutex2var_epi16(rows[0], take_right, rows[1]));
    }
}

/* Sums of 32 lines after 32, `dim` wide, times a factor, as rows of bfloat16. */
static void store_sums(uint16_t *to, int64_t row, const float *sums, int64_t lines, int64_t dim, __m512 factor)
{
    for (int64_t line = 0; line < lines; line++)
        for (int64_t d = 0; d < dim; d += PAIR) {
            const float *const from = sums + line / PAIR * (PAIR * round_up(dim, PAIR)) + d / PAIR * SUMS +
                                      line % PAIR / SIDE * 2 * SIDE * SIDE + line % SIDE * SIDE;
            const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
            const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(from + SIDE * SIDE), factor);
            _mm512_mask_storeu_epi16(to + line * row + d, first_lanes_32(dim - d),
                                     (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
}

/* Of a key head. */
static void store_gradients(void *grad, const cuda_ops_attention_strides *strides, const float *sums,
                            const cuda_ops_attention *call, const cuda_ops_attention_sequence *s, int64_t b,
                            int64_t key_head, int64_t dim, double factor)
{
    uint16_t *const to = (uint16_t *)grad + b * strides->batch + key_head * strides->head + s->first_key * strides->row;
    store_sums(to, strides->row, sums, call->keys, dim, _mm512_set1_ps((float)factor));
}

/* Adds a times b, of `pairs` times 32 lines and `dim` columns, to sums. */
static void add_products(float *sums, const uint16_t *a, const uint16_t *b, int64_t pairs, int64_t dim, int64_t stream,
                         int64_t b_stream, int64_t steps)
{
    for (int64_t d = 0; d < dim; d += PAIR)
        for (int64_t pair = 0; pair < pairs; pair++)
            multiply_streams(false, true, dim - d > SIDE, sums + pair * (PAIR * round_up(dim, PAIR)) + d / PAIR * SUMS,
                             true, a + pair * 2 * stream, stream, b + d / SIDE * b_stream, b_stream, steps);
}

/* Queries [i, i + rows): writes their grad_query, and adds to the sums of grad_key and grad_value. */
static void backward_block(uint16_t *grad_query, const uint16_t *query, const uint16_t *grad_output,
                           const struct gradient_state *states, const struct backward_memory *memory,
                           const cuda_ops_attention *call, int64_t i, int64_t rows)
{
    const int64_t dim = call->head_dim, value_dim = call->value_dim;
    const int64_t steps = round_up(dim, STEP) / STEP, value_steps = round_up(value_dim, STEP) / STEP;
    const int64_t query_steps = round_up(rows, STEP) / STEP, along_queries = query_steps * TILE;
    const int64_t along_keys = KEYS / STEP * TILE, all_keys = round_up(call->keys, STEP) * SIDE;
    const int64_t tiles = PAIR * round_up(dim, PAIR), value_tiles = PAIR * round_up(value_dim, PAIR);
    const __m512 factor = _mm512_set1_ps((float)(call->scale * 1.44269504088896340736));
    pack_operand(CUDA_OPS_BFLOAT16, true, memory->query, query, call->query.row, 1, rows, dim);
    pack_operand(CUDA_OPS_BFLOAT16, true, memory->grad_output, grad_output, call->grad_output.row, 1, rows, value_dim);
    pack_operand(CUDA_OPS_BFLOAT16, true, memory->queries, query, 1, call->query.row, dim, rows);
    pack_operand(CUDA_OPS_BFLOAT16, true, memory->grad_outputs, grad_output, 1, call->grad_output.row, value_dim, rows);
    const int64_t start = cuda_ops_attention_first_key(call, i) / PAIR * PAIR;
    const int64_t last = cuda_ops_attention_last_key(call, i + rows - 1);
    for (int64_t j = start; j < last; j += KEYS) {
        const int64_t pairs = (min_i64(KEYS, last - j) + PAIR - 1) / PAIR;
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t r = 0; r < rows; r += PAIR) {
                const int64_t first = j + pair * PAIR, here = min_i64(PAIR, rows - r);
                uint16_t *const weights = memory->weights + pair * 2 * along_queries + r / STEP * TILE;
                uint16_t *const gradients = memory->gradients + pair * 2 * along_queries + r / STEP * TILE;
                uint16_t *const turned = memory->turned + r / SIDE * along_keys + pair * TILE;
                if (cuda_ops_attention_last_key(call, i + r + here - 1) <= first ||
                    cuda_ops_attention_first_key(call, i + r) >= first + PAIR) { /* nothing is seen */
                    for (int t = 0; t < 2; t++) {
                        memset(weights + t * along_queries, 0, TILE * sizeof(uint16_t));
                        memset(gradients + t * along_queries, 0, TILE * sizeof(uint16_t));
                        memset(turned + t * along_keys, 0, TILE * sizeof(uint16_t));
                    }
                    continue;
                }
                float scores[SUMS] __attribute__((aligned(64))), products[SUMS] __attribute__((aligned(64)));
                const bool lower = call->keys - first > SIDE, right = here > SIDE;
                multiply_streams(false, lower, right, scores, false, memory->key + first / SIDE * steps * TILE,
                                 steps * TILE, memory->query + r / SIDE * steps * TILE, steps * TILE, steps);
                multiply_streams(false, lower, right, products, false,
                                 memory->value + first / SIDE * value_steps * TILE, value_steps * TILE,
                                 memory->grad_output + r / SIDE * value_steps * TILE, value_steps * TILE, value_steps);
                if (!all_seen(call, i + r, here, first, PAIR))
                    hide_scores(scores, call, i + r, first);
                pair_gradients(weights, gradients, along_queries, turned, along_keys, scores, products,
                               states + r / SIDE, factor);
            }
        add_products(memory->grad_value + j / PAIR * value_tiles, memory->weights, memory->grad_outputs, pairs,
                     value_dim, along_queries, along_queries, query_steps);
        add_products(memory->grad_key + j / PAIR * tiles, memory->gradients, memory->queries, pairs, dim, along_queries,
                     along_queries, query_steps);
        for (int64_t r = 0; r < rows; r += PAIR)
            for (int64_t d = 0; d < dim; d += PAIR)
                multiply_streams(false, dim - d > SIDE, true, memory->grad_query + r / PAIR * tiles + d / PAIR * SUMS,
                                 j > start, memory->turned_key + d / SIDE * all_keys + j / STEP * TILE, all_keys,
                                 memory->turned + r / SIDE * along_keys, along_keys, pairs);
    }
    for (int64_t r = 0; r < rows; r += SIDE) {
        float *const sums = memory->grad_query + r / PAIR * tiles;
        if (start >= last)
            memset(sums, 0, (size_t)tiles * sizeof(float));
        scale_half(sums, r / SIDE % 2, dim, _mm512_set1_ps((float)call->scale));
        store_output(grad_query + r * call->grad_query.row, call->grad_query.row, sums, r / SIDE % 2,
                     min_i64(SIDE, rows - r), dim, CUDA_OPS_BFLOAT16);
    }
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
    if (!attention_is_sound(call, false) || !cuda_ops_attention_takes_halves_cpu(call, false, false, dtype))
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

int64_t cuda_ops_attention_halves_backward_workspace_cpu(const cuda_ops_attention *call)
{
    return plan_backward(NULL, NULL, call);
}

cuda_ops_status cuda_ops_attention_halves_backward_cpu(void *grad_query, void *grad_key, void *grad_value,
                                                       const void *grad_output, const void *grad_logsumexp,
                                                       const void *query, const void *key, const void *value,
                                                       const void *output, const void *logsumexp, void *workspace,
                                                       const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                       cuda_ops_dtype dtype)
{
    if (!attention_is_sound(call, true) || !cuda_ops_attention_takes_halves_cpu(call, true, false, dtype))
        return CUDA_OPS_INVALID_ARGUMENT;
    struct backward_memory memory;
    plan_backward(&memory, workspace, call);
    struct tile_configuration before;
    configure_tiles(&before);
    for (int64_t part = begin; part < end; part++) {
        const int64_t b = part / call->key_heads, key_head = part % call->key_heads;
        const int64_t group = call->heads / call->key_heads;
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(call, b);
        const cuda_ops_attention one = call_of_sequence(call, &s);
        const uint16_t *const k =
            (const uint16_t *)key + b * one.key.batch + key_head * one.key.head + s.first_key * one.key.row;
        const uint16_t *const v =
            (const uint16_t *)value + b * one.value.batch + key_head * one.value.head + s.first_key * one.value.row;
        const int64_t keys = round_up(one.keys, PAIR);
        pack_operand(dtype, false, memory.key, k, one.key.row, 1, one.keys, one.head_dim);
        pack_operand(dtype, false, memory.turned_key, k, 1, one.key.row, one.head_dim, one.keys);
        pack_operand(dtype, false, memory.value, v, one.value.row, 1, one.keys, one.value_dim);
        memset(memory.grad_key, 0, (size_t)(keys * round_up(one.head_dim, PAIR)) * sizeof(float));
        memset(memory.grad_value, 0, (size_t)(keys * round_up(one.value_dim, PAIR)) * sizeof(float));
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
            const int64_t first = first_row_of(call, &s, b, head);
            const float *const sums = (const float *)logsumexp + first;
            const float *const grad_sums = grad_logsumexp ? (const float *)grad_logsumexp + first : NULL;
            for (int64_t i = 0; i < one.queries; i += QUERIES) {
                const int64_t rows = min_i64(QUERIES, one.queries - i), row = s.first_query + i;
                const uint16_t *const g = (const uint16_t *)grad_output + b * one.grad_output.batch +
                                          head * one.grad_output.head + row * one.grad_output.row;
                const uint16_t *const o =
                    (const uint16_t *)output + b * one.output.batch + head * one.output.head + row * one.output.row;
                struct gradient_state states[QUERIES / SIDE];
                begin_gradients(states, g, one.grad_output.row, o, one.output.row, sums + i,
                                grad_sums ? grad_sums + i : NULL, rows, one.value_dim);
                backward_block((uint16_t *)grad_query + b * one.grad_query.batch + head * one.grad_query.head +
                                   row * one.grad_query.row,
                               (const uint16_t *)query + b * one.query.batch + head * one.query.head +
                                   row * one.query.row,
                               g, states, &memory, &one, i, rows);
            }
        }
        store_gradients(grad_key, &one.grad_key, memory.grad_key, &one, &s, b, key_head, one.head_dim, one.scale);
        store_gradients(grad_value, &one.grad_value, memory.grad_value, &one, &s, b, key_head, one.value_dim, 1.0);
    }
    release_tiles(&before);
    return CUDA_OPS_SUCCESS;
}

#else

int64_t cuda_ops_attention_halves_backward_workspace_cpu(const cuda_ops_attention *call)
{
    (void)call;
    return 0;
}

cuda_ops_status cuda_ops_attention_halves_backward_cpu(void *grad_query, void *grad_key, void *grad_value,
                                                       const void *grad_output, const void *grad_logsumexp,
                                                       const void *query, const void *key, const void *value,
                                                       const void *output, const void *logsumexp, void *workspace,
                                                       const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                       cuda_ops_dtype dtype)
{
    (void)grad_query, (void)grad_key, (void)grad_value, (void)grad_output, (void)grad_logsumexp, (void)query;
    (void)key, (void)value, (void)output, (void)logsumexp, (void)workspace, (void)call, (void)begin, (void)end;
    (void)dtype;
    return CUDA_OPS_INVALID_ARGUMENT;
}

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
