// attention, float32 path, backward: dV = (D P)^T dO, dP = D (dO V^T), dS = P (dP - delta), dQ = scale dS K,
// dK = scale dS^T Q. A block has 64 keys (128 of rows of more than 64 elements) and their values in shared memory, and
// walks over the tiles of 64 queries that see them, last ones first; P and dS are made once, in 8 x 4 elements a thread,
// and go through shared memory to the other three products. The gradients of keys and values stay in registers. Those
// of queries are added up in device memory by one block after the other, in the order of their keys, so that results
// repeat bit by bit: a block waits for the one before alone, which has been handed out before it. The next tile's
// queries and grad_output come while what is left of this one needs neither.
// Bound by the issue of instructions: of a product's 140 (144 of 272 for 8 x 8), 128 (256) are multiply-adds.
#include "attention/float32/bits.cuh"
#include "attention/float32/block_of_keys.cuh"
#include "attention/float32/float32.h"
#include "attention/float32/tiles.cuh"
#include "attention/tile_scores.cuh"
#include "common/aligned_vector.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/red_global.cuh"

static constexpr int QUERIES = FLOAT32_QUERIES;
static constexpr float LOG2_E = 1.44269504f;

template <int D>
struct BackwardShape {
    static constexpr int KEYS = D == 64 ? 64 : 128, THREADS = KEYS * 2, RESIDENT = D == 64 ? 2 : 1;
    static constexpr int OF_KEYS = tile_elements<D>(KEYS), OF_QUERIES = tile_elements<D>(QUERIES);
    static constexpr int WEIGHTS = tile_elements<64>(KEYS);
    // P and dS lie in one place, one after the other, where there is no room for two.
    static constexpr bool ONE_PLACE = D == 128;
    static constexpr int BYTES =
        (2 * OF_KEYS + 2 * OF_QUERIES + (ONE_PLACE ? 1 : 2) * WEIGHTS + 3 * QUERIES) * (int)sizeof(float);
};

__device__ __forceinline__ void store_weights(float *to, const float (&tile)[ROWS][4])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        *reinterpret_cast<float4 *>(to + r * 64) = make_float4(tile[r][0], tile[r][1], tile[r][2], tile[r][3]);
}

// grad_key or grad_value: this thread's rows, of which so many exist, and every 64 columns four from `column` on.
template <int D>
__device__ __forceinline__ void store_gradient(float *to, int64_t stride, int64_t rows, int column, int64_t elements,
                                               const float (&sum)[ROWS][D / 64][4], float factor)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int f = 0; f < D / 64; f++)
            if (r < rows && column + 64 * f < elements)
                store_vector(
                    reinterpret_cast<vector16<float> *>(to + r * stride + column + 64 * f),
                    {{sum[r][f][0] * factor, sum[r][f][1] * factor, sum[r][f][2] * factor, sum[r][f][3] * factor}});
}

// P and dS, without their factors, of the products of keys and queries and of values and grad_output. `simple`
// scores are in powers of 2. row, column: the thread's first.
template <int KEYS>
__device__ __forceinline__ void weights_and_gradients(float (&weight)[ROWS][4], float (&gradient)[ROWS][4],
                                                      const AttentionScores<float> &scores, int64_t first_key, int row,
                                                      int64_t first_query, int column, const RowsOfWeights &rows,
                                                      bool simple)
{
    const cuda_ops_attention &p = scores.p;
    uint32_t kept = 0;
    float factor = 1;
    if (p.dropout > 0) {
        kept = kept_by_dropout<true, 0, 3>(p, scores.head_index, first_query + column, first_key + row,
                                           cuda_ops_philox_seed(p.philox), cuda_ops_philox_offset(p.philox));
        factor = (float)cuda_ops_attention_dropout_scale(p.dropout);
    }
    if (simple) {
        const float4 l = four_at(rows.logsumexp + column), d = four_at(rows.delta + column);
        const float logsumexp[4] = {l.x, l.y, l.z, l.w}, delta[4] = {d.x, d.y, d.z, d.w};
        const float scale = (float)(p.scale * 1.4426950408889634);
        const bool whole = sees_whole_tile(scores.s, first_query, QUERIES, first_key, KEYS);
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                weight[r][c] = __fmul_rn(weight[r][c], scale); // as forward has it
            if (!whole) {
                const SeenKeys seen(scores.s, first_query + column + c, first_key, KEYS, false);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    weight[r][c] = seen.has(row + r) ? weight[r][c] : -CUDART_INF_F;
            }
        }
        if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN) {
            const uint32_t shown = shown_by_mask<true>(scores, first_query + column, first_key + row);
#pragma unroll
            for (int e = 0; e < ROWS * 4; e++)
                weight[e / 4][e % 4] = shown >> e & 1 ? weight[e / 4][e % 4] : -CUDART_INF_F;
        }
        if (p.dropout > 0)
#pragma unroll
            for (int e = 0; e < ROWS * 4; e++)
                gradient[e / 4][e % 4] *= kept >> e & 1 ? factor : 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float base = logsumexp[c] * LOG2_E;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const bool seen = weight[r][c] != -CUDART_INF_F;
                weight[r][c] = seen ? ex2_approx_ftz(weight[r][c] - base) : 0.0f;
                gradient[r][c] = seen ? weight[r][c] * (gradient[r][c] - delta[c]) : 0.0f;
            }
        }
        if (p.dropout > 0)
#pragma unroll
            for (int e = 0; e < ROWS * 4; e++)
                weight[e / 4][e % 4] *= kept >> e & 1 ? factor : 0.0f;
        return;
    }
    // One after the other, so that what makes them stands once in the kernel.
    float weights[ROWS * 4], gradients[ROWS * 4];
#pragma unroll
    for (int e = 0; e < ROWS * 4; e++) {
        weights[e] = weight[e / 4][e % 4];
        gradients[e] = gradient[e / 4][e % 4];
    }
#pragma unroll 1
    for (int e = 0; e < ROWS * 4; e++) {
        const int at = column + e % 4;
        const RowOfWeights<float> of_query = {rows.logsumexp[at], rows.remainder[at], rows.delta[at]};
        const float dropout = !(p.dropout > 0) || kept >> e & 1 ? factor : 0.0f;
        gradient_of_score<float>(weights[e], gradients[e], scores, first_query + at, first_key + row + e / 4, of_query,
                                 dropout, (float *)nullptr, (RowSums<float> *)nullptr);
    }
#pragma unroll
    for (int e = 0; e < ROWS * 4; e++) {
        weight[e / 4][e % 4] = weights[e];
        gradient[e / 4][e % 4] = gradients[e];
    }
}

// The tiles of queries that see a block of keys: [begin, end).
struct TilesOfQueries {
    int64_t begin, end;
    __device__ TilesOfQueries(const cuda_ops_attention_sequence &s, int64_t first_key, int keys)
    {
        const int64_t last = first_key + keys < s.keys ? first_key + keys - 1 : s.keys - 1;
        begin = cuda_ops_attention_sequence_first_query(&s, first_key) / QUERIES;
        end = ceil_div(cuda_ops_attention_sequence_last_query(&s, last), QUERIES);
    }
};

template <int D>
__global__ void __launch_bounds__(BackwardShape<D>::THREADS, BackwardShape<D>::RESIDENT)
    attention_float32_backward_kernel(const __grid_constant__ Float32Work work)
{
    typedef BackwardShape<D> Shape;
    constexpr int KEYS = Shape::KEYS, THREADS = Shape::THREADS;
    extern __shared__ __align__(16) float tiles[];
    float *const key_tile = tiles, *const value_tile = key_tile + Shape::OF_KEYS;
    float *const query_tile = value_tile + Shape::OF_KEYS, *const grad_tile = query_tile + Shape::OF_QUERIES;
    float *const weights = grad_tile + Shape::OF_QUERIES;
    float *const gradients = Shape::ONE_PLACE ? weights : weights + Shape::WEIGHTS;
    float *const end_of_tiles = gradients + Shape::WEIGHTS;
    const RowsOfWeights rows = {end_of_tiles, end_of_tiles + QUERIES, end_of_tiles + 2 * QUERIES};
    const cuda_ops_attention &p = work.p;

    const uint32_t number = take_number(work.handed_out);
    const int64_t block = number % work.blocks, head_index = number / work.blocks;
    const int64_t batch = head_index / p.key_heads, key_head = head_index % p.key_heads, first_key = block * KEYS;
    const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, batch);
    const int64_t keys = s.keys - first_key, group = p.heads / p.key_heads;
    if (keys <= 0)
        return; // of a sequence that is shorter than others
    const TilesOfQueries seen_by(s, first_key, KEYS), before(s, block > 0 ? first_key - KEYS : 0, KEYS);

    // This thread's rows of keys and columns of queries, its columns of grad_key and grad_value, and its rows (four, and
    // four 32 further) and columns of grad_query. A warp's lanes are 4 x 8.
    const int warp = (int)threadIdx.x / 32, lane_row = (int)threadIdx.x % 32 / 8, lane_column = (int)threadIdx.x % 8;
    const int row = (warp / 2 * 4 + lane_row) * ROWS, column = lane_column * 8 + warp % 2 * 4;
    const int result_column = warp % 2 * 32 + lane_column * 4;
    const int query_row = (warp % 2 * 4 + lane_row) * 4, query_column = warp / 2 * 32 + lane_column * 4;
    float *const own_weights = weights + row_at<64>(row), *const own_gradients = gradients + row_at<64>(row);
    const bool simple = has_simple_scores(p);

    const float *const key =
        rows_of<float>((const void *)work.key, p.key, batch, key_head) + (s.first_key + first_key) * p.key.row;
    const float *const value =
        rows_of<float>((const void *)work.value, p.value, batch, key_head) + (s.first_key + first_key) * p.value.row;
    const auto copy_queries = [&](int64_t head, int64_t first) {
        const int64_t there = s.queries - first, first_row = first_row_of(p, s, batch, head) + first;
        copy_tile<D, QUERIES, THREADS>(query_tile,
                                       rows_of<float>((const void *)work.query, p.query, batch, head) +
                                           (s.first_query + first) * p.query.row,
                                       p.query.row, there, p.head_dim);
        const int i = (int)threadIdx.x;
        if (i < QUERIES) {
            const int bytes = i < there ? 4 : 0;
            cp_async<4>(shared_address(rows.logsumexp + i), work.logsumexp + first_row + i, bytes);
            cp_async<4>(shared_address(rows.delta + i), work.delta + first_row + i, bytes);
            cp_async<4>(shared_address(rows.remainder + i), work.remainder + first_row + i, work.remainder ? bytes : 0);
        }
    };
    const auto copy_gradients = [&](int64_t head, int64_t first) {
        copy_tile<D, QUERIES, THREADS>(grad_tile,
                                       rows_of<float>((const void *)work.grad_output, p.grad_output, batch, head) +
                                           (s.first_query + first) * p.grad_output.row,
                                       p.grad_output.row, s.queries - first, p.value_dim);
    };

    float sum_key[ROWS][D / 64][4] = {}, sum_value[ROWS][D / 64][4] = {};
    const int64_t last_head = (key_head + 1) * group;
    int64_t head = key_head * group, tile = seen_by.end - 1;
    if (seen_by.begin < seen_by.end) {
        copy_tile<D, KEYS, THREADS>(key_tile, key, p.key.row, keys, p.head_dim);
        copy_tile<D, KEYS, THREADS>(value_tile, value, p.value.row, keys, p.value_dim);
        copy_queries(head, tile * QUERIES);
        copy_gradients(head, tile * QUERIES);
    } else {
        head = last_head;
    }
    uint32_t *turn = nullptr; // of the tile before, and what says that this block has added to it
    uint32_t added = 0;
    while (head < last_head) {
        const AttentionScores<float> scores(p, batch, head);
        const int64_t first = tile * QUERIES;
        const int64_t next_tile = tile > seen_by.begin ? tile - 1 : seen_by.end - 1;
        const int64_t next_head = tile > seen_by.begin ? head : head + 1;
        cp_async_wait_all();
        __syncthreads(); // the operands are there, the weights are read, and the tile before is added
        if (turn && threadIdx.x == 0)
            red_release_gpu_add(turn, added);

        float weight[ROWS][4] = {}, gradient[ROWS][4] = {};
        multiply_rows<D>(weight, key_tile + row_at<D>(row), query_tile + row_at<D>(column), (int)p.head_dim);
        multiply_rows<D>(gradient, value_tile + row_at<D>(row), grad_tile + row_at<D>(column), (int)p.value_dim);
        weights_and_gradients<KEYS>(weight, gradient, scores, first_key, row, first, column, rows, simple);
        store_weights(own_weights + column, weight);
        if (!Shape::ONE_PLACE)
            store_weights(own_gradients + column, gradient);
        __syncthreads(); // they are there
        multiply_weights<D>(sum_value, own_weights, grad_tile + result_column);
        __syncthreads(); // grad_output is read
        if (next_head < last_head)
            copy_gradients(next_head, next_tile * QUERIES);
        if (Shape::ONE_PLACE) {
            store_weights(own_gradients + column, gradient);
            __syncthreads();
        }
        multiply_weights<D>(sum_key, own_gradients, query_tile + result_column);
        __syncthreads(); // the queries are read
        if (next_head < last_head)
            copy_queries(next_head, next_tile * QUERIES);

        float sum[ROWS][4] = {};
        multiply_transposed<D, KEYS>(sum, gradients + query_row, key_tile + query_column);
        turn = work.turns + (batch * p.heads + head) * work.tiles + tile;
        const bool is_first = block == 0 || tile < before.begin || before.end <= tile;
        added = is_first ? (uint32_t)block + 1 : 1;
        if (!is_first)
            wait_for_turn(turn, block);
        float *const grad_query =
            rows_of<float>((void *)work.grad_query, p.grad_query, batch, head) + s.first_query * p.grad_query.row;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int64_t i = first + query_row + r / 4 * 32 + r % 4;
            const float scale = (float)p.scale;
            if (i < s.queries && query_column < p.head_dim)
                red_global_add_v4_f32(
                    grad_query + i * p.grad_query.row + query_column,
                    make_float4(sum[r][0] * scale, sum[r][1] * scale, sum[r][2] * scale, sum[r][3] * scale));
        }
        head = next_head, tile = next_tile;
    }
    if (turn) {
        __syncthreads();
        if (threadIdx.x == 0)
            red_release_gpu_add(turn, added);
    }
    store_gradient<D>(rows_of<float>((void *)work.grad_key, p.grad_key, batch, key_head) +
                          (s.first_key + first_key + row) * p.grad_key.row,
                      p.grad_key.row, keys - row, result_column, p.head_dim, sum_key, (float)p.scale);
    store_gradient<D>(rows_of<float>((void *)work.grad_value, p.grad_value, batch, key_head) +
                          (s.first_key + first_key + row) * p.grad_value.row,
                      p.grad_value.row, keys - row, result_column, p.value_dim, sum_value, 1.0f);
}

// Before: delta, gradients of queries of 0, and no turn taken. A warp a row.
static constexpr int PREPARE_THREADS = 256;

__global__ void __launch_bounds__(PREPARE_THREADS)
    attention_float32_prepare_kernel(const __grid_constant__ Float32Work work)
{
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t queries = p.sequences.query_starts ? p.sequences.query_rows : p.queries;
    if (work.handed_out && global_thread_index() == 0)
        *work.handed_out = 0;
    for (int64_t at = global_thread_index(); at < p.batch * p.heads * work.tiles; at += global_thread_count())
        work.turns[at] = 0;
    for (int64_t at = global_thread_index() / WARP_SIZE; at < work.rows; at += global_thread_count() / WARP_SIZE) {
        const int64_t i = at % queries, head = at / queries % p.heads, batch = at / queries / p.heads;
        const float *const grad_output =
            rows_of<float>((const void *)work.grad_output, p.grad_output, batch, head) + i * p.grad_output.row;
        const float *const output = rows_of<float>((const void *)work.output, p.output, batch, head) + i * p.output.row;
        float *const grad_query =
            rows_of<float>((void *)work.grad_query, p.grad_query, batch, head) + i * p.grad_query.row;
        float sum = 0;
        const int d = lane * 4;
        if (d < p.value_dim) {
            const float4 g = four_at(grad_output + d), o = four_at(output + d);
            sum = g.x * o.x + g.y * o.y + g.z * o.z + g.w * o.w;
        }
        if (d < p.head_dim)
            *reinterpret_cast<float4 *>(grad_query + d) = make_float4(0, 0, 0, 0);
        sum = warp_sum(sum);
        if (lane == 0)
            work.delta[at] = sum - (work.grad_logsumexp ? work.grad_logsumexp[at] : 0.0f);
    }
}

// Where a mask is added: what of logsumexp a float does not hold (attention.h), log of the sum of
// exp(score - logsumexp), of rows whose logsumexp is large, and 0 of all others. A warp a row, since few are: those all
// of whose keys a mask of the lowest float hides.
__global__ void __launch_bounds__(PREPARE_THREADS)
    attention_float32_remainder_kernel(const __grid_constant__ Float32Work work)
{
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t at = global_thread_index() / WARP_SIZE; at < work.rows; at += global_thread_count() / WARP_SIZE) {
        const float logsumexp = work.logsumexp[at];
        float sum = 1;
        if (is_large_logsumexp(logsumexp)) {
            const int64_t i = at % p.queries, head = at / p.queries % p.heads, batch = at / p.queries / p.heads;
            const AttentionScores<float> scores(p, batch, head);
            const float *const query = rows_of<float>((const void *)work.query, p.query, batch, head) + i * p.query.row;
            const float *const key =
                rows_of<float>((const void *)work.key, p.key, batch, head / (p.heads / p.key_heads));
            const int64_t end = cuda_ops_attention_sequence_last_key(&scores.s, i);
            sum = 0;
            for (int64_t j = cuda_ops_attention_sequence_first_key(&scores.s, i) + lane; j < end; j += WARP_SIZE) {
                float product = 0, cap;
                for (int64_t d = 0; d < p.head_dim; d += 4) {
                    const float4 q = four_at(query + d), k = four_at(key + j * p.key.row + d);
                    product += q.x * k.x;
                    product += q.y * k.y;
                    product += q.z * k.z;
                    product += q.w * k.w;
                }
                const float score = scores.score(product * (float)p.scale, i, j, cap);
                sum += score != -CUDART_INF_F ? exp(score - logsumexp) : 0.0f;
            }
            sum = warp_sum(sum);
        }
        if (lane == 0)
            work.remainder[at] = log(sum);
    }
}

int attention_float32_backward_bytes(bool is_wide)
{
    return is_wide ? BackwardShape<128>::BYTES : BackwardShape<64>::BYTES;
}

template <int D>
static cuda_ops_status launch(const Float32Work &work, cudaStream_t stream)
{
    typedef BackwardShape<D> Shape;
    allow_shared_memory(attention_float32_backward_kernel<D>, Shape::BYTES);
    const int64_t blocks = work.p.batch * work.p.key_heads * work.blocks;
    attention_float32_backward_kernel<D><<<(unsigned int)blocks, Shape::THREADS, Shape::BYTES, stream>>>(work);
    return launch_status();
}

cuda_ops_status attention_float32_prepare(const Float32Work &work, cudaStream_t stream)
{
    attention_float32_prepare_kernel<<<clamp_grid(ceil_div(work.rows, PREPARE_THREADS / WARP_SIZE)), PREPARE_THREADS, 0,
                                       stream>>>(work);
    if (work.remainder)
        attention_float32_remainder_kernel<<<clamp_grid(ceil_div(work.rows, PREPARE_THREADS / WARP_SIZE)),
                                             PREPARE_THREADS, 0, stream>>>(work);
    return launch_status();
}

cuda_ops_status attention_float32_backward(const Float32Work &work, bool is_wide, cudaStream_t stream)
{
    return is_wide ? launch<128>(work, stream) : launch<64>(work, stream);
}
