// narrow's three kernels: their work, and the launchers by dtype.
#ifndef CUDA_OPS_GEMM_NARROW_NARROW_H
#define CUDA_OPS_GEMM_NARROW_NARROW_H

#include <stdint.h>

#include "gemm/paths.h"

static constexpr int NARROW_RUN = 32, NARROW_WARPS = 8; // rows that a warp has at once, and warps of a block

// D (rows x n) of A (rows x k) and B.
struct NarrowRows {
    const void *a, *b, *bias;
    void *d;
    int64_t rows;
    int k, n, stages, groups; // groups: of 16 columns of D, some of which may be beyond the last
    int b_k, b_n;             // the distances of B's elements
    float alpha;
    int relu, bias_is_float;
    int b_bytes, warp_bytes; // of shared memory: B's copy, and each warp's
};

// D (m x n) of A and B with a short k, in any storage order: the distances of elements along m, k and n. In 16 bits the
// tensor cores are faster from 5 of k on.
static constexpr int NARROW_SHORT_K = 16, NARROW_SHORT_K_OF_HALVES = 4;
static constexpr int OUTER_BLOCK_COLUMNS = 1024;
struct NarrowOuter {
    const void *a, *b, *bias;
    void *d;
    int64_t m, n, a_m, a_k, b_k, b_n, ldd;
    int k, relu, bias_is_float;
    int fours; // four neighbours of a row of D may be written at once
    float alpha;
    int fours_b;       // and of a row of B be read, along n
    int fours_b_k;     // or along k
    int lanes, across; // threads along a row of D, and blocks
    int rows;          // that a block has at once
};

// Partial sums of D (m x n) of A (rows x m) transposed and B (rows x n), a split each block.
struct NarrowColumns {
    const void *a, *b;
    float *partial;
    int64_t rows;
    int m, n, stages, warp_bytes;
    int row_step, column_step;      // of D's elements in a partial sum
    int pieces_m, tiles_m, tiles_n; // D's pieces along m, and the tiles of 16 that a piece has of m and n
};

// The pieces of D that a block's warps have the sums of, in tiles of 16, and the most of them. Tiles may be beyond the
// last column, and the loads of the last row then go on beyond its end.
static constexpr int NARROW_PIECES[][2] = {{1, 2}, {1, 4}, {2, 4}, {2, 8}, {4, 4}}, MOST_NARROW_PIECES = 4;
static inline int narrow_columns_bytes(const NarrowColumns &work, int size)
{
    const int sums = work.tiles_m * work.tiles_n * 16 * 16 * 4;
    return NARROW_WARPS * (work.warp_bytes > sums ? work.warp_bytes : sums) + 16 * 8 * size;
}

cuda_ops_status gemm_narrow_rows_bfloat16(const NarrowRows &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_rows_float16(const NarrowRows &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_rows_float32(const NarrowRows &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_outer_bfloat16(const NarrowOuter &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_outer_float16(const NarrowOuter &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_outer_float32(const NarrowOuter &work, GemmDevice device, cudaStream_t stream);
cuda_ops_status gemm_narrow_columns_bfloat16(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                             cudaStream_t stream);
cuda_ops_status gemm_narrow_columns_float16(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                            cudaStream_t stream);
cuda_ops_status gemm_narrow_columns_float32(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                            cudaStream_t stream);

#endif
