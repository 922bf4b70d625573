// gemm, rung 12: D = activation(alpha * op(A) op(B) + bias) by Hopper's own instructions, TMA and wgmma. A block makes
// one tile of 128 x 256 with three specialised warpgroups. One thread of the first, the producer, issues the TMA loads
// of slices of 64 along k (128 bytes) into a four-stage pipeline in shared memory, swizzled so that wgmma reads them
// without bank conflicts. The two consumers multiply 64 rows each, 64 x 256 x 16 an instruction, operands from shared
// memory, accumulators in registers that the producer gave up (setmaxnreg). Two mbarriers a stage, full and empty, are
// all that threads wait for. Results leave through shared memory and TMA. Takes A stored m x k, 16-bit operands with B
// either way and TF32 with B stored n x k. Fixes of rung 11: no registers, instructions or block-wide barriers for
// moving data; operands are read from shared memory once a warpgroup, not once a warp. Leaves: a block's start and
// epilogue are not hidden; neighbouring blocks fetch the same slices from the L2, in plain order; one size of tile,
// which leaves SMs idle where D is small. Rung 13 (gemm/sm90/) fixes the four.
#include "common/tensor_map.h"
#include "gemm/sm90/tile.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if defined(CUDA_OPS_SM90A)

template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    gemm_tma_wgmma_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef typename C::T T;
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::STAGES * C::STAGE_BYTES;
    const uint32_t full = buffers + 2 * C::BUFFERS * C::BUFFER_BYTES, empty = full + 8 * C::STAGES;
    const int m = blockIdx.x % work.clusters_m * C::M, n = blockIdx.x / work.clusters_m * C::N, batch = blockIdx.y;
    const int steps = (work.k + C::K - 1) / C::K;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 2);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    int stage = 0, phase = 0;
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x != 0)
            return;
        const int batch_a = work.a_shared ? 0 : batch, batch_b = work.b_shared ? 0 : batch;
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            const int k = step * C::K;
            if constexpr (C::A_MN_MAJOR)
                for (int column = 0; column < C::A_COLUMNS; column++)
                    tma_load_3d(a + column * C::COLUMN_BYTES, &map_a, arrived, m + column * C::ROW, k, batch_a);
            else
                tma_load_3d(a, &map_a, arrived, k, m, batch_a);
            if constexpr (C::B_MN_MAJOR)
                for (int column = 0; column < C::B_COLUMNS; column++)
                    tma_load_3d(b + column * C::COLUMN_BYTES, &map_b, arrived, n + column * C::ROW, k, batch_b);
            else
                tma_load_3d(b, &map_b, arrived, k, n, batch_b);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    } else {
        setmaxnreg_inc<232>();
        const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, my_row = group * C::GROUP_M;
        const uint32_t a_first = stages + (C::A_MN_MAJOR ? my_row / C::ROW * C::COLUMN_BYTES : my_row * SWIZZLE_ROW);
        const uint64_t a_tile = wgmma_descriptor(a_first, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        // 32 bytes on along k: within the row, or 16 rows further.
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[1][C::N / 2];
        int before = 0, buffer = 0;
        const Bias<C> bias = load_bias<C>(work, n, thread);
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum[0], wgmma_advance(a, i * A_STEP),
                                                             wgmma_advance(b, i * B_STEP), step > 0 || i > 0);
            wgmma_commit_group();
            // This stage's products are in flight; the previous stage's are done.
            wgmma_wait_group<1>();
            if (step > 0 && thread == 0)
                mbarrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        char *const mine = shared + (buffers - shared_address(shared)) + group * C::BUFFERS * C::BUFFER_BYTES;
        store_tile<C>(sum, bias, work, &map_d, mine, buffer, batch, m + my_row, n, group, thread);
        if (C::BUFFERS > 0 && thread == 0)
            bulk_wait_group_read<0>();
    }
#endif
}

template <typename C>
static cuda_ops_status launch(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    const bool tf32 = sizeof(typename C::T) == 4;
    bool mapped = C::A_MN_MAJOR
                      ? make_map(&map_a, call.a, p.dtype, tf32, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
                      : make_map(&map_a, call.a, p.dtype, tf32, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M);
    mapped =
        mapped &&
        (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, tf32, p.n, p.k, p.batch, p.ldb, p.stride_b, C::ROW, C::K)
                       : make_map(&map_b, call.b, p.dtype, tf32, p.k, p.n, p.batch, p.ldb, p.stride_b, C::ROW, C::N));
    GemmWork work = work_of(call);
    work.clusters_m = (int)ceil_div(p.m, C::M);
    work.clusters_n = (int)ceil_div(p.n, C::N);
    map_d = map_a;
    if (C::BUFFERS > 0 && can_copy_out(call)) {
        work.copies_out = 1;
        mapped = mapped &&
                 make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M);
    }
    const int64_t tiles = (int64_t)work.clusters_m * work.clusters_n;
    if (!mapped || tiles > INT32_MAX || p.batch > MAX_GRID)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = gemm_tma_wgmma_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    launch_dependent(kernel, dim3((unsigned int)tiles, (unsigned int)p.batch), 3 * WARPGROUP, C::SHARED_BYTES,
                     call.stream, map_a, map_b, map_d, work);
    return launch_status();
}

template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_wide(const GemmCall &call)
{
    return launch<Tile<T, 128, 256, 1, 1, false, 4, a_mn_major, b_mn_major, false, true>>(call);
}

template <typename T>
static cuda_ops_status launch_either_b(const GemmCall &call)
{
    return call.problem.transpose_b ? launch_wide<T, false, false>(call) : launch_wide<T, false, true>(call);
}
#endif

Answer gemm_tma_wgmma_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (const Answer answer = gemm_sm90_supports(call, device); !answer)
        return answer;
    return p.batch <= MAX_GRID && !p.transpose_a && (p.dtype != CUDA_OPS_FLOAT32 || p.transpose_b)
               ? YES
               : no("A or, in TF32, B is stored the other way round");
}

cuda_ops_status gemm_tma_wgmma(const GemmCall &call, GemmDevice)
{
#if defined(CUDA_OPS_SM90A)
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch_either_b<__nv_bfloat16>(call);
    case CUDA_OPS_FLOAT16:
        return launch_either_b<__half>(call);
    case CUDA_OPS_FLOAT32:
        return launch_wide<float, false, false>(call);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
