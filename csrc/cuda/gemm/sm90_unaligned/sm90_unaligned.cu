// gemm, sm90_unaligned path: D = activation(alpha * op(A) op(B) + bias) in 16 bits where rows of A, B or D are multiples
// of 4 or 8 bytes, but not of 16, so that TMA cannot move them. A block makes one tile of 128 x 128 or 128 x 256, or of
// 128 x 64 of which two share an SM: a warpgroup copies by cp.async, 4, 8 or 16 bytes a thread, to where wgmma reads, and two
// multiply. Nothing is copied beside the product, as padded does, so that it is for products of few microseconds; where
// they are long its copies' instructions show: a stage of 128 x 128 x 64 in fours is 256 of a warp. D leaves through
// shared memory, as many bytes at once as its rows allow. k is split where tiles are few. Bound by the copies'
// instructions, or memory.
#include "gemm/sm90_unaligned/sm90_unaligned.h"

#include "common/common.cuh"
#include "common/tensor_map.h"

// The largest of 16, 8, 4 and less that all are multiples of.
static int copy_width(const cuda_ops_gemm_problem &p, const void *address, int64_t row, int64_t pitch, int64_t stride)
{
    const int64_t all = 2 * (row | pitch | (p.batch > 1 ? stride : 0)) | (int64_t)(uintptr_t)address;
    return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 2;
}

CopyWidths gemm_copy_widths(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return {copy_width(p, call.a, p.transpose_a ? p.m : p.k, p.lda, p.stride_a),
            copy_width(p, call.b, p.transpose_b ? p.k : p.n, p.ldb, p.stride_b)};
}

static GemmCall of_sizes(const cuda_ops_gemm_problem &p)
{
    return {nullptr, nullptr, nullptr, nullptr, nullptr, p, nullptr};
}

Answer gemm_sm90_unaligned_supports(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability != 90)
        return NEEDS_90;
    if ((p.dtype != CUDA_OPS_FLOAT16 && p.dtype != CUDA_OPS_BFLOAT16) || p.m == 0 || p.n == 0 || p.k == 0 ||
        p.batch == 0)
        return no("takes 16 bits, and no size of zero");
    if (p.preactivation || p.activation > CUDA_OPS_GEMM_RELU)
        return no("has no gelu");
    constexpr int64_t MOST = INT32_MAX / 4; // rows of bytes, and beyond a last tile
    if (p.m > MOST || p.n > MOST || p.k > MOST || p.batch > MOST)
        return no("a size is too large");
    const CopyWidths widths = gemm_copy_widths(call);
    return !p.unaligned_a && !p.unaligned_b && widths.a >= 4 && widths.b >= 4
               ? YES
               : no("rows of A or B are no multiple of 4 bytes, or not aligned to as many");
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

bool gemm_sm90_unaligned_is_for(const cuda_ops_gemm_problem &p)
{
    const CopyWidths widths = gemm_copy_widths(of_sizes(p));
    return widths.a < 16 || widths.b < 16 || p.ldd * dtype_size(p.output_dtype) % 16 != 0;
}

// The model of times, in microseconds: the start; a stage of 64 of k, by the instructions of its copies (of all blocks of
// an SM) and by its products; what a tile takes beside; bytes at memory's speed, which mostly show beside that; and the
// second kernel, which adds splits. Fitted to 185 plans of 22 products on an H100 and to two large ones on an H200, 17 %
// off as a root of the mean square.
static constexpr double START = 1.17, COPY = 0.00494, PRODUCTS = 0.474, LATENCY = 0.593, TILE = 0.63, SHOWS = 1.21;
static constexpr double OF_256 = 0.8; // of twice the products of 128 columns
static constexpr double BYTES_RATE = 4.59e6, SPLIT = 1.6, SPLIT_BYTES_RATE = 4.5e6, ADDING_ROUND = 0.803;
static constexpr double STORED_BY_FOUR = 0.632,
                        STORED_BY_TWO = 1.68; // of a tile, where D's rows are multiples of no more
static constexpr int TILES[] = {128, 64, 256}, TILE_COUNT = 3, TILE_ROWS = 128, STAGE = 64, SHARING[] = {1, 2, 1};

static double microseconds(const cuda_ops_gemm_problem &p, GemmDevice device, int tile, int64_t splits)
{
    const CopyWidths widths = gemm_copy_widths(of_sizes(p));
    const int64_t columns = TILES[tile], sharing = SHARING[tile];
    const int64_t tiles = ceil_div(p.m, TILE_ROWS) * ceil_div(p.n, columns) * p.batch, room = device.multiprocessors;
    const double a_lines = (double)(p.m < TILE_ROWS ? p.m : TILE_ROWS),
                 b_lines = (double)(p.n < columns ? p.n : columns);
    // Instructions of a warp, 32 copies each.
    const double copies = 4 * a_lines / widths.a + 4 * b_lines / widths.b;
    const double blocks = (double)ceil_div(tiles * splits, room); // of the SM that has most
    const double waves = (double)ceil_div(tiles * splits, room * sharing);
    const double at_once = blocks < (double)sharing ? blocks : (double)sharing;
    const double copying = at_once * COPY * copies;
    const double products = at_once * PRODUCTS * (double)columns / 128 * (columns == 256 ? OF_256 : 1);
    const double stages = (double)ceil_div(ceil_div(p.k, splits), STAGE);
    const int64_t row = p.ldd * dtype_size(p.output_dtype);
    const double stored = splits > 1 || row % 8 == 0 ? 0 : row % 4 == 0 ? STORED_BY_FOUR : STORED_BY_TWO;
    const double tile_time = LATENCY + stages * (copying > products ? copying : products) +
                             at_once * (TILE + stored) * (double)columns / 128;
    const double bytes = 2.0 * (double)p.batch * (double)(p.m * p.k + p.k * p.n + p.m * p.n) / BYTES_RATE;
    const double time = waves * tile_time;
    double all = START + (time > bytes ? time + SHOWS * bytes : bytes + SHOWS * time);
    if (splits > 1)
        all += SPLIT + 8.0 * (double)(splits * p.batch * p.m * p.n) / SPLIT_BYTES_RATE +
               ADDING_ROUND * (double)((splits - 1) / gemm_splits_in_flight(p, splits));
    return all;
}

GemmPlan gemm_sm90_unaligned_plan(const cuda_ops_gemm_problem &p, GemmDevice device, double *least)
{
    GemmPlan best = {};
    for (int tile = 0; tile < TILE_COUNT; tile++) {
        const int64_t tiles = ceil_div(p.m, TILE_ROWS) * ceil_div(p.n, TILES[tile]) * p.batch;
        const int64_t room = device.multiprocessors * SHARING[tile] / tiles, stages = p.k / STAGE;
        // More than 128 columns are for many tiles.
        const int64_t most = TILES[tile] > 128 ? 1 : room < stages ? room : stages;
        for (int64_t splits = 1; splits == 1 || splits <= most; splits = next_splits(splits, most)) {
            const double time = microseconds(p, device, tile, splits);
            if (best.path == 0 || time < *least) {
                *least = time;
                best = {GEMM_SM90_UNALIGNED, tile, (int)splits, 0, 8};
            }
        }
    }
    return best;
}

int64_t gemm_sm90_unaligned_workspace(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    double least = 0;
    return gemm_splits_bytes(p, gemm_sm90_unaligned_plan(p, device, &least).splits);
}

cuda_ops_status gemm_sm90_unaligned_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    if (!gemm_sm90_unaligned_supports(call, device) || plan.swapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    return call.problem.dtype == CUDA_OPS_BFLOAT16 ? gemm_sm90_unaligned_bfloat16(call, device, plan)
                                                   : gemm_sm90_unaligned_float16(call, device, plan);
}

cuda_ops_status gemm_sm90_unaligned(const GemmCall &call, GemmDevice device)
{
    double least = 0;
    return gemm_sm90_unaligned_planned(call, device, gemm_sm90_unaligned_plan(call.problem, device, &least));
}
