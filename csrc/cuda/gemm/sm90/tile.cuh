// A tile of the sm90 path and of ladder/12: its configuration, the kernel's arguments, and the barrier of ping-pong.
// Its epilogue is in gemm/sm90/store.cuh.
#ifndef CUDA_OPS_GEMM_SM90_TILE_CUH
#define CUDA_OPS_GEMM_SM90_TILE_CUH

#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "gemm/paths.h"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

// Ping-pong: lets the other warpgroup begin its tile. Every warp arrives, not one thread for the warpgroup: the other
// warpgroup answers when its own tile's last stage is full, which for tiles of one or two steps is at once, and so
// completes the next phase of the barrier that this one's warps wait on. A warp that is still in its epilogue, and only
// then waits for the phase before, could not tell it from the one after: it would wait forever, and its warpgroup's
// wgmma with it.
static constexpr int ORDER_ARRIVALS = WARPGROUP / 32;

__device__ __forceinline__ void order_arrive(uint32_t order, int group, int thread)
{
    __syncwarp();
    if (thread % 32 == 0)
        mbarrier_arrive(order + 8 * (group ^ 1));
}

// A tile configuration. MN-major is what the kernel calls A stored k x m and B stored k x n. ONE_TILE: a block makes
// one tile only, so that its epilogue may reuse the pipeline's memory, which has more stages in return.
template <typename T_, int TILE_M_, int TILE_N_, int CLUSTER_M_, int CLUSTER_N_, bool PINGPONG_, int STAGES_,
          bool A_MN_MAJOR_, bool B_MN_MAJOR_, bool FLOATS_BY_TMA_ = false, bool HAS_GELU_ = false, int SHARING_ = 1,
          bool ONE_TILE_ = false>
struct Tile {
    typedef T_ T;
    static constexpr int M = TILE_M_, N = TILE_N_, CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_, STAGES = STAGES_;
    static constexpr bool PINGPONG = PINGPONG_, A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T); // elements
    static constexpr int K = ROW;                            // depth of a stage
    // wgmma reads TF32 from shared memory only where it is K-major; an MN-major A goes through registers.
    static constexpr bool IN_REGISTERS = sizeof(T) == 4 && A_MN_MAJOR;
    // An MN-major B beside it is transposed in shared memory, into two tiles alternately.
    static constexpr bool B_TRANSPOSED = sizeof(T) == 4 && B_MN_MAJOR;
    static constexpr int TRANSPOSED_BYTES = B_TRANSPOSED ? 2 * N * SWIZZLE_ROW : 0;
    // Blocks that share a multiprocessor. A block alone has a producer warpgroup, whose registers go to the two
    // consumers (setmaxnreg). Where two share one, a producer warp follows the consumers: 288 threads of 112 registers
    // each.
    static constexpr int SHARING = SHARING_;
    static constexpr int THREADS = SHARING == 1 ? 3 * WARPGROUP : 2 * WARPGROUP + 32;
    static constexpr int PRODUCER = SHARING == 1 ? 0 : 2, CONSUMERS = SHARING == 1 ? 1 : 0; // their first warpgroups
    // What one consumer warpgroup multiplies.
    static constexpr int GROUP_M = PINGPONG ? M : M / 2;
    static constexpr int BLOCKS = GROUP_M / 64; // wgmmas of 64 rows
    // An MN-major tile is a sequence of columns of ROW x K, its width rounded up to a multiple of ROW.
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;
    static constexpr int A_COLUMNS = (M + ROW - 1) / ROW, B_COLUMNS = (N + ROW - 1) / ROW;
    static constexpr int A_BYTES = A_MN_MAJOR ? A_COLUMNS * COLUMN_BYTES : M * SWIZZLE_ROW;
    static constexpr int B_BYTES = B_MN_MAJOR ? B_COLUMNS * COLUMN_BYTES : N * SWIZZLE_ROW;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    // 16-bit results go to D through shared memory, CHUNK columns at a time, in two buffers a warpgroup; so does TF32
    // where FLOATS_BY_TMA. HAS_GELU: the epilogue can do more than bias and relu.
    static constexpr bool FLOATS_BY_TMA = FLOATS_BY_TMA_, HAS_GELU = HAS_GELU_;
    static constexpr bool ACTIVATES_QUICKLY = true; // gelu is exact to some 2e-5 (common/activation.cuh)
    static constexpr int CHUNK = sizeof(T) == 2 && N % 64 == 0 ? 64 : 32;
    static constexpr int CHUNK_ROW = CHUNK * (int)sizeof(T);
    static constexpr int GELU_COLUMNS = 64; // that store_gelu takes at a time
    // The tile that makes D or D^T: all of a warpgroup's results at once, as rows of D (see store_lines).
    static constexpr bool IN_LINES = sizeof(T) == 2 && N < 128 && N % 64 != 0;
    // Whether the tile also makes D^T, whose columns leave as rows of D (EitherTile).
    static constexpr bool MAKES_EITHER = false;
    static constexpr int GELU_BYTES = HAS_GELU ? GROUP_M * GELU_COLUMNS * 4 : 0;
    static constexpr int LINES_BYTES = (GROUP_M + 8) * (N + 8) * 2;
    static constexpr int BUFFER_BYTES = IN_LINES ? (LINES_BYTES > GELU_BYTES ? LINES_BYTES : GELU_BYTES)
                                        : sizeof(T) == 4 && !FLOATS_BY_TMA ? GELU_BYTES
                                                                           : GROUP_M * CHUNK_ROW;
    static constexpr int BUFFERS = sizeof(T) == 2 ? IN_LINES ? 1 : 2 : FLOATS_BY_TMA ? 2 : HAS_GELU ? 1 : 0;
    static constexpr bool ONE_TILE = ONE_TILE_;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, OUT_BYTES = 2 * BUFFERS * BUFFER_BYTES;
    static constexpr int BUFFERS_FROM = ONE_TILE ? 0 : RING_BYTES + TRANSPOSED_BYTES; // from the first stage's address
    static constexpr int BARRIERS_FROM = RING_BYTES + TRANSPOSED_BYTES + (ONE_TILE ? 0 : OUT_BYTES);
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (2 * STAGES + 2) * 8 + SWIZZLE_ATOM;
    static_assert(!ONE_TILE || (!PINGPONG && RING_BYTES >= OUT_BYTES), "room for the epilogue");
    static_assert(!B_TRANSPOSED || (IN_REGISTERS && !PINGPONG && N == 64), "what transpose_right is written for");
    static_assert(!IN_REGISTERS || BLOCKS <= 2, "two or four rows a thread");
    static_assert(SHARING * (SHARED_BYTES + 1024) <= 233472, "an SM's shared memory");
    static_assert(!HAS_GELU || BUFFERS * BUFFER_BYTES >= GELU_BYTES, "GELU_COLUMNS of float32 sums");
    static_assert(M % (8 * CLUSTER_N) == 0 && N % (8 * CLUSTER_M) == 0, "each block of a cluster loads its part");
    static_assert(STAGE_BYTES % SWIZZLE_ATOM == 0 && A_BYTES % SWIZZLE_ATOM == 0, "tiles are aligned to the swizzle");
};

// A 16-bit tile that makes D or D^T, by TMA: a tile of 128 x 192 is one of 192 x 128 too.
template <typename Whole>
struct EitherTile : Whole {
    static constexpr bool MAKES_EITHER = true;
    static_assert(sizeof(typename Whole::T) == 2 && Whole::BUFFERS == 2 && !Whole::IN_LINES, "results leave by TMA");
    static_assert(Whole::GROUP_M % 64 == 0 && Whole::CHUNK * SWIZZLE_ROW % SWIZZLE_ATOM == 0, "boxes of 128 bytes");
};

struct GemmWork {
    void *d;
    const void *bias;
    int64_t ldd, stride_d;
    int m, n, k;
    int clusters_m, clusters_n; // cluster tiles
    int batch, splits, chunk;   // `chunk` of k a split; split s stores to d + s * batch * stride_d
    int total;                  // clusters of a product * batch * splits
    int group;                  // rows of cluster tiles in a band
    int a_shared, b_shared;     // one matrix for all products of the batch
    float alpha;
    int bias_is_float, activation, output_is_float;
    int copies_out;      // TMA writes D; IN_LINES: 16 bytes may be written at once
    int swapped;         // A and B are exchanged: the kernel makes D^T
    void *preactivation; // or null: where the input of the activation is stored, laid out like D
    int whole;           // 16 bytes of a row of D and of the preactivation may be written at once
};

// `ahead`: stages that a block asks of the L2 before it waits for the kernel before (gemm/sm90/ahead.cuh).
struct AheadGemmWork : GemmWork {
    int ahead;
};

// A cluster of two tiles shares the operand that gives the tiles their columns (CLUSTER_M of two) or their rows. Where
// D has an odd number of tiles in the cluster's direction, the last line of them is taken by clusters that lie along
// it: their blocks send each other nothing, and each loads both operands by itself.
struct OddGemmWork : AheadGemmWork {
    int lone; // such clusters, after the clusters_m * clusters_n whole ones of each product
};

template <typename C>
static inline void set_clusters(OddGemmWork &work)
{
    const int rows = (int)ceil_div(work.m, C::M), columns = (int)ceil_div(work.n, C::N);
    if (C::CLUSTER == 2) {
        work.clusters_m = rows / C::CLUSTER_M;
        work.clusters_n = columns / C::CLUSTER_N;
        work.lone = (int)(C::CLUSTER_M == 2 ? rows % 2 * ceil_div(columns, 2) : columns % 2 * ceil_div(rows, 2));
    } else {
        work.clusters_m = (int)ceil_div(rows, C::CLUSTER_M);
        work.clusters_n = (int)ceil_div(columns, C::CLUSTER_N);
        work.lone = 0;
    }
}

// The kernel's arguments for a call with k whole.
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

// Whether TMA can write D: it writes whole 16-byte vectors of a row, past the last column if need be.
static inline bool can_copy_out(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t size = p.output_dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    return p.output_dtype == p.dtype && p.n * size % 16 == 0 && (p.batch == 1 || p.stride_d != 0) &&
           map_possible(call.d, size, p.n, p.m, p.batch, p.ldd, p.stride_d);
}

#endif
