// gemm, sm90_3xtf32 path: float32 on Hopper's tensor cores with float32's accuracy, where TF32 is not allowed. Each
// number is the sum of two of TF32 (gemm/sm90_3xtf32/split.cuh), and
//
//   A B = upper(A) upper(B) + (lower(A) upper(B) + upper(A) lower(B))
//
// which leaves out lower(A) lower(B), at most 2^-22 |A| |B|. The tensor cores cut their sums off instead of rounding
// them, so the small products come first, and after 32 of k the sums are added, rounded to nearest, to others in
// registers. Sums that are not finite are made anew of multiply-adds. B is the operand with fewer elements, of which a
// kernel makes copies, both parts K-major (gemm/sm90_3xtf32/split.cu); A is loaded as it is by TMA, in either storage
// order, and split in registers on its way to wgmma. Where A is the smaller one the kernel makes D^T. Where TMA can read
// neither, A is copied first, with rows of whole 16 bytes (gemm/align.cu). A producer
// warpgroup and two consumers, each with 64 rows of a tile; one splits and adds during the other's products. Clusters,
// bands, splits of k and the epilogue are the sm90 path's. Bound by the tensor cores, which take three products of TF32:
// at 4096^3 the kernel has 85 % of that (benchmarks/notes/gemm.md).
#include "gemm/sm90_3xtf32/sm90_3xtf32.h"

#include "common/common.cuh"
#include "common/tensor_map.h"
#include "gemm/align.h"
#include "gemm/sm90_3xtf32/tile.h"
#include "ptx/wgmma.cuh"

// CUDA_OPS_3XTF32=0 in the environment leaves float32 to multiply-adds.
bool gemm_sm90_3xtf32_is_allowed()
{
    static ForcedPath setting = {"CUDA_OPS_3XTF32"};
    return setting.row(1, [](int) { return "0"; }) != 0;
}

// With what is known of the operands' addresses, which `exchanged` leaves where it was.
static GemmCall with_exchanged_addresses(const GemmCall &call)
{
    GemmCall other = exchanged(call);
    other.problem.unaligned_a = call.problem.unaligned_b, other.problem.unaligned_b = call.problem.unaligned_a;
    return other;
}

static bool has_map(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return !p.unaligned_a &&
           map_possible(call.a, 4, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.batch, p.lda, p.stride_a);
}

// The operand that is split.
static SplitOperand split_of(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return {call.b,     (float *)call.workspace, p.n,           p.k, p.stride_b == 0 ? 1 : p.batch, p.ldb,
            p.stride_b, p.transpose_b != 0,      !p.transpose_a};
}

// Of an operand, of all products.
static int64_t elements(int64_t lines, int64_t stride, const cuda_ops_gemm_problem &p)
{
    return lines * (stride == 0 ? 1 : p.batch);
}

static GemmCall of_sizes(const cuda_ops_gemm_problem &p)
{
    return {nullptr, nullptr, nullptr, nullptr, nullptr, p, nullptr};
}

// Whether TMA can read neither operand.
static bool copies_a(const GemmCall &call)
{
    return !has_map(call) && !has_map(with_exchanged_addresses(call));
}

// Whether the kernel makes D^T.
bool gemm_sm90_3xtf32_swaps(const cuda_ops_gemm_problem &p)
{
    const GemmCall call = of_sizes(p);
    const bool as_it_is = has_map(call), exchanges = has_map(with_exchanged_addresses(call));
    return as_it_is == exchanges ? elements(p.m, p.stride_a, p) < elements(p.n, p.stride_b, p) : exchanges;
}

static GemmCall as_the_kernel_sees_it(const GemmCall &call)
{
    return gemm_sm90_3xtf32_swaps(call.problem) ? with_exchanged_addresses(call) : call;
}

// A's copy, in the workspace after those of B. The call is as the kernel sees it.
static AlignedCopy copy_of(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    AlignedCopy copy = {};
    copy.from = call.a;
    copy.to = call.workspace;
    copy.rows = p.transpose_a ? p.k : p.m, copy.columns = p.transpose_a ? p.m : p.k;
    copy.matrices = p.stride_a == 0 ? 1 : p.batch;
    copy.pitch = p.lda, copy.stride = p.stride_a;
    copy.size = (int)dtype_size(p.dtype);
    return copy;
}

Answer gemm_sm90_3xtf32_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (p.dtype != CUDA_OPS_FLOAT32 || p.allow_tf32 || p.k == 0)
        return no("takes float32 without TF32 alone, and no k of zero");
    if (!gemm_sm90_3xtf32_is_allowed())
        return no("CUDA_OPS_3XTF32 is 0 in the environment");
    if (copies_a(of_sizes(p)))
        return can_copy_aligned(copy_of(as_the_kernel_sees_it(of_sizes(p)))) ? YES
                                                                             : no("A or B is too large to be copied");
    // An address that the problem does not tell of: there may be no room for a copy in the workspace.
    return has_map(as_the_kernel_sees_it(call)) ? YES : no("A or B is not aligned, which the problem does not say");
}

int64_t gemm_sm90_3xtf32_split_bytes(const cuda_ops_gemm_problem &p)
{
    return split_bytes(split_of(as_the_kernel_sees_it(of_sizes(p))));
}

int64_t gemm_sm90_3xtf32_copied_bytes(const cuda_ops_gemm_problem &p)
{
    return copies_a(of_sizes(p)) ? aligned_copy_bytes(copy_of(as_the_kernel_sees_it(of_sizes(p)))) : 0;
}

int64_t gemm_sm90_3xtf32_planned_workspace(const cuda_ops_gemm_problem &p, const GemmPlan &plan)
{
    return ceil_div(gemm_sm90_3xtf32_split_bytes(p), 256) * 256 + gemm_sm90_3xtf32_copied_bytes(p) +
           gemm_splits_bytes(p, plan.splits);
}

cuda_ops_status gemm_sm90_3xtf32_planned(const GemmCall &original, GemmDevice device, const GemmPlan &plan)
{
    if (!original.workspace || (plan.splits > 1 && original.problem.preactivation))
        return CUDA_OPS_INVALID_ARGUMENT;
    GemmPlan how = plan;
    how.swapped = gemm_sm90_3xtf32_swaps(original.problem);
    GemmCall call = as_the_kernel_sees_it(original);
    const SplitOperand b = split_of(call);
    call.workspace = (char *)call.workspace + ceil_div(split_bytes(b), 256) * 256;
    if (copies_a(of_sizes(original.problem))) {
        const AlignedCopy copy = copy_of(call);
        const cuda_ops_status status = copy_aligned(&copy, 1, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        call.a = copy.to;
        call.problem.lda = aligned_copy_pitch(copy);
        call.problem.stride_a = copy.matrices == 1 ? 0 : copy.rows * call.problem.lda;
        call.workspace = (char *)call.workspace + aligned_copy_bytes(copy);
    }
    return call.problem.transpose_a ? gemm_sm90_3xtf32_mn_major(call, b, device, how)
                                    : gemm_sm90_3xtf32_k_major(call, b, device, how);
}

int64_t gemm_sm90_3xtf32_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_sm90_3xtf32_planned_workspace(problem, gemm_sm90_3xtf32_plan(problem, device));
}

cuda_ops_status gemm_sm90_3xtf32(const GemmCall &call, GemmDevice device)
{
    return gemm_sm90_3xtf32_planned(call, device, gemm_sm90_3xtf32_plan(call.problem, device));
}
