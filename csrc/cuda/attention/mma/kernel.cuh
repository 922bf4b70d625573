// The mma path's kernels, to be instantiated one dtype a file; attention/mma/mma.cu says what they do.
#ifndef CUDA_OPS_ATTENTION_MMA_KERNEL_CUH
#define CUDA_OPS_ATTENTION_MMA_KERNEL_CUH

#include "attention/fragments.cuh"
#include "attention/paths.h"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 128;
static constexpr int WARPS = THREADS / WARP_SIZE;
static constexpr int TILE = FRAGMENT_COLUMNS; // keys of a tile; backward queries too
static constexpr float LOG2_E = 1.44269504088896341f;

struct MmaAttention {
    cuda_ops_attention p;
    const void *query, *key, *value, *grad_output;
    const float *logsumexp, *delta;
    float *remainder; // of logsumexp (paths.h); NULL: 0
    int *large;       // of each tile: whether there is one (remainder.h); NULL: nobody asks
    void *result, *second_result;
    void *grad_mask;        // [batch][heads][queries][keys], NULL: not wanted
    bool grad_mask_vectors; // eight keys of it, from a multiple of eight on, are an aligned vector
    float *logsumexp_result;
    DropoutWork dropout;
    int64_t tiles; // of a head
    int chunks;    // of columns, grad_key and grad_value
    bool general;  // scores are more than scaled products within windows, and a mask
    bool masked;   // a mask is added to them
    bool drops;    // there is dropout
};

// By the width of a row in shared memory, HEAD: of a warp, forward, tiles of 16 queries; and backward, stages of tiles,
// and columns of grad_key and grad_value that a block makes, of which there are registers for 128.
template <int HEAD>
struct MmaShape {
    static constexpr int FORWARD_TILES = HEAD <= 128 ? 2 : 1, ROWS = 16 * WARPS * FORWARD_TILES;
    static constexpr int STAGES = HEAD <= 128 ? 2 : 1, COLUMNS = HEAD < 128 ? HEAD : 128;
    static constexpr int FORWARD_BYTES = (ROWS + 2 * TILE) * HEAD * 2;
    static constexpr int BACKWARD_BYTES = (2 + 2 * STAGES) * TILE * HEAD * 2 + STAGES * 2 * TILE * 4;
    static constexpr int REMAINDER_BYTES = 2 * TILE * HEAD * 2;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Rows of HEAD elements in shared memory; the 16-byte vectors of 128 bytes are permuted by the row's number, so that
// those of eight rows below each other are in different banks.
template <int HEAD>
__device__ __forceinline__ uint32_t vector_address(uint32_t tile, int row, int vector)
{
    return tile + row * (HEAD * 2) + ((vector ^ (row & 7)) << 4);
}

// ROWS rows of `elements` elements, of which `count` exist; zeros beyond.
template <int HEAD, int ROWS, typename T>
__device__ __forceinline__ void load_tile(uint32_t tile, const T *from, int64_t stride, int64_t count, int elements)
{
    constexpr int VECTORS = HEAD / 8;
#pragma unroll
    for (int i = 0; i < ROWS * VECTORS / THREADS; i++) {
        const int row = (threadIdx.x + i * THREADS) / VECTORS, vector = (threadIdx.x + i * THREADS) % VECTORS;
        const bool there = row < count && vector * 8 < elements;
        cp_async<16>(vector_address<HEAD>(tile, row, vector), there ? from + row * stride + vector * 8 : from,
                     there ? 16 : 0);
    }
}

// A left operand: 16 rows from `row` on, 16 elements from vector `vector` on.
template <int HEAD>
__device__ __forceinline__ void load_left(uint32_t (&fragment)[4], uint32_t tile, int row, int vector)
{
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4(fragment, vector_address<HEAD>(tile, row + lane % 16, vector + lane / 16));
}
// Right operands of two instructions. Rows are their columns: 16 rows, 16 elements to be summed over.
template <int HEAD>
__device__ __forceinline__ void load_right_rows(uint32_t (&fragments)[4], uint32_t tile, int row, int vector)
{
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4(fragments, vector_address<HEAD>(tile, row + lane / 16 * 8 + lane % 8, vector + lane / 8 % 2));
}
// Rows are summed over: 16 rows, 16 columns.
template <int HEAD>
__device__ __forceinline__ void load_right_columns(uint32_t (&fragments)[4], uint32_t tile, int row, int vector)
{
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4_trans(fragments, vector_address<HEAD>(tile, row + lane % 16, vector + lane / 16));
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}
// Of lanes 4 g to 4 g + 3: the t-th one's words become the t-th words of all four.
__device__ __forceinline__ void transpose_of_four_lanes(uint32_t (&words)[4])
{
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (!(n & step)) {
                uint32_t &low = words[n], &high = words[n | step];
                const uint32_t other = __shfl_xor_sync(FULL_WARP, upper ? low : high, step);
                low = upper ? other : low;
                high = upper ? high : other;
            }
    }
}
// What a product left in two instructions' results, as the left operand of 16 summed elements.
template <typename T>
__device__ __forceinline__ void as_left(uint32_t (&fragment)[4], const float (&first)[4], const float (&second)[4])
{
    fragment[0] = pack<T>(first[0], first[1]);
    fragment[1] = pack<T>(first[2], first[3]);
    fragment[2] = pack<T>(second[0], second[1]);
    fragment[3] = pack<T>(second[2], second[3]);
}

// sum[m][n] += left rows . right rows: 16 * TILES rows from `row` on by 64.
template <typename T, int HEAD, int TILES>
__device__ __forceinline__ void multiply_rows(float (&sum)[TILES][8][4], uint32_t left, int row, uint32_t right)
{
#pragma unroll
    for (int k = 0; k < HEAD / 8; k += 2) {
        uint32_t l[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            load_left<HEAD>(l[m], left, row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t r[4];
            load_right_rows<HEAD>(r, right, 8 * n, k);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_sync<T>(sum[m][n], l[m], r[0], r[1]);
                mma_sync<T>(sum[m][n + 1], l[m], r[2], r[3]);
            }
        }
    }
}

// sum[m][n] += weights (in registers, 16 * TILES x 64) times 64 rows of COLUMNS columns from vector `first` on.
template <typename T, int HEAD, int COLUMNS, int TILES>
__device__ __forceinline__ void multiply_weights(float (&sum)[TILES][COLUMNS / 8][4],
                                                 const float (&weights)[TILES][8][4], uint32_t rows, int first)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t l[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            as_left<T>(l[m], weights[m][2 * k], weights[m][2 * k + 1]);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            uint32_t r[4];
            load_right_columns<HEAD>(r, rows, 16 * k, first + n);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_sync<T>(sum[m][n], l[m], r[0], r[1]);
                mma_sync<T>(sum[m][n + 1], l[m], r[2], r[3]);
            }
        }
    }
}

// The first key that is loaded for queries from `first` on: a multiple of 16, as dropout wants them.
__device__ __forceinline__ int64_t first_key_of_tile(const cuda_ops_attention_sequence &s, int64_t first)
{
    return cuda_ops_attention_sequence_first_key(&s, first) / 16 * 16;
}

// Calls: inlined for each of a thread's scores, they would be most of the kernel.
// The score of a product, -inf where the key is not seen. Not in units of log2: where a mask has the lowest float, so
// has the score, which times log2(e) would be -inf. It is multiplied once the row's largest has been subtracted.
[[maybe_unused]] static __device__ __noinline__ float general_score(const AttentionScores<float> &scores, float x,
                                                                    int64_t i, int64_t j)
{
    float cap;
    return scores.score(x * (float)scores.p.scale, i, j, cap);
}

struct GeneralWeight {
    float weight, cap;
    bool seen;
};
// exp(score - logsumexp), less the remainder of that, if there is one; 0 where the key is not seen.
[[maybe_unused]] static __device__ __noinline__ GeneralWeight general_weight(const AttentionScores<float> &scores,
                                                                             const float *remainder, float x,
                                                                             float logsumexp, int64_t i, int64_t j)
{
    GeneralWeight result;
    const float score = scores.score(x * (float)scores.p.scale, i, j, result.cap);
    result.seen = score != -CUDART_INF_F;
    const float rest = remainder && result.seen ? remainder[scores.first_row + i] : 0.0f;
    result.weight = result.seen ? ex2_approx_ftz((score - logsumexp - rest) * LOG2_E) : 0.0f;
    return result;
}

// Products become scores, in natural units, of what windows let see.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ void mask_scores(float (&products)[8][4], const AttentionScores<float> &scores, int64_t i,
                                            int64_t j)
{
    const float scale = (float)scores.p.scale;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int f = 0; f < 4; f++)
            products[n][f] =
                __fmul_rn(products[n][f], scale); // not as one operation with the mask's sum: as `score` has it
    add_mask<KEYS_ARE_ROWS>(products, scores, i, j);
}

template <typename T>
__device__ __forceinline__ T *rows_of(const void *tensor, const cuda_ops_attention_strides &strides, int64_t batch,
                                      int64_t head)
{
    return (T *)tensor + batch * strides.batch + head * strides.head;
}

// Stores 16 * TILES rows of a warp by way of its part of a tile in shared memory, in whole vectors. row: of the tile.
template <typename T, int HEAD, int COLUMNS, int TILES>
__device__ __forceinline__ void store_rows(uint32_t tile, int row, T *to, int64_t stride, int64_t count, int first,
                                           int vectors, const float (&sum)[TILES][COLUMNS / 8][4],
                                           const float (&factors)[TILES][2])
{
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                st_shared(vector_address<HEAD>(tile, row + 16 * m + 8 * half + g, n) + 4 * t,
                          pack<T>(sum[m][n][2 * half] * factors[m][half], sum[m][n][2 * half + 1] * factors[m][half]));
    __syncwarp();
    constexpr int VECTORS = COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < 16 * TILES * VECTORS / WARP_SIZE; i++) {
        const int r = row + (lane + i * WARP_SIZE) / VECTORS, vector = (lane + i * WARP_SIZE) % VECTORS;
        uint4 v;
        ld_shared_v4(v.x, v.y, v.z, v.w, vector_address<HEAD>(tile, r, vector));
        if (r < count && first + vector < vectors)
            *reinterpret_cast<uint4 *>(to + r * stride + (first + vector) * 8) = v;
    }
}

#endif

template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_mma_forward_kernel(const __grid_constant__ MmaAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef MmaShape<HEAD> S;
    constexpr int TILES = S::FORWARD_TILES, ROWS = S::ROWS;
    extern __shared__ __align__(128) char shared[];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int64_t head_index = blockIdx.x / work.tiles, batch = head_index / p.heads, head = head_index % p.heads;
    // The last queries come first: where windows are causal, they have the most keys.
    const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, batch);
    const int64_t first = (work.tiles - 1 - blockIdx.x % work.tiles) * ROWS, queries = s.queries - first;
    const int64_t key_head = head / (p.heads / p.key_heads);
    const DropoutSeed seed(work.dropout.philox);
    if (work.dropout.state && blockIdx.x == 0 && threadIdx.x == 0)
        seed.store(work.dropout.state);
    if (queries <= 0)
        return; // of a sequence that is shorter than others
    const uint32_t q = shared_address(shared), k = q + ROWS * HEAD * 2, v = k + TILE * HEAD * 2;
    const T *const key = rows_of<const T>(work.key, p.key, batch, key_head) + s.first_key * p.key.row;
    const T *const value = rows_of<const T>(work.value, p.value, batch, key_head) + s.first_key * p.value.row;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const int64_t last_query = (first + ROWS < s.queries ? first + ROWS : s.queries) - 1;
    const int64_t begin = first_key_of_tile(s, first), end = cuda_ops_attention_sequence_last_key(&s, last_query);
    const int my_row = 16 * TILES * warp;
    // Of what `weights` hold: scores, or products.
    const bool scored = work.general || work.masked;
    const float to_score = scored ? 1.0f : (float)p.scale, to_log2 = to_score * LOG2_E;
    const AttentionScores<float> scores(p, batch, head);

    float sum[TILES][HEAD / 8][4] = {}, maximum[TILES][2], total[TILES][2] = {};
#pragma unroll
    for (int m = 0; m < TILES; m++)
        maximum[m][0] = maximum[m][1] = -CUDART_INF_F;
    if (begin < end) {
        load_tile<HEAD, ROWS>(
            q, rows_of<const T>(work.query, p.query, batch, head) + (s.first_query + first) * p.query.row, p.query.row,
            queries, head_dim);
        load_tile<HEAD, TILE>(k, key + begin * p.key.row, p.key.row, s.keys - begin, head_dim);
    }
    for (int64_t j = begin; j < end; j += TILE) {
        cp_async_wait_all();
        __syncthreads(); // the keys are there, and the values before have been read
        load_tile<HEAD, TILE>(v, value + j * p.value.row, p.value.row, s.keys - j, value_dim);
        float weights[TILES][8][4] = {};
        multiply_rows<T, HEAD>(weights, q, my_row, k);
        if (work.general) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        weights[m][n][e] =
                            general_score(scores, weights[m][n][e], first + my_row + 16 * m + g + e / 2 * 8,
                                          j + 8 * n + 2 * t + e % 2);
        } else {
            if (work.masked)
#pragma unroll
                for (int m = 0; m < TILES; m++)
                    mask_scores<false>(weights[m], scores, first + my_row + 16 * m, j);
            const bool all = sees_all(s, first, ROWS, j);
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int half = 0; half < 2 && !all; half++) {
                    const int64_t i = first + my_row + 16 * m + g + 8 * half;
                    const SeenColumns seen = seen_columns(cuda_ops_attention_sequence_first_key(&s, i),
                                                          cuda_ops_attention_sequence_last_key(&s, i), j);
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (!seen.has(8 * n + 2 * t + e))
                                weights[m][n][2 * half + e] = -CUDART_INF_F;
                }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = maximum[m][half];
#pragma unroll
                for (int n = 0; n < 8; n++)
                    largest = fmaxf(largest, fmaxf(weights[m][n][2 * half], weights[m][n][2 * half + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                // Of -inf alone the exponentials are 0.
                const float reference = largest == -CUDART_INF_F ? 0.0f : largest;
                const float factor = ex2_approx_ftz((maximum[m][half] - reference) * to_log2);
                maximum[m][half] = largest;
                if (scored)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++)
                            weights[m][n][e] -= reference;
                const float base = scored ? 0.0f : reference * to_log2;
                float added = 0.0f;
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        weights[m][n][e] = ex2_approx_ftz(weights[m][n][e] * to_log2 - base);
                        added += weights[m][n][e];
                    }
                total[m][half] = total[m][half] * factor + added;
#pragma unroll
                for (int n = 0; n < HEAD / 8; n++) {
                    sum[m][n][2 * half] *= factor;
                    sum[m][n][2 * half + 1] *= factor;
                }
            }
        if (work.drops)
#pragma unroll
            for (int m = 0; m < TILES; m++)
                drop_weights(
                    weights[m],
                    dropped_weights<false>(work.dropout, seed, head_index, p.queries, first + my_row + 16 * m, j),
                    work.dropout.scale);
        cp_async_wait_all();
        __syncthreads(); // the values are there, and the keys have been read
        if (j + TILE < end)
            load_tile<HEAD, TILE>(k, key + (j + TILE) * p.key.row, p.key.row, s.keys - j - TILE, head_dim);
        multiply_weights<T, HEAD, HEAD>(sum, weights, v, 0);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[m][half] += __shfl_xor_sync(FULL_WARP, total[m][half], 1);
            total[m][half] += __shfl_xor_sync(FULL_WARP, total[m][half], 2);
            const int row = my_row + 16 * m + g + 8 * half;
            if (t == 0 && row < queries)
                work.logsumexp_result[scores.first_row + first + row] =
                    total[m][half] == 0.0f ? -CUDART_INF_F : maximum[m][half] * to_score + logf(total[m][half]);
            total[m][half] = total[m][half] == 0.0f ? 0.0f : 1.0f / total[m][half];
        }
    store_rows<T, HEAD, HEAD>(q, my_row,
                              rows_of<T>(work.result, p.output, batch, head) + (s.first_query + first) * p.output.row,
                              p.output.row, queries, 0, value_dim / 8, sum, total);
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Products become P, and those of grad_output and value, times D, become dS times the cap's derivative, of one key and
// query. Both are 0 where the key is not seen, whatever its value is. logsumexp: in units of log2.
__device__ __forceinline__ void gradient_of_score(float &weight, float &gradient, float logsumexp, float delta,
                                                  float to_log2, bool seen)
{
    weight = seen ? ex2_approx_ftz(weight * to_log2 - logsumexp) : 0.0f;
    gradient = seen ? weight * (gradient - delta) : 0.0f;
}
// Of a score in natural units, -inf where the mask hides the key. logsumexp and its remainder are subtracted one by one.
__device__ __forceinline__ void gradient_of_masked_score(float &weight, float &gradient, float logsumexp, float rest,
                                                         float delta, bool seen)
{
    seen = seen && weight != -CUDART_INF_F;
    weight = seen ? ex2_approx_ftz((weight - logsumexp - rest) * LOG2_E) : 0.0f;
    gradient = seen ? weight * (gradient - delta) : 0.0f;
}
// Returns the cap's derivative, which is not in the gradient yet.
__device__ __forceinline__ float gradient_of_general_score(float &weight, float &gradient, float logsumexp, float delta,
                                                           const AttentionScores<float> &scores, const float *remainder,
                                                           int64_t i, int64_t j)
{
    const GeneralWeight w = general_weight(scores, remainder, weight, logsumexp, i, j);
    weight = w.weight;
    gradient = w.seen ? weight * (gradient - delta) : 0.0f;
    return w.cap;
}

// dS of a warp's 16 queries from `first` on and 64 keys from j on, a multiple of 16. to: row 0 of the head's.
template <typename T>
__device__ __forceinline__ void store_grad_mask(T *to, const float (&gradients)[8][4], int64_t first, int64_t queries,
                                                int64_t j, int64_t keys, bool vectors)
{
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t row = first + g + 8 * half;
        T *const line = to + row * keys;
        if (vectors) {
            // The four lanes of a row have a pair each of eight vectors: they trade them for two vectors a lane.
#pragma unroll
            for (int four = 0; four < 8; four += 4) {
                uint32_t words[4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    words[n] = pack<T>(gradients[four + n][2 * half], gradients[four + n][2 * half + 1]);
                transpose_of_four_lanes(words);
                const int64_t column = j + 8 * (four + t);
                if (row < queries && column < keys)
                    *reinterpret_cast<uint4 *>(line + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        } else if (row < queries) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int64_t column = j + 8 * n + 2 * t + e;
                    if (column < keys)
                        line[column] = store_from_accumulate<T>(gradients[n][2 * half + e]);
                }
        }
    }
}

// 0 at keys [begin, end) of these rows.
template <typename T>
__device__ __forceinline__ void clear_grad_mask(T *rows, int64_t count, int64_t begin, int64_t end, int64_t keys)
{
    for (int64_t row = threadIdx.x / WARP_SIZE; row < count; row += WARPS)
        for (int64_t j = begin + threadIdx.x % WARP_SIZE; j < end; j += WARP_SIZE)
            rows[row * keys + j] = store_from_accumulate<T>(0.0f);
}

#endif

// The remainder of logsumexp: log of the sum of exp(score - logsumexp), where that is large.
template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_mma_remainder_kernel(const __grid_constant__ MmaAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) char shared[];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int64_t head_index = blockIdx.x / work.tiles, batch = head_index / p.heads, head = head_index % p.heads;
    const AttentionScores<float> scores(p, batch, head);
    const cuda_ops_attention_sequence &s = scores.s;
    const int64_t first = blockIdx.x % work.tiles * TILE, queries = s.queries - first;
    const int my_row = 16 * warp;
    float logsumexp[2], total[2] = {};
    bool large[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t i = first + my_row + g + 8 * half;
        logsumexp[half] = i < s.queries ? work.logsumexp[scores.first_row + i] : 0.0f;
        large[half] = is_large_logsumexp(logsumexp[half]);
    }
    const bool any_large = __syncthreads_or(large[0] || large[1]);
    if (work.large && threadIdx.x == 0)
        work.large[blockIdx.x] = any_large;
    if (any_large) {
        const uint32_t q = shared_address(shared), k = q + TILE * HEAD * 2;
        const int head_dim = (int)p.head_dim;
        const int64_t last_query = (first + TILE < s.queries ? first + TILE : s.queries) - 1;
        const int64_t end = cuda_ops_attention_sequence_last_key(&s, last_query);
        const T *const key = rows_of<const T>(work.key, p.key, batch, head / (p.heads / p.key_heads));
        load_tile<HEAD, TILE>(q, rows_of<const T>(work.query, p.query, batch, head) + first * p.query.row, p.query.row,
                              queries, head_dim);
        for (int64_t j = first_key_of_tile(s, first); j < end; j += TILE) {
            load_tile<HEAD, TILE>(k, key + j * p.key.row, p.key.row, s.keys - j, head_dim);
            cp_async_wait_all();
            __syncthreads();
            float products[1][8][4] = {};
            multiply_rows<T, HEAD>(products, q, my_row, k);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float score = general_score(scores, products[0][n][e], first + my_row + g + e / 2 * 8,
                                                      j + 8 * n + 2 * t + e % 2);
                    total[e / 2] += ex2_approx_ftz((score - logsumexp[e / 2]) * LOG2_E);
                }
            __syncthreads(); // the keys have been read
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 1);
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 2);
        const int row = my_row + g + 8 * half;
        if (t == 0 && row < queries)
            work.remainder[scores.first_row + first + row] = large[half] ? logf(total[half]) : 0.0f;
    }
#endif
}

// By queries: dS = P (grad_output value^T - delta), which is the mask's gradient, and grad_query = scale * dS key.
template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_mma_grad_query_kernel(const __grid_constant__ MmaAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef MmaShape<HEAD> S;
    constexpr int BYTES = TILE * HEAD * 2;
    extern __shared__ __align__(128) char shared[];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int64_t head_index = blockIdx.x / work.tiles, batch = head_index / p.heads, head = head_index % p.heads;
    const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, batch);
    const int64_t first = (work.tiles - 1 - blockIdx.x % work.tiles) * TILE, queries = s.queries - first;
    if (queries <= 0)
        return; // of a sequence that is shorter than others
    const int64_t key_head = head / (p.heads / p.key_heads);
    const DropoutSeed seed(work.dropout.philox);
    const uint32_t q = shared_address(shared), grad = q + BYTES, ring = grad + BYTES;
    const T *const key = rows_of<const T>(work.key, p.key, batch, key_head) + s.first_key * p.key.row;
    const T *const value = rows_of<const T>(work.value, p.value, batch, key_head) + s.first_key * p.value.row;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const int64_t last_query = (first + TILE < s.queries ? first + TILE : s.queries) - 1;
    const int64_t begin = first_key_of_tile(s, first), end = cuda_ops_attention_sequence_last_key(&s, last_query);
    const int my_row = 16 * warp;
    const float to_log2 = (float)p.scale * LOG2_E;
    const AttentionScores<float> scores(p, batch, head);
    T *const grad_mask = work.grad_mask ? (T *)work.grad_mask + head_index * p.queries * p.keys : nullptr;

    const auto load = [&](int64_t j, int stage) {
        const uint32_t k = ring + stage * 2 * BYTES;
        load_tile<HEAD, TILE>(k, key + j * p.key.row, p.key.row, s.keys - j, head_dim);
        load_tile<HEAD, TILE>(k + BYTES, value + j * p.value.row, p.value.row, s.keys - j, value_dim);
    };
    const bool scored = work.general || work.masked;
    float sum[1][HEAD / 8][4] = {}, logsumexp[2], delta[2], rest[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t i = first + my_row + g + 8 * half;
        const bool there = i < s.queries;
        const float l = there ? work.logsumexp[scores.first_row + i] : 0.0f;
        logsumexp[half] = l == -CUDART_INF_F ? 0.0f : l * (scored ? 1.0f : LOG2_E);
        delta[half] = there ? work.delta[scores.first_row + i] : 0.0f;
        rest[half] = there && work.remainder ? work.remainder[scores.first_row + i] : 0.0f;
    }
    if (begin < end) {
        load_tile<HEAD, TILE>(
            q, rows_of<const T>(work.query, p.query, batch, head) + (s.first_query + first) * p.query.row, p.query.row,
            queries, head_dim);
        load_tile<HEAD, TILE>(grad,
                              rows_of<const T>(work.grad_output, p.grad_output, batch, head) +
                                  (s.first_query + first) * p.grad_output.row,
                              p.grad_output.row, queries, value_dim);
        load(begin, 0);
    }
    int stage = 0;
    for (int64_t j = begin; j < end; j += TILE) {
        cp_async_wait_all();
        __syncthreads();
        const uint32_t k = ring + stage * 2 * BYTES, v = k + BYTES;
        stage = (stage + 1) % S::STAGES;
        if (S::STAGES == 2 && j + TILE < end)
            load(j + TILE, stage);
        float weights[1][8][4] = {}, gradients[1][8][4] = {};
        multiply_rows<T, HEAD>(weights, q, my_row, k);
        multiply_rows<T, HEAD>(gradients, grad, my_row, v);
        if (work.drops)
            drop_weights(gradients[0],
                         dropped_weights<false>(work.dropout, seed, head_index, p.queries, first + my_row, j),
                         work.dropout.scale);
        SeenColumns seen[2];
        const bool all = sees_all(s, first, TILE, j);
        if (work.masked)
            mask_scores<false>(weights[0], scores, first + my_row, j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t i = first + my_row + g + 8 * half;
            if (!all)
                seen[half] = seen_columns(cuda_ops_attention_sequence_first_key(&s, i),
                                          cuda_ops_attention_sequence_last_key(&s, i), j);
            if (work.general)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &gradient = gradients[0][n][2 * half + e];
                        const int64_t column = j + 8 * n + 2 * t + e;
                        const float cap =
                            gradient_of_general_score(weights[0][n][2 * half + e], gradient, logsumexp[half],
                                                      delta[half], scores, work.remainder, i, column);
                        if (grad_mask && i < s.queries && column < s.keys)
                            grad_mask[i * s.keys + column] = store_from_accumulate<T>(gradient);
                        gradient *= cap;
                    }
            else if (work.masked)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        gradient_of_masked_score(weights[0][n][2 * half + e], gradients[0][n][2 * half + e],
                                                 logsumexp[half], rest[half], delta[half],
                                                 seen[half].has(8 * n + 2 * t + e));
            else
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        gradient_of_score(weights[0][n][2 * half + e], gradients[0][n][2 * half + e], logsumexp[half],
                                          delta[half], to_log2, seen[half].has(8 * n + 2 * t + e));
        }
        if (grad_mask && !work.general)
            store_grad_mask(grad_mask, gradients[0], first + my_row, s.queries, j, s.keys, work.grad_mask_vectors);
        multiply_weights<T, HEAD, HEAD>(sum, gradients, k, 0);
        if (S::STAGES == 1) {
            __syncthreads();
            if (j + TILE < end)
                load(j + TILE, 0);
        }
    }
    if (grad_mask) { // of keys that no query of these sees
        T *const rows = grad_mask + first * s.keys;
        const int64_t count = queries < TILE ? queries : TILE,
                      stop = begin < end ? begin + ceil_div(end - begin, TILE) * TILE : 0;
        clear_grad_mask(rows, count, 0, begin < end ? begin : 0, s.keys);
        clear_grad_mask(rows, count, stop, s.keys, s.keys);
    }
    const float factors[1][2] = {{(float)p.scale, (float)p.scale}};
    store_rows<T, HEAD, HEAD>(
        q, my_row, rows_of<T>(work.result, p.grad_query, batch, head) + (s.first_query + first) * p.grad_query.row,
        p.grad_query.row, queries, 0, head_dim / 8, sum, factors);
#endif
}

// By keys: transposed scores, whose exponentials and gradients stay in registers as left operands of
// grad_value = (D P)^T grad_output and grad_key = scale * dS^T query, summed over the heads of the key head in order.
template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS)
    attention_mma_grad_key_value_kernel(const __grid_constant__ MmaAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef MmaShape<HEAD> S;
    constexpr int BYTES = TILE * HEAD * 2, COLUMNS = S::COLUMNS;
    extern __shared__ __align__(128) char shared[];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int64_t block = blockIdx.x / work.chunks, head_index = block / work.tiles;
    const int64_t batch = head_index / p.key_heads, key_head = head_index % p.key_heads;
    const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, batch);
    const int64_t first = block % work.tiles * TILE, keys = s.keys - first, group = p.heads / p.key_heads;
    if (keys <= 0)
        return;                                                 // of a sequence that is shorter than others
    const int chunk = blockIdx.x % work.chunks * (COLUMNS / 8); // its first vector
    const DropoutSeed seed(work.dropout.philox);
    const uint32_t k = shared_address(shared), v = k + BYTES, ring = v + BYTES;
    const uint32_t rows = ring + S::STAGES * 2 * BYTES; // logsumexp and delta of a stage
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const int64_t last_key = (first + TILE < s.keys ? first + TILE : s.keys) - 1;
    const int64_t begin = cuda_ops_attention_sequence_first_query(&s, first) / 16 * 16; // as dropout wants them
    const int64_t end = cuda_ops_attention_sequence_last_query(&s, last_key);
    const int64_t tiles = begin < end ? ceil_div(end - begin, TILE) : 0, steps = tiles * group;
    const int my_row = 16 * warp;
    const float to_log2 = (float)p.scale * LOG2_E;

    const auto load = [&](int64_t step, int stage) {
        const int64_t head = key_head * group + step / tiles, i = begin + step % tiles * TILE;
        const uint32_t q = ring + stage * 2 * BYTES;
        load_tile<HEAD, TILE>(q, rows_of<const T>(work.query, p.query, batch, head) + (s.first_query + i) * p.query.row,
                              p.query.row, s.queries - i, head_dim);
        load_tile<HEAD, TILE>(q + BYTES,
                              rows_of<const T>(work.grad_output, p.grad_output, batch, head) +
                                  (s.first_query + i) * p.grad_output.row,
                              p.grad_output.row, s.queries - i, value_dim);
        // One of the two numbers of a query is each thread's.
        const int row = threadIdx.x % TILE;
        const float *const from = threadIdx.x < TILE ? work.logsumexp : work.delta;
        const int64_t at = first_row_of(p, s, batch, head) + i;
        cp_async<4>(rows + (stage * 2 * TILE + threadIdx.x) * 4, from + (i + row < s.queries ? at + row : at),
                    i + row < s.queries ? 4 : 0);
    };
    float sum_key[1][COLUMNS / 8][4] = {}, sum_value[1][COLUMNS / 8][4] = {};
    if (steps > 0) {
        load_tile<HEAD, TILE>(k, rows_of<const T>(work.key, p.key, batch, key_head) + (s.first_key + first) * p.key.row,
                              p.key.row, keys, head_dim);
        load_tile<HEAD, TILE>(
            v, rows_of<const T>(work.value, p.value, batch, key_head) + (s.first_key + first) * p.value.row,
            p.value.row, keys, value_dim);
        load(0, 0);
    }
    int stage = 0;
    for (int64_t step = 0; step < steps; step++) {
        cp_async_wait_all();
        __syncthreads();
        const int64_t i = begin + step % tiles * TILE;
        const uint32_t q = ring + stage * 2 * BYTES, grad = q + BYTES, numbers = rows + stage * 2 * TILE * 4;
        stage = (stage + 1) % S::STAGES;
        if (S::STAGES == 2 && step + 1 < steps)
            load(step + 1, stage);
        float weights[1][8][4] = {}, gradients[1][8][4] = {};
        multiply_rows<T, HEAD>(weights, k, my_row, q);
        multiply_rows<T, HEAD>(gradients, v, my_row, grad);
        const int64_t head = key_head * group + step / tiles;
        const AttentionScores<float> scores(p, batch, head);
        if (work.masked)
            mask_scores<true>(weights[0], scores, i, first + my_row);
        uint32_t dropped = 0;
        if (work.drops) {
            dropped = dropped_weights<true>(work.dropout, seed, batch * p.heads + head, p.queries, i, first + my_row);
            drop_weights(gradients[0], dropped, work.dropout.scale);
        }
        SeenColumns seen[2];
        if (!sees_all(s, i, TILE, first))
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t j = first + my_row + g + 8 * half;
                seen[half] = seen_columns(cuda_ops_attention_sequence_first_query(&s, j),
                                          cuda_ops_attention_sequence_last_query(&s, j), i);
            }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t bits[2][2]; // logsumexp and delta of two queries
            ld_shared_v2(bits[0][0], bits[0][1], numbers + (8 * n + 2 * t) * 4);
            ld_shared_v2(bits[1][0], bits[1][1], numbers + (TILE + 8 * n + 2 * t) * 4);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float l = __uint_as_float(bits[0][e]), delta = __uint_as_float(bits[1][e]);
                const float logsumexp = l == -CUDART_INF_F ? 0.0f : l * (work.general || work.masked ? 1.0f : LOG2_E);
                const int column = 8 * n + 2 * t + e;
                const float rest = work.remainder && i + column < s.queries && work.masked
                                       ? work.remainder[scores.first_row + i + column]
                                       : 0.0f;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &weight = weights[0][n][2 * half + e], &gradient = gradients[0][n][2 * half + e];
                    if (work.general)
                        gradient *=
                            gradient_of_general_score(weight, gradient, logsumexp, delta, scores, work.remainder,
                                                      i + column, first + my_row + g + 8 * half);
                    else if (work.masked)
                        gradient_of_masked_score(weight, gradient, logsumexp, rest, delta,
                                                 seen[half].has(column) && i + column < s.queries);
                    else
                        gradient_of_score(weight, gradient, logsumexp, delta, to_log2, seen[half].has(column));
                }
            }
        }
        if (work.drops)
            drop_weights(weights[0], dropped, work.dropout.scale);
        multiply_weights<T, HEAD, COLUMNS>(sum_value, weights, grad, chunk);
        multiply_weights<T, HEAD, COLUMNS>(sum_key, gradients, q, chunk);
        if (S::STAGES == 1) {
            __syncthreads();
            if (step + 1 < steps)
                load(step + 1, 0);
        }
    }
    const float one[1][2] = {{1.0f, 1.0f}}, scale[1][2] = {{(float)p.scale, (float)p.scale}};
    // Each warp stores by way of its own rows of the keys' tile.
    store_rows<T, HEAD, COLUMNS>(k, my_row,
                                 rows_of<T>(work.second_result, p.grad_value, batch, key_head) +
                                     (s.first_key + first) * p.grad_value.row,
                                 p.grad_value.row, keys, chunk, value_dim / 8, sum_value, one);
    store_rows<T, HEAD, COLUMNS>(
        k, my_row, rows_of<T>(work.result, p.grad_key, batch, key_head) + (s.first_key + first) * p.grad_key.row,
        p.grad_key.row, keys, chunk, head_dim / 8, sum_key, scale);
#endif
}

enum AttentionProduct { ATTENTION_FORWARD, ATTENTION_REMAINDER, ATTENTION_GRAD_QUERY, ATTENTION_GRAD_KEY_VALUE };

template <typename T, int HEAD>
static cuda_ops_status launch_mma_attention(AttentionProduct product, const MmaAttention &work, int64_t blocks,
                                            cudaStream_t stream)
{
    typedef MmaShape<HEAD> S;
    const auto kernel = product == ATTENTION_FORWARD      ? attention_mma_forward_kernel<T, HEAD>
                        : product == ATTENTION_REMAINDER  ? attention_mma_remainder_kernel<T, HEAD>
                        : product == ATTENTION_GRAD_QUERY ? attention_mma_grad_query_kernel<T, HEAD>
                                                          : attention_mma_grad_key_value_kernel<T, HEAD>;
    const int bytes = product == ATTENTION_FORWARD     ? S::FORWARD_BYTES
                      : product == ATTENTION_REMAINDER ? S::REMAINDER_BYTES
                                                       : S::BACKWARD_BYTES;
    if (bytes > 48 << 10)
        allow_shared_memory(kernel, bytes);
    kernel<<<(unsigned int)blocks, THREADS, bytes, stream>>>(work);
    return launch_status();
}

// head: 64, 128 or 256.
template <typename T>
static cuda_ops_status launch_mma_attention(AttentionProduct product, int head, const MmaAttention &work,
                                            int64_t blocks, cudaStream_t stream)
{
    return head == 64    ? launch_mma_attention<T, 64>(product, work, blocks, stream)
           : head == 128 ? launch_mma_attention<T, 128>(product, work, blocks, stream)
                         : launch_mma_attention<T, 256>(product, work, blocks, stream);
}

cuda_ops_status attention_mma_bfloat16(AttentionProduct product, int head, const MmaAttention &work, int64_t blocks,
                                       cudaStream_t stream);
cuda_ops_status attention_mma_float16(AttentionProduct product, int head, const MmaAttention &work, int64_t blocks,
                                      cudaStream_t stream);

#endif
