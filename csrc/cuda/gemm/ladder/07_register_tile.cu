// gemm, rung 7: a thread makes many elements of D and keeps their sums in registers.
//     D[i][j] = sum over p of A[i][p] * B[p][j]
// Two kernels:
//   1-D  a block of 512 threads makes 64 x 64 of D, a thread 8 elements of one column: an element of B is loaded once
//        for eight multiply-adds, 9 loads for 8 of them instead of 16.
//   2-D  a block of 256 threads makes 128 x 128, a thread 8 x 8: 16 loads for 64 multiply-adds.
// Fixes: the loads from shared memory, and with them what bounded rung 6, fall by a factor of 1.8, and of 8.
// Leaves: loads move 4 bytes each; A's tile lies in memory as A does, so that the lanes of a warp, whose rows are 8
// apart, meet in the same banks; and while a tile is fetched nothing is multiplied.
#include "gemm/epilogue.cuh"

// A block loads ROWS x COLUMNS elements of an operand from (row, column) on, zeros beyond the edges.
template <int ROWS, int COLUMNS, int THREADS, typename T>
__device__ __forceinline__ void load_tile(accumulate_type<T> (&tile)[ROWS][COLUMNS], const T *matrix, int64_t row,
                                          int64_t column, int64_t rows, int64_t columns, int64_t stride)
{
#pragma unroll
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
        const int y = e / COLUMNS, x = e % COLUMNS;
        tile[y][x] = row + y < rows && column + x < columns
                         ? load_as_accumulate(matrix[(row + y) * stride + column + x])
                         : accumulate_type<T>(0);
    }
}

// TILE_M x TILE_N of D by THREADS threads, THREAD_M x THREAD_N each; THREAD_N = 1 is the 1-D kernel.
template <typename T, int TILE_M, int TILE_N, int DEPTH, int THREAD_M, int THREAD_N>
__global__ void __launch_bounds__(TILE_M / THREAD_M * (TILE_N / THREAD_N))
    gemm_register_tile_kernel(T *d, const T *a, const T *b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                              int64_t ldd)
{
    typedef accumulate_type<T> A;
    constexpr int THREADS_N = TILE_N / THREAD_N, THREADS = TILE_M / THREAD_M * THREADS_N;
    __shared__ A a_tile[TILE_M][DEPTH], b_tile[DEPTH][TILE_N];
    const int64_t tiles_n = ceil_div(n, TILE_N);
    const int64_t row = blockIdx.x / tiles_n * TILE_M, column = blockIdx.x % tiles_n * TILE_N;
    const int my_row = threadIdx.x / THREADS_N * THREAD_M, my_column = threadIdx.x % THREADS_N * THREAD_N;
    A sum[THREAD_M][THREAD_N] = {};
    for (int64_t p = 0; p < k; p += DEPTH) {
        load_tile<TILE_M, DEPTH, THREADS>(a_tile, a, row, p, m, k, lda);
        load_tile<DEPTH, TILE_N, THREADS>(b_tile, b, p, column, k, n, ldb);
        __syncthreads();
#pragma unroll
        for (int q = 0; q < DEPTH; q++) {
            A left[THREAD_M], right[THREAD_N];
#pragma unroll
            for (int i = 0; i < THREAD_M; i++)
                left[i] = a_tile[my_row + i][q];
#pragma unroll
            for (int j = 0; j < THREAD_N; j++)
                right[j] = b_tile[q][my_column + j];
#pragma unroll
            for (int i = 0; i < THREAD_M; i++)
#pragma unroll
                for (int j = 0; j < THREAD_N; j++)
                    sum[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < THREAD_M; i++)
#pragma unroll
        for (int j = 0; j < THREAD_N; j++)
            if (row + my_row + i < m && column + my_column + j < n)
                d[(row + my_row + i) * ldd + column + my_column + j] = store_from_accumulate<T>(sum[i][j]);
}

template <typename T, int TILE_M, int TILE_N, int DEPTH, int THREAD_M, int THREAD_N>
static void launch(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    constexpr int threads = TILE_M / THREAD_M * (TILE_N / THREAD_N);
    gemm_register_tile_kernel<T, TILE_M, TILE_N, DEPTH, THREAD_M, THREAD_N>
        <<<tile_count(p, TILE_M, TILE_N), threads, 0, call.stream>>>(
            static_cast<T *>(call.d), static_cast<const T *>(call.a), static_cast<const T *>(call.b), p.m, p.n, p.k,
            p.lda, p.ldb, p.ldd);
}

Answer gemm_register_tile_supports(const GemmCall &call, GemmDevice)
{
    return is_plain_product(call) ? YES : GEMM_NEEDS_PLAIN;
}

cuda_ops_status gemm_register_tile_1d(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch<T, 64, 64, 8, 8, 1>(call));
    return launch_status();
}

cuda_ops_status gemm_register_tile(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch<T, 128, 128, 8, 8, 8>(call));
    return launch_status();
}
