// gemm, direct path on the CUDA cores: float32 without TF32, and float64 (gemm/direct/mma.cu says what the path is
// for).
//
// A block makes one tile of D, and its warps split k: each takes every so many-th slice of 64 bytes of k, copies it to
// shared memory for itself (cp.async), and so waits for no other warp before the end, when the warps' sums are added in
// order. Where tiles are fewer than multiprocessors, the blocks of a cluster (Hopper) split k as well: each block adds
// up a part of the tile, which the others send to its shared memory, so that all blocks add at the same time and no
// second kernel is needed. A thread's lines are contiguous, GROUP at a time. Operands stay in their storage order: of a
// K-major one a thread reads 16 bytes of k of each of its lines, of an MN-major one its lines at one k.
#ifndef CUDA_OPS_GEMM_DIRECT_SIMT_CUH
#define CUDA_OPS_GEMM_DIRECT_SIMT_CUH

#include <string.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/paths.h"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

// A thread makes THREAD_M x THREAD_N, a warp's lanes are LANES_M x 32 / LANES_M.
template <typename T_, int THREAD_M_, int THREAD_N_, int LANES_M_>
struct CoresTile {
    typedef T_ T;
    static constexpr int V = 16 / (int)sizeof(T);
    static constexpr int THREAD_M = THREAD_M_, THREAD_N = THREAD_N_, LANES_M = LANES_M_, LANES_N = 32 / LANES_M_;
    static constexpr int M = THREAD_M * LANES_M, N = THREAD_N * LANES_N;
    static constexpr int GROUP_M = THREAD_M < V ? THREAD_M : V, GROUP_N = V;
    static constexpr int DEPTH = 4 * V; // k of a slice: 64 bytes of a line
    static constexpr int A_BYTES = M * 64, STAGE_BYTES = (M + N) * 64;
    static constexpr int SUM_BYTES = M * N * (int)sizeof(T), SUM_VECTORS = SUM_BYTES / 16;
    static constexpr int STAGES = 3, MOST_WARPS = 8;
    static_assert(THREAD_N % V == 0 && THREAD_M % GROUP_M == 0, "whole groups");
};

struct CoresOperand {
    const void *first;
    int64_t lines, pitch, matrix_stride;
    int vectors; // 16 bytes may be copied at once
};

struct CoresWork {
    CoresOperand a, b;
    void *d;
    int64_t k, chunk, ldd, stride_d; // each block of the cluster sums `chunk` of k
    uint32_t tiles_m, tiles_n;
    int splits, split_bits; // a power of two
    int warp_bytes, whole;  // whole: 16 bytes of a line of D may be written at once
    Epilogue epilogue;
};

// Copies 16 bytes, of which the first `bytes` are in bounds; the rest become zeros. Before sm_80 a load and a store.
template <typename T>
__device__ __forceinline__ void copy_16(char *shared, const T *global, int bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<16>(shared_address(shared), global, bytes);
#else
    vector16<T> v = {};
    if (bytes == 16)
        v = *(const vector16<T> *)global;
    else
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            v.element[e] = e * (int)sizeof(T) < bytes ? global[e] : T(0);
    *(vector16<T> *)shared = v;
#endif
}
template <typename T>
__device__ __forceinline__ void copy_one(char *shared, const T *global, bool exists)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<(int)sizeof(T)>(shared_address(shared), global, exists ? (int)sizeof(T) : 0);
#else
    *(T *)shared = exists ? *global : T(0);
#endif
}
// The i-th line of the thread in lane `lane` of the LANES along this side.
template <int GROUP, int LANES>
__device__ __forceinline__ int line_of(int i, int lane)
{
    return i / GROUP * (GROUP * LANES) + lane * GROUP + i % GROUP;
}

// The offset in a slice of a 16-byte vector of a K-major line. Vectors, and the two 64 bytes of each 128,
// are permuted by XOR so that the lanes, which read lines GROUP apart, eight at a time, meet all banks. XOR alone
// separates the part known at compile time from the thread's.
template <int GROUP>
__device__ __forceinline__ constexpr int vector_offset(int line, int vector)
{
    return line * 64 ^ (line / (4 * GROUP) & 1) * 64 ^ (line / GROUP & 3) * 16 ^ vector * 16;
}

// What a lane needs to copy its share of the slices of one operand, LINES lines each.
template <typename T, int LINES, int GROUP, bool K_MAJOR>
struct CoresSource {
    static constexpr int V = 16 / (int)sizeof(T), DEPTH = 4 * V;
    static constexpr int VECTORS = K_MAJOR ? 4 : LINES / V; // 16-byte vectors in a stored row
    static constexpr int ROWS = 32 / VECTORS;               // copied by a warp at a time
    static constexpr int ROUNDS = (K_MAJOR ? LINES : DEPTH) / ROWS;
    static_assert(VECTORS <= 32 && ROUNDS > 0, "whole rounds");
    const T *from; // this lane's first vector
    int64_t pitch, step;
    int vectors, lines;
};

template <typename T, int LINES, int GROUP, bool K_MAJOR>
__device__ __forceinline__ void start_source(CoresSource<T, LINES, GROUP, K_MAJOR> &source, const CoresOperand &operand,
                                             uint32_t matrix, int64_t first, int64_t begin, int lane)
{
    typedef CoresSource<T, LINES, GROUP, K_MAJOR> S;
    source.pitch = operand.pitch;
    source.step = K_MAJOR ? 1 : operand.pitch;
    source.vectors = operand.vectors;
    source.lines = operand.lines - first < LINES ? (int)(operand.lines - first) : LINES;
    source.from = (const T *)operand.first + matrix * operand.matrix_stride +
                  (K_MAJOR ? first * operand.pitch + begin : begin * operand.pitch + first);
    if (source.vectors)
        source.from += lane / S::VECTORS * operand.pitch + lane % S::VECTORS * S::V;
}

// Copies the slice that starts at `k`, of which `depths` are in bounds.
template <typename T, int LINES, int GROUP, bool K_MAJOR>
__device__ __forceinline__ void copy_slice(char *shared, const CoresSource<T, LINES, GROUP, K_MAJOR> &source, int64_t k,
                                           int depths, int lane)
{
    typedef CoresSource<T, LINES, GROUP, K_MAJOR> S;
    const T *from = source.from + k * source.step;
    if (source.vectors) {
        const int row = lane / S::VECTORS, vector = lane % S::VECTORS;
        const int rows = (K_MAJOR ? source.lines : depths) - row;
        const int rest = ((K_MAJOR ? depths : source.lines) - vector * S::V) * (int)sizeof(T);
        const int bytes = rest < 0 ? 0 : rest < 16 ? rest : 16;
        const int64_t step = S::ROWS * source.pitch;
        char *const to =
            shared + (K_MAJOR ? vector_offset<GROUP>(row, vector) : row * LINES * (int)sizeof(T) + vector * 16);
#pragma unroll
        for (int i = 0; i < S::ROUNDS; i++, from += step) {
            const int there = K_MAJOR ? vector_offset<GROUP>(S::ROWS * i, 0) : S::ROWS * i * LINES * (int)sizeof(T);
            copy_16(K_MAJOR ? shared + ((int)(to - shared) ^ there) : to + there, from, S::ROWS * i < rows ? bytes : 0);
        }
    } else {
#pragma unroll 2
        for (int e = lane; e < LINES * S::DEPTH; e += 32) {
            const int line = K_MAJOR ? e / S::DEPTH : e % LINES, d = K_MAJOR ? e % S::DEPTH : e / LINES;
            copy_one(shared + (K_MAJOR ? vector_offset<GROUP>(line, d / S::V) + d % S::V * (int)sizeof(T)
                                       : (d * LINES + line) * (int)sizeof(T)),
                     from + (K_MAJOR ? line * source.pitch + d : d * source.pitch + line),
                     line < source.lines && d < depths);
        }
    }
}

// A thread's lines, at the k of one 16-byte vector.
template <typename T, int COUNT, int GROUP, int LANES, bool K_MAJOR>
__device__ __forceinline__ void load_lines(T (&to)[16 / sizeof(T)][COUNT], const char *slice, int lane, int vector)
{
    constexpr int V = 16 / (int)sizeof(T), LINES = COUNT * LANES;
    if constexpr (K_MAJOR) {
        // The XOR of bit 6 chooses one of two base addresses; the rest is a constant offset.
        const int mine = vector_offset<GROUP>(lane * GROUP, vector);
        const char *const half[2] = {slice + mine, slice + (mine ^ 64)};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int there = vector_offset<GROUP>(line_of<GROUP, LANES>(i, 0), 0);
            const vector16<T> v = *(const vector16<T> *)(half[there / 64 % 2] + there / 128 * 128);
#pragma unroll
            for (int e = 0; e < V; e++)
                to[e][i] = v.element[e];
        }
    } else {
        typedef aligned_vector<T, GROUP> Group;
        const char *const mine = slice + (vector * V * LINES + lane * GROUP) * (int)sizeof(T);
#pragma unroll
        for (int e = 0; e < V; e++)
#pragma unroll
            for (int i = 0; i < COUNT; i += GROUP) {
                const Group v = *(const Group *)(mine + (e * LINES + line_of<GROUP, LANES>(i, 0)) * (int)sizeof(T));
#pragma unroll
                for (int g = 0; g < GROUP; g++)
                    to[e][i + g] = v.element[g];
            }
    }
}

// Sends 16 bytes to the same address in block `rank` of the cluster, whose barrier counts them.
template <typename T>
__device__ __forceinline__ void send_to(uint32_t rank, uint32_t address, const vector16<T> &v, uint32_t barrier)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint4 bits;
    memcpy(&bits, &v, 16);
    st_async(mapa(address, rank), bits, mapa(barrier, rank));
#endif
}

// The epilogue of one 16-byte vector of the tile's sums; `index` counts vectors in the order the lanes hold them.
template <typename C>
__device__ __forceinline__ void finish_vector(const CoresWork &work, vector16<typename C::T> v, int index,
                                              int64_t matrix, int64_t first_m, int64_t first_n)
{
    typedef typename C::T T;
    constexpr int V = C::V, ACROSS = C::THREAD_N / V;
    const int lane = index % 32, i = index / 32 / ACROSS, j = index / 32 % ACROSS * V;
    const int bits_a = (lane >> 1 & 1) | lane >> 4 << 1, bits_b = (lane & 1) | (lane >> 2 & 3) << 1;
    const int lane_m = C::LANES_M == 4 ? bits_a : bits_b, lane_n = C::LANES_M == 4 ? bits_b : bits_a;
    const int64_t row = first_m + line_of<C::GROUP_M, C::LANES_M>(i, lane_m);
    const int64_t column = first_n + line_of<C::GROUP_N, C::LANES_N>(j, lane_n);
    if (row >= work.a.lines || column >= work.b.lines)
        return;
    const Epilogue &epilogue = work.epilogue;
#pragma unroll 1
    for (int e = 0; e < V && epilogue.activation > CUDA_OPS_GEMM_RELU; e++)
        if (column + e < work.b.lines)
            v.element[e] = finish<T>(v.element[e], epilogue, column + e);
    if (epilogue.activation <= CUDA_OPS_GEMM_RELU)
#pragma unroll
        for (int e = 0; e < V; e++)
            if (column + e < work.b.lines)
                v.element[e] = finish_simply<T>(v.element[e], epilogue, column + e);
    T *const to = (T *)work.d + matrix * work.stride_d + row * work.ldd + column;
    if (work.whole && column + V <= work.b.lines)
        *(vector16<T> *)to = v;
    else
#pragma unroll
        for (int e = 0; e < V; e++)
            if (column + e < work.b.lines)
                to[e] = v.element[e];
}

// The sum, in order, of the `count` 16-byte vectors that are `pitch` apart; count is a power of two.
template <typename T>
__device__ __forceinline__ vector16<T> add_up(const char *from, int count, int pitch)
{
    constexpr int V = 16 / (int)sizeof(T);
    vector16<T> total = *(const vector16<T> *)from;
#pragma unroll 1
    for (int i = 1; i < count; i += 2) { // in pairs; the last one is single
        const vector16<T> v = *(const vector16<T> *)(from + i * pitch);
        vector16<T> w = {};
        if (i + 1 < count)
            w = *(const vector16<T> *)(from + (i + 1) * pitch);
#pragma unroll
        for (int e = 0; e < V; e++)
            total.element[e] = total.element[e] + v.element[e] + w.element[e];
    }
    return total;
}

// A_K_MAJOR: A is stored m x k, else k x m; B_K_MAJOR: B is stored n x k, else k x n. Loops are unrolled no further
// than needed: a kernel of a few microseconds waits for its instructions as it does for its operands. In one function,
// since with the sums' way out in another float64 gets other machine code.
template <typename C, bool A_K_MAJOR, bool B_K_MAJOR>
__global__ void __launch_bounds__(32 * C::MOST_WARPS, 2)
    gemm_direct_cores_kernel(const __grid_constant__ CoresWork work)
{
    typedef typename C::T T;
    constexpr int V = C::V;
    extern __shared__ __align__(1024) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t tile = blockIdx.x >> work.split_bits, rank = blockIdx.x - (tile << work.split_bits);
    const uint32_t outer = tile / work.tiles_n, column = tile - outer * work.tiles_n;
    const uint32_t matrix = outer / work.tiles_m, row = outer - matrix * work.tiles_m;
    const int64_t first_m = (int64_t)row * C::M, first_n = (int64_t)column * C::N;
    const int64_t begin = rank * work.chunk, rest = work.k - begin;
    const int64_t depth = rest < work.chunk ? rest : work.chunk;
    const int steps = depth > 0 ? (int)((depth + C::DEPTH - 1) / C::DEPTH) : 0;
    // Bit 0 of the lane runs along the longer side, bit 1 along the shorter: see ladder/09_warp_tile.cu.
    const int bits_a = (lane >> 1 & 1) | lane >> 4 << 1, bits_b = (lane & 1) | (lane >> 2 & 3) << 1;
    const int lane_m = C::LANES_M == 4 ? bits_a : bits_b, lane_n = C::LANES_M == 4 ? bits_b : bits_a;
    static_assert(C::LANES_M == 4 || C::LANES_M == 8, "the two lane layouts");
    CoresSource<T, C::M, C::GROUP_M, A_K_MAJOR> a;
    CoresSource<T, C::N, C::GROUP_N, B_K_MAJOR> b;
    start_source(a, work.a, matrix, first_m, begin, lane);
    start_source(b, work.b, matrix, first_n, begin, lane);

    char *const mine = shared + warp * work.warp_bytes;
    char *const received = shared + warps * work.warp_bytes;
    const uint32_t barrier = shared_address(received + C::SUM_BYTES);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (work.splits > 1) {
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(barrier, C::SUM_BYTES);
        }
        __syncthreads();
        cluster_arrive_relaxed();
    }
#endif
    wait_for_predecessor();
    release_successor();

    T sum[C::THREAD_M][C::THREAD_N] = {};
    int stage = 0;
    // The first STAGES rounds only copy.
#pragma unroll 1
    for (int step = warp - C::STAGES * warps; step < steps; step += warps) {
        char *const slice = mine + stage * C::STAGE_BYTES;
        if (step >= 0) {
            cp_async_wait_group<C::STAGES - 1>();
            __syncwarp();
#pragma unroll(C::THREAD_M *C::THREAD_N <= 16 ? 2 : 1)
            for (int vector = 0; vector < 4; vector++) {
                T left[V][C::THREAD_M], right[V][C::THREAD_N];
                load_lines<T, C::THREAD_M, C::GROUP_M, C::LANES_M, A_K_MAJOR>(left, slice, lane_m, vector);
                load_lines<T, C::THREAD_N, C::GROUP_N, C::LANES_N, B_K_MAJOR>(right, slice + C::A_BYTES, lane_n,
                                                                              vector);
#pragma unroll
                for (int e = 0; e < V; e++)
#pragma unroll
                    for (int i = 0; i < C::THREAD_M; i++)
#pragma unroll
                        for (int j = 0; j < C::THREAD_N; j++) {
                            // Consecutive FMAs share a factor, which spares the register banks.
                            const int c = i % 2 ? C::THREAD_N - 1 - j : j;
                            sum[i][c] += left[e][i] * right[e][c];
                        }
            }
            __syncwarp();
        }
        const int next = step + C::STAGES * warps;
        if (next < steps) {
            const int64_t k = (int64_t)next * C::DEPTH;
            const int depths = depth - k < C::DEPTH ? (int)(depth - k) : C::DEPTH;
            copy_slice(slice, a, k, depths, lane);
            copy_slice(slice + C::A_BYTES, b, k, depths, lane);
        }
        cp_async_commit_group();
        stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    __syncwarp();

    // Sums are stored in lane order, so that those of all warps and blocks can be added vector by vector.
#pragma unroll
    for (int i = 0; i < C::THREAD_M; i++)
#pragma unroll
        for (int j = 0; j < C::THREAD_N; j += V) {
            vector16<T> v;
#pragma unroll
            for (int e = 0; e < V; e++)
                v.element[e] = sum[i][j + e];
            *(vector16<T> *)(mine + ((i * C::THREAD_N + j) / V * 32 + lane) * 16) = v;
        }
    __syncthreads();
    const char *sums = shared;
    int count = warps, pitch = work.warp_bytes, first = 0, vectors = C::SUM_VECTORS;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (work.splits > 1) {
        // Every block adds up its share of the tile.
        const int share = C::SUM_VECTORS >> work.split_bits;
        cluster_wait(); // every block's barrier is initialised
#pragma unroll 1
        for (int vector = threadIdx.x; vector < C::SUM_VECTORS; vector += blockDim.x) {
            const vector16<T> v = add_up<T>(sums + vector * 16, count, pitch);
            const int to = vector / share; // in the cluster
            send_to(to, shared_address(received) + (rank * share + vector - to * share) * 16, v, barrier);
        }
        mbarrier_wait_cluster(barrier, 0);
        sums = received, count = work.splits, pitch = share * 16, first = rank * share, vectors = share;
    }
#endif
#pragma unroll 1
    for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x)
        finish_vector<C>(work, add_up<T>(sums + vector * 16, count, pitch), first + vector, matrix, first_m, first_n);
}

static constexpr int PORTABLE_SPLITS = 8; // the largest cluster that every Hopper GPU runs

static inline CoresOperand cores_operand(const void *matrix, int64_t lines, int64_t pitch, int64_t stride,
                                         int64_t batch, int64_t size)
{
    const int vectors = is_aligned_16(matrix) && pitch * size % 16 == 0 && (batch == 1 || stride * size % 16 == 0);
    return {matrix, lines, pitch, stride, vectors};
}

template <typename C, bool A_K_MAJOR, bool B_K_MAJOR>
static cuda_ops_status cores_launch_kernel(const GemmCall &call, GemmDevice device, int warps, int wanted)
{
    typedef typename C::T T;
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t size = sizeof(T);
    CoresWork work = {};
    work.a = cores_operand(call.a, p.m, p.lda, p.stride_a, p.batch, size);
    work.b = cores_operand(call.b, p.n, p.ldb, p.stride_b, p.batch, size);
    work.d = call.d, work.ldd = p.ldd, work.stride_d = p.stride_d;
    work.k = p.k;
    const int64_t tiles_m = ceil_div(p.m, C::M), tiles_n = ceil_div(p.n, C::N), steps = ceil_div(p.k, C::DEPTH);
    work.epilogue = epilogue_of(call);
    work.whole = is_aligned_16(call.d) && p.ldd * size % 16 == 0 && (p.batch == 1 || p.stride_d * size % 16 == 0);
    work.splits = 1;
    while (device.capability >= 90 && 2 * work.splits <= wanted && 2 * work.splits <= steps)
        work.splits *= 2, work.split_bits++;
    const int64_t each = ceil_div(steps, work.splits), blocks = tiles_m * tiles_n * p.batch * work.splits;
    if (blocks > INT32_MAX || each > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.tiles_m = (uint32_t)tiles_m, work.tiles_n = (uint32_t)tiles_n;
    work.chunk = each * C::DEPTH;
    // A warp's pipeline has no more stages than the warp has slices; its sums lie there in the end. Fewer warps where a
    // block has less shared memory than on Hopper.
    const int most = current_device().shared_bytes;
    int bytes = 0;
    for (;; warps /= 2) {
        const int64_t slices = ceil_div(each, warps), stages = slices < C::STAGES ? slices : C::STAGES;
        work.warp_bytes = (int)(stages * C::STAGE_BYTES > C::SUM_BYTES ? stages * C::STAGE_BYTES : C::SUM_BYTES);
        bytes = warps * work.warp_bytes + (work.splits > 1 ? C::SUM_BYTES + 16 : 0);
        if (bytes <= most || warps == 1)
            break;
    }
    // Not for one block a multiprocessor: such products are so short that they gain more by starting beside the kernel
    // before. Nor for clusters, which are not spread evenly over the multiprocessors anyway.
    if (blocks > device.multiprocessors && work.splits == 1)
        bytes = spread_bytes(bytes, blocks);
    const auto kernel = gemm_direct_cores_kernel<C, A_K_MAJOR, B_K_MAJOR>;
    allow_shared_memory(kernel, bytes);
    if (device.capability >= 90)
        allow_clusters_of_16(kernel);
    const cudaError_t started =
        start_clusters(kernel, blocks, 32 * warps, work.splits, bytes, device.capability, call.stream, work);
    if (started != cudaSuccess && work.splits > PORTABLE_SPLITS) {
        cudaGetLastError(); // a device that cannot run clusters of 16
        return cores_launch_kernel<C, A_K_MAJOR, B_K_MAJOR>(call, device, warps, PORTABLE_SPLITS);
    }
    return launch_status();
}

template <typename C>
static cuda_ops_status cores_launch(const GemmCall &call, GemmDevice device, int warps, int wanted)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? cores_launch_kernel<C, false, true>(call, device, warps, wanted)
                             : cores_launch_kernel<C, false, false>(call, device, warps, wanted);
    return p.transpose_b ? cores_launch_kernel<C, true, true>(call, device, warps, wanted)
                         : cores_launch_kernel<C, true, false>(call, device, warps, wanted);
}

// The tiles and their numbers of warps, as gemm/times.h numbers them.
template <typename T>
static cuda_ops_status cores_launch_tile(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    if (plan.swapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (plan.tile) {
    case 0: // 16 x 16
        return cores_launch<CoresTile<T, 2, 4, 8>>(call, device, 8, plan.splits);
    case 1: // 16 x 32
        return cores_launch<CoresTile<T, 4, 4, 4>>(call, device, 8, plan.splits);
    case 2: // 32 x 32
        return cores_launch<CoresTile<T, 4, 8, 8>>(call, device, 8, plan.splits);
    case 3: // 32 x 32
        return cores_launch<CoresTile<T, 4, 8, 8>>(call, device, 4, plan.splits);
    case 4: // 16 x 64
        return cores_launch<CoresTile<T, 4, 8, 4>>(call, device, 8, plan.splits);
    case 5: // 64 x 16
        return cores_launch<CoresTile<T, 8, 4, 8>>(call, device, 8, plan.splits);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
