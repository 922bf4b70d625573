// Rung 11: D = activation(alpha * op(A) op(B) + bias) on the tensor cores by mma.sync: bfloat16, float16, TF32,
// float64. A block of 256 threads makes a tile of 128 x 128 (float64: 64 x 128), a warp 64 x 32 (32 x 32) of it in
// registers, from slices of the common dimension that cp.async brings into a ring of four stages in shared memory, two
// or three ahead of the one that is multiplied. 16-bit fragments are read by ldmatrix, which transposes on the way
// where an operand is stored along m or n; wider ones element by element. Rows in shared memory are padded so that
// neither way meets a bank conflict. Takes any size, transpose, alignment and batch: where rows are not aligned to 16
// bytes, threads copy element by element. Where tiles are too few to fill the GPU, k is split, and the pieces are added
// in order by a second kernel. Fixes of rung 10: the CUDA cores' 60 TFLOP/s; an mma of a warp does 4096 multiply-adds
// of 16 bits in one instruction. Leaves on the table: fragments travel through registers, at a quarter of shared
// memory's traffic per flop that rung 12's wgmma needs, and every thread spends instructions on addresses and copies.
#include "common.cuh"
#include "gemm/rungs.h"

static constexpr int THREADS = 256;
[[maybe_unused]] static constexpr int WARPS_M = 2, WARPS_N = 4; // unused where mma.sync is not

// Tile sizes, ring and padding by element type. An instruction multiplies 16 x DEPTH by DEPTH x 8.
template <typename T>
struct MmaTile {
    static constexpr int M = 128, N = 128, K = 64 / sizeof(T), STAGES = 4, DEPTH = 32 / sizeof(T);
    static constexpr int PAD_K = 16 / sizeof(T), PAD_MN = 32 / sizeof(T);
};
template <>
struct MmaTile<double> {
    static constexpr int M = 64, N = 128, K = 16, STAGES = 3, DEPTH = 8;
    static constexpr int PAD_K = 4, PAD_MN = 4;
};

// One operand's slice in shared memory: `LINES` of m or n by K; stored as it is in device memory.
template <typename T, int LINES, bool MN_MAJOR>
struct Slice {
    static constexpr int K = MmaTile<T>::K, PER_PIECE = 16 / sizeof(T);
    static constexpr int ROWS = MN_MAJOR ? K : LINES, WIDTH = MN_MAJOR ? LINES : K;
    static constexpr int PITCH = WIDTH + (MN_MAJOR ? MmaTile<T>::PAD_MN : MmaTile<T>::PAD_K);
    static constexpr int PIECES = ROWS * WIDTH / PER_PIECE / THREADS; // a thread's
    static constexpr int SIZE = ROWS * PITCH;
};

struct MmaWork {
    const void *a, *b, *bias;
    void *d;
    int64_t m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    int64_t tiles_m, tiles_n, batch, splits, chunk;
    double alpha;
    int activation, bias_is_wide, output_is_wide; // wide: of the accumulation type
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

__device__ __forceinline__ uint32_t address_of(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

template <typename T, int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void load_slice(T *to, const T *matrix, int64_t pitch, int64_t first_line, int64_t lines,
                                           int64_t k, int64_t k_end)
{
    typedef Slice<T, LINES, MN_MAJOR> S;
    constexpr int per_row = S::WIDTH / S::PER_PIECE;
#pragma unroll
    for (int i = 0; i < S::PIECES; i++) {
        const int piece = threadIdx.x + i * THREADS, r = piece / per_row, c = piece % per_row * S::PER_PIECE;
        const int64_t row = (MN_MAJOR ? k : first_line) + r, column = (MN_MAJOR ? first_line : k) + c;
        const int64_t left = (MN_MAJOR ? lines : k_end) - column;
        const bool inside = row < (MN_MAJOR ? k_end : lines) && left > 0;
        const int valid = inside ? (left < S::PER_PIECE ? (int)left : S::PER_PIECE) : 0;
        const T *const from = inside ? matrix + row * pitch + column : matrix;
        T *const there = to + r * S::PITCH + c;
        if constexpr (ALIGNED) {
            // Bytes past the valid ones are written as zeros.
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(there)), "l"(from),
                         "r"(valid * (int)sizeof(T))
                         : "memory");
        } else {
#pragma unroll
            for (int e = 0; e < S::PER_PIECE; e++)
                there[e] = e < valid ? from[e] : store_from_accumulate<T>(accumulate_type<T>(0));
        }
    }
}

__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t from, bool transposed)
{
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(from)
                     : "memory");
}

__device__ __forceinline__ uint32_t to_tf32(float value)
{
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}

// An instruction's operands in a thread, g = lane / 4 and t = lane % 4. Left: rows g and g + 8, at k = t (or a pair of
// halves at 2 t) and further on; right: column g.
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
template <>
struct Fragments<double> {
    typedef double Left[4];
    typedef double Right[2];
};

template <typename T, bool MN_MAJOR, int LINES>
__device__ __forceinline__ T slice_element(const T *slice, int line, int k)
{
    typedef Slice<T, LINES, MN_MAJOR> S;
    return MN_MAJOR ? slice[k * S::PITCH + line] : slice[line * S::PITCH + k];
}

__device__ __forceinline__ uint32_t operand(float value)
{
    return to_tf32(value);
}
__device__ __forceinline__ double operand(double value)
{
    return value;
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
        load_matrices(left, address_of(MN_MAJOR ? slice + p * S::PITCH + l : slice + l * S::PITCH + p), MN_MAJOR);
    } else {
        const int g = lane / 4, t = lane % 4;
        left[0] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t));
        left[1] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t));
        left[2] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t + 4));
        left[3] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t + 4));
    }
}

// Twice 8 lines from `line`, at k.
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
        load_matrices(both, address_of(MN_MAJOR ? slice + p * S::PITCH + l : slice + l * S::PITCH + p), MN_MAJOR);
        first[0] = both[0], first[1] = both[1], second[0] = both[2], second[1] = both[3];
    } else {
        const int g = lane / 4, t = lane % 4;
        first[0] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t));
        first[1] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g, k + t + 4));
        second[0] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t));
        second[1] = operand(slice_element<T, MN_MAJOR, LINES>(slice, line + g + 8, k + t + 4));
    }
}

// d (16 x 8) += a * b.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(double (&d)[4], const double (&a)[4], const double (&b)[2], double)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) // 8 rows and 4 of k at a time
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(d[i % 2 * 2]), "+d"(d[i % 2 * 2 + 1])
                     : "d"(a[i]), "d"(b[i / 2]));
#endif
}

template <typename A>
__device__ __forceinline__ A activate(A x, int activation)
{
    if (activation == CUDA_OPS_GEMM_RELU)
        return x < A(0) ? A(0) : x; // NaN stays
    if (activation == CUDA_OPS_GEMM_GELU)
        return A(0.5) * x * (A(1) + erf(x * A(0.70710678118654752440)));
    return x;
}
#endif

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR>
static constexpr int stage_elements =
    Slice<T, MmaTile<T>::M, A_MN_MAJOR>::SIZE + Slice<T, MmaTile<T>::N, B_MN_MAJOR>::SIZE;

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 2) gemm_mma_sync_kernel(const __grid_constant__ MmaWork work)
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
                load_slice<T, C::M, A_MN_MAJOR, ALIGNED>(stage, a, work.lda, m, work.m, k, k_end);
                load_slice<T, C::N, B_MN_MAJOR, ALIGNED>(stage + A_SIZE, b, work.ldb, n, work.n, k, k_end);
            }
            // A group a step even where there is nothing to load, so that the count of groups tells the step.
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        for (int step = 0; step < C::STAGES - 1; step++)
            load(step);
        for (int step = 0; step < steps; step++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(C::STAGES - 2) : "memory");
            // This step's slices are there for all, and the stage that is loaded next has been read by all.
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
                        mma(sum[i][j], left[i], right[j], T());
            }
        }
        // The ring is filled again for the next tile.
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
                        const A x = activate((A)work.alpha * sum[i][j][2 * half + e] + bias, work.activation);
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

static bool is_aligned(const void *matrix, int64_t size, int64_t pitch, int64_t stride)
{
    return is_aligned_16(matrix) && pitch * size % 16 == 0 && stride * size % 16 == 0;
}

static int64_t element_size(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? 8 : dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

// The pieces that k is split in: as many as bring the blocks to one wave of the GPU, of at least 256 each.
static int64_t pieces_of(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    const int64_t tile_m = p.dtype == CUDA_OPS_FLOAT64 ? 64 : 128;
    const int64_t tiles = ceil_div(p.m, tile_m) * ceil_div(p.n, 128) * p.batch;
    int64_t pieces = device.multiprocessors / tiles;
    pieces = pieces < p.k / 256 ? pieces : p.k / 256;
    pieces = pieces < 32 ? pieces : 32;
    return pieces > 1 ? pieces : 1;
}

template <typename T, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
static cuda_ops_status launch(const MmaWork &work, cudaStream_t stream)
{
    const auto kernel = gemm_mma_sync_kernel<T, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>;
    constexpr int bytes = MmaTile<T>::STAGES * stage_elements<T, A_MN_MAJOR, B_MN_MAJOR> * (int)sizeof(T);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const int64_t blocks = work.tiles_m * work.tiles_n * work.batch * work.splits, most = INT32_MAX;
    launch_dependent(kernel, dim3((unsigned int)(blocks < most ? blocks : most)), THREADS, bytes, stream, work);
    return launch_status();
}

template <typename T, bool ALIGNED>
static cuda_ops_status launch_transposed(const cuda_ops_gemm_problem &p, const MmaWork &work, cudaStream_t stream)
{
    if (p.transpose_a)
        return p.transpose_b ? launch<T, true, false, ALIGNED>(work, stream)
                             : launch<T, true, true, ALIGNED>(work, stream);
    return p.transpose_b ? launch<T, false, false, ALIGNED>(work, stream)
                         : launch<T, false, true, ALIGNED>(work, stream);
}

bool gemm_mma_sync_supports(const GemmCall &call, GemmDevice device)
{
    return device.capability >= 80 && (call.problem.dtype != CUDA_OPS_FLOAT32 || call.problem.allow_tf32);
}

int64_t gemm_mma_sync_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_pieces_bytes(problem, pieces_of(problem, device));
}

cuda_ops_status gemm_mma_sync(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    int64_t pieces = pieces_of(p, device);
    const int64_t chunk = pieces > 1 ? ceil_div(ceil_div(p.k, pieces), 32) * 32 : p.k, size = element_size(p.dtype);
    pieces = pieces > 1 ? ceil_div(p.k, chunk) : 1; // none of them empty
    MmaWork work = {};
    work.a = call.a, work.b = call.b, work.bias = call.bias, work.d = call.d;
    work.m = p.m, work.n = p.n, work.k = p.k, work.batch = p.batch;
    work.lda = p.lda, work.ldb = p.ldb, work.ldd = p.ldd;
    work.stride_a = p.stride_a, work.stride_b = p.stride_b, work.stride_d = p.stride_d;
    work.tiles_m = ceil_div(p.m, p.dtype == CUDA_OPS_FLOAT64 ? 64 : 128);
    work.tiles_n = ceil_div(p.n, 128);
    work.splits = pieces;
    work.chunk = chunk;
    work.alpha = p.alpha;
    work.activation = p.activation;
    work.bias_is_wide = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.output_is_wide = p.output_dtype == CUDA_OPS_FLOAT32;
    if (pieces > 1) {
        work.d = call.workspace, work.bias = nullptr, work.alpha = 1, work.activation = CUDA_OPS_GEMM_NONE;
        work.ldd = p.n, work.stride_d = p.m * p.n, work.output_is_wide = 1;
    }
    const bool aligned = is_aligned(call.a, size, p.lda, p.stride_a) && is_aligned(call.b, size, p.ldb, p.stride_b);
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(p.dtype, T,
                      status = aligned ? launch_transposed<T, true>(p, work, call.stream)
                                       : launch_transposed<T, false>(p, work, call.stream));
    return status == CUDA_OPS_SUCCESS && pieces > 1 ? gemm_add_pieces(call, pieces) : status;
}
