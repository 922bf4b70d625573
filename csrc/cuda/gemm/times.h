// How long the tiles of rungs 11 and 13 to 15 take, which the choice in gemm.cu goes by. Measured and written by
// `python benchmarks/tune_gemm.py` on an NVIDIA H200; not to be edited by hand.
//     microseconds = start + waves * (sum * k / 1024 + rest), a wave being as many blocks as the GPU holds at once
// m x n: the tile; cluster: its blocks that make neighbouring tiles, m and n; blocks: that an SM holds; splits: the
// most pieces that k may be cut in, and `split` what a cut costs beside the bytes of the pieces.
#ifndef CUDA_OPS_GEMM_TIMES_H
#define CUDA_OPS_GEMM_TIMES_H

struct GemmTime {
    int rung, tile, m, n, cluster_m, cluster_n, blocks, splits;
    double start, sum, rest, split;
};

// clang-format off
static const GemmTime HALVES_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  3.43, 10.07,  1.79,  3.23},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.72,  5.57,  0.30,  1.11},
    { 13,   2, 128, 192,   2,   1,   1,  32,  4.47,  7.59,  0.39,  2.35},
    { 13,   3, 128,  64,   1,   2,   1,  32,  3.00,  3.21,  0.59,  1.00},
    { 14,   0,  64,  16,   1,   1,   2,   1,  1.00,  2.33,  2.02,  0.00},
    { 14,   1,  32,  16,   1,   1,   2,   1,  1.00,  2.31,  1.77,  0.00},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.60,  2.64,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  1.08, 31.91, 16.00,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.25, 20.14,  5.43,  1.00},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.64, 11.16,  1.35,  1.00},
    { 13,   2, 128, 160,   2,   1,   1,  32,  4.00, 13.23,  1.68,  1.00},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.36,  2.34,  1.00},
    { 14,   0,  64,  16,   1,   1,   2,   1,  1.00,  6.18,  1.94,  0.00},
    { 14,   1,  32,  16,   1,   1,   2,   1,  1.00,  4.72,  1.73,  0.00},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  9.09,  1.67,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  1.00, 85.52, 14.36,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 256, 128,   1,   2,   1,  32,  2.68, 23.26,  3.98,  1.00},
    { 13,   1, 128, 128,   2,   1,   1,  32,  4.65, 14.57,  0.36,  1.02},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.08, 11.75,  1.50,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  2.43, 86.65, 11.71,  8.00},
};
// clang-format on

#endif
