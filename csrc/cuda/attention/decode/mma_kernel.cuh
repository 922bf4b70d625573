// The decode path's kernel on the tensor cores, to be instantiated one dtype a file; decode.cu says what it does.
#ifndef CUDA_OPS_ATTENTION_DECODE_MMA_KERNEL_CUH
#define CUDA_OPS_ATTENTION_DECODE_MMA_KERNEL_CUH

#include "attention/decode/finish.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
static constexpr float LOG2_E = 1.44269504088896341f;

// Tiles of keys and values of 16 KiB each, in a ring of three. A unit of warps has slices of the tile's keys. Of 256
// elements, where there are but two slices, it is two warps, each of which has half of the keys' and values' elements.
template <int HEAD>
struct DecodeShape {
    static constexpr int TILE = decode_mma_keys(HEAD), STAGES = 3, ROW_BYTES = HEAD * 2;
    static constexpr int HALVES = HEAD == 256 ? 2 : 1, OWN = HEAD / HALVES, UNITS = WARPS / HALVES;
    static constexpr int SLICE = HEAD == 64 ? 32 : 16, SLICES = TILE / SLICE;
    static constexpr int TILE_BYTES = TILE * ROW_BYTES, RING_BYTES = STAGES * 2 * TILE_BYTES;
    // Behind the ring: sums over half of the elements, of two slices by turns.
    static constexpr int EXCHANGE = HALVES == 2 ? WARPS * 2 * WARP_SIZE : 0; // float4 of a slice's
    static constexpr int BYTES = RING_BYTES + 2 * EXCHANGE * 16;
    static_assert(decode_mma_rows(HEAD) * HEAD * 4 <= 2 * TILE_BYTES, "results fit where a stage was");
    static_assert(decode_mma_rows(HEAD) == 16 * UNITS, "16 rows a unit, if there are so many");
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}

// Scores of query i and keys j, j + 1, j + 8 and j + 9 from their products, -inf outside [first, last). A call, since
// it is rarely wanted and would be most of the kernel.
[[maybe_unused]] static __device__ __noinline__ float4 decode_general_scores(const DecodeAttention &work,
                                                                             float4 products, int64_t batch,
                                                                             int64_t head, int64_t i, int j, int first,
                                                                             int last)
{
    const AttentionScores<float> scores(work.p, batch, head);
    const float scale = (float)work.p.scale;
    float cap;
    const auto score = [&](float product, int key) {
        return first <= key && key < last ? scores.score(product * scale, i, key, cap) : -CUDART_INF_F;
    };
    return make_float4(score(products.x, j), score(products.y, j + 1), score(products.z, j + 8),
                       score(products.w, j + 9));
}

#endif

template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS, 2) attention_decode_mma_kernel(const __grid_constant__ DecodeAttention work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef DecodeShape<HEAD> S;
    constexpr int TILE = S::TILE, STAGES = S::STAGES, VECTORS = HEAD / 8, OWN = S::OWN, SLICE = S::SLICE;
    extern __shared__ __align__(128) char shared[];
    __shared__ float unit_maxima[WARPS][16], unit_totals[WARPS][16];
    __shared__ float row_maxima[16 * WARPS], row_totals[16 * WARPS];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    if (p.sequences.key_lengths)
        wait_for_predecessor();   // lengths are read
    DecodeWalk ahead(work, TILE); // whose keys are copied next
    wait_for_predecessor();
    release_successor();
    DecodeWalk here = ahead; // whose keys are looked at
    const int tiles = here.left + here.rest;
    if (tiles == 0)
        return;
    const DecodeRows rows(work, here.chunk);
    // Tiles of 16 rows are spread over the units, and where there are fewer, slices of keys.
    const int unit = warp / S::HALVES, half_of_elements = warp % S::HALVES;
    const int row_tiles = rows.count <= 16 ? 1 : rows.count <= 32 ? 2 : 4;
    const int row_tile = unit % row_tiles, part = unit / row_tiles, parts = S::UNITS / row_tiles;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const uint32_t ring = shared_address(shared);

    // A thread copies the same vector of every STEP-th row of a tile. Vectors of a row are permuted by its number, so
    // that those of eight rows are in different banks.
    constexpr int STEP = THREADS / VECTORS, COPIES = TILE / STEP;
    const int vector = threadIdx.x % VECTORS, first_copy = threadIdx.x / VECTORS;
    const int key_bytes = vector * 8 < head_dim ? 16 : 0, value_bytes = vector * 8 < value_dim ? 16 : 0;
    const uint32_t copy_to = ring + first_copy * S::ROW_BYTES + ((vector ^ (first_copy & 7)) << 4);
    const T *const first_key = (const T *)work.key + (key_bytes ? vector * 8 : 0);
    const T *const first_value = (const T *)work.value + (value_bytes ? vector * 8 : 0);
    const T *key_at, *value_at; // of the thread's first row of the next tile; of a paged cache: of page 0
    int next_key;               // of that tile
    const auto copy = [&](int stage, int i, const T *k, const T *v, bool there) {
        // Steps of four rows change the lowest three bits of a row's number, larger ones do not.
        const uint32_t to = (copy_to ^ ((STEP * i & 7) << 4)) + stage * 2 * S::TILE_BYTES + i * STEP * S::ROW_BYTES;
        cp_async<16>(to, k, there ? key_bytes : 0);
        cp_async<16>(to + S::TILE_BYTES, v, there ? value_bytes : 0);
    };
    const auto go_ahead = [&] {
        const bool paged = p.sequences.block_table != nullptr;
        next_key = ahead.from;
        const int64_t batch = paged ? 0 : ahead.group.batch, row = paged ? 0 : next_key + first_copy;
        key_at = first_key + batch * p.key.batch + ahead.group.key_head * p.key.head + row * p.key.row;
        value_at = first_value + batch * p.value.batch + ahead.group.key_head * p.value.head + row * p.value.row;
    };
    const auto load = [&](int stage) {
        const int there = ahead.to - next_key; // rows that there are, or more
        if (p.sequences.block_table) {
            const CachedRows cached(work, ahead.group.batch);
            int32_t pages[COPIES];
            int row_of_page[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                pages[i] =
                    cached.page_of(next_key + first_copy + i * STEP, first_copy + i * STEP < there, row_of_page[i]);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const bool has = cached.has(pages[i]);
                const int64_t page = has ? pages[i] : 0;
                copy(stage, i, key_at + page * p.key.batch + row_of_page[i] * p.key.row,
                     value_at + page * p.value.batch + row_of_page[i] * p.value.row, has);
                if (!has && first_copy + i * STEP < there)
                    record_bad_page(work, ahead.group.batch, next_key + first_copy + i * STEP, pages[i]);
            }
        } else {
            const T *k = key_at, *v = value_at;
            if (there >= TILE) {
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    copy(stage, i, k, v, true);
                    k += STEP * p.key.row, v += STEP * p.value.row;
                }
            } else {
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const bool is_there = first_copy + i * STEP < there;
                    copy(stage, i, is_there ? k : first_key, is_there ? v : first_value, is_there);
                    k += STEP * p.key.row, v += STEP * p.value.row;
                }
            }
            key_at = k, value_at = v;
        }
        next_key += TILE;
        if (--ahead.left == 0 && ahead.next())
            go_ahead();
    };

    // Of the 16 rows of a warp.
    uint32_t q[OWN / 16][4];
    int query[2], head[2], first[2], last[2]; // of two rows, and the keys that they see
    int all_first, all_last;                  // those that all rows see
    float sum[OWN / 8][4], maximum[2], total[2];
    int tile_key; // the first of the tile that is looked at
    const auto begin = [&] {
        check_length(here);
        const cuda_ops_attention_sequence s = decode_sequence_of(p, here.group.batch);
        const T *const queries = (const T *)work.query + here.group.batch * p.query.batch;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * row_tile + g + 8 * half;
            const bool there = row < rows.count;
            const uint32_t r = (uint32_t)(rows.first_row + (there ? row : 0)), head_of_group = work.by_queries.of(r);
            query[half] = (int)(r - head_of_group * (uint32_t)p.queries);
            head[half] = here.group.key_head * work.heads_of_group + (int)head_of_group;
            const int seen = (int)cuda_ops_attention_sequence_last_key(&s, query[half]);
            first[half] = (int)cuda_ops_attention_sequence_first_key(&s, query[half]);
            last[half] = !there ? 0 : seen < here.to ? seen : here.to;
            const int column = half_of_elements * OWN + 2 * t;
            const T *const from = queries + head[half] * p.query.head + query[half] * p.query.row + column;
#pragma unroll
            for (int k = 0; k < OWN / 16; k++)
#pragma unroll
                for (int high = 0; high < 2; high++)
                    q[k][half + 2 * high] = there && column + 16 * k + 8 * high < head_dim
                                                ? *reinterpret_cast<const uint32_t *>(from + 16 * k + 8 * high)
                                                : 0;
            maximum[half] = -CUDART_INF_F, total[half] = 0.0f;
        }
        const int seen = (int)cuda_ops_attention_sequence_last_key(&s, 0);
        all_first = (int)cuda_ops_attention_sequence_first_key(&s, p.queries - 1);
        all_last = seen < here.to ? seen : here.to;
        tile_key = here.from;
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[n][e] = 0.0f;
    };

    // Of what `weights` hold: scores, or products. The largest is subtracted before they are multiplied: where a mask
    // has the lowest float, so has the score, which times log2(e) would be -inf.
    const float to_score = work.general ? 1.0f : (float)p.scale, to_log2 = to_score * LOG2_E;
    // What ldmatrix reads of the first slice of the ring's first keys and values. Of the vectors' permutation the two
    // lowest bits of pairs of vectors remain.
    const uint32_t key_matrix = ring + (lane / 16 * 8 + lane % 8) * S::ROW_BYTES +
                                (((lane / 8 % 2) ^ (lane % 8)) << 4) + half_of_elements * OWN * 2;
    const uint32_t value_matrix = ring + S::TILE_BYTES + lane % 16 * S::ROW_BYTES + (((lane / 16) ^ (lane % 8)) << 4) +
                                  half_of_elements * OWN * 2;
    const auto pair_of_vectors = [](uint32_t matrix, int pair) { return (matrix ^ (pair % 4 * 32)) + pair / 4 * 128; };

    go_ahead();
    bool begins = true;
    int stage = 0, stage_to_load = 0;
    // The first rounds only load, so that there is one copy of that in the code.
    for (int tile = 1 - STAGES; tile < tiles; tile++) {
        if (tile >= 0) {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads(); // the tile is there, and the one before has been read
        }
        if (tile + STAGES - 1 < tiles)
            load(stage_to_load);
        cp_async_commit_group();
        stage_to_load = stage_to_load + 1 < STAGES ? stage_to_load + 1 : 0;
        if (begins)
            begin();
        begins = false;
        if (tile < 0)
            continue;
        const uint32_t of_stage = stage * 2 * S::TILE_BYTES;
        for (int slice = part; slice < S::SLICES; slice += parts) {
            const uint32_t of_slice = of_stage + slice * SLICE * S::ROW_BYTES;
            float weights[SLICE / 8][4] = {};
#pragma unroll
            for (int d = 0; d < OWN / 16; d++)
#pragma unroll
                for (int n = 0; n < SLICE / 8; n += 2) {
                    uint32_t r[4];
                    ldmatrix_x4(r, pair_of_vectors(key_matrix + of_slice, d) + n * 8 * S::ROW_BYTES);
                    mma_sync<T>(weights[n], q[d], r[0], r[1]);
                    mma_sync<T>(weights[n + 1], q[d], r[2], r[3]);
                }
            if constexpr (S::HALVES == 2) {
                float4 *const sums = (float4 *)(shared + S::RING_BYTES) + slice % 2 * S::EXCHANGE + lane;
#pragma unroll
                for (int n = 0; n < 2; n++)
                    sums[(2 * warp + n) * WARP_SIZE] =
                        make_float4(weights[n][0], weights[n][1], weights[n][2], weights[n][3]);
                __syncthreads();
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float4 other = sums[(2 * (warp ^ 1) + n) * WARP_SIZE];
                    weights[n][0] += other.x, weights[n][1] += other.y;
                    weights[n][2] += other.z, weights[n][3] += other.w;
                }
            }
            const int slice_key = tile_key + slice * SLICE;
            if (work.general || slice_key < all_first || slice_key + SLICE > all_last)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int n = 0; n < SLICE / 8; n += 2) {
                        const int j = slice_key + 8 * n + 2 * t, from = first[half], to = last[half];
                        float4 x = make_float4(weights[n][2 * half], weights[n][2 * half + 1], weights[n + 1][2 * half],
                                               weights[n + 1][2 * half + 1]);
                        if (work.general) {
                            x = decode_general_scores(work, x, here.group.batch, head[half], query[half], j, from, to);
                        } else {
                            x.x = from <= j && j < to ? x.x : -CUDART_INF_F;
                            x.y = from <= j + 1 && j + 1 < to ? x.y : -CUDART_INF_F;
                            x.z = from <= j + 8 && j + 8 < to ? x.z : -CUDART_INF_F;
                            x.w = from <= j + 9 && j + 9 < to ? x.w : -CUDART_INF_F;
                        }
                        weights[n][2 * half] = x.x, weights[n][2 * half + 1] = x.y;
                        weights[n + 1][2 * half] = x.z, weights[n + 1][2 * half + 1] = x.w;
                    }
            float factors[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = maximum[half];
#pragma unroll
                for (int n = 0; n < SLICE / 8; n++)
                    largest = fmaxf(largest, fmaxf(weights[n][2 * half], weights[n][2 * half + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                const float base = decode_base(largest);
                factors[half] = ex2_approx_ftz((maximum[half] - base) * to_log2);
                maximum[half] = largest;
                total[half] *= factors[half];
#pragma unroll
                for (int n = 0; n < SLICE / 8; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        weights[n][e] = ex2_approx_ftz((weights[n][e] - base) * to_log2);
                        total[half] += weights[n][e];
                    }
            }
            // The largest score seldom changes.
            if (__any_sync(FULL_WARP, factors[0] != 1.0f || factors[1] != 1.0f))
#pragma unroll
                for (int n = 0; n < OWN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[n][e] *= factors[e / 2];
#pragma unroll
            for (int n = 0; n < SLICE / 8; n += 2) {
                const uint32_t left[4] = {pack<T>(weights[n][0], weights[n][1]), pack<T>(weights[n][2], weights[n][3]),
                                          pack<T>(weights[n + 1][0], weights[n + 1][1]),
                                          pack<T>(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
                for (int d = 0; d < OWN / 8; d += 2) {
                    uint32_t r[4];
                    ldmatrix_x4_trans(r, pair_of_vectors(value_matrix + of_slice, d / 2) + n * 8 * S::ROW_BYTES);
                    mma_sync<T>(sum[d], left, r[0], r[1]);
                    mma_sync<T>(sum[d + 1], left, r[2], r[3]);
                }
            }
        }
        tile_key += TILE;
        if (--here.left == 0) {
            // Units that have parts of a row's keys are put together where the tile was; of a cluster's blocks, at the
            // same place in all of them, since nothing is copied any more.
            float *const results = (float *)(shared + (work.shares == 0 ? 0 : of_stage));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half] += __shfl_xor_sync(FULL_WARP, total[half], 1);
                total[half] += __shfl_xor_sync(FULL_WARP, total[half], 2);
                if (t == 0 && half_of_elements == 0) {
                    unit_maxima[unit][g + 8 * half] = maximum[half];
                    unit_totals[unit][g + 8 * half] = total[half];
                }
            }
            __syncthreads(); // the numbers are there, and the tile has been read
            float scale[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = g + 8 * half;
                float largest = -CUDART_INF_F, sum_of_row = 0.0f;
                for (int u = row_tile; u < S::UNITS; u += row_tiles)
                    largest = fmaxf(largest, unit_maxima[u][row]);
                const float base = decode_base(largest);
                for (int u = row_tile; u < S::UNITS; u += row_tiles)
                    sum_of_row += unit_totals[u][row] * ex2_approx_ftz((unit_maxima[u][row] - base) * to_log2);
                scale[half] = sum_of_row == 0.0f ? 0.0f : ex2_approx_ftz((maximum[half] - base) * to_log2) / sum_of_row;
                if (t == 0 && part == 0 && half_of_elements == 0) {
                    row_maxima[16 * row_tile + row] = largest * to_score;
                    row_totals[16 * row_tile + row] = sum_of_row;
                }
            }
            for (int turn = 0; turn < parts; turn++) {
                if (part == turn)
#pragma unroll
                    for (int n = 0; n < OWN / 8; n++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const int at = decode_result_at<HEAD, 8>(16 * row_tile + g + 8 * half,
                                                                     half_of_elements * OWN + 8 * n + 2 * t);
                            float2 x = make_float2(sum[n][2 * half] * scale[half], sum[n][2 * half + 1] * scale[half]);
                            float2 &to = *reinterpret_cast<float2 *>(results + at);
                            if (turn > 0)
                                x.x += to.x, x.y += to.y;
                            to = x;
                        }
                __syncthreads();
            }
            decode_finish<T, HEAD, 8, THREADS>(here, rows, results, row_maxima, row_totals);
            begins = here.next();
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
#endif
}

template <typename T, int HEAD>
static cuda_ops_status launch_decode_mma(const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    const auto kernel = attention_decode_mma_kernel<T, HEAD>;
    constexpr int BYTES = DecodeShape<HEAD>::BYTES;
    const int capability = current_device().capability;
    allow_shared_memory(kernel, BYTES);
    if (work.cluster > DECODE_PORTABLE_CLUSTER)
        allow_clusters_of_16(kernel);
    const cudaError_t started = start_clusters(kernel, blocks, THREADS, work.cluster, BYTES, capability, stream, work);
    if (started != cudaSuccess && work.cluster > DECODE_PORTABLE_CLUSTER) {
        cudaGetLastError(); // a device that cannot run them
        DecodeAttention smaller = work;
        smaller.cluster = DECODE_PORTABLE_CLUSTER;
        return launch_decode_mma<T, HEAD>(smaller, blocks / work.cluster * smaller.cluster, stream);
    }
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
