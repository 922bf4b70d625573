// gemm, rung 10: the next slices are under way while the present one is multiplied.
//     D[i][j] = activation(alpha * sum over p of op(A)[i][p] * op(B)[p][j] + bias[j])
// Threads: a block makes a tile of D, warps and lanes a compact part of it each as in rung 9; simt.cuh holds the
// kernel. cp.async copies from global to shared memory past the registers, so that nothing waits: a ring of slices is
// filled ahead, and within a slice the next depth's registers are loaded while the present one is multiplied. Fixes:
// the SM multiplies all the time. Tiles are numbered in bands, so that blocks that run together share rows of A and
// columns of B in the L2. Where D has few tiles, several groups of warps share a tile (SLICES), and blocks share k.
// Leaves: only tensor cores do more. Bound by the issue of instructions, of which 88 % are multiply-adds, and by the
// two banks of the register file, which a sixth of them ask for more than they give. Measured on an H200 against cuBLAS
// without TF32, Small at the first and Large at the others: 1024^3 1.11, 2048^3 0.95, 4096^3 1.00, 8192^3 1.01, 5120 x
// 5120 x 256 1.05 (see benchmarks/notes/gemm.md). Every dtype, storage order, batch and epilogue; halves are widened on
// the way into shared memory. float64 runs on the FMA units here (half of what the tensor cores of an A100 or H100 do).
// Before sm_80 copies are loads and stores.
#include "gemm/simt.cuh"

// float32 here, the others in 10_cp_async_float64.cu and 10_cp_async_halves.cu, so that they compile side by side.
#include "gemm/10_cp_async.cuh"
#include "gemm/simt.cuh"

// At full size: 128 x 128, two blocks of 256 threads an SM.
typedef SimtTile<4, 2, 1, 4, 8, 8, 16, 3, 2, 1> Large;
// Where those are too few: 64 x 128 by 256 threads, each half of them summing half of the depths.
typedef SimtTile<2, 2, 2, 4, 8, 8, 16, 3, 2, 1> Small;
// For a D of a few rows or columns: 32 x 64 by four warps that sum a quarter of the depths each.
typedef SimtTile<1, 1, 4, 4, 8, 8, 16, 3, 4, 1> Tiny;
// Large and Small as measured on an H200 (benchmarks/notes/gemm.md); Tiny, which moves three times as much, by
// estimate.
static const SimtChoice CHOICES[] = {
    {Large::M, Large::N, 0.92, 1}, {Small::M, Small::N, 0.89, 0.95}, {Tiny::M, Tiny::N, 0.45, 0.7}};

static cuda_ops_status gemm_cp_async_float32(const GemmCall &call, GemmDevice device)
{
    const SimtPlan plan = simt_plan(CHOICES, call.problem, device);
    if (!simt_takes_vectors<float>(call))
        return simt_launch<float, Small, 1>(call, plan.pieces);
    if (plan.tile == 0)
        return simt_launch<float, Large, 4>(call, plan.pieces);
    if (plan.tile == 1)
        return simt_launch<float, Small, 4>(call, plan.pieces);
    return simt_launch<float, Tiny, 4>(call, plan.pieces);
}

double gemm_cp_async_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    // A call's start, and the multiply-adds of an SM in a microsecond: on an H200 197e3 at 2048^3, 195e3 at 1024^3.
    constexpr double START = 4, SPEED = 196e3;
    return START + simt_plan(CHOICES, problem, device).time / SPEED;
}

bool gemm_cp_async_supports(const GemmCall &, GemmDevice)
{
    return true;
}

int64_t gemm_cp_async_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    switch (problem.dtype) {
    case CUDA_OPS_FLOAT32:
        return simt_workspace(problem, simt_plan(CHOICES, problem, device).pieces);
    case CUDA_OPS_FLOAT64:
        return gemm_cp_async_float64_workspace(problem, device);
    default:
        return gemm_cp_async_halves_workspace(problem, device);
    }
}

cuda_ops_status gemm_cp_async(const GemmCall &call, GemmDevice device)
{
    switch (call.problem.dtype) {
    case CUDA_OPS_FLOAT32:
        return gemm_cp_async_float32(call, device);
    case CUDA_OPS_FLOAT64:
        return gemm_cp_async_float64(call, device);
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        return gemm_cp_async_halves(call, device);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
