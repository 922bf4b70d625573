// gemm, rung 5: rung 4 with threadIdx.x along a row of D.
//     D[i][j] = sum over p of A[i][p] * B[p][j]
// Threads: blocks of 32 x 32. Fixes: the lanes of a warp now read 32 adjacent elements of one row of B (one cache line
// of 128 bytes for float32) and the same element of A (a broadcast), and write adjacent elements of D: 2 lines a step
// where rung 4 touched 33. Leaves: every multiply-add still takes two loads; A is read n / 32 times over and B m / 32
// times. Bound by the L1's rate of loads.
#include "gemm/epilogue.cuh"

static constexpr int TILE = 32;

template <typename T>
__global__ void __launch_bounds__(TILE *TILE) gemm_coalesced_kernel(T *d, const T *a, const T *b, int64_t m, int64_t n,
                                                                    int64_t k, int64_t lda, int64_t ldb, int64_t ldd)
{
    const int64_t tiles_n = ceil_div(n, TILE);
    const int64_t row = blockIdx.x / tiles_n * TILE + threadIdx.y;
    const int64_t column = blockIdx.x % tiles_n * TILE + threadIdx.x;
    if (row >= m || column >= n)
        return;
    accumulate_type<T> sum = 0;
    for (int64_t p = 0; p < k; p++)
        sum += load_as_accumulate(a[row * lda + p]) * load_as_accumulate(b[p * ldb + column]);
    d[row * ldd + column] = store_from_accumulate<T>(sum);
}

template <typename T>
static void launch(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    gemm_coalesced_kernel<T><<<tile_count(p, TILE, TILE), dim3(TILE, TILE), 0, call.stream>>>(
        static_cast<T *>(call.d), static_cast<const T *>(call.a), static_cast<const T *>(call.b), p.m, p.n, p.k, p.lda,
        p.ldb, p.ldd);
}

Answer gemm_coalesced_supports(const GemmCall &call, GemmDevice)
{
    return is_plain_product(call) ? YES : GEMM_NEEDS_PLAIN;
}

cuda_ops_status gemm_coalesced(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch<T>(call));
    return launch_status();
}
