// gemm, rung 4: one thread makes one element of D, and reads its row of A and its column of B from global memory.
//     D[i][j] = activation(alpha * sum over p of A[i][p] * B[p][j] + bias[j])
// Threads: blocks of 32 x 32. threadIdx.x, which runs fastest within a warp, goes along the rows of D, as (x, y) is
// naively taken for (i, j). Takes every dtype, storage order, batch and epilogue. Fixes: the loops of one core become
// 132 SMs x 2048 threads. Leaves: the 32 lanes of a warp read 32 rows of A at once, so that a load of 4 useful bytes
// each touches 32 cache lines, and write D in the same way. Bound by the L1's lines.
#include "gemm/epilogue.cuh"

static constexpr int TILE = 32;

// Element (row, column) of op(A) is a[row * a_row + column * a_column]; so for B.
struct NaiveSizes {
    int64_t m, n, k, batch;
    int64_t a_row, a_column, b_row, b_column, ldd;
    int64_t stride_a, stride_b, stride_d;
};

template <typename T>
__global__ void __launch_bounds__(TILE *TILE)
    gemm_naive_kernel(void *d, const T *a, const T *b, NaiveSizes s, Epilogue epilogue)
{
    const int64_t tiles_m = ceil_div(s.m, TILE), tiles = tiles_m * ceil_div(s.n, TILE);
    // Products of one element in a batch of millions would be more blocks than a grid has: a grid-stride loop.
    for (int64_t work = blockIdx.x; work < tiles * s.batch; work += gridDim.x) {
        const int64_t batch = work / tiles, tile = work % tiles;
        const int64_t row = tile % tiles_m * TILE + threadIdx.x, column = tile / tiles_m * TILE + threadIdx.y;
        if (row >= s.m || column >= s.n)
            continue;
        const T *const left = a + batch * s.stride_a + row * s.a_row;
        const T *const right = b + batch * s.stride_b + column * s.b_column;
        accumulate_type<T> sum = 0;
        for (int64_t p = 0; p < s.k; p++)
            sum += load_as_accumulate(left[p * s.a_column]) * load_as_accumulate(right[p * s.b_row]);
        store_output<T>(d, batch * s.stride_d + row * s.ldd + column, finish<T>(sum, epilogue, column), epilogue);
    }
}

template <typename T>
static void launch(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const NaiveSizes sizes = {p.m,
                              p.n,
                              p.k,
                              p.batch,
                              p.transpose_a ? 1 : p.lda,
                              p.transpose_a ? p.lda : 1,
                              p.transpose_b ? 1 : p.ldb,
                              p.transpose_b ? p.ldb : 1,
                              p.ldd,
                              p.stride_a,
                              p.stride_b,
                              p.stride_d};
    const int64_t blocks = ceil_div(p.m, TILE) * ceil_div(p.n, TILE) * p.batch;
    const unsigned int grid = (unsigned int)(blocks < INT32_MAX ? blocks : INT32_MAX);
    gemm_naive_kernel<T><<<grid, dim3(TILE, TILE), 0, call.stream>>>(
        call.d, static_cast<const T *>(call.a), static_cast<const T *>(call.b), sizes, epilogue_of(call));
}

Answer gemm_naive_supports(const GemmCall &, GemmDevice)
{
    return YES;
}

cuda_ops_status gemm_naive(const GemmCall &call, GemmDevice)
{
    CUDA_OPS_DISPATCH(call.problem.dtype, T, launch<T>(call));
    return launch_status();
}
