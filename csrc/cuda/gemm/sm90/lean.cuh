// 16-bit tiles of the sm90 path without gelu, whose results leave 32 columns at a time: the shared memory that this
// saves is a stage more, which counts where operands come from device memory.
#ifndef CUDA_OPS_GEMM_SM90_LEAN_CUH
#define CUDA_OPS_GEMM_SM90_LEAN_CUH

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/lean.h"

// Of a tile with whole lines in the epilogue's buffers and a stage less.
template <typename Whole>
struct LeanTile : Whole {
    static constexpr int STAGES = Whole::STAGES + 1;
    static constexpr int CHUNK = 32, CHUNK_ROW = CHUNK * (int)sizeof(typename Whole::T);
    static constexpr int BUFFER_BYTES = Whole::GROUP_M * CHUNK_ROW;
    static constexpr int RING_BYTES = STAGES * Whole::STAGE_BYTES, OUT_BYTES = 2 * Whole::BUFFERS * BUFFER_BYTES;
    static constexpr int BUFFERS_FROM = RING_BYTES, BARRIERS_FROM = RING_BYTES + OUT_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (2 * STAGES + 2) * 8 + SWIZZLE_ATOM;
    static_assert(sizeof(typename Whole::T) == 2 && Whole::SHARING == 1 && !Whole::HAS_GELU && !Whole::ONE_TILE,
                  "16 bits");
    static_assert(SHARED_BYTES + 1024 <= 233472, "an SM's shared memory");
};

// 10: the blocks of a cluster are side by side and share A, which is the longer one where rows are many, and an odd
// number of rows of tiles leaves none of them idle. 11: for multiples of 224 columns, of which networks have many
// (672), and a last wave that 192 or 256 fill badly. 22: makes D^T, as tiles of 160 x 128, between those of 128 and
// 192: 3200 x 768 is 120 of them. Not where A is stored along m: its 160 rows would be loaded as 192.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_lean(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                               M    N   cluster ping-pong stages
    case 10: return launch<LeanTile<Tile<T, 128, 128, 1, 2, true, 5, a_mn_major, b_mn_major>>>(call, device, plan);
    case 11: return launch<Tile<T, 128, 224, 2, 1, false, 4, a_mn_major, b_mn_major>>(call, device, plan);
    case 22:
        if constexpr (!b_mn_major)
            return launch<EitherTile<Tile<T, 128, 160, 2, 1, true, 5, a_mn_major, false>>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_lean_halves(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? launch_lean<T, true, false>(call, device, plan)
                             : launch_lean<T, true, true>(call, device, plan);
    return p.transpose_b ? launch_lean<T, false, false>(call, device, plan)
                         : launch_lean<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
