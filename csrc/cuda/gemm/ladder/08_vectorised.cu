// gemm, rung 8: rung 7's 8 x 8 register tiles, moved 16 bytes at a time.
//     D[i][j] = sum over p of A[i][p] * B[p][j]
// Threads: a block of 256 makes 128 x 128 of D, a thread 8 x 8. A's tile is transposed on its way into shared memory,
// so that a thread's 8 elements at one k are contiguous there, as those of B are: float32 takes 4 loads a step for 64
// multiply-adds where rung 7 took 16. float32 and float64; where a pointer or a row is not aligned to 16 bytes, or a
// vector is partly out of bounds, element by element. Fixes: the instructions that only move data, and the bank
// conflicts of A's tile. Leaves: adjacent lanes read vectors that are 32 bytes apart, of which the hardware serves a
// quarter at a time; the transposing stores conflict; and nothing is multiplied while a tile is fetched.
#include "common/aligned_vector.cuh"
#include "gemm/epilogue.cuh"

static constexpr int TILE = 128;
static constexpr int DEPTH = 8;
static constexpr int PER_THREAD = 8;
static constexpr int THREADS = 256;

// 16 bytes from (row, column) on, zeros beyond the edges.
template <typename T>
__device__ __forceinline__ vector16<T> load_vector(const T *matrix, int64_t row, int64_t column, int64_t rows,
                                                   int64_t columns, int64_t stride, bool aligned)
{
    constexpr int V = vector16<T>::size;
    const T *const from = matrix + row * stride + column;
    if (aligned && row < rows && column + V <= columns)
        return *reinterpret_cast<const vector16<T> *>(from);
    vector16<T> vector;
#pragma unroll
    for (int e = 0; e < V; e++)
        vector.element[e] = row < rows && column + e < columns ? from[e] : T(0);
    return vector;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_vectorised_kernel(T *d, const T *a, const T *b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                           int64_t ldd, bool a_aligned, bool b_aligned, bool d_aligned)
{
    constexpr int V = vector16<T>::size, A_ROW = DEPTH / V, B_ROW = TILE / V; // 16-byte vectors in a row of a tile
    __shared__ __align__(16) T a_tile[DEPTH][TILE], b_tile[DEPTH][TILE];
    const int64_t tiles_n = ceil_div(n, TILE);
    const int64_t row = blockIdx.x / tiles_n * TILE, column = blockIdx.x % tiles_n * TILE;
    const int my_row = threadIdx.x / (TILE / PER_THREAD) * PER_THREAD;
    const int my_column = threadIdx.x % (TILE / PER_THREAD) * PER_THREAD;
    T sum[PER_THREAD][PER_THREAD] = {};
    for (int64_t p = 0; p < k; p += DEPTH) {
#pragma unroll
        for (int vector = threadIdx.x; vector < TILE * A_ROW; vector += THREADS) {
            const int line = vector / A_ROW, depth = vector % A_ROW * V;
            const vector16<T> v = load_vector(a, row + line, p + depth, m, k, lda, a_aligned);
#pragma unroll
            for (int e = 0; e < V; e++)
                a_tile[depth + e][line] = v.element[e];
        }
#pragma unroll
        for (int vector = threadIdx.x; vector < DEPTH * B_ROW; vector += THREADS) {
            const int depth = vector / B_ROW, line = vector % B_ROW * V;
            *reinterpret_cast<vector16<T> *>(&b_tile[depth][line]) =
                load_vector(b, p + depth, column + line, k, n, ldb, b_aligned);
        }
        __syncthreads();
#pragma unroll
        for (int q = 0; q < DEPTH; q++) {
            vector16<T> left[PER_THREAD / V], right[PER_THREAD / V];
#pragma unroll
            for (int i = 0; i < PER_THREAD / V; i++) {
                left[i] = *reinterpret_cast<const vector16<T> *>(&a_tile[q][my_row + i * V]);
                right[i] = *reinterpret_cast<const vector16<T> *>(&b_tile[q][my_column + i * V]);
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++)
                    sum[i][j] += left[i / V].element[i % V] * right[j / V].element[j % V];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int64_t r = row + my_row + i;
#pragma unroll
        for (int vector = 0; vector < PER_THREAD / V; vector++) {
            const int64_t c = column + my_column + vector * V;
            vector16<T> v;
#pragma unroll
            for (int e = 0; e < V; e++)
                v.element[e] = sum[i][vector * V + e];
            if (d_aligned && r < m && c + V <= n)
                *reinterpret_cast<vector16<T> *>(d + r * ldd + c) = v;
            else
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (r < m && c + e < n)
                        d[r * ldd + c + e] = v.element[e];
        }
    }
}

template <typename T>
static void launch(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    constexpr int V = vector16<T>::size;
    gemm_vectorised_kernel<T><<<tile_count(p, TILE, TILE), THREADS, 0, call.stream>>>(
        static_cast<T *>(call.d), static_cast<const T *>(call.a), static_cast<const T *>(call.b), p.m, p.n, p.k, p.lda,
        p.ldb, p.ldd, is_aligned_16(call.a) && p.lda % V == 0, is_aligned_16(call.b) && p.ldb % V == 0,
        is_aligned_16(call.d) && p.ldd % V == 0);
}

Answer gemm_vectorised_supports(const GemmCall &call, GemmDevice)
{
    if (!is_plain_product(call))
        return GEMM_NEEDS_PLAIN;
    return is_float(call.problem.dtype) ? YES : no("takes float32 and float64");
}

cuda_ops_status gemm_vectorised(const GemmCall &call, GemmDevice)
{
    if (call.problem.dtype == CUDA_OPS_FLOAT32)
        launch<float>(call);
    else
        launch<double>(call);
    return launch_status();
}
