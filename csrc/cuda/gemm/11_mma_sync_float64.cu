// Rung 11 for float64, a kernel of its own: D = activation(alpha * op(A) op(B) + bias) by mma.sync, 16 x 8 x 8 on
// Hopper (before it 8 x 8 x 4). The tensor cores' 128 multiply-adds a cycle and SM are slow beside shared memory, so
// that nothing counts but keeping them busy: a block of 256 threads makes a tile of 64 x 128 from a ring of slices of
// 16 along k, which cp.async copies several ahead (16 bytes at a time, or 8, which fits any address); fragments are
// read 16 bytes at a time while those before are multiplied. The instruction's places in k and its lines may be dealt
// out at will as long as both operands, and the results, agree. Here a thread's neighbouring places are neighbours in
// memory: along k for all, and along m or n too where an operand is stored that way (see line_of). With the padding
// neither way of reading meets a bank twice. Measured on an H200 against cuBLAS: see benchmarks/notes/gemm.md.
#include "gemm/11_mma_sync.cuh"

// M x N: a block's tile; its warps lie WARPS_M x WARPS_N (of 11_mma_sync.cuh).
template <int STAGES_>
struct Float64Tile {
    static constexpr int M = 64, N = 128, K = 16, STAGES = STAGES_;
    static constexpr int WARP_M = M / WARPS_M, WARP_N = N / WARPS_N, ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;
};
// The ring's depth: what Hopper's shared memory holds, and what every GPU's from sm_80 on does. Each kernel is compiled
// for its devices alone.
typedef Float64Tile<6> DeepTile;
typedef Float64Tile<2> ShallowTile;
template <typename C>
__host__ __device__ constexpr bool is_compiled()
{
#if defined(__CUDA_ARCH__)
    return (__CUDA_ARCH__ >= 900) == (C::STAGES == DeepTile::STAGES);
#else
    return true;
#endif
}

// A slice's line of 16 (or row of `lines`), padded.
template <int LINES, bool MN_MAJOR>
struct Float64Slice {
    static constexpr int ROWS = MN_MAJOR ? 16 : LINES, WIDTH = MN_MAJOR ? LINES : 16;
    static constexpr int PITCH = MN_MAJOR ? LINES + 2 : 24, SIZE = ROWS * PITCH;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// What a thread copies of an operand's slices: one or two neighbours of every APART-th row, from its first.
template <int LINES, bool MN_MAJOR, bool ALIGNED>
struct Float64Copy {
    typedef Float64Slice<LINES, MN_MAJOR> S;
    static constexpr int COUNT = ALIGNED ? 2 : 1, PER_ROW = S::WIDTH / COUNT, APART = THREADS / PER_ROW;
    const double *from;   // in the next slice
    int64_t apart, slice; // elements from one of its rows to the next, and to the next slice
    int row, column;      // in the slice
    int lines_left;       // from there to the operand's end
};

template <int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void start_copy(Float64Copy<LINES, MN_MAJOR, ALIGNED> &copy, const double *matrix,
                                           int64_t pitch, int64_t first_line, int64_t lines, int64_t k)
{
    typedef Float64Copy<LINES, MN_MAJOR, ALIGNED> Copy;
    copy.row = threadIdx.x / Copy::PER_ROW, copy.column = threadIdx.x % Copy::PER_ROW * Copy::COUNT;
    const int64_t left = lines - first_line - (MN_MAJOR ? copy.column : copy.row);
    copy.lines_left = left < LINES ? (int)left : LINES;
    copy.from = matrix + ((MN_MAJOR ? k : first_line) + copy.row) * pitch + (MN_MAJOR ? first_line : k) + copy.column;
    copy.apart = Copy::APART * pitch;
    copy.slice = MN_MAJOR ? 16 * pitch : 16;
}

// The next slice, of which `k_left` (> 0) is inside.
template <int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void copy_slice(double *to, Float64Copy<LINES, MN_MAJOR, ALIGNED> &copy, int64_t k_left)
{
    typedef Float64Copy<LINES, MN_MAJOR, ALIGNED> Copy;
    typedef typename Copy::S S;
    const int depth_left = (k_left < 16 ? (int)k_left : 16) - (MN_MAJOR ? copy.row : copy.column);
    const int across = MN_MAJOR ? copy.lines_left : depth_left, down = MN_MAJOR ? depth_left : copy.lines_left;
    const int bytes = across <= 0 ? 0 : across < Copy::COUNT ? 8 * across : 8 * Copy::COUNT;
    const uint32_t there = address_of(to + copy.row * S::PITCH + copy.column);
    const double *from = copy.from;
#pragma unroll
    for (int i = 0; i < S::ROWS / Copy::APART; i++, from += copy.apart) {
        const uint32_t target = there + i * Copy::APART * S::PITCH * 8;
        const int valid = i * Copy::APART < down ? bytes : 0; // the rest is written as zeros
        if constexpr (ALIGNED)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(valid)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(from), "r"(valid)
                         : "memory");
    }
    copy.from += copy.slice;
}

// A thread's two places along k, of 8 from `k`, of line g of two blocks of eight: `first` and `second`. K-major: the
// blocks are lines g and g + 8. MN-major: they are dealt out in turn, 2 g and 2 g + 1.
template <int LINES, bool MN_MAJOR>
__device__ __forceinline__ void load_lines(double (&first)[2], double (&second)[2], const double *slice, int line,
                                           int k)
{
    typedef Float64Slice<LINES, MN_MAJOR> S;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (MN_MAJOR) {
        const double2 v = *(const double2 *)(slice + (k + 2 * t) * S::PITCH + line + 2 * g);
        const double2 w = *(const double2 *)(slice + (k + 2 * t + 1) * S::PITCH + line + 2 * g);
        first[0] = v.x, first[1] = w.x, second[0] = v.y, second[1] = w.y;
    } else {
        const double2 v = *(const double2 *)(slice + (line + g) * S::PITCH + k + 2 * t);
        const double2 w = *(const double2 *)(slice + (line + g + 8) * S::PITCH + k + 2 * t);
        first[0] = v.x, first[1] = v.y, second[0] = w.x, second[1] = w.y;
    }
}

// Which of 16 lines is line g of block 0 or 1.
template <bool MN_MAJOR>
__device__ __forceinline__ int line_of(int g, int block)
{
    return MN_MAJOR ? 2 * g + block : g + 8 * block;
}

// d (16 x 8) += a * b over 8 of k; a and a_below: lines of the upper and the lower half.
__device__ __forceinline__ void mma_8(double (&d)[4], const double (&a)[2], const double (&a_below)[2],
                                      const double (&b)[2])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a_below[0]), "d"(a[1]), "d"(a_below[1]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(d[0]), "+d"(d[1])
                     : "d"(a[i]), "d"(b[i]));
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(d[2]), "+d"(d[3])
                     : "d"(a_below[i]), "d"(b[i]));
    }
#endif
}
#endif

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR>
static constexpr int float64_stage = Float64Slice<C::M, A_MN_MAJOR>::SIZE + Float64Slice<C::N, B_MN_MAJOR>::SIZE;

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void multiply_float64(const MmaWork &work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) double float64_ring[];
    constexpr int STAGE = float64_stage<C, A_MN_MAJOR, B_MN_MAJOR>, A_SIZE = Float64Slice<C::M, A_MN_MAJOR>::SIZE;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int my_m = warp / WARPS_N * C::WARP_M, my_n = warp % WARPS_N * C::WARP_N;
    const int64_t tiles = work.tiles_m * work.tiles_n;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles * work.batch * work.splits; index += gridDim.x) {
        const int64_t outer = index / tiles, split = outer / work.batch, batch = outer % work.batch;
        // Bands of 8 rows of tiles, so that the blocks that run together share what they read.
        const int64_t in = index % tiles, band = in / (8 * work.tiles_n), rest = in % (8 * work.tiles_n);
        const int64_t rows = work.tiles_m - 8 * band < 8 ? work.tiles_m - 8 * band : 8;
        const int64_t m = (8 * band + rest % rows) * C::M, n = rest / rows * C::N;
        const double *const a = (const double *)work.a + batch * work.stride_a;
        const double *const b = (const double *)work.b + batch * work.stride_b;
        const int64_t k_begin = split * work.chunk;
        const int64_t k_end = k_begin + work.chunk < work.k ? k_begin + work.chunk : work.k;
        const int steps = (int)((k_end - k_begin + C::K - 1) / C::K);
        double sum[C::ROWS][C::COLUMNS][4] = {};

        Float64Copy<C::M, A_MN_MAJOR, ALIGNED> copy_a;
        Float64Copy<C::N, B_MN_MAJOR, ALIGNED> copy_b;
        start_copy(copy_a, a, work.lda, m, work.m, k_begin);
        start_copy(copy_b, b, work.ldb, n, work.n, k_begin);
        int filling = 0, reading = 0; // stages
        auto load = [&](int step) {
            if (step < steps) {
                double *const stage = float64_ring + filling * STAGE;
                const int64_t left = k_end - k_begin - (int64_t)step * C::K;
                copy_slice(stage, copy_a, left);
                copy_slice(stage + A_SIZE, copy_b, left);
            }
            filling = filling + 1 == C::STAGES ? 0 : filling + 1;
            // A group a step even where there is nothing to load, so that the count of groups tells the step.
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        // The fragments of 8 of k, while those of the 8 before are multiplied.
        double upper[2][C::ROWS][2], lower[2][C::ROWS][2], right[2][C::COLUMNS][2];
        auto fetch = [&](int to, int stage, int k) {
            const double *const a_slice = float64_ring + stage * STAGE, *const b_slice = a_slice + A_SIZE;
#pragma unroll
            for (int j = 0; j < C::COLUMNS; j += 2)
                load_lines<C::N, B_MN_MAJOR>(right[to][j], right[to][j + 1], b_slice, my_n + 8 * j, k);
#pragma unroll
            for (int i = 0; i < C::ROWS; i++)
                load_lines<C::M, A_MN_MAJOR>(upper[to][i], lower[to][i], a_slice, my_m + 16 * i, k);
        };
        auto multiply = [&](int from) {
#pragma unroll
            for (int i = 0; i < C::ROWS; i++)
#pragma unroll
                for (int j = 0; j < C::COLUMNS; j++)
                    mma_8(sum[i][j], upper[from][i], lower[from][i], right[from][j]);
        };
        // The next step's slices are there for all, and the stage that is loaded next has been read by all.
        auto wait = [&]() {
            asm volatile("cp.async.wait_group %0;" ::"n"(C::STAGES - 2) : "memory");
            __syncthreads();
        };
        for (int step = 0; step < C::STAGES - 1; step++)
            load(step);
        wait();
        fetch(0, 0, 0);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            fetch(1, reading, 8);
            load(step + C::STAGES - 1);
            multiply(0);
            reading = reading + 1 == C::STAGES ? 0 : reading + 1;
            wait();
            if (step + 1 < steps)
                fetch(0, reading, 0);
            multiply(1);
        }
        // The ring is filled again for the next tile.
        __syncthreads();

        const int64_t matrix = split * work.batch + batch;
#pragma unroll
        for (int j = 0; j < C::COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int64_t column = n + my_n + j / 2 * 16 + line_of<B_MN_MAJOR>(2 * t + e, j % 2);
                if (column >= work.n)
                    continue;
                const double bias = work.bias ? ((const double *)work.bias)[column] : 0;
#pragma unroll
                for (int i = 0; i < C::ROWS; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int64_t row = m + my_m + 16 * i + line_of<A_MN_MAJOR>(g, half);
                        if (row < work.m)
                            ((double *)work.d)[matrix * work.stride_d + row * work.ldd + column] =
                                activate(work.alpha * sum[i][j][2 * half + e] + bias, work.activation);
                    }
            }
    }
#endif
}

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 1) gemm_mma_sync_float64_kernel(const __grid_constant__ MmaWork work)
{
    if constexpr (is_compiled<C>())
        multiply_float64<C, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>(work);
}

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
static cuda_ops_status launch_float64(const MmaWork &work, cudaStream_t stream)
{
    const auto kernel = gemm_mma_sync_float64_kernel<C, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>;
    constexpr int bytes = C::STAGES * float64_stage<C, A_MN_MAJOR, B_MN_MAJOR> * (int)sizeof(double);
    static_assert(bytes <= (C::STAGES == DeepTile::STAGES ? 227 << 10 : 99 << 10), "an SM's shared memory");
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const int64_t blocks = work.tiles_m * work.tiles_n * work.batch * work.splits, most = INT32_MAX;
    launch_dependent(kernel, dim3((unsigned int)(blocks < most ? blocks : most)), THREADS, bytes, stream, work);
    return launch_status();
}

template <typename C, bool ALIGNED>
static cuda_ops_status launch_float64_transposed(const MmaWork &work, const cuda_ops_gemm_problem &p,
                                                 cudaStream_t stream)
{
    if (p.transpose_a)
        return p.transpose_b ? launch_float64<C, true, false, ALIGNED>(work, stream)
                             : launch_float64<C, true, true, ALIGNED>(work, stream);
    return p.transpose_b ? launch_float64<C, false, false, ALIGNED>(work, stream)
                         : launch_float64<C, false, true, ALIGNED>(work, stream);
}

cuda_ops_status gemm_mma_sync_float64(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                      cudaStream_t stream)
{
    if (work.capability >= 90)
        return aligned ? launch_float64_transposed<DeepTile, true>(work, p, stream)
                       : launch_float64_transposed<DeepTile, false>(work, p, stream);
    return aligned ? launch_float64_transposed<ShallowTile, true>(work, p, stream)
                   : launch_float64_transposed<ShallowTile, false>(work, p, stream);
}
