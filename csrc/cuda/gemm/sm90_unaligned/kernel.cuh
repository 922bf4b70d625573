// The sm90_unaligned path's kernel and its launcher, to be instantiated one dtype a file;
// gemm/sm90_unaligned/sm90_unaligned.cu says what they do.
#ifndef CUDA_OPS_GEMM_SM90_UNALIGNED_KERNEL_CUH
#define CUDA_OPS_GEMM_SM90_UNALIGNED_KERNEL_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/swizzle.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/tile.cuh"
#include "gemm/sm90_unaligned/sm90_unaligned.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

// A warpgroup copies, two multiply 64 rows each. MN-major is what the kernel calls A stored k x m and B stored k x n.
template <typename T_, int N_, bool A_MN_MAJOR_, bool B_MN_MAJOR_>
struct UnalignedTile {
    typedef T_ T;
    static constexpr int M = 128, N = N_, GROUP_M = 64, BLOCKS = 1;
    static constexpr bool A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr bool IN_LINES = false, IN_REGISTERS = false, MAKES_EITHER = false, // for the epilogue of sm90
        ACTIVATES_QUICKLY = true;
    static constexpr int SHARING = N == 64 ? 2 : 1,
                         STAGES = N == 128 ? 6 : 4; // blocks of an SM, and of each its stages
    static constexpr int THREADS = 3 * WARPGROUP;
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T), K = ROW; // elements of a row, and k of a stage
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;              // an MN-major tile is columns of 64
    static constexpr int A_BYTES = M * SWIZZLE_ROW, B_BYTES = N * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
    // A row of results in shared memory: the pitch that lets a warp's stores meet all banks.
    static constexpr int RESULT_BYTES = N * (int)sizeof(T) + 16;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int SHARED_BYTES = SWIZZLE_ATOM + RING_BYTES + 2 * STAGES * 8;
    static_assert(RING_BYTES >= M * RESULT_BYTES, "room for the epilogue");
    static_assert(SHARING * (SHARED_BYTES + 1024) <= 233472, "an SM's shared memory");
};

// One operand: bytes, but for `lines` (of m or n) and `k`.
struct UnalignedOperand {
    const char *from;
    int64_t pitch, stride;
    int width; // of a copy
};

struct UnalignedWork : GemmWork {
    UnalignedOperand left, right;
    int tiles_m, tiles_n;
    int result_width; // the bytes of a row of D that may be written at once
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The copies of a thread, WIDTH bytes each: bytes `inner` of the lines `first`, `first` + WIDTH and so on, since 128
// threads take WIDTH lines of 128 bytes at a time.
template <int WIDTH>
struct CopyThread {
    int first, inner;
    uint32_t to; // from the tile's beginning, swizzled
    __device__ __forceinline__ CopyThread(int thread)
        : first(thread / (SWIZZLE_ROW / WIDTH)), inner(thread % (SWIZZLE_ROW / WIDTH) * WIDTH),
          to(first * SWIZZLE_ROW + swizzled_vector<SWIZZLE_ROW>(first, inner / 16) * 16 + inner % 16)
    {
    }
    // Where copy `i` goes: of four lines at a time every other group has the vectors' other halves.
    __device__ __forceinline__ uint32_t place(uint32_t tile, int i) const
    {
        return tile + i * WIDTH * SWIZZLE_ROW + (WIDTH == 4 && i % 2 ? to ^ 64 : to);
    }
};

// Asks for LINES lines of m or n from `line` on, of 128 bytes of k each: those beyond `lines` are left as they are, and
// so are their results; beyond k come zeros.
template <int WIDTH, int LINES>
__device__ __forceinline__ void copy_k_major(uint32_t tile, const UnalignedOperand &operand, const char *matrix,
                                             int line, int lines, int k, int k_left, int size, int thread)
{
    const CopyThread<WIDTH> mine(thread);
    const int inside = lines - line - mine.first; // this thread's first line is within, and those less than this on
    const bool is_zero = mine.inner >= k_left * size;
    const char *from = is_zero ? matrix : matrix + (line + mine.first) * operand.pitch + (int64_t)k * size + mine.inner;
    const int64_t step = is_zero ? 0 : WIDTH * operand.pitch;
    const int valid = is_zero ? 0 : WIDTH;
#pragma unroll
    for (int i = 0; i < LINES / WIDTH; i++, from += step)
        if (i * WIDTH < inside)
            cp_async<WIDTH>(mine.place(tile, i), from, valid);
}

// Asks for columns of 64 lines of k, of 128 bytes of m or n each, from element `line` of `lines` on; as above.
template <int WIDTH, int LINES, int K>
__device__ __forceinline__ void copy_mn_major(uint32_t tile, const UnalignedOperand &operand, const char *matrix,
                                              int line, int lines, int k, int k_left, int size, int thread)
{
    const CopyThread<WIDTH> mine(thread);
    const int inside = k_left - mine.first; // of k, as above
    const int64_t step = WIDTH * operand.pitch;
#pragma unroll
    for (int column = 0; column < LINES / K; column++) {
        const int at = (line + column * K) * size + mine.inner;
        if (at >= lines * size)
            continue;
        const char *from = matrix + (k + mine.first) * operand.pitch + at;
#pragma unroll
        for (int i = 0; i < K / WIDTH; i++, from += step) {
            const bool is_there = i * WIDTH < inside;
            cp_async<WIDTH>(mine.place(tile + column * K * SWIZZLE_ROW, i), is_there ? from : matrix,
                            is_there ? WIDTH : 0);
        }
    }
}

template <typename C, int LINES, bool MN_MAJOR>
__device__ __forceinline__ void copy_operand(uint32_t tile, const UnalignedOperand &operand, const char *matrix,
                                             int line, int lines, int k, int k_left, int thread)
{
    constexpr int SIZE = (int)sizeof(typename C::T);
    const auto copy = [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        if constexpr (MN_MAJOR)
            copy_mn_major<WIDTH, LINES, C::K>(tile, operand, matrix, line, lines, k, k_left, SIZE, thread);
        else
            copy_k_major<WIDTH, LINES>(tile, operand, matrix, line, lines, k, k_left, SIZE, thread);
    };
    if (operand.width == 16)
        copy(std::integral_constant<int, 16>());
    else if (operand.width == 8)
        copy(std::integral_constant<int, 8>());
    else
        copy(std::integral_constant<int, 4>());
}

// Rows of results from shared memory to D, WIDTH bytes at a time.
template <typename C, int WIDTH>
__device__ __forceinline__ void store_results(const char *results, const UnalignedWork &work, int64_t matrix,
                                              int first_row, int first_column, int thread)
{
    typedef typename C::T T;
    constexpr int MANY = WIDTH / (int)sizeof(T), UNITS = C::N / MANY;
    typedef aligned_vector<T, MANY> Vector;
    T *const d = (T *)work.d + matrix * work.stride_d + first_column;
    const int rows = min(C::GROUP_M, work.m - first_row), left = work.n - first_column;
#pragma unroll 4
    for (int i = thread; i < rows * UNITS; i += WARPGROUP) {
        const int row = i / UNITS, column = i % UNITS * MANY;
        const Vector vector = *(const Vector *)(results + row * C::RESULT_BYTES + column * (int)sizeof(T));
        T *const to = d + (first_row + row) * work.ldd + column;
        if (column + MANY <= left)
            *(Vector *)to = vector;
        else
#pragma unroll
            for (int e = 0; e < MANY; e++)
                if (column + e < left)
                    to[e] = vector.element[e];
    }
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::SHARING)
    gemm_sm90_unaligned_kernel(const __grid_constant__ UnalignedWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef typename C::T T;
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::RING_BYTES, empty = full + 8 * C::STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, WARPGROUP); // each copying thread, when its copies have landed
            mbarrier_init(empty + 8 * stage, 2);
        }
        fence_mbarrier_init();
    }
    // Along the side with fewer tiles first: concurrent blocks then share the long side's operand.
    const int tiles = work.tiles_m * work.tiles_n, outer = blockIdx.x / tiles, index = blockIdx.x - outer * tiles;
    const bool m_first = work.tiles_m <= work.tiles_n;
    const int side = m_first ? work.tiles_m : work.tiles_n, across = index / side, along = index - across * side;
    const int first_m = (m_first ? along : across) * C::M, first_n = (m_first ? across : along) * C::N;
    const int split = outer / work.batch, batch = outer - split * work.batch;
    const int k_begin = split * work.chunk, k_end = min(k_begin + work.chunk, work.k);
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    int stage = 0, phase = 0;
    if (group < 0) {
        const char *const a = work.left.from + (work.a_shared ? 0 : batch * work.left.stride);
        const char *const b = work.right.from + (work.b_shared ? 0 : batch * work.right.stride);
        for (int k = k_begin; k < k_end; k += C::K) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t tile = stages + stage * C::STAGE_BYTES;
            copy_operand<C, C::M, C::A_MN_MAJOR>(tile, work.left, a, first_m, work.m, k, k_end - k, thread);
            copy_operand<C, C::N, C::B_MN_MAJOR>(tile + C::A_BYTES, work.right, b, first_n, work.n, k, k_end - k,
                                                 thread);
            cp_async_mbarrier_arrive_noinc(full + 8 * stage);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        cp_async_wait_all();
    } else {
        const uint32_t a_first = stages + group * (C::A_MN_MAJOR ? C::COLUMN_BYTES : C::GROUP_M * SWIZZLE_ROW);
        const uint64_t a_tile = wgmma_descriptor(a_first, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        // 32 bytes on along k: within the row, or 16 rows further.
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        const auto bias = load_bias<C>(work, first_n, thread);
        float sum[1][C::N / 2];
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            sum[0][i] = 0;
        int before = -1;
        for (int k = k_begin; k < k_end; k += C::K) {
            mbarrier_wait(full + 8 * stage, phase);
            fence_proxy_async(); // cp.async's writes, which the barrier has made this thread see, before wgmma's reads
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum[0], wgmma_advance(a, i * A_STEP),
                                                             wgmma_advance(b, i * B_STEP), 1);
            wgmma_commit_group();
            // This stage's products are in flight; the previous stage's are done.
            wgmma_wait_group<1>();
            if (before >= 0 && thread == 0)
                mbarrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        const int64_t matrix = (int64_t)split * work.batch + batch; // of the partial sums; split 0 else
        const int first_row = first_m + group * C::GROUP_M;
        finish<C>(sum, bias, work, first_row, thread);
        if (work.output_is_float) {
            store_floats<C>(sum, work, matrix, first_row, first_n + 2 * (thread % 4), thread);
            return;
        }
        bar_sync(1, 2 * WARPGROUP); // both have multiplied the last stage
        char *const results = shared + (stages - shared_address(shared)) + group * C::GROUP_M * C::RESULT_BYTES;
        char *const to = results + row_of<C>(thread, 0, 0) * C::RESULT_BYTES + thread % 4 * 4;
#pragma unroll
        for (int i = 0; i < C::N / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(uint32_t *)(to + 8 * half * C::RESULT_BYTES + 16 * i) =
                    pack<T>(sum[0][4 * i + 2 * half], sum[0][4 * i + 2 * half + 1]);
        bar_sync(2 + group, WARPGROUP);
        if (work.result_width == 16)
            store_results<C, 16>(results, work, matrix, first_row, first_n, thread);
        else if (work.result_width == 8)
            store_results<C, 8>(results, work, matrix, first_row, first_n, thread);
        else if (work.result_width == 4)
            store_results<C, 4>(results, work, matrix, first_row, first_n, thread);
        else
            store_results<C, 2>(results, work, matrix, first_row, first_n, thread);
    }
#endif
}

// The largest of 16, 8, 4 and 2 that both are multiples of.
static inline int result_width(int64_t bytes, const void *address)
{
    const int64_t both = bytes | (int64_t)(uintptr_t)address;
    return both % 16 == 0 ? 16 : both % 8 == 0 ? 8 : both % 4 == 0 ? 4 : 2;
}

template <typename C>
static cuda_ops_status launch(const GemmCall &call, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    constexpr int64_t SIZE = sizeof(typename C::T);
    const CopyWidths widths = gemm_copy_widths(call);
    UnalignedWork work = {};
    (GemmWork &)work = work_of(call);
    work.left = {(const char *)call.a, p.lda * SIZE, p.stride_a * SIZE, widths.a};
    work.right = {(const char *)call.b, p.ldb * SIZE, p.stride_b * SIZE, widths.b};
    work.tiles_m = (int)ceil_div(p.m, C::M), work.tiles_n = (int)ceil_div(p.n, C::N);
    const int64_t chunk = ceil_div(ceil_div(p.k, plan.splits), C::K) * C::K, splits = ceil_div(p.k, chunk);
    work.splits = (int)splits, work.chunk = (int)chunk;
    work.result_width = result_width(SIZE * (p.ldd | (p.batch > 1 ? p.stride_d : 0)), call.d);
    if (splits > 1) {
        if (!call.workspace)
            return CUDA_OPS_INVALID_ARGUMENT;
        work.d = call.workspace;
        work.bias = nullptr;
        work.ldd = p.n, work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.activation = CUDA_OPS_GEMM_NONE;
        work.output_is_float = 1;
    }
    const int64_t blocks = (int64_t)work.tiles_m * work.tiles_n * p.batch * splits;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = gemm_sm90_unaligned_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    launch_dependent(kernel, dim3((unsigned int)blocks), C::THREADS, C::SHARED_BYTES, call.stream, work);
    const cuda_ops_status status = launch_status();
    return status != CUDA_OPS_SUCCESS || splits == 1 ? status : gemm_add_splits(call, splits);
}

// The tiles: 0 has 128 x 128, 1 128 x 64, 2 128 x 256.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_tiles(const GemmCall &call, const GemmPlan &plan)
{
    switch (plan.tile) {
    case 0:
        return launch<UnalignedTile<T, 128, a_mn_major, b_mn_major>>(call, plan);
    case 1:
        return launch<UnalignedTile<T, 64, a_mn_major, b_mn_major>>(call, plan);
    case 2:
        return launch<UnalignedTile<T, 256, a_mn_major, b_mn_major>>(call, plan);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}

template <typename T>
static cuda_ops_status launch_orders(const GemmCall &call, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    if (call.problem.transpose_a)
        return call.problem.transpose_b ? launch_tiles<T, true, false>(call, plan)
                                        : launch_tiles<T, true, true>(call, plan);
    return call.problem.transpose_b ? launch_tiles<T, false, false>(call, plan)
                                    : launch_tiles<T, false, true>(call, plan);
#else
    (void)call, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
