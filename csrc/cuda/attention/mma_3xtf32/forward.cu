// attention, mma_3xtf32 path, forward: a block of four warps has 64 queries, sixteen rows a warp, and walks over tiles
// of 64 keys. Scores stay in registers, and become the left operand of the second product. Keys come while the values
// are multiplied with, and values while the keys are.
// Bound by the tensor cores and by the issue of instructions: of every 16 x 64 x 64 products 192 mma.sync, and some 300
// to load and split the right operand, which each warp does for itself.
#include "attention/fragments.cuh"
#include "attention/mma_3xtf32/mma_3xtf32.h"
#include "attention/mma_3xtf32/tiles.cuh"
#include "attention/tile_scores.cuh"
#include "ptx/arithmetic.cuh"

static constexpr int QUERIES = FLOAT32_QUERIES, KEYS = TILE;
static constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

template <int D>
struct ForwardShape {
    static constexpr int BYTES = 3 * TILE * D * (int)sizeof(float), RESIDENT = D == 64 ? 3 : 2;
};

// A call: inlined for each of a thread's scores, it would be most of the kernel.
[[maybe_unused]] static __device__ __noinline__ float general_score(const AttentionScores<float> &scores, float x,
                                                                    int64_t i, int64_t j)
{
    float cap;
    return scores.score(x * (float)scores.p.scale, i, j, cap);
}

template <int D>
__global__ void __launch_bounds__(THREADS, ForwardShape<D>::RESIDENT)
    attention_mma_3xtf32_forward_kernel(const __grid_constant__ Mma3xTf32Work work)
{
    extern __shared__ __align__(16) float tiles[];
    float *const query_tile = tiles, *const key_tile = tiles + TILE * D, *const value_tile = tiles + 2 * TILE * D;
    const cuda_ops_attention &p = work.p;
    const DropoutSeed seed(p.philox);
    if (work.state && blockIdx.x == 0 && threadIdx.x == 0)
        seed.store(work.state);
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
            copy_tile<D>(key_tile, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim);
        cp_async_commit_group();
    };
    const auto copy_values = [&](int64_t j) {
        if (j < end)
            copy_tile<D>(value_tile, value + j * p.value.row, p.value.row, s.keys - j, p.value_dim);
        cp_async_commit_group();
    };

    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int row = (int)threadIdx.x / WARP_SIZE * 16; // the warp's first
    // Products are scaled for exponentials of base 2; what else makes scores leaves them as they are until their largest
    // is subtracted, since a mask may have the lowest float.
    const bool simple = work.simple;
    const float scale = (float)(simple ? p.scale * 1.4426950408889634 : p.scale), unit = simple ? 1.0f : LOG2_E;
    RowSums16<D> sum = {};
    float maximum[2] = {-CUDART_INF_F, -CUDART_INF_F}, total[2] = {};
    copy_tile<D>(query_tile, query, p.query.row, queries, p.head_dim);
    copy_keys(begin);
    copy_values(begin);
    for (int64_t j = begin; j < end; j += KEYS) {
        cp_async_wait_group<1>();
        __syncthreads(); // the keys are there
        float weights[8][4], factors[2];
        multiply_rows<D, false, false>(weights, query_tile + row * D, key_tile, (int)p.head_dim);
        __syncthreads(); // they are read
        copy_keys(j + KEYS);
        if (simple || work.masked) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int f = 0; f < 4; f++)
                    weights[n][f] = __fmul_rn(weights[n][f], scale); // backward has the same
            if (work.masked)
                add_mask<false>(weights, scores, first + row, j);
            if (!sees_all(s, first, QUERIES, j))
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int64_t i = first + row + g + 8 * half;
                    const SeenColumns seen = seen_columns(cuda_ops_attention_sequence_first_key(&s, i),
                                                          cuda_ops_attention_sequence_last_key(&s, i), j);
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int f = 2 * half; f < 2 * half + 2; f++)
                            weights[n][f] = seen.has(8 * n + 2 * t + f % 2) ? weights[n][f] : -CUDART_INF_F;
                }
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int f = 0; f < 4; f++)
                    weights[n][f] =
                        general_score(scores, weights[n][f], first + row + g + f / 2 * 8, j + 8 * n + 2 * t + f % 2);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = maximum[half];
#pragma unroll
            for (int n = 0; n < 8; n++)
                largest = fmaxf(largest, fmaxf(weights[n][2 * half], weights[n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
            // Of -inf alone the exponentials are 0.
            const float base = largest == -CUDART_INF_F ? 0.0f : largest;
            factors[half] = ex2_approx_ftz((maximum[half] - base) * unit);
            maximum[half] = largest;
            float added = 0;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int f = 2 * half; f < 2 * half + 2; f++) {
                    weights[n][f] = ex2_approx_ftz((weights[n][f] - base) * unit);
                    added += weights[n][f];
                }
            total[half] = total[half] * factors[half] + added; // of this thread's keys; added up at the end
        }
        if (p.dropout > 0)
            drop_weights(weights, dropped_weights<false>(work.dropout, seed, head_index, p.queries, first + row, j),
                         work.dropout.scale);
        cp_async_wait_group<1>();
        __syncthreads(); // the values are there
        multiply_weights<D>(sum, weights, value_tile, factors);
        __syncthreads(); // they are read
        copy_values(j + KEYS);
    }
    cp_async_wait_all();

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 1);
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 2);
        const bool sees_none = total[half] == 0.0f;
        inverse[half] = sees_none ? 0.0f : 1.0f / total[half];
        const int64_t i = row + g + 8 * half;
        if (t == 0 && i < queries)
            work.logsumexp_result[scores.first_row + first + i] =
                sees_none ? -CUDART_INF_F : maximum[half] * (simple ? LN_2 : 1.0f) + logf(total[half]);
    }
    float *const result =
        rows_of<float>((void *)work.result, p.output, batch, head) + (s.first_query + first) * p.output.row;
    store_rows<D>(result, p.output.row, row + g, queries, p.value_dim, sum, inverse);
}

int attention_mma_3xtf32_forward_bytes(bool is_wide)
{
    return is_wide ? ForwardShape<128>::BYTES : ForwardShape<64>::BYTES;
}

template <int D>
static cuda_ops_status launch(const Mma3xTf32Work &work, cudaStream_t stream)
{
    const int bytes = ForwardShape<D>::BYTES;
    allow_shared_memory(attention_mma_3xtf32_forward_kernel<D>, bytes);
    const int64_t blocks = work.p.batch * work.p.heads * work.tiles;
    attention_mma_3xtf32_forward_kernel<D><<<(unsigned int)blocks, THREADS, bytes, stream>>>(work);
    return launch_status();
}

cuda_ops_status attention_mma_3xtf32_forward(const Mma3xTf32Work &work, bool is_wide, cudaStream_t stream)
{
    return is_wide ? launch<128>(work, stream) : launch<64>(work, stream);
}
