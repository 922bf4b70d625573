// gemm, rung 10: the next slices are under way while the present one is multiplied.
//     D[i][j] = activation(alpha * sum over p of op(A)[i][p] * op(B)[p][j] + bias[j])
// Threads: a block makes a tile of D, warps and lanes a compact part of it each as in rung 9; gemm/simt/kernel.cuh
// holds the kernel. cp.async copies from global to shared memory past the registers, so that nothing waits: a ring of
// slices is filled ahead, and within a slice the next depth's registers are loaded while the present one is multiplied.
// Fixes: the SM multiplies all the time. Tiles are numbered in bands, so that blocks that run together share rows of A
// and columns of B in the L2. Where D has few tiles, several groups of warps share a tile (SLICES), and blocks share k.
// Leaves: only tensor cores do more. Bound by the issue of instructions, of which 88 % are multiply-adds, and by the
// two banks of the register file, which a tenth of them ask for more than they give. Measured on an H200 against cuBLAS
// without TF32: Small 1024^3 1.16, Large 5120 x 5120 x 256 1.05, the tile of gemm/simt/float32_sm90.cu 2048^3 and
// 4096^3 0.99 to 1.04 by storage order (see benchmarks/notes/gemm.md). Every dtype, storage order, batch and epilogue;
// halves are widened on the way into shared memory. float64 runs on the FMA units here (half of what the tensor cores
// of an A100 or H100 do). Before sm_80 copies are loads and stores. float32 here and in gemm/simt/float32_small.cu, the
// others in gemm/simt/float64.cu and gemm/simt/halves.cu, so that they compile side by side.
#include "gemm/simt/float32.cuh"

// Large, Small and its like as measured on an H200 (benchmarks/notes/gemm.md); Tiny, which moves three times as much,
// by estimate.
static const SimtChoice CHOICES[] = {{Large::M, Large::N, 0.92, 1},      {Small::M, Small::N, 0.89, 0.95},
                                     {Tall::M, Tall::N, 0.89, 0.95},     {Middle::M, Middle::N, 0.9, 0.9},
                                     {Square::M, Square::N, 0.24, 0.85}, {Tiny::M, Tiny::N, 0.45, 0.7}};

// The plan, and whether it is better done by tiles of 128 x 256 (Hopper alone).
struct Float32Plan {
    SimtPlan simt;
    bool wide;
};

static Float32Plan plan_float32(const cuda_ops_gemm_problem &p, GemmDevice device, bool vectors)
{
    Float32Plan plan = {simt_plan(CHOICES, p, device), false};
    // Both tiles in many waves, in which a block's start hides: measured, as depths, and the wide one's speed.
    constexpr int64_t WIDE_M = 128, WIDE_N = 256, LARGE_START = 30, WIDE_START = 40;
    constexpr double WIDE_SPEED = 1.03;
    const SimtPlan &simt = plan.simt;
    if (vectors && gemm_simt_has_sm90(device) && simt.tile == LARGE && simt.pieces == 1 && p.k > 0) {
        const int64_t size = device.multiprocessors;
        const int64_t large_tiles = ceil_div(p.m, Large::M) * ceil_div(p.n, Large::N) * p.batch;
        const int64_t wide_tiles = ceil_div(p.m, WIDE_M) * ceil_div(p.n, WIDE_N) * p.batch;
        const double large = (double)(ceil_div(large_tiles, size) * Large::M * Large::N * (p.k + LARGE_START));
        const double wide = (double)(ceil_div(wide_tiles, size) * WIDE_M * WIDE_N * (p.k + WIDE_START)) / WIDE_SPEED;
        plan.wide = wide < large;
        if (plan.wide)
            plan.simt.time *= wide / large;
    }
    return plan;
}

static cuda_ops_status gemm_simt_float32(const GemmCall &call, GemmDevice device)
{
    const bool vectors = simt_takes_vectors<float>(call);
    const Float32Plan plan = plan_float32(call.problem, device, vectors);
    if (plan.wide)
        return gemm_simt_sm90(call, device);
    return vectors && plan.simt.tile == LARGE ? simt_launch<float, Large, 4>(call, plan.simt.pieces)
                                              : gemm_simt_small(call, plan.simt.tile, vectors, plan.simt.pieces);
}

static int64_t gemm_simt_float32_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    const GemmCall call = {nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr};
    const bool vectors = simt_takes_vectors<float>(call); // of misaligned pointers Small takes no more
    const Float32Plan plan = plan_float32(problem, device, vectors);
    if (plan.wide)
        return 0;
    return vectors && plan.simt.tile == LARGE ? simt_workspace<Large>(problem, plan.simt.pieces)
                                              : simt_workspace<Small>(problem, plan.simt.pieces);
}

double gemm_simt_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    // A call's start, and the multiply-adds of an SM in a microsecond: on an H200 197e3 at 2048^3, 195e3 at 1024^3.
    constexpr double START = 4, SPEED = 196e3;
    return START + plan_float32(problem, device, true).simt.time / SPEED;
}

Answer gemm_simt_supports(const GemmCall &, GemmDevice)
{
    return YES;
}

int64_t gemm_simt_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    switch (problem.dtype) {
    case CUDA_OPS_FLOAT32:
        return gemm_simt_float32_workspace(problem, device);
    case CUDA_OPS_FLOAT64:
        return gemm_simt_float64_workspace(problem, device);
    default:
        return gemm_simt_halves_workspace(problem, device);
    }
}

cuda_ops_status gemm_simt(const GemmCall &call, GemmDevice device)
{
    switch (call.problem.dtype) {
    case CUDA_OPS_FLOAT32:
        return gemm_simt_float32(call, device);
    case CUDA_OPS_FLOAT64:
        return gemm_simt_float64(call, device);
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        return gemm_simt_halves(call, device);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
