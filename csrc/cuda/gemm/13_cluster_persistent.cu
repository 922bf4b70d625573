// Rung 13: D = activation(alpha * op(A) op(B) + bias) by TMA and wgmma in clusters, with a persistent grid.
#include "common.cuh"
#include "gemm/hopper.cuh"
#include "gemm/rungs.h"

#if defined(CUDA_OPS_SM90A)

// One tile of one configuration. MN-major is what the kernel calls A stored k x m and B stored k x n.
template <typename T_, int TILE_M_, int TILE_N_, int CLUSTER_M_, int CLUSTER_N_, bool PINGPONG_, int STAGES_,
          bool A_MN_MAJOR_, bool B_MN_MAJOR_>
struct Tile {
    typedef T_ T;
    static constexpr int M = TILE_M_, N = TILE_N_, CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_, STAGES = STAGES_;
    static constexpr bool PINGPONG = PINGPONG_, A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T); // elements
    static constexpr int K = ROW;                            // depth of a stage
    // What one consumer warpgroup multiplies.
    static constexpr int GROUP_M = PINGPONG ? M : M / 2;
    static constexpr int BLOCKS = GROUP_M / 64; // wgmmas of 64 rows
    // MN-major tiles lie as columns of ROW x K, so that a width that is no multiple of ROW is rounded up.
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;
    static constexpr int A_COLUMNS = (M + ROW - 1) / ROW, B_COLUMNS = (N + ROW - 1) / ROW;
    static constexpr int A_BYTES = A_MN_MAJOR ? A_COLUMNS * COLUMN_BYTES : M * SWIZZLE_ROW;
    static constexpr int B_BYTES = B_MN_MAJOR ? B_COLUMNS * COLUMN_BYTES : N * SWIZZLE_ROW;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    // Results of 16 bits leave through shared memory, CHUNK columns at a time, in two buffers a warpgroup.
    static constexpr int CHUNK = N % 64 == 0 ? 64 : 32;
    static constexpr int CHUNK_ROW = CHUNK * 2;
    static constexpr int BUFFER_BYTES = GROUP_M * CHUNK_ROW;
    static constexpr int BUFFERS = sizeof(T) == 2 ? 2 : 0;
    static constexpr int SHARED_BYTES =
        STAGES * STAGE_BYTES + 2 * BUFFERS * BUFFER_BYTES + (2 * STAGES + 2) * 8 + SWIZZLE_ATOM;
    static_assert(SHARED_BYTES <= 232448, "an SM's shared memory");
    static_assert(M % (64 * CLUSTER_N) == 0 && N % (8 * CLUSTER_M) == 0, "each block of a cluster loads its part");
    static_assert(STAGE_BYTES % SWIZZLE_ATOM == 0 && A_BYTES % SWIZZLE_ATOM == 0, "tiles are aligned to the swizzle");
};

struct GemmWork {
    void *d;
    const void *bias;
    int64_t ldd, stride_d;
    int m, n, k;
    int clusters_m, clusters_n; // cluster tiles
    int batch, splits, chunk;   // k in `splits` pieces of `chunk`; a piece's result goes to d + piece * stride_d
    int total;                  // clusters_m * clusters_n * batch * splits
    int group;                  // rows of cluster tiles that are walked together
    int a_shared, b_shared;     // one matrix for all products of the batch
    float alpha;
    int bias_is_float, activation, output_is_float, copies_out;
};

#if defined(CUDA_OPS_HOPPER_CODE)

struct Place {
    int m, n, batch, split; // the first row and column of this block's tile
    int k_begin, steps;
};

// Tiles in bands of `group` cluster tiles, column by column within a band: those that run at one time make up about a
// square, so that what they read of A and B stays in the L2 cache.
template <typename C>
__device__ __forceinline__ Place place_of(const GemmWork &work, int index, int rank_m, int rank_n)
{
    const int tiles = work.clusters_m * work.clusters_n;
    const int outer = index / tiles;
    index -= outer * tiles;
    const int band_tiles = work.group * work.clusters_n, band = index / band_tiles;
    index -= band * band_tiles;
    const int first = band * work.group, rows = min(work.group, work.clusters_m - first);
    const int column = index / rows, row = first + index - column * rows;
    Place place;
    place.m = (row * C::CLUSTER_M + rank_m) * C::M;
    place.n = (column * C::CLUSTER_N + rank_n) * C::N;
    place.split = outer / work.batch;
    place.batch = outer - place.split * work.batch;
    place.k_begin = place.split * work.chunk;
    place.steps = (min(work.chunk, work.k - place.k_begin) + C::K - 1) / C::K;
    return place;
}

// One thread's life: fills the ring, tile after tile.
template <typename C>
__device__ __forceinline__ void produce(const GemmWork &work, const CUtensorMap *map_a, const CUtensorMap *map_b,
                                        uint32_t stages, uint32_t full, uint32_t empty, int rank_m, int rank_n)
{
    // A's tile is shared by the blocks of a cluster with the same rank_m, B's by those with the same rank_n; each loads
    // its part for all of them.
    uint16_t blocks_a = 0, blocks_b = 0;
    for (int i = 0; i < C::CLUSTER_N; i++)
        blocks_a |= 1 << (rank_m + i * C::CLUSTER_M);
    for (int i = 0; i < C::CLUSTER_M; i++)
        blocks_b |= 1 << (i + rank_n * C::CLUSTER_M);
    int stage = 0, phase = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER) {
        const Place place = place_of<C>(work, index, rank_m, rank_n);
        const int batch_a = work.a_shared ? 0 : place.batch, batch_b = work.b_shared ? 0 : place.batch;
        int k = place.k_begin;
        for (int step = 0; step < place.steps; step++, k += C::K) {
            barrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            barrier_expect(arrived, C::STAGE_BYTES);
            if constexpr (C::A_MN_MAJOR) {
                constexpr int part = C::K / C::CLUSTER_N;
#pragma unroll
                for (int column = 0; column < C::A_COLUMNS; column++) {
                    const uint32_t to = a + column * C::COLUMN_BYTES + rank_n * part * SWIZZLE_ROW;
                    if constexpr (C::CLUSTER_N > 1)
                        copy_in_multicast(to, map_a, arrived, place.m + column * C::ROW, k + rank_n * part, batch_a,
                                          blocks_a);
                    else
                        copy_in(to, map_a, arrived, place.m + column * C::ROW, k, batch_a);
                }
            } else {
                constexpr int part = C::M / C::CLUSTER_N;
                if constexpr (C::CLUSTER_N > 1)
                    copy_in_multicast(a + rank_n * part * SWIZZLE_ROW, map_a, arrived, k, place.m + rank_n * part,
                                      batch_a, blocks_a);
                else
                    copy_in(a, map_a, arrived, k, place.m, batch_a);
            }
            if constexpr (C::B_MN_MAJOR) {
                constexpr int part = C::K / C::CLUSTER_M;
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++) {
                    const uint32_t to = b + column * C::COLUMN_BYTES + rank_m * part * SWIZZLE_ROW;
                    if constexpr (C::CLUSTER_M > 1)
                        copy_in_multicast(to, map_b, arrived, place.n + column * C::ROW, k + rank_m * part, batch_b,
                                          blocks_b);
                    else
                        copy_in(to, map_b, arrived, place.n + column * C::ROW, k, batch_b);
                }
            } else {
                constexpr int part = C::N / C::CLUSTER_M;
                if constexpr (C::CLUSTER_M > 1)
                    copy_in_multicast(b + rank_m * part * SWIZZLE_ROW, map_b, arrived, k, place.n + rank_m * part,
                                      batch_b, blocks_b);
                else
                    copy_in(b, map_b, arrived, k, place.n, batch_b);
            }
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// Tells every block that loads into this block's stage that this warpgroup is done with it.
template <typename C>
__device__ __forceinline__ void release_stage(uint32_t empty, int stage, int thread, int rank_m, int rank_n)
{
    if constexpr (C::CLUSTER == 1) {
        if (thread == 0)
            barrier_arrive(empty + 8 * stage);
    } else {
        const int other_m = thread % C::CLUSTER_M, other_n = thread / C::CLUSTER_M;
        if (thread < C::CLUSTER && (other_m == rank_m || other_n == rank_n))
            barrier_arrive_at(empty + 8 * stage, thread);
    }
}

template <typename C>
__device__ __forceinline__ float2 bias_pair(const GemmWork &work, int column)
{
    typedef typename C::T T;
    float2 pair = {0.0f, 0.0f};
    if (work.bias_is_float) {
        const float *const bias = (const float *)work.bias;
        pair.x = column < work.n ? bias[column] : 0.0f;
        pair.y = column + 1 < work.n ? bias[column + 1] : 0.0f;
    } else {
        const T *const bias = (const T *)work.bias;
        pair.x = column < work.n ? load_as_accumulate(bias[column]) : 0.0f;
        pair.y = column + 1 < work.n ? load_as_accumulate(bias[column + 1]) : 0.0f;
    }
    return pair;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t packed;
    if constexpr (is_bfloat16<T>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&packed, &pair, 4);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        memcpy(&packed, &pair, 4);
    }
    return packed;
}

// alpha, bias and activation on the accumulators. A thread of a warp holds, of each 8 columns, two: of rows g and g
// + 8.
template <typename C>
__device__ __forceinline__ void finish(float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work, int column)
{
    if (work.alpha != 1.0f)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] *= work.alpha;
    if (work.bias)
#pragma unroll
        for (int i = 0; i < C::N / 8; i++) {
            const float2 bias = bias_pair<C>(work, column + 8 * i);
#pragma unroll
            for (int block = 0; block < C::BLOCKS; block++) {
                sum[block][4 * i] += bias.x;
                sum[block][4 * i + 1] += bias.y;
                sum[block][4 * i + 2] += bias.x;
                sum[block][4 * i + 3] += bias.y;
            }
        }
    if (work.activation == CUDA_OPS_GEMM_RELU)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] = sum[block][i] < 0.0f ? 0.0f : sum[block][i]; // NaN stays
    if (work.activation == CUDA_OPS_GEMM_GELU)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] = 0.5f * sum[block][i] * (1.0f + erff(sum[block][i] * 0.70710678118654752f));
}

// float32 results straight from registers: a quad of threads writes 32 bytes of a row, a whole sector.
template <typename C>
__device__ __forceinline__ void store_floats(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             int64_t matrix, int row, int column)
{
    float *const d = (float *)work.d + matrix * work.stride_d;
    const bool pairs = (work.ldd % 2 == 0) && (work.stride_d % 2 == 0) && ((uintptr_t)work.d % 8 == 0);
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 64 * block + 8 * half;
            if (r >= work.m)
                continue;
            float *const line = d + r * work.ldd;
#pragma unroll
            for (int i = 0; i < C::N / 8; i++) {
                const int c = column + 8 * i;
                const float x = sum[block][4 * i + 2 * half], y = sum[block][4 * i + 2 * half + 1];
                if (pairs && c + 1 < work.n) {
                    *(float2 *)(line + c) = make_float2(x, y);
                } else {
                    if (c < work.n)
                        line[c] = x;
                    if (c + 1 < work.n)
                        line[c + 1] = y;
                }
            }
        }
}

// Where a 16-byte piece of a row of a buffer lies: the copy engine's swizzle of 128 or 64 bytes, which also keeps the
// pieces of 8 rows on different banks.
template <typename C>
__device__ __forceinline__ int piece_offset(int row, int piece)
{
    return row * C::CHUNK_ROW + (C::CHUNK == 64 ? piece ^ (row % 8) : piece ^ (row / 2 % 4)) * 16;
}

// Results of 16 bits, CHUNK columns at a time: into a buffer in shared memory by stmatrix, and from there by the copy
// engine, while the next columns, or the next tile's products, are being made.
template <typename C>
__device__ __forceinline__ void store_halves(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             const CUtensorMap *map_d, char *buffers, int &buffer, int64_t matrix,
                                             int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
        char *const to = buffers + buffer * C::BUFFER_BYTES;
        const uint32_t to_shared = shared_address(to);
        // The buffer's last copy out must have read it.
        if (thread == 0)
            wait_copied_out<1>();
        named_barrier(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++) {
            // stmatrix takes the rows' addresses from the lanes: 0-15 the rows, 16-31 the same of the next 8 columns.
            const int row = 64 * block + 16 * warp + lane % 16;
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++) {
                const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
                store_matrices(to_shared + piece_offset<C>(row, 2 * i + lane / 16), pack<T>(s[0], s[1]),
                               pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
            }
        }
        const int column = first_column + C::CHUNK * chunk;
        if (work.copies_out) {
            fence_async_proxy();
            named_barrier(1 + group, WARPGROUP);
            if (thread == 0)
                copy_out(map_d, to_shared, column, first_row, (int)matrix);
        } else {
            // D that the copy engine cannot write: by the threads, element by element, neighbours next to each other.
            named_barrier(1 + group, WARPGROUP);
            T *const d = (T *)work.d + matrix * work.stride_d;
            for (int i = thread; i < C::GROUP_M * C::CHUNK; i += WARPGROUP) {
                const int r = i / C::CHUNK, c = i % C::CHUNK;
                if (first_row + r < work.m && column + c < work.n)
                    d[(first_row + r) * work.ldd + column + c] =
                        *(const T *)(to + piece_offset<C>(r, c / 8) + c % 8 * 2);
            }
        }
    }
}

template <typename C>
__device__ __forceinline__ void consume(const GemmWork &work, const CUtensorMap *map_d, uint32_t stages, uint32_t full,
                                        uint32_t empty, char *buffers, int rank_m, int rank_n)
{
    typedef typename C::T T;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    buffers += group * C::BUFFERS * C::BUFFER_BYTES;
    [[maybe_unused]] int buffer = 0;
    const int my_row = C::PINGPONG ? 0 : group * C::GROUP_M;
    float sum[C::BLOCKS][C::N / 2];

    // Descriptions of stage 0's tiles.
    const uint32_t a_first = stages + (C::A_MN_MAJOR ? my_row / C::ROW * C::COLUMN_BYTES : my_row * SWIZZLE_ROW);
    const uint64_t a_tile = describe(a_first, C::COLUMN_BYTES, SWIZZLE_ATOM);
    const uint64_t b_tile = describe(stages + C::A_BYTES, C::COLUMN_BYTES, SWIZZLE_ATOM);
    constexpr int A_BLOCK = C::A_MN_MAJOR ? C::COLUMN_BYTES : 64 * SWIZZLE_ROW;
    constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;

    const uint32_t order = empty + 8 * C::STAGES;
    int stage = 0, phase = 0, turn = 0, mine = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER, turn ^= 1) {
        const Place place = place_of<C>(work, index, rank_m, rank_n);
        if (C::PINGPONG && turn != group) {
            // The other warpgroup's tile: its stages pass by.
            stage += place.steps;
            phase ^= (stage / C::STAGES) & 1;
            stage %= C::STAGES;
            continue;
        }
        // Not before the other warpgroup has seen its last stage full: a barrier tells only the phase before its
        // present one from the others, so that it must not be asked two fills ahead.
        if (C::PINGPONG)
            barrier_wait(order + 8 * group, (mine & 1) ^ (group == 0));
        mine++;
        int before = stage;
        for (int step = 0; step < place.steps; step++) {
            barrier_wait(full + 8 * stage, phase);
            if (C::PINGPONG && step + 1 == place.steps && thread == 0)
                barrier_arrive(order + 8 * (group ^ 1));
            const uint64_t a = advance(a_tile, stage * C::STAGE_BYTES), b = advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int block = 0; block < C::BLOCKS; block++)
                    wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum[block], advance(a, i * A_STEP + block * A_BLOCK),
                                                                 advance(b, i * B_STEP), step > 0 || i > 0);
            wgmma_commit();
            // This stage's products are under way; those of the stage before are done.
            wgmma_wait<1>();
            if (step > 0)
                release_stage<C>(empty, before, thread, rank_m, rank_n);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait<0>();
        release_stage<C>(empty, before, thread, rank_m, rank_n);

        const int pair = place.n + 2 * (thread % 4);
        finish<C>(sum, work, pair);
        const int64_t matrix = (int64_t)place.split * work.batch + place.batch;
        if (C::BUFFERS == 0 || work.output_is_float)
            store_floats<C>(sum, work, matrix, place.m + my_row + thread / 32 * 16 + thread % 32 / 4, pair);
        else if constexpr (C::BUFFERS > 0)
            store_halves<C>(sum, work, map_d, buffers, buffer, matrix, place.m + my_row, place.n, group, thread);
    }
    if (C::BUFFERS > 0 && thread == 0)
        wait_copied_out<0>();
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    gemm_cluster_persistent_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                   const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    // Every block of a cluster must come to the same addresses; the dynamic part starts at the same in each.
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::STAGES * C::STAGE_BYTES;
    const uint32_t full = buffers + 2 * C::BUFFERS * C::BUFFER_BYTES, empty = full + 8 * C::STAGES;
    const uint32_t rank = C::CLUSTER > 1 ? cluster_rank() : 0;
    const int rank_m = rank % C::CLUSTER_M, rank_n = rank / C::CLUSTER_M;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        prefetch_map(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, (C::PINGPONG ? 1 : 2) * (C::CLUSTER_M + C::CLUSTER_N - 1));
        }
        for (int group = 0; group < 2; group++)
            barrier_init(empty + 8 * (C::STAGES + group), 1);
        fence_barrier_init();
    }
    if constexpr (C::CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    wait_for_predecessor();
    // Every block is running by now, and the next kernel's take over the SMs as they fall free.
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce<C>(work, &map_a, &map_b, stages, full, empty, rank_m, rank_n);
        __syncwarp(); // cluster_sync wants whole warps
    } else {
        take_registers<232>();
        consume<C>(work, &map_d, stages, full, empty, shared + (buffers - shared_address(shared)), rank_m, rank_n);
    }
    // A block's shared memory is written to and its barriers are told by the others until they are done.
    if constexpr (C::CLUSTER > 1)
        cluster_sync();
#endif
}

template <typename C>
static cuda_ops_status launch(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    const bool tf32 = sizeof(typename C::T) == 4;
    // A K-major box holds the rows that one block of the cluster loads; an MN-major one that block's part of k.
    bool mapped = C::A_MN_MAJOR ? make_map(&map_a, call.a, p.dtype, tf32, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW,
                                           C::K / C::CLUSTER_N)
                                : make_map(&map_a, call.a, p.dtype, tf32, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW,
                                           C::M / C::CLUSTER_N);
    mapped = mapped && (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, tf32, p.n, p.k, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::K / C::CLUSTER_M)
                                      : make_map(&map_b, call.b, p.dtype, tf32, p.k, p.n, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::N / C::CLUSTER_M));
    GemmWork work = {};
    const int64_t wanted = plan.splits > 1 ? plan.splits : 1, chunk = ceil_div(ceil_div(p.k, wanted), C::K) * C::K;
    const int64_t splits = ceil_div(p.k, chunk); // none of them empty
    work.m = (int)p.m, work.n = (int)p.n, work.k = (int)p.k;
    work.batch = (int)p.batch, work.splits = (int)splits;
    work.chunk = (int)chunk;
    work.clusters_m = (int)ceil_div(p.m, C::M * C::CLUSTER_M);
    work.clusters_n = (int)ceil_div(p.n, C::N * C::CLUSTER_N);
    work.group = plan.group;
    work.a_shared = p.stride_a == 0, work.b_shared = p.stride_b == 0;
    if (splits > 1) {
        work.d = call.workspace;
        work.ldd = p.n;
        work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.output_is_float = 1;
    } else {
        work.d = call.d;
        work.bias = call.bias;
        work.ldd = p.ldd;
        work.stride_d = p.stride_d;
        work.alpha = (float)p.alpha;
        work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
        work.activation = p.activation;
        work.output_is_float = p.output_dtype == CUDA_OPS_FLOAT32;
    }
    map_d = map_a;
    // The copy engine writes rows in whole pieces of 16 bytes, past the last column if need be.
    if (!work.output_is_float && p.n % 8 == 0 && map_possible(call.d, 2, p.n, p.m, p.batch, p.ldd, p.stride_d) &&
        (p.batch == 1 || p.stride_d != 0)) {
        mapped = mapped &&
                 make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M);
        work.copies_out = 1;
    }
    const int64_t total = (int64_t)work.clusters_m * work.clusters_n * p.batch * splits;
    if (!mapped || total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;

    const auto kernel = gemm_cluster_persistent_kernel<C>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED_BYTES);
    const int64_t room = device.multiprocessors / C::CLUSTER, clusters = total < room ? total : room;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = C::CLUSTER;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned int)(clusters * C::CLUSTER));
    config.blockDim = dim3(3 * WARPGROUP);
    config.dynamicSmemBytes = C::SHARED_BYTES;
    config.stream = call.stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config, kernel, map_a, map_b, map_d, work);
    const cuda_ops_status status = launch_status();
    return status == CUDA_OPS_SUCCESS && work.splits > 1 ? gemm_add_pieces(call, work.splits) : status;
}

template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                      M    N   cluster ping-pong stages
    case 0: return launch<Tile<T, 128, 256, 2, 1, false, 4, a_mn_major, b_mn_major>>(call, device, plan);
    case 1: return launch<Tile<T, 128, 128, 2, 1, true, 5, a_mn_major, b_mn_major>>(call, device, plan);
    case 2: return launch<Tile<T, 128, 160, 2, 1, true, 4, a_mn_major, b_mn_major>>(call, device, plan);
    case 3: return launch<Tile<T, 128, 192, 2, 1, true, 4, a_mn_major, b_mn_major>>(call, device, plan);
    case 4: return launch<Tile<T, 128, 64, 2, 1, false, 7, a_mn_major, b_mn_major>>(call, device, plan);
    case 5: return launch<Tile<T, 128, 128, 2, 1, false, 6, a_mn_major, b_mn_major>>(call, device, plan);
    case 6: return launch<Tile<T, 256, 128, 1, 2, false, 3, a_mn_major, b_mn_major>>(call, device, plan);
    case 7: return launch<Tile<T, 128, 64, 1, 2, false, 7, a_mn_major, b_mn_major>>(call, device, plan);
    case 8: return launch<Tile<T, 128, 64, 2, 2, false, 7, a_mn_major, b_mn_major>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const bool a_mn_major = call.problem.transpose_a, b_mn_major = !call.problem.transpose_b;
    if (a_mn_major)
        return b_mn_major ? launch_planned<T, true, true>(call, device, plan)
                          : launch_planned<T, true, false>(call, device, plan);
    return b_mn_major ? launch_planned<T, false, true>(call, device, plan)
                      : launch_planned<T, false, false>(call, device, plan);
}
#endif

bool gemm_cluster_persistent_supports(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability != 90 || p.k == 0 || p.dtype == CUDA_OPS_FLOAT64)
        return false;
    if (p.dtype == CUDA_OPS_FLOAT32 && (!p.allow_tf32 || p.transpose_a || !p.transpose_b))
        return false;
    const int64_t size = p.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    return map_possible(call.a, size, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.batch, p.lda,
                        p.stride_a) &&
           map_possible(call.b, size, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k, p.batch, p.ldb, p.stride_b);
#else
    (void)call, (void)device;
    return false;
#endif
}

int64_t gemm_cluster_persistent_planned_workspace(const cuda_ops_gemm_problem &p, const GemmPlan &plan)
{
    return gemm_pieces_bytes(p, plan.splits);
}

cuda_ops_status gemm_cluster_persistent_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch_transposed<__nv_bfloat16>(call, device, plan);
#ifndef GEMM_QUICK
    case CUDA_OPS_FLOAT16:
        return launch_transposed<__half>(call, device, plan);
    case CUDA_OPS_FLOAT32:
        return launch_planned<float, false, false>(call, device, plan);
#endif
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

static GemmPlan plan_of(const cuda_ops_gemm_problem &, GemmDevice)
{
    return {0, 1, 8};
}

int64_t gemm_cluster_persistent_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_cluster_persistent_planned_workspace(problem, plan_of(problem, device));
}

cuda_ops_status gemm_cluster_persistent(const GemmCall &call, GemmDevice device)
{
    return gemm_cluster_persistent_planned(call, device, plan_of(call.problem, device));
}
