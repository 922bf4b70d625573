// Rung 11: D = activation(alpha * op(A) op(B) + bias) on the tensor cores by mma.sync: bfloat16, float16, TF32,
// float64 (a kernel of its own, in gemm/mma/float64.cu). A block of 256 threads makes a tile of 128 x 128 (float64:
// 64 x 128), a warp 64 x 32 (32 x 32) of it in registers, from slices of the common dimension that cp.async brings into
// a ring of four stages in shared memory, two or three ahead of the one that is multiplied. 16-bit fragments are read
// by ldmatrix, which transposes on the way where an operand is stored along m or n; wider ones element by element. Rows
// in shared memory are padded so that neither way meets a bank conflict. Takes any size, transpose, alignment and
// batch: where rows are not aligned to 16 bytes, threads copy element by element. Where tiles are too few to fill the
// GPU, k is split, and the pieces are added in order by a second kernel. Fixes of rung 10: the CUDA cores' 60 TFLOP/s;
// an mma of a warp does 4096 multiply-adds of 16 bits in one instruction. Leaves on the table: fragments travel through
// registers, at a quarter of shared memory's traffic per flop that rung 12's wgmma needs, and every thread spends
// instructions on addresses and copies. Measured on an H200 against cuBLAS: bfloat16 4096^3 0.28 to 0.31, TF32 0.24 to
// 0.40 by storage order, float64 2048^3 0.96.
#include "common/aligned_vector.cuh"
#include "gemm/mma/kernel.cuh"

static bool is_aligned(const void *matrix, int64_t size, int64_t pitch, int64_t stride)
{
    return is_aligned_16(matrix) && pitch * size % 16 == 0 && stride * size % 16 == 0;
}

// The pieces that k is split in: as many as bring the blocks to one wave of the GPU, of at least 256 each. float64,
// whose tiles differ, has its pieces from the table.
static int64_t pieces_of(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    const int64_t tiles = ceil_div(p.m, 128) * ceil_div(p.n, 128) * p.batch;
    int64_t pieces = device.multiprocessors / tiles;
    pieces = pieces < p.k / 256 ? pieces : p.k / 256;
    pieces = pieces < 32 ? pieces : 32;
    return pieces > 1 ? pieces : 1;
}

Answer gemm_mma_supports(const GemmCall &call, GemmDevice device)
{
    if (device.capability < 80)
        return NEEDS_80;
    return call.problem.dtype != CUDA_OPS_FLOAT32 || call.problem.allow_tf32 ? YES : GEMM_NEEDS_TF32;
}

static GemmPlan plan_of(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return p.dtype == CUDA_OPS_FLOAT64 ? gemm_mma_float64_plan(p, device)
                                       : GemmPlan{11, 0, (int)pieces_of(p, device), 0, 8};
}

int64_t gemm_mma_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_mma_planned_workspace(problem, device, plan_of(problem, device));
}

int64_t gemm_mma_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan)
{
    if (problem.dtype != CUDA_OPS_FLOAT64)
        return gemm_pieces_bytes(problem, pieces_of(problem, device));
    return plan.splits == 1 && plan.tile == 0 ? gemm_mma_float64_workspace(problem, device)
                                              : gemm_pieces_bytes(problem, plan.splits);
}

cuda_ops_status gemm_mma(const GemmCall &call, GemmDevice device)
{
    return gemm_mma_planned(call, device, plan_of(call.problem, device));
}

cuda_ops_status gemm_mma_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (plan.tile > (p.dtype == CUDA_OPS_FLOAT64 ? 2 : 0))
        return CUDA_OPS_INVALID_ARGUMENT;
    int64_t pieces = p.k == 0 ? 1 : p.dtype == CUDA_OPS_FLOAT64 ? plan.splits : pieces_of(p, device);
    const int64_t chunk = pieces > 1 ? ceil_div(ceil_div(p.k, pieces), 32) * 32 : p.k, size = dtype_size(p.dtype);
    pieces = pieces > 1 ? ceil_div(p.k, chunk) : 1; // none of them empty
    MmaWork work = {};
    work.a = call.a, work.b = call.b, work.bias = call.bias, work.d = call.d;
    work.m = p.m, work.n = p.n, work.k = p.k, work.batch = p.batch;
    work.lda = p.lda, work.ldb = p.ldb, work.ldd = p.ldd;
    work.stride_a = p.stride_a, work.stride_b = p.stride_b, work.stride_d = p.stride_d;
    work.tiles_m = ceil_div(p.m, 128); // float64 counts its own
    work.tiles_n = ceil_div(p.n, 128);
    work.splits = pieces;
    work.chunk = chunk;
    work.alpha = p.alpha;
    work.capability = device.capability, work.multiprocessors = device.multiprocessors;
    work.activation = p.activation;
    work.bias_is_wide = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.output_is_wide = p.output_dtype == CUDA_OPS_FLOAT32;
    if (pieces > 1) {
        work.d = call.workspace, work.bias = nullptr, work.alpha = 1, work.activation = CUDA_OPS_GEMM_NONE;
        work.ldd = p.n, work.stride_d = p.m * p.n, work.output_is_wide = 1;
    }
    work.partial = (double *)call.workspace;
    const bool aligned = is_aligned(call.a, size, p.lda, p.stride_a) && is_aligned(call.b, size, p.ldb, p.stride_b);
    cuda_ops_status status = CUDA_OPS_UNSUPPORTED_DTYPE;
    switch (p.dtype) {
    case CUDA_OPS_BFLOAT16:
        status = gemm_mma_bfloat16(work, p, aligned, call.stream);
        break;
    case CUDA_OPS_FLOAT16:
        status = gemm_mma_float16(work, p, aligned, call.stream);
        break;
    case CUDA_OPS_FLOAT32:
        status = gemm_mma_tf32(work, p, aligned, call.stream);
        break;
    case CUDA_OPS_FLOAT64:
        status = gemm_mma_float64(work, p, aligned, plan.tile, call.stream);
        break;
    }
    return status == CUDA_OPS_SUCCESS && pieces > 1 ? gemm_add_pieces(call, pieces) : status;
}
