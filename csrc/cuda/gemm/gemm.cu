// gemm: D = activation(alpha * op(A) op(B) + bias). The table of kernels, and the choice among them. A row's number is
// that of its rung in the ladder of lessons, its name the path's: the folder or file here, and CUDA_OPS_GEMM_PATH.
// What the choice takes is in folders of that name; rungs that it never takes are in ladder/.
#include "cuda_ops/gemm.h"

#include "common/common.cuh"
#include "gemm/paths.h"
#include "gemm/times.h"

static const GemmRung RUNGS[] = {
    // 4 to 10: CUDA cores. A second variant of a rung is 10 * rung + variant.
    {4, "naive", "gemm/ladder/04_naive.cu", "gemm_naive_kernel", gemm_naive_supports, nullptr, gemm_naive},
    {5, "coalesced", "gemm/ladder/05_coalesced.cu", "gemm_coalesced_kernel", gemm_coalesced_supports, nullptr,
     gemm_coalesced},
    {6, "shared_memory", "gemm/ladder/06_shared_memory.cu", "gemm_shared_static_kernel", gemm_shared_memory_supports,
     nullptr, gemm_shared_memory},
    {62, "shared_memory_dynamic", "gemm/ladder/06_shared_memory.cu", "gemm_shared_dynamic_kernel",
     gemm_shared_memory_supports, nullptr, gemm_shared_memory_dynamic},
    {71, "register_tile_1d", "gemm/ladder/07_register_tile.cu", "gemm_register_tile_kernel",
     gemm_register_tile_supports, nullptr, gemm_register_tile_1d},
    {7, "register_tile", "gemm/ladder/07_register_tile.cu", "gemm_register_tile_kernel", gemm_register_tile_supports,
     nullptr, gemm_register_tile},
    {8, "vectorised", "gemm/ladder/08_vectorised.cu", "gemm_vectorised_kernel", gemm_vectorised_supports, nullptr,
     gemm_vectorised},
    {9, "warp_tile", "gemm/ladder/09_warp_tile.cu", "gemm_warp_tile_kernel", gemm_warp_tile_supports, nullptr,
     gemm_warp_tile},
    {10, "simt", "gemm/simt/", "gemm_simt_kernel gemm_simt_wide_kernel", gemm_simt_supports, gemm_simt_workspace,
     gemm_simt},
    // 11 to 13: tensor cores.
    {11, "mma", "gemm/mma/", "gemm_mma_kernel gemm_mma_float64_kernel", gemm_mma_supports, gemm_mma_workspace,
     gemm_mma},
    {12, "tma_wgmma", "gemm/ladder/12_tma_wgmma_sm90.cu", "gemm_tma_wgmma_kernel", gemm_tma_wgmma_supports, nullptr,
     gemm_tma_wgmma},
    {13, "sm90", "gemm/sm90/", "gemm_sm90_kernel gemm_sm90_pair_kernel", gemm_sm90_supports, gemm_sm90_workspace,
     gemm_sm90},
    // 14 and 15: products that leave most of the GPU idle, and small ones.
    {14, "sm90_skinny", "gemm/sm90_skinny/", "gemm_sm90_skinny_kernel", gemm_sm90_skinny_supports, nullptr,
     gemm_sm90_skinny},
    {15, "direct", "gemm/direct/", "gemm_direct_kernel gemm_direct_cores_kernel", gemm_direct_supports, nullptr,
     gemm_direct},
};

static const GemmRung *rung_numbered(int number)
{
    for (const GemmRung &rung : RUNGS)
        if (rung.number == number)
            return &rung;
    return nullptr;
}

// How many rows of cluster tiles rung 13 walks as one band: measured for the tiles of large products of halves.
static int band_of(const cuda_ops_gemm_problem &p, const GemmTime &t)
{
    if (p.dtype == CUDA_OPS_FLOAT32)
        return 8;
    return t.n == 256 ? 16 : t.n == 192 ? 6 : 8;
}

// What takes over where nothing is known about times: rungs from the fastest to the one that takes everything.
static const int PREFERENCE[] = {13, 11, 10};

// The choice by shape: of all tiles (gemm/times.h) and cuts of k, the one that takes least time by the model there, but
// no less than the bytes take. It tells the times of whole products to some 5 % where D has many tiles.
static constexpr double BYTES_RATE = 4.2e6; // a microsecond
static constexpr double PIECES_RATE = 3e6;  // of pieces of k that are written and read again
static constexpr double SHOWN = 0.1;
static constexpr int64_t SMALLEST_PIECE = 256, SMALLEST_FLOAT64_PIECE = 128, SMALLEST_DIRECT_PIECE = 32;
static constexpr int64_t LONG_FLOAT64_PIECE = 1024;

// Rungs whose pieces of k the blocks of a cluster make, as many as a power of two.
static bool cuts_in_clusters(int rung)
{
    return rung == 14 || rung == 15;
}

// The waves of the GPU that a product takes; m and n as the kernel sees them.
static int64_t waves_of(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                        GemmDevice device)
{
    const int64_t clusters = ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n) * p.batch * splits;
    const int64_t room = device.multiprocessors * t.blocks / (t.cluster_m * t.cluster_n); // clusters that run at once
    return ceil_div(clusters, room > 0 ? room : 1);
}

static double estimate(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                       GemmDevice device)
{
    const int64_t sum_size = p.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
    const bool cuts_last_wave = t.rung == 11 && p.dtype == CUDA_OPS_FLOAT64 && t.tile == 0 && splits == 1;
    const double waves =
        cuts_last_wave ? gemm_mma_float64_waves(p, device) : (double)waves_of(t, p, m, n, splits, device);
    double time = waves * (t.sum * (double)ceil_div(p.k, splits) / 1024 + t.rest);
    if (splits > 1) // pieces go from block to block, or by way of memory
        time += cuts_in_clusters(t.rung) ? t.split * (double)(splits - 1)
                                         : t.split + (double)(2 * sum_size * splits * p.batch * m * n) / PIECES_RATE;
    const double bytes = (double)dtype_size(p.dtype) *
                         ((double)((p.stride_a == 0 ? 1 : p.batch) * p.m * p.k) +
                          (double)((p.stride_b == 0 ? 1 : p.batch) * p.n * p.k) + (double)(p.batch * p.m * p.n));
    // A little of the lesser of the two, which is not hidden altogether, and tells tiles apart where bytes decide.
    const double copying = bytes / BYTES_RATE;
    return t.start + (time > copying ? time + SHOWN * copying : copying + SHOWN * time);
}

// What a tile takes longer where it reads rows of less than a cache line: rung 14's n values of B beside each other.
static constexpr double NARROW = 1.1;

static bool reads_narrow_rows(const GemmTime &t, const cuda_ops_gemm_problem &p, bool swapped)
{
    const bool n_contiguous = swapped ? p.transpose_a : !p.transpose_b;
    return t.rung == 14 && n_contiguous && t.n * dtype_size(p.dtype) < 128;
}

// Cuts of k that leave every piece enough to do, and all of them room on the GPU at once.
static bool is_worth_splitting(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                               GemmDevice device)
{
    const int64_t blocks =
        ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n) * p.batch * t.cluster_m * t.cluster_n * splits;
    // float64 takes so long for a long k that pieces pay where they fill the last wave.
    const bool fills_waves = t.rung == 11 && p.dtype == CUDA_OPS_FLOAT64 && p.k / splits >= LONG_FLOAT64_PIECE;
    const bool cores = t.rung == 15 && gemm_direct_uses_cores(p, device);
    const int64_t smallest = cores                         ? SMALLEST_DIRECT_PIECE
                             : p.dtype == CUDA_OPS_FLOAT64 ? SMALLEST_FLOAT64_PIECE
                                                           : SMALLEST_PIECE;
    return (t.rung != 15 || device.capability >= 90) && // clusters
           p.k / splits >= smallest && (blocks <= device.multiprocessors * t.blocks || fills_waves);
}

// Whether the tile takes the problem as it is, or with A and B changed so that D is made transposed.
static bool takes(const GemmTime &t, const cuda_ops_gemm_problem &p, bool swapped, GemmDevice device)
{
    switch (t.rung) {
    case 11: // float64's small tile is Hopper's
        return !swapped && (t.tile == 0 || device.capability >= 90);
    case 13: // 128 x 80, which cuts D of few rows as finely as the GPU has SMs, is timed for those alone
        return gemm_sm90_takes(p, t.tile, swapped) && (t.n != 80 || (swapped ? p.n : p.m) <= t.m * t.cluster_m);
    case 14:
        return true;
    default:
        return !swapped;
    }
}

// Whether the row is for blocks that have an SM to themselves, of a tile whose blocks share one where they are many:
// what it says of a wave does not hold for two. (Rung 15's rows are fitted to several.)
template <int COUNT>
static bool is_for_one_wave(const GemmTime (&times)[COUNT], const GemmTime &t)
{
    if (t.rung != 15 && t.blocks == 1)
        for (const GemmTime &other : times)
            if (other.rung == t.rung && other.tile == t.tile && other.blocks > 1)
                return true;
    return false;
}

template <int COUNT>
static GemmPlan quickest(const GemmTime (&times)[COUNT], const GemmCall &call, GemmDevice device, int only,
                         double *microseconds = nullptr)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const bool turns = p.dtype == CUDA_OPS_FLOAT32 && gemm_sm90_tf32_turns(p);
    GemmPlan best = {};
    double least = 0;
    for (const GemmTime &t : times) {
        if ((only && t.rung != only) || !rung_numbered(t.rung)->supports(call, device))
            continue;
        for (int swapped = 0; swapped < 2; swapped++) {
            if (!takes(t, p, swapped, device))
                continue;
            const bool turned = swapped || (turns && t.rung == 13);
            const int64_t m = turned ? p.n : p.m, n = turned ? p.m : p.n;
            for (int splits = 1; splits <= t.splits; splits = cuts_in_clusters(t.rung) ? 2 * splits : splits + 1) {
                if (splits > 1 && !is_worth_splitting(t, p, m, n, splits, device))
                    break;
                if (waves_of(t, p, m, n, splits, device) > 1 && is_for_one_wave(times, t))
                    break;
                const double time =
                    estimate(t, p, m, n, splits, device) * (reads_narrow_rows(t, p, swapped) ? NARROW : 1);
                if (best.rung == 0 || time < least) {
                    least = time;
                    best = {t.rung, t.tile, splits, swapped, t.rung == 13 ? band_of(p, t) : 8};
                }
            }
        }
    }
    if (microseconds)
        *microseconds = least;
    return best;
}

// Rung 13's tile of 128 x 128 gives the warpgroups tiles in turn, and tile 5 is the same with both on each. As fast for
// the products; but where a block has one tile, what finishes it is done by both, and gelu takes long.
static constexpr int IN_TURN = 1, BOTH_ON_ONE = 5;

static bool finishes_long(const GemmPlan &plan, const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan.rung == 13 && plan.tile == IN_TURN && plan.splits == 1 && !p.transpose_a &&
           p.activation > CUDA_OPS_GEMM_RELU &&
           ceil_div(p.m, 256) * ceil_div(p.n, 128) * p.batch <= device.multiprocessors / 2;
}

// A plan of rung 0 where the table has nothing for the problem. only: a rung, or 0.
static GemmPlan plan_for(const GemmCall &call, GemmDevice device, int only)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.dtype == CUDA_OPS_FLOAT16 || p.dtype == CUDA_OPS_BFLOAT16) {
        const GemmPlan plan = quickest(HALVES_TIMES, call, device, only);
        return finishes_long(plan, p, device) ? GemmPlan{13, BOTH_ON_ONE, 1, 0, plan.group} : plan;
    }
    if (p.dtype == CUDA_OPS_FLOAT64)
        return quickest(FLOAT64_TIMES, call, device, only);
    if (p.dtype == CUDA_OPS_FLOAT32 && gemm_direct_uses_cores(p, device)) {
        double direct = 0;
        const GemmPlan plan = quickest(FLOAT32_TIMES, call, device, only, &direct);
        const bool tiled = only == 0 && gemm_simt_microseconds(p, device) < direct;
        return tiled ? GemmPlan{10, 0, 1, 0, 8} : plan;
    }
    if (p.dtype == CUDA_OPS_FLOAT32 && p.transpose_a && !p.transpose_b)
        return quickest(TF32_TN_TIMES, call, device, only);
    if (p.dtype == CUDA_OPS_FLOAT32)
        return !p.transpose_a && p.transpose_b ? quickest(TF32_NT_TIMES, call, device, only)
                                               : quickest(TF32_TIMES, call, device, only);
    return {};
}

// Whether the plan's kernel can leave the preactivation beside D.
static bool can_keep(const GemmPlan &plan)
{
    return plan.rung == 10 || (plan.rung == 13 && plan.splits == 1) || plan.rung == 14;
}

static GemmCall without_pointers(const cuda_ops_gemm_problem &problem)
{
    return {nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr};
}

GemmPlan gemm_sm90_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, 13);
}

GemmPlan gemm_sm90_skinny_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, 14);
}

GemmPlan gemm_mma_float64_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, 11);
}

GemmPlan gemm_direct_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, 15);
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
           p.activation >= CUDA_OPS_GEMM_NONE && p.activation <= CUDA_OPS_GEMM_GELU_TANH;
}

static const GemmRung *choose(const GemmCall &call, int number, GemmDevice device)
{
    if (!is_valid(call))
        return nullptr;
    const bool fastest = number == CUDA_OPS_GEMM_FASTEST;
    if (call.problem.preactivation && number != 10) { // which plans by itself
        const GemmPlan plan = plan_for(call, device, fastest ? 0 : number);
        return can_keep(plan) ? rung_numbered(plan.rung) : nullptr;
    }
    if (!fastest) {
        const GemmRung *const rung = rung_numbered(number);
        return rung && rung->supports(call, device) ? rung : nullptr;
    }
    if (const int planned = plan_for(call, device, 0).rung)
        return rung_numbered(planned);
    for (int candidate : PREFERENCE) {
        const GemmRung *const rung = rung_numbered(candidate);
        if (rung && rung->supports(call, device))
            return rung;
    }
    return nullptr;
}

static cuda_ops_status launch_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (plan.rung) {
    case 11:
        return gemm_mma_planned(call, device, plan);
    case 13:
        return gemm_sm90_planned(call, device, plan);
    case 14:
        return gemm_sm90_skinny_planned(call, device, plan);
    case 15:
        return gemm_direct_planned(call, device, plan);
    default:
        return rung_numbered(plan.rung)->launch(call, device);
    }
}

int gemm_rung_on(const cuda_ops_gemm_problem &problem, GemmDevice device, int rung)
{
    const GemmRung *const chosen = choose(without_pointers(problem), rung, device);
    return chosen ? chosen->number : -1;
}

extern "C" int cuda_ops_gemm_rung_cuda(const cuda_ops_gemm_problem *problem, int rung)
{
    return gemm_rung_on(*problem, current_device(), rung);
}

// The ladder's rungs that the choice never takes are told of too: they can be forced.
static bool is_never_chosen(int rung)
{
    return rung < 10 || rung == 12 || rung > 15;
}

extern "C" int cuda_ops_gemm_paths_cuda(cuda_ops_path_report *reports, int room, const cuda_ops_gemm_problem *problem,
                                        int rung, const cuda_ops_device_facts *device)
{
    const GemmCall call = without_pointers(*problem);
    const GemmDevice on = device ? *device : current_device();
    const int chosen = gemm_rung_on(*problem, on, rung);
    int count = 0;
    for (const GemmRung &row : RUNGS) {
        const Answer supports = row.supports(call, on);
        const Answer is_fast = row.number == chosen && rung == CUDA_OPS_GEMM_FASTEST ? YES
                               : is_never_chosen(row.number) ? no("a rung of the ladder that the choice never takes")
                                                             : no("slower by the times of gemm/times.h");
        if (count < room)
            reports[count] = {row.name,
                              row.file,
                              row.kernels,
                              supports ? is_fast.why_not : supports.why_not,
                              supports,
                              supports && is_fast,
                              row.number == chosen};
        count++;
    }
    return count;
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
    const GemmCall call = without_pointers(*problem);
    const GemmDevice device = current_device();
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
    const GemmDevice device = current_device();
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return is_valid(call) ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
    if (!is_valid(call))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rung != CUDA_OPS_GEMM_FASTEST || problem->preactivation) {
        const GemmRung *const chosen = choose(call, rung, device);
        return chosen ? chosen->launch(call, device) : CUDA_OPS_INVALID_ARGUMENT;
    }
    // A rung may find, when it launches, that it cannot after all (more tiles than its counters hold, no driver that
    // makes tensor maps): then the next one does it.
    const GemmPlan plan = plan_for(call, device, 0);
    cuda_ops_status status = plan.rung ? launch_planned(call, device, plan) : CUDA_OPS_INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof(PREFERENCE) / sizeof(int) && status == CUDA_OPS_INVALID_ARGUMENT; i++) {
        const GemmRung *const candidate = rung_numbered(PREFERENCE[i]);
        if (candidate->supports(call, device))
            status = candidate->launch(call, device);
    }
    return status;
}

static GemmPlan internal(const cuda_ops_gemm_plan &plan)
{
    return {plan.rung, plan.tile, plan.splits, plan.swapped, 8};
}

// A plan that a caller made, for tests and for the tuning: is it one that a kernel knows?
static bool is_plan(const GemmCall &call, GemmDevice device, const cuda_ops_gemm_plan &plan)
{
    const GemmRung *const rung = rung_numbered(plan.rung);
    return is_valid(call) && rung && rung->supports(call, device) && plan.tile >= 0 && plan.splits >= 1 &&
           (!call.problem.preactivation || can_keep(internal(plan))) &&
           plan.splits <= (plan.rung == 11   ? call.problem.dtype == CUDA_OPS_FLOAT64 ? 32 : 1
                           : plan.rung == 13 ? 32
                           : plan.rung == 14 ? 8
                           : plan.rung == 15 ? 16
                                             : 1);
}

extern "C" cuda_ops_status cuda_ops_gemm_plan_cuda(cuda_ops_gemm_plan *plan, const cuda_ops_gemm_problem *problem,
                                                   int rung)
{
    const GemmCall call = without_pointers(*problem);
    const GemmDevice device = current_device();
    const GemmRung *const chosen = choose(call, rung, device);
    if (!chosen)
        return CUDA_OPS_INVALID_ARGUMENT;
    const GemmPlan found = plan_for(call, device, chosen->number);
    // Of the rungs before 13 only 11's float64 has its cuts of k from here.
    const bool cuts = chosen->number >= 13 || (chosen->number == 11 && problem->dtype == CUDA_OPS_FLOAT64);
    *plan = {chosen->number, found.tile, cuts ? found.splits : 1, found.swapped};
    return CUDA_OPS_SUCCESS;
}

extern "C" int64_t cuda_ops_gemm_planned_workspace_cuda(const cuda_ops_gemm_problem *problem,
                                                        const cuda_ops_gemm_plan *plan)
{
    const GemmRung *const rung = rung_numbered(plan->rung);
    if (plan->rung == 11)
        return gemm_mma_planned_workspace(*problem, current_device(), internal(*plan));
    if (plan->rung == 13)
        return gemm_sm90_planned_workspace(*problem, internal(*plan));
    return rung && rung->workspace ? rung->workspace(*problem, current_device()) : 0;
}

extern "C" cuda_ops_status cuda_ops_gemm_planned_cuda(void *d, const void *a, const void *b, const void *bias,
                                                      void *workspace, const cuda_ops_gemm_problem *problem,
                                                      const cuda_ops_gemm_plan *plan, cuda_ops_stream stream)
{
    const GemmCall call = {d, a, b, bias, workspace, *problem, stream};
    const GemmDevice device = current_device();
    if (!is_plan(call, device, *plan))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return CUDA_OPS_SUCCESS;
    return launch_planned(call, device, internal(*plan));
}
