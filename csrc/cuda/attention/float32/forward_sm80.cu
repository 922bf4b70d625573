// attention, float32 path, forward: a block of 128 threads has 64 queries, and walks over tiles of 64 keys; a thread has
// 8 x 4 scores, and 8 x 4 or 8 x 8 elements of the result. Keys come while the values are multiplied with, and values
// while the keys are. The sixteen threads that share rows are of one warp: weights need no barrier.
// Bound by the issue of instructions: of a product's 140 (144 of 272 for 8 x 8), 128 (256) are multiply-adds.
#include "attention/float32/bits.cuh"
#include "attention/float32/float32.h"
#include "attention/float32/tiles.cuh"
#include "attention/tile_scores.cuh"
#include "common/aligned_vector.cuh"
#include "ptx/arithmetic.cuh"

static constexpr int QUERIES = FLOAT32_QUERIES, KEYS = 64, THREADS = 128;
static constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

template <int D>
struct ForwardShape {
    static constexpr int TILE = tile_elements<D>(64);
    static constexpr int BYTES = (3 * TILE + tile_elements<64>(64)) * (int)sizeof(float);
    static constexpr int RESIDENT = D == 64 ? 3 : 2;
};

// The sixteen threads that share rows.
__device__ __forceinline__ float max_over_row(float value)
{
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}
__device__ __forceinline__ float sum_over_row(float value)
{
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

template <int D>
__global__ void __launch_bounds__(THREADS, ForwardShape<D>::RESIDENT)
    attention_float32_forward_kernel(const __grid_constant__ Float32Work work)
{
    constexpr int FOURS = D / 64, TILE = ForwardShape<D>::TILE;
    extern __shared__ __align__(16) float tiles[];
    float *const query_tile = tiles, *const key_tile = tiles + TILE, *const value_tile = tiles + 2 * TILE;
    float *const weights = tiles + 3 * TILE;
    const cuda_ops_attention &p = work.p;
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    if (work.state && blockIdx.x == 0 && threadIdx.x == 0) {
        work.state[0] = (int64_t)seed;
        work.state[1] = (int64_t)offset;
    }
    // The last queries come first: where a mask is causal, they have the most keys.
    const int64_t head_index = blockIdx.x / work.tiles, batch = head_index / p.heads, head = head_index % p.heads;
    const int64_t first = (work.tiles - 1 - blockIdx.x % work.tiles) * QUERIES;
    const AttentionScores<float> scores(p, batch, head);
    const cuda_ops_attention_sequence &s = scores.s;
    const int64_t key_head = head / (p.heads / p.key_heads), queries = s.queries - first;
    if (queries <= 0)
        return; // of a sequence that is shorter than others
    const float *const query =
        rows_of<float>((const void *)work.query, p.query, batch, head) + (s.first_query + first) * p.query.row;
    const float *const key = rows_of<float>((const void *)work.key, p.key, batch, key_head) + s.first_key * p.key.row;
    const float *const value =
        rows_of<float>((const void *)work.value, p.value, batch, key_head) + s.first_key * p.value.row;
    const int64_t begin = cuda_ops_attention_sequence_first_key(&s, first) / KEYS * KEYS;
    const int64_t end = cuda_ops_attention_sequence_last_key(&s, first + (queries < QUERIES ? queries : QUERIES) - 1);
    const auto copy_keys = [&](int64_t j) {
        if (j < end)
            copy_tile<D, KEYS, THREADS>(key_tile, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim);
        cp_async_commit_group();
    };
    const auto copy_values = [&](int64_t j) {
        if (j < end)
            copy_tile<D, KEYS, THREADS>(value_tile, value + j * p.value.row, p.value.row, s.keys - j, p.value_dim);
        cp_async_commit_group();
    };

    // Rows 8 x to 8 x + 7; of the keys four, the others of these eight being the thread's 8 lanes further.
    const int row = (int)threadIdx.x / 16 * ROWS, lane = (int)threadIdx.x % 16, column = lane % 8 * 8 + lane / 8 * 4;
    float *const weight_rows = weights + row_at<64>(row);
    // Products are scaled for exponentials of base 2; what else makes scores leaves them as they are until their largest
    // is subtracted, since a mask may have the lowest float.
    const bool simple = has_simple_scores(p);
    const float scale = simple ? (float)(p.scale * 1.4426950408889634) : (float)p.scale, unit = simple ? 1.0f : LOG2_E;
    float sum[ROWS][FOURS][4] = {}, maximum[ROWS], total[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        maximum[r] = -CUDART_INF_F;
    copy_tile<D, QUERIES, THREADS>(query_tile, query, p.query.row, queries, p.head_dim);
    copy_keys(begin);
    copy_values(begin);
    for (int64_t j = begin; j < end; j += KEYS) {
        cp_async_wait_group<1>();
        __syncthreads(); // the keys are there
        float tile[ROWS][4] = {};
        multiply_rows<D>(tile, query_tile + row_at<D>(row), key_tile + row_at<D>(column), (int)p.head_dim);
        __syncthreads(); // they are read
        copy_keys(j + KEYS);
        if (simple) {
            const bool whole = sees_whole_tile(s, first, QUERIES, j, KEYS);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int c = 0; c < 4; c++)
                    tile[r][c] = __fmul_rn(tile[r][c], scale);
                if (!whole) {
                    const SeenKeys seen(s, first + row + r, j, KEYS, false);
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        tile[r][c] = seen.has(column + c) ? tile[r][c] : -CUDART_INF_F;
                }
            }
            if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN) {
                const uint32_t shown = shown_by_mask<false>(scores, first + row, j + column);
#pragma unroll
                for (int e = 0; e < ROWS * 4; e++)
                    tile[e / 4][e % 4] = shown >> e & 1 ? tile[e / 4][e % 4] : -CUDART_INF_F;
            }
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    weight_rows[r * 64 + column + c] = tile[r][c];
#pragma unroll 1
            for (int e = 0; e < ROWS * 4; e++) {
                float &score = weight_rows[e / 4 * 64 + column + e % 4], cap;
                score = scores.score(score * scale, first + row + e / 4, j + column + e % 4, cap);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    tile[r][c] = weight_rows[r * 64 + column + c];
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float largest = maximum[r];
#pragma unroll
            for (int c = 0; c < 4; c++)
                largest = fmaxf(largest, tile[r][c]);
            largest = max_over_row(largest);
            const float base = largest == -CUDART_INF_F ? 0.0f : largest;
            const float factor = ex2_approx_ftz((maximum[r] - base) * unit);
            maximum[r] = largest;
            float added = 0;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                tile[r][c] = ex2_approx_ftz((tile[r][c] - base) * unit);
                added += tile[r][c];
            }
            total[r] = total[r] * factor + added; // of this thread's keys; added up at the end
#pragma unroll
            for (int f = 0; f < FOURS; f++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][f][c] *= factor;
        }
        if (p.dropout > 0) {
            const uint32_t kept =
                kept_by_dropout<false, 4, 0>(p, scores.head_index, first + row, j + column, seed, offset);
            const float factor = (float)cuda_ops_attention_dropout_scale(p.dropout);
#pragma unroll
            for (int e = 0; e < ROWS * 4; e++)
                tile[e / 4][e % 4] *= kept >> e & 1 ? factor : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            *reinterpret_cast<float4 *>(weight_rows + r * 64 + column) =
                make_float4(tile[r][0], tile[r][1], tile[r][2], tile[r][3]);
        cp_async_wait_group<1>();
        __syncthreads(); // the values are there, and the weights
        multiply_weights<D>(sum, weight_rows, value_tile + 4 * lane);
        __syncthreads(); // they are read
        copy_values(j + KEYS);
    }
    cp_async_wait_all();

    float *const result =
        rows_of<float>((void *)work.result, p.output, batch, head) + (s.first_query + first + row) * p.output.row;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        total[r] = sum_over_row(total[r]);
        const bool sees_none = total[r] == 0.0f;
        const float factor = sees_none ? 0.0f : 1.0f / total[r];
        if (row + r >= queries)
            continue;
#pragma unroll
        for (int f = 0; f < FOURS; f++)
            if (4 * lane + 64 * f < p.value_dim)
                store_vector(
                    reinterpret_cast<vector16<float> *>(result + r * p.output.row + 4 * lane + 64 * f),
                    {{sum[r][f][0] * factor, sum[r][f][1] * factor, sum[r][f][2] * factor, sum[r][f][3] * factor}});
        if (lane == 0)
            work.logsumexp_result[scores.first_row + first + row + r] =
                sees_none ? -CUDART_INF_F : maximum[r] * (simple ? LN_2 : 1.0f) + logf(total[r]);
    }
}

int attention_float32_forward_bytes(bool is_wide)
{
    return is_wide ? ForwardShape<128>::BYTES : ForwardShape<64>::BYTES;
}

template <int D>
static cuda_ops_status launch(const Float32Work &work, cudaStream_t stream)
{
    const int bytes = ForwardShape<D>::BYTES;
    allow_shared_memory(attention_float32_forward_kernel<D>, bytes);
    const int64_t blocks = work.p.batch * work.p.heads * work.tiles;
    attention_float32_forward_kernel<D><<<(unsigned int)blocks, THREADS, bytes, stream>>>(work);
    return launch_status();
}

cuda_ops_status attention_float32_forward(const Float32Work &work, bool is_wide, cudaStream_t stream)
{
    return is_wide ? launch<128>(work, stream) : launch<64>(work, stream);
}
