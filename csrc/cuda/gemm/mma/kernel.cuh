// The mma path's kernel, to be instantiated one dtype a file; gemm/mma/mma.cu says what it does. float64 has a kernel
// of its own, gemm/mma/float64.cu.
#ifndef CUDA_OPS_GEMM_MMA_KERNEL_CUH
#define CUDA_OPS_GEMM_MMA_KERNEL_CUH

#include "common/activation.cuh"
#include "common/common.cuh"
#include "common/unaligned_vector.cuh"
#include "gemm/paths.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 256;
[[maybe_unused]] static constexpr int WARPS_M = 2, WARPS_N = 4; // unused below sm_80

// Tile sizes, stages and padding by element type. An instruction multiplies 16 x DEPTH by DEPTH x 8.
template <typename T>
struct MmaTile {
    static constexpr int M = 128, N = 128, K = 64 / sizeof(T), STAGES = 4, DEPTH = 32 / sizeof(T);
    static constexpr int PAD_K = 16 / sizeof(T), PAD_MN = 32 / sizeof(T);
};
// One operand's slice in shared memory: LINES of m or n by K, in its storage order.
template <typename T, int LINES, bool MN_MAJOR>
struct Slice {
    static constexpr int K = MmaTile<T>::K, PER_VECTOR = 16 / sizeof(T);
    static constexpr int ROWS = MN_MAJOR ? K : LINES, WIDTH = MN_MAJOR ? LINES : K;
    static constexpr int PITCH = WIDTH + (MN_MAJOR ? MmaTile<T>::PAD_MN : MmaTile<T>::PAD_K);
    static constexpr int VECTORS = ROWS * WIDTH / PER_VECTOR / THREADS; // of a thread
    static constexpr int SIZE = ROWS * PITCH;
};

struct MmaWork {
    const void *a, *b, *bias;
    const void *a_end, *b_end; // behind the last element of all matrices
    void *d;
    int64_t m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    int64_t tiles_m, tiles_n, batch, splits, chunk;
    double alpha;
    int activation, bias_is_wide, output_is_wide; // wide: of the accumulation type
    int capability, multiprocessors;              // the device's
    // float64 alone: from tile `whole` on (counted through the batch) k is split in `parts`, whose sums go to
    // `partial`.
    int64_t whole, parts;
    double *partial;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Where a thread's vector of a slice lies, and how many of its elements are in bounds.
template <typename T>
struct SlicePart {
    const T *from;
    T *to;
    int valid;
};

template <typename T, int LINES, bool MN_MAJOR>
__device__ __forceinline__ SlicePart<T> slice_part(int i, T *to, const T *matrix, int64_t pitch, int64_t first_line,
                                                   int64_t lines, int64_t k, int64_t k_end)
{
    typedef Slice<T, LINES, MN_MAJOR> S;
    constexpr int per_row = S::WIDTH / S::PER_VECTOR;
    const int vector = threadIdx.x + i * THREADS, r = vector / per_row, c = vector % per_row * S::PER_VECTOR;
    const int64_t row = (MN_MAJOR ? k : first_line) + r, column = (MN_MAJOR ? first_line : k) + c;
    const int64_t left = (MN_MAJOR ? lines : k_end) - column;
    const bool inside = row < (MN_MAJOR ? k_end : lines) && left > 0;
    return {inside ? matrix + row * pitch + column : matrix, to + r * S::PITCH + c,
            inside ? (left < S::PER_VECTOR ? (int)left : S::PER_VECTOR) : 0};
}

// [begin, end): the operand, of which `matrix` is one.
template <typename T, int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void load_slice(T *to, const T *matrix, int64_t pitch, int64_t first_line, int64_t lines,
                                           int64_t k, int64_t k_end, const void *begin, const void *end)
{
    typedef Slice<T, LINES, MN_MAJOR> S;
    if constexpr (ALIGNED) {
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
            const SlicePart<T> part = slice_part<T, LINES, MN_MAJOR>(i, to, matrix, pitch, first_line, lines, k, k_end);
            cp_async<16>(shared_address(part.to), part.from, part.valid * (int)sizeof(T));
        }
    } else {
        SlicePart<T> part[S::VECTORS];
        VectorsAround around[S::VECTORS];
        bool whole[S::VECTORS];
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) { // all loads before the first use
            part[i] = slice_part<T, LINES, MN_MAJOR>(i, to, matrix, pitch, first_line, lines, k, k_end);
            whole[i] = part[i].valid == S::PER_VECTOR && are_readable_around(part[i].from, begin, end);
            around[i] = load_around(part[i].from, whole[i]);
        }
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
            if (whole[i])
                *(uint4 *)part[i].to = cut(around[i]);
            else
#pragma unroll
                for (int e = 0; e < S::PER_VECTOR; e++)
                    part[i].to[e] =
                        e < part[i].valid ? part[i].from[e] : store_from_accumulate<T>(accumulate_type<T>(0));
        }
    }
}

__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t from, bool transposed)
{
    if (transposed)
        ldmatrix_x4_trans(d, from);
    else
        ldmatrix_x4(d, from);
}

// An instruction's operands in a thread, with g = lane / 4 and t = lane % 4. Left: rows g and g + 8, at k = t (16 bits:
// the pair at 2 t) and further; right: column g.
template <typename T>
struct Fragments { // 16 bits
    typedef uint32_t Left[4];
    typedef uint32_t Right[2];
};
template <>
struct Fragments<float> {
    typedef uint32_t Left[4];
    typedef uint32_t Right[2];
};
template <typename T, bool MN_MAJOR, int LINES>
__device__ __forceinline__ T slice_element(const T *slice, int line, int k)
{
    typedef Slice<T, LINES, MN_MAJOR> S;
    return MN_MAJOR ? slice[k * S::PITCH + line] : slice[line * S::PITCH + k];
}

// 16 lines from `line`, at k.
template <typename T, bool MN_MAJOR, int LINES>
__device__ __forceinline__ void load_left(typename Fragments<T>::Left &left, const T *slice, int line, int k)
{
    const int lane = threadIdx.x % 32;
    typedef Slice<T, LINES, MN_MAJOR> S;
    if constexpr (sizeof(T) == 2) {
        // The four 8 x 8 matrices in the instruction's order: lines 0-7, 8-15, then the same 8 further along k.
        const int l = line + (MN_MAJOR ? lane / 8 % 2 * 8 : lane % 16),
                  p = k + (MN_MAJOR ? lane % 8 + lane / 16 * 8 : lane / 16 * 8);
        load_matrices(left, shared_address(MN_MAJOR ? slice + p * S::PITCH + l : slice + l * S::PITCH + p), MN_MAJOR);
    } else {
        const int g = lane / 4, t = lane % 4;
        left[0] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t));
        left[1] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t));
        left[2] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t + 4));
        left[3] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t + 4));
    }
}

// Two fragments of 8 lines each from `line`, at k.
template <typename T, bool MN_MAJOR, int LINES>
__device__ __forceinline__ void load_right(typename Fragments<T>::Right &first, typename Fragments<T>::Right &second,
                                           const T *slice, int line, int k)
{
    const int lane = threadIdx.x % 32;
    typedef Slice<T, LINES, MN_MAJOR> S;
    if constexpr (sizeof(T) == 2) {
        const int l = line + (MN_MAJOR ? lane / 16 * 8 : lane % 8 + lane / 16 * 8);
        const int p = k + (MN_MAJOR ? lane % 16 : lane / 8 % 2 * 8);
        uint32_t both[4];
        load_matrices(both, shared_address(MN_MAJOR ? slice + p * S::PITCH + l : slice + l * S::PITCH + p), MN_MAJOR);
        first[0] = both[0], first[1] = both[1], second[0] = both[2], second[1] = both[3];
    } else {
        const int g = lane / 4, t = lane % 4;
        first[0] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t));
        first[1] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t + 4));
        second[0] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t));
        second[1] = cvt_rna_tf32(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t + 4));
    }
}

#endif

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR>
static constexpr int stage_elements =
    Slice<T, MmaTile<T>::M, A_MN_MAJOR>::SIZE + Slice<T, MmaTile<T>::N, B_MN_MAJOR>::SIZE;

// A call, since gelu inlined for each of a thread's 64 sums would be most of the kernel and of the time it compiles.
template <typename A>
__device__ __noinline__ A activate_apart(A x, int activation)
{
    return activate(x, activation);
}

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 2) gemm_mma_kernel(const __grid_constant__ MmaWork work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef MmaTile<T> C;
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    constexpr int STAGE = stage_elements<T, A_MN_MAJOR, B_MN_MAJOR>, A_SIZE = Slice<T, C::M, A_MN_MAJOR>::SIZE;
    constexpr int WARP_M = C::M / WARPS_M, WARP_N = C::N / WARPS_N, ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;
    T *const ring = (T *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_m = warp / WARPS_N * WARP_M, my_n = warp % WARPS_N * WARP_N;
    const int64_t tiles = work.tiles_m * work.tiles_n;
    wait_for_predecessor();
    for (int64_t index = blockIdx.x; index < tiles * work.batch * work.splits; index += gridDim.x) {
        const int64_t outer = index / tiles, split = outer / work.batch, batch = outer % work.batch;
        // Bands of 8 rows of tiles, so that the blocks that run together share what they read.
        const int64_t in = index % tiles, band = in / (8 * work.tiles_n), rest = in % (8 * work.tiles_n);
        const int64_t rows = work.tiles_m - 8 * band < 8 ? work.tiles_m - 8 * band : 8;
        const int64_t m = (8 * band + rest % rows) * C::M, n = rest / rows * C::N;
        const T *const a = (const T *)work.a + batch * work.stride_a, *const b =
                                                                          (const T *)work.b + batch * work.stride_b;
        const int64_t k_begin = split * work.chunk;
        const int64_t k_end = k_begin + work.chunk < work.k ? k_begin + work.chunk : work.k;
        const int steps = (int)((k_end - k_begin + C::K - 1) / C::K);
        A sum[ROWS][COLUMNS][4] = {};

        auto load = [&](int step) {
            if (step < steps) {
                T *const stage = ring + step % C::STAGES * STAGE;
                const int64_t k = k_begin + (int64_t)step * C::K;
                load_slice<T, C::M, A_MN_MAJOR, ALIGNED>(stage, a, work.lda, m, work.m, k, k_end, work.a, work.a_end);
                load_slice<T, C::N, B_MN_MAJOR, ALIGNED>(stage + A_SIZE, b, work.ldb, n, work.n, k, k_end, work.b,
                                                         work.b_end);
            }
            // One group a step even where nothing is loaded, so that the number of pending groups tells the step.
            cp_async_commit_group();
        };
        for (int step = 0; step < C::STAGES - 1; step++)
            load(step);
        for (int step = 0; step < steps; step++) {
            cp_async_wait_group<C::STAGES - 2>();
            // All threads see this step's slices, and have read the stage that is loaded next.
            __syncthreads();
            load(step + C::STAGES - 1);
            const T *const a_slice = ring + step % C::STAGES * STAGE, *const b_slice = a_slice + A_SIZE;
#pragma unroll
            for (int k = 0; k < C::K; k += C::DEPTH) {
                typename Fragments<T>::Left left[ROWS];
                typename Fragments<T>::Right right[COLUMNS];
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    load_left<T, A_MN_MAJOR, C::M>(left[i], a_slice, my_m + 16 * i, k);
#pragma unroll
                for (int j = 0; j < COLUMNS; j += 2)
                    load_right<T, B_MN_MAJOR, C::N>(right[j], right[j + 1], b_slice, my_n + 8 * j, k);
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++)
                        mma_sync<T>(sum[i][j], left[i], right[j][0], right[j][1]);
            }
        }
        // The next tile refills the stages.
        __syncthreads();

        const int64_t matrix = split * work.batch + batch;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int64_t column = n + my_n + 8 * j + lane % 4 * 2 + e;
                if (column >= work.n)
                    continue;
                A bias = 0;
                if (work.bias)
                    bias = work.bias_is_wide ? ((const A *)work.bias)[column]
                                             : load_as_accumulate(((const T *)work.bias)[column]);
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int64_t row = m + my_m + 16 * i + lane / 4 + 8 * half;
                        if (row >= work.m)
                            continue;
                        A x = (A)work.alpha * sum[i][j][2 * half + e] + bias;
                        if (work.activation > CUDA_OPS_GEMM_RELU)
                            x = activate_apart(x, work.activation);
                        else if (work.activation == CUDA_OPS_GEMM_RELU && x < A(0))
                            x = 0; // and NaN stays
                        const int64_t at = matrix * work.stride_d + row * work.ldd + column;
                        if (work.output_is_wide)
                            ((A *)work.d)[at] = x;
                        else
                            ((T *)work.d)[at] = store_from_accumulate<T>(x);
                    }
            }
    }
    release_successor();
#endif
}

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
static cuda_ops_status launch(const MmaWork &work, cudaStream_t stream)
{
    const auto kernel = gemm_mma_kernel<T, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>;
    constexpr int bytes = MmaTile<T>::STAGES * stage_elements<T, A_MN_MAJOR, B_MN_MAJOR> * (int)sizeof(T);
    allow_shared_memory(kernel, bytes);
    const int64_t blocks = work.tiles_m * work.tiles_n * work.batch * work.splits, most = INT32_MAX;
    launch_dependent(kernel, dim3((unsigned int)(blocks < most ? blocks : most)), THREADS, bytes, stream, work);
    return launch_status();
}

template <typename T, bool ALIGNED>
static cuda_ops_status launch_transposed(const MmaWork &work, const cuda_ops_gemm_problem &p, cudaStream_t stream)
{
    if (p.transpose_a)
        return p.transpose_b ? launch<T, true, false, ALIGNED>(work, stream)
                             : launch<T, true, true, ALIGNED>(work, stream);
    return p.transpose_b ? launch<T, false, false, ALIGNED>(work, stream)
                         : launch<T, false, true, ALIGNED>(work, stream);
}

template <typename T>
static cuda_ops_status launch_mma_sync(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                       cudaStream_t stream)
{
    return aligned ? launch_transposed<T, true>(work, p, stream) : launch_transposed<T, false>(work, p, stream);
}

cuda_ops_status gemm_mma_bfloat16(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                  cudaStream_t stream);
cuda_ops_status gemm_mma_float16(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                 cudaStream_t stream);
cuda_ops_status gemm_mma_tf32(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned, cudaStream_t stream);
cuda_ops_status gemm_mma_float64(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned, int tile,
                                 cudaStream_t stream);
// Bytes for `partial`, where k is whole.
int64_t gemm_mma_float64_workspace(const cuda_ops_gemm_problem &p, GemmDevice device);

#endif
