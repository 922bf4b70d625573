// gemm, sm90_shared_k path: D = activation(alpha * op(A) op(B) + bias) in 16 bits, for few tiles and a long k, as in the
// gradient of a layer's weight. A cluster of 2 to 8 blocks makes a tile of 128 x 128 or 128 x 64: each multiplies its share of k, by
// TMA and wgmma, and then sends the others their columns of its sums through distributed shared memory; each adds, in
// the order of k, what it has got, and stores its columns. So there are no partial sums in memory, and no second kernel
// to add them, or, where k is split before that, fewer of them. Bound by the operands' way to the SMs; the sums' way takes
// about a microsecond for 32 KB a block (as in gemm/sm90/pair.cuh).
#include "gemm/sm90_shared_k/sm90_shared_k.h"

#include "common/common.cuh"

Answer gemm_sm90_shared_k_supports(const GemmCall &call, GemmDevice device)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.dtype != CUDA_OPS_FLOAT16 && p.dtype != CUDA_OPS_BFLOAT16)
        return no("takes 16 bits");
    if (p.preactivation || p.activation > CUDA_OPS_GEMM_RELU)
        return no("has no gelu");
    return gemm_sm90_supports(call, device);
}

// The clusters of 2 to 8 blocks, each with an SM of its own, that an H200 runs at once; those of 3 and more are fewer
// than its 132 SMs are worth, since a cluster's are of one part of the GPU.
static constexpr int TILE_ROWS = 128, STAGE = 64, ROOM[] = {0, 0, 66, 39, 30, 22, 18, 16, 15}, SMS = 132;

// The model of times, of an H200, in microseconds: the start; a stage of 64 of k; the sums' way, by the share of them
// that a block sends; bytes at memory's speed, partly behind that; and the second kernel, where k is split before.
static constexpr double START = 2.2, STAGE_128 = 0.345, STAGE_64 = 0.26, EXCHANGE = 1.0, SENT = 2.2, SHOWS = 0.3,
                        BYTES_RATE = 4.2e6;
static constexpr double SPLIT = 1.9, SPLIT_BYTES_RATE = 3.7e6, ADDING_ROUND = 0.8;

static bool is_shared_tile(int tile)
{
    const int shares = shares_of(tile);
    return tile <= NARROW_SHARED_TILE + MOST_SHARED_K && shares >= LEAST_SHARED_K && shares <= MOST_SHARED_K;
}

static int64_t clusters_at_once(int shares, GemmDevice device)
{
    return (int64_t)ROOM[shares] * device.multiprocessors / SMS;
}

static int64_t tiles_of(const cuda_ops_gemm_problem &p, int tile)
{
    return ceil_div(p.m, TILE_ROWS) * ceil_div(p.n, is_narrow_shared_tile(tile) ? 64 : 128) * p.batch;
}

static double microseconds(const cuda_ops_gemm_problem &p, GemmDevice device, int tile, int64_t splits)
{
    const bool narrow = is_narrow_shared_tile(tile);
    const int shares = shares_of(tile);
    const double stages = (double)ceil_div(ceil_div(p.k, STAGE), shares * splits);
    const double waves = (double)ceil_div(tiles_of(p, tile) * splits, clusters_at_once(shares, device));
    const double time = waves * (stages * (narrow ? STAGE_64 : STAGE_128) + EXCHANGE +
                                 SENT * (narrow ? 0.5 : 1) * (shares - 1) / shares);
    const double bytes = 2.0 * (double)p.batch * (double)(p.m * p.k + p.k * p.n + p.m * p.n) / BYTES_RATE;
    double all = START + (time > bytes ? time + SHOWS * bytes : bytes + SHOWS * time);
    if (splits > 1)
        all += SPLIT + 8.0 * (double)(splits * p.batch * p.m * p.n) / SPLIT_BYTES_RATE +
               ADDING_ROUND * (double)((splits - 1) / gemm_splits_in_flight(p, splits));
    return all;
}

GemmPlan gemm_sm90_shared_k_plan(const cuda_ops_gemm_problem &p, GemmDevice device, double *least)
{
    GemmPlan best = {};
    for (int tile = LEAST_SHARED_K; tile <= NARROW_SHARED_TILE + MOST_SHARED_K; tile++) {
        if (!is_shared_tile(tile))
            continue;
        const int64_t room = clusters_at_once(shares_of(tile), device) / tiles_of(p, tile);
        const int64_t stages = p.k / (shares_of(tile) * STAGE), most = room < stages ? room : stages;
        for (int64_t splits = 1; (best.path == 0 && splits == 1) || splits <= most;
             splits = next_splits(splits, most)) {
            const double time = microseconds(p, device, tile, splits);
            if (best.path == 0 || time < *least) {
                *least = time;
                best = {GEMM_SM90_SHARED_K, tile, (int)splits, 0, 8};
            }
        }
    }
    return best;
}

int64_t gemm_sm90_shared_k_workspace(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    double least = 0;
    return gemm_splits_bytes(p, gemm_sm90_shared_k_plan(p, device, &least).splits);
}

cuda_ops_status gemm_sm90_shared_k_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    if (!gemm_sm90_shared_k_supports(call, device) || plan.swapped || !is_shared_tile(plan.tile))
        return CUDA_OPS_INVALID_ARGUMENT;
    return call.problem.dtype == CUDA_OPS_BFLOAT16 ? gemm_sm90_shared_k_bfloat16(call, device, plan)
                                                   : gemm_sm90_shared_k_float16(call, device, plan);
}

cuda_ops_status gemm_sm90_shared_k(const GemmCall &call, GemmDevice device)
{
    double least = 0;
    return gemm_sm90_shared_k_planned(call, device, gemm_sm90_shared_k_plan(call.problem, device, &least));
}
