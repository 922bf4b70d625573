// The decode path's kernel on the tensor cores, to be instantiated one dtype a file; decode.cu says what it does.
#ifndef CUDA_OPS_ATTENTION_DECODE_MMA_KERNEL_CUH
#define CUDA_OPS_ATTENTION_DECODE_MMA_KERNEL_CUH

#include "attention/decode/position.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
static constexpr float LOG2_E = 1.44269504088896341f;

// Tiles of keys and values of 16 KiB each, in a ring of three.
template <int HEAD>
struct DecodeShape {
    static constexpr int TILE = decode_mma_keys(HEAD), STAGES = 3;
    static constexpr int TILE_BYTES = TILE * HEAD * 2, BYTES = STAGES * 2 * TILE_BYTES;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Of a tile's row; its 16-byte vectors are permuted by its number, so that those of eight rows are in different banks.
template <int HEAD>
__device__ __forceinline__ uint32_t vector_address(uint32_t tile, int row, int vector)
{
    return tile + row * (HEAD * 2) + ((vector ^ (row & 7)) << 4);
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}

// A call, since it is rarely wanted and would be most of the kernel.
[[maybe_unused]] static __device__ __noinline__ float decode_general_score(const AttentionScores<float> &scores,
                                                                           float product, int64_t i, int64_t j)
{
    float cap;
    return scores.score(product * (float)scores.p.scale, i, j, cap);
}

#endif

template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_decode_mma_kernel(const __grid_constant__ DecodeAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef DecodeShape<HEAD> S;
    constexpr int TILE = S::TILE, STAGES = S::STAGES, VECTORS = HEAD / 8;
    extern __shared__ __align__(128) char shared[];
    __shared__ float maxima[WARPS][16], totals[WARPS][16];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const DecodePosition at(work, DECODE_MMA_ROWS, TILE);
    const CachedRows cached(work, at.batch);
    const int64_t group = p.heads / p.key_heads;
    // Tiles of 16 rows are spread over the warps, and where there are fewer, slices of 16 keys.
    const int row_tiles = at.count <= 16 ? 1 : at.count <= 32 ? 2 : 4;
    const int row_tile = warp % row_tiles, part = warp / row_tiles, parts = WARPS / row_tiles;
    const T *const key = (const T *)work.key + at.key_head * p.key.head;
    const T *const value = (const T *)work.value + at.key_head * p.value.head;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const uint32_t ring = shared_address(shared);

    uint32_t q[HEAD / 16][4];
    int64_t query[2], head[2];
    int first[2], last[2]; // keys of the two rows
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 16 * row_tile + g + 8 * half;
        const bool there = row < at.count;
        const int64_t r = at.first_row + (there ? row : 0);
        query[half] = r % p.queries, head[half] = at.key_head * group + r / p.queries;
        first[half] = (int)cuda_ops_attention_sequence_first_key(&at.s, query[half]);
        last[half] = there ? (int)cuda_ops_attention_sequence_last_key(&at.s, query[half]) : 0;
        const T *const from = (const T *)work.query + at.batch * p.query.batch + head[half] * p.query.head +
                              query[half] * p.query.row + 2 * t;
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++)
#pragma unroll
            for (int high = 0; high < 2; high++)
                q[k][half + 2 * high] = there && 16 * k + 8 * high < head_dim
                                            ? *reinterpret_cast<const uint32_t *>(from + 16 * k + 8 * high)
                                            : 0;
    }
    // A thread copies the same vector of every STEP-th row of a tile.
    constexpr int STEP = THREADS / VECTORS, COPIES = TILE / STEP;
    const int vector = threadIdx.x % VECTORS, first_copy = threadIdx.x / VECTORS;
    const bool of_key = vector * 8 < head_dim, of_value = vector * 8 < value_dim;
    const auto copy = [&](int stage, int i, const T *k, const T *v, bool there) {
        const uint32_t to = vector_address<HEAD>(ring + stage * 2 * S::TILE_BYTES, first_copy + i * STEP, vector);
        cp_async<16>(to, k, there && of_key ? 16 : 0);
        cp_async<16>(to + S::TILE_BYTES, v, there && of_value ? 16 : 0);
    };
    const T *const key_vector = key + (of_key ? vector * 8 : 0);
    const T *const value_vector = value + (of_value ? vector * 8 : 0);
    const auto load = [&](int64_t j, int stage) {
        const int rows = (int)(at.s.keys - j < TILE ? at.s.keys - j : TILE); // that there are
        if (!cached.table) {
            const T *k = key_vector + at.batch * p.key.batch + (j + first_copy) * p.key.row;
            const T *v = value_vector + at.batch * p.value.batch + (j + first_copy) * p.value.row;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const bool there = first_copy + i * STEP < rows;
                copy(stage, i, there ? k : key_vector, there ? v : value_vector, there);
                k += STEP * p.key.row, v += STEP * p.value.row;
            }
            return;
        }
        int32_t pages[COPIES];
        int row_of_page[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            pages[i] = cached.page_of(j + first_copy + i * STEP, first_copy + i * STEP < rows, row_of_page[i]);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const bool there = cached.has(pages[i]);
            const int64_t page = there ? pages[i] : 0;
            copy(stage, i, key_vector + page * p.key.batch + row_of_page[i] * p.key.row,
                 value_vector + page * p.value.batch + row_of_page[i] * p.value.row, there);
            if (!there && first_copy + i * STEP < rows)
                record_bad_page(work, at.batch, j + first_copy + i * STEP, pages[i]);
        }
    };
    // Rows of a tile are of one head or of several; the slopes of a thread's two rows may differ.
    AttentionScores<float> scores[2] = {{p, at.batch, head[0]}, {p, at.batch, head[1]}};
    scores[0].s = scores[1].s = at.s;
    // Of what `weights` hold: scores, or products. The largest is subtracted before they are multiplied: where a mask
    // has the lowest float, so has the score, which times log2(e) would be -inf.
    const float to_score = work.general ? 1.0f : (float)p.scale, to_log2 = to_score * LOG2_E;
    const int tiles = at.from < at.s.keys ? (int)ceil_div(at.s.keys - at.from, TILE) : 0;
    float sum[HEAD / 8][4] = {}, maximum[2] = {-CUDART_INF_F, -CUDART_INF_F}, total[2] = {};
    int stage = 0, stage_to_load = 0;
    // The first rounds only load, so that there is one copy of that in the code.
    for (int tile = 1 - STAGES; tile < tiles; tile++) {
        if (tile >= 0) {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads(); // the tile is there, and the one before has been read
        }
        if (tile + STAGES - 1 < tiles)
            load(at.from + (int64_t)(tile + STAGES - 1) * TILE, stage_to_load);
        cp_async_commit_group();
        stage_to_load = (stage_to_load + 1) % STAGES;
        if (tile < 0)
            continue;
        const uint32_t k = ring + stage * 2 * S::TILE_BYTES, v = k + S::TILE_BYTES;
        stage = (stage + 1) % STAGES;
        for (int slice = part; slice < TILE / 16; slice += parts) {
            float weights[2][4] = {};
#pragma unroll
            for (int d = 0; d < HEAD / 16; d++) {
                uint32_t r[4];
                ldmatrix_x4(r, vector_address<HEAD>(k, 16 * slice + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
                mma_sync<T>(weights[0], q[d], r[0], r[1]);
                mma_sync<T>(weights[1], q[d], r[2], r[3]);
            }
            const int j = (int)at.from + tile * TILE + 16 * slice + 2 * t;
            float factors[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = maximum[half];
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &x = weights[n][2 * half + e];
                        const int at_key = j + 8 * n + e;
                        if (at_key < first[half] || at_key >= last[half])
                            x = -CUDART_INF_F;
                        else if (work.general)
                            x = decode_general_score(scores[half], x, query[half], at_key);
                        largest = fmaxf(largest, x);
                    }
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                // Of -inf alone the exponentials are 0.
                const float base = largest == -CUDART_INF_F ? 0.0f : largest;
                factors[half] = ex2_approx_ftz((maximum[half] - base) * to_log2);
                maximum[half] = largest;
                total[half] *= factors[half];
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        weights[n][e] = ex2_approx_ftz((weights[n][e] - base) * to_log2);
                        total[half] += weights[n][e];
                    }
            }
            // The largest score seldom changes.
            if (__any_sync(FULL_WARP, factors[0] != 1.0f || factors[1] != 1.0f))
#pragma unroll
                for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[n][e] *= factors[e / 2];
            const uint32_t left[4] = {pack<T>(weights[0][0], weights[0][1]), pack<T>(weights[0][2], weights[0][3]),
                                      pack<T>(weights[1][0], weights[1][1]), pack<T>(weights[1][2], weights[1][3])};
#pragma unroll
            for (int n = 0; n < HEAD / 8; n += 2) {
                uint32_t r[4];
                ldmatrix_x4_trans(r, vector_address<HEAD>(v, 16 * slice + lane % 16, n + lane / 16));
                mma_sync<T>(sum[n], left, r[0], r[1]);
                mma_sync<T>(sum[n + 1], left, r[2], r[3]);
            }
        }
    }
    release_successor();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 1);
        total[half] += __shfl_xor_sync(FULL_WARP, total[half], 2);
        if (t == 0) {
            maxima[warp][g + 8 * half] = maximum[half];
            totals[warp][g + 8 * half] = total[half];
        }
    }
    __syncthreads(); // the numbers are there, and the tiles have been read
    // The largest score and the sum of a row of a tile, over the warps that have parts of its keys.
    const auto of_row = [&](int tile, int row, float &largest, float &sum_of_row) {
        largest = -CUDART_INF_F, sum_of_row = 0.0f;
        for (int w = tile; w < WARPS; w += row_tiles)
            largest = fmaxf(largest, maxima[w][row]);
        const float base = largest == -CUDART_INF_F ? 0.0f : largest;
        for (int w = tile; w < WARPS; w += row_tiles)
            sum_of_row += totals[w][row] * ex2_approx_ftz((maxima[w][row] - base) * to_log2);
    };
    constexpr int PITCH = HEAD + 8; // between rows, which would else be in the same banks
    float *const result = (float *)shared;
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest, sum_of_row;
        of_row(row_tile, g + 8 * half, largest, sum_of_row);
        const float base = largest == -CUDART_INF_F ? 0.0f : largest;
        scale[half] = sum_of_row == 0.0f ? 0.0f : ex2_approx_ftz((maximum[half] - base) * to_log2) / sum_of_row;
    }
    for (int turn = 0; turn < parts; turn++) {
        if (part == turn)
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float &to = result[(16 * row_tile + g + e / 2 * 8) * PITCH + 8 * n + 2 * t + e % 2];
                    const float x = sum[n][e] * scale[e / 2];
                    to = turn == 0 ? x : to + x;
                }
        __syncthreads();
    }
    const int64_t row_of_all = (at.batch * p.heads + at.key_head * group) * p.queries + at.first_row;
    const int64_t row_of_split = at.split * work.all_rows + row_of_all;
    const int quads = value_dim / 4;
    for (int index = threadIdx.x; index < at.count * quads; index += THREADS) {
        const int row = index / quads, column = index % quads * 4;
        const float4 x = *reinterpret_cast<const float4 *>(result + row * PITCH + column);
        if (work.splits > 1) {
            *reinterpret_cast<float4 *>((float *)work.partial + (row_of_split + row) * value_dim + column) = x;
        } else {
            const int64_t r = at.first_row + row;
            T *const to = (T *)work.output + at.batch * p.output.batch +
                          (at.key_head * group + r / p.queries) * p.output.head + r % p.queries * p.output.row + column;
            *reinterpret_cast<uint2 *>(to) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
        }
    }
    for (int row = threadIdx.x; row < at.count; row += THREADS) {
        float largest, sum_of_row;
        of_row(row / 16, row % 16, largest, sum_of_row);
        largest *= to_score;
        if (work.splits > 1) {
            ((float *)work.partial_maximum)[row_of_split + row] = largest;
            ((float *)work.partial_total)[row_of_split + row] = sum_of_row;
        } else {
            ((float *)work.logsumexp)[row_of_all + row] =
                sum_of_row == 0.0f ? -CUDART_INF_F : largest + logf(sum_of_row);
        }
    }
#endif
}

template <typename T, int HEAD>
static cuda_ops_status launch_decode_mma(const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    const int bytes = DecodeShape<HEAD>::BYTES;
    allow_shared_memory(attention_decode_mma_kernel<T, HEAD>, bytes);
    attention_decode_mma_kernel<T, HEAD><<<(unsigned int)blocks, THREADS, bytes, stream>>>(work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_decode_mma(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    return head == 64    ? launch_decode_mma<T, 64>(work, blocks, stream)
           : head == 128 ? launch_decode_mma<T, 128>(work, blocks, stream)
                         : launch_decode_mma<T, 256>(work, blocks, stream);
}

template <typename T, int HEAD>
static int decode_mma_blocks()
{
    const int bytes = DecodeShape<HEAD>::BYTES;
    allow_shared_memory(attention_decode_mma_kernel<T, HEAD>, bytes);
    return active_blocks(attention_decode_mma_kernel<T, HEAD>, THREADS, bytes);
}

template <typename T>
static int decode_mma_blocks(int head)
{
    return head == 64    ? decode_mma_blocks<T, 64>()
           : head == 128 ? decode_mma_blocks<T, 128>()
                         : decode_mma_blocks<T, 256>();
}

#endif
