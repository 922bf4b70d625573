// gemm, narrow path: a long operand with few columns, as 1x1 convolutions between few channels have it:
//
//   D = activation(alpha * A op(B) + bias)    A m x k, D m x n, with a long m and short rows    (narrow/rows.cuh)
//   D = activation(alpha * A^T B + bias)      A k x m, B k x n, with a long k and a small D     (narrow/columns.cuh)
//   D = activation(alpha * op(A) op(B) + bias)    with a short k and long rows of D             (narrow/outer.cuh)
//
// In the first two the rows of the long operands follow one another without a gap, so that they stream as one stretch
// of memory, whatever a row's length, and whatever tiles of wgmma or rows of TMA it would fill. Each warp has a pipeline
// of its own. Bound by memory: A and D, or A and B, once; 1.3 to 3.2 TB/s of 18 MB and more, up to 88
// columns wide, start included, on an H200.
// From compute capability 8.0 on.
#include "gemm/narrow/narrow.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int MOST_COLUMNS = 256, TILE = 16;

// Stages of the pipeline: as many as let two blocks share an SM, or else one have it; 0: not even two. *sharing: which.
template <typename Bytes>
static int stages_of(GemmDevice device, const Bytes &bytes, int *sharing)
{
    constexpr int RESERVED = 1024; // of each block
    for (int blocks = 2; blocks >= 1; blocks--)
        for (int stages = 4; stages >= 2; stages--)
            if (bytes(stages) + RESERVED <= (device.shared_bytes + RESERVED) / blocks) {
                *sharing = blocks;
                return stages;
            }
    return 0;
}

static NarrowRows rows_of(const GemmCall &call, GemmDevice device, int *sharing)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int size = (int)dtype_size(p.dtype);
    NarrowRows work = {};
    work.a = call.a, work.b = call.b, work.bias = call.bias, work.d = call.d;
    work.rows = p.m, work.k = (int)p.k, work.n = (int)p.n;
    work.b_k = p.transpose_b ? 1 : (int)p.ldb, work.b_n = p.transpose_b ? (int)p.ldb : 1;
    work.alpha = (float)p.alpha;
    work.relu = p.activation == CUDA_OPS_GEMM_RELU;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.groups = (int)ceil_div(p.n, TILE);
    if (work.groups > 2)
        work.groups = (int)ceil_div(work.groups, 4) * 4;
    work.b_bytes = (int)ceil_div(p.k, TILE) * TILE * work.groups * TILE * size;
    const auto warp_bytes = [&](int stages) { return NARROW_RUN * (stages * work.k + work.n) * size; };
    work.stages =
        stages_of(device, [&](int stages) { return work.b_bytes + NARROW_WARPS * warp_bytes(stages); }, sharing);
    work.warp_bytes = warp_bytes(work.stages);
    return work;
}

// By the shape of pieces, A and B exchanged or not, that makes D of the fewest and, of as many, the smallest.
static NarrowColumns columns_of(const GemmCall &call, GemmDevice device, int *pieces, int *sharing)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int size = (int)dtype_size(p.dtype), tiles_m = (int)ceil_div(p.m, TILE), tiles_n = (int)ceil_div(p.n, TILE);
    NarrowColumns work = {};
    bool exchanged = false;
    *pieces = 0;
    for (const auto &piece : NARROW_PIECES)
        for (int other = 0; other < 2; other++) {
            const int along_m = (int)ceil_div(other ? tiles_n : tiles_m, piece[0]);
            const int along_n = (int)ceil_div(other ? tiles_m : tiles_n, piece[1]);
            if (*pieces > 0 && along_m * along_n >= *pieces)
                continue;
            *pieces = along_m * along_n;
            exchanged = other;
            work.pieces_m = along_m, work.tiles_m = piece[0], work.tiles_n = piece[1];
        }
    work.a = exchanged ? call.b : call.a, work.b = exchanged ? call.a : call.b;
    work.partial = (float *)call.workspace;
    work.rows = p.k;
    work.m = (int)(exchanged ? p.n : p.m), work.n = (int)(exchanged ? p.m : p.n);
    work.row_step = exchanged ? 1 : (int)p.n, work.column_step = exchanged ? (int)p.n : 1;
    const int stage_bytes = NARROW_RUN * (work.m + work.n) * size;
    work.stages = stages_of(
        device,
        [&](int stages) {
            NarrowColumns tried = work;
            tried.warp_bytes = stages * stage_bytes;
            return narrow_columns_bytes(tried, size);
        },
        sharing);
    if (work.tiles_m * work.tiles_n > 8) // by its registers
        *sharing = 1;
    work.warp_bytes = work.stages * stage_bytes;
    return work;
}

// A short k and long rows of D, whatever the storage order.
static bool is_outer(const cuda_ops_gemm_problem &p)
{
    return p.k <= (p.dtype == CUDA_OPS_FLOAT32 ? NARROW_SHORT_K : NARROW_SHORT_K_OF_HALVES) && p.n > MOST_COLUMNS;
}

static bool is_sum_over_rows(const cuda_ops_gemm_problem &p)
{
    return p.transpose_a && !p.transpose_b && !is_outer(p);
}

static NarrowOuter outer_of(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    NarrowOuter work = {};
    work.a = call.a, work.b = call.b, work.bias = call.bias, work.d = call.d;
    work.m = p.m, work.n = p.n, work.k = (int)p.k;
    work.a_m = p.transpose_a ? 1 : p.lda, work.a_k = p.transpose_a ? p.lda : 1;
    work.b_k = p.transpose_b ? 1 : p.ldb, work.b_n = p.transpose_b ? p.ldb : 1;
    work.ldd = p.ldd;
    work.alpha = (float)p.alpha;
    work.relu = p.activation == CUDA_OPS_GEMM_RELU;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.fours = p.n % 4 == 0 && p.ldd % 4 == 0 && is_aligned_16(call.d);
    const bool fours = !p.unaligned_b && p.ldb % 4 == 0 && is_aligned_16(call.b);
    work.fours_b = fours && !p.transpose_b && p.n % 4 == 0;
    work.fours_b_k = fours && p.transpose_b && p.k % 4 == 0;
    return work;
}

Answer gemm_narrow_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability < 80)
        return NEEDS_80;
    if (p.dtype == CUDA_OPS_FLOAT64 || p.batch != 1 || p.m == 0 || p.n == 0 || p.k == 0 || p.preactivation)
        return no("takes no float64, batches, sizes of zero or preactivation");
    if (is_outer(p))
        return p.output_dtype == p.dtype && p.activation <= CUDA_OPS_GEMM_RELU ? YES
                                                                               : no("stores another dtype, or gelu");
    if (p.unaligned_a || !is_aligned_16(call.a))
        return no("A is not aligned to 16 bytes");
    if (is_sum_over_rows(p)) {
        if (p.lda != p.m || p.ldb != p.n)
            return no("rows of A or B do not follow one another");
        if (p.unaligned_b || !is_aligned_16(call.b))
            return no("B is not aligned to 16 bytes");
        if (p.m > MOST_COLUMNS || p.n > MOST_COLUMNS)
            return no("rows are long");
        int pieces = 0, sharing = 0;
        return columns_of(call, device, &pieces, &sharing).stages > 0 && pieces <= MOST_NARROW_PIECES
                   ? YES
                   : no("D is large");
    }
    if (p.transpose_a || p.lda != p.k || p.ldd != p.n)
        return no("rows of A or D do not follow one another");
    if (!is_aligned_16(call.d))
        return no("D is not aligned to 16 bytes");
    if (p.output_dtype != p.dtype || p.activation > CUDA_OPS_GEMM_RELU)
        return no("stores another dtype, or gelu");
    if (p.k > MOST_COLUMNS || p.n > MOST_COLUMNS || p.ldb > INT32_MAX / MOST_COLUMNS)
        return no("rows are long");
    int sharing = 0;
    return rows_of(call, device, &sharing).stages > 0 ? YES : no("rows are long");
}

// The model of times, of an H200, in microseconds: the start; what a warp takes for a run, by the tiles of 16 x 16 that
// it multiplies; bytes of the operands, partly behind that; and of a D that is summed, the partial sums, and the sums
// of a block's warps. Fitted to 27 and 33 plans in 16 bits, 11 and 34 in float32, half of them within 6 %.
struct NarrowTimes {
    double start, run, tile, megabyte, million_sums, block;
};
static constexpr NarrowTimes ROWS_16 = {1.94, 0, 0.017, 0.352, 0, 0}, ROWS_32 = {1.46, 0, 0.520, 0.254, 0, 0};
static constexpr NarrowTimes COLUMNS_16 = {1.01, 0.487, 0.0442, 0.062, 20.8, 2.46};
static constexpr NarrowTimes COLUMNS_32 = {2.35, 0.899, 0.2886, 0.062, 17.2, 1.12};
// And of a long D in 16 bits: what 16 columns of a run take to be stored, and 16 x 16 of B to be brought into order.
static constexpr double STORED_COLUMNS = 0.216, ORDERED_TILE = 0.104;

static GemmCall of_sizes(const cuda_ops_gemm_problem &p)
{
    return {nullptr, nullptr, nullptr, nullptr, nullptr, p, nullptr};
}

static double rows_microseconds(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    int sharing = 1;
    const NarrowRows work = rows_of(of_sizes(p), device, &sharing);
    const bool halves = p.dtype != CUDA_OPS_FLOAT32;
    const NarrowTimes &t = halves ? ROWS_16 : ROWS_32;
    const double warps = (double)(device.multiprocessors * sharing * NARROW_WARPS);
    const double runs = (double)ceil_div(p.m, NARROW_RUN) / warps, tiles = (double)(ceil_div(p.k, TILE) * work.groups);
    return t.start + (halves ? ORDERED_TILE * tiles : 0) +
           t.megabyte * 1e-6 * (double)(dtype_size(p.dtype) * p.m * (p.k + p.n)) +
           (runs > 1 ? runs : 1) * (t.tile * tiles + (halves ? STORED_COLUMNS * work.groups : 0));
}

// *splits: that take least, of as many blocks as the GPU runs at once.
static double columns_microseconds(const cuda_ops_gemm_problem &p, GemmDevice device, int64_t *splits)
{
    int pieces = 0, sharing = 1;
    const NarrowColumns work = columns_of(of_sizes(p), device, &pieces, &sharing);
    const NarrowTimes &t = p.dtype == CUDA_OPS_FLOAT32 ? COLUMNS_32 : COLUMNS_16;
    const int64_t most = device.multiprocessors * sharing / pieces, runs = ceil_div(p.k, NARROW_RUN);
    double least = 0;
    for (int64_t tried = 1; tried <= most; tried += 1 + tried / 16) {
        const double time =
            (double)ceil_div(runs, tried * NARROW_WARPS) * (t.run + t.tile * work.tiles_m * work.tiles_n) +
            t.million_sums * 1e-6 * (double)(tried * p.m * p.n);
        if (tried == 1 || time < least)
            least = time, *splits = tried;
    }
    return t.start + least + t.block * pieces + t.megabyte * 1e-6 * (double)(dtype_size(p.dtype) * p.k * (p.m + p.n));
}

// By D's bytes, or by a thread's instructions: for each four elements of D k products of them, and some 16 besides. B's
// columns are loaded first, k by k; in 16 bits they are as many loads of half the bytes.
struct OuterTimes {
    double start, k, bytes_rate;
};
static constexpr OuterTimes OUTER_16 = {2.6, 0.45, 2.95e6}, OUTER_32 = {1.9, 0.12, 3.4e6};
// In 16 bits how many times as long D's bytes take where a row is that of several blocks.
static constexpr double OUTER_LONG_ROWS = 1.3;
// Microseconds for each of k that float32's B takes longer stored n x k: its columns are not side by side. And how many
// times as long D's bytes take in 16 bits where its rows begin within sectors.
static constexpr double OUTER_TURNED = 0.2, OUTER_WITHIN_SECTORS = 1.7;
static constexpr double OUTER_INSTRUCTIONS = 16,
                        OUTER_RATE = 3500; // of a warp, on each multiprocessor in a microsecond

static double outer_microseconds(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    const OuterTimes &t = p.dtype == CUDA_OPS_FLOAT32 ? OUTER_32 : OUTER_16;
    const double k = p.k <= 2 ? 2 : p.k <= 4 ? 4 : p.k <= 8 ? 8 : 16;
    const bool halves = p.dtype != CUDA_OPS_FLOAT32;
    const double bytes = (double)(dtype_size(p.dtype) * (p.m * p.k + p.k * p.n + p.m * p.n)) / t.bytes_rate *
                         (halves && p.n > OUTER_BLOCK_COLUMNS ? OUTER_LONG_ROWS : 1) *
                         (halves && p.ldd * 2 % 32 != 0 ? OUTER_WITHIN_SECTORS : 1);
    const double instructions = (double)p.m * (double)p.n / (4 * WARP_SIZE) * (4 * k + OUTER_INSTRUCTIONS) /
                                (OUTER_RATE * device.multiprocessors);
    const double turned = p.transpose_b && !halves ? OUTER_TURNED : 0;
    return t.start + (t.k + turned) * k + (bytes > instructions ? bytes : instructions);
}

double gemm_narrow_microseconds(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    int64_t splits = 1;
    if (is_outer(p))
        return outer_microseconds(p, device);
    return is_sum_over_rows(p) ? columns_microseconds(p, device, &splits) : rows_microseconds(p, device);
}

GemmPlan gemm_narrow_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    int64_t splits = 1;
    if (is_sum_over_rows(p))
        columns_microseconds(p, device, &splits);
    return {GEMM_NARROW, 0, (int)splits, 0, 8};
}

int64_t gemm_narrow_planned_workspace(const cuda_ops_gemm_problem &p, const GemmPlan &plan)
{
    // One split leaves its sums there too.
    return is_sum_over_rows(p) ? plan.splits * p.m * p.n * (int64_t)sizeof(float) : 0;
}

int64_t gemm_narrow_workspace(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return gemm_narrow_planned_workspace(p, gemm_narrow_plan(p, device));
}

cuda_ops_status gemm_narrow_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (!gemm_narrow_supports(call, device) || plan.tile != 0 || plan.swapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool float32 = p.dtype == CUDA_OPS_FLOAT32, bfloat16 = p.dtype == CUDA_OPS_BFLOAT16;
    if (is_outer(p)) {
        const auto launch = float32    ? gemm_narrow_outer_float32
                            : bfloat16 ? gemm_narrow_outer_bfloat16
                                       : gemm_narrow_outer_float16;
        return plan.splits == 1 ? launch(outer_of(call), device, call.stream) : CUDA_OPS_INVALID_ARGUMENT;
    }
    if (!is_sum_over_rows(p)) {
        int sharing = 0;
        const NarrowRows work = rows_of(call, device, &sharing);
        const auto launch = float32    ? gemm_narrow_rows_float32
                            : bfloat16 ? gemm_narrow_rows_bfloat16
                                       : gemm_narrow_rows_float16;
        return plan.splits == 1 ? launch(work, device, call.stream) : CUDA_OPS_INVALID_ARGUMENT;
    }
    if (!call.workspace)
        return CUDA_OPS_INVALID_ARGUMENT;
    int pieces = 0, sharing = 0;
    const NarrowColumns work = columns_of(call, device, &pieces, &sharing);
    const auto launch = float32    ? gemm_narrow_columns_float32
                        : bfloat16 ? gemm_narrow_columns_bfloat16
                                   : gemm_narrow_columns_float16;
    const cuda_ops_status status = launch(work, plan.splits, pieces, call.stream);
    return status == CUDA_OPS_SUCCESS ? gemm_add_splits(call, plan.splits) : status;
}

cuda_ops_status gemm_narrow(const GemmCall &call, GemmDevice device)
{
    return gemm_narrow_planned(call, device, gemm_narrow_plan(call.problem, device));
}
