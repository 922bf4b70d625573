// gemm: D = activation(alpha * op(A) op(B) + bias). The table of the ladder's rungs, and the choice among them.
// The kernels are in gemm/, one rung a file; each file's header says what bounds it and what it reaches.
#include "cuda_ops/gemm.h"

#include "common.cuh"
#include "gemm/rungs.h"

static const GemmRung RUNGS[] = {
    // 4 to 10: CUDA cores. A second variant of a rung is 10 * rung + variant.
    {4, "naive", gemm_naive_supports, nullptr, gemm_naive},
    {5, "coalesced", gemm_coalesced_supports, nullptr, gemm_coalesced},
    {6, "shared_memory", gemm_shared_memory_supports, nullptr, gemm_shared_memory},
    {62, "shared_memory_dynamic", gemm_shared_memory_supports, nullptr, gemm_shared_memory_dynamic},
    {71, "register_tile_1d", gemm_register_tile_supports, nullptr, gemm_register_tile_1d},
    {7, "register_tile", gemm_register_tile_supports, nullptr, gemm_register_tile},
    {8, "vectorised", gemm_vectorised_supports, nullptr, gemm_vectorised},
    {9, "warp_tile", gemm_warp_tile_supports, nullptr, gemm_warp_tile},
    {10, "cp_async", gemm_cp_async_supports, gemm_cp_async_workspace, gemm_cp_async},
    // 11 to 13: tensor cores.
    {11, "mma_sync", gemm_mma_sync_supports, gemm_mma_sync_workspace, gemm_mma_sync},
    {12, "tma_wgmma", gemm_tma_wgmma_supports, nullptr, gemm_tma_wgmma},
    {13, "cluster_persistent", gemm_cluster_persistent_supports, gemm_cluster_persistent_workspace,
     gemm_cluster_persistent},
};

// The choice by shape. Rungs, from the fastest to the one that takes everything; the first that supports the problem.
static const int PREFERENCE[] = {13, 11, 10, 4};

// Rung 13's tiles, and how long one takes on an H200: `sum` for 1024 of k, `rest` for its start and its results, in
// microseconds. Fitted to the times of whole products of 1024^3 to 8192^3 and 5120 x 5120 x 256, which it tells to some
// 5 %; benchmarks/notes/gemm.md has them. `group` is GemmPlan's. The rows' numbers are those of the switches in
// 13_cluster_persistent.cuh and 13_cluster_persistent_tf32.cu.
struct ClusterTile {
    int m, n, cluster_m, cluster_n;
    double sum, rest;
    int group;
};
// clang-format off
static const ClusterTile HALVES[] = {
    {128, 256, 2, 1, 12.40, 1.20, 16},
    {128, 128, 2, 1,  6.28, 0.55,  8},
    {128, 192, 2, 1,  9.30, 0.50,  6},
    {128,  64, 1, 2,  3.85, 0.70,  8},
};
// TF32: both operands from shared memory (A stored m x k and B stored n x k), or A through registers.
static const ClusterTile TF32_SHARED[] = {
    {128, 256, 2, 1, 24.40, 3.30,  8},
    {128, 128, 2, 1, 12.25, 1.70,  8},
    {128, 160, 2, 1, 15.00, 2.30,  8},
    {128,  64, 2, 1,  9.70, 0.70,  8},
};
static const ClusterTile TF32_REGISTERS[] = {
    {256, 128, 1, 2, 26.80, 2.60,  8},
    {128, 128, 2, 1, 16.30, 0.50,  8},
};
// clang-format on
// Pieces of k cost a second kernel, and bytes that are written and read again: microseconds, and bytes in one.
static constexpr double PIECES_START = 8, PIECES_RATE = 3e6;
static constexpr int64_t SMALLEST_PIECE = 256, MOST_PIECES = 32;

template <int COUNT>
static GemmPlan quickest(const ClusterTile (&tiles)[COUNT], const cuda_ops_gemm_problem &p, int64_t m, int64_t n,
                         GemmDevice device)
{
    GemmPlan best = {};
    double least = 0;
    for (int tile = 0; tile < COUNT; tile++) {
        const ClusterTile &t = tiles[tile];
        const int64_t clusters = ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n) * p.batch;
        const int64_t room = device.multiprocessors / (t.cluster_m * t.cluster_n); // clusters that run at once
        for (int64_t pieces = 1; pieces <= MOST_PIECES; pieces++) {
            if (pieces > 1 && (p.k / pieces < SMALLEST_PIECE || clusters * pieces > room))
                break;
            const int64_t waves = ceil_div(clusters * pieces, room);
            double time = (double)waves * (t.sum * (double)ceil_div(p.k, pieces) / 1024 + t.rest);
            if (pieces > 1)
                time += PIECES_START + (double)(8 * pieces * p.batch * m * n) / PIECES_RATE;
            if ((tile == 0 && pieces == 1) || time < least) {
                least = time;
                best = {tile, (int)pieces, t.group, 0};
            }
        }
    }
    return best;
}

GemmPlan gemm_cluster_persistent_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    if (p.dtype != CUDA_OPS_FLOAT32)
        return quickest(HALVES, p, p.m, p.n, device);
    if (!p.transpose_a && p.transpose_b)
        return quickest(TF32_SHARED, p, p.m, p.n, device);
    // The kernel makes D transposed where A is the operand that wgmma takes as it is stored.
    return p.transpose_a ? quickest(TF32_REGISTERS, p, p.m, p.n, device)
                         : quickest(TF32_REGISTERS, p, p.n, p.m, device);
}

static GemmDevice current_gemm_device()
{
    int device = 0, major = 0, minor = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return {10 * major + minor, multiprocessors};
}

static const GemmRung *rung_numbered(int number)
{
    for (const GemmRung &rung : RUNGS)
        if (rung.number == number)
            return &rung;
    return nullptr;
}

// A dtype beside that of A and B: the same, or float32 with halves.
static bool is_wider_or_same(cuda_ops_dtype other, cuda_ops_dtype dtype)
{
    return other == dtype || (other == CUDA_OPS_FLOAT32 && (dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16));
}

static bool is_valid(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t a_row = p.transpose_a ? p.m : p.k, b_row = p.transpose_b ? p.k : p.n;
    return p.m >= 0 && p.n >= 0 && p.k >= 0 && p.batch >= 0 && p.lda >= a_row && p.ldb >= b_row && p.ldd >= p.n &&
           is_wider_or_same(p.output_dtype, p.dtype) && (!call.bias || is_wider_or_same(p.bias_dtype, p.dtype)) &&
           p.activation >= CUDA_OPS_GEMM_NONE && p.activation <= CUDA_OPS_GEMM_GELU;
}

static const GemmRung *choose(const GemmCall &call, int number, GemmDevice device)
{
    if (!is_valid(call))
        return nullptr;
    if (number != CUDA_OPS_GEMM_FASTEST) {
        const GemmRung *const rung = rung_numbered(number);
        return rung && rung->supports(call, device) ? rung : nullptr;
    }
    for (int candidate : PREFERENCE) {
        const GemmRung *const rung = rung_numbered(candidate);
        if (rung && rung->supports(call, device))
            return rung;
    }
    return nullptr;
}

extern "C" int cuda_ops_gemm_rung_cuda(const cuda_ops_gemm_problem *problem, int rung)
{
    const GemmCall call = {nullptr, nullptr, nullptr, nullptr, nullptr, *problem, nullptr};
    const GemmRung *const chosen = choose(call, rung, current_gemm_device());
    return chosen ? chosen->number : -1;
}

extern "C" const char *cuda_ops_gemm_rung_name_cuda(int rung)
{
    const GemmRung *const found = rung_numbered(rung);
    return found ? found->name : nullptr;
}

extern "C" int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *problem, int rung)
{
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return 0;
    const GemmCall call = {nullptr, nullptr, nullptr, nullptr, nullptr, *problem, nullptr};
    const GemmDevice device = current_gemm_device();
    // The call's pointers may be less aligned than those that are not known here, and then it falls to a later rung.
    int64_t bytes = 0;
    for (const GemmRung &candidate : RUNGS)
        if ((rung == CUDA_OPS_GEMM_FASTEST || rung == candidate.number) && candidate.workspace && is_valid(call) &&
            candidate.supports(call, device)) {
            const int64_t wanted = candidate.workspace(*problem, device);
            bytes = wanted > bytes ? wanted : bytes;
        }
    return bytes;
}

extern "C" cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *workspace,
                                              const cuda_ops_gemm_problem *problem, int rung, cuda_ops_stream stream)
{
    GemmCall call = {d, a, b, bias, workspace, *problem, stream};
    const GemmDevice device = current_gemm_device();
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return is_valid(call) ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
    if (!is_valid(call))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rung != CUDA_OPS_GEMM_FASTEST) {
        const GemmRung *const chosen = choose(call, rung, device);
        return chosen ? chosen->launch(call, device) : CUDA_OPS_INVALID_ARGUMENT;
    }
    // A rung may find, when it launches, that it cannot after all (more tiles than its counters hold, no driver that
    // makes tensor maps): then the next one does it.
    cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof(PREFERENCE) / sizeof(int) && status == CUDA_OPS_INVALID_ARGUMENT; i++) {
        const GemmRung *const candidate = rung_numbered(PREFERENCE[i]);
        if (candidate->supports(call, device))
            status = candidate->launch(call, device);
    }
    return status;
}
