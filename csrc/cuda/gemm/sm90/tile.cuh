// A tile of rungs 12 and 13: its configuration, and the way of its results from the accumulators to device memory.
#ifndef CUDA_OPS_GEMM_SM90_TILE_CUH
#define CUDA_OPS_GEMM_SM90_TILE_CUH

#include <string.h>

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "gemm/paths.h"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// Where two warpgroups take tiles in turn: lets the other one begin its tile. Every warp has to speak, and not one for
// all: the other warpgroup answers when its own tile's last stage is full, which in tiles of one or two steps is at
// once, and so ends the next phase of the barrier that this one's warps waited on. A warp that is still busy with its
// last results, and only then asks for the phase before, cannot tell it from the one after: it would wait for good, and
// the products of its warpgroup with it.
static constexpr int TURN_ARRIVALS = WARPGROUP / 32;

__device__ __forceinline__ void hand_over(uint32_t order, int group, int thread)
{
    __syncwarp();
    if (thread % 32 == 0)
        mbarrier_arrive(order + 8 * (group ^ 1));
}

// One tile of one configuration. MN-major is what the kernel calls A stored k x m and B stored k x n. ONE_TILE: a block
// makes no other after it, so that results may leave by way of the ring, which is longer by as much.
template <typename T_, int TILE_M_, int TILE_N_, int CLUSTER_M_, int CLUSTER_N_, bool PINGPONG_, int STAGES_,
          bool A_MN_MAJOR_, bool B_MN_MAJOR_, bool FLOATS_COPIED_ = false, bool PIECES_STORED_ = false,
          int SHARING_ = 1, bool ONE_TILE_ = false>
struct Tile {
    typedef T_ T;
    static constexpr int M = TILE_M_, N = TILE_N_, CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_, STAGES = STAGES_;
    static constexpr bool PINGPONG = PINGPONG_, A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T); // elements
    static constexpr int K = ROW;                            // depth of a stage
    // wgmma reads TF32 from shared memory only where it is K-major; an MN-major A goes through registers.
    static constexpr bool IN_REGISTERS = sizeof(T) == 4 && A_MN_MAJOR;
    // An MN-major B beside it is turned in shared memory, into one of two tiles that take turns.
    static constexpr bool B_TURNED = sizeof(T) == 4 && B_MN_MAJOR;
    static constexpr int TURNED_BYTES = B_TURNED ? 2 * N * SWIZZLE_ROW : 0;
    // Blocks that share a multiprocessor. One alone has a warpgroup that loads, whose registers go to the two that
    // multiply. Where two share one, a warp behind those loads: 288 threads of 112 registers, which nobody hands over.
    static constexpr int SHARING = SHARING_;
    static constexpr int THREADS = SHARING == 1 ? 3 * WARPGROUP : 2 * WARPGROUP + 32;
    static constexpr int PRODUCER = SHARING == 1 ? 0 : 2, CONSUMERS = SHARING == 1 ? 1 : 0; // their first warpgroups
    // What one consumer warpgroup multiplies.
    static constexpr int GROUP_M = PINGPONG ? M : M / 2;
    static constexpr int BLOCKS = GROUP_M / 64; // wgmmas of 64 rows
    // MN-major tiles lie as columns of ROW x K, so that a width that is no multiple of ROW is rounded up.
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;
    static constexpr int A_COLUMNS = (M + ROW - 1) / ROW, B_COLUMNS = (N + ROW - 1) / ROW;
    static constexpr int A_BYTES = A_MN_MAJOR ? A_COLUMNS * COLUMN_BYTES : M * SWIZZLE_ROW;
    static constexpr int B_BYTES = B_MN_MAJOR ? B_COLUMNS * COLUMN_BYTES : N * SWIZZLE_ROW;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    // Results of 16 bits leave through shared memory, CHUNK columns at a time, in two buffers a warpgroup; those of
    // TF32 where the configuration says so. PIECES_STORED: the kernel may be asked for more than a bias and relu.
    static constexpr bool FLOATS_COPIED = FLOATS_COPIED_, PIECES_STORED = PIECES_STORED_;
    static constexpr int CHUNK = sizeof(T) == 2 && N % 64 == 0 ? 64 : 32;
    static constexpr int CHUNK_ROW = CHUNK * (int)sizeof(T);
    static constexpr int PIECE = 64; // columns that store_pieces takes at a time
    // The tile that makes D or D transposed: all of a warpgroup's results at once, as lines of D (see store_lines).
    static constexpr bool IN_LINES = sizeof(T) == 2 && N < 128 && N % 64 != 0;
    static constexpr int PIECE_BYTES = PIECES_STORED ? GROUP_M * PIECE * 4 : 0;
    static constexpr int LINES_BYTES = (GROUP_M + 8) * (N + 8) * 2;
    static constexpr int BUFFER_BYTES = IN_LINES ? (LINES_BYTES > PIECE_BYTES ? LINES_BYTES : PIECE_BYTES)
                                        : sizeof(T) == 4 && !FLOATS_COPIED ? PIECE_BYTES
                                                                           : GROUP_M * CHUNK_ROW;
    static constexpr int BUFFERS = sizeof(T) == 2 ? IN_LINES ? 1 : 2 : FLOATS_COPIED ? 2 : PIECES_STORED ? 1 : 0;
    static constexpr bool ONE_TILE = ONE_TILE_;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, OUT_BYTES = 2 * BUFFERS * BUFFER_BYTES;
    static constexpr int BUFFERS_FROM = ONE_TILE ? 0 : RING_BYTES + TURNED_BYTES; // from the ring's beginning
    static constexpr int BARRIERS_FROM = RING_BYTES + TURNED_BYTES + (ONE_TILE ? 0 : OUT_BYTES);
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (2 * STAGES + 2) * 8 + SWIZZLE_ATOM;
    static_assert(!ONE_TILE || (!PINGPONG && RING_BYTES >= OUT_BYTES), "room in the ring");
    static_assert(!B_TURNED || (IN_REGISTERS && !PINGPONG && N == 64), "what turns B is written for");
    static_assert(!IN_REGISTERS || BLOCKS <= 2, "two or four rows a thread");
    static_assert(SHARING * (SHARED_BYTES + 1024) <= 233472, "an SM's shared memory");
    static_assert(!PIECES_STORED || BUFFERS * BUFFER_BYTES >= PIECE_BYTES, "a piece of the sums in float32");
    static_assert(M % (8 * CLUSTER_N) == 0 && N % (8 * CLUSTER_M) == 0, "each block of a cluster loads its part");
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
    int bias_is_float, activation, output_is_float;
    int copies_out;      // the copy engine writes D; by lines: 16 bytes may be written at once
    int swapped;         // A and B have changed places: what the kernel makes is D transposed
    void *preactivation; // or null: what the activation is computed from is left here, laid out like D
    int whole;           // 16 bytes of a line of D and of the preactivation may be written at once
};

// What a kernel is told of a call that it does alone, in one piece.
static inline GemmWork work_of(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    GemmWork work = {};
    work.d = call.d;
    work.bias = call.bias;
    work.ldd = p.ldd;
    work.stride_d = p.stride_d;
    work.m = (int)p.m, work.n = (int)p.n, work.k = (int)p.k;
    work.batch = (int)p.batch, work.splits = 1, work.chunk = (int)p.k;
    work.a_shared = p.stride_a == 0, work.b_shared = p.stride_b == 0;
    work.alpha = (float)p.alpha;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.activation = p.activation;
    work.output_is_float = p.output_dtype == CUDA_OPS_FLOAT32;
    work.preactivation = p.preactivation;
    const int64_t size = dtype_size(p.output_dtype);
    work.whole = is_aligned_16(call.d) && is_aligned_16(p.preactivation) && p.ldd * size % 16 == 0 &&
                 (p.batch == 1 || p.stride_d * size % 16 == 0);
    return work;
}

// Results that the copy engine can write: it writes whole pieces of 16 bytes of a row, past the last column if need be.
static inline bool can_copy_out(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t size = p.output_dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    return p.output_dtype == p.dtype && p.n * size % 16 == 0 && (p.batch == 1 || p.stride_d != 0) &&
           map_possible(call.d, size, p.n, p.m, p.batch, p.ldd, p.stride_d);
}

#if defined(CUDA_OPS_HOPPER_CODE)

// The row of a warpgroup's part that a thread's accumulators belong to, in the given block of 64 and its half. wgmma
// gives a warp 16 rows of each block, a thread two of them. Where A came through registers, its rows were dealt out so
// that a thread's, two or four, are neighbours (see load_left).
template <typename C>
__device__ __forceinline__ int row_of(int thread, int block, int half)
{
    const int warp = thread / 32, quad = thread % 32 / 4;
    if (C::IN_REGISTERS && C::BLOCKS == 2)
        return 32 * warp + 4 * (quad / 2 + quad % 2 * 4) + 2 * block + half;
    if (C::IN_REGISTERS)
        return 32 * (warp / 2) + 4 * (warp % 2 * 2 + quad / 4 + quad / 2 % 2 * 4) + quad % 2 * 2 + half;
    return 64 * block + 16 * warp + quad + 8 * half;
}

template <typename C>
__device__ __forceinline__ float bias_at(const GemmWork &work, int column, int columns)
{
    typedef typename C::T T;
    if (column >= columns)
        return 0.0f;
    return work.bias_is_float ? ((const float *)work.bias)[column] : load_as_accumulate(((const T *)work.bias)[column]);
}

// The bias of a tile's columns, dealt out over the lanes of a warp: lane l has columns l, 32 + l, ... of the tile. To
// be loaded before the products, which hide the time it takes: afterwards every warp would wait for the L2 cache, which
// is busiest then, once or several times a tile.
template <typename C>
struct Bias {
    float part[(C::N + 31) / 32];
};

template <typename C>
__device__ __forceinline__ Bias<C> load_bias(const GemmWork &work, int first_column, int thread)
{
    typedef typename C::T T;
    Bias<C> bias = {};
    if (work.bias && !work.swapped)
#pragma unroll
        for (int i = 0; i < (C::N + 31) / 32; i++) {
            // Past the last: any value will do, the results are not stored.
            const int column = min(first_column + 32 * i + thread % 32, work.n - 1);
            bias.part[i] = sizeof(T) == 4 || work.bias_is_float ? ((const float *)work.bias)[column]
                                                                : load_as_accumulate(((const T *)work.bias)[column]);
        }
    return bias;
}

// alpha, bias and relu on the accumulators. A thread of a warp holds, of each 8 columns, two: of rows g and g + 8.
template <typename C>
__device__ __forceinline__ void finish(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias, const GemmWork &work,
                                       int first_row, int thread)
{
    if (work.alpha != 1.0f)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] *= work.alpha;
    if (work.bias && work.swapped) {
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float of_row = bias_at<C>(work, first_row + row_of<C>(thread, block, half), work.m);
#pragma unroll
                for (int i = 0; i < C::N / 8; i++) {
                    sum[block][4 * i + 2 * half] += of_row;
                    sum[block][4 * i + 2 * half + 1] += of_row;
                }
            }
    } else if (work.bias) {
#pragma unroll
        for (int i = 0; i < C::N / 8; i++) {
            const int from = i % 4 * 8 + 2 * (thread % 4);
            const float x = __shfl_sync(FULL_WARP, bias.part[i / 4], from);
            const float y = __shfl_sync(FULL_WARP, bias.part[i / 4], from + 1);
#pragma unroll
            for (int block = 0; block < C::BLOCKS; block++) {
                sum[block][4 * i] += x;
                sum[block][4 * i + 1] += y;
                sum[block][4 * i + 2] += x;
                sum[block][4 * i + 3] += y;
            }
        }
    }
    if (work.activation == CUDA_OPS_GEMM_RELU && !work.preactivation)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] = sum[block][i] < 0.0f ? 0.0f : sum[block][i]; // NaN stays
}

// float32 results straight from registers: a quad of threads writes 32 bytes of a row, a whole sector.
template <typename C>
__device__ __forceinline__ void store_floats(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             int64_t matrix, int first_row, int column, int thread)
{
    float *const d = (float *)work.d + matrix * work.stride_d;
    const bool pairs = (work.ldd % 2 == 0) && (work.stride_d % 2 == 0) && ((uintptr_t)work.d % 8 == 0);
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = first_row + row_of<C>(thread, block, half);
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

// The same of D transposed, where A came through registers: a thread's two or four rows are 8 or 16 bytes of a row of
// D, and the eight threads beside each other in a column of the warp's part write whole sectors.
template <typename C>
__device__ __forceinline__ void store_floats_swapped(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                                     int64_t matrix, int first_row, int column, int thread)
{
    constexpr int ROWS = 2 * C::BLOCKS;
    typedef aligned_vector<float, ROWS> Rows;
    float *const d = (float *)work.d + matrix * work.stride_d;
    const bool together = work.ldd % ROWS == 0 && work.stride_d % ROWS == 0 && (uintptr_t)work.d % sizeof(Rows) == 0;
    const int row = first_row + row_of<C>(thread, 0, 0);
#pragma unroll
    for (int i = 0; i < C::N / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int c = column + 8 * i + e;
            if (c >= work.n)
                continue;
            Rows values;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                values.element[r] = sum[r / 2][4 * i + r % 2 * 2 + e];
            float *const to = d + c * work.ldd + row;
            if (together && row + ROWS <= work.m) {
                *(Rows *)to = values;
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (row + r < work.m)
                        to[r] = values.element[r];
            }
        }
}

// Where a 16-byte piece of a row of a buffer lies: the copy engine's swizzle of 128 or 64 bytes, which also keeps the
// pieces of 8 rows on different banks.
template <typename C>
__device__ __forceinline__ int piece_offset(int row, int piece)
{
    return row * C::CHUNK_ROW + (C::CHUNK_ROW == 128 ? piece ^ (row % 8) : piece ^ (row / 2 % 4)) * 16;
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
            bulk_wait_group_read<1>();
        bar_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++) {
            // stmatrix takes the rows' addresses from the lanes: 0-15 the rows, 16-31 the same of the next 8 columns.
            const int row = 64 * block + 16 * warp + lane % 16;
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++) {
                const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
                stmatrix_x4(to_shared + piece_offset<C>(row, 2 * i + lane / 16), pack<T>(s[0], s[1]),
                            pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
            }
        }
        const int column = first_column + C::CHUNK * chunk;
        if (work.copies_out) {
            fence_proxy_async();
            bar_sync(1 + group, WARPGROUP);
            if (thread == 0) {
                tma_store_3d(map_d, to_shared, column, first_row, (int)matrix);
                bulk_commit_group();
            }
        } else {
            // D that the copy engine cannot write: by the threads, element by element, neighbours next to each other.
            bar_sync(1 + group, WARPGROUP);
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

// TF32's results by the copy engine, CHUNK columns at a time as above: whole lines of 128 bytes, which nobody waits
// for.
template <typename C>
__device__ __forceinline__ void copy_floats(const float (&sum)[C::BLOCKS][C::N / 2], const CUtensorMap *map_d,
                                            char *buffers, int &buffer, int64_t matrix, int first_row, int first_column,
                                            int group, int thread)
{
    const int place = thread % 4;
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
        char *const to = buffers + buffer * C::BUFFER_BYTES;
        if (thread == 0)
            bulk_wait_group_read<1>();
        bar_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < C::CHUNK / 8; i++) {
                    const float *const s = sum[block] + C::CHUNK / 2 * chunk + 4 * i + 2 * half;
                    *(float2 *)(to + piece_offset<C>(row_of<C>(thread, block, half), 2 * i + place / 2) +
                                place % 2 * 8) = make_float2(s[0], s[1]);
                }
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        if (thread == 0) {
            tma_store_3d(map_d, shared_address(to), first_column + C::CHUNK * chunk, first_row, (int)matrix);
            bulk_commit_group();
        }
    }
}

// Results of 16 bits as lines of D, or of D transposed where A and B have changed places: into shared memory by
// stmatrix, and from there by all threads, 16 bytes each.
template <typename C>
__device__ __forceinline__ void store_lines(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work, char *buffer,
                                            int64_t matrix, int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    static_assert(C::BLOCKS == 1 && C::N % 16 == 0, "a warpgroup's 64 rows");
    const int lane = thread % 32, warp = thread / 32;
    // Pitches of an odd number of 16 bytes, by which the eight rows of a matrix meet all banks.
    const int lines = work.swapped ? C::N : 64, columns = work.swapped ? 64 : C::N, pitch = columns + 8;
    const uint32_t to = shared_address(buffer);
    bar_sync(1 + group, WARPGROUP); // the last tile's have been read
#pragma unroll
    for (int i = 0; i < C::N / 16; i++) {
        const float *const s = sum[0] + 8 * i;
        const uint32_t a = pack<T>(s[0], s[1]), b = pack<T>(s[2], s[3]), c = pack<T>(s[4], s[5]),
                       d = pack<T>(s[6], s[7]);
        if (work.swapped)
            stmatrix_x4_trans(to + ((16 * i + lane / 16 * 8 + lane % 8) * pitch + 16 * warp + lane / 8 % 2 * 8) * 2, a,
                              b, c, d);
        else
            stmatrix_x4(to + ((16 * warp + lane % 16) * pitch + 16 * i + lane / 16 * 8) * 2, a, b, c, d);
    }
    bar_sync(1 + group, WARPGROUP);
    const int line = work.swapped ? first_column : first_row, column = work.swapped ? first_row : first_column;
    const int all_lines = work.swapped ? work.n : work.m, all_columns = work.swapped ? work.m : work.n;
    T *const d = (T *)work.d + matrix * work.stride_d;
#pragma unroll 1
    for (int i = thread; i < lines * columns / 8; i += WARPGROUP) {
        const int l = i / (columns / 8), c = i % (columns / 8) * 8;
        const vector16<T> piece = *(const vector16<T> *)(buffer + (l * pitch + c) * 2);
        T *const at = d + (line + l) * work.ldd + column + c;
        if (line + l >= all_lines)
            break;
        if (work.copies_out && column + c + 8 <= all_columns)
            *(vector16<T> *)at = piece;
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (column + c + e < all_columns)
                    at[e] = piece.element[e];
    }
}

// float32 results of such tiles, which are pieces of a sum or asked for: straight to D transposed.
template <typename C>
__device__ __forceinline__ void store_floats_turned(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                                    int64_t matrix, int first_row, int column, int thread)
{
    float *const d = (float *)work.d + matrix * work.stride_d;
#pragma unroll
    for (int i = 0; i < C::N / 2; i++) {
        const int r = first_row + row_of<C>(thread, 0, i / 2 % 2), c = column + 8 * (i / 4) + i % 2;
        if (r < work.m && c < work.n)
            d[c * work.ldd + r] = sum[0][i];
    }
}

// Where column `column` of a row of PIECE sums in float32 lies: swizzled so that neither eight rows' pairs nor 16 or 32
// bytes of each of a row's readers meet in a bank.
template <typename C>
__device__ __forceinline__ int sum_offset(int row, int column)
{
    const int piece = column / 4;
    return row * C::PIECE * 4 + (piece ^ (row % 8) ^ (piece / 8)) * 16 + column % 4 * 4;
}

// Neighbours of a row, 16 bytes at a time, or of a column, from places `moved` bytes beyond `from`.
template <int COUNT, int READS>
__device__ __forceinline__ void read_sums(float (&x)[COUNT], const char *const (&from)[READS], int moved,
                                          bool of_column)
{
    if (READS == COUNT && of_column) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = *(const float *)(from[e % READS] + moved);
    } else {
#pragma unroll
        for (int e = 0; e < COUNT; e += 4) {
            const float4 four = *(const float4 *)(from[e / 4] + moved);
            x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
        }
    }
}

// Results that take more than a bias and relu: gelu, and what it is computed from. By way of shared memory in float32,
// PIECE columns at a time, and from there in loops that are not unrolled: gelu for each of a thread's sums, one after
// the other, is some thousand instructions, which a kernel of one or two tiles a block waits for as for its operands.
// In a loop over the pieces all sums would stay in their registers to its end, and gelu have too few. FIRST: the
// piece's first column, a constant to the compiler from the beginning, so that the sums stay in registers at all.
template <typename C, int FIRST>
__device__ __forceinline__ void store_pieces(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             char *buffer, int64_t matrix, int first_row, int first_column, int group,
                                             int thread)
{
    typedef typename C::T T;
    constexpr int MANY = 16 / sizeof(T), PIECE = C::PIECE, COLUMNS = C::N - FIRST < PIECE ? C::N - FIRST : PIECE;
    bar_sync(1 + group, WARPGROUP); // the last piece has been read
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                const float *const s = sum[block] + FIRST / 2 + 4 * i + 2 * half;
                *(float2 *)(buffer + sum_offset<C>(row_of<C>(thread, block, half), 8 * i + 2 * (thread % 4))) =
                    make_float2(s[0], s[1]);
            }
    bar_sync(1 + group, WARPGROUP);
    // A thread takes neighbours in D: of a row of the tile, or of a column where D is made transposed.
    constexpr bool EITHER = C::IN_LINES || C::IN_REGISTERS;
    const bool swapped = EITHER && work.swapped;
    const int row = swapped ? thread / PIECE * MANY : thread / (PIECE / MANY);
    const int column = swapped ? thread % PIECE : thread % (PIECE / MANY) * MANY;
    const int step = swapped ? WARPGROUP / PIECE * MANY : WARPGROUP / (PIECE / MANY);
    const int64_t along_rows = swapped ? 1 : work.ldd, along_columns = swapped ? work.ldd : 1;
    const int c = first_column + FIRST + column, rows = min(C::GROUP_M, work.m - first_row);
    int64_t at = matrix * work.stride_d + (first_row + row) * along_rows + c * along_columns;
    // A step is a multiple of eight rows, and the swizzle the same.
    static_assert(WARPGROUP / (PIECE / MANY) % 8 == 0 && WARPGROUP / PIECE * MANY % 8 == 0, "one swizzle a thread");
    constexpr int READS = EITHER ? MANY : MANY / 4;
    const char *from[READS];
#pragma unroll
    for (int i = 0; i < READS; i++)
        from[i] = buffer + (swapped ? sum_offset<C>(row + i, column) : sum_offset<C>(row, column + i % (MANY / 4) * 4));
    if (c < work.n && column < COLUMNS) {
        int moved = 0;
#pragma unroll 1
        for (int r = row; r < rows; r += step, at += step * along_rows, moved += step * PIECE * 4) {
            float x[MANY];
            read_sums(x, from, moved, swapped);
            const int left = swapped ? rows - r : work.n - c; // of the line
            const bool whole = opaque(work.whole) && left >= MANY;
            if (opaque(work.preactivation != nullptr))
                store_some<T>(work.preactivation, at, x, work.output_is_float, whole, left);
            activate_quickly(x, opaque(work.activation));
            store_some<T>(work.d, at, x, work.output_is_float, whole, left);
        }
    }
    if constexpr (FIRST + PIECE < C::N)
        store_pieces<C, FIRST + PIECE>(sum, work, buffer, matrix, first_row, first_column, group, thread);
}

// A tile's results, from the accumulators to D.
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias, const GemmWork &work,
                                           const CUtensorMap *map_d, char *buffers, int &buffer, int64_t matrix,
                                           int first_row, int first_column, int group, int thread)
{
    const int column = first_column + 2 * (thread % 4);
    finish<C>(sum, bias, work, first_row, thread);
    if constexpr (C::PIECES_STORED) {
        if (work.preactivation || work.activation > CUDA_OPS_GEMM_RELU) {
            store_pieces<C, 0>(sum, work, buffers, matrix, first_row, first_column, group, thread);
            return;
        }
    }
    if constexpr (C::IN_LINES) {
        if (!work.output_is_float)
            store_lines<C>(sum, work, buffers, matrix, first_row, first_column, group, thread);
        else if (work.swapped)
            store_floats_turned<C>(sum, work, matrix, first_row, column, thread);
        else
            store_floats<C>(sum, work, matrix, first_row, column, thread);
    } else if constexpr (sizeof(typename C::T) == 2) {
        if (work.output_is_float)
            store_floats<C>(sum, work, matrix, first_row, column, thread);
        else
            store_halves<C>(sum, work, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
    } else if (C::FLOATS_COPIED && work.copies_out) {
        if constexpr (C::FLOATS_COPIED)
            copy_floats<C>(sum, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
    } else if constexpr (C::IN_REGISTERS) {
        if (work.swapped)
            store_floats_swapped<C>(sum, work, matrix, first_row, column, thread);
        else
            store_floats<C>(sum, work, matrix, first_row, column, thread);
    } else {
        store_floats<C>(sum, work, matrix, first_row, column, thread);
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
