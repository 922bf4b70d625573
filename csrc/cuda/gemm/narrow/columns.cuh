// gemm, narrow path, a small D and a long k, along whose rows A and B are stored, as in a layer's gradient of weight:
// each warp streams runs of 32 rows of both through shared memory and has the sums of all of D's piece in registers.
// The warps of a block add theirs at the end, and the blocks' are added by a second kernel (gemm/split_k.cu).
//
// 16 bits: mma.sync. A lane loads two neighbours of four rows, the transposed fragments of A, or of two tiles of B;
// columns beyond the row are the next row's, which get to sums that are not stored. float32: the CUDA cores, a lane
// having two rows and four columns of each tile of 16 x 16. In both, a lane has of tile i, j the sums
//     [i][j][0..3]  row 16 i + 2 g, columns 16 j + 4 t + {0, 1, 2, 3}    [i][j][4..7]  row 16 i + 2 g + 1, the same
// with g = lane / 4 and t = lane % 4.
#ifndef CUDA_OPS_GEMM_NARROW_COLUMNS_CUH
#define CUDA_OPS_GEMM_NARROW_COLUMNS_CUH

#include "gemm/narrow/stream.cuh"

// Two neighbours in 16 bits.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t load_pair(const unsigned short *from)
{
    return ALIGNED ? *(const uint32_t *)from : from[0] | (uint32_t)from[1] << 16;
}

// The first of two neighbours of four rows, and the second, each as the two words of a fragment. A lane's rows are t,
// t + 4, t + 8 and t + 12, in A and B alike.
template <bool ALIGNED>
__device__ __forceinline__ void load_fragment(uint32_t (&first)[2], uint32_t (&second)[2], const unsigned short *from,
                                              int row)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t x = load_pair<ALIGNED>(from + 8 * half * row);
        const uint32_t y = load_pair<ALIGNED>(from + (8 * half + 4) * row);
        first[half] = (x & 0xffff) | y << 16;
        second[half] = x >> 16 | (y & 0xffff0000);
    }
}

// ALIGNED: rows of A and of B begin at multiples of 4 bytes in 16 bits, of 8 and 16 in float32.
template <typename T, int M_TILES, int N_TILES, bool ALIGNED>
__device__ __forceinline__ void multiply_rows(float (&sum)[M_TILES][N_TILES][8], const T *a, const T *b,
                                              const NarrowColumns &work, int lane)
{
    const int g = lane / 4, t = lane % 4;
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int rows = 0; rows < RUN; rows += 16) {
            const unsigned short *const from_a = (const unsigned short *)a + (rows + t) * work.m + 2 * g;
            const unsigned short *const from_b = (const unsigned short *)b + (rows + t) * work.n + 2 * g;
            uint32_t of_a[M_TILES][4];
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                uint32_t first[2], second[2];
                load_fragment<ALIGNED>(first, second, from_a + 16 * i, work.m);
                of_a[i][0] = first[0], of_a[i][1] = second[0], of_a[i][2] = first[1], of_a[i][3] = second[1];
            }
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                uint32_t even[2], odd[2];
                load_fragment<ALIGNED>(even, odd, from_b + 16 * j, work.n);
#pragma unroll
                for (int i = 0; i < M_TILES; i++) {
                    float(&s)[8] = sum[i][j];
                    mma_sync<T>(s[0], s[2], s[4], s[6], of_a[i], even[0], even[1]);
                    mma_sync<T>(s[1], s[3], s[5], s[7], of_a[i], odd[0], odd[1]);
                }
            }
        }
    } else {
        const float *from_a = (const float *)a + 2 * g, *from_b = (const float *)b + 4 * t;
#pragma unroll 4
        for (int row = 0; row < RUN; row++, from_a += work.m, from_b += work.n) {
            float2 of_a[M_TILES];
#pragma unroll
            for (int i = 0; i < M_TILES; i++)
                of_a[i] =
                    ALIGNED ? *(const float2 *)(from_a + 16 * i) : make_float2(from_a[16 * i], from_a[16 * i + 1]);
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                const float *const at = from_b + 16 * j;
                const float4 of_b = ALIGNED ? *(const float4 *)at : make_float4(at[0], at[1], at[2], at[3]);
#pragma unroll
                for (int i = 0; i < M_TILES; i++) {
                    float(&s)[8] = sum[i][j];
                    s[0] = fmaf(of_a[i].x, of_b.x, s[0]), s[1] = fmaf(of_a[i].x, of_b.y, s[1]);
                    s[2] = fmaf(of_a[i].x, of_b.z, s[2]), s[3] = fmaf(of_a[i].x, of_b.w, s[3]);
                    s[4] = fmaf(of_a[i].y, of_b.x, s[4]), s[5] = fmaf(of_a[i].y, of_b.y, s[5]);
                    s[6] = fmaf(of_a[i].y, of_b.z, s[6]), s[7] = fmaf(of_a[i].y, of_b.w, s[7]);
                }
            }
        }
    }
}

// Small pieces leave registers for two blocks on an SM.
template <typename T, int M_TILES, int N_TILES, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, M_TILES *N_TILES <= 8 ? 2 : 1)
    gemm_narrow_columns_kernel(const __grid_constant__ NarrowColumns work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int a_bytes = work.m * (int)sizeof(T), b_bytes = work.n * (int)sizeof(T),
              stage_bytes = RUN * (a_bytes + b_bytes);
    char *const runs = shared + warp * work.warp_bytes;
    const int64_t count = ceil_div(work.rows, RUN), apart = (int64_t)gridDim.x * WARPS;
    const int64_t first = (int64_t)warp * gridDim.x + blockIdx.x;
    const int m = (int)(blockIdx.y % work.pieces_m) * M_TILES * 16;
    const int n = (int)(blockIdx.y / work.pieces_m) * N_TILES * 16;
    const auto copy = [&](int stage, int64_t run) {
        char *const to = runs + stage * stage_bytes;
        if (run < count) {
            copy_run(to, (const char *)work.a, run, a_bytes, work.rows, lane);
            copy_run(to + RUN * a_bytes, (const char *)work.b, run, b_bytes, work.rows, lane);
        }
        cp_async_commit_group();
    };
    wait_for_predecessor();
    release_successor();
    for (int s = 0; s < work.stages - 1; s++)
        copy(s, first + s * apart);
    float sum[M_TILES][N_TILES][8] = {};
    int stage = 0;
    for (int64_t run = first; run < count; run += apart) {
        copy(stage == 0 ? work.stages - 1 : stage - 1, run + (work.stages - 1) * apart);
        wait_for_run(work.stages);
        const char *const from = runs + stage * stage_bytes;
        multiply_rows<T, M_TILES, N_TILES, ALIGNED>(sum, (const T *)from + m, (const T *)(from + RUN * a_bytes) + n,
                                                    work, lane);
        __syncwarp(); // before the next copy overwrites the run
        stage = stage + 1 == work.stages ? 0 : stage + 1;
    }
    cp_async_wait_all();
    __syncthreads();
    // The warps' sums, [warp][tile][sum of a lane][lane].
    constexpr int SIZE = M_TILES * N_TILES * 8 * WARP_SIZE, COLUMNS = 16 * N_TILES;
    float *const sums = (float *)shared;
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int j = 0; j < N_TILES; j++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                sums[warp * SIZE + ((i * N_TILES + j) * 8 + e) * WARP_SIZE + lane] = sum[i][j][e];
    __syncthreads();
    float *const partial = work.partial + (int64_t)blockIdx.x * work.m * work.n;
    for (int index = threadIdx.x; index < SIZE; index += THREADS) {
        const int row = index / COLUMNS, column = index % COLUMNS;
        const int tile = row / 16 * N_TILES + column / 16, e = row % 2 * 4 + column % 4;
        const int at = (tile * 8 + e) * WARP_SIZE + row % 16 / 2 * 4 + column % 16 / 4;
        float x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            x += sums[w * SIZE + at];
        if (m + row < work.m && n + column < work.n)
            partial[(m + row) * work.row_step + (n + column) * work.column_step] = x;
    }
#endif
}

template <typename T, int M_TILES, int N_TILES, bool ALIGNED>
static cuda_ops_status launch_columns(const NarrowColumns &work, int64_t splits, int64_t pieces, cudaStream_t stream)
{
    const int bytes = narrow_columns_bytes(work, (int)sizeof(T));
    const auto kernel = gemm_narrow_columns_kernel<T, M_TILES, N_TILES, ALIGNED>;
    if (const cudaError_t error = allow_shared_memory(kernel, (size_t)bytes); error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    launch_dependent(kernel, dim3((unsigned int)splits, (unsigned int)pieces), THREADS, (size_t)bytes, stream, work);
    return launch_status();
}

template <typename T, int M_TILES, int N_TILES>
static cuda_ops_status launch_columns(const NarrowColumns &work, int64_t splits, int64_t pieces, cudaStream_t stream)
{
    const bool aligned = work.m % 2 == 0 && work.n % (sizeof(T) == 2 ? 2 : 4) == 0;
    return aligned ? launch_columns<T, M_TILES, N_TILES, true>(work, splits, pieces, stream)
                   : launch_columns<T, M_TILES, N_TILES, false>(work, splits, pieces, stream);
}

template <typename T>
static cuda_ops_status launch_columns(const NarrowColumns &work, int64_t splits, int64_t pieces, cudaStream_t stream)
{
    switch (work.tiles_m * 16 + work.tiles_n) { // the shapes of NARROW_PIECES
    case 1 * 16 + 2:
        return launch_columns<T, 1, 2>(work, splits, pieces, stream);
    case 1 * 16 + 4:
        return launch_columns<T, 1, 4>(work, splits, pieces, stream);
    case 2 * 16 + 4:
        return launch_columns<T, 2, 4>(work, splits, pieces, stream);
    case 2 * 16 + 8:
        return launch_columns<T, 2, 8>(work, splits, pieces, stream);
    case 4 * 16 + 4:
        return launch_columns<T, 4, 4>(work, splits, pieces, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}

#endif
