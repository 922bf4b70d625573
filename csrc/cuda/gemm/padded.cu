// gemm, padded path: D = activation(alpha * op(A) op(B) + bias) where rows of A or B are no multiple of 16 bytes, or do
// not begin at one, so that TMA cannot read them. Those operands are copied into the workspace once, with rows of whole
// 16 bytes, both by one launch (gemm/align.cu), and the product is sm90's or sm90_skinny's. In TF32 a copied operand is
// K-major, as wgmma wants it, however it was stored; so the shorter operand is copied too where it alone is not
// K-major, as the weight is in the gradient of a layer's input. D stays where it is: those paths store unaligned rows
// too. The copy moves twice the operand's bytes, so that it pays where the other side of the product is long, and
// gemm.cu counts it. Bound by the copy where D is small, else as those paths are.
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

// An operand: where the call has it, and how it is stored, rows x columns.
struct Operand {
    const void *&matrix;
    int64_t &pitch, &stride;
    int64_t rows, columns;
    bool k_major, unaligned;
};

// Not by the address, which the query for the workspace does not know.
static bool is_readable(const Operand &operand, const cuda_ops_gemm_problem &p)
{
    return !operand.unaligned && map_possible(nullptr, dtype_size(p.dtype), operand.columns, operand.rows, p.batch,
                                              operand.pitch, operand.stride);
}

// The elements of it, of all products of the batch.
static int64_t elements_of(const Operand &operand, const cuda_ops_gemm_problem &p)
{
    return operand.rows * operand.columns * (operand.stride == 0 ? 1 : p.batch);
}

// Its copy in the workspace instead, which in TF32 is K-major.
static void copy_operand(Padded &padded, const Operand &operand)
{
    const cuda_ops_gemm_problem &p = padded.call.problem;
    const bool shared = operand.stride == 0 || p.batch == 1;
    AlignedCopy copy = {};
    copy.from = operand.matrix;
    copy.rows = operand.rows, copy.columns = operand.columns, copy.matrices = shared ? 1 : p.batch;
    copy.pitch = operand.pitch, copy.stride = operand.stride;
    copy.size = (int)dtype_size(p.dtype);
    copy.transposes = p.dtype == CUDA_OPS_FLOAT32 && !operand.k_major;
    // Without a workspace only the sizes are asked about.
    copy.to = padded.call.workspace ? (char *)padded.call.workspace + padded.bytes : nullptr;
    operand.matrix = copy.to;
    operand.pitch = aligned_copy_pitch(copy);
    operand.stride = shared ? 0 : (copy.transposes ? operand.columns : operand.rows) * operand.pitch;
    padded.bytes += aligned_copy_bytes(copy);
    padded.copies[padded.count++] = copy;
}

static Padded padded_of(const GemmCall &call)
{
    Padded padded = {};
    padded.call = call;
    cuda_ops_gemm_problem &p = padded.call.problem;
    const Operand a = {
        padded.call.a,     p.lda, p.stride_a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, !p.transpose_a,
        p.unaligned_a != 0};
    const Operand b = {
        padded.call.b,     p.ldb, p.stride_b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.transpose_b != 0,
        p.unaligned_b != 0};
    bool copies_a = !is_readable(a, p), copies_b = !is_readable(b, p);
    if (p.dtype == CUDA_OPS_FLOAT32) {
        const bool a_is_shorter = elements_of(a, p) <= elements_of(b, p);
        if (a_is_shorter && !a.k_major && (b.k_major || copies_b))
            copies_a = true;
        else if (!a_is_shorter && !b.k_major && (a.k_major || copies_a))
            copies_b = true;
        p.transpose_a = p.transpose_a && !copies_a;
        p.transpose_b = p.transpose_b || copies_b;
    }
    if (copies_a)
        copy_operand(padded, a);
    if (copies_b)
        copy_operand(padded, b);
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
    // An address that the problem does not tell of: the query for the workspace took sm90 to be possible, and padded may
    // have no room in what it asked for.
    const GemmCall of_sizes = {nullptr, nullptr, nullptr, nullptr, nullptr, p, nullptr};
    if (gemm_sm90_supports(of_sizes, device) && !gemm_sm90_supports(call, device))
        return no("A or B is not aligned, which the problem does not say");
    const Padded padded = padded_of(call);
    if (padded.count == 0)
        return no("A and B have TMA descriptors as they are");
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
