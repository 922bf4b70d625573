// gemm, direct path: D = activation(alpha * op(A) op(B) + bias) for small products of any alignment. Here fp16, bf16
// and TF32; float32 and float64 on the CUDA cores are in gemm/direct/simt.cuh.
//
// A block makes a tile of 16 x 16. Its eight warps split k: each loads the fragments of mma.sync from device memory
// straight into registers (no shared memory, no barrier, no pipeline to fill), and the warps' sums are added in order
// at the end. A thread loads 16 contiguous bytes along k; which k index of the instruction each element stands for is
// free, as long as A and B agree.
//
// Bound by latency: a product of a microsecond or two is all start and end, and these are the shortest. Rows along k
// that are no multiple of 16 bytes are cut out of the aligned vectors around them (common/unaligned_vector.cuh), and
// where k runs along columns, operands are loaded element by element. Every tile reads its operands anew, so that beyond
// a few hundred rows and columns the paths with larger tiles win.
#include <string.h>

#include <type_traits>

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/unaligned_vector.cuh"
#include "gemm/paths.h"
#include "ptx/cluster.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int TILE = 16, WARPS = 8, THREADS = WARPS * WARP_SIZE;
static_assert(TILE * TILE == THREADS, "a thread finishes one element");

// How a line (a row of A, a column of B) is loaded: by elements, or, its k being contiguous, 16 bytes at a time, at
// multiples of 16 bytes or at any elements.
enum { BY_ELEMENTS, BY_VECTORS, BY_VECTORS_AROUND };

struct DirectOperand {
    const void *first, *end; // of all matrices
    int64_t lines, line_stride, k_stride, matrix_stride;
    int loads;
};

struct DirectWork {
    DirectOperand a, b;
    void *d;
    const void *bias;
    int64_t k, ldd, stride_d, tiles_m, tiles_n, tiles;
    float alpha;
    int activation, bias_is_float, output_is_float;
    int splits; // blocks of a cluster that split k; 1: no cluster
};

static constexpr int MOST_SPLITS = 8; // the largest cluster that every Hopper GPU runs

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// 16 bytes of one line from `k` on, a thread's elements for two instructions, on their way: use_line has them. AROUND: an
// operand may be loaded BY_VECTORS_AROUND.
template <typename T, bool AROUND>
__device__ __forceinline__ VectorsAround load_line(const DirectOperand &operand, const T *matrix, int64_t line,
                                                   int64_t k, int64_t k_end)
{
    constexpr int COUNT = 16 / sizeof(T);
    const T *const from = matrix + line * operand.line_stride + k * operand.k_stride;
    const bool whole = line < operand.lines && k + COUNT <= k_end;
    VectorsAround around = {};
    if (operand.loads == BY_VECTORS && whole)
        around.low = *(const uint4 *)from;
    else if (AROUND && operand.loads == BY_VECTORS_AROUND && whole &&
             are_readable_around(from, operand.first, operand.end))
        around = load_around(from, true);
    else {
        vector16<T> v;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            v.element[e] =
                line < operand.lines && k + e < k_end ? from[e * operand.k_stride] : store_from_accumulate<T>(0.0f);
        memcpy(&around.low, &v, 16);
    }
    return around;
}

template <typename T, bool AROUND>
__device__ __forceinline__ void use_line(uint32_t (&to)[4], const VectorsAround &around)
{
    const uint4 words = AROUND ? cut(around) : around.low;
    to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    if constexpr (sizeof(T) == 4)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[e] = cvt_rna_tf32(__uint_as_float(to[e]));
}

// sum (16 x 8) += a * b; a0 and a1 are of lines g and g + 8.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t *a0, const uint32_t *a1, const uint32_t *b)
{
    const uint32_t a[4] = {a0[0], a1[0], a0[1], a1[1]};
    mma_sync<T>(sum, a, b[0], b[1]);
}
#endif

// CLUSTER: the work.splits blocks of a cluster split k. AROUND: as above. Instances of their own, since they would slow
// the other one down.
template <typename T, bool CLUSTER, bool AROUND>
__global__ void __launch_bounds__(THREADS) gemm_direct_kernel(const __grid_constant__ DirectWork work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    __shared__ float sums[WARPS][TILE][TILE + 1];
    constexpr int DEPTH = 4 * (16 / sizeof(T)), TOGETHER = 1; // k of a step, and steps whose loads are in flight
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ float received[CLUSTER ? MOST_SPLITS - 1 : 1][THREADS];
    __shared__ __align__(8) uint64_t all_received;
    const uint32_t barrier = shared_address(&all_received);
    if constexpr (CLUSTER) {
        rank = (int)cluster_ctarank();
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            if (rank == 0)
                mbarrier_arrive_expect_tx(barrier, (work.splits - 1) * THREADS * 4);
        }
        __syncthreads();
        cluster_arrive_relaxed();
    }
#endif
    const int splits = CLUSTER ? work.splits : 1;
    const int64_t first = blockIdx.x / splits, apart = gridDim.x / splits;
    for (int64_t index = first; index < work.tiles; index += apart) { // one round where clusters split k
        const int64_t outer = index / work.tiles_n, matrix = outer / work.tiles_m;
        const int64_t m = (outer - matrix * work.tiles_m) * TILE, n = (index - outer * work.tiles_n) * TILE;
        if (index == first) { // after the divisions above, which are long and need no data
            wait_for_predecessor();
            release_successor();
        }
        const T *const a = (const T *)work.a.first + matrix * work.a.matrix_stride;
        const T *const b = (const T *)work.b.first + matrix * work.b.matrix_stride;
        float sum[2][4] = {};
        const int step_depth = splits * WARPS * DEPTH;
        for (int64_t k = (rank * WARPS + warp) * DEPTH; k < work.k; k += step_depth * TOGETHER) {
            VectorsAround left[TOGETHER][2], right[TOGETHER][2];
#pragma unroll
            for (int step = 0; step < TOGETHER; step++) {
                const int64_t from = k + step * step_depth + t * (DEPTH / 4);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    left[step][half] = load_line<T, AROUND>(work.a, a, m + g + 8 * half, from, work.k);
                    right[step][half] = load_line<T, AROUND>(work.b, b, n + g + 8 * half, from, work.k);
                }
            }
#pragma unroll
            for (int step = 0; step < TOGETHER; step++) {
                uint32_t of_a[2][4], of_b[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    use_line<T, AROUND>(of_a[half], left[step][half]);
                    use_line<T, AROUND>(of_b[half], right[step][half]);
                }
#pragma unroll
                for (int part = 0; part < 4; part += 2)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        multiply_add<T>(sum[half], of_a[0] + part, of_a[1] + part, of_b[half] + part);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[warp][g + e / 2 * 8][8 * half + 2 * t + e % 2] = sum[half][e];
        __syncthreads();
        const int i = threadIdx.x / TILE, j = threadIdx.x % TILE;
        const int64_t row = m + i, column = n + j;
        float x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            x += sums[w][i][j];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            cluster_wait(); // the first block's barrier is initialised
            if (rank > 0) {
                st_async(mapa(shared_address(&received[rank - 1][threadIdx.x]), 0), x, mapa(barrier, 0));
                return;
            }
            mbarrier_wait_cluster(barrier, 0);
            for (int other = 1; other < splits; other++)
                x += received[other - 1][threadIdx.x];
        }
#endif
        if (row < work.a.lines && column < work.b.lines) {
            x *= work.alpha;
            if (work.bias)
                x += work.bias_is_float ? ((const float *)work.bias)[column]
                                        : load_as_accumulate(((const T *)work.bias)[column]);
            x = activate(x, work.activation);
            const int64_t to = matrix * work.stride_d + row * work.ldd + column;
            if (work.output_is_float)
                ((float *)work.d)[to] = x;
            else
                ((T *)work.d)[to] = store_from_accumulate<T>(x);
        }
        __syncthreads(); // before the next tile overwrites the sums
    }
#endif
}

static DirectOperand operand_of(const void *matrix, int64_t lines, int64_t k, int64_t batch, int64_t pitch,
                                int64_t stride, bool k_major, int64_t size)
{
    const bool aligned = is_aligned_16(matrix) && pitch * size % 16 == 0 && stride * size % 16 == 0;
    const int64_t last_row = (k_major ? lines : k) - 1, row = k_major ? k : lines;
    return {matrix,
            (const char *)matrix + ((batch - 1) * stride + last_row * pitch + row) * size,
            lines,
            k_major ? pitch : 1,
            k_major ? 1 : pitch,
            stride,
            !k_major  ? BY_ELEMENTS
            : aligned ? BY_VECTORS
                      : BY_VECTORS_AROUND};
}

bool gemm_direct_uses_cores(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return p.dtype == CUDA_OPS_FLOAT64 || (p.dtype == CUDA_OPS_FLOAT32 && (!p.allow_tf32 || device.capability < 80));
}

Answer gemm_direct_supports(const GemmCall &call, GemmDevice device)
{
    return device.capability >= 80 || gemm_direct_uses_cores(call.problem, device) ? YES : NEEDS_80;
}

cuda_ops_status gemm_direct(const GemmCall &call, GemmDevice device)
{
    return gemm_direct_planned(call, device, gemm_direct_plan(call.problem, device));
}

template <typename T, bool AROUND>
static cuda_ops_status launch_either(const DirectWork &work, cudaStream_t stream)
{
    const int64_t blocks = work.tiles < INT32_MAX ? work.tiles : INT32_MAX;
    if (work.splits > 1)
        launch_dependent_clusters(gemm_direct_kernel<T, true, AROUND>, blocks * work.splits, THREADS, work.splits, 0,
                                  stream, work);
    else
        launch_dependent(gemm_direct_kernel<T, false, AROUND>, dim3((unsigned int)blocks), THREADS, 0, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_direct(const DirectWork &work, cudaStream_t stream)
{
    return work.a.loads == BY_VECTORS_AROUND || work.b.loads == BY_VECTORS_AROUND
               ? launch_either<T, true>(work, stream)
               : launch_either<T, false>(work, stream);
}

cuda_ops_status gemm_direct_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (gemm_direct_uses_cores(p, device))
        return p.dtype == CUDA_OPS_FLOAT64 ? gemm_direct_float64(call, device, plan)
                                           : gemm_direct_float32(call, device, plan);
    if (plan.tile > 0 || plan.splits > MOST_SPLITS || plan.swapped || (plan.splits > 1 && device.capability < 90))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t size = p.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    DirectWork work = {};
    work.a = operand_of(call.a, p.m, p.k, p.batch, p.lda, p.stride_a, !p.transpose_a, size);
    work.b = operand_of(call.b, p.n, p.k, p.batch, p.ldb, p.stride_b, p.transpose_b, size);
    work.d = call.d, work.bias = call.bias;
    work.k = p.k, work.ldd = p.ldd, work.stride_d = p.stride_d;
    work.tiles_m = ceil_div(p.m, TILE), work.tiles_n = ceil_div(p.n, TILE);
    work.tiles = work.tiles_m * work.tiles_n * p.batch;
    work.alpha = (float)p.alpha;
    work.activation = p.activation;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.output_is_float = p.output_dtype == CUDA_OPS_FLOAT32;
    work.splits = 1;
    while (2 * work.splits <= plan.splits)
        work.splits *= 2;
    if (work.splits > 1 && work.tiles * work.splits > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (p.dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch_direct<__nv_bfloat16>(work, call.stream);
    case CUDA_OPS_FLOAT16:
        return launch_direct<__half>(work, call.stream);
    case CUDA_OPS_FLOAT32:
        return launch_direct<float>(work, call.stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
