// How long the tiles of rungs 11 and 13 to 15 take, which the choice in gemm.cu goes by. Measured and written by
// `python benchmarks/tune_gemm.py` on an NVIDIA H200; not to be edited by hand.
//     microseconds = start + waves * (sum * k / 1024 + rest), a wave being as many blocks as the GPU holds at once
// m x n: the tile; cluster: its blocks that make neighbouring tiles, m and n; blocks: that share an SM, rung 14's tiles
// alone and by two; splits: the most pieces that k may be cut in, and `split` what a cut costs: rung 13's beside the
// bytes of the pieces, rung 14's for each piece but the first.
#ifndef CUDA_OPS_GEMM_TIMES_H
#define CUDA_OPS_GEMM_TIMES_H

struct GemmTime {
    int rung, tile, m, n, cluster_m, cluster_n, blocks, splits;
    double start, sum, rest, split;
};

// clang-format off
static const GemmTime HALVES_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.81, 10.08,  1.59,  3.57},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.07,  5.17,  0.32,  2.00},
    { 13,   2, 128, 192,   2,   1,   1,  32,  3.71,  7.53,  0.40,  2.93},
    { 13,   3, 128,  64,   1,   2,   1,  32,  2.47,  3.11,  0.56,  1.00},
    { 13,   4, 128,  80,   2,   1,   1,  32,  1.94,  4.14,  1.28,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  1.98,  0.85,  0.22},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  2.57,  2.02,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.00,  2.01,  0.94,  0.53},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  3.50,  2.55,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.15,  2.50,  1.15,  1.24},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00,  4.50,  3.58,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.62,  2.62,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  1.86, 30.87, 15.67,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.31, 19.65,  5.29,  2.75},
    { 13,   1, 128, 128,   2,   1,   1,  32,  4.22, 10.74,  1.08,  1.00},
    { 13,   2, 128, 160,   2,   1,   1,  32,  4.05, 13.02,  1.55,  1.00},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.30,  2.65,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  4.25,  0.90,  0.10},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  7.27,  2.19,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.14,  4.32,  1.14,  0.44},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  9.40,  2.50,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.34,  5.26,  1.34,  1.82},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00, 11.91,  3.30,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.05,  9.06,  1.62,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  6.22, 100.68,  8.49,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.83, 20.00,  4.65,  1.95},
    { 13,   1, 128, 128,   2,   1,   1,  32,  4.47, 14.43,  0.38,  1.03},
    { 13,   2, 128,  64,   2,   1,   1,  32,  2.19,  7.66,  1.32,  1.02},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.14, 11.76,  1.51,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  5.40, 95.56,  9.41,  8.00},
};
// clang-format on

#endif
