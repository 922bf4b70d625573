// The simt path: tile configurations, the copies of slices to shared memory, and what the main loop does with them.
#ifndef CUDA_OPS_GEMM_SIMT_LOAD_CUH
#define CUDA_OPS_GEMM_SIMT_LOAD_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"

// Copies COUNT elements from global to shared memory by cp.async, zeros where `inside` is false. Before sm_80 (and for
// fp16 and bf16, which are widened on the way) by a load and a store.
template <typename T, typename A, int COUNT>
__device__ __forceinline__ void copy_elements(A *shared, const T *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    constexpr bool asynchronous = sizeof(T) == sizeof(A);
#else
    constexpr bool asynchronous = false;
#endif
    if constexpr (asynchronous)
        cp_async<(int)sizeof(T) * COUNT>(shared_address(shared), global, inside ? (int)sizeof(T) * COUNT : 0);
    else
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            shared[e] = inside ? load_as_accumulate(global[e]) : A(0);
}

// A tile configuration. BLOCKS: that an SM holds at once. THROUGH_SHARED: the epilogue goes through shared memory. A
// warp has LANES_M x LANES_N lanes, a thread THREAD_M x THREAD_N sums, in vectors of 16 bytes that lie a warp's width
// apart, so that the lanes of a warp read adjacent 16-byte words.
template <int WARPS_M_, int WARPS_N_, int SLICES_, int LANES_M_, int THREAD_M_, int THREAD_N_, int DEPTH_, int STAGES_,
          int BLOCKS_, bool THROUGH_SHARED_ = false>
struct SimtTile {
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, SLICES = SLICES_, LANES_M = LANES_M_,
                         LANES_N = 32 / LANES_M_, THREAD_M = THREAD_M_, THREAD_N = THREAD_N_, DEPTH = DEPTH_,
                         STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr bool THROUGH_SHARED = THROUGH_SHARED_;
    static constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
    static constexpr int M = WARPS_M * WARP_M, N = WARPS_N * WARP_N;
    static constexpr int THREADS = WARPS_M * WARPS_N * SLICES * 32;
};

// Pitch of a row of LINES in shared memory: where a warp writes 4 lines at 8 values of k, 4 words of padding spread
// them over all 32 banks.
template <int LINES, bool K_MAJOR>
static constexpr int simt_pitch = K_MAJOR ? LINES + 4 : LINES;

static constexpr int power_of_two_within(int count)
{
    return count < 2 ? 1 : 2 * power_of_two_within(count / 2);
}

// What a thread copies of a slice of LINES x DEPTH of one operand. K_MAJOR: stored as operand[line][k], and transposed
// on the way element by element; else operand[k][line], VECTOR elements at a time. Lines out of bounds are replaced by
// the last one, whose products are never stored, so that the loop tests k alone.
template <typename T, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
struct SimtSource {
    static constexpr int PITCH = simt_pitch<LINES, K_MAJOR>;
    static constexpr int POINTERS = K_MAJOR ? LINES * 8 / THREADS : 1;
    static constexpr int ROW = LINES / VECTOR;                      // copies for one k
    static constexpr int ROWS = power_of_two_within(THREADS / ROW); // k that the threads copy at once
    static constexpr bool SOME_IDLE = ROWS * ROW < THREADS;
    const T *pointer[POINTERS > 0 ? POINTERS : 1];
    int shared_offset, depth;
    int64_t step; // elements between two k
};

template <typename T, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
__device__ __forceinline__ void start_source(SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> &source,
                                             const T *operand, int64_t stride, int64_t first, int64_t lines,
                                             int64_t begin)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> S;
    const int thread = threadIdx.x;
    if constexpr (K_MAJOR) {
        static_assert(VECTOR == 1 && DEPTH % 8 == 0 && LINES * 8 % THREADS == 0, "whole rounds of copies");
        source.depth = thread % 8;
        source.shared_offset = source.depth * S::PITCH + thread / 8;
#pragma unroll
        for (int r = 0; r < S::POINTERS; r++) {
            const int64_t line = first + thread / 8 + r * (THREADS / 8);
            source.pointer[r] = operand + (line < lines ? line : lines - 1) * stride + begin + source.depth;
        }
    } else {
        static_assert(THREADS >= S::ROW && DEPTH % S::ROWS == 0, "whole rounds of copies");
        source.depth = thread / S::ROW;
        const int offset = thread % S::ROW * VECTOR;
        source.shared_offset = source.depth * S::PITCH + offset;
        const int64_t line = first + offset <= lines - VECTOR ? first + offset : lines - VECTOR;
        source.pointer[0] = operand + (begin + source.depth) * stride + line;
        source.step = stride;
    }
}

// Starts the copies of one slice, of which `depths` are in bounds, and advances the source to the next one.
template <typename T, typename A, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
__device__ __forceinline__ void copy_slice(SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> &source, A *shared,
                                           int depths)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> S;
    constexpr int ROUNDS = DEPTH / (K_MAJOR ? 8 : S::ROWS), COPIES = ROUNDS * S::POINTERS;
    A *const target = shared + source.shared_offset;
    if (!K_MAJOR && S::SOME_IDLE && source.depth >= S::ROWS)
        return;
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        const int d = c / S::POINTERS * (K_MAJOR ? 8 : S::ROWS), r = c % S::POINTERS;
        const bool inside = source.depth + d < depths;
        if constexpr (K_MAJOR)
            copy_elements<T, A, 1>(target + d * S::PITCH + r * (THREADS / 8), source.pointer[r] + d, inside);
        else
            copy_elements<T, A, VECTOR>(target + d * S::PITCH, source.pointer[0] + d * source.step, inside);
    }
#pragma unroll
    for (int r = 0; r < S::POINTERS; r++)
        source.pointer[r] += K_MAJOR ? (int64_t)DEPTH : DEPTH * source.step;
}

// Loads a thread's COUNT elements at one k: 16 bytes at a time, LANES * 16 bytes apart.
template <typename A, int COUNT, int LANES>
__device__ __forceinline__ void load_fragment(A (&fragment)[COUNT], const A *shared)
{
    constexpr int V = vector16<A>::size;
#pragma unroll
    for (int i = 0; i < COUNT / V; i++) {
        const vector16<A> v = *reinterpret_cast<const vector16<A> *>(shared + i * LANES * V);
#pragma unroll
        for (int e = 0; e < V; e++)
            fragment[i * V + e] = v.element[e];
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

// One outer product. Odd rows go backwards, so that each multiply-add shares a factor with the previous one and reads
// two words, not three, from the register file, whose two banks give one word a clock each.
template <typename A, int TM, int TN>
__device__ __forceinline__ void add_outer_product(A (&sum)[TM][TN], const A (&left)[TM], const A (&right)[TN])
{
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) {
            const int c = i % 2 ? TN - 1 - j : j;
            sum[i][c] += left[i] * right[c];
        }
}

#endif
