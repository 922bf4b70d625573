// gemm, padded path: D = activation(alpha * op(A) op(B) + bias) where rows of A or B are no multiple of 16 bytes, or do
// not begin at one, so that TMA cannot read them. Those operands are copied into the workspace once, with rows of whole
// 16 bytes, both by one launch (gemm/align.cu), and the product is sm90's or sm90_skinny's. In TF32 a copied operand is
// K-major, as wgmma wants it, however it was stored. D stays where it is: those paths store unaligned rows too. The
// copy moves twice the operand's bytes, so that it pays where the other side of the product is long, and gemm.cu counts
// it. Bound by the copy where D is small, else as those paths are.
#include "common/common.cuh"
#include "common/tensor_map.h"
#include "gemm/align.h"
#include "gemm/paths.h"

// A call as sm90 or sm90_skinny gets it, and what is copied for it.
struct Padded {
    GemmCall call;
    AlignedCopy copies[2];
    int count;
    int64_t bytes; // of the copies
};

// The operand that is stored rows x columns, or its copy in the workspace where TMA cannot read it. Returns whether the
// copy is K-major and the operand was not.
static bool pad(Padded &padded, const void *&matrix, int64_t &pitch, int64_t &stride, int64_t rows, int64_t columns,
                bool k_major, bool unaligned)
{
    const cuda_ops_gemm_problem &p = padded.call.problem;
    const int size = (int)dtype_size(p.dtype);
    // Not by the address, which the query for the workspace does not know.
    if (!unaligned && map_possible(nullptr, size, columns, rows, p.batch, pitch, stride))
        return false;
    const bool shared = stride == 0 || p.batch == 1;
    AlignedCopy copy = {};
    copy.from = matrix;
    copy.rows = rows, copy.columns = columns, copy.matrices = shared ? 1 : p.batch;
    copy.pitch = pitch, copy.stride = stride;
    copy.size = size;
    copy.transposes = p.dtype == CUDA_OPS_FLOAT32 && !k_major;
    // Without a workspace only the sizes are asked about.
    copy.to = padded.call.workspace ? (char *)padded.call.workspace + padded.bytes : nullptr;
    matrix = copy.to;
    pitch = aligned_copy_pitch(copy);
    stride = shared ? 0 : (copy.transposes ? columns : rows) * pitch;
    padded.bytes += aligned_copy_bytes(copy);
    padded.copies[padded.count++] = copy;
    return copy.transposes;
}

static Padded padded_of(const GemmCall &call)
{
    Padded padded = {};
    padded.call = call;
    cuda_ops_gemm_problem &p = padded.call.problem;
    if (pad(padded, padded.call.a, p.lda, p.stride_a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k,
            !p.transpose_a, p.unaligned_a))
        p.transpose_a = 0;
    if (pad(padded, padded.call.b, p.ldb, p.stride_b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n,
            p.transpose_b, p.unaligned_b))
        p.transpose_b = 1;
    p.unaligned_a = p.unaligned_b = 0;
    if (call.workspace) // what follows the copies is the product's
        padded.call.workspace = (char *)call.workspace + padded.bytes;
    return padded;
}

Answer gemm_padded_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability != 90)
        return NEEDS_90;
    if (p.k == 0 || p.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64, nor a k of zero");
    if (p.dtype == CUDA_OPS_FLOAT32 && !p.allow_tf32)
        return GEMM_NEEDS_TF32;
    if (gemm_sm90_supports(call, device))
        return no("A and B have TMA descriptors as they are");
    const Padded padded = padded_of(call);
    for (int i = 0; i < padded.count; i++)
        if (!can_copy_aligned(padded.copies[i]))
            return no("A or B is too large to be copied");
    return gemm_sm90_supports(padded.call, device);
}

GemmCall gemm_padded_call(const GemmCall &call)
{
    return padded_of(call).call;
}

int64_t gemm_padded_bytes(const GemmCall &call)
{
    return padded_of(call).bytes;
}

int64_t gemm_padded_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_padded_planned_workspace(problem, gemm_padded_plan(problem, device));
}

int64_t gemm_padded_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan)
{
    const Padded padded = padded_of({nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr});
    const GemmPlan product = gemm_padded_product(plan);
    return padded.bytes + (product.path == GEMM_SM90 ? gemm_sm90_planned_workspace(padded.call.problem, product) : 0);
}

cuda_ops_status gemm_padded(const GemmCall &call, GemmDevice device)
{
    return gemm_padded_planned(call, device, gemm_padded_plan(call.problem, device));
}

cuda_ops_status gemm_padded_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    if (!call.workspace)
        return CUDA_OPS_INVALID_ARGUMENT;
    const Padded padded = padded_of(call);
    const GemmPlan product = gemm_padded_product(plan);
    // Before the copies, so that a call that is refused has launched nothing.
    if (product.path == GEMM_SM90 && !gemm_sm90_takes(padded.call.problem, product.tile, product.swapped))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (product.path == GEMM_SM90_SKINNY && !gemm_sm90_skinny_supports(padded.call, device))
        return CUDA_OPS_INVALID_ARGUMENT;
    const cuda_ops_status status = copy_aligned(padded.copies, padded.count, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    return product.path == GEMM_SM90 ? gemm_sm90_planned(padded.call, device, product)
                                     : gemm_sm90_skinny_planned(padded.call, device, product);
}
