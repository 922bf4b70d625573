// What the rungs of the ladder share: how one is called, and the table's rows. gemm.cu holds the table.
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

// What cuda_ops_gemm_rung_cuda says of a device.
int gemm_rung_on(const cuda_ops_gemm_problem &problem, GemmDevice device, int rung = CUDA_OPS_GEMM_FASTEST);

// Each rung's file ends with the three functions of its row. `supports` sees the call's pointers too (alignment), which
// are NULL when only the problem is asked about; NULL counts as aligned. `workspace` may be NULL for a rung that needs
// none.
struct GemmRung {
    int number;
    const char *name, *file, *kernels; // cuda_ops_path_report's
    Answer (*supports)(const GemmCall &call, GemmDevice device);
    int64_t (*workspace)(const cuda_ops_gemm_problem &problem, GemmDevice device);
    cuda_ops_status (*launch)(const GemmCall &call, GemmDevice device);
};

static constexpr Answer GEMM_NEEDS_TF32 = {"takes float32 only where TF32 is allowed"};

// The product that makes D transposed: D^T = op(B)^T op(A)^T. The pitches of D stay D's.
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

// How a problem is done: the rung, its tile's number, the pieces that k is split in, whether A and B change
// places so that D is made transposed (rung 14, rung 13's tile of 80 columns and its pairs; for TF32 rung 13 sees to it
// by itself), and the cluster tiles that are walked as one band (rung 13). gemm.cu picks one by shape.
struct GemmPlan {
    int rung, tile, splits, swapped, group;
};
GemmPlan gemm_sm90_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
// Whether it has the tile for the problem's dtype and storage order.
bool gemm_sm90_takes(const cuda_ops_gemm_problem &problem, int tile, bool swapped);
int64_t gemm_sm90_planned_workspace(const cuda_ops_gemm_problem &problem, const GemmPlan &plan);
cuda_ops_status gemm_sm90_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
// Its parts by dtype and storage of A.
cuda_ops_status gemm_sm90_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_bfloat16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_float16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
// Tiles that two blocks make together, each with half of k.
cuda_ops_status gemm_sm90_pair_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_pair_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_small_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
int64_t gemm_sm90_tf32_bytes(const cuda_ops_gemm_problem &problem, int tile);
bool gemm_sm90_tf32_turns(const cuda_ops_gemm_problem &problem);

// Rung 14's.
GemmPlan gemm_sm90_skinny_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_sm90_skinny_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_sm90_skinny_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// Rung 15's. float64, and float32 where TF32 is not to be used, go by the CUDA cores and have tiles to choose from.
bool gemm_direct_uses_cores(const cuda_ops_gemm_problem &problem, GemmDevice device);
GemmPlan gemm_direct_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
cuda_ops_status gemm_direct_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_direct_float32(const GemmCall &call, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_direct_float64(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// Rung 11's. float64 has three tiles, and its cuts of k are the plan's.
GemmPlan gemm_mma_float64_plan(const cuda_ops_gemm_problem &problem, GemmDevice device);
int64_t gemm_mma_planned_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device, const GemmPlan &plan);
cuda_ops_status gemm_mma_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan);

// How many waves of float64's tile 0 its products take with k whole, where the last wave's tiles may be cut.
double gemm_mma_float64_waves(const cuda_ops_gemm_problem &problem, GemmDevice device);

// About how long rung 10 takes in float32.
double gemm_simt_microseconds(const cuda_ops_gemm_problem &problem, GemmDevice device);

// For rungs that split k: piece i leaves its products, neither scaled nor finished, at workspace[i][batch][m][n] in the
// accumulation type; gemm_add_pieces makes D of them.
int64_t gemm_pieces_bytes(const cuda_ops_gemm_problem &problem, int64_t pieces);
cuda_ops_status gemm_add_pieces(const GemmCall &call, int64_t pieces);

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
// clang-format on

#endif
