// gemm, simt path in float32 on Hopper, for large D (gemm/simt/simt.cu chooses): a persistent grid of one block an SM
// with tiles of 128 x 256. Two consumer warpgroups multiply, 16 x 8 sums a thread: six shared loads for 128
// multiply-adds, where 8 x 8 takes four for 64. A producer warpgroup copies (cp.async), so that the consumers' loop is
// loads and multiply-adds only, the same for every storage order, and the next tile's slices arrive during the present
// tile's epilogue. setmaxnreg moves registers from the producers to the consumers. Bound by instruction issue, 94 % of
// the loop being multiply-adds, and by the register file's two banks, which delay 8 % of them (counted in the SASS,
// which predicts the measured speed to 4 %). Measured on an H200 against cuBLAS: 2048^3 and 4096^3 NN 1.02, NT 1.03 to
// 1.04, TN 0.99.
#include "gemm/simt/parts.h"

#if defined(CUDA_OPS_SM90A)
#include "common/aligned_vector.cuh"
#include "gemm/simt/load.cuh"
#include "gemm/simt/store.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

static constexpr int WARPS_M = 2, WARPS_N = 4, LANES_M = 4, THREAD_M = 16, THREAD_N = 8;
static constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = 32 / LANES_M * THREAD_N;
static constexpr int TILE_M = WARPS_M * WARP_M, TILE_N = WARPS_N * WARP_N, DEPTH = 16, STAGES = 4;
static constexpr int CONSUMERS = WARPS_M * WARPS_N * 32, PRODUCERS = WARPGROUP;
static constexpr int A_PITCH = TILE_M + 4,
                     B_PITCH = TILE_N + 4; // padded, so that the transposing stores meet each bank once
static constexpr int STAGE = DEPTH * (A_PITCH + B_PITCH);
static constexpr int CONSUMER_REGISTERS = 216, PRODUCER_REGISTERS = 72;
static constexpr int SHARED_BYTES = (STAGES * STAGE + TILE_M * TILE_N) * (int)sizeof(float) + 2 * STAGES * 8;
static_assert(SHARED_BYTES <= 227 << 10, "an SM's shared memory");

struct WideArguments {
    int64_t m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    int64_t tiles_m, tiles_n, tiles; // `tiles` counts those of all products
    bool vectors;                    // rows of D and of the preactivation are aligned to 16 bytes
};

#if defined(CUDA_OPS_HOPPER_CODE)
// The first row and column of tile `index`, and its product.
__device__ __forceinline__ void tile_coordinates(const WideArguments &s, int64_t index, int64_t &row, int64_t &column,
                                                 int64_t &batch)
{
    constexpr int BAND = 8;
    batch = index / (s.tiles_m * s.tiles_n);
    tile_position(index - batch * s.tiles_m * s.tiles_n, s.tiles_m, s.tiles_n, BAND, row, column);
    row *= TILE_M, column *= TILE_N;
}

// Copies a slice of one operand, DEPTH x LINES, of which `depths` and `lines` are in bounds; the rest become zeros.
// K_MAJOR: stored as operand[line][k], and transposed element by element on the way; a warp copies 4 lines at 8 values
// of k at a time.
template <int LINES, bool K_MAJOR>
__device__ __forceinline__ void copy_wide(float *to, const float *from, int64_t stride, int64_t depths, int lines,
                                          int thread)
{
    constexpr int PITCH = LINES + 4;
    if constexpr (K_MAJOR) {
        constexpr int APART = PRODUCERS / 8; // lines
        const int depth = thread % 8, line = thread / 8;
        const uint32_t target = shared_address(to + depth * PITCH + line);
        const float *source = from + line * stride + depth;
#pragma unroll
        for (int r = 0; r < LINES / APART; r++, source += APART * stride)
#pragma unroll
            for (int d = 0; d < DEPTH; d += 8)
                cp_async<4>(target + (d * PITCH + r * APART) * 4, source + d,
                            depth + d < depths && line + r * APART < lines ? 4 : 0);
    } else {
        constexpr int ACROSS = LINES / 4, APART = PRODUCERS / ACROSS; // threads for one k, k between copies
        const int depth = thread / ACROSS, line = thread % ACROSS * 4;
        const uint32_t target = shared_address(to + depth * PITCH + line);
        const float *source = from + depth * stride + line;
#pragma unroll
        for (int r = 0; r < DEPTH / APART; r++, source += APART * stride)
            cp_async<16>(target + r * APART * PITCH * 4, source, depth + r * APART < depths && line < lines ? 16 : 0);
    }
}

template <bool A_K_MAJOR, bool B_K_MAJOR>
__device__ __forceinline__ void produce(float *ring, uint32_t full, uint32_t empty, const float *a, const float *b,
                                        const WideArguments &s)
{
    const int thread = threadIdx.x - CONSUMERS;
    int stage = 0, phase = 0;
    for (int64_t tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
        int64_t row, column, batch;
        tile_coordinates(s, tile, row, column, batch);
        const int a_lines = s.m - row < TILE_M ? (int)(s.m - row) : TILE_M;
        const int b_lines = s.n - column < TILE_N ? (int)(s.n - column) : TILE_N;
        const float *a_from = a + batch * s.stride_a + (A_K_MAJOR ? row * s.lda : row);
        const float *b_from = b + batch * s.stride_b + (B_K_MAJOR ? column * s.ldb : column);
        for (int64_t k = 0; k < s.k; k += DEPTH) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            float *const to = ring + stage * STAGE;
            copy_wide<TILE_M, A_K_MAJOR>(to, a_from, s.lda, s.k - k, a_lines, thread);
            copy_wide<TILE_N, B_K_MAJOR>(to + DEPTH * A_PITCH, b_from, s.ldb, s.k - k, b_lines, thread);
            // Arrives once the thread's copies have landed.
            cp_async_mbarrier_arrive_noinc(full + 8 * stage);
            a_from += A_K_MAJOR ? DEPTH : DEPTH * s.lda;
            b_from += B_K_MAJOR ? DEPTH : DEPTH * s.ldb;
            stage = stage + 1 == STAGES ? (phase ^= 1, 0) : stage + 1;
        }
    }
    cp_async_wait_all();
}

__device__ __forceinline__ void consume(const float *ring, float *results, uint32_t full, uint32_t empty, void *d,
                                        void *preactivation, const WideArguments &s, const Epilogue &epilogue)
{
    constexpr int V = 4, ACROSS = WARP_N / V;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_m = (lane >> 1 & 1) | lane >> 4 << 1, lane_n = (lane & 1) | (lane >> 2 & 3)
                                                                                   << 1; // see ladder/09_warp_tile.cu
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    float *const mine = results + warp * WARP_M * WARP_N + lane_m * V * WARP_N + lane_n * V;
    // Opaque to the compiler, which would recompute them in each slice.
    const int a_offset = opaque(warp_row + lane_m * V), b_offset = opaque(DEPTH * A_PITCH + warp_column + lane_n * V);
    const int slices = (int)ceil_div(s.k, DEPTH);
    int stage = 0, phase = 0;
    for (int64_t tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
        // The first step multiplies zeros, which keeps the loop body free of special cases.
        float sum[THREAD_M][THREAD_N] = {}, left[2][THREAD_M] = {}, right[2][THREAD_N] = {};
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            mbarrier_wait(full + 8 * stage, phase);
            const float *a = ring + stage * STAGE + a_offset, *b = ring + stage * STAGE + b_offset;
            // Unrolled by half a slice: more code would not fit the instruction cache beside the producers'.
#pragma unroll 1
            for (int half = 0; half < 2; half++, a += DEPTH / 2 * A_PITCH, b += DEPTH / 2 * B_PITCH)
#pragma unroll
                for (int p = 0; p < DEPTH / 2; p++) {
                    load_fragment<float, THREAD_M, LANES_M>(left[p % 2], a + p * A_PITCH);
                    load_fragment<float, THREAD_N, 32 / LANES_M>(right[p % 2], b + p * B_PITCH);
                    add_outer_product(sum, left[(p + 1) % 2], right[(p + 1) % 2]);
                }
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(empty + 8 * stage);
            stage = stage + 1 == STAGES ? (phase ^= 1, 0) : stage + 1;
        }
        add_outer_product(sum, left[1], right[1]);

        put_sums<LANES_M, WARP_N, THREAD_M>(mine, lane_m, sum, 0, false);
        __syncwarp();
        int64_t row, column, batch;
        tile_coordinates(s, tile, row, column, batch);
        row += warp_row, column += warp_column + lane % ACROSS * V;
        const SimtRows<float> rows = {d,
                                      preactivation,
                                      nullptr,
                                      batch * s.stride_d + column,
                                      s.ldd,
                                      column,
                                      s.n - column < V ? (int)(s.n - column) : V,
                                      s.vectors};
        finish_rows<float, LANES_M, WARP_N>(rows, results + warp * WARP_M * WARP_N + lane % ACROSS * V, row,
                                            s.m - row < WARP_M ? (int)(s.m - row) : WARP_M, lane / ACROSS, 32 / ACROSS,
                                            epilogue);
        __syncwarp();
    }
}
#endif

template <bool A_K_MAJOR, bool B_K_MAJOR>
__global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    gemm_simt_wide_kernel(void *d, void *preactivation, const float *a, const float *b,
                          const __grid_constant__ WideArguments s, const __grid_constant__ Epilogue epilogue)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(16) float wide_shared[];
    float *const results = wide_shared + STAGES * STAGE;
    const uint32_t full = shared_address(results + TILE_M * TILE_N), empty = full + 8 * STAGES;
    if (threadIdx.x == 0)
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(full + 8 * stage, PRODUCERS);
            mbarrier_init(empty + 8 * stage, CONSUMERS / 32);
        }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x >= CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        produce<A_K_MAJOR, B_K_MAJOR>(wide_shared, full, empty, a, b, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(wide_shared, results, full, empty, d, preactivation, s, epilogue);
    }
#endif
}

template <bool A_K_MAJOR, bool B_K_MAJOR>
static cuda_ops_status launch_wide(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const auto kernel = gemm_simt_wide_kernel<A_K_MAJOR, B_K_MAJOR>;
    const cudaError_t error = allow_shared_memory(kernel, SHARED_BYTES);
    if (error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    const int64_t tiles_m = ceil_div(p.m, TILE_M), tiles_n = ceil_div(p.n, TILE_N), tiles = tiles_m * tiles_n * p.batch;
    const bool vectors = p.ldd % 4 == 0 && (p.batch == 1 || p.stride_d % 4 == 0) && is_aligned_16(call.d) &&
                         is_aligned_16(p.preactivation);
    const WideArguments s = {p.m,        p.n,        p.k,     p.lda,   p.ldb, p.ldd,  p.stride_a,
                             p.stride_b, p.stride_d, tiles_m, tiles_n, tiles, vectors};
    launch_dependent(kernel, dim3((unsigned int)(tiles < device.multiprocessors ? tiles : device.multiprocessors)),
                     CONSUMERS + PRODUCERS, SHARED_BYTES, call.stream, call.d, p.preactivation,
                     static_cast<const float *>(call.a), static_cast<const float *>(call.b), s, epilogue_of(call));
    return launch_status();
}
#endif

bool gemm_simt_has_sm90(GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    return device.capability == 90;
#else
    (void)device;
    return false;
#endif
}

cuda_ops_status gemm_simt_sm90(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? launch_wide<false, true>(call, device) : launch_wide<false, false>(call, device);
    return p.transpose_b ? launch_wide<true, true>(call, device) : launch_wide<true, false>(call, device);
#else
    (void)call, (void)device;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
