// gemm, rung 6: tiles of A and B in shared memory.
//     D[i][j] = sum over p of A[i][p] * B[p][j]
// Threads: a block of T x T makes T x T elements of D, one each. It walks along k in steps of T: every thread brings
// one element of A's tile and one of B's, a barrier, T multiply-adds from shared memory, a barrier. Two kernels:
// `static`, T = 32 known to the compiler, which unrolls the inner loop and folds the addresses into its loads; and
// `dynamic`, T a parameter of the launch and the arrays in `extern __shared__`, as one writes it when the tile is to
// follow the device. What that freedom costs is the lesson. Fixes: an element of A or B is read from global memory k /
// T times less often than it is used. Leaves: a multiply-add still takes two loads, only now from shared memory, whose
// 128 bytes a clock feed a quarter of the FMA units at best. Bound by shared memory.
#include "gemm/epilogue.cuh"

static constexpr int TILE = 32;
static constexpr int DYNAMIC_TILE = 32; // 16 fits any device as well; 32 is what is measured

template <typename T>
__global__ void __launch_bounds__(TILE *TILE)
    gemm_shared_static_kernel(T *d, const T *a, const T *b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                              int64_t ldd)
{
    typedef accumulate_type<T> A;
    __shared__ A a_tile[TILE][TILE], b_tile[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int64_t tiles_n = ceil_div(n, TILE);
    const int64_t row = blockIdx.x / tiles_n * TILE + y, column = blockIdx.x % tiles_n * TILE + x;
    A sum = 0;
    for (int64_t p = 0; p < k; p += TILE) {
        // Zeros beyond the edges: every thread takes part in every barrier, and adds nothing there.
        a_tile[y][x] = row < m && p + x < k ? load_as_accumulate(a[row * lda + p + x]) : A(0);
        b_tile[y][x] = p + y < k && column < n ? load_as_accumulate(b[(p + y) * ldb + column]) : A(0);
        __syncthreads();
#pragma unroll
        for (int q = 0; q < TILE; q++)
            sum += a_tile[y][q] * b_tile[q][x]; // a broadcast, and 32 neighbours: no bank conflict
        __syncthreads();
    }
    if (row < m && column < n)
        d[row * ldd + column] = store_from_accumulate<T>(sum);
}

template <typename T>
__global__ void gemm_shared_dynamic_kernel(T *d, const T *a, const T *b, int64_t m, int64_t n, int64_t k, int64_t lda,
                                           int64_t ldb, int64_t ldd, int tile)
{
    typedef accumulate_type<T> A;
    // One array for all types: two templates may not declare the same `extern` array with different ones.
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    A *const a_tile = reinterpret_cast<A *>(shared_bytes), *const b_tile = a_tile + tile * tile;
    const int x = threadIdx.x, y = threadIdx.y;
    const int64_t tiles_n = ceil_div(n, tile);
    const int64_t row = blockIdx.x / tiles_n * tile + y, column = blockIdx.x % tiles_n * tile + x;
    A sum = 0;
    for (int64_t p = 0; p < k; p += tile) {
        a_tile[y * tile + x] = row < m && p + x < k ? load_as_accumulate(a[row * lda + p + x]) : A(0);
        b_tile[y * tile + x] = p + y < k && column < n ? load_as_accumulate(b[(p + y) * ldb + column]) : A(0);
        __syncthreads();
        for (int q = 0; q < tile; q++)
            sum += a_tile[y * tile + q] * b_tile[q * tile + x];
        __syncthreads();
    }
    if (row < m && column < n)
        d[row * ldd + column] = store_from_accumulate<T>(sum);
}

template <typename T>
static void launch_static(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    gemm_shared_static_kernel<T><<<tile_count(p, TILE, TILE), dim3(TILE, TILE), 0, call.stream>>>(
        static_cast<T *>(call.d), static_cast<const T *>(call.a), static_cast<const T *>(call.b), p.m, p.n, p.k, p.lda,
        p.ldb, p.ldd);
}

template <typename T>
static void launch_dynamic(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int tile = DYNAMIC_TILE;
    const size_t shared = 2 * tile * tile * sizeof(accumulate_type<T>);
    gemm_shared_dynamic_kernel<T><<<tile_count(p, tile, tile), dim3(tile, tile), shared, call.stream>>>(
        static_cast<T *>(call.d), static_cast<const T *>(call.a), static_cast<const T *>(call.b), p.m, p.n, p.k, p.lda,
        p.ldb, p.ldd, tile);
}

Answer gemm_shared_memory_supports(const GemmCall &call, GemmDevice)
{
    return is_plain_product(call) ? YES : GEMM_NEEDS_PLAIN;
}

cuda_ops_status gemm_shared_memory(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch_static<T>(call));
    return launch_status();
}

cuda_ops_status gemm_shared_memory_dynamic(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch_dynamic<T>(call));
    return launch_status();
}
