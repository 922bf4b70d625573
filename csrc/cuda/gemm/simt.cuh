// The SIMT matrix multiplication of rung 10: cp.async into a ring of shared-memory stages, register double buffering,
// warp tiles of 8- or 16-wide thread tiles, split and sliced sums. 10_cp_async.cu says what it is for.
#ifndef CUDA_OPS_GEMM_SIMT_CUH
#define CUDA_OPS_GEMM_SIMT_CUH

#include "common.cuh"

// 4, 8 or 16 bytes from global to shared memory without a register in between, zeros where `inside` is false. Before
// sm_80 (and for halves, which are widened on the way) a load and a store.
template <typename T, typename A, int COUNT>
__device__ __forceinline__ void copy_async(A *shared, const T *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == sizeof(A)) {
        const unsigned int target = (unsigned int)__cvta_generic_to_shared(shared);
        const int bytes = inside ? (int)sizeof(T) * COUNT : 0;
        if constexpr (sizeof(T) * COUNT == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(bytes)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global),
                         "n"((int)sizeof(T) * COUNT), "r"(bytes)
                         : "memory");
        return;
    }
#endif
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        shared[e] = inside ? load_as_accumulate(global[e]) : A(0);
}

__device__ __forceinline__ void commit_copies()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the newest PENDING groups of this thread's copies have landed.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Sizes of one variant. A warp's lanes are LANES_M x LANES_N, a thread's tile THREAD_M x THREAD_N, cut into pieces of
// 16 bytes that lie a warp's width apart, so that the lanes of a warp read neighbouring 16-byte words.
template <int WARPS_M_, int WARPS_N_, int SLICES_, int LANES_M_, int THREAD_M_, int THREAD_N_, int DEPTH_, int STAGES_,
          int BLOCKS_>
struct SimtTile {
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, SLICES = SLICES_, LANES_M = LANES_M_,
                         LANES_N = 32 / LANES_M_, THREAD_M = THREAD_M_, THREAD_N = THREAD_N_, DEPTH = DEPTH_,
                         STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
    static constexpr int M = WARPS_M * WARP_M, N = WARPS_N * WARP_N;
    static constexpr int THREADS = WARPS_M * WARPS_N * SLICES * 32;
};

// Pitch of a row of LINES in shared memory: where a warp writes 8 depths x 4 lines, 4 words more put them into 32 banks.
template <int LINES, bool BY_DEPTH>
static constexpr int simt_pitch = BY_DEPTH ? LINES + 4 : LINES;

// What a thread copies of a slice of LINES x DEPTH of one operand. BY_DEPTH: stored as operand[line][depth], and
// transposed on its way element by element; else operand[depth][line], VECTOR elements at a time. Lines beyond the edge
// are replaced by the last one, whose products are never stored, so that the loop tests depths alone.
template <typename T, int LINES, int DEPTH, int THREADS, bool BY_DEPTH, int VECTOR>
struct SimtSource {
    static constexpr int PITCH = simt_pitch<LINES, BY_DEPTH>;
    static constexpr int POINTERS = BY_DEPTH ? LINES * 8 / THREADS : 1;
    static constexpr int ROW = LINES / VECTOR;                      // copies in a row of one depth
    static constexpr int ROWS = THREADS / ROW > 0 ? THREADS / ROW : 1; // depths that the threads copy at once
    const T *pointer[POINTERS > 0 ? POINTERS : 1];
    int shared_offset, depth;
    int64_t step; // elements between two depths
};

template <typename T, int LINES, int DEPTH, int THREADS, bool BY_DEPTH, int VECTOR>
__device__ __forceinline__ void start_source(SimtSource<T, LINES, DEPTH, THREADS, BY_DEPTH, VECTOR> &source,
                                             const T *operand, int64_t stride, int64_t first, int64_t lines,
                                             int64_t begin)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, BY_DEPTH, VECTOR> S;
    const int thread = threadIdx.x;
    if constexpr (BY_DEPTH) {
        static_assert(VECTOR == 1 && DEPTH % 8 == 0 && LINES * 8 % THREADS == 0, "whole rounds of copies");
        source.depth = thread % 8;
        source.shared_offset = source.depth * S::PITCH + thread / 8;
#pragma unroll
        for (int r = 0; r < S::POINTERS; r++) {
            const int64_t line = first + thread / 8 + r * (THREADS / 8);
            source.pointer[r] = operand + (line < lines ? line : lines - 1) * stride + begin + source.depth;
        }
    } else {
        static_assert(THREADS % S::ROW == 0 && DEPTH % S::ROWS == 0, "whole rounds of copies");
        source.depth = thread / S::ROW;
        const int offset = thread % S::ROW * VECTOR;
        source.shared_offset = source.depth * S::PITCH + offset;
        const int64_t line = first + offset <= lines - VECTOR ? first + offset : lines - VECTOR;
        source.pointer[0] = operand + (begin + source.depth) * stride + line;
        source.step = stride;
    }
}

template <typename T, typename A, int LINES, int DEPTH, int THREADS, bool BY_DEPTH, int VECTOR>
__device__ __forceinline__ void copy_slice(SimtSource<T, LINES, DEPTH, THREADS, BY_DEPTH, VECTOR> &source, A *shared,
                                           int64_t remaining)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, BY_DEPTH, VECTOR> S;
    const int depths = remaining < DEPTH ? (int)remaining : DEPTH;
    A *const target = shared + source.shared_offset;
    if constexpr (BY_DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d += 8) {
            const bool inside = source.depth + d < depths;
#pragma unroll
            for (int r = 0; r < S::POINTERS; r++)
                copy_async<T, A, 1>(target + d * S::PITCH + r * (THREADS / 8), source.pointer[r] + d, inside);
        }
#pragma unroll
        for (int r = 0; r < S::POINTERS; r++)
            source.pointer[r] += DEPTH;
    } else {
#pragma unroll
        for (int d = 0; d < DEPTH; d += S::ROWS)
            copy_async<T, A, VECTOR>(target + d * S::PITCH, source.pointer[0] + d * source.step,
                                     source.depth + d < depths);
        source.pointer[0] += DEPTH * source.step;
    }
}

// A thread's COUNT elements of one depth: 16 bytes at a time, LANES * 16 bytes apart.
template <typename A, int COUNT, int LANES>
__device__ __forceinline__ void load_fragment(A (&fragment)[COUNT], const A *shared)
{
    constexpr int V = vector16<A>::size;
#pragma unroll
    for (int piece = 0; piece < COUNT / V; piece++) {
        const vector16<A> v = *reinterpret_cast<const vector16<A> *>(shared + piece * LANES * V);
#pragma unroll
        for (int e = 0; e < V; e++)
            fragment[piece * V + e] = v.element[e];
    }
}

// Tiles are numbered in bands of GROUP rows of tiles, column by column inside a band, so that the blocks which run at
// the same time share their rows of a and columns of b in the L2.
__device__ __forceinline__ void tile_position(int64_t tile, int64_t tiles_m, int64_t tiles_n, int64_t group,
                                              int64_t &tile_m, int64_t &tile_n)
{
    const int64_t band = tile / (group * tiles_n), first = band * group;
    const int64_t height = tiles_m - first < group ? tiles_m - first : group;
    const int64_t inside = tile - first * tiles_n;
    tile_m = first + inside % height;
    tile_n = inside / height;
}

#endif
