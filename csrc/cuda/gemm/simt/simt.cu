// gemm, simt path: D = activation(alpha * op(A) op(B) + bias) on the CUDA cores, for every dtype, storage order, batch
// and epilogue. gemm/simt/kernel.cuh has the kernel: a block makes a tile of D, warps and lanes a compact part of it
// (ladder/09_warp_tile.cu); cp.async fills a pipeline of slices in shared memory, and the next k's registers are loaded
// while the present one is multiplied. Tiles are numbered in bands for the L2. Where D has few tiles, groups of warps
// split each slice (SLICES), and blocks split k. Before sm_80 copies are loads and stores. Bound by instruction issue,
// 88 % of it multiply-adds, and by the register file's two banks, which delay a tenth of them. Measured on an H200
// against cuBLAS without TF32: Small 1024^3 1.16, Large 5120 x 5120 x 256 1.05, the tile of float32_sm90.cu 2048^3 and
// 4096^3 0.99 to 1.04 by storage order (benchmarks/notes/gemm.md). Here float32; other tiles and dtypes are in files of
// their own, which compile in parallel.
#include "gemm/simt/float32.cuh"

// Measured on an H200 (benchmarks/notes/gemm.md), but for Tiny, an estimate: it reads three times as much.
static const SimtChoice CHOICES[] = {{Large::M, Large::N, 0.92, 1},      {Small::M, Small::N, 0.89, 0.95},
                                     {Tall::M, Tall::N, 0.89, 0.95},     {Middle::M, Middle::N, 0.9, 0.9},
                                     {Square::M, Square::N, 0.24, 0.85}, {Tiny::M, Tiny::N, 0.45, 0.7}};

// The launch plan, and whether tiles of 128 x 256 (Hopper only) are faster.
struct Float32Plan {
    SimtPlan simt;
    bool wide;
};

static Float32Plan plan_float32(const cuda_ops_gemm_problem &p, GemmDevice device, bool vectors)
{
    Float32Plan plan = {simt_plan(CHOICES, p, device), false};
    // Both tiles in many waves, which hide a block's start. START: in units of one k; WIDE_SPEED: the wide tile's rate
    // beside Large's; measured.
    constexpr int64_t WIDE_M = 128, WIDE_N = 256, LARGE_START = 30, WIDE_START = 40;
    constexpr double WIDE_SPEED = 1.03;
    const SimtPlan &simt = plan.simt;
    if (vectors && gemm_simt_has_sm90(device) && simt.tile == LARGE && simt.splits == 1 && p.k > 0) {
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
    return vectors && plan.simt.tile == LARGE ? simt_launch<float, Large, 4>(call, plan.simt.splits)
                                              : gemm_simt_small(call, plan.simt.tile, vectors, plan.simt.splits);
}

static int64_t gemm_simt_float32_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    const GemmCall call = {nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr};
    const bool vectors = simt_takes_vectors<float>(call); // misaligned pointers take Small, which needs no more
    const Float32Plan plan = plan_float32(problem, device, vectors);
    if (plan.wide)
        return 0;
    return vectors && plan.simt.tile == LARGE ? simt_workspace<Large>(problem, plan.simt.splits)
                                              : simt_workspace<Small>(problem, plan.simt.splits);
}

double gemm_simt_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    // The start of a call, and an SM's multiply-adds in a microsecond: on an H200 197e3 at 2048^3, 195e3 at 1024^3. And
    // how much longer they take where copies are of an element each.
    constexpr double START = 4, SPEED = 196e3, BY_ELEMENTS = 1.8;
    const GemmCall call = {nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr};
    const double time = plan_float32(problem, device, true).simt.time / SPEED;
    return START + (simt_takes_vectors<float>(call) ? time : BY_ELEMENTS * time);
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
