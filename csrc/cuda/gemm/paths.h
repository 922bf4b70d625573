// What all paths share: a call, a row of the table, a plan. gemm.cu holds the table.
#ifndef CUDA_OPS_GEMM_PATHS_H
#define CUDA_OPS_GEMM_PATHS_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/paths.h"
#include "cuda_ops/gemm.h"

// One call as a launcher gets it. gemm.cu has checked the sizes (m, n, batch > 0, k >= 0), so that a launcher only
// launches.
struct GemmCall {
    void *d;
    const void *a, *b, *bias;
    void *workspace;
    cuda_ops_gemm_problem problem;
    cudaStream_t stream;
};

typedef Device GemmDevice;

// The numbers of the paths that production takes, and of tma_wgmma (ladder/).
enum {
    GEMM_SIMT = 10,
    GEMM_MMA,
    GEMM_TMA_WGMMA,
    GEMM_SM90,
    GEMM_SM90_SKINNY,
    GEMM_DIRECT,
    GEMM_PADDED,
    GEMM_NARROW,
    GEMM_SM90_3XTF32
};

// cuda_ops_gemm_path_cuda for any device.
int gemm_path_on(const cuda_ops_gemm_problem &problem, GemmDevice device, int path = CUDA_OPS_GEMM_FASTEST);

// A row of the table. `supports` sees the call's pointers too (alignment); they are NULL where only the problem is
// asked about, and NULL counts as aligned. `workspace` may be NULL for a path that needs none.
struct GemmPath {
    int number;
    const char *name, *file, *kernels; // cuda_ops_path_report's
    Answer (*supports)(const GemmCall &call, GemmDevice device);
    int64_t (*workspace)(const cuda_ops_gemm_problem &problem, GemmDevice device);
    cuda_ops_status (*launch)(const GemmCall &call, GemmDevice device);
};

static constexpr Answer GEMM_NEEDS_TF32 = {"takes float32 only where TF32 is allowed"};

// Clusters that run at once of those that so many blocks would be. Those of more than two blocks are fewer than that, since
// a cluster's SMs are of one part of the GPU: 15 of eight on the 132 of an H100 or H200.
static inline int64_t clusters_at_once(int64_t blocks, int64_t cluster)
{
    const int64_t room = cluster > 2 ? blocks * 10 / 11 / cluster : blocks / cluster;
    return room > 0 ? room : 1;
}

// The call with A and B exchanged: D^T = op(B)^T op(A)^T. The pitches of D stay D's.
static inline GemmCall exchanged(const GemmCall &call)
{
    GemmCall other = call;
    const cuda_ops_gemm_problem &p = call.problem;
    cuda_ops_gemm_problem &q = other.problem;
    other.a = call.b, other.b = call.a;
    q.m = p.n, q.n = p.m;
    q.lda = p.ldb, q.ldb = p.lda;
    q.stride_a = p.stride_b, q.stride_b = p.stride_a;
    q.transpose_a = !p.transpose_b, q.transpose_b = !p.transpose_a;
    return other;
}

// How a problem is done: the path, its tile's number, the splits of k, whether A and B are exchanged so that the kernel
// makes D^T (sm90_skinny, sm90's tile of 80 columns and its pairs; for TF32 sm90 sees to it by itself), and the rows of
// cluster tiles in a band (sm90). padded has sm90's tiles, and from PADDED_SKINNY on sm90_skinny's. gemm.cu picks one
// by shape.
struct GemmPlan {
    int path, tile, splits, swapped, group;
};
static constexpr int PADDED_SKINNY = 32;

GemmPlan gemm_sm90_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
// Whether sm90 has the tile for the problem's dtype and storage order.
bool gemm_sm90_takes(const cuda_ops_gemm_problem &problem, int tile, bool swapped);
bool gemm_sm90_splits(const cuda_ops_gemm_problem &problem, int tile, bool swapped); // whether it may split k
int64_t gemm_sm90_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan);
cuda_ops_status gemm_sm90_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
// By dtype and storage of A, a file each.
cuda_ops_status gemm_sm90_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_bfloat16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_float16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
// Tiles that a cluster of two blocks makes, each block with half of k.
cuda_ops_status gemm_sm90_pair_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_pair_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
int64_t gemm_sm90_tf32_bytes(const cuda_ops_gemm_problem &problem, int tile);
bool gemm_sm90_tf32_transposes_d(const cuda_ops_gemm_problem &problem);

// sm90_skinny's.
GemmPlan gemm_sm90_skinny_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_skinny_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// padded's: the call as its product's path gets it, with its operands in the workspace (without one, only the sizes hold);
// the bytes of those copies; and the product's plan.
GemmCall gemm_padded_call(const GemmCall &call);
int64_t gemm_padded_bytes(const GemmCall &call);
GemmPlan gemm_padded_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
static inline GemmPlan gemm_padded_product(const GemmPlan &plan)
{
    GemmPlan product = plan;
    product.path = plan.tile < PADDED_SKINNY ? GEMM_SM90 : GEMM_SM90_SKINNY;
    product.tile = plan.tile % PADDED_SKINNY;
    return product;
}
int64_t gemm_padded_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan);
cuda_ops_status gemm_padded_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// narrow's. The splits of a plan are the blocks that share a long k.
GemmPlan gemm_narrow_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
double gemm_narrow_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device);
int64_t gemm_narrow_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan);
cuda_ops_status gemm_narrow_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// direct's. float64, and float32 without TF32, run on the CUDA cores and have several tiles.
bool gemm_direct_uses_cores(const cuda_ops_gemm_problem &problem, GemmDevice device);
GemmPlan gemm_direct_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_direct_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_direct_float32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_direct_float64(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// mma's. float64 has three tiles, and takes its splits of k from the plan.
GemmPlan gemm_mma_float64_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
int64_t gemm_mma_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_mma_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// Waves of float64's tile 0 that a product takes with k whole, where the tiles of the last wave may be split.
double gemm_mma_float64_waves(const cuda_ops_gemm_problem &problem, GemmDevice device);

// The time that simt is expected to take in float32.
double gemm_simt_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device);

// For paths that split k: split i leaves its sums, without alpha, bias and activation, at workspace[i][batch][m][n] in
// the accumulation type; gemm_add_splits makes D of them.
static constexpr int GEMM_SPLITS_IN_FLIGHT = 16; // whose sums a thread of gemm_add_splits loads at once
// How many splits of D's elements gemm_add_splits then has on their way: more where eight warps share them.
int64_t gemm_splits_in_flight(const cuda_ops_gemm_problem &problem, int64_t splits);
int64_t gemm_splits_bytes(const cuda_ops_gemm_problem &problem, int64_t splits);
cuda_ops_status gemm_add_splits(const GemmCall &call, int64_t splits);

// clang-format off
// 4 to 10: CUDA cores.
Answer gemm_naive_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_naive(const GemmCall &call, GemmDevice device);
Answer gemm_coalesced_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_coalesced(const GemmCall &call, GemmDevice device);
Answer gemm_shared_memory_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_shared_memory(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_shared_memory_dynamic(const GemmCall &call, GemmDevice device);
Answer gemm_register_tile_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_register_tile_1d(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_register_tile(const GemmCall &call, GemmDevice device);
Answer gemm_vectorised_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_vectorised(const GemmCall &call, GemmDevice device);
Answer gemm_warp_tile_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_warp_tile(const GemmCall &call, GemmDevice device);
Answer gemm_simt_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_simt_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_simt(const GemmCall &call, GemmDevice device);
// 11 to 13: tensor cores.
Answer gemm_mma_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_mma_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_mma(const GemmCall &call, GemmDevice device);
Answer gemm_tma_wgmma_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_tma_wgmma(const GemmCall &call, GemmDevice device);
Answer gemm_sm90_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_sm90_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90(const GemmCall &call, GemmDevice device);
// 14 and 15: small and skinny products.
Answer gemm_sm90_skinny_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_sm90_skinny(const GemmCall &call, GemmDevice device);
Answer gemm_direct_supports(const GemmCall &call, GemmDevice device);
cuda_ops_status gemm_direct(const GemmCall &call, GemmDevice device);
// 16: products whose operands TMA cannot read.
Answer gemm_padded_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_padded_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_padded(const GemmCall &call, GemmDevice device);
// 17: a long operand with few columns.
Answer gemm_narrow_supports(const GemmCall &call, GemmDevice device);
int64_t gemm_narrow_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_narrow(const GemmCall &call, GemmDevice device);
// clang-format on

#endif
