// attention, mma_3xtf32 path, backward: dV = (D P)^T dO, dP = D (dO V^T), dS = P (dP - delta), dQ = scale dS K,
// dK = scale dS^T Q. As in the float32 path a block has 64 keys and their values in shared memory and walks over the
// tiles of 64 queries that see them, last ones first; P and dS are made once, transposed, sixteen keys a warp, stay in
// registers for the gradients of values and keys, and dS goes through shared memory to that of queries, which is added
// up in device memory by one block after the other, in the order of their keys, so that results repeat bit by bit: a
// block waits for the one before alone, which has been handed out before it. The next tile comes while the last product
// is made of dS and keys.
#include "attention/float32/block_of_keys.cuh"
#include "attention/fragments.cuh"
#include "attention/mma_3xtf32/mma_3xtf32.h"
#include "attention/mma_3xtf32/tiles.cuh"
#include "attention/tile_scores.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/red_global.cuh"

static constexpr int D = MMA_3XTF32_MOST_COLUMNS, QUERIES = FLOAT32_QUERIES, KEYS = TILE;
static constexpr int BYTES = (5 * TILE * D + 3 * QUERIES) * (int)sizeof(float);
static constexpr float LOG2_E = 1.44269504f;
static_assert(D == TILE && QUERIES == TILE, "dS has a tile's rows");

// A call: inlined for each of a thread's weights, it would be most of the kernel.
[[maybe_unused]] static __device__ __noinline__ float2 general_weight(float weight, float gradient,
                                                                      const AttentionScores<float> &scores, int64_t i,
                                                                      int64_t j, const RowOfWeights<float> &row,
                                                                      float dropout)
{
    gradient_of_score<float>(weight, gradient, scores, i, j, row, dropout, (float *)nullptr, (RowSums<float> *)nullptr);
    return make_float2(weight, gradient);
}

// P and dS, without their factors, of the products of keys and queries and of values and grad_output: 16 keys from
// first_key on, by the tile of queries from first_query on.
__device__ __forceinline__ void weights_and_gradients(float (&weight)[8][4], float (&gradient)[8][4],
                                                      const AttentionScores<float> &scores, int64_t first_key,
                                                      int64_t first_query, const RowsOfWeights &rows,
                                                      const Mma3xTf32Work &work, bool whole, const DropoutSeed &seed)
{
    const DropoutWork &dropout = work.dropout;
    const cuda_ops_attention &p = scores.p;
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const bool drops = p.dropout > 0;
    const uint32_t dropped =
        drops ? dropped_weights<true>(dropout, seed, scores.head_index, p.queries, first_query, first_key) : 0;
    if (work.simple || work.masked) {
        const float scale = (float)(work.simple ? p.scale * 1.4426950408889634 : p.scale);
        const float unit = work.simple ? 1.0f : LOG2_E, unit_of_base = work.simple ? LOG2_E : 1.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int f = 0; f < 4; f++)
                weight[n][f] = __fmul_rn(weight[n][f], scale); // as forward has it
        if (work.masked)
            add_mask<true>(weight, scores, first_query, first_key);
        if (!whole)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t j = first_key + g + 8 * half;
                SeenColumns seen = {0, 0};
                if (j < scores.s.keys)
                    seen = seen_columns(cuda_ops_attention_sequence_first_query(&scores.s, j),
                                        cuda_ops_attention_sequence_last_query(&scores.s, j), first_query);
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int f = 2 * half; f < 2 * half + 2; f++)
                        weight[n][f] = seen.has(8 * n + 2 * t + f % 2) ? weight[n][f] : -CUDART_INF_F;
            }
        if (drops)
            drop_weights(gradient, dropped, dropout.scale);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 l = *reinterpret_cast<const float2 *>(rows.logsumexp + 8 * n + 2 * t);
            const float2 d = *reinterpret_cast<const float2 *>(rows.delta + 8 * n + 2 * t);
            const float2 r = *reinterpret_cast<const float2 *>(rows.remainder + 8 * n + 2 * t);
            const float base[2] = {l.x * unit_of_base, l.y * unit_of_base}, delta[2] = {d.x, d.y}, rest[2] = {r.x, r.y};
            const int64_t i = first_query + 8 * n + 2 * t;
            const bool exists[2] = {i < scores.s.queries, i + 1 < scores.s.queries};
#pragma unroll
            for (int f = 0; f < 4; f++) {
                const bool seen = weight[n][f] != -CUDART_INF_F && exists[f % 2];
                weight[n][f] = seen ? ex2_approx_ftz((weight[n][f] - base[f % 2] - rest[f % 2]) * unit) : 0.0f;
                gradient[n][f] = seen ? weight[n][f] * (gradient[n][f] - delta[f % 2]) : 0.0f;
            }
        }
        if (drops)
            drop_weights(weight, dropped, dropout.scale);
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const int at = 8 * n + 2 * t + f % 2;
            const RowOfWeights<float> row = {rows.logsumexp[at], rows.remainder[at], rows.delta[at]};
            const float factor = !drops ? 1.0f : dropped >> (4 * n + f) & 1 ? 0.0f : dropout.scale;
            const float2 made = general_weight(weight[n][f], gradient[n][f], scores, first_query + at,
                                               first_key + g + f / 2 * 8, row, factor);
            weight[n][f] = made.x, gradient[n][f] = made.y;
        }
}

// dS in shared memory: a key's row of 64 queries, whose vectors of 16 bytes are permuted, so that pairs of four
// neighbouring rows, as they are written, and of four that are two apart, as they are read, are in banks of their own.
__device__ __forceinline__ int permuted_gradient(int key, int four)
{
    return four ^ ((key >> 1 & 1) << 1 | ((key ^ key >> 2) & 1) << 2);
}
__device__ __forceinline__ float2 *gradient_at(float *tile, int key, int query)
{
    return reinterpret_cast<float2 *>(tile + key * QUERIES + 4 * permuted_gradient(key, query / 4) + query % 4);
}

// The tiles of queries that see a block of keys: [begin, end).
struct TilesOfQueries {
    int64_t begin, end;
    __device__ TilesOfQueries(const cuda_ops_attention_sequence &s, int64_t first_key)
    {
        const int64_t last = first_key + KEYS < s.keys ? first_key + KEYS - 1 : s.keys - 1;
        begin = cuda_ops_attention_sequence_first_query(&s, first_key) / QUERIES;
        end = ceil_div(cuda_ops_attention_sequence_last_query(&s, last), QUERIES);
    }
};

__global__ void __launch_bounds__(THREADS, 2)
    attention_mma_3xtf32_backward_kernel(const __grid_constant__ Mma3xTf32Work work)
{
    extern __shared__ __align__(16) float tiles[];
    float *const key_tile = tiles, *const value_tile = tiles + TILE * D, *const query_tile = tiles + 2 * TILE * D;
    float *const grad_tile = tiles + 3 * TILE * D, *const gradients = tiles + 4 * TILE * D;
    float *const end_of_tiles = tiles + 5 * TILE * D;
    const RowsOfWeights rows = {end_of_tiles, end_of_tiles + QUERIES, end_of_tiles + 2 * QUERIES};
    const cuda_ops_attention &p = work.p;

    const uint32_t number = take_number(work.handed_out);
    const int64_t block = number % work.blocks, head_index = number / work.blocks;
    const int64_t batch = head_index / p.key_heads, key_head = head_index % p.key_heads, first_key = block * KEYS;
    const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, batch);
    const int64_t keys = s.keys - first_key, group = p.heads / p.key_heads;
    if (keys <= 0)
        return; // of a sequence that is shorter than others
    const TilesOfQueries seen_by(s, first_key), before(s, block > 0 ? first_key - KEYS : 0);
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int row = (int)threadIdx.x / WARP_SIZE * 16; // the warp's first key, and its first query of dQ
    const DropoutSeed seed(work.dropout.philox);

    const auto copy_queries = [&](int64_t head, int64_t first) {
        const int64_t there = s.queries - first, first_row = first_row_of(p, s, batch, head) + first;
        copy_tile<D>(query_tile,
                     rows_of<float>((const void *)work.query, p.query, batch, head) +
                         (s.first_query + first) * p.query.row,
                     p.query.row, there, p.head_dim);
        copy_tile<D>(grad_tile,
                     rows_of<float>((const void *)work.grad_output, p.grad_output, batch, head) +
                         (s.first_query + first) * p.grad_output.row,
                     p.grad_output.row, there, p.value_dim);
        const int i = (int)threadIdx.x;
        if (i < QUERIES) {
            const int bytes = i < there ? 4 : 0;
            const int64_t at = first_row + (i < there ? i : 0);
            cp_async<4>(shared_address(rows.logsumexp + i), work.logsumexp + at, bytes);
            cp_async<4>(shared_address(rows.delta + i), work.delta + at, bytes);
            cp_async<4>(shared_address(rows.remainder + i), (work.remainder ? work.remainder : work.delta) + at,
                        work.remainder ? bytes : 0);
        }
    };

    RowSums16<D> sum_key = {}, sum_value = {};
    const float one[2] = {1.0f, 1.0f}, scale[2] = {(float)p.scale, (float)p.scale};
    const int64_t last_head = (key_head + 1) * group;
    int64_t head = key_head * group, tile = seen_by.end - 1;
    if (seen_by.begin < seen_by.end) {
        copy_tile<D>(key_tile,
                     rows_of<float>((const void *)work.key, p.key, batch, key_head) +
                         (s.first_key + first_key) * p.key.row,
                     p.key.row, keys, p.head_dim);
        copy_tile<D>(value_tile,
                     rows_of<float>((const void *)work.value, p.value, batch, key_head) +
                         (s.first_key + first_key) * p.value.row,
                     p.value.row, keys, p.value_dim);
        copy_queries(head, tile * QUERIES);
    } else {
        head = last_head;
    }
    uint32_t *turn = nullptr; // of the tile before, and what says that this block has added to it
    uint32_t added = 0;
    while (head < last_head) {
        const int64_t first = tile * QUERIES;
        const int64_t next_tile = tile > seen_by.begin ? tile - 1 : seen_by.end - 1;
        const int64_t next_head = tile > seen_by.begin ? head : head + 1;
        cp_async_wait_all();
        __syncthreads(); // the operands are there, dS has been read, and the tile before is added
        if (turn && threadIdx.x == 0)
            red_release_gpu_add(turn, added);

        {
            float weight[8][4], gradient[8][4];
            multiply_rows<D, true, false>(weight, key_tile + row * D, query_tile, (int)p.head_dim);
            multiply_rows<D, false, true>(gradient, value_tile + row * D, grad_tile, (int)p.value_dim);
            const AttentionScores<float> scores(p, batch, head);
            weights_and_gradients(weight, gradient, scores, first_key + row, first, rows, work,
                                  sees_all(s, first, QUERIES, first_key), seed);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                *gradient_at(gradients, row + g, 8 * n + 2 * t) = make_float2(gradient[n][0], gradient[n][1]);
                *gradient_at(gradients, row + g + 8, 8 * n + 2 * t) = make_float2(gradient[n][2], gradient[n][3]);
            }
            multiply_weights<D>(sum_value, weight, grad_tile, one);
            multiply_weights<D>(sum_key, gradient, query_tile, one);
        }
        __syncthreads(); // dS is there, and the tile is read
        if (next_head < last_head)
            copy_queries(next_head, next_tile * QUERIES);

        // The left operand's rows g and g + 8 are queries 2 g and 2 g + 1: pairs.
        float left[8][4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float2 even = *gradient_at(gradients, 8 * k + 2 * t, row + 2 * g);
            const float2 odd = *gradient_at(gradients, 8 * k + 2 * t + 1, row + 2 * g);
            left[k][0] = even.x, left[k][1] = odd.x, left[k][2] = even.y, left[k][3] = odd.y;
        }
        RowSums16<D> sum = {};
        multiply_weights<D>(sum, left, key_tile, one);
        turn = work.turns + (batch * p.heads + head) * work.tiles + tile;
        const bool is_first = block == 0 || tile < before.begin || before.end <= tile;
        added = is_first ? (uint32_t)block + 1 : 1;
        if (!is_first)
            wait_for_turn(turn, block);
        float *const grad_query =
            rows_of<float>((void *)work.grad_query, p.grad_query, batch, head) + s.first_query * p.grad_query.row;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t i = first + row + 2 * g + r;
            if (i < s.queries)
#pragma unroll
                for (int h = 0; h < D / 32; h++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const float4 &v = sum.of[h][r][j];
                        if (column_of(h, j) < p.head_dim)
                            red_global_add_v4_f32(
                                grad_query + i * p.grad_query.row + column_of(h, j),
                                make_float4(v.x * scale[0], v.y * scale[0], v.z * scale[0], v.w * scale[0]));
                    }
        }
        head = next_head, tile = next_tile;
    }
    if (turn) {
        __syncthreads();
        if (threadIdx.x == 0)
            red_release_gpu_add(turn, added);
    }
    store_rows<D>(rows_of<float>((void *)work.grad_key, p.grad_key, batch, key_head) +
                      (s.first_key + first_key) * p.grad_key.row,
                  p.grad_key.row, row + g, keys, p.head_dim, sum_key, scale);
    store_rows<D>(rows_of<float>((void *)work.grad_value, p.grad_value, batch, key_head) +
                      (s.first_key + first_key) * p.grad_value.row,
                  p.grad_value.row, row + g, keys, p.value_dim, sum_value, one);
}

int attention_mma_3xtf32_backward_bytes()
{
    return BYTES;
}

cuda_ops_status attention_mma_3xtf32_backward(const Mma3xTf32Work &work, cudaStream_t stream)
{
    allow_shared_memory(attention_mma_3xtf32_backward_kernel, BYTES);
    const int64_t blocks = work.p.batch * work.p.key_heads * work.blocks;
    attention_mma_3xtf32_backward_kernel<<<(unsigned int)blocks, THREADS, BYTES, stream>>>(work);
    return launch_status();
}
