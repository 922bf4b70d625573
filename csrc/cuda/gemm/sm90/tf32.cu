// gemm, sm90 path: TF32. wgmma reads it from shared memory only where it is K-major. By storage order (A stored m x k
// is K, k x m is MN; B stored n x k is K, k x n is MN):
//     A K, B K    both from shared memory
//     A MN, B K   A through registers
//     A K, B MN   D^T = B^T A^T is the case above
//     A MN, B MN  the smaller operand is transposed into the workspace, which leaves one of the first two cases; the
//                 tiles for batches (gemm/sm90/small_tf32.cu) take A through registers, and transpose the smaller
//                 operand, as B, in shared memory
#include "gemm/align.h"
#include "gemm/sm90/kernel.cuh"

static bool transposes_a(const cuda_ops_gemm_problem &p)
{
    return p.m * (p.stride_a == 0 ? 1 : p.batch) < p.n * (p.stride_b == 0 ? 1 : p.batch);
}

// Whether the kernel makes D^T: where B is MN and A is K, or becomes K in the workspace.
bool gemm_sm90_tf32_transposes_d(const cuda_ops_gemm_problem &p)
{
    return !p.transpose_b && (!p.transpose_a || transposes_a(p));
}

static bool is_small(int tile)
{
    return tile >= 4;
}

// The copy of the smaller operand, k x lines, that makes it K-major, where neither is.
static AlignedCopy transposing_copy(const void *operand, void *to, int64_t lines, int64_t k, int64_t batch,
                                    int64_t pitch, int64_t stride)
{
    return {operand, to, k, lines, stride == 0 ? 1 : batch, pitch, stride, 4, true};
}

static AlignedCopy transposing_copy(const cuda_ops_gemm_problem &p, const void *a, const void *b, void *to)
{
    return transposes_a(p) ? transposing_copy(a, to, p.m, p.k, p.batch, p.lda, p.stride_a)
                           : transposing_copy(b, to, p.n, p.k, p.batch, p.ldb, p.stride_b);
}

// Bytes of the workspace before the partial sums of the splits.
int64_t gemm_sm90_tf32_bytes(const cuda_ops_gemm_problem &p, int tile)
{
    if (!p.transpose_a || p.transpose_b || is_small(tile))
        return 0;
    return aligned_copy_bytes(transposing_copy(p, nullptr, nullptr, nullptr));
}

#if defined(CUDA_OPS_SM90A)
static cuda_ops_status launch_registers(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                          M    N   cluster ping-pong stages          TMA
    case 0: return launch<Tile<float, 128, 256, 2, 1, false, 4, true, false, true, true>>(call, device, plan);
    case 1: return launch<Tile<float, 128, 128, 2, 1, true, 5, true, false, true, true>>(call, device, plan);
    case 2: return launch<Tile<float, 128, 64, 2, 1, false, 8, true, false, false, true>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

static cuda_ops_status launch_shared(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                          M    N   cluster ping-pong stages          TMA
    case 0: return launch<Tile<float, 128, 256, 2, 1, false, 4, false, false, true, true>>(call, device, plan);
    case 1: return launch<Tile<float, 128, 128, 2, 1, true, 5, false, false, true, true>>(call, device, plan);
    case 2: return launch<Tile<float, 128, 192, 2, 1, true, 4, false, false, true, true>>(call, device, plan);
    case 3: return launch<Tile<float, 128, 64, 2, 1, false, 8, false, false, false, true>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}
#endif

cuda_ops_status gemm_sm90_tf32(const GemmCall &original, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    GemmCall call = original;
    GemmPlan how = plan;
    cuda_ops_gemm_problem &p = call.problem;
    if (is_small(plan.tile)) {
        how.swapped = gemm_sm90_tf32_transposes_d(p);
        return gemm_sm90_small_tf32(how.swapped ? exchanged(call) : call, device, how);
    }
    if (p.transpose_a && !p.transpose_b) {
        const AlignedCopy copy = transposing_copy(p, call.a, call.b, call.workspace);
        const cuda_ops_status status = copy_aligned(&copy, 1, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        call.workspace = (char *)call.workspace + aligned_copy_bytes(copy);
        const int64_t pitch = aligned_copy_pitch(copy), stride = copy.matrices == 1 ? 0 : copy.columns * pitch;
        if (transposes_a(p)) {
            call.a = copy.to, p.lda = pitch, p.stride_a = stride;
            p.transpose_a = 0;
        } else {
            call.b = copy.to, p.ldb = pitch, p.stride_b = stride;
            p.transpose_b = 1;
        }
    }
    if (!p.transpose_a && p.transpose_b)
        return launch_shared(call, device, how);
    if (!p.transpose_a) {
        call = exchanged(call);
        how.swapped = 1;
    }
    return launch_registers(call, device, how);
#else
    (void)original, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
