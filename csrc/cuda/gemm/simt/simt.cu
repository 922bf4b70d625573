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
static const SimtChoice CHOICES[] = {{Large::M, Large::N, 0.92, 1, Large::THROUGH_SHARED},
                                     {Small::M, Small::N, 0.89, 0.95, Small::THROUGH_SHARED},
                                     {Tall::M, Tall::N, 0.89, 0.95, Tall::THROUGH_SHARED},
                                     {Middle::M, Middle::N, 0.9, 0.9, Middle::THROUGH_SHARED},
                                     {Square::M, Square::N, 0.24, 0.85, Square::THROUGH_SHARED},
                                     {Tiny::M, Tiny::N, 0.45, 0.7, Tiny::THROUGH_SHARED}};

// The tiles that there are for operands whose rows cannot be copied 16 bytes at a time, fitted to times on an H100.
static const SimtChoice ELEMENT_CHOICES[] = {{Large::M, Large::N, 0.75, 0.9, Large::THROUGH_SHARED},
                                             {Small::M, Small::N, 0.55, 0.7, Small::THROUGH_SHARED}};

// The launch plan, and whether tiles of 128 x 256 (Hopper only) are faster.
struct Float32Plan {
    SimtPlan simt;
    bool wide;
};

static Float32Plan plan_float32(const cuda_ops_gemm_problem &problem, GemmDevice device, bool vectors)
{
    // The large tiles are compared without the activation, which the wide one has in its epilogue.
    cuda_ops_gemm_problem p = problem;
    p.activation = CUDA_OPS_GEMM_NONE, p.preactivation = nullptr;
    Float32Plan plan = {vectors ? simt_plan(CHOICES, p, device) : simt_plan(ELEMENT_CHOICES, p, device), false};
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
    if (!plan.wide && simt_wants_shared_memory(problem))
        plan.simt = vectors ? simt_plan(CHOICES, problem, device) : simt_plan(ELEMENT_CHOICES, problem, device);
    return plan;
}

static cuda_ops_status launch_float32(const GemmCall &call, GemmDevice device, const Float32Plan &plan, bool vectors)
{
    if (plan.wide)
        return gemm_simt_sm90(call, device);
    if (plan.simt.tile != LARGE)
        return gemm_simt_small(call, plan.simt.tile, vectors, plan.simt.splits);
    return vectors ? simt_launch<float, Large, 4>(call, plan.simt.splits)
                   : simt_launch<float, Large, 1>(call, plan.simt.splits);
}

static int64_t float32_workspace(const cuda_ops_gemm_problem &problem, const Float32Plan &plan)
{
    if (plan.wide)
        return 0;
    return plan.simt.tile == LARGE ? simt_workspace<Large>(problem, plan.simt.splits)
                                   : simt_workspace<Small>(problem, plan.simt.splits);
}

// Whether the sizes let rows be copied by vectors, as far as is known without the pointers.
static bool sizes_take_vectors(const cuda_ops_gemm_problem &problem)
{
    return simt_takes_vectors<float>({nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr});
}

static cuda_ops_status gemm_simt_float32(const GemmCall &call, GemmDevice device)
{
    const bool sizes = sizes_take_vectors(call.problem), vectors = simt_takes_vectors<float>(call);
    Float32Plan plan = plan_float32(call.problem, device, sizes);
    if (sizes && !vectors) // Small needs no more of the workspace, which is planned by the sizes
        plan = {{SMALL, plan.wide ? 1 : plan.simt.splits, 0}, false};
    return launch_float32(call, device, plan, vectors);
}

static int64_t gemm_simt_float32_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return float32_workspace(problem, plan_float32(problem, device, sizes_take_vectors(problem)));
}

// A plan of the caller's: tile 0 is the choice's own, the others are those of CHOICES, and the last is that of
// float32_sm90.cu.
static constexpr int WIDE_TILE = 1 + sizeof(CHOICES) / sizeof(SimtChoice);

static Float32Plan named_plan(const GemmPlan &plan)
{
    return {{plan.tile - 1, plan.splits, 0}, plan.tile == WIDE_TILE};
}

bool gemm_simt_takes(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    if (plan.tile == 0)
        return plan.splits == 1;
    if (call.problem.dtype != CUDA_OPS_FLOAT32 || plan.tile > WIDE_TILE || plan.splits > SIMT_MOST_SPLITS ||
        (plan.splits > 1 && (call.problem.preactivation || call.problem.batch > MAX_GRID)))
        return false;
    const bool vectors = simt_takes_vectors<float>(call);
    if (plan.tile == WIDE_TILE)
        return vectors && gemm_simt_has_sm90(device) && plan.splits == 1 && call.problem.k > 0;
    return vectors || plan.tile - 1 == LARGE || plan.tile - 1 == SMALL;
}

int64_t gemm_simt_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan)
{
    return plan.tile == 0 ? gemm_simt_workspace(problem, device) : float32_workspace(problem, named_plan(plan));
}

cuda_ops_status gemm_simt_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return plan.tile == 0 ? gemm_simt(call, device)
                          : launch_float32(call, device, named_plan(plan), simt_takes_vectors<float>(call));
}

double gemm_simt_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    // The start of a call, and an SM's multiply-adds in a microsecond: on an H200 197e3 at 2048^3, 195e3 at 1024^3.
    constexpr double START = 3.3, SPEED = 196e3;
    return START + plan_float32(problem, device, sizes_take_vectors(problem)).simt.time / SPEED;
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
