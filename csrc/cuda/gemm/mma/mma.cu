// gemm, mma path: D = activation(alpha * op(A) op(B) + bias) on the tensor cores by mma.sync: bf16, fp16, TF32, and
// float64 (a kernel of its own, gemm/mma/float64.cu). A block of 256 threads makes a tile of 128 x 128, a warp 64 x 32
// of it in registers. cp.async brings slices of k into a four-stage pipeline in shared memory, two or three ahead of
// the one being multiplied. 16-bit fragments are read by ldmatrix, with .trans where an operand is MN-major, 32-bit
// ones element by element; rows are padded against bank conflicts. Takes any size, storage order, alignment and batch:
// rows that are not 16-byte aligned come through registers, cut out of the aligned vectors around them. Where tiles do
// not fill the GPU, k is split, and a second kernel adds the splits in order. Bound by shared memory and issue slots:
// fragments pass through registers, which takes more shared memory traffic per flop than wgmma, and all threads spend
// instructions on addresses and copies. Measured on an H200 against cuBLAS: bf16 4096^3 0.28 to 0.31, TF32 0.24 to 0.40
// by storage order, float64 2048^3 0.96.
#include "common/aligned_vector.cuh"
#include "gemm/mma/kernel.cuh"

static bool is_aligned(const void *matrix, int64_t size, int64_t pitch, int64_t stride)
{
    return is_aligned_16(matrix) && pitch * size % 16 == 0 && stride * size % 16 == 0;
}

// Behind the last element of an operand that is stored rows x columns.
static const void *end_of(const void *matrix, int64_t size, int64_t rows, int64_t columns, int64_t pitch,
                          int64_t stride, int64_t batch)
{
    return (const char *)matrix + ((batch - 1) * stride + (rows - 1) * pitch + columns) * size;
}

// The splits of k: as many as bring the blocks to one wave of the GPU, of at least 256 each. float64, whose tiles
// differ, takes its splits from the plan.
static int64_t splits_of(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    const int64_t tiles = ceil_div(p.m, 128) * ceil_div(p.n, 128) * p.batch;
    int64_t splits = device.multiprocessors / tiles;
    splits = splits < p.k / 256 ? splits : p.k / 256;
    splits = splits < 32 ? splits : 32;
    return splits > 1 ? splits : 1;
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
                                       : GemmPlan{GEMM_MMA, 0, (int)splits_of(p, device), 0, 8};
}

int64_t gemm_mma_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_mma_planned_workspace(problem, device, plan_of(problem, device));
}

int64_t gemm_mma_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan)
{
    if (problem.dtype != CUDA_OPS_FLOAT64)
        return gemm_splits_bytes(problem, splits_of(problem, device));
    return plan.splits == 1 && plan.tile == 0 ? gemm_mma_float64_workspace(problem, device)
                                              : gemm_splits_bytes(problem, plan.splits);
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
    int64_t splits = p.k == 0 ? 1 : p.dtype == CUDA_OPS_FLOAT64 ? plan.splits : splits_of(p, device);
    const int64_t chunk = splits > 1 ? ceil_div(ceil_div(p.k, splits), 32) * 32 : p.k, size = dtype_size(p.dtype);
    splits = splits > 1 ? ceil_div(p.k, chunk) : 1; // none of them empty
    MmaWork work = {};
    work.a = call.a, work.b = call.b, work.bias = call.bias, work.d = call.d;
    work.a_end = end_of(call.a, size, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda, p.stride_a, p.batch);
    work.b_end = end_of(call.b, size, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb, p.stride_b, p.batch);
    work.m = p.m, work.n = p.n, work.k = p.k, work.batch = p.batch;
    work.lda = p.lda, work.ldb = p.ldb, work.ldd = p.ldd;
    work.stride_a = p.stride_a, work.stride_b = p.stride_b, work.stride_d = p.stride_d;
    work.tiles_m = ceil_div(p.m, 128); // float64 counts its own
    work.tiles_n = ceil_div(p.n, 128);
    work.splits = splits;
    work.chunk = chunk;
    work.alpha = p.alpha;
    work.capability = device.capability, work.multiprocessors = device.multiprocessors;
    work.activation = p.activation;
    work.bias_is_wide = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.output_is_wide = p.output_dtype == CUDA_OPS_FLOAT32;
    if (splits > 1) {
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
    return status == CUDA_OPS_SUCCESS && splits > 1 ? gemm_add_splits(call, splits) : status;
}
